--- NSA: an indexer with its own small keys scores every token, and attention reads the
-- tokens (or blocks) with the best scores. All heads share one list.
-- Source  the sparse attention of DeepSeek-V3.2 (DSA), which SGLang's backend calls NSA.
--         DSA trains its indexer on projections of the hidden state, weighs its heads by
--         each query and rotates the keys (Hadamard). With index = "model", for a model
--         that was trained with DSA, this policy reads what that indexer makes. Otherwise
--         it makes the index keys from the model's own keys, all heads weigh the same
--         unless index = "given", and keys are rotated only with `rotate`;
--         kvlab/index/landmarks.lua describes the kinds that `index` may name
-- Score   sum over heads of relu(q . k). granularity = "block" scores a block by its best
--         token. granularity = "token" selects the best tokens, as DSA does, and does so
--         for each token of a prompt too; KV must then be on the device or, in decode,
--         behind a hot cache of tokens (hot_tokens). With index_layers = n only every
--         n-th layer selects, and the layers after it read the same tokens (IndexCache,
--         arXiv:2603.12201)
-- Cost    reads one byte per dim of every token's index key. With "token", attention
--         reads scattered rows of head_dim numbers. A ratio of tokens is computed for
--         each sequence: sequences of different lengths take a launch each, and no graph
--         can record the step
-- Fails   heads that want different tokens share one list, so one head can be outvoted
local kv = require "kvlab"
local count, one_of = kv.policy.count, kv.policy.one_of

local function selects_in(self, layer) return layer % self.index_layers == 0 end

local function update(self, ev)
  if selects_in(self, ev.layer) then self.landmarks:update(ev) end
end

local function compute(self, attention, ctx, out)
  if self.granularity == "block" then
    local selection, counts = self:select_blocks(ctx)
    return attention:over(selection, ctx, out), selection, counts
  end
  if selects_in(self, ctx.layer) then
    self.listed = self.landmarks:select(ctx, self.want)
  elseif not self.listed then
    error(("policy nsa: layer %d reads the tokens of layer %d, which selected none in "
      .. "this step"):format(ctx.layer, ctx.layer - ctx.layer % self.index_layers), 0)
  end
  return attention:over_tokens(self.listed, ctx, out), nil, nil, self.listed
end

return kv.policy.define {
  name = "nsa", prefill = true, decode = true, own_bytes = 0,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2, granularity = "block",
               index = "key", index_dim = 128, index_weights = {}, index_bits = 8,
               index_scale = "f32", rotate = false, index_layers = 1, seed = 0 },
  takes = { granularity = one_of("block", "token"), index_dim = count,
            index_layers = count,
            index = one_of("key", "random", "given", "model"),
            index_scale = one_of("f32", "ue8m0") },
  aliases = { index_topk = "tokens" },

  watches_prompt = function(o) return o.index == "model" end, -- it has no other keys

  init = function(self, shape)
    self.reads_index = self.index == "model"
    local size = shape.block_size
    local least = math.max(self.sink + self.recent, self.min_blocks)
    self.landmarks = kv.landmarks(shape, { index = self.index, dim = self.index_dim,
      bits = self.index_bits, scale = self.index_scale, rotate = self.rotate,
      weights = self.index_weights, seed = self.seed })
    self.want = { sink = self.sink, recent = self.recent, k = function(length)
      if self.tokens then return math.max(1, self.tokens, least * size) end
      local blocks = math.ceil(length / size)
      return math.max(1, size * kv.policy.budget_blocks(self.budget, blocks))
    end }
    if self.granularity == "token" and type(self.budget) ~= "cdata" then
      error('policy nsa: granularity is "token", which takes one number of tokens for '
        .. "all layers and heads, expected a number as its budget and no split", 0)
    end
    if self.granularity == "block" and self.index_layers > 1 then
      error(('policy nsa: index_layers is %d with granularity = "block", expected 1: '
        .. "layers share lists of tokens"):format(self.index_layers), 0)
    end
    self.eager = self.granularity == "token" and not self.tokens
  end,
  step_begin = function(self) self.listed = nil end,
  on_prefill_offload = update, on_decode_offload = update,
  score = function(self, ctx) return self.landmarks:score(ctx) end,
  compute_decode = compute, compute_prefill = compute,
}
