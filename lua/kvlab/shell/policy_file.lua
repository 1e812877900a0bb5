--- A policy of a file that the command line names, wherever it lies.
local named = require "kvlab.named"

--- Gives the policy of a file its name, under which kv.policy then finds it. Raises if
-- the file holds no policy.
---@param path string
---@return string name
return function(path)
  local chunk, problem = loadfile(path)
  if not chunk then error(problem, 0) end
  local ok, make = named.load(path, chunk)
  if not ok then error(make, 0) end
  if type(make) ~= "function" then
    error(named.wrong(path, make, "what kv.policy.define returns"), 0)
  end
  local name = make().name
  named.give("policies", name, path, make)
  return name
end
