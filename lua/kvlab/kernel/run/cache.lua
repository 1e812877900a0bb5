--- The kernels that were compiled, on disk: one file a kernel, in a private folder,
-- $XDG_CACHE_HOME/kvlab or ~/.cache/kvlab. A file's name is the hash of all that the
-- kernel was made from. It begins with a line that holds the hash of this name and of the
-- rest; a file whose hash differs is not loaded. If the folder cannot be written to, or
-- others can write to it, nothing is stored, and each process compiles its kernels again.
local bit = require "bit"
local cache_folder = require "kvlab.cache_folder"
local ffi = require "ffi"
local files = require "kvlab.files"
local library = require "kvlab.library"

local C, check = library.C, library.check
local M = {}

ffi.cdef [[
int access(const char *path, int mode);
int getpid(void);
]]
local WRITABLE = 2

local key = ffi.new "kvl_key"

--- 32 hexadecimal digits: XXH3-128.
---@param text string
function M.hash(text)
  check(C.kvl_bytes_hash(text, #text, key))
  return bit.tohex(key.hi, 16) .. bit.tohex(key.lo, 16)
end

-- The precompiled header in its folder.
M.HEADER = "cpu/expression.h.gch"

M.folder = cache_folder.path
local usable = cache_folder.usable -- nil if kernels cannot be kept there

--- The reason why kernels are not stored; nil if they are. Makes the folder if need be.
---@return string|nil
function M.problem()
  local folder = M.folder()
  if not folder then return "neither XDG_CACHE_HOME nor HOME names a folder" end
  if usable() then
    if ffi.C.access(folder, WRITABLE) == 0 then return nil end
    return ("%s cannot be written to"):format(folder)
  elseif files.real(folder) then
    return ("%s is another user's, or others can write to it"):format(folder)
  end
  return ("%s cannot be made"):format(folder)
end

-- Shipped with a bundle: read, never written.
local function shipped() return library.paths.root .. "/kernels/compiled" end

local function seal(name, image) return M.hash(name .. "\n" .. image) end

local function read(folder, name)
  local text = files.read(folder .. "/" .. name)
  local hash, image = (text or ""):match "^kvlab kernel (%x+)\n(.*)$"
  if hash and hash == seal(name, image) then return image end
end

--- The image of a stored kernel; nil if there is none, or if it is damaged.
---@param name string  the hash of what it was made from
---@return string|nil
function M.load(name)
  local folder = M.folder()
  local path = folder and folder .. "/" .. name
  if path and C.kvl_path_is_private(folder) == 1 and C.kvl_path_is_private(path) == 1 then
    local image = read(folder, name)
    if image then return image end
  end
  return read(shipped(), name)
end

--- Keeps the image of a kernel. Two processes may do so at once; a folder or disk that
-- refuses is no error.
---@param folder? string  another one than that of the cache
---@return boolean kept
function M.keep(name, image, folder)
  folder = folder or usable()
  if not folder then return false end
  local path = ("%s/%s"):format(folder, name)
  local part = ("%s.%d"):format(path, ffi.C.getpid())
  local file = io.open(part, "wb")
  if not file then return false end
  local ok = file:write("kvlab kernel ", seal(name, image), "\n", image)
  ok = file:close() and ok
  ok = ok and ffi.C.chmod(part, tonumber("600", 8)) == 0 and os.rename(part, path)
  if not ok then os.remove(part) end
  return ok and true or false
end

--- The folder of the headers that were precompiled from `text`; nil if nothing can be
-- stored.
---@param text string
---@return string|nil folder
function M.headers(text)
  local folder = M.problem() == nil and M.folder()
  return folder and ("%s/%s.headers"):format(folder, M.hash(text)) or nil
end

local function each_file(fn)
  local folder = M.folder()
  if not folder or not files.real(folder) then return end
  for _, name in ipairs(files.list(folder)) do
    if name:match "^%x+$" and #name == 32 or name:match "^%x+%.%d+$"
      or name:match "^%x+%.headers" then
      fn(folder .. "/" .. name)
    end
  end
end

--- The bytes of a file, or of the header in a folder.
local function bytes_of(path)
  local file = io.open(path:find "%.headers" and path .. "/" .. M.HEADER or path, "rb")
  local bytes = file and file:seek "end" or 0
  if file then file:close() end
  return bytes
end

--- How many kernels are stored, the bytes of these, and the bytes of precompiled headers.
---@return integer count
---@return integer bytes
function M.size()
  local count, bytes = 0, 0
  each_file(function(path)
    if not path:find "%.headers" then count = count + 1 end
    bytes = bytes + bytes_of(path)
  end)
  return count, bytes
end

--- Removes every kernel, and precompiled headers. Returns how many kernels there were.
---@return integer
function M.clear()
  local count = 0
  each_file(function(path)
    if path:find "%.headers" then os.execute(files.shell_line { "rm", "-rf", path })
    elseif os.remove(path) then count = count + 1 end
  end)
  return count
end

return M
