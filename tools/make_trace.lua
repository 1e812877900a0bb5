--- Writes lua/experiments/data/conversation_200.jsonl, which 09_trace replays by default:
-- 200 requests of generated conversations in Mooncake's format, seed 20.
--
--   ./kvlab run tools/make_trace.lua
local kv = require "kvlab"

local path = kv.paths.root .. "/lua/experiments/data/conversation_200.jsonl"
kv.trace.write(path, kv.trace.generate { requests = 200, seed = 20, rate = 3 })
print(path)
