--- Least frequently used: the block that the fewest steps have selected since it came
-- into the hot cache leaves; of equal ones, the least recently used.
-- Reads   uses
-- Cost    none: the runtime counts anyway, and nothing is launched
-- Fails   after a change of topic: blocks of the old topic have many uses and stay, while
--         those of the new one push each other out
local kv = require "kvlab"

return kv.eviction.define { name = "lfu", priority = function(uses) return uses end }
