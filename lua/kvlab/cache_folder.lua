--- The private folder for what can be made or fetched again: $XDG_CACHE_HOME/kvlab or
-- ~/.cache/kvlab.
local ffi = require "ffi"
local files = require "kvlab.files"
local library = require "kvlab.library"

local M = {}

ffi.cdef "int chmod(const char *path, unsigned mode);"

--- The folder; nil if there is no home for it.
---@return string|nil
function M.path()
  local base = os.getenv "XDG_CACHE_HOME"
  if not base or base:sub(1, 1) ~= "/" then
    local home = os.getenv "HOME"
    if not home or home == "" then return nil end
    base = home .. "/.cache"
  end
  return base .. "/kvlab"
end

--- The folder, made if need be; nil if it is not private.
---@return string|nil
function M.usable()
  local folder = M.path()
  if not folder then return nil end
  if not files.real(folder) then
    files.make_folder(folder)
    ffi.C.chmod(folder, tonumber("700", 8))
  end
  return library.C.kvl_path_is_private(folder) == 1 and folder or nil
end

return M
