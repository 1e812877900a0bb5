--- Files that users know by name: policies, splits, priorities, evictions and tasks.
-- `quest` is the file quest.lua in a folder called policies. Such folders lie in the
-- project's lua/, in the working folder, and in every folder that --path=DIR and the
-- environment's KVLAB_PATH name (several are separated by colons). So your own policy can
-- live outside the project.
local command_line = require "kvlab.command_line"
local files = require "kvlab.files"
local library = require "kvlab.library"
local hint = require("kvlab.words").hint
local options = require "kvlab.options"
local sorted = require "kvlab.sorted"
local sources = require "kvlab.sources"

local M = {}

--- Whether the user's own files have names, which must not decide what a spec finds.
M.finds_own = true

local given = {} -- kind -> name -> path: files that lie in no such folder
local prepared -- the folders that package.path has

--- The folders that hold policies/, splits/ and the others: the project's first.
local function roots()
  local own = library.paths.root .. "/lua"
  local list, has = { own }, { [files.real(own)] = true }
  local user = { command_line.path or "" }
  if M.finds_own then
    user[2], user[3] = os.getenv "KVLAB_PATH" or "", "."
  end
  for folder in table.concat(user, ":"):gmatch "[^:]+" do
    local real = files.real(folder)
    if real and not has[real] then list[#list + 1], has[real] = folder, true end
  end
  return list
end

--- Lets require find the modules of the folders, after the project's.
local function prepare()
  local all = roots()
  local text = table.concat(all, ":")
  if prepared == text then return all end
  prepared = text
  for i = 2, #all do
    local pattern = all[i] .. "/?.lua"
    if not (";" .. package.path .. ";"):find(";" .. pattern .. ";", 1, true) then
      package.path = package.path .. ";" .. pattern
    end
  end
  return all
end

--- The paths of the files in all folders of a kind, by name. A name that is there twice
-- has several.
---@param kind string  "policies"
---@return table<string, string[]>
local function find_all(kind)
  local paths = {}
  for _, root in ipairs(prepare()) do
    local folder = root .. "/" .. kind
    for _, file in ipairs(files.list(folder)) do
      local name = file:match "^([%w_]+)%.lua$"
      if name then
        paths[name] = paths[name] or {}
        table.insert(paths[name], folder .. "/" .. file)
      end
    end
  end
  for name, path in pairs(given[kind] or {}) do paths[name] = { path } end
  return paths
end

--- The paths of one name, without a look at the others: listing a folder takes
-- milliseconds, and servers open policies for their clients.
---@return string[]
local function find(kind, name)
  local own = given[kind] and given[kind][name]
  if own then return { own } end
  if type(name) ~= "string" or not name:find "^[%w_]+$" then return {} end
  local paths = {}
  for _, root in ipairs(prepare()) do
    local path = ("%s/%s/%s.lua"):format(root, kind, name)
    if files.real(path) then paths[#paths + 1] = path end
  end
  return paths
end

--- Registers a file, wherever it lies, under a name. No other file has this name
-- afterwards.
---@param kind string  "policies"
---@param name string
---@param path string
---@param value any    what the file returned
function M.give(kind, name, path, value)
  given[kind] = given[kind] or {}
  given[kind][name] = path
  package.loaded[kind .. "." .. name] = value
end

--- The names of a kind, sorted.
---@param kind string  "policies" or "priorities"
---@return string[]
function M.list(kind) return sorted.keys(find_all(kind)) end

--- The file of a name, the first if there are several; nil where there is none.
---@param kind string
---@param name string
---@return string|nil
function M.path_of(kind, name)
  return find(kind, name)[1]
end

--- The words of an error about what a file returned.
---@param expected string
function M.wrong(path, value, expected)
  local is_nothing = value == nil or value == true -- require makes true of nothing
  return ("%s returns %s, expected %s"):format(path,
    is_nothing and "nothing" or options.shown(value), expected)
end

--- Calls fn(...), which runs the file `path`: pcall's results. An error has a position in
-- the file. `return define {…}` is a tail call, which leaves no trace of the file, so the
-- position that its error has is one of a caller of fn.
function M.load(path, fn, ...)
  return xpcall(fn, function(why)
    local is_there = type(why) ~= "string" or why:find(path, 1, true)
    local level, info = 2, debug.getinfo(2, "Sf")
    while info and info.func ~= M.load do
      is_there = is_there or info.source == "@" .. path
      level = level + 1
      info = debug.getinfo(level, "Sf")
    end
    if is_there then return why end
    return ("%s: %s"):format(path, why:gsub("^[^\n:]+:%d+: ", ""))
  end, ...)
end

--- What the file of a name returns, and its path. Raises when there is no such name, or
-- two files have it.
---@param kind string   "policies"
---@param what string   "policy", for the error
---@param name any
---@param level integer  which caller to blame
---@return any value, string path
function M.open(kind, what, name, level)
  local found = find(kind, name)
  if not found[1] then
    local names = M.list(kind)
    options.fail(("no %s \"%s\"%s There are %s"):format(what, tostring(name),
      hint(name, names, "; did you mean \"%s\"?"):gsub("^$", "."),
      table.concat(names, ", ")), level + 2)
  elseif found[2] then
    options.fail(("there are several %s \"%s\": %s; rename one"):format(kind, name,
      table.concat(found, " and ")), level + 2)
  end
  local module = kind .. "." .. name
  sources.named(module)
  local ok, value = M.load(found[1], require, module)
  if ok then return value, found[1] end
  package.loaded[module] = nil -- else the next try would be told of a loop, not the cause
  if tostring(value):find("interrupted", 1, true) then error(value, 0) end
  error(("%s %s cannot be loaded: %s"):format(what, name,
    tostring(value):gsub("^error loading module [^\n]*\n%s*", "")), 0)
end

return M
