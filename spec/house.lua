--- The house as it stands: which file of lua/, runtime/ and kernels/ needs which other,
-- read from the sources. house_spec.lua holds it to the plan; tools/house.lua draws it.
local sorted = require "kvlab.sorted"

local M = {}

local function lines_of(command)
  local pipe = assert(io.popen(command))
  local list = {}
  for line in pipe:lines() do list[#list + 1] = line end
  pipe:close()
  return list
end

local function read(path)
  local file = assert(io.open(path))
  local text = file:read "*a"
  file:close()
  return text
end

---@class spec.House
---@field files string[]                          paths from the root, sorted
---@field needs table<string, table<string, boolean>>  file -> files that it needs

local function new(root, folders, pattern)
  local house = { files = {}, needs = {}, root = root, there = {} }
  for _, path in ipairs(lines_of(("cd '%s' && find %s -name '%s' -type f | sort"):format(
    root, folders, pattern))) do
    table.insert(house.files, path)
    house.there[path], house.needs[path] = true, {}
  end
  return house
end

--- The files of lua/ and what they require, at load or later. `outside` collects modules
-- that a file of lua/kvlab requires by name and that are none of lua/kvlab.
---@param root string
---@return spec.House
function M.lua(root)
  local house = new(root, "lua", "*.lua")
  for _, path in ipairs(house.files) do
    local text = read(root .. "/" .. path):gsub("%-%-[^\n]*", "")
    for module in text:gmatch "require%s*%(?%s*[\"']([%w_.]+)[\"']" do
      local at = "lua/" .. module:gsub("%.", "/")
      local file = house.there[at .. ".lua"] and at .. ".lua" or at .. "/init.lua"
      if house.there[file] then house.needs[path][file] = true end
    end
  end
  return house
end

--- Where an include of a file may lie, in the order in which compilers look.
local function candidates(path, name)
  return { path:match "^(.*/)" .. name, "runtime/" .. name, "kernels/" .. name }
end

--- The files of runtime/ and kernels/ and what they include. A header and the source of
-- the same name are one: `x.h` stands for both.
---@param root string
---@return spec.House
function M.c(root)
  local house = new(root, "runtime kernels", "*.[ch]*")
  local function whole(path)
    local header = path:gsub("%.%w+$", ".h")
    return house.there[header] and header or path
  end
  local joined = { files = {}, needs = {}, there = {}, root = root }
  for _, path in ipairs(house.files) do
    local name = whole(path)
    if not joined.there[name] then
      table.insert(joined.files, name)
      joined.there[name], joined.needs[name] = true, {}
    end
    for include in read(root .. "/" .. path):gmatch '#include "([^"]+)"' do
      for _, candidate in ipairs(candidates(path, include)) do
        if house.there[candidate] then
          if whole(candidate) ~= name then joined.needs[name][whole(candidate)] = true end
          break
        end
      end
    end
  end
  return joined
end

--- A circle of files that need each other, or nil: { a, b, …, a }.
---@param house spec.House
---@return string[]|nil
function M.circle(house)
  local state, path = {}, {}
  local function visit(file)
    if state[file] == "done" then return nil end
    table.insert(path, file)
    if state[file] == "open" then
      while path[1] ~= file do table.remove(path, 1) end
      return path
    end
    state[file] = "open"
    for _, other in ipairs(house.files) do
      local found = house.needs[file][other] and visit(other)
      if found then return found end
    end
    state[file] = "done"
    table.remove(path)
  end
  for _, file in ipairs(house.files) do
    local found = visit(file)
    if found then return found end
  end
end

-- From the inside out: a room needs only rooms that come before it. Rooms of one line
-- stand beside each other and do not need each other.
M.LUA_ROOMS = {
  { "lua/kvlab" }, -- what everything may require
  { "lua/kvlab/report", "lua/kvlab/tensor", "lua/kvlab/text" },
  { "lua/kvlab/memory", "lua/kvlab/task" },
  { "lua/kvlab/index", "lua/kvlab/kernel/expression" },
  { "lua/kvlab/kernel/print" },
  { "lua/kvlab/kernel/run" },
  { "lua/kvlab/policy" },
  { "lua/kvlab/observe" },
  { "lua/kvlab/serve" },
  { "lua/kvlab/http" },
  { "lua/kvlab/experiment" },
  { "lua/kvlab/init.lua" },
  { "lua/kvlab/shell" },
  { "lua/policies", "lua/priorities", "lua/evictions", "lua/splits", "lua/tasks" },
  { "lua/models" },
  { "lua/experiments" },
}
M.C_ROOMS = {
  { "runtime/base.h" },
  { "kernels", "runtime/kvlab.h" },
  { "runtime/core" },
  { "runtime/cpu", "runtime/cuda", "runtime/ops", "runtime/files", "runtime/memory",
    "runtime/store", "runtime/http" },
  { "runtime/prefetch" },
  { "runtime" }, -- open.c and main.c, which know everything
}

--- The room of a file, its longest name in `rooms`: its name and its line, or nil.
---@return string|nil room, integer|nil line
function M.room(rooms, file)
  local best, best_line
  for line, names in ipairs(rooms) do
    for _, name in ipairs(names) do
      if (file == name or file:sub(1, #name + 1) == name .. "/")
        and (not best or #name > #best) then best, best_line = name, line end
    end
  end
  return best, best_line
end

--- Arrows that point outward: "a needs b", sorted.
---@param house spec.House
---@return string[]
function M.outward(house, rooms)
  local list = {}
  for _, file in ipairs(house.files) do
    local room, line = M.room(rooms, file)
    for _, other in ipairs(house.files) do
      if house.needs[file][other] then
        local other_room, other_line = M.room(rooms, other)
        if room ~= other_room and other_line >= line then
          list[#list + 1] = file .. " needs " .. other
        end
      end
    end
  end
  return list
end

--- The number of files and lines of a path. A header X.h counts together with X.c.
local function count(root, path)
  local files, n = 0, 0
  local source = path:gsub("%.h$", ".c")
  for _, name in ipairs { path, source ~= path and source or nil } do
    local file = io.open(root .. "/" .. name)
    for _ in file and file:lines() or function() end do n = n + 1 end
    files = files + (file and 1 or 0)
    if file then file:close() end
  end
  return files, n
end

---@class spec.Room
---@field files integer
---@field lines integer
---@field needs table<string, integer>  room -> how many requires or includes

--- The rooms of a plan, by name.
---@param house spec.House
---@return table<string, spec.Room>
function M.rooms(house, plan)
  local rooms = {}
  for _, file in ipairs(house.files) do
    local name = M.room(plan, file)
    local room = rooms[name] or { files = 0, lines = 0, needs = {} }
    rooms[name] = room
    local files, lines = count(house.root, file)
    room.files, room.lines = room.files + files, room.lines + lines
    for other in pairs(house.needs[file]) do
      local to = M.room(plan, other)
      if to ~= name then room.needs[to] = (room.needs[to] or 0) + 1 end
    end
  end
  return rooms
end

--- Whether a room needs another one, directly or through others.
local function reaches(rooms, from, to)
  if from == to then return true end
  for other in pairs(rooms[from] and rooms[from].needs or {}) do
    if reaches(rooms, other, to) then return true end
  end
  return false
end

--- The arrows that say everything about what the rooms need: those that do not follow
-- from others, sorted.
---@param rooms table<string, spec.Room>  without a circle
---@return { [1]: string, [2]: string }[]  from, to
function M.arrows(rooms)
  local arrows = {}
  for _, from in ipairs(sorted.keys(rooms)) do
    for _, to in ipairs(sorted.keys(rooms[from].needs)) do
      local follows = false
      for other in pairs(rooms[from].needs) do
        follows = follows or other ~= to and reaches(rooms, other, to)
      end
      if not follows then arrows[#arrows + 1] = { from, to } end
    end
  end
  return arrows
end

return M
