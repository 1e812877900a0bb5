--- Keeps passwords out of what kvlab writes: rows, manifests, reports and errors. Text
-- that may contain the URL of a store goes through `mask` before it is written.
local M = {}

--- Replaces user and password in every redis:// and rediss:// URL by ***. If it is not
-- clear where a password ends, too much is replaced rather than too little.
---@param value any  a text; or a table, of which you get a copy with all texts masked;
---  anything else is returned as it is
---@return any
function M.mask(value)
  if type(value) == "string" then
    if not value:find("@", 1, true) then return value end
    return (value:gsub("(rediss?://)[^/\n]*@", "%1***@")
      :gsub("(rediss?://)[^%s'\"]*@", "%1***@"))
  end
  if type(value) ~= "table" then return value end
  local copy = {}
  for key, part in pairs(value) do copy[M.mask(key)] = M.mask(part) end
  return setmetatable(copy, getmetatable(value))
end

--- Whether a text has a URL with a user or a password.
---@param text string
---@return boolean
function M.has(text) return M.mask(text) ~= text end

return M
