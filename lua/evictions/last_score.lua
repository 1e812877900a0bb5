--- Last score: the block to which the policy gave the lowest score leaves, whether it was
-- selected or not. This is the block that the query of the present step needs least.
-- Reads   score, so the policy must select by scores
-- Cost    one launch in each layer of a step, 12 bytes for each block and KV head
-- Fails   scores of different sequences are compared as they are: a sequence with large
--         keys keeps its blocks, and the blocks of others leave
local kv = require "kvlab"

return kv.eviction.define { name = "last_score",
  priority = function(score) return score end }
