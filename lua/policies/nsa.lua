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
--         behind a hot cache of tokens (hot_tokens)
-- Cost    reads one byte per dim of every token's index key, or of the mean of the keys
--         of index_pool tokens, which are then selected together. With "token", attention
--         reads scattered rows of head_dim numbers. A ratio of tokens is computed for
--         each sequence: sequences of different lengths take a launch each, and no graph
--         can record the step
-- Fails   heads that want different tokens share one list, so one head can be outvoted
local kv = require "kvlab"
local count, one_of = kv.policy.count, kv.policy.one_of

local function update(self, ev) self.landmarks:update(ev) end

return kv.policy.define {
  name = "nsa", prefill = true, decode = true, own_bytes = 0,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2, granularity = "block",
               index = "key", index_dim = 128, index_weights = {}, index_bits = 8,
               index_scale = "f32", index_pool = 1, rotate = false, seed = 0 },
  takes = { granularity = one_of("block", "token"), index_dim = count, index_pool = count,
            index = one_of("key", "random", "given", "model"),
            index_scale = one_of("f32", "ue8m0") },
  aliases = { index_topk = "tokens", index_layers = "reuse_layers" },

  watches_prompt = function(o) return o.index == "model" and "blocks" end, -- of keys
  by_token = function(o) return o.granularity == "token" end,

  init = function(self, shape)
    self.reads_index = self.index == "model"
    local size = shape.block_size
    local least = math.max(self.sink + self.recent, self.min_blocks)
    self.landmarks = kv.landmarks(shape, { index = self.index, dim = self.index_dim,
      bits = self.index_bits, scale = self.index_scale, rotate = self.rotate,
      weights = self.index_weights, seed = self.seed, pool = self.index_pool })
    self.want = { sink = self.sink, recent = self.recent, k = function(length)
      if self.tokens then return math.max(1, self.tokens, least * size) end
      local blocks = math.ceil(length / size)
      return math.max(1, size * kv.policy.budget_blocks(self.budget, blocks))
    end }
    if self.by_token and type(self.budget) ~= "cdata" then
      error('policy nsa: granularity is "token", which takes one number of tokens for '
        .. "all layers and heads, expected a number as its budget and no split", 0)
    end
    self.eager = self.by_token and not self.tokens
  end,
  on_prefill_offload = update, on_decode_offload = update,
  keep_block = function(self, key, block, store)
    self.landmarks:keep(key, block, store)
  end,
  recall_block = function(self, key, block, store)
    return self.landmarks:recall(key, block, store)
  end,
  find_blocks = function(self, store, keys, n)
    return self.landmarks:find(store, keys, n)
  end,
  score = function(self, ctx) return self.landmarks:score(ctx) end,
  select_tokens = function(self, ctx) return self.landmarks:select(ctx, self.want) end,
}
