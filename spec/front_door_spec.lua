--- The front door and the build, tried on a tiny project in a temporary folder: the real
-- scripts, premake5.lua, main.c and command line around a library of one function.
local files = require "kvlab.files"
local temporary = require "spec.temporary"
local tiny -- the folder

local function ask(command)
  local pipe = io.popen(command)
  local answer = pipe:read "*l"
  pipe:close()
  return answer
end

local here = debug.getinfo(1, "S").source:match "^@(.*)/[^/]*$"
local root = ask(("cd '%s/..' && pwd"):format(here))

local function write(name, text)
  local file = assert(io.open(tiny .. "/" .. name, "w"))
  file:write(text)
  file:close()
end

--- Runs a shell command in the tiny project; returns its status and all it printed.
local function sh(command)
  local wrapped = ("cd '%s' && { %s\n} 2>&1; echo \"status $?\""):format(tiny, command)
  local pipe = io.popen(wrapped)
  local output, status = pipe:read("*a"):match("^(.-)status (%d+)\n$")
  pipe:close()
  return tonumber(status), output
end

local function build(options)
  local status, output = sh("./kvlab build " .. (options or ""))
  assert.equal(0, status, output)
  return output
end

--- The products of the build that `act` changed, sorted, as one string.
local function changed_by(act, pattern)
  sh "touch stamp; sleep 0.02"
  act()
  local find = "find build/bin build/obj build/*.make -name '%s' -newer stamp"
  return select(2, sh(find:format(pattern) .. " | LC_ALL=C sort"))
end

local function objects(config, project, ...)
  local names = {}
  for _, name in ipairs { ... } do
    names[#names + 1] = ("build/obj/%s/%s/%s.o\n"):format(config, project, name)
  end
  return table.concat(names)
end

local function edit(name, from, to)
  local file = assert(io.open(tiny .. "/" .. name))
  local text = file:read "*a"
  file:close()
  local at, last = text:find(from, 1, true)
  assert(at, from)
  write(name, text:sub(1, at - 1) .. to .. text:sub(last + 1))
end

local CUDA = "/usr/local/cuda"
local has_nvcc = io.open(CUDA .. "/bin/nvcc") ~= nil
local is_full = require("kvlab.command_line").full
local in_source_tree = io.open(root .. "/premake5.lua") ~= nil

local function make_tiny_project()
  tiny = temporary.folder()
  local _, problem = sh(("root='%s'\n"):format(root) .. [[
    mkdir -p runtime/core kernels/cpu kernels/cuda lua/kvlab/shell spec
    mkdir -p lua/kvlab/experiment/sweep
    cp -R "$root/kvlab" "$root/premake5.lua" "$root/tools" "$root/VERSION" \
      "$root/LICENSE" .
    cp "$root/runtime/main.c" runtime
    for module in words secrets command_line sorted version json slices number house \
      options arguments files shell/cli shell/test experiment/sweep/process; do
      cp "$root/lua/kvlab/$module.lua" lua/kvlab/$module.lua
    done
    cp -R "$root/lua/kvlab/shell/repl" "$root/lua/kvlab/shell/verbs.txt" lua/kvlab/shell
    mkdir -p kernels/args
    touch runtime/base.h runtime/core/backend.h kernels/kernel.h kernels/ops.h
    touch kernels/page.h kernels/args/one.h kernels/cpu/vec.h
    [ ! -d "$root/.deps" ] || cp -R "$root/.deps" .]])
  assert.equal("", problem)
  write("runtime/kvlab.h", [[
    #pragma GCC visibility push(default)
    void kvl_interrupt(int set);
    int kvl_interrupted(void);
    int kvl_interrupt_hold(int more);
    const char *kvl_cpu_blas_better(void);
    int kvl_answer(void);
    #pragma GCC visibility pop
  ]])
  write("runtime/tiny.c", [[
    #include "kvlab.h"
    #include "answer.h"
    static volatile int flag;
    void kvl_interrupt(int set) { flag = set; }
    int kvl_interrupted(void) { return flag; }
    int kvl_interrupt_hold(int more) { return more; }
    const char *kvl_cpu_blas_better(void) { return 0; }
    int openblas_get_num_threads(void);
    int kvl_answer(void) { return openblas_get_num_threads() ? answer_plain() : 0; }
  ]])
  write("kernels/answer.h", "#define ANSWER 41\nint answer_plain(void);\n")
  write("kernels/cpu/answer.c", [[
    #include "answer.h"
    #define GLUE(a, b) a##b
    #define NAME(isa) GLUE(answer_, isa)
    int NAME(KVL_ISA)(void);
    int NAME(KVL_ISA)(void) { return ANSWER; }
  ]])
  write("kernels/cuda/answer.cuh", "#define CUDA_ANSWER 1\n")
  write("kernels/cuda/answer.cu", [[
    #include "answer.cuh"
    __global__ void answer(int *out) { *out = CUDA_ANSWER; }
  ]])
  write("lua/kvlab/init.lua", [[
    local ffi = require "ffi"
    ffi.cdef "int kvl_answer(void);"
    local kv = {
      answer = function() return ffi.C.kvl_answer() end,
      cuda_available = function() return false end,
    }
    function kv.load_all() return kv end
    return kv
  ]])
  write("answer.lua", "print(require('kvlab').answer())")
end

local function answer()
  local _, output = sh "./kvlab run answer.lua 2>/dev/null"
  return tonumber(output)
end

if not in_source_tree then return end -- a bundle has nothing to build
local paths = package.loaded["kvlab.paths"]

describe("the front door #slow", function()
  if paths and paths.config == "hostile" then
    return pending "it builds the same in every configuration: release does"
  end
  setup(function()
    make_tiny_project()
    write("spec/a.lua", "print 'it runs'")
  end)

  describe("build", function()
    setup(function() build() end)

    it("does and says nothing when nothing has changed", function()
      assert.equal("", changed_by(function() assert.equal("", build()) end, "*"))
    end)

    it("asks make only when a file or an option has changed", function()
      local broken = [[mkdir -p no && printf '#!/bin/sh\nexit 1\n' >no/make &&
        chmod +x no/make && PATH="$PWD/no:$PATH" ]]
      assert.equal(0, (sh(broken .. "./kvlab build")))
      assert.equal(1, (sh(broken .. "CFLAGS=-O1 ./kvlab build")))
      assert.equal(1, (sh(broken .. "./kvlab build")), "the last build has failed")
      build()
      assert.equal(0, (sh(broken .. "./kvlab build")))
      assert.equal(1, (sh("rm build/bin/release/libkvlab.so; " .. broken
        .. "./kvlab build")))
      build()
    end)

    it("works in a folder whose name no shell may read", function()
      local name = [[it's "a" $(touch pwned) `touch pwned` & folder]]
      local folder = temporary.folder() .. "/" .. name
      local quoted = files.shell_line { folder }
      local status, output = sh(("cp -R . %s && cd %s && rm -rf build && ./kvlab build "
        .. "--cuda=off && ./kvlab run --device=cpu spec/a.lua"):format(quoted, quoted))
      assert.equal(0, status, output)
      assert.matches("it runs\n$", output)
      assert.same({}, files.find(folder, "pwned"))
      if has_nvcc then
        status, output = sh(("cd %s && ./kvlab build --cuda=on"):format(quoted))
        assert.equal(1, status)
        assert.matches("whose path has a double quote", output)
      end
    end)

    it("rebuilds what includes an edited header", function()
      assert.equal(objects("release", "cpu_avx2", "answer")
        .. objects("release", "cpu_avx512", "answer")
        .. objects("release", "cpu_plain", "answer")
        .. objects("release", "kvlab_runtime", "tiny"), changed_by(function()
        write("kernels/answer.h", "#define ANSWER 42\nint answer_plain(void);\n")
        build()
      end, "*.o"))
      assert.equal(42, answer())
    end)

    it("builds after a source has moved, or is gone", function()
      sh("mkdir -p kernels/cpu/family && mv kernels/cpu/answer.c kernels/cpu/family")
      build()
      assert.equal(42, answer())
      sh("mv kernels/cpu/family/answer.c kernels/cpu && rmdir kernels/cpu/family")
      build()
      assert.equal(42, answer())
    end)

    it("keeps configurations side by side", function()
      assert.equal("", changed_by(function() build "--config=debug" end, "release"))
      assert.equal("", changed_by(build, "*.o"))
      assert.equal("", changed_by(function() build "--config=debug" end, "*.o"))
    end)

    it("recompiles what a changed flag affects, and nothing else", function()
      -- libkvlab is told which instruction sets there are
      assert.equal(objects("debug", "cpu_plain", "answer")
        .. objects("debug", "kvlab", "main")
        .. objects("debug", "kvlab_runtime", "tiny")
        .. objects("release", "kvlab_runtime", "tiny"), changed_by(function()
        edit("premake5.lua", '"-O0"', '"-Og"')
        edit("premake5.lua", "if is_x86 then", "if false then")
        build()
        build "--config=debug"
      end, "*.o"))
      edit("premake5.lua", "if false then", "if is_x86 then")
      build()
    end)

    it("recompiles everything when warnings become errors", function()
      local all = changed_by(function() build "--werror" end, "*.o")
      assert.equal(5, select(2, all:gsub("\n", "")))
      build()
    end)

    it("notices new and deleted files", function()
      write("runtime/more.c", [[
        #pragma GCC visibility push(default)
        int kvl_more(void);
        int kvl_more(void) { return 1; }
      ]])
      write("kernels/cpu/more.c", "typedef int unused;\n")
      local compiled = changed_by(build, "*.o")
      assert.equal(4, select(2, compiled:gsub("more%.o\n", "")))
      assert.equal(4, select(2, compiled:gsub("\n", "")))
      local exports = "nm -D --defined-only build/bin/release/libkvlab.so | grep -c more"
      local archived = "ar t build/obj/release/libcpu_plain.a | grep -c more"
      assert.equal("1\n1\n", select(2, sh(exports .. ";" .. archived)))
      local listed = "grep -c '\"file\".*/more.c' build/compile_commands.json"
      assert.equal("2\n", select(2, sh(listed)))
      sh "rm runtime/more.c kernels/cpu/more.c"
      build()
      assert.equal("0\n0\n", select(2, sh(exports .. ";" .. archived)))
      assert.equal("0\n", select(2, sh(listed)))
    end)

    it("fails when a file does not compile, and says where", function()
      write("runtime/wrong.c", "int wrong(\n")
      local status, output = sh "./kvlab build"
      sh "rm runtime/wrong.c"
      assert.equal(1, status)
      assert.matches("wrong%.c:", output)
      build()
    end)

    --- A folder with an nvcc and an nvidia-smi that say these versions, as what to put
    -- before a command.
    local function with_cuda(nvcc, driver)
      local folder = temporary.folder()
      local status, output = sh(([[
        mkdir -p %s/bin && cd %s/bin &&
        printf '#!/bin/sh\necho "Cuda compilation tools, release %s, V%s.99"\n' >nvcc &&
        printf '#!/bin/sh\necho "| NVIDIA-SMI 5 CUDA Version: %s     |"\n' >nvidia-smi &&
        chmod +x nvcc nvidia-smi]]):format(folder, folder, nvcc, nvcc, driver))
      assert.equal(0, status, output)
      return ("CUDA_HOME=%s PATH=%s/bin:$PATH "):format(folder, folder)
    end

    it("refuses a CUDA Toolkit that is too old, or leaves it out unasked", function()
      local old = with_cuda("12.4", "12.8")
      local status, output = sh(old .. "./kvlab build --cuda=on")
      assert.equal(1, status)
      assert.matches("bin/nvcc is 12%.4%.99, expected 12%.5 or newer; CUDA_HOME", output)
      status, output = sh(old .. "./kvlab build")
      assert.equal(0, status, output)
      assert.matches("no CUDA kernels: .*/bin/nvcc is 12%.4%.99", output)
    end)

    it("is told by doctor which CUDA is too old", function()
      local function doctor(nvcc, driver)
        return select(2, sh(with_cuda(nvcc, driver) .. "./kvlab doctor"))
      end
      local output = doctor("12.4", "12.8")
      assert.matches("\nold +nvcc +12%.4%.99 %(.-%), expected 12%.5 or newer", output)
      assert.matches("\nok +driver's CUDA +12%.8\n", output)
      assert.is_nil(output:find " \n") -- whatever is there has a version
      output = doctor("12.10", "12.2") -- a newer driver of the same major is not needed
      assert.matches("\nok +nvcc +12%.10%.99", output)
      assert.matches("\nok +driver's CUDA +12%.2\n", output)
      output = doctor("13.0", "12.8")
      assert.matches("\nok +nvcc +13%.0%.99", output)
      assert.matches("\nold +driver's CUDA +12%.8, expected 13%.0 or newer", output)
      assert.matches("driver 580%.65%.06 or newer", output)
      assert.matches("\nnone +driver's CUDA", doctor("13.0", ""))
    end)

    --- A CUDA Toolkit whose nvcc compiles once, which takes seconds, and later copies the
    -- object. With --full it always compiles.
    local function nvcc_once()
      local home = temporary.folder()
      local status, output = sh(([[
        cd %s && ln -s %s/* . && rm bin && mkdir bin && ln -s %s/bin/* bin && rm bin/nvcc
        cat >bin/nvcc <<'END'
#!/bin/sh
for word in "$@"; do
  [ "$before" != -o ] || object=$word
  before=$word
done
[ ! "$object" ] || [ ! -e "$0.o" ] || exec cp "$0.o" "$object"
%s/bin/nvcc "$@" && { [ ! "$object" ] || %s cp "$object" "$0.o"; }
END
        chmod +x bin/nvcc]]):format(home, CUDA, CUDA, CUDA, is_full and ":" or ""))
      assert.equal(0, status, output)
      return home
    end

    it("compiles CUDA kernels when asked, and only then", function()
      if not has_nvcc then return pending "no nvcc" end
      local kernel = objects("release", "kvlab_cuda", "kernels_cuda_1")
      local home = nvcc_once()
      local function build_cuda(arch)
        local status, output = sh(("CUDA_HOME=%s ./kvlab build --cuda=on --cuda-arch=%s")
          :format(home, arch or "90a"))
        assert.equal(0, status, output)
      end
      assert.equal(kernel, changed_by(build_cuda, "*.o"))
      assert.equal("", changed_by(build_cuda, "*"))
      assert.equal(kernel, changed_by(function()
        write("kernels/cuda/answer.cuh", "#define CUDA_ANSWER 2\n")
        build()
        build_cuda()
      end, "*.o"))
      assert.equal(kernel, changed_by(function() build_cuda "80" end, "*.o"))
      assert.equal("", changed_by(function() build "--cuda=off" end, "*.o"))
    end)
  end)

  describe("command line", function()
    local function says(status, pattern, command)
      local got, output = sh(command)
      assert.matches(pattern, output)
      assert.equal(status, got)
    end

    it("names the nearest verb, option and value", function()
      says(2, 'unknown verb "tset"; did you mean test%?', "./kvlab tset")
      says(2, 'unknown verb "rnu"; did you mean run%?', "./kvlab rnu")
      says(2, 'unknown verb "foo"\n$', "./kvlab foo")
      says(2, "did you mean: kvlab run answer.lua", "./kvlab answer.lua")
      says(2, "unknown option %-%-confg; did you mean %-%-config%?",
        "./kvlab build --confg=debug")
      says(2, 'given "relese"; did you mean release%?', "./kvlab build --config=relese")
      says(2, "unknown option %-%-sed; did you mean %-%-seed%?",
        "./kvlab run --sed=1 answer.lua")
    end)

    it("refuses values that make no sense", function()
      says(2, "%-%-device is auto, cpu, cuda", "./kvlab run --device=gpu answer.lua")
      says(2, "%-%-seed is a whole number", "./kvlab run --seed=x answer.lua")
      says(2, "%-%-set takes KEY=VALUE", "./kvlab run --set x answer.lua")
      says(2, "%-%-quick takes no value", "./kvlab run --quick=1 answer.lua")
      says(2, "%-%-out is empty", "./kvlab run answer.lua --out=")
      says(2, "both %-%-set a=1 and %-%-set a=2 are given, expected one; several values",
        "./kvlab run answer.lua --set a=1 --set b=2 --set=a=2")
      says(2, "both %-%-seed=1 and %-%-seed=2 are given, expected one\n",
        "./kvlab run answer.lua --seed 1 --seed=2")
      says(2, "%-%-quick is given twice", "./kvlab run answer.lua --quick --quick")
      says(2, "both %-%-config=debug and %-%-config=release are given, expected one",
        "./kvlab build --config debug --config=release")
      for _, arch in ipairs { "banana", "80:", ",", "8" } do
        says(2, "%-%-cuda%-arch is numbers", "./kvlab build --cuda-arch=" .. arch)
      end
      says(2, "help takes one verb at most", "./kvlab help run test")
      says(2, 'unknown verb "tets"; did you mean test%?', "./kvlab help tets")
      says(2, "repl takes no arguments", "./kvlab repl answer.lua")
      says(2, "completion takes 1 argument, not 0", "./kvlab completion")
      says(1, "prefix/bin/kvlab exists and is no link", [[mkdir -p prefix/bin
        touch prefix/bin/kvlab; ./kvlab install prefix]])
      says(1, "kvlab.h exists and is not a bundle", "./kvlab bundle runtime/kvlab.h")
      says(1, "/proc/x cannot be written to", "./kvlab bundle /proc/x")
      says(2, "%-%-out needs a value", "./kvlab run answer.lua --out")
      says(2, "no such script: nowhere.lua", "./kvlab run nowhere.lua")
      says(2, "no such spec: nowhere.lua", "./kvlab test nowhere.lua")
    end)

    it("says that a limited address space has no room for it", function()
      says(1, "limited to 300000 KiB %(ulimit %-v%), expected 524288 or more",
        "ulimit -v 300000; ./kvlab run answer.lua")
    end)

    it("hands options to the script, from any folder", function()
      write("options.lua", [[
        local o = require "kvlab.command_line"
        local set = o.set
        print(o.device, o.seed, o.out, o.quick, set.a, set.b, set.c, unpack(o.args))]])
      local _, output = sh [[cd / && "$OLDPWD/kvlab" run --device cuda:1 options.lua one \
        --quick --seed=7 --set a=true --set=b=0.5 --set "c=it's = ok" --out=x -- --two]]
      assert.equal("cuda:1\t7\tx\ttrue\ttrue\t0.5\tit's = ok\tone\t--two\n", output)
      _, output = sh "./kvlab run options.lua"
      assert.equal("auto\t0\tnil\tfalse\tnil\tnil\tnil\n", output)
    end)

    it("lists its verbs without building", function()
      local _, output = sh "cp kvlab elsewhere; ./elsewhere help"
      for verb in ("run repl test bench build doctor cache bundle help"):gmatch "%w+" do
        assert.matches("\n  " .. verb .. " ", output)
      end
    end)

    it("shows a script's error in one line, the stack when asked", function()
      write("wrong.lua", 'local function f() error("block 7 is not there") end f()')
      local status, output = sh "./kvlab run wrong.lua"
      assert.equal(1, status)
      assert.equal("kvlab: wrong.lua:1: block 7 is not there\n", output)
      says(1, "stack traceback", "KVLAB_TRACEBACK=1 ./kvlab run wrong.lua")
    end)

    it("is interrupted by Ctrl-C, also in a loop that catches errors", function()
      write("endless.lua", [[
        print "ready"
        io.stdout:flush()
        jit.off()
        while true do pcall(function() return {} end) end]])
      local status, output = sh [[
        : >heard; ./kvlab run endless.lua >heard 2>&1 & pid=$!
        until grep -q ready heard || ! kill -0 $pid; do sleep 0.05; done
        kill -INT $pid; wait $pid; code=$?; cat heard; (exit $code)]]
      assert.equal(130, status)
      assert.equal("ready\ninterrupted\n", output)
    end)

    it("evaluates lines in the REPL, and goes on after an error", function()
      local _, output = sh [[printf '%s\n' 'kv.answer(), 7' 'x = 20' 'for i = 1, 2 do' \
        'x = x + i' 'end' 'x' 'error "oh"' ')' '_ + 1' | ./kvlab 2>&1]]
      assert.equal([[
42	7
23
stdin:7: oh
    error "oh"
stdin:8: unexpected symbol near ')'
24
]], output)
    end)
  end)

  describe("of a fresh clone", function()
    local VERBS = { "run", "repl", "sweep", "compare", "test", "bench", "time",
                    "build", "doctor", "cache", "bundle",
                    "install", "completion", "man", "help" }

    setup(function()
      sh [[mkdir -p fresh/lua/kvlab/shell
        cp -R kvlab VERSION premake5.lua tools fresh
        cp lua/kvlab/shell/verbs.txt fresh/lua/kvlab/shell]]
    end)

    --- Runs a command in a copy that was never built; nothing may be built for it.
    local function answers(status, command)
      local got, output = sh(([[cd fresh
        %s
        code=$?; ls -d build .deps 2>/dev/null; (exit $code)]]):format(command))
      assert.equal(status, got, output)
      return output
    end

    it("answers --help after every verb without building", function()
      for _, verb in ipairs(VERBS) do
        local help = answers(0, "./kvlab help " .. verb)
        assert.matches("^usage: kvlab " .. verb .. " .*\nexample\n  %./kvlab [^\n]*\n$",
          help)
        assert.equal(help, answers(0, "./kvlab " .. verb .. " --help"))
        if verb ~= "run" then -- a script has help of its own
          assert.equal(help, answers(0, "./kvlab " .. verb .. " a b -h"))
        end
      end
      assert.equal("kvlab: no such script: a\n", answers(2, "./kvlab run a b -h"))
      assert.equal(answers(0, "./kvlab help"), answers(0, "./kvlab --help"))
    end)

    it("shows a verb's own options, and those of its groups", function()
      local help = answers(0, "./kvlab sweep --help")
      for _, option in ipairs { "--slurm[=OPTIONS]", "--jobs=N", "--seed=N",
                                "--config=NAME", "--help" } do
        assert.truthy(help:find("\n  " .. option .. " ", 1, true), option)
      end
      assert.is_nil(help:find("--shard=", 1, true))
      help = answers(0, "./kvlab build --help")
      assert.truthy(help:find("--cuda=MODE", 1, true))
      assert.is_nil(help:find("--seed", 1, true))
      help = answers(0, "./kvlab help; ./kvlab run --help")
      assert.is_nil(help:find("--worker", 1, true))
    end)

    it("names its version without building", function()
      local version = "kvlab " .. io.open(root .. "/VERSION"):read "*l" .. "\n"
      assert.matches("^kvlab %d+%.%d+%.%d+\n$", version)
      assert.equal(version, answers(0, "./kvlab --version"))
      assert.equal(version, answers(0, "./kvlab test --version"))
    end)

    it("refuses an unknown option of every verb without building", function()
      for _, verb in ipairs(VERBS) do
        assert.equal("kvlab: unknown option --hlep; did you mean --help?\n",
          answers(2, "./kvlab " .. verb .. " x --hlep=1"))
      end
      assert.equal("kvlab: unknown option --sede; did you mean --seed?\n",
        answers(2, "./kvlab --device cpu --sede 7"))
      assert.equal("kvlab: unknown option -x; options begin with two dashes\n",
        answers(2, "./kvlab run answer.lua -x"))
      assert.equal("kvlab: unknown option --jsn; did you mean --json?\n",
        answers(2, "./kvlab bench --jsn"))
      assert.equal("kvlab: unknown option --jobs\n", answers(2, "./kvlab bench --jobs=2"))
    end)

    it("knows which options take a value without building", function()
      assert.equal("kvlab: --out needs a value\n", answers(2, "./kvlab run a.lua --out"))
      assert.equal("kvlab: --quick takes no value\n", answers(2, "./kvlab --quick=1"))
      assert.equal("kvlab: unknown option --sed; did you mean --seed?\n",
        answers(2, "./kvlab run a.lua --out --help --sed=1"))
    end)
  end)

  describe("test", function()
    local function last_line(spec, options)
      write("spec/tiny_spec.lua", spec)
      local status, output = sh("./kvlab test " .. (options or ""))
      return status .. ": " .. output:match "([^\n]*)\n$"
    end

    it("ends with the counts and fails when a spec does", function()
      assert.equal("0: 1 passed, 0 failed", last_line [[
        it("passes", function() assert.equal(42, require("kvlab").answer()) end)]])
      assert.equal("1: 1 passed, 2 failed, 1 skipped", last_line [[
        it("passes", function() end)
        it("fails", function() assert.equal(1, 2) end)
        it("raises", function() error {} end)
        it("waits", function() pending "later" end)]])
    end)

    it("shows a part of what is raised where all of it is long", function()
      write("spec/tiny_spec.lua", [[
        it("a", function()
          local t = {}
          for _ = 1, 100 do t = { t, t } end
          error(t)
        end)
        it("b", function() error(("x"):rep(1e6)) end)]])
      local status, output = sh "./kvlab test"
      assert.equal(1, status, output)
      assert.matches("spec/tiny_spec.lua:4: {", output, 1, true)
      assert.matches("x … %d+ more bytes\n\n0 passed, 2 failed", output)
      assert.is_true(#output < 30000)
    end)

    it("counts a file that does not load and a setup that raises as failed", function()
      assert.equal("1: 0 passed, 1 failed", last_line "it(")
      assert.equal("1: 0 passed, 1 failed", last_line "error 'at once'")
      assert.equal("1: 0 passed, 1 failed", last_line [[describe("x", function()
        setup(function() error "no" end) it("y", function() end) end)]])
    end)

    it("fails when no spec runs", function()
      assert.equal("1: 0 passed, 0 failed", last_line "")
      assert.equal("1: 0 passed, 0 failed", last_line 'it("x #gpu", function() end)')
    end)

    it("runs each of several files in a process of its own", function()
      write("spec/tiny_spec.lua", [[it("a", function() rawset(_G, "mine", 1) end)]])
      write("spec/more_spec.lua", [[it("b", function() assert.is_nil(mine) end)
        it("c", function() pending "later" end)]])
      write("spec/wrong_spec.lua", [[it("d", function() assert.equal(1, 2) end)]])
      write("spec/crash_spec.lua", [[it("e", function()
        local ffi = require "ffi"
        ffi.cdef "void abort(void); int system(const char *command);"
        ffi.C.system "sleep 600 >/dev/null 2>&1 & echo $! >pid" -- nobody waits for it
        ffi.C.abort()
      end)]])
      local status, output = sh "./kvlab test --jobs=2"
      assert.equal(1, status, output)
      assert.equal(0, (sh "kill $(cat pid) && rm pid"))
      assert.matches("spec/more_spec.lua s 1 passed\n", output, 1, true)
      assert.matches("spec/wrong_spec.lua F 0 passed\n", output, 1, true)
      assert.matches("\nFAILED  d\n  [^\n]*spec/wrong_spec.lua:1: ", output)
      assert.matches("\nFAILED  spec/crash_spec.lua\n  its process ended before its "
        .. "specs: signal 6\n",
        output, 1, true)
      assert.matches("\nskipped  c: later\n", output, 1, true)
      assert.matches("\n2 passed, 2 failed, 1 skipped\n$", output)
      sh "rm spec/crash_spec.lua spec/wrong_spec.lua"
      status, output = sh "./kvlab test --jobs=1 spec/tiny_spec.lua spec/more_spec.lua"
      assert.equal(1, status)
      assert.matches("\n1 passed, 1 failed, 1 skipped\n$", output)
      assert.matches("\n2 passed, 0 failed, 1 skipped\n$",
        select(2, sh "./kvlab test --jobs=2"))
      sh "rm spec/more_spec.lua"
    end)

    it("counts a process that ends before its specs do as failed", function()
      write("spec/tiny_spec.lua", [[it("a", function() end)]])
      for _, code in ipairs { 0, 1, 3 } do -- a sanitizer may end a process with 1
        write("spec/exit_spec.lua", ([[
          it("b", function() end)
          it("c", function() os.exit(%d) end)]]):format(code))
        local status, output = sh "./kvlab test --jobs=2"
        assert.equal(1, status, output)
        assert.matches(("\nFAILED  spec/exit_spec.lua\n  its process ended before its "
          .. "specs: exit status %d\n"):format(code), output, 1, true)
        assert.matches("\n1 passed, 1 failed\n$", output)
      end
      sh "rm spec/exit_spec.lua"
    end)

    it("selects by tag and pattern", function()
      local spec = [[
        it("one #slow", function() end)
        it("two", function() end)
        it("three", function() end)]]
      assert.equal("0: 1 passed, 0 failed", last_line(spec, "--tags=slow"))
      assert.equal("0: 2 passed, 0 failed", last_line(spec, "--exclude-tags=slow"))
      assert.equal("0: 1 passed, 0 failed", last_line(spec, "--filter=three"))
    end)
  end)

  it("bundles a folder that runs on its own", function()
    write("spec/tiny_spec.lua", [[it("answers", function()
      assert.equal(42, require("kvlab").answer())
      assert.equal("bundle", require("kvlab.paths").config)
      assert.equal("]] .. io.open(root .. "/VERSION"):read "*l" .. [[",
        require "kvlab.version")
      require "cjson"
    end)]])
    local status, output = sh "./kvlab bundle --cuda=off away && mv away moved"
    assert.equal(0, status, output)
    local _, counts = sh 'rm -rf build && cd / && env -i "$OLDPWD/moved/kvlab" test'
    assert.matches("\n1 passed, 0 failed\n$", counts)
    assert.matches("^kvlab %d", select(2, sh "moved/kvlab --version"))
    assert.matches("unknown option %-%-config\n", select(2, sh "moved/kvlab --config=x"))
    local _, said = sh "LD_DEBUG=libs moved/bin/kvlab --version 2>&1"
    assert.matches("calling init: [^\n]*moved/bin/../lib/libopenblas", said)
  end)

  it("installs a tree that may be moved", function()
    local status, output = sh "./kvlab install --cuda=off there && mv there here"
    assert.equal(0, status, output)
    assert.matches("installed; add there/bin to PATH\n$", output)
    assert.equal("42\n", select(2, sh "here/bin/kvlab run answer.lua"))
    assert.equal(0, (sh [[here/bin/kvlab man | cmp - here/share/man/man1/kvlab.1]]))
    for shell, file in pairs { bash = "bash-completion/completions/kvlab",
                               zsh = "zsh/site-functions/_kvlab" } do
      assert.equal(0, (sh(("here/bin/kvlab completion %s | cmp - here/share/%s"):format(
        shell, file))))
    end
    assert.matches("^serve\n$", select(2, sh "here/bin/kvlab completion words se"))
  end)
end)
