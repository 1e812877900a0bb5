--- Top-k: selects the k blocks whose mean keys are nearest to the query, in one list for
-- all heads.
-- Source  the decode-only example of the SparsePolicy guide of a nano-vllm fork
-- Score   q . mean(K); the mean over the query heads and over the KV heads
-- Cost    reads 1/block_size of the keys (in f32); no host synchronisation. With one
--         list, a block crosses a link for all KV heads or for none
-- Fails   where block_mean fails, and where heads want different blocks
local kv, e = require "kvlab", require("kvlab").expr

return kv.policy.define {
  name = "topk", prefill = false, decode = true, own_bytes = 0,
  defaults = { blocks = 8, min_blocks = 0, sink = 0, recent = 0 },

  summary = { mean = e.k:mean "token" },
  score = function(self, ctx) return ctx:score_means(self.summary.mean) end,
}
