--- Says whether a line of code belongs to kvlab or to the user. The files of lua/kvlab
-- and lua/models are kvlab's own: if a call to them is wrong, the mistake is the
-- caller's, so an error blames the innermost line outside of these files. Policies,
-- tasks, experiments and scripts are the user's.
local M = {}

local LUA = debug.getinfo(1, "S").source:match "^(@.*)kvlab/house%.lua$"
local FOLDERS = { LUA .. "kvlab/", LUA .. "models/" }

--- Whether a function is part of kvlab, by its source.
---@param source string  of debug.getinfo
---@return boolean
function M.has(source)
  for i = 1, #FOLDERS do
    local folder = FOLDERS[i]
    if source:sub(1, #folder) == folder then return true end
  end
  return false
end

return M
