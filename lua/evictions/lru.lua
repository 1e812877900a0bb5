--- Least recently used: the block that no step has selected for the longest time leaves.
-- Reads   nothing: the runtime keeps the slots in this order anyway
-- Cost    none
-- Fails   where a selection comes back after more blocks than there are slots, in turn:
--         each block leaves just before it is needed again
local kv = require "kvlab"

return kv.eviction.define { name = "lru" }
