--- What the REPL takes as one input, which variables it leaves, and which line an error
-- names.
local feed = require("spec.prompt").feed
local locals = require "kvlab.shell.repl.locals"

describe("locals of the prompt #release", function()
  it("stay, and functions see what is assigned to them later", function()
    assert.equal("2\n1\t2\n120\nnil\n", (feed [[
local x = 1
function f() return x end
x = 2
f()
local a, b = (function() return 1, 2 end)()
a, b
local function factorial(n) return n < 2 and 1 or n * factorial(n - 1) end
factorial(5)
local c
c
]]))
  end)

  it("hide others of their name from what comes later alone, as in a chunk", function()
    local text = [[
y = "global"
local x = 1
local function f() return x, y end
local x, y = x + 10, "local"
local function g() x = x + 1 return x, y end
local function h() return h end
local p, q = f()
local r, s = g()
return p, q, r, s, x, h == h()
]]
    local expected = "1\tglobal\t12\tlocal\t12\ttrue\n"
    assert.equal(expected, (feed(text)))
    assert.equal(expected, (feed("\27[200~" .. text .. "\27[201~\n"))) -- as one chunk
    local values = { setfenv(assert(loadstring(text)), {})() }
    for i, value in ipairs(values) do values[i] = tostring(value) end
    assert.equal(expected, table.concat(values, "\t") .. "\n")
  end)

  it("may be more than 200", function()
    local lines = {}
    for i = 1, 300 do lines[i] = ("local v%d = %d"):format(i, i) end
    local text = table.concat(lines, "\n") .. "\nreturn v1 + v300"
    assert.is_nil((loadstring(text)))
    assert.equal("301\n", (feed(text)))
    assert.equal("301\n", (feed("\27[200~" .. text .. "\27[201~\n")))
  end)

  it("keep no value that a new one of the same name replaced", function()
    assert.equal("true\tnil\n", (feed [[
local big = {}
seen = setmetatable({ big }, { __mode = "v" })
local other = 1
local big = 2
_ = nil
collectgarbage() collectgarbage() print(big == 2, seen[1])
]]))
  end)

  it("are known to :who, :time, ?, and the warning of a misspelt name", function()
    local output = feed [[
local length, quest = 2, 7
:who
:time length = length + 1
lenght
:time quest
]]
    assert.matches("\nlength +number +2\n", output)
    assert.matches("\nwarning: lenght is not defined; did you mean length%?\n", output)
    assert.is_nil(output:find("policy", 1, true))
  end)

  it("leave _ the last result", function()
    assert.equal("7\n9\n14\n", (feed "local _, n = 1, 7\nn\n9\n_ + 5"))
  end)

  it("are only those outside of every block", function()
    local function same(text) assert.is_nil(locals.rewrite(text)) end
    same "do local x = 1 end"
    same "if x then local y elseif z then local w else local v end"
    same "for i = 1, 2 do local x end while true do local y break end"
    same "repeat local x until x"
    same "f(function(...) local x = ... return x end)"
    same "-- local x\n--[==[ ]] local y ]==]"
    same [==[s = "local x", 'it\'s local', [[ local y
]], [=[ ]] local z ]=] ]==]
    same "x.locals = locals.x local_y = 1"
    same "local = 5" -- Lua tells what is wrong
    same "local 5 = x"
    local N = locals.NAME
    local function becomes(text, expected)
      assert.equal(expected:gsub("@", N), (locals.rewrite(text):gsub("^ +", "")))
    end
    becomes("local x", "@.x = nil")
    becomes("local x, -- the first\n  y = 1, 2", "@.x, -- the first\n  @.y = 1, 2")
    becomes("local x = 0x1p-4..s local y", "@.x = 0x1p-4..s  @.y = nil")
    becomes("local function f() local x end local z = 1",
      "@.f = nil function f() local x end  @.z = 1")
    becomes("do local x end local é = 1e-5", "do local x end  @.é = 1e-5")
    becomes("local a = [[\nunfinished", "@.a = [[\nunfinished")
  end)
end)

describe("an input #release", function()
  local CONTINUED = [[
x = ("ab")
  :upper()
  -- the letters change places
  :reverse()
x
n = 1
  + 2
+ 3
n
if n > 9 then
  y = "yes"

else

  y = "no"
end
n
  + 4
y
function same(t)

  return t

end
same
  { 7 }
3
-1
two = 2;
= two
:help
]]

  it("goes on where the next line can only go on with it", function()
    for _, is_piped in ipairs { false, true } do
      assert.matches("^BA\n6\n10\nno\n{ 7 }\n3\n%-1\n2\n:device ",
        (feed(CONTINUED, is_piped)))
    end
  end)

  it("leaves what follows to the code that runs", function()
    assert.equal("some data\nmore\n3\n", (feed [[
io.read()
some data
print(io.read())
more
1 + 2
]]))
    assert.equal("one\ntwo\n", (feed("$ head -n 1\none\n'two'\n")))
  end)

  it("is answered before the next one is written", function()
    local path = require("spec.temporary").path()
    local executable = require("kvlab").paths.executable
    local files = require "kvlab.files"
    -- the second line is written when the answer to the first is there
    local pipe = io.popen(("{ echo '1 + 1'; timeout 60 sh -c "
      .. "'until grep -qs 2 %s; do sleep 0.01; done'; "
      .. "echo '3 + 4'; } | %s >%s 2>&1; cat %s"):format(path,
      files.shell_line { executable, "repl", "--device=cpu" }, path, path))
    assert.equal("2\n7\n", (pipe:read "*a"))
    pipe:close()
  end)

  it("may be a paste that a program marks, and is one chunk then", function()
    assert.equal("6\n", (feed("\27[200~string.rep('x', 5)\n\nlocal x = 5\n"
      .. "return x + 1\27[201~\n")))
  end)

  it("may be a paste that ends with a call, whose values are printed", function()
    local function paste(text) return feed("\27[200~" .. text .. "\27[201~\n") end
    assert.equal("2\t3\n", paste "local t = { 2, 3 }\nunpack(t)")
    assert.equal("4\n", paste "local s = 'x'\ns:rep(\n4):len( -- of it\n)")
    assert.equal("", paste "local t = { 2, 3 }\nunpack(t);")
    assert.equal("6\n", paste "local function f(x) return x end\nf(6) -- six")
    assert.equal("7\nnil\n", paste "print(7)\nprint(nil)")
    assert.equal("stdin:3: oh\n    error 'oh'\n", paste "x = 1\n\nerror 'oh'")
  end)

  it("may be a paste with a mistake: nothing of it runs, and the mistake is named",
    function()
    assert.equal("stdin:3: unexpected symbol near '='\n",
      feed "\27[200~y\nprint(y)\nbad = = 2\27[201~\n")
    assert.equal("stdin:4: unexpected symbol near ')'\n",
      feed "1;\n\27[200~x = 1\nprint(x)\n)\27[201~\n")
  end)
end)

describe("an error #release", function()
  --- Output of the REPL for an input that fails in its first line that is an error.
  local function first_line(input) return (feed(input):match "^[^\n]*\n[^\n]*") end

  it("names the line of what was typed", function()
    assert.equal("stdin:4: oh\n    error 'oh'", first_line [[
x = 1
function f(y)
  -- nothing yet
  error 'oh'
end
f(
  x)
]])
    assert.equal("stdin:5: dtype is f33, expected one of f32 f16 bf16 f8e4m3 i32 i64 u8 "
      .. "u64\n    kv.zeros('cpu', 'f33', { 2 }))", first_line [[
local kv = require "kvlab"
local t = { 1 }

print(t[1] == 2,
  kv.zeros('cpu', 'f33', { 2 }))
]])
  end)

  it("names the line where it was raised, although it was caught in between", function()
    for _, caller in ipairs { "kv.scope", "kv.lasting", "kv.graph" } do
      assert.equal("stdin:2: oh\n    error 'oh'",
        first_line(caller .. "(function()\n  error 'oh'\nend)\n"))
    end
    assert.equal("stdin:2: dtype is f33, expected one of f32 f16 bf16 f8e4m3 i32 i64 u8 "
      .. "u64\n    t = kv.zeros('cpu', 'f33', {})", first_line [[
resume = coroutine.wrap(function()
  t = kv.zeros('cpu', 'f33', {})
end)
resume()
]])
  end)

  it("names the line that built an expression", function()
    assert.matches("^stdin:3: policy x: score: sum_dim%(q%) has dimensions %[head%][^\n]*"
      .. "\n    score = e.q:sum 'dim' }$", first_line [[
e = kv.expr
kv.policy.define { name = "x", decode = true,
  score = e.q:sum 'dim' }
]])
  end)

  it("names the user's line and not one of kvlab's", function()
    for input, words in pairs {
      ["kv.model '/nowhere'"] = "/nowhere/config.json: No such file or directory",
      ["kv.from('cpu', 'f32', { { 1 }, { 2, 3 } })"] = "nested table is ragged",
      ["require('models.llama').random {}"] = "config: model_type is nil, expected llama",
      ["kv.tokenizer '/nowhere'"] = "tokenizer: /nowhere is no tokenizer.json",
      ["kv.cache {}"] = "cache: block_size is missing",
      ["kv.zeros('cpu', 'f32', { 2 }):matmul(kv.ones('cpu', 'f32', { 2 }))"] =
        "matmul: a is f32 [2]",
    } do
      local said, line = feed("\nx = 1\n" .. input):match "^([^\n]*)\n    ([^\n]*)"
      assert.equal("stdin:3: " .. words, said:sub(1, #words + 9))
      assert.equal(input, line)
    end
  end)
end)
