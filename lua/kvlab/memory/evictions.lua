--- Opens the eviction of a hot cache: `evict` of kv.cache's offload names a file in a
-- folder called evictions (kvlab.named), or is what kv.eviction makes. lua/kvlab/policy/
-- eviction.lua has the contract of these files.
local named = require "kvlab.named"
local options = require "kvlab.options"
local sources = require "kvlab.sources"

local M = {}

--- What `evict` may be.
M.KIND = options.either({ "the name of an eviction", options.string[2] },
  options.like("what kv.eviction makes", "is_eviction", "keeps"))

--- Makes the eviction of a file, with options.
---@param name string
---@param given? table
---@param level integer  which caller to blame
function M.open(name, given, level)
  local make, path = named.open("evictions", "eviction", name, level + 1)
  if type(make) ~= "table" or not make.makes_eviction then
    options.fail(("the eviction %s: %s"):format(name,
      named.wrong(path, make, "what kv.eviction.define returns")), level + 1)
  end
  sources.use(path)
  return make(given)
end

--- The eviction that the option `evict` asks for; nil without one.
function M.of(evict)
  return type(evict) == "string" and M.open(evict, nil, 2) or evict
end

return M
