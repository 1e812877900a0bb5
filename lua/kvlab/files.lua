--- Reads and writes whole files, makes and lists folders, and quotes words for a shell.
local ffi = require "ffi"

local C = ffi.C
local M = {}

ffi.cdef [[
int mkdir(const char *path, unsigned mode);
int fsync(int descriptor);
int fileno(void *file);
char *realpath(const char *path, char *resolved);
void free(void *memory);
char *strerror(int number);
typedef struct {
  uint64_t inode;
  int64_t offset;
  uint16_t bytes;
  uint8_t kind;
  char name[256];
} kvl_files_entry; /* struct dirent of 64-bit Linux */
void *opendir(const char *path);
kvl_files_entry *readdir(void *folder);
int closedir(void *folder);
]]
local UNKNOWN, FOLDER, FILE = 0, 4, 8 -- kinds of entries; some file systems know none

--- Makes a folder and the folders above it, unless they exist.
---@param folder string
function M.make_folder(folder)
  for at in (folder .. "/"):gmatch "()/" do
    local part = folder:sub(1, at - 1)
    if part ~= "" then C.mkdir(part, tonumber("777", 8)) end
  end
end

--- The path without links, from the root; nil when there is no such file or folder.
---@param path string
---@return string|nil
function M.real(path)
  local resolved = C.realpath(path, nil)
  if resolved == nil then return nil end
  local text = ffi.string(resolved)
  C.free(resolved)
  return text
end

--- Returns the contents of a file; nil if it cannot be read.
---@param path string
---@return string|nil
function M.read(path)
  local file = io.open(path, "rb")
  local text = file and file:read "*a"
  if file then file:close() end
  return text
end

local EINVAL = 22

--- Whether a path is a device or a pipe; no file may be renamed onto these.
local function is_special(path)
  local file = io.open(path, "r+b")
  if not file then return false end
  local is_so = C.fsync(C.fileno(file)) ~= 0 and ffi.errno() == EINVAL
  file:close()
  return is_so
end

--- Writes pieces into an open file and closes it. Returns nil and the reason if a part of
-- them may be missing.
local function fill(file, pieces, is_synced)
  local ok, problem, piece = true, nil, pieces()
  while ok and piece do
    ok, problem = file:write(piece)
    piece = ok and pieces()
  end
  if ok then ok, problem = file:flush() end
  if ok and is_synced and C.fsync(C.fileno(file)) ~= 0 then
    ok, problem = nil, ffi.string(C.strerror(ffi.errno()))
  end
  local is_closed, why = file:close()
  if ok and not is_closed then ok, problem = nil, why end
  return ok, problem
end

local function fail(path, problem) error(path .. " cannot be written: " .. problem, 0) end

--- Writes a file in one step: at any instant, even after a kill, the file holds either
-- the old text or the new one. Raises if not all of it can be written, as on a full
-- disk. A device or a pipe is written to directly.
---@param path string
---@param pieces fun(): string|nil  gives the text piece by piece, then nil
function M.write_pieces(path, pieces)
  local special = is_special(path)
  local to = special and path or path .. ".part"
  local file, problem = io.open(to, "wb")
  if not file then fail(path, problem:sub(#to + 3)) end
  local was_called, ok, why = pcall(fill, file, pieces, not special)
  if was_called and ok and not special then ok, why = os.rename(to, path) end
  if was_called and ok then return end
  if not special then os.remove(to) end
  if not was_called then error(ok, 0) end
  fail(path, why)
end

--- Adds a text to the end of a file. Raises if not all of it can be written.
---@param path string
---@param text string
function M.append(path, text)
  local file, problem = io.open(path, "ab")
  if not file then fail(path, problem:sub(#path + 3)) end
  local is_given = false
  local ok, why = fill(file, function()
    local piece = not is_given and text or nil
    is_given = true
    return piece
  end)
  if not ok then fail(path, why) end
end

--- Writes a file in one step, as write_pieces does.
---@param path string
---@param text string
function M.write(path, text)
  local left = text
  M.write_pieces(path, function()
    local piece = left
    left = nil
    return piece
  end)
end

--- Joins words into a command line for a shell, with quotes where they are needed.
---@param words string[]
---@return string
function M.shell_line(words)
  local quoted = {}
  for i, word in ipairs(words) do
    quoted[i] = word:find "^[%w%._/=,:@%%+-]+$" and word
      or "'" .. word:gsub("'", "'\\''") .. "'"
  end
  return table.concat(quoted, " ")
end

--- Calls see(name, kind) for each entry of a folder. Returns false where that is none, or
-- cannot be read.
local function each_entry(folder, see)
  local open = C.opendir(folder)
  if open == nil then return false end
  local entry = C.readdir(open)
  while entry ~= nil do
    local name = ffi.string(entry.name)
    if name ~= "." and name ~= ".." then see(name, entry.kind) end
    entry = C.readdir(open)
  end
  C.closedir(open)
  return true
end

--- Returns the sorted names in a folder; an empty list if there is no such folder.
---@param folder string
---@return string[]
function M.list(folder)
  local names = {}
  each_entry(folder, function(name) names[#names + 1] = name end)
  table.sort(names)
  return names
end

--- Returns the sorted paths of the files with this ending in a folder and all folders
-- below it. Links in it are not followed.
---@param folder string
---@param ending string  ".lua"
---@return string[]
function M.find(folder, ending)
  local paths = {}
  local function walk(at)
    return each_entry(at, function(name, kind)
      local path = at .. "/" .. name
      local is_folder = (kind == FOLDER or kind == UNKNOWN) and walk(path)
      if not is_folder and (kind == FILE or kind == UNKNOWN)
        and name:sub(-#ending) == ending then
        paths[#paths + 1] = path
      end
    end)
  end
  walk(folder)
  table.sort(paths)
  return paths
end

return M
