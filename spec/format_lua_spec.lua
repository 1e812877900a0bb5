--- tools/format_lua.lua: what it changes, what it leaves alone, and that it is done then.
local files = require "kvlab.files"
local kv = require "kvlab"
local temporary = require "spec.temporary"

local root = kv.paths.root
local tool = root .. "/tools/format_lua.lua"
if not kv.paths.executable or not files.real(tool) then return end

local path

--- Runs the formatter on a file. Returns whether it succeeded, and what it printed.
local function run(words)
  local pipe = io.popen(("'%s' run '%s' %s '%s' 2>&1; echo $?"):format(
    kv.paths.executable, tool, words, path))
  local printed, status = pipe:read "*a":match "^(.-)(%d+)\n$"
  pipe:close()
  return status == "0", printed
end

local function formatted(text)
  files.write(path, text)
  local ok, printed = run ""
  assert.is_true(ok, printed)
  return files.read(path)
end

describe("tools/format_lua.lua #release", function()
  before_each(function() path = temporary.path() end)

  it("puts the spaces between tokens right", function()
    for wrong, right in pairs {
      ["local a=1"] = "local a = 1\n", ["f( a,b )\n"] = "f(a, b)\n",
      ["t={1,2}"] = "t = { 1, 2 }\n", ["t = { }"] = "t = {}\n",
      ["x = - y+-1 ..z"] = "x = -y + -1 .. z\n", ["if(a)then b() end"]
        = "if (a) then b() end\n", ["x = # t-1"] = "x = #t - 1\n",
      ["f {1} [2] = not  a"] = "f { 1 } [2] = not a\n", ["x = a [1] . b"]
        = "x = a[1] . b\n", ["f = function (...) return ... end"]
        = "f = function(...) return ... end\n", ["x = a\n\n\n\ny = b  \n\n"]
        = "x = a\n\ny = b\n", ["x = 2^-1e-3"] = "x = 2 ^ -1e-3\n",
      ["x = a -- c\n  -b"] = "x = a -- c\n  - b\n", ["return-1"] = "return -1\n",
    } do
      assert.equal(right, formatted(wrong))
    end
  end)

  it("leaves alone comments, strings, columns and lines", function()
    local text = [==[
-- a,b   =c
local s = "a,b" .. 'c\'=d' .. [[ x=1,2
]]   --[=[ y,z ]] ]=]
local t = { 1,  2,   3, -- three
            40, 5,   60 }
x = 0xFFULL + .5 + 1e5 + 3LL
t:f "x" { y = 1 }
]==]
    assert.equal(text, formatted(text))
  end)

  it("says with check what it would change, and changes nothing", function()
    files.write(path, "a = 1\nb=2\n")
    local ok, printed = run "check"
    assert.is_false(ok)
    assert.truthy(printed:find(path .. ":2: b = 2\n", 1, true), printed)
    assert.truthy(printed:find("1 lines differ", 1, true), printed)
    assert.equal("a = 1\nb=2\n", files.read(path))
    files.write(path, "a = 1\nb = 2\n")
    assert.same({ true, "" }, { run "check" })
  end)

  it("finds the project's files formatted", function()
    local pipe = io.popen(("'%s' run '%s' check 2>&1"):format(kv.paths.executable, tool))
    assert.equal("", (pipe:read "*a"))
    pipe:close()
  end)
end)
