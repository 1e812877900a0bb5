--- build/compile_commands.json, which the build writes for clangd and other tools.
local files = require "kvlab.files"
local json = require "kvlab.json"
local root = require("kvlab.library").paths.root
local temporary = require "spec.temporary"

if not io.open(root .. "/premake5.lua") then return end -- a bundle has nothing to build

local function lines_of(command)
  local pipe, list = io.popen(command), {}
  for line in pipe:lines() do list[#list + 1] = line end
  pipe:close()
  return list
end

describe("compile_commands.json", function()
  local path = lines_of(("cd '%s' && pwd -P"):format(root))[1]
  local commands = {} -- by file

  setup(function()
    for _, entry in ipairs(json.decode(assert(files.read(
      root .. "/build/compile_commands.json")))) do
      assert.is_nil(commands[entry.file], entry.file)
      commands[entry.file] = entry
    end
  end)

  it("names every C file of runtime/ and kernels/cpu/, and nothing else", function()
    local count = 0
    for _, file in ipairs(lines_of(("cd '%s' && find runtime kernels/cpu -name '*.c'")
      :format(root))) do
      assert.truthy(commands[path .. "/" .. file], file)
      count = count + 1
    end
    for _ in pairs(commands) do count = count - 1 end
    assert.equal(0, count)
  end)

  it("has commands that compile", function()
    for _, file in ipairs { "runtime/main.c", "runtime/memory/block_pool.c",
                            "kernels/cpu/elementwise/fill.c" } do
      local entry = assert(commands[path .. "/" .. file], file)
      local output = lines_of(("cd '%s' && %s -fsyntax-only 2>&1; echo $?"):format(
        entry.directory, entry.command))
      assert.same({ "0" }, output)
    end
  end)

  it("is written anew in a clone that was moved", function()
    local folder = temporary.folder()
    local output = lines_of(([[cd '%s' && mkdir -p old/tools old/build
      cp '%s/tools/compile_commands.sh' old/tools
      printf 'all:\n\tcc -c "../runtime/a.c"\n' >old/build/Makefile
      touch old/build/kvlab.make
      old/tools/compile_commands.sh release && mv old new
      new/tools/compile_commands.sh release && cat new/build/compile_commands.json]])
      :format(folder, root))
    local entry = json.decode(table.concat(output, "\n"))[1]
    assert.equal(folder .. "/new/runtime/a.c", entry.file)
  end)
end)
