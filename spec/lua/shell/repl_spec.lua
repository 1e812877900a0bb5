--- The REPL from outside: fed by a pipe, and at a real terminal (tmux).
local kv = require "kvlab"
local complete = require "kvlab.shell.repl.complete"
local processes = require "spec.processes"
local temporary = require "spec.temporary"

local paths = kv.paths
local executable = paths.executable or paths.library_dir .. "/kvlab"

local function quote(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

local function ask(command)
  local pipe = io.popen(command)
  local answer = pipe:read "*a"
  pipe:close()
  return answer
end

local folder -- temporary

local function write(name, text)
  local file = assert(io.open(folder .. "/" .. name, "w"))
  file:write(text)
  file:close()
  return folder .. "/" .. name
end

--- What the REPL answers to the lines (standard output and error), and its exit status.
local function feed(lines, arguments)
  local input = write("input", lines)
  local output, status = ask(("%s %s --device=cpu <%s 2>&1; echo \"status $?\""):format(
    quote(executable), arguments or "repl", quote(input))):match "^(.*)status (%d+)\n$"
  return output, tonumber(status)
end

describe("completion #release", function()
  it("knows the models that can be fetched, and paths to others", function()
    assert.same({ "smollm2" }, (select(2, complete.candidates('kv.model "smol', {}, {}))))
    assert.same({ "smollm2" }, (select(2, complete.candidates('m = kv.model("', {}, {}))))
    local stem = paths.root .. "/lua/models/rec"
    assert.same({ paths.root .. "/lua/models/recall/",
      paths.root .. "/lua/models/recall_latent/" },
      (select(2, complete.candidates('kv.model "' .. stem, {}, {}))))
  end)

  it("passes the project's path to no shell", function()
    local root, touched = paths.root, temporary.path()
    paths.root = ('/tmp/"$(touch %s)`touch %s`\\'):format(touched, touched)
    local ok, why = pcall(complete.candidates, 'require "kvl', {}, {})
    paths.root = root
    assert.is_true(ok, why)
    assert.is_nil(io.open(touched))
  end)
end)

describe("repl #release", function()
  setup(function() folder = temporary.folder() end)

  describe("in a pipe", function()
    it("prints expressions, runs statements, goes on in the next line", function()
      local output, status = feed [[
1 + 1, "two", nil
x = 20
for i = 1, 2 do
  x = x + i
end
x
x;
= x
kv.from("cpu", "i32", { 1, 2 })
kv.policy.names(
)[1]
]]
      assert.equal("2\ttwo\tnil\n23\n23\n   1\n   2\n[i32 tensor of shape [2] on cpu]\n"
        .. "block_mean\n", output)
      assert.equal(0, status)
    end)

    it("prints kv with what is not loaded yet", function()
      assert.matches("\n  tokenizer = ", (feed "kv"))
    end)

    it("keeps results", function()
      assert.equal("7\n8\n9\n16\n9\n", (feed "7\n_ + 1\n9;\n_\n_1 + _3\n_4\n"))
      local many = ("1;\n"):rep(30) .. "_29\n_2\n"
      assert.equal("1\nwarning: _2 is not defined: the results of the last 20 inputs are "
        .. "kept\nnil\n", (feed(many)))
    end)

    it("ends when its input cannot be read", function()
      for redirection, words in pairs { ["<&-"] = "Bad file descriptor",
                                        ["</"] = "Is a directory" } do
        local output, status = ask(("%s repl --device=cpu %s 2>&1 | head -c 4000; "
          .. "echo; %s repl --device=cpu %s >/dev/null 2>&1; echo \"status $?\""):format(
          quote(executable), redirection, quote(executable), redirection))
          :match "^(.*)\nstatus (%d+)\n$"
        assert.equal("standard input cannot be read: " .. words .. "\n", output)
        assert.equal("1", status)
      end
    end)

    it("goes on after an error and tells of it with its status", function()
      local output, status = feed 'error "oh"\n)\n40 + 2\n'
      assert.equal("stdin:1: oh\n    error \"oh\"\nstdin:2: unexpected symbol near ')'\n"
        .. "42\n", output)
      assert.equal(1, status)
      assert.equal(1, select(2, feed "for i = 1, 2 do\n"))
      assert.matches("^stdin:1: 'end' expected near '<eof>'", (feed "for i = 1, 2 do"))
    end)

    it("names the line of a command of its own", function()
      local output = feed 'z = 1\n:time zz.x\n:plot {1, 2, 3} p.gif\n'
      assert.matches("\nstdin:2: attempt to index global 'zz'[^\n]*\n    :time zz.x\n",
        output)
      assert.matches("\na picture is a file that ends with [^\n]*, not %.gif", output)
    end)

    it("shows the user's line first, then the calls without its own", function()
      local output = feed [[
function make(dtype)
  local t = kv.zeros("cpu", dtype, { 2 })
  return t
end
make "f33"
]]
      assert.matches("^stdin:2: dtype is f33, expected one of [^\n]+\n"
        .. "    local t = kv.zeros%(\"cpu\", dtype, { 2 }%)\n", output)
      assert.matches("\n  stdin:2 in make\n  stdin:5\n$", output)
      assert.is_nil(output:find "repl")
      assert.is_nil(output:find "xpcall")
    end)

    it("names the line of a value that is wrong", function()
      local output = feed [[
t = kv.zeros("cpu", "f32", { 2 })
t[7]
t.sofmax -- misspelt
kv.polcy.names()
1 + 1 -- two
]]
      assert.matches("^stdin:2: t%[7%]: entry 7[^\n]*\n    t%[7%]\nstdin:3: ", output)
      assert.matches("\nstdin:4: kv has no polcy; did you mean policy%?\n    kv%.polcy",
        output)
      assert.matches("\n2\n$", output)
    end)

    it("names a table that is raised", function()
      assert.equal("stdin:1: { code = 7 }\n    error { code = 7 }\n",
        (feed "error { code = 7 }"))
    end)

    it("warns once an input of a global that nobody set", function()
      assert.equal("warning: lenght is not defined; did you mean length?\nnil\tnil\n",
        (feed "length = 1\nlenght, lenght\n"))
    end)

    it("shows nested tables to a depth, and cycles by their path", function()
      assert.equal('{ 1, { a = { b = {…} } }, "x\\n", [true] = 2 }\n',
        (feed '{ 1, { a = { b = { c = 1 } } }, "x\\n", [true] = 2 }'))
      assert.equal("{ a = { b = <cycle: _.a>, up = <cycle: _> } }\n",
        (feed "t = { a = {} } t.a.up = t t.a.b = t.a\nt\n"))
      assert.equal("{ f32 [2, 3] on cpu }\n", (feed '{ kv.zeros("cpu", "f32", {2, 3}) }'))
      assert.matches("… 900 more\n}\n$",
        (feed "t = {} for i = 1, 1000 do t[i] = i end\nt"))
    end)

    it("has neither prompts nor colours", function()
      local output = feed "{ 'x', 1 }\nerror 'x'\n"
      assert.is_nil(output:find "\27")
      assert.is_nil(output:find "%[1%]")
    end)

    it("runs shell commands", function()
      assert.equal("hello\n", (feed "$ echo hello"))
    end)
  end)

  describe("help", function()
    it("has the doc comment of a function, with its signature", function()
      local output = feed "?kv.randn"
      assert.matches("^kv.randn%(dev, dtype, shape, o%)\nMakes a tensor of normally"
        .. " distributed numbers%. A seed", output)
      assert.matches("\nlua/kvlab/tensor/tensor.lua:%d+\n$", output)
      assert.matches("^tensor:topk%(t, k, smallest, by_index%)\nThe k largest",
        (feed "?tensor:topk"))
      assert.matches("^kv.ops.rmsnorm%(x, weight, eps, out, residual%)\nx / rms",
        (feed "?rmsnorm"))
    end)

    it("has the shapes and the prototype of a C function", function()
      local output = feed "?kv.C.kvl_topk"
      assert.matches("values   like a   %[rows, k%]", output)
      assert.matches("\nint kvl_topk%(const kvl_tensor %*a", output)
      assert.equal(output, (feed "?kvl_topk"))
      assert.matches("Score every block.*int kvl_score_mean%(", (feed "?kvl_score_mean"))
      assert.matches("^/%* out = softmax.*\n} kvl_attention;\n", (feed "?kvl_attention"))
    end)

    it("lists the policies and shows each with its options", function()
      local output = feed "?policy"
      for _, name in ipairs(kv.policy.names()) do
        assert.matches("%f[^\n%z]" .. name .. " +%S", output)
      end
      output = feed "?quest"
      assert.matches("^Quest: an upper bound", output)
      assert.matches("\noptions  .*ratio=0.1", output)
    end)

    it("has modules, and names the nearest to what is not there", function()
      assert.matches("^Block summaries:.*\nfunctions: keys mean minmax",
        (feed "?kv.summary"))
      assert.equal("nothing is called kv.rmsnrom; did you mean rmsnorm?\n",
        (feed "?kv.rmsnrom"))
      assert.equal("nothing is called kv.longbnech; did you mean longbench?\n",
        (feed "?kv.longbnech"))
      assert.equal("nothing is called kv.polcy; did you mean policy?\n"
        .. "nothing is called tensor:sofmtax; did you mean softmax?\n"
        .. "nothing is called kvl_sofmtax; did you mean kvl_softmax?\n"
        .. "nothing is called tensor:foo\nnothing is called maen; did you mean mean?\n",
        (feed "?kv.polcy\n?tensor:sofmtax\n?kvl_sofmtax\n?tensor:foo\n?maen"))
    end)
  end)

  describe("commands", function()
    it("name the nearest to an unknown one", function()
      assert.equal("no command :timed; did you mean :time?\n", (feed ":timed 1"))
    end)

    it("time short code many times, long code once", function()
      local runs, n = (feed "n = 0\n:time n = n + 1\nn"):match(
        "^%S+ [num]?s, the median of (%d+) runs; the best %S+ [num]?s\n(%d+)\n$")
      assert.equal(n, runs)
      assert.is_true(tonumber(n) > 1)
      assert.matches("^%S+ m?s\n1\n$",
        (feed "n = 0\n:time n = n + 1; os.execute 'sleep 0.2'\nn"))
    end)

    it("time the kernels of an expression, a map or a policy", function()
      local output = feed [[
e = kv.expr
z = e.const("f32", "z", "bit"):sum "bit"
:time e.k:mean "token"
:time (e.q * e.k):sum "dim":max("token", "head")
:time kv.kernel.map(function(x) return x * e.param "y" + z end)
p = { name = "x", decode = true, summary = { n = e.tokens }, score = e.n }
:time kv.policy.define(p)()
]]
      local kinds, row = {}, "^(%a+) +%S+ %a+ +%S+ %a+ +(%S+ %a+) +%S+ %a+$"
      for line in output:gmatch "[^\n]+" do
        local kind, bytes = line:match(row)
        if kind then kinds[#kinds + 1] = kind .. " " .. bytes end
      end
      assert.same({ "summary 68 MiB", "score 64.03 MiB", "mapped 64 KiB",
                    "summary 32 KiB", "score 64 KiB" }, kinds, output)
      assert.matches("\none sequence of 16384 tokens on cpu: f32, 8 KV heads, group 4, "
        .. "head_dim 128, blocks of 16\n", output)
    end)

    it("show the kernels of an expression, a map, a policy or a source text", function()
      local output = feed [[
e = kv.expr
:kernel e.k:max "token"
:kernel kv.kernel.map(function(x) return x * 2 end)
text = "void s(const float *x, int64_t n) {}"
:kernel kv.kernel.source { name = "s", arguments = { "x f32 [n]" }, c = text }
:kernel e.weight:sum "token":mean "head"
:kernel quest
:kernel 7
:kernel e.q
:kernel magicpig
:time magicpig
:time no_such_thing
:time "oracle"
:time kv.policy "oracle"
:kernel
]]
      assert.equal("/* A kernel that kvlab generated.\n * value = max_token(k) */\n",
        output:match "^[^\n]*\n[^\n]*\n")
      assert.matches("\n %* out = x %* 2 %*/\n", output)
      assert.matches("\nstatic void s%(const float %*x, int64_t n%);\n", output)
      assert.matches("\n %* out = mean_head%(sum_token%(", output)
      assert.matches('\n#include "cpu/attention/emission.h"\n', output) -- of a prefill
      assert.matches("\npolicy quest has no expressions: its kernels are ops\n", output)
      assert.matches("\n:kernel takes an expression, a map, a policy or a kernel of "
        .. "source text, given a number\n", output)
      assert.matches("\n %* add = log_weights %*/\n", output)
      assert.matches("\npolicy magicpig has kernels inside of attention alone: ", output)
      assert.matches('\nno policy "no_such_thing"', output)
      local refused = "policy oracle has no expressions: its kernels are ops\n"
      assert.matches("\n" .. refused .. refused, output)
      assert.matches("score: q has dimensions %[head, dim%], expected none", output)
      assert.matches("\n:kernel needs an expression, a map or a policy\n$", output)
    end)

    it("count memory and the blocks of caches", function()
      local output = feed [[
t = kv.zeros("cpu", "u8", { 1024 * 1024 })
c = kv.cache { layers = 2, blocks = 10, block_size = 16, kv_heads = 2, head_dim = 32 }
s = c:sequence()
s:extend(33)
s:truncate(16)
:mem
c:close()
:mem
]]
      assert.matches("cpu +1.078 MiB", output)
      assert.matches("cpu +device +2 +10 +9 +16 +bf16 +80 KiB +8 KiB +24 KiB +0 bytes"
        .. " +0 bytes", output)
      assert.equal(1, select(2, output:gsub("KV pool", "")))
    end)

    it("list the session's variables", function()
      local output = feed 'a = kv.zeros("cpu", "f16", { 2, 3 })\nb = { 1, 2 }\n1\n:who'
      assert.equal([[
1
name  type                      size
----------------------------------------
a     tensor f16 [2, 3] on cpu  12 bytes
b     table                     2 entries
]], (output:gsub("%-+\n", ("-"):rep(40) .. "\n")))
    end)

    it("name the devices", function()
      assert.matches("%*  cpu +%S", (feed ":device"))
      assert.matches("nowhere", (feed ":device nowhere"))
    end)

    it("draw a matrix as characters, each the mean of what it stands for", function()
      assert.equal([[
      0          ....::::
      1  ----====++++****
      2  ####%%%%@@@@@@@@
         0 (blank) ... 11
]], (feed ':plot kv.arange("cpu", "f32", 12):reshape { 3, 4 }'))
      local output = feed ':plot kv.full("cpu", "f32", { 80, 138 }, 2)'
      assert.equal(41, select(2, output:gsub("\n", "")))
      assert.matches("2 %(blank%) ... 2, means of 2 x 2 numbers", output)
      assert.matches("given 3: t:index",
        (feed ':plot kv.ones("cpu", "f32", { 1, 2, 3 })'))
      assert.matches("given a number", (feed ":plot 1"))
    end)

    it("draw what is a plot already, such as the maps of a record", function()
      local output = feed [[
panel = { title = "quest", values = { 2, 9 } }
map = { rows = 1, columns = 2, low = 1, high = 9, row_names = { "late" },
        panels = { panel } }
:plot require("kvlab.report.plot").heat_map(map)]]
      assert.equal("quest\n   late  ....@@@@\n         1 (blank) ... 9\n", output)
    end)

    it("draw lines and SVG files through gnuplot", function()
      if not ask("command -v gnuplot"):find "%S" then return pending "no gnuplot" end
      assert.matches("|.*A.*|", (feed ":plot { 1, 4, 9, 16 }"))
      for _, shape in ipairs { "{ 12 }", "{ 3, 4 }" } do
        local file = folder .. "/picture.svg"
        feed((':plot kv.rand("cpu", "f32", %s) %s'):format(shape, file))
        assert.matches("^<%?xml.*</svg>%s*$", assert(io.open(file)):read "*a")
        os.remove(file)
      end
      for ending, start in pairs { pdf = "^%%PDF", png = "^\137PNG" } do
        local file = folder .. "/picture." .. ending
        assert.matches(file, (feed(":plot { 3, 4 } " .. file)), 1, true)
        assert.matches(start, assert(io.open(file)):read "*a")
        os.remove(file)
      end
    end)
  end)

  describe("kv.reload", function()
    it("gives the new module, or leaves the old one where the file is wrong", function()
      write("changing.lua", "return { number = 1 }")
      local output, status = feed(([[
package.path = package.path .. ";%s/?.lua"
m = require "changing"
function write(text) local f = io.open("%s/changing.lua", "w") f:write(text) f:close() end
write "return { number = 2 }"
kv.reload("changing").number, require("changing").number, m.number
write "return {"
kv.reload "changing"
require("changing").number
]]):format(folder, folder))
      assert.matches("^2\t2\t1\nstdin:7: .*changing.lua:1: unexpected symbol.*\n2\n$",
        output)
      assert.equal(1, status)
    end)

    it("swaps a policy; what is attached keeps the old code", function()
      assert.equal("true\ttrue\tfalse\n", (feed [[
old = require "policies.quest"
new = kv.reload "policies.quest";
opened = kv.policy "quest"
new == require "policies.quest", opened.score == new().score, opened.score == old().score
]]))
      assert.matches('no module "policies.qest"; did you mean "policies.quest"%?',
        (feed 'kv.reload "policies.qest"'))
    end)
  end)

  describe("run -i", function()
    it("keeps the globals and the locals of a script", function()
      local script = write("state.lua", "local a, b = 1, { 2 }\nc = 3\n"
        .. "local function f() return b end")
      assert.equal("1\t2\t3\n2\n", (feed("a, b[1], c\nf()[1]\n", "run -i " .. script)))
      script = write("ends.lua", "local f = print\nlocal g = f -- no newline")
      assert.equal("true\n", (feed("f == g", "run -i " .. script)))
      script = write("returns.lua", "c = 3\nreturn c")
      assert.equal("3\n", (feed("c", "run -i " .. script)))
    end)

    it("keeps them as they were at an error", function()
      local script = write("wrong.lua",
        "local a = 5\nlocal function f() error 'no' end\nf()")
      local output, status = feed("a", "run -i " .. script)
      assert.matches("wrong.lua:2: no\n    local function f%(%) error 'no' end\n", output)
      assert.matches("\n5\n$", output)
      assert.equal(1, status)
      script = write("tail.lua", "c = 3\nreturn error 'no'")
      assert.equal("no\n3\n", (feed("c", "run -i " .. script)))
    end)
  end)

  describe("completion", function()
  it("knows the models that can be fetched, and paths to others", function()
    assert.same({ "smollm2" }, (select(2, complete.candidates('kv.model "smol', {}, {}))))
    assert.same({ "smollm2" }, (select(2, complete.candidates('m = kv.model("', {}, {}))))
    local stem = paths.root .. "/lua/models/rec"
    assert.same({ paths.root .. "/lua/models/recall/",
      paths.root .. "/lua/models/recall_latent/" },
      (select(2, complete.candidates('kv.model "' .. stem, {}, {}))))
  end)

    local environment = { kv = kv, t = kv.zeros("cpu", "f32", { 2 }), deep = { {} },
                          policy_of_mine = 1, s = "text", dev = kv.device "cpu" }
    environment.deep.inner = { name = 1, number = 2 }

    local function offers(before, expected, expected_suffix)
      local _, candidates, suffix = complete.candidates(before, environment,
        { "device", "mem", "time" })
      assert.equal(expected, table.concat(candidates, " "))
      if expected_suffix then assert.equal(expected_suffix, suffix) end
    end

    it("offers names, fields and methods", function()
      offers("policy_o", "policy_of_mine")
      offers("x = kv.ran", "rand randint randn")
      offers("kv.tokeniz", "tokenizer") -- not loaded yet
      offers("deep.inner.n", "name number")
      offers("f(t:narro", "narrow")
      offers("dev:sy", "sync")
      offers("s:rep", "rep")
      offers("kv.C.kvl_score_m", "kvl_score_max_qk kvl_score_mean kvl_score_minmax")
      offers("nothing.at.al", "")
      offers("deep.missing.x", "")
    end)

    it("offers what a string may be", function()
      offers('kv.policy "que', "quest", '"')
      offers("kv.policy('block_", "block_mean", "'")
      offers('kv.zeros(dev, "bf', "bf16", '"')
      offers('kv.zeros("cp', "cpu")
      offers('t:cast "f8', "f8e4m3")
      offers('t:to("cu', "cuda cuda:0")
      offers('kv.cache { format = "f3', "f32")
      offers('kv.tensor(dev, { dtype = "f3', "f32")
      offers('kv.reload "policies.que', "policies.quest")
    end)

    it("offers the options of the policy that is opened", function()
      offers('kv.policy("quest", { si', "sink", " = ")
      offers('p = kv.policy("random", { ratio = 0.1, se', "seed")
      offers('kv.policy("nowhere", { sel', "select")
    end)

    it("offers files in other strings", function()
      write("first file.lua", "")
      os.execute(("mkdir -p '%s/folder'"):format(folder))
      offers(('dofile "%s/fir'):format(folder), folder .. "/first file.lua", '"')
      local _, found, suffix = complete.candidates(('f("%s/fol'):format(folder), {}, {})
      assert.same({ folder .. "/folder/" }, found)
      assert.is_nil(suffix)
      offers(('g("a\\"b", "%s/fir'):format(folder), folder .. "/first file.lua")
    end)

    it("offers commands and topics", function()
      offers(":ti", "time", " ")
      offers("?ques", "quest")
      offers("?kvl_score_ma", "kvl_score_max_qk")
      offers("?tensor:argm", "argmax argmin")
    end)
  end)

  describe("at a terminal", function()
    local has_tmux = ask("command -v tmux"):find "%S" ~= nil
    local server = 0 -- each start has one of its own: the last may still be ending

    local function tmux(words)
      return ask(("tmux -S '%s/tmux%d' %s 2>&1"):format(folder, server, words))
    end

    local function screen(options)
      return (tmux("capture-pane -p " .. (options or "")):gsub("%s+$", ""))
    end

    --- Waits until the screen ends with a pattern.
    local function wait(pattern)
      local ok = pcall(processes.wait_until, function()
        return screen():find(pattern .. "$")
      end, "")
      if not ok then
        error(("the screen never ended with %s:\n%s"):format(pattern, screen()), 2)
      end
    end

    local function start(environment)
      tmux "kill-server"
      server = server + 1
      local command = ("env XDG_STATE_HOME=%s TERM=screen %s %s repl"):format(
        quote(folder), environment or "", quote(executable))
      tmux("-f /dev/null new-session -d -x 100 -y 200 " .. quote(command))
      wait "%[1%]"
    end

    local function keys(names) tmux("send-keys " .. names) end
    local function type_text(text) tmux("send-keys -l -- " .. quote(text)) end

    --- Types a line and waits for the prompt of the next input; what stands between.
    local function enter(text)
      local number = tonumber(screen():match "%[(%d+)%][^%[]*$")
      type_text(text)
      keys "Enter"
      wait(("%%[%d%%]"):format(number + 1))
      return screen():match(("^.*%%[%d%%] [^\n]*\n(.*)\n?%%[%d%%]$"):format(number,
        number + 1))
    end

    local function terminal_it(name, body)
      it(name, function()
        if not has_tmux then return pending "no tmux" end
        if not select(2, pcall(require("ffi").load, "libedit.so.2")) then
          return pending "no libedit"
        end
        body()
        tmux "kill-server"
      end)
    end

    terminal_it("numbers inputs, and goes on where one is not finished", function()
      start()
      assert.equal("3\n", enter "1 + 2")
      type_text "for i = 1, 2 do"
      keys "Enter"
      wait "do\n ..%s*"
      type_text "print(i * 10)"
      keys "Enter"
      assert.matches("10\n20\n$", "\n" .. (enter "end" or ""))
      assert.equal("3\n", enter "_1")
    end)

    terminal_it("completes, and lists what there is", function()
      start()
      enter 't = kv.zeros("cpu", "f32", { 2 })'
      type_text "t:narr"
      keys "Tab"
      wait "t:narrow"
      keys "C-u"
      type_text "kv.rand"
      keys "Tab"
      wait "rand +randint +randn\n%[2%] kv.rand"
      type_text "i"
      keys "Tab"
      wait "kv.randint"
      keys "C-a C-k"
      wait "%[2%]"
      keys "Tab"
      assert.equal("7\n", enter "3 + 4")
    end)

    --- Pastes text, as a terminal does that marks a paste.
    local function paste(text)
      tmux("load-buffer -b text " .. quote(write("pasted", text)))
      tmux "paste-buffer -p -b text"
    end

    terminal_it("runs a pasted block whole, and names the line of an error", function()
      start()
      paste "local a = 5\nlocal function add(x)\n\n\treturn x + a\nend\nreturn add(1)"
      wait " .. return add%(1%)"
      keys "Enter"
      wait "\n6\n%[2%]"
      paste "\nlocal b = a\nkv.zeros('cpu', 'f33', { b })\n" -- it ends with Enter
      wait "\n%[2%]:3: dtype is f33[^\n]*\n +kv.zeros[^\n]*\n%[3%]"
      assert.equal("5\n", enter "b")
      type_text "c = "
      paste "a * 2" -- no line ends: it goes on being edited
      assert.equal("", enter "" or "")
      assert.equal("10\n", enter "c")
    end)

    terminal_it("runs pasted inputs one by one where they are no chunk", function()
      start()
      paste "1 + 1\nt = { 7 }\n:who\nt[1]"
      keys "Enter"
      wait "\n7\n%[5%]"
      assert.matches("\n2\nname +type +size\n%-+\nt +table +1 entries\n7\n", screen())
      paste "x = 1\n)\nx = 2\n" -- what is wrong is found before anything runs
      wait "%[5%]:2: unexpected symbol near '%)'\n%[6%]"
      assert.matches("nil\n$", enter "x")
    end)

    terminal_it("shows expressions, their kernels and their times", function()
      start()
      enter "e = kv.expr"
      assert.equal("max_token(k)\n", enter 'e.k:max "token"')
      assert.matches("\n}\n$", enter ':kernel e.k:max "token"')
      assert.matches("^kernel +median +best +bytes +a read of as many\n%-+\nsummary .*"
        .. "\none sequence of 16384 tokens ", enter ':time e.k:max "token"')
      type_text ":ker"
      keys "Tab"
      wait ":kernel"
    end)

    terminal_it("recalls what was typed, in this session and the next", function()
      start()
      enter "x = 41"
      type_text "function f()"
      keys "Enter"
      type_text "return x"
      keys "Enter"
      wait " .."
      type_text "end"
      keys "Enter"
      wait "%[3%]"
      keys "Up"
      wait "function f%(%) return x end"
      keys "C-d C-u"
      start()
      keys "Up Up"
      wait "x = 41"
      keys "BSpace"
      type_text "2"
      keys "Enter"
      wait "%[2%]"
      keys "C-r"
      type_text "func"
      wait "function f%(%) return x end\nbck:func"
      keys "Enter"
      wait "%[3%]"
      assert.equal("42\n", enter "f()")
    end)

    terminal_it("is interrupted by Ctrl-C wherever it is, and goes on", function()
      start()
      type_text "half a li"
      keys "C-c"
      wait "interrupted\n%[2%]"
      enter 'function go() io.write "it runs" io.flush() end'
      for i, loop in ipairs {
        "go() while true do end",
        "go() repeat pcall(error) until false",
        "go() local t = {} while true do for k in pairs { 1, 2 } do t[k] = k end end",
        "go() local function f(n) return f(n + 1) end f(0)",
        'go() local t = kv.ones("cpu", "f32", { 9 }) while true do t:fill_(1) end',
        "go() coroutine.wrap(function() while true do end end)()",
        ":time go() while true do end",
      } do
        type_text(loop)
        keys "Enter"
        wait "it runs"
        keys "C-c"
        wait(("interrupted\n%%[%d%%]"):format(i + 3))
      end
      assert.equal("9\n", enter 'kv.ones("cpu", "f32", { 9 }):sum():item()')
    end)

    terminal_it("colours tables and errors, but not with NO_COLOR", function()
      start()
      enter "{ 'text', 1 }"
      assert.matches("\27%[32m\"text\"", screen "-e")
      start "NO_COLOR=1"
      enter "{ 'text', 1 }"
      enter "error 'x'"
      assert.is_nil(screen("-e"):find "\27")
    end)
  end)
end)
