--- docs/api_lua.md and docs/api_c.md are what tools/api.lua makes of the sources now, and
-- leave nothing out.
local help = require "kvlab.shell.repl.help"
local kv = require "kvlab"
local sorted = require "kvlab.sorted"
local temporary = require "spec.temporary"

local root = kv.paths.root
if not io.open(root .. "/README.md") then return end -- a bundle has no docs

local api = assert(loadfile(root .. "/tools/api.lua"))("api")

local function read(name)
  local file = assert(io.open(root .. "/docs/" .. name))
  local text = file:read "*a"
  file:close()
  return text
end

--- The first line in which two texts differ.
local function differ(is, wanted)
  local number, next_line = 0, wanted:gmatch "([^\n]*)\n?"
  for line in is:gmatch "([^\n]*)\n?" do
    local other = next_line()
    number = number + 1
    if line ~= other then
      return ("line %d is\n  %s\nthe sources say\n  %s"):format(number, line, other)
    end
  end
  return "the sources say more"
end

describe("the API reference", function()
  for name, make in pairs { ["api_lua.md"] = api.lua_page, ["api_c.md"] = api.c_page } do
    it("has " .. name .. " as the sources say", function()
      local is, wanted = read(name), make()
      if is ~= wanted then
        error("./kvlab run tools/api.lua writes it anew: " .. differ(is, wanted), 0)
      end
    end)
  end

  it("has every function of kv, of its tables, of tensors and devices", function()
    local page = api.lua_page()
    local function check(prefix, t)
      for _, key in ipairs(sorted.keys(t)) do
        if type(t[key]) == "function" then
          local name = prefix .. key .. "("
          assert.is_true(page:find("\n" .. name, 1, true) ~= nil,
            name .. ": add its file to tools/api.lua")
        end
      end
    end
    check("kv.", kv)
    check("tensor:", require("kvlab.tensor.tensor").methods)
    check("device:", require("kvlab.tensor.device").methods)
    for _, key in ipairs(sorted.keys(kv)) do
      if type(kv[key]) == "table" then check("kv." .. key .. ".", kv[key]) end
    end
  end)

  it("says something about each of them", function()
    local at = api.lua_page():match "([^\n]*)\n    %(has no comment%)"
    assert.equal(nil, at)
  end)

  it("begins with an example, in kvlab.h, that compiles and runs", function()
    local code = {}
    for _, line in ipairs(help.read_lines(root .. "/runtime/kvlab.h")) do
      if line:find "^#ifndef" then break end
      code[#code + 1] = line:match "^ %*   (.*)"
    end
    local program = temporary.path()
    local source = assert(io.open(program .. ".c", "w"))
    source:write("#include <stdio.h>\n#include <kvlab.h>\nint main(void) {\n",
      table.concat(code, "\n"), '\nprintf("ran%s", kvl_last_error());\n}\n')
    source:close()
    local place = kv.paths.library_dir
    local checks = kv.paths.config == "hostile" and "-fsanitize=address,undefined" or ""
    local pipe = io.popen(([[cc -std=c17 -Wall -Werror %s -I'%s/runtime' -o %s %s.c \
      -L'%s' -Wl,-rpath,'%s' -lkvlab 2>&1 && %s]]):format(checks, root, program, program,
      place, place, program))
    local output = pipe:read "*a"
    pipe:close()
    assert.equal("ran", output)
  end)

  it("has every function of kvlab.h", function()
    local page = api.c_page()
    for _, name in ipairs(help.c_names()) do
      if name:find "^kvl_" then
        assert.is_true(page:find("%f[%w_]" .. name .. "%(") ~= nil, name .. " is missing")
      end
    end
  end)
end)
