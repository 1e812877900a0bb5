--- Kernels are kept on disk, found again, and never taken from a file that is not whole
-- or that somebody else can write. Whatever the folder and the compiler do, the scores
-- are the same, or an error says why there are none.
local compiler = require "kvlab.kernel.run.compiler"
local files = require "kvlab.files"
local processes = require "spec.processes"
local support = require "spec.support"
local temporary = require "spec.temporary"

local executable = (package.loaded["kvlab.paths"] or {}).executable
-- Plain C compiles in a seventh of the time: it includes no intrinsics. At
-- -O0, too: what counts here is whether it is compiled, and how it ends.
local RUN = "run --device=cpu --isa=" .. (support.is_hostile and support.isa() or "plain")

-- Prints how many kernels were compiled, and the scores of a policy with one kernel.
local SCRIPT = [[
  package.path = require("kvlab").paths.root .. "/?.lua;" .. package.path
  local compiler = require "kvlab.kernel.run.compiler"
  local expressions = require "spec.expressions"
  local e = require("kvlab").expr
  local compile, compiled = compiler.compile, 0
  compiler.level = "-O0"
  compiler.seconds_max = tonumber(os.getenv "SECONDS_MAX") or compiler.seconds_max
  function compiler.compile(...)
    compiled = compiled + 1
    return compile(...)
  end
  local cache = expressions.cache("cpu", { dtype = "f32", group = 2, kv_heads = 2,
    block_size = 4, head_dim = 16, lens = { 0, 11, 5 }, blocks = 8 }, 1)
  local function score(name)
    local p = expressions.attach(cache, { name = name, decode = true,
      score = (e.q * e.k):sum "dim":max("token", "head") })
    return table.concat(expressions.score(cache, p), " ")
  end
  local text = score "one"
  assert(score "two" == text)
  print(compiled .. " compiled: " .. text)
]]

describe("the cache of kernels #release", function()
  if not executable then return end
  if not compiler.find() then
    pending "there is no C compiler"
    return
  end
  local script, home, scores
  local real = "CC=" .. compiler.find()
  local quick = real -- then a program that gives the script's kernel without compiling it

  --- Runs the script with a cache in `home`; its exit status, output and error output.
  local function try(environment)
    local errors = temporary.path()
    local pipe = io.popen(("env XDG_CACHE_HOME=%s %s %s %s %s %s 2>%s; echo $?"):format(
      files.shell_line { home }, quick, environment or "",
      files.shell_line { executable }, RUN, script, errors))
    local output, status = pipe:read("*a"):match "^(.-)(%d+)\n$"
    pipe:close()
    return tonumber(status), output, files.read(errors)
  end

  --- The script gives the right scores, says nothing, and compiles this many kernels.
  local function computes(compiled, environment)
    local status, output, errors = try(environment)
    assert.equal("", errors)
    assert.same({ 0, ("%d compiled: %s\n"):format(compiled, scores) }, { status, output })
  end

  local function folder() return home .. "/kvlab" end

  --- The path of the one kernel that is kept.
  local function kept()
    local names = files.list(folder())
    assert.equal(1, #names, table.concat(names, " "))
    assert.matches("^%x+$", names[1])
    return folder() .. "/" .. names[1]
  end

  --- Puts other bytes in place of a kernel that was kept; they are replaced in turn.
  local function not_loaded(change)
    computes(1)
    local path = kept()
    local whole = files.read(path)
    files.write(path, change(whole))
    computes(1)
    assert.equal(path, kept())
    computes(0)
  end

  --- Puts a whole file that is no library in place of the one kernel that is kept.
  local function keep_no_library()
    local path, right = kept(), script
    local whole = files.read(path)
    script = temporary.file(('require("kvlab.kernel.run.cache").keep(%q, "no library")')
      :format(path:match "[^/]*$"), "keep.lua")
    assert.equal(0, (try()))
    script = right
    assert.are_not.equal(whole, files.read(path))
  end

  local function chmod(mode, path)
    processes.sh(files.shell_line { "chmod", mode, path })
  end

  setup(function()
    script = temporary.file(SCRIPT, "scores.lua")
    home = temporary.folder()
    local status, output = try()
    assert.equal(0, status, output)
    scores = output:match "^1 compiled: (.*)\n$"
    assert.is_string(scores, output)
    local image = temporary.file(files.read(kept()):match "^[^\n]*\n(.*)$")
    local cc = temporary.file('while [ "$1" != -o ]; do shift; done\nexec cp '
      .. image .. ' "$2"\n', "quick")
    chmod("700", cc)
    quick = "CC=" .. cc
  end)

  before_each(function() home = temporary.folder() end)

  it("keeps a kernel for the next process, in a private folder", function()
    computes(1)
    local path = kept()
    local pipe = io.popen(files.shell_line { "stat", "-c", "%a", folder(), path })
    assert.equal("700\n600\n", pipe:read "*a")
    pipe:close()
    local before = files.read(path)
    chmod("400", path)
    computes(0)
    assert.equal(before, files.read(path))
  end)

  it("loads no file in which one byte is another", function()
    not_loaded(function(whole)
      local at = math.floor(#whole / 2)
      return whole:sub(1, at - 1) .. string.char((whole:byte(at) + 1) % 256)
        .. whole:sub(at + 1)
    end)
  end)

  it("loads no file that is cut off, empty or longer", function()
    not_loaded(function(whole) return whole:sub(1, -2) end)
    for _, text in ipairs { "", "kvlab kernel ", "kvlab kernel 0123\n" } do
      files.write(kept(), text)
      computes(1)
    end
    files.write(kept(), files.read(kept()) .. "x")
    computes(1)
  end)

  it("loads no file whose first line has another hash", function()
    not_loaded(function(whole)
      return (whole:gsub("^kvlab kernel %x+", "kvlab kernel " .. ("0"):rep(32)))
    end)
  end)

  it("loads no whole kernel that lies under the name of another", function()
    computes(1)
    local path = kept()
    local right, wrong = script, temporary.file((SCRIPT:gsub(":max%(", ":min(")))
    os.rename(path, home .. "/right")
    script = wrong
    local status, output = try(real)
    script = right
    assert.equal(0, status, output)
    assert.are_not.equal(path, kept())
    os.rename(kept(), path)
    computes(1)
  end)

  it("compiles again what is whole and no library", function()
    computes(1)
    keep_no_library()
    computes(1)
    computes(0)
  end)

  it("loads and keeps nothing where others can write", function()
    computes(1)
    chmod("770", folder())
    computes(1)
    chmod("700", folder())
    computes(0)
    chmod("602", kept())
    computes(1)
    computes(0)
    files.make_folder(home .. "/open/kvlab")
    chmod("777", home .. "/open/kvlab")
    computes(1, ("XDG_CACHE_HOME=%s/open"):format(home))
    assert.same({}, files.list(home .. "/open/kvlab"))
  end)

  it("computes where nothing can be kept", function()
    for _, environment in ipairs { "XDG_CACHE_HOME=/proc", "XDG_CACHE_HOME= HOME=",
      "env -u XDG_CACHE_HOME -u HOME", "XDG_CACHE_HOME=" .. script,
      "XDG_CACHE_HOME=relative HOME=/proc" } do
      computes(1, environment)
    end
    files.make_folder(folder())
    chmod("500", folder())
    local file = io.open(folder() .. "/probe", "w") -- root may write there all the same
    if file then file:close() end
    computes(1)
    assert.equal(file and 2 or 0, #files.list(folder()))
    chmod("700", folder())
  end)

  it("is shared by two processes that compile the same kernel at once", function()
    local pids = {}
    for i = 1, 2 do pids[i] = processes.fork(function() computes(1, real) end) end
    for i = 1, 2 do assert.equal(0, processes.wait(pids[i])) end
    kept()
    computes(0)
  end)

  it("precompiles the header for a process that compiles many kernels", function()
    local right, many = script, temporary.file((SCRIPT:gsub("local text.*", [[
      for i = 1, 5 do
        local p = expressions.attach(cache, { name = "many", decode = true,
          score = (e.q * e.k * i):sum "dim":max("token", "head") })
        print(table.concat(expressions.score(cache, p), " "))
      end
      print(compiled)]])), "many.lua")
    local plain = home .. "/plain"
    files.make_folder(plain .. "/kvlab")
    chmod("777", plain .. "/kvlab") -- where nothing is kept
    script = many
    local status, expected = try(real .. " XDG_CACHE_HOME=" .. plain)
    assert.equal(0, status)
    assert.same({ 0, expected, "" }, { try(real) })
    local header
    for _, name in ipairs(files.list(folder())) do
      if name:find "headers" then header = folder() .. "/" .. name end
    end
    for _, name in ipairs(files.list(folder())) do
      if not name:find "headers" then os.remove(folder() .. "/" .. name) end
    end
    -- of another gcc, or damaged, it is done without
    files.write(header .. "/cpu/expression.h.gch", "gpch.014 and more")
    assert.same({ 0, expected, "" }, { try(real) })
    local pipe = io.popen(("XDG_CACHE_HOME=%s %s cache clear"):format(home,
      files.shell_line { executable }))
    assert.equal("removed 5 kernels\n", pipe:read "*a")
    pipe:close()
    assert.same({}, files.list(folder()))
    script = right
  end)

  it("gives the words of a compiler that fails", function()
    local status, output, errors = try "CC=/bin/false"
    assert.same({ 1, "" }, { status, output })
    assert.equal("kvlab: policy one: score: it cannot be compiled: /bin/false failed: it "
      .. "said nothing, and ended with status 1\n", errors)
    local cc = temporary.file("#!/bin/sh\necho no room >&2\nexit 3\n", "cc")
    chmod("700", cc)
    assert.matches("cc failed: no room\n$", (select(3, try("CC=" .. cc))))
    assert.same({}, files.list(folder()))
    computes(1)
    computes(0, "CC=/bin/false")
  end)

  it("says what a compiler did that wrote no library", function()
    for words, text in pairs {
      ["ended without an error, but wrote nothing to /%S+/kernel%.so\n$"] = "exit 0",
      ["ended without an error, but wrote 0 bytes to /%S+/kernel%.so\n$"] =
        'while [ "$1" != -o ]; do shift; done; : > "$2"',
      ["failed: Terminated\n$"] = "kill $$",
    } do
      local cc = temporary.file("#!/bin/sh\n" .. text .. "\n", "cc")
      chmod("700", cc)
      local status, _, errors = try("CC=" .. cc)
      assert.equal(1, status)
      assert.matches(words, errors)
    end
    assert.same({}, files.list(folder()))
  end)

  it("says which limit of the system stops a compiler", function()
    local function limited(limit, environment)
      local cc = temporary.file("exec 2>&1\n" .. limit .. "\nexec env "
        .. files.shell_line { "XDG_CACHE_HOME=" .. home } .. " " .. (environment or "")
        .. " " .. files.shell_line { executable } .. " " .. RUN .. " " .. script .. "\n",
        "limited")
      local pipe = io.popen("sh " .. cc)
      local text = pipe:read "*a"
      pipe:close()
      return text
    end
    assert.matches("it cannot be compiled: gcc failed: .*Too many open files",
      limited("ulimit -n 12", "CC=gcc"))
    assert.matches("no temporary folder can be made: /nowhere/%S+: No such file",
      limited("", "TMPDIR=/nowhere"))
    assert.matches("kernel%.c cannot be written: File too large",
      limited("trap '' XFSZ; ulimit -f 8"))
  end)

  it("does not wait for ever for a compiler", function()
    local cc = temporary.file("#!/bin/sh\nexec sleep 1000\n", "cc")
    chmod("700", cc)
    local status, _, errors = try("SECONDS_MAX=1 CC=" .. cc)
    assert.equal(1, status)
    assert.matches("cc failed: it took more than 1 s\n$", errors)
  end)

  it("is not needed: without a compiler plain Lua runs, and says so once", function()
    local status, output, errors = try "CC= PATH=/nowhere"
    assert.same({ 0, ("0 compiled: %s\n"):format(scores) }, { status, output })
    assert.equal("kvlab: policy one: score runs in plain Lua, and slowly: there is no C "
      .. "compiler (gcc, or what CC names)\n", errors)
  end)

  it("has what was kept for a machine that lost its compiler", function()
    computes(1)
    computes(0, "CC= PATH=/nowhere")
    keep_no_library()
    assert.matches("runs in plain Lua", (select(3, try "CC= PATH=/nowhere")))
  end)
end)
