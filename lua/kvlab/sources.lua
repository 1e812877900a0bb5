--- Records which sources (files and the library) a row of an experiment is computed from.
-- The row stores a hash of the contents of each source. If a source has changed since,
-- the row is stale.
--
--   sources.read(path)   reads a file that all rows of this process depend on from now
--                        on: a config, a text. If there is no such file, they depend on
--                        that
--   sources.open(path)   opens such a file
--   sources.keep(path)   all rows depend on a file that C opens from now on: weights
--   sources.load(path)   a file of code has just been read: hashes it at once
--   sources.use(path)    the row that is being computed depends on the file: a policy
--   sources.named(module)
--                        rows depend on such a module only where they use its file
--   sources.begin()      a run of an experiment begins: forgets the hashes of data
--                        files, which may have changed since the last run
--   local used, ... = sources.collect(fn, ...)
--                        calls fn(...); returns the files that it used, then its results
--   sources.made_by(used)
--                        returns { ["lua/policies/quest.lua"] = "1f2e3d4c5b6a7988", … }:
--                        the hashes of these files, of the kept ones and of the project's
--                        Lua, and the library's build
--   sources.changed(made_by)
--                        returns the names of the sources that have changed since
--
-- Whatever computes rows reads files by this module alone (spec/lua/experiment/
-- sources_spec.lua), so that none can be forgotten.
local ffi = require "ffi"
local files = require "kvlab.files"
local library = require "kvlab.library"
local sorted = require "kvlab.sorted"

local C = library.C
local M = {}

local kept = {}      -- the paths that all rows depend on
local used           -- the paths that the present row depends on
local of_code = {}   -- hashes of code by path, taken when the code was loaded
local of_read = {}   -- hashes of other files by path, of the text that was read last
local of_data = {}   -- hashes of files on the disk by path, taken since the run began
local ABSENT = "absent" -- in place of the hash of a file that cannot be read

--- Returns the name that a row gives to a file: for a file of the project, its path from
-- the project's root.
local function name_of(path)
  local root = library.paths.root .. "/"
  return path:sub(1, #root) == root and path:sub(#root + 1) or (path:gsub("^%./", ""))
end

local function path_of(name)
  if name:sub(1, 1) == "/" then return name end
  local file = io.open(name)
  if not file then return library.paths.root .. "/" .. name end
  file:close()
  return name
end

local out_hash = ffi.new "kvl_key[1]"

--- Returns a hash of the contents of files, sixteen digits; nil if one cannot be read.
local function hash_of(paths)
  local list = ffi.new("const char *[?]", #paths + 1)
  for i, path in ipairs(paths) do list[i - 1] = path end
  if C.kvl_files_hash(list, #paths, out_hash) < 0 then return nil end
  return bit.tohex(out_hash[0].lo, 16)
end

--- Returns the hash of a file that consists of `text`.
local function hash_text(text)
  local length = ffi.string(ffi.new("uint64_t[1]", #text), 8) -- as kvl_files_hash ends
  library.check(C.kvl_bytes_hash(text .. length, #text + 8, out_hash))
  return bit.tohex(out_hash[0].lo, 16)
end

local function hash_file(path)
  of_data[path] = of_code[path] or of_data[path] or hash_of { path } or ABSENT
  return of_data[path]
end

function M.begin() of_data = {} end
function M.load(path) of_code[path] = hash_of { path } end

--- Notes that the row that is being computed depends on a file.
function M.use(path)
  if used then used[path] = true end
end

--- Notes that every row that this process computes from now on depends on a file. The
-- file is hashed when the first such row is finished.
function M.keep(path) kept[path] = true end

--- Reads a file that every row of this process depends on from now on. If there is no
-- such file, the rows depend on its absence.
---@param path string
---@return string|nil text
---@return string|nil why   there is no text
function M.read(path)
  M.keep(path)
  local file, why = io.open(path, "rb")
  local text
  if file then
    local problem
    text, problem = file:read "*a" -- a folder can be opened, but not read
    file:close()
    why = problem and ("%s: %s"):format(path, problem)
  end
  of_read[path] = text and hash_text(text) or ABSENT
  return text, why
end

--- Opens a file for reading that every row of this process depends on from now on. It is
-- hashed when the first such row is finished.
---@param path string
---@return file*|nil file
---@return string|nil why
function M.open(path)
  M.keep(path)
  return io.open(path, "rb")
end

--- Calls fn(...). Returns the set of files that it used, and its results. Inside another
-- collect, the files count as used by the outer one too. After an error, call stop().
---@param fn function
---@return table<string, boolean> used
---@return any …
function M.collect(fn, ...)
  local outer, mine = used, {}
  used = mine
  local function finish(...)
    used = outer
    for path in pairs(mine) do M.use(path) end
    return mine, ...
  end
  return finish(fn(...))
end

--- Ends all collects, after an error in one of them.
function M.stop() used = nil end

--- Notes that the present row depends on the files that an earlier collect returned.
---@param earlier table<string, boolean>
function M.use_all(earlier)
  for path in pairs(earlier) do M.use(path) end
end

--- Returns the files of the project's Lua that every row may depend on. Policies,
-- priorities, evictions and experiments are not among them, because rows name those one
-- by one.
local function lua_files()
  local paths = files.find(library.paths.root .. "/lua/kvlab", ".lua")
  for _, path in ipairs(files.find(library.paths.root .. "/lua/models", ".lua")) do
    paths[#paths + 1] = path
  end
  return paths
end

local lua_hash -- of the files at their first use in this process

local function hash_lua()
  lua_hash = lua_hash or hash_of(lua_files()) or ""
  return lua_hash
end

--- Returns a text that identifies the build of the library and of the device's plug-in;
-- nil if no device was opened.
local function build_text()
  local devices = package.loaded["kvlab.tensor.device"]
  return devices and ffi.string(C.kvl_device_build(devices.device())) or nil
end

local module_paths = {} -- of script_modules, by module; false for those that do not count

--- Notes that rows do not depend on a module just because it was loaded: a policy, say,
-- whose file is used by the rows of that policy alone, but is read to list all policies.
---@param module string
function M.named(module) module_paths[module] = false end

--- Returns the file of a module that a script loaded; false for those that rows name in
-- another way (the project's policies, say) and those that are installed in /usr.
local function path_of_module(module)
  local own = library.paths.root .. "/lua/"
  local path = package.searchpath(module, package.path)
  return path and path:sub(1, #own) ~= own and not path:find "^/usr/" and path or false
end

--- Returns the files of the modules that a script loaded.
local function script_modules()
  local paths = {}
  for module in pairs(package.loaded) do
    if module_paths[module] == nil then
      module_paths[module] = path_of_module(module)
    end
    paths[#paths + 1] = module_paths[module] or nil
  end
  return paths
end

--- Returns the hashes of all sources of a row that used these files, by name.
---@param row_used? table<string, boolean>
---@return table<string, string>
function M.made_by(row_used)
  local made_by = { lua = hash_lua(), library = build_text() }
  local function add(path)
    made_by[name_of(path)] = of_read[path] or hash_file(path)
  end
  for path in pairs(row_used or {}) do add(path) end
  for path in pairs(kept) do add(path) end
  for _, path in ipairs(script_modules()) do add(path) end
  return made_by
end

--- Returns the present hash of a source.
local function now(name)
  if name == "lua" then return hash_lua() end
  if name == "library" then return build_text() end
  return hash_file(path_of(name))
end

--- Returns the sorted names of the sources that have changed since the row was computed.
---@param made_by table<string, string>
---@return string[]
function M.changed(made_by)
  local changed = {}
  for _, name in ipairs(sorted.keys(made_by)) do
    if now(name) ~= made_by[name] then changed[#changed + 1] = name end
  end
  return changed
end

--- Returns the sorted names of the sources that differ between two rows. A source that
-- only one of them has does not count, because the rows then computed different things.
---@param a table<string, string>
---@param b table<string, string>
---@return string[]
function M.differences(a, b)
  local names = {}
  for _, name in ipairs(sorted.keys(a)) do
    if b[name] ~= nil and b[name] ~= a[name] then names[#names + 1] = name end
  end
  return names
end

return M
