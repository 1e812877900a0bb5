--- NSA: an indexer with small keys of its own scores every token, and attention looks at
-- the best of them, one list for all heads.
-- Source  the sparse attention of DeepSeek-V3.2 (DSA), which SGLang's backend calls NSA.
--         There an indexer is trained: projections of the hidden state. Here its keys are
--         made of the model's own: kvlab/index/landmarks.lua has the kinds of `index`
-- Score   sum over heads of relu(q . k). granularity = "block": blocks by their best
--         token; "token", as in DSA: the best tokens, for each token of a prompt, too.
--         Then KV has to be on the device: blocks cross a link whole
-- Cost    reads a byte a dim of every token's index key. By tokens attention reads rows
--         of head_dim that lie anywhere. A ratio by tokens is taken of each sequence: a
--         launch a sequence where their lengths differ, and no graph
-- Fails   heads that want different tokens share one list: what one finds is outvoted
local kv = require "kvlab"
local count, one_of = kv.policy.count, kv.policy.one_of

local function update(self, ev) self.landmarks:update(ev) end

local function compute(self, attention, ctx, out)
  if self.granularity == "block" then
    local selection, counts = self:select_blocks(ctx)
    return attention:over(selection, ctx, out), selection, counts
  end
  local slots = self.landmarks:select(ctx, self.want)
  return attention:over_tokens(slots, ctx, out), nil, nil, slots
end

return kv.policy.define {
  name = "nsa", prefill = true, decode = true,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2, granularity = "block",
               index = "key", index_dim = 128, index_weights = {}, index_bits = 8,
               rotate = false, seed = 0 },
  takes = { granularity = one_of("block", "token"), index_dim = count,
            index = one_of("key", "random", "given") },
  aliases = { index_topk = "tokens" },

  init = function(self, shape)
    local size = shape.block_size
    local least = math.max(self.sink + self.recent, self.min_blocks)
    self.landmarks = kv.landmarks(shape, { index = self.index, dim = self.index_dim,
      bits = self.index_bits, rotate = self.rotate, weights = self.index_weights,
      seed = self.seed })
    self.want = { sink = self.sink, recent = self.recent, k = function(length)
      if self.tokens then return math.max(1, self.tokens, least * size) end
      local blocks = math.ceil(length / size)
      return math.max(1, size * kv.policy.budget_blocks(self.budget, blocks))
    end }
    self.eager = self.granularity == "token" and not self.tokens
  end,
  on_prefill_offload = update, on_decode_offload = update,
  score = function(self, ctx) return self.landmarks:score(ctx) end,
  compute_decode = compute, compute_prefill = compute,
  score_bytes = function(self) return self.landmarks:bytes_block() end,
}
