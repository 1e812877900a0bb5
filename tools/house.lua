--- Draws the picture of docs/architecture.md that shows which rooms (groups of folders)
-- need which others, in the language of Graphviz. Arrows that follow from others are left
-- out. spec/house.lua reads the sources.
--
--   ./kvlab run tools/house.lua > house.dot && dot -Tsvg house.dot -o docs/house.svg
--   ./kvlab run tools/house.lua files [ROOT]    draws files; ROOT is another checkout
--   ./kvlab run tools/house.lua table           files of each room, and lines in hundreds
local kv = require "kvlab"
local sorted = require "kvlab.sorted"

package.path = kv.paths.root .. "/?.lua;" .. package.path
local house = require "spec.house"

local words = kv.command_line.args
local root = words[2] or kv.paths.root

local function print_rooms(name, words, rooms)
  print(("  subgraph cluster_%s { label = \"%s\"; color = gray80;"):format(name, words))
  for _, room in ipairs(sorted.keys(rooms)) do print(("    \"%s\";"):format(room)) end
  for _, arrow in ipairs(house.arrows(rooms)) do
    print(("    \"%s\" -> \"%s\";"):format(arrow[1], arrow[2]))
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
    local rooms = house.rooms(part[1], part[2])
    for _, name in ipairs(sorted.keys(rooms)) do
      print(("| `%s` | %d | %d |"):format(name, rooms[name].files,
        math.ceil(rooms[name].lines / 100) * 100))
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
  print "  label = \"The rooms of kvlab, and what they need\"; labelloc = t; fontsize = 16;"
  print_rooms("lua", "Lua", house.rooms(house.lua(root), house.LUA_ROOMS))
  print_rooms("c", "C and CUDA", house.rooms(house.c(root), house.C_ROOMS))
end
print "}"
