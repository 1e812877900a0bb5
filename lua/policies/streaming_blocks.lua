--- StreamingLLM by blocks: selects the first blocks and the most recent ones, whatever
-- they contain.
-- Source  StreamingLLM, Xiao et al. 2023, arXiv:2309.17453. Positions are kept here; the
--         paper re-numbers them inside its rolling cache
-- Score   the block's index, so the budget that `sink` leaves goes to the newest blocks
-- Cost    reads no keys to score. The expression e.block takes 2 to 3 times as long on a
--         CPU and 1.3 times on a GPU, as it writes scores for each KV head
-- Fails   everything between the sink and the newest blocks is lost to recall
local kv = require "kvlab"

return kv.policy.define {
  name = "streaming_blocks", prefill = false, decode = true, own_bytes = 0,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2 },

  score = function(_, ctx) return ctx:new_scores(1):arange_() end,
}
