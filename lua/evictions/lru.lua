--- Least recently used: the block that no step has selected for the longest time leaves.
-- Reads   nothing: the runtime keeps the slots in this order anyway
-- Cost    none
-- Fails   when blocks are selected in turn, and there are more of them than slots:
--         each block leaves just before it is needed again
local kv = require "kvlab"

return kv.eviction.define { name = "lru" }
