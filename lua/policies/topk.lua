--- Top-k: selects the k blocks whose mean keys are nearest to the query, in one list for
-- all heads.
-- Source  the decode-only example of the SparsePolicy guide of a nano-vllm fork
-- Score   q . mean(K); the mean over the query heads and over the KV heads
-- Cost    reads 1/block_size of the keys (in f32); no host synchronisation. With one
--         list, a block crosses a link for all KV heads or for none
-- Fails   where block_mean fails, and where heads want different blocks
local kv = require "kvlab"

return kv.policy.define {
  name = "topk", prefill = false, decode = true,
  defaults = { blocks = 8, min_blocks = 0, sink = 0, recent = 0 },

  init = function(self, shape) self.means = kv.summary.mean(shape) end,
  on_prefill_offload = function(self, ev) self.means:update(ev) end,
  on_decode_offload = function(self, ev) self.means:update(ev) end,
  score = function(self, ctx) return ctx:score_means(self.means) end,
  score_bytes = function(self) return self.means:bytes_block() end,
}
