--- InfLLM: a few representative tokens stand for each block.
-- Source  Xiao et al. 2024, arXiv:2402.04617. There those that the queries of the next
--         tokens like best, and blocks are looked up for a group of tokens; here the keys
--         farthest from their block's mean, and every token looks
-- Score   the sum over the representatives of q . k, which is q . their mean, so that one
--         vector a block is kept; the max over the group's query heads
-- Cost    reads 1/block_size of the keys (in f32); choosing takes about 20 small launches
--         in a step that begins or fills a block
-- Fails   a key that is asked for and near the mean of its block
local kv = require "kvlab"

return kv.policy.define {
  name = "infllm", prefill = false, decode = true, eager = true,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2, representatives = 4 },
  takes = { representatives = kv.policy.count },

  init = function(self, shape)
    self.far = kv.summary.representatives(shape, self.representatives)
  end,
  on_prefill_offload = function(self, ev) self.far:update(ev) end,
  on_decode_offload = function(self, ev)
    if ev.turns > 0 then self.far:update(ev) end
  end,
  score = function(self, ctx) return kv.ops.score_mean(ctx.query, self.far, ctx) end,
  score_bytes = function(self) return self.far:bytes_block() end,
}
