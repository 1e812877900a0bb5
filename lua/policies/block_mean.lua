--- Block mean: scores each block by the product of the query and the block's mean key.
-- Source  UCM's GSA represents blocks in this way (kpre, one mean per block and KV head);
--         InfLLM and NSA score against pooled keys in the same way
-- Score   q . mean(K); the max over the group's query heads
-- Cost    reads 1/block_size of the keys (in f32); no host synchronisation
-- Fails   one matching key among block_size others disappears in the average
local kv = require "kvlab"

return kv.policy.define {
  name = "block_mean", prefill = false, decode = true,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2 },

  init = function(self, shape) self.means = kv.summary.mean(shape) end,
  on_prefill_offload = function(self, ev) self.means:update(ev) end,
  on_decode_offload = function(self, ev) self.means:update(ev) end,
  score = function(self, ctx) return kv.ops.score_mean(ctx.query, self.means, ctx) end,
  score_bytes = function(self) return self.means:bytes_block() end,
}
