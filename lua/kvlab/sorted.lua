--- Tables in a fixed order.
local M = {}

--- The keys of a table in a fixed order: by their text.
---@param map table
---@return any[]
function M.keys(map)
  local keys = {}
  for key in pairs(map) do keys[#keys + 1] = key end
  table.sort(keys, function(a, b) return tostring(a) < tostring(b) end)
  return keys
end

return M
