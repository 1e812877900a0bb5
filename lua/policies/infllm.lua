--- InfLLM: represents each block by a few of its tokens.
-- Source  Xiao et al. 2024, arXiv:2402.04617. The paper takes the tokens that the queries
--         of the following tokens attend to most, and looks blocks up once for a group of
--         tokens. This policy takes the keys farthest from their block's mean, and looks
--         blocks up for every token
-- Score   the sum over the representatives of q . k. It ranks blocks as q . their mean
--         does, so one vector a block is kept; the max over the group's query heads
-- Cost    reads 1/block_size of the keys (in f32); choosing the representatives takes
--         about 20 small launches in a step that begins or fills a block
-- Fails   a key that is near the mean of its block is not found
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
