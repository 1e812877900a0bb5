--- Streaming: the first blocks and the most recent ones, whatever they hold.
-- Source  StreamingLLM, Xiao et al. 2023, arXiv:2309.17453 (positions are kept here, the
--         paper re-numbers them inside its rolling cache)
-- Score   the block's index, so that the budget left by sink goes to the newest blocks
-- Cost    reads no keys to score
-- Fails   whatever lies between sink and window is gone: recall of it is lost
local kv = require "kvlab"

return kv.policy.define {
  name = "streaming", prefill = false, decode = true,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2 },

  score = function(_, ctx) return ctx:new_scores(1):arange_() end,
}
