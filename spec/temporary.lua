--- Temporary files of specs. What is made inside a spec is removed when the spec ends,
-- passed or failed. What is made outside of one, in a setup or a `before_each`, is
-- removed at the end of the spec's file. A script that runs no specs calls `remove`.
local busted = require "busted"
local ffi = require "ffi"
local files = require "kvlab.files"

ffi.cdef [[
char *mkdtemp(char *template);
int memfd_create(const char *name, unsigned flags);
]]

local M = {}

local AT_ONCE = 500 -- a command line has an end

local root         -- of all folders of this file and of the processes that it forks
local of_spec = {} -- folders
local is_in_spec = false

local function new_folder(template)
  local path = ffi.new("char[?]", #template + 1, template)
  assert(ffi.C.mkdtemp(path) ~= nil, "no temporary folder can be made")
  return ffi.string(path)
end

local function remove_all(folders)
  while #folders > 0 do
    local words = { "rm", "-rf", "--" }
    for _ = 1, math.min(#folders, AT_ONCE) do
      words[#words + 1] = table.remove(folders)
    end
    os.execute(files.shell_line(words))
  end
end

--- Removes what was made outside of a spec.
function M.remove()
  remove_all { root }
  root = nil
end

if busted.subscribe then
  busted.subscribe({ "test", "start" }, function()
    is_in_spec = true
    return nil, true
  end)
  busted.subscribe({ "test", "end" }, function()
    is_in_spec = false
    remove_all(of_spec)
    return nil, true
  end)
  busted.subscribe({ "file", "end" }, function()
    M.remove()
    return nil, true
  end)
end

--- Makes the folder in which the others are. Forked processes leave removing to the one
-- that made it, so call this before a fork.
function M.prepare()
  root = root or new_folder((os.getenv "TMPDIR" or "/tmp") .. "/kvlab-spec-XXXXXX")
end

--- Makes an empty folder.
---@return string path
function M.folder()
  M.prepare()
  local path = new_folder(root .. "/XXXXXX")
  if is_in_spec then of_spec[#of_spec + 1] = path end
  return path
end

--- Returns the path of a file, in a folder of its own, that is not there yet.
---@param name? string
---@return string path
function M.path(name) return M.folder() .. "/" .. (name or "file") end

--- Writes a file in a folder of its own.
---@param text string
---@param name? string
---@return string path
function M.file(text, name)
  local path = M.path(name)
  local file = assert(io.open(path, "wb"))
  assert(file:write(text))
  file:close()
  return path
end

--- Returns the path of a file in memory, for texts by the thousand: to make and remove a
-- file of a disk takes longer than to write it.
---@return string path
function M.in_memory()
  local file = ffi.C.memfd_create("kvlab-spec", 0)
  assert(file >= 0, "no file in memory can be made")
  return "/proc/self/fd/" .. file
end

return M
