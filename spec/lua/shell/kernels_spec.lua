--- `kvlab cache` and the kernels' lines of `kvlab doctor`.
local files = require "kvlab.files"
local temporary = require "spec.temporary"

local executable = (package.loaded["kvlab.paths"] or {}).executable

describe("the kernels that are kept", function()
  if not executable then return end
  local home

  --- The exit status and all output of `kvlab WORDS` with a cache in `home`.
  local function kvlab(words, environment)
    local pipe = io.popen(("XDG_CACHE_HOME=%s %s %s %s 2>&1; echo $?"):format(
      files.shell_line { home }, environment or "", files.shell_line { executable },
      words))
    local output, status = pipe:read("*a"):match "^(.-)(%d+)\n$"
    pipe:close()
    return tonumber(status), output
  end

  local function ok(...)
    local status, output = kvlab(...)
    assert.equal(0, status, output)
    return output
  end

  local function keep(name, text)
    files.make_folder(home .. "/kvlab")
    files.write(home .. "/kvlab/" .. name, text)
  end

  before_each(function() home = temporary.folder() end)

  it("are counted, with their folder and bytes", function()
    assert.equal(home .. "/kvlab\n0 kernels, 0 bytes\n", ok "cache")
    keep(("a"):rep(32), "12345")
    assert.equal(home .. "/kvlab\n1 kernel, 5 bytes\n", ok "cache")
    keep(("b"):rep(32), "67")
    assert.equal(home .. "/kvlab\n2 kernels, 7 bytes\n", ok "cache")
  end)

  it("are removed by clear, with what a killed process left, and nothing else", function()
    keep(("a"):rep(32), "12345")
    keep(("b"):rep(32) .. ".1234", "12")
    keep("notes.txt", "mine")
    assert.equal("removed 2 kernels\n", ok "cache clear")
    assert.same({ "notes.txt" }, files.list(home .. "/kvlab"))
    assert.equal("removed 0 kernels\n", ok "cache clear")
  end)

  it("lie in the home folder without XDG_CACHE_HOME, and nowhere without both", function()
    assert.equal(home .. "/.cache/kvlab\n0 kernels, 0 bytes\n",
      ok("cache", "XDG_CACHE_HOME= HOME=" .. files.shell_line { home }))
    assert.equal("no folder\n0 kernels, 0 bytes\nnothing is kept there: neither "
      .. "XDG_CACHE_HOME nor HOME names a folder\n", ok("cache", "XDG_CACHE_HOME= HOME="))
    assert.equal("removed 0 kernels\n", ok("cache clear", "XDG_CACHE_HOME= HOME="))
  end)

  it("are not kept where others can write, or no folder can be made", function()
    files.make_folder(home .. "/kvlab")
    os.execute(files.shell_line { "chmod", "777", home .. "/kvlab" })
    assert.matches("is another user's, or others can write to it\n$", ok "cache")
    assert.matches("/proc/kvlab cannot be made\n$", ok("cache", "XDG_CACHE_HOME=/proc"))
  end)

  it("are listed by doctor, with what compiles them", function()
    keep(("a"):rep(32), "12345")
    local text = ok("doctor", "CC=sh")
    assert.matches("\nok +kernel cache +1 kernel, 5 bytes %(.*/kvlab%)\n$", text)
    assert.matches("^ok +kernels in C +sh\n%l+ +NVRTC +%C+\n", text)
    assert.matches("^none +kernels in C +expressions run in plain Lua", ok("doctor",
      "CC=no_such_compiler PATH=/nowhere"))
    assert.matches("\nnone +kernel cache +each process compiles its kernels anew: ",
      ok("doctor", "XDG_CACHE_HOME=/proc"))
  end)

  it("are asked for in words that are checked", function()
    assert.same({ 2, 'kvlab: cache takes nothing, or "clear"; given "empty"\n' },
      { kvlab "cache empty" })
    assert.same({ 2, "kvlab: doctor takes no arguments\n" }, { kvlab "doctor all" })
  end)
end)
