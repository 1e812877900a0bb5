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
]]

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

--- Writes a file in one step: at any instant, even after a kill, the file holds either
-- the old text or the new one.
---@param path string
---@param pieces fun(): string|nil  gives the text piece by piece, then nil
function M.write_pieces(path, pieces)
  local file, problem = io.open(path .. ".part", "wb")
  if not file then error(problem, 0) end
  local ok, piece = true, pieces()
  while ok and piece do
    ok, problem = file:write(piece)
    piece = ok and pieces()
  end
  if ok then ok, problem = file:flush() end
  if ok then C.fsync(C.fileno(file)) end
  file:close()
  if ok then ok, problem = os.rename(path .. ".part", path) end
  if not ok then error(path .. " cannot be written: " .. problem, 0) end
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

--- Returns the lines that a command prints.
local function lines_of(words)
  local lines, pipe = {}, io.popen(M.shell_line(words) .. " 2>/dev/null")
  for line in pipe:lines() do lines[#lines + 1] = line end
  pipe:close()
  return lines
end

--- Returns the sorted names in a folder; an empty list if there is no such folder.
---@param folder string
---@return string[]
function M.list(folder)
  local names = lines_of { "ls", "-A", "--", folder }
  table.sort(names)
  return names
end

--- Returns the sorted paths of the files with this ending in a folder and all folders
-- below it.
---@param folder string
---@param ending string  ".lua"
---@return string[]
function M.find(folder, ending)
  local paths = lines_of { "find", "-H", folder, "-type", "f", "-name", "*" .. ending }
  table.sort(paths)
  return paths
end

return M
