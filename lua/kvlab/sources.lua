--- What numbers are computed from: files, and the library. A row of an experiment records
-- the sources that took part in it, each with a hash of its contents, so that a row whose
-- sources have changed since is known to be stale.
--
--   sources.load(path)   a file of code was just read; its hash is that of now
--   sources.use(path)    the file takes part in the row that is being computed: a policy
--   sources.keep(path)   it takes part in all rows of this process from now on: weights
--   sources.begin()      a run of an experiment begins: data may have changed since the
--                        last one
--   local used, ... = sources.collect(fn, ...)
--                        calls fn; returns the files that it used, then its results
--   sources.made_by(used)
--                        { ["lua/policies/quest.lua"] = "1f2e3d4c5b6a7988", … }: these,
--                        the kept ones, the project's Lua, and the library
--   sources.changed(made_by)
--                        the names of those that are no longer as they were
local ffi = require "ffi"
local files = require "kvlab.files"
local library = require "kvlab.library"
local sorted = require "kvlab.sorted"

local C = library.C
local M = {}

local kept = {}      -- paths
local used           -- the paths of the row that is being computed
local of_code = {}   -- hashes by path, of code as it was when it was loaded
local of_data = {}   -- and of other files, since the run began

--- The name of a file in a row: a file of the project has its path from the root.
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

--- Sixteen digits that stand for the contents of files; nil when one cannot be read.
local function hash_of(paths)
  local list = ffi.new("const char *[?]", #paths + 1)
  for i, path in ipairs(paths) do list[i - 1] = path end
  if C.kvl_files_hash(list, #paths, out_hash) < 0 then return nil end
  return bit.tohex(out_hash[0].lo, 16)
end

local function hash_file(path)
  local hash = of_code[path] or of_data[path]
  if hash == nil then
    hash = hash_of { path } or false
    of_data[path] = hash
  end
  return hash or nil
end

function M.begin() of_data = {} end
function M.load(path) of_code[path] = hash_of { path } end

--- The file takes part in the row that is being computed.
function M.use(path)
  if used then used[path] = true end
end

--- The file takes part in every row that this process computes from now on. It is hashed
-- when the first row wants to know.
function M.keep(path) kept[path] = true end

--- Calls fn(...). Returns the set of files that it used, and its results. The files
-- count as used by an outer collect, too. After an error, call stop().
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

--- No row is computed any more: an error ended the one that was.
function M.stop() used = nil end

--- What an earlier collect returned is used again.
---@param earlier table<string, boolean>
function M.use_all(earlier)
  for path in pairs(earlier) do M.use(path) end
end

--- The files of the project's Lua that every number may depend on: all but policies,
-- priorities and experiments, which are named on their own.
local function lua_files()
  local paths = files.find(library.paths.root .. "/lua/kvlab", ".lua")
  for _, path in ipairs(files.find(library.paths.root .. "/lua/models", ".lua")) do
    paths[#paths + 1] = path
  end
  return paths
end

local lua_hash -- as this process found it

local function hash_lua()
  lua_hash = lua_hash or hash_of(lua_files()) or ""
  return lua_hash
end

--- The build of the library and of the device's plug-in; nil when no device was opened.
local function build_text()
  local devices = package.loaded["kvlab.tensor.device"]
  return devices and ffi.string(C.kvl_device_build(devices.device())) or nil
end

--- The modules that a script loaded: not the project's, and not what is installed.
local function script_modules()
  local paths = {}
  for module in pairs(package.loaded) do
    local path = package.searchpath(module, package.path)
    if path and not name_of(path):find "^lua/" and not path:find "^/usr/" then
      paths[#paths + 1] = path
    end
  end
  return paths
end

--- The sources of a row that used these files, by name.
---@param row_used? table<string, boolean>
---@return table<string, string>
function M.made_by(row_used)
  local made_by = { lua = hash_lua(), library = build_text() }
  local function add(path)
    made_by[name_of(path)] = hash_file(path) or "not readable"
  end
  for path in pairs(row_used or {}) do add(path) end
  for path in pairs(kept) do add(path) end
  for _, path in ipairs(script_modules()) do add(path) end
  return made_by
end

local function now(name)
  if name == "lua" then return hash_lua() end
  if name == "library" then return build_text() end
  return hash_file(path_of(name))
end

--- The names of the sources that are no longer as they were, sorted.
---@param made_by table<string, string>
---@return string[]
function M.changed(made_by)
  local changed = {}
  for _, name in ipairs(sorted.keys(made_by)) do
    if now(name) ~= made_by[name] then changed[#changed + 1] = name end
  end
  return changed
end

--- The names of the sources that differ between two rows, sorted. A source that only one
-- of them has is no difference: they did different things.
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
