--- Quest: an upper bound of q.k over each block, from its elementwise min and max.
-- Source  Tang et al. 2024, arXiv:2406.10774. The bound takes the larger product in each
--         coordinate. (One port scores max(q.min, q.max), which is not a bound.) The
--         paper selects for every query head, always takes the last block but no sink,
--         and leaves the first two layers dense. Here a KV head selects, with `sink` and
--         `recent` blocks, in all layers; the policy layers keeps the first ones dense
-- Score   sum_d max(q_d * min_d, q_d * max_d); the max over the group's query heads
-- Cost    reads 2/block_size of the keys; no host synchronisation. As expressions
--         (docs/kernels.md) it is as fast on a GPU, but for bf16 on a CPU the summary
--         takes 1.15 times as long, the score 1.3 to 1.4 times
-- Fails   keys with a few huge coordinates make every bound loose
local kv = require "kvlab"

return kv.policy.define {
  name = "quest", prefill = false, decode = true, own_bytes = 0,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2 },

  init = function(self, shape) self.bounds = kv.summary.minmax(shape) end,
  on_prefill_offload = function(self, ev) self.bounds:update(ev) end,
  on_decode_offload = function(self, ev) self.bounds:update(ev) end,
  score = function(self, ctx) return kv.ops.score_minmax(ctx.query, self.bounds, ctx) end,
}
