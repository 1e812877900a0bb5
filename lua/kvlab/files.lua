--- Files and folders, as a whole: read, written in one step, made.
local ffi = require "ffi"

local C = ffi.C
local M = {}

ffi.cdef [[
int mkdir(const char *path, unsigned mode);
int fsync(int descriptor);
int fileno(void *file);
]]

--- Makes a folder and those above it; there is no harm in one that exists.
---@param folder string
function M.make_folder(folder)
  for at in (folder .. "/"):gmatch "()/" do
    local part = folder:sub(1, at - 1)
    if part ~= "" then C.mkdir(part, tonumber("777", 8)) end
  end
end

---@param path string
---@return string|nil  # nil when it cannot be read
function M.read(path)
  local file = io.open(path, "rb")
  local text = file and file:read "*a"
  if file then file:close() end
  return text
end

--- Writes a file in one step: readers, and a kill at any instant, see the old text or the
-- new one.
---@param path string
---@param text string
function M.write(path, text)
  local file, problem = io.open(path .. ".part", "wb")
  if not file then error(problem, 0) end
  local ok
  ok, problem = file:write(text)
  if ok then ok, problem = file:flush() end
  if ok then C.fsync(C.fileno(file)) end
  file:close()
  if ok then ok, problem = os.rename(path .. ".part", path) end
  if not ok then error(path .. " cannot be written: " .. problem, 0) end
end

return M
