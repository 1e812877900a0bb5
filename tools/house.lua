--- Draws the picture of docs/architecture.md that shows which rooms (groups of folders)
-- need which others, in the language of Graphviz. spec/house.lua reads the sources.
--
--   ./kvlab run tools/house.lua > house.dot && dot -Tsvg house.dot -o docs/house.svg
--   ./kvlab run tools/house.lua files [ROOT]    draws files; ROOT is another checkout
--   ./kvlab run tools/house.lua table           files and lines of each room
local kv = require "kvlab"
local sorted = require "kvlab.sorted"

package.path = kv.paths.root .. "/?.lua;" .. package.path
local house = require "spec.house"

local words = kv.command_line.args
local root = words[2] or kv.paths.root

--- The number of files and lines of a path. A header X.h counts together with X.c.
local function count(path)
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

--- The rooms of a plan: name -> { files, lines, needs = { name -> arrows } }.
local function rooms_of(built, plan)
  local rooms = {}
  for _, file in ipairs(built.files) do
    local name = house.room(plan, file)
    local room = rooms[name] or { files = 0, lines = 0, needs = {} }
    rooms[name] = room
    local files, lines = count(file)
    room.files, room.lines = room.files + files, room.lines + lines
    for other in pairs(built.needs[file]) do
      local to = house.room(plan, other)
      if to ~= name then room.needs[to] = (room.needs[to] or 0) + 1 end
    end
  end
  return rooms
end

local function print_rooms(name, rooms)
  print(("  subgraph cluster_%s { label = \"%s\"; color = gray80;"):format(name, name))
  for _, room in ipairs(sorted.keys(rooms)) do
    print(("    \"%s\" [label = \"%s\\n%d files, %d lines\"];"):format(room, room,
      rooms[room].files, rooms[room].lines))
    for _, other in ipairs(sorted.keys(rooms[room].needs)) do
      print(("    \"%s\" -> \"%s\" [label = \"%d\"];"):format(room, other,
        rooms[room].needs[other]))
    end
  end
  print "  }"
end

local function print_files(built)
  for _, file in ipairs(built.files) do
    for _, other in ipairs(sorted.keys(built.needs[file])) do
      print(("  \"%s\" -> \"%s\";"):format(file:match "[^/]*$", other:match "[^/]*$"))
    end
  end
end

if words[1] == "table" then
  for _, part in ipairs { { house.lua(root), house.LUA_ROOMS },
                          { house.c(root), house.C_ROOMS } } do
    local rooms = rooms_of(part[1], part[2])
    for _, name in ipairs(sorted.keys(rooms)) do
      print(("| `%s` | %d | %d |"):format(name, rooms[name].files, rooms[name].lines))
    end
  end
  return
end

print "digraph house { rankdir = TB; fontname = sans; bgcolor = white;"
print "  node [shape = box, fontname = sans, fontsize = 11, color = gray50];"
print "  edge [fontname = sans, fontsize = 9, color = gray50, fontcolor = gray50];"
if words[1] == "files" then
  print_files(house.lua(root))
else
  print_rooms("lua", rooms_of(house.lua(root), house.LUA_ROOMS))
  print_rooms("c", rooms_of(house.c(root), house.C_ROOMS))
end
print "}"
