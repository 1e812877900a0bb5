--- Paths go to no shell unquoted: a project, a folder of results and a user's own folder
-- whose names hold spaces, quotes and commands work as others do, and run no command.
local files = require "kvlab.files"
local kv = require "kvlab"
local processes = require "spec.processes"
local temporary = require "spec.temporary"

local NAME = [[it's "a" $(touch pwned) `touch pwned` & touch pwned & * ~]]
local paths = kv.paths

local SCRIPT = [[
local kv = require "kvlab"
kv.experiment.run {
  name = "small", grid = { { "x", { 1, 2 } } }, run = function(c) return { y = c.x } end,
  table = { rows = "x", value = "y" }, plot = { x = "x", y = "y" },
}
]]

describe("a path with spaces, quotes and commands", function()
  if not paths.executable then return end
  local folder, root, own

  lazy_setup(function()
    folder = temporary.folder()
    root, own = ("%s/root %s"):format(folder, NAME), ("%s/own %s"):format(folder, NAME)
    files.make_folder(own)
    local function sh(...) processes.sh(files.shell_line { ... }) end
    for _, name in ipairs { "build/bin/release", "runtime" } do
      files.make_folder(root .. "/" .. name)
    end
    for _, name in ipairs { "lua", "spec" } do
      sh("cp", "-R", paths.root .. "/" .. name, root .. "/" .. name)
    end
    for _, name in ipairs { "runtime/base.h", "runtime/kvlab.h", "VERSION" } do
      sh("cp", paths.root .. "/" .. name, root .. "/" .. name)
    end
    sh("cp", "-L", paths.executable, paths.library_dir .. "/libkvlab.so",
      root .. "/build/bin/release/")
    files.write(own .. "/small.lua", SCRIPT)
  end)

  after_each(function()
    for _, path in ipairs(files.find(folder, "pwned")) do
      assert(not path:find "/pwned$", path)
    end
  end)

  --- What `kvlab …` prints in the own folder; it must succeed.
  local function kvlab(...)
    local line = files.shell_line { root .. "/build/bin/release/kvlab", ... }
    local pipe = io.popen(("cd %s && KVLAB_PATH=%s %s 2>&1; echo $?"):format(
      files.shell_line { own }, files.shell_line { own .. "/more" }, line))
    local output, status = pipe:read "*a":match "^(.-)(%d+)\n$"
    pipe:close()
    assert.equal("0", status, output)
    return output
  end

  it("is one of a project, of results and of shards", function()
    local out = "--out=out " .. NAME
    kvlab("run", "small.lua", "--device=cpu", "--jobs=2", "--csv", out)
    assert.matches("resumed 2 of 2",
      kvlab("run", own .. "/small.lua", "--device=cpu", out))
    kvlab("compare", "out " .. NAME, own .. "/out " .. NAME)
    local sweep = "sweep " .. NAME
    for i = 1, 2 do
      kvlab("run", "small.lua", "--device=cpu", "--out=" .. sweep,
        ("--shard=%d/2"):format(i))
    end
    kvlab("sweep", "status", sweep)
    assert.matches("merged 2 of 2", kvlab("sweep", "merge", sweep, "small.lua"))
  end)

  it("is one of a gallery and of a quick experiment of the project", function()
    kvlab("run", "lua/experiments/all.lua", "--quick", "--device=cpu",
      "--out=" .. own .. "/all", "--", "00_cached_lm")
    assert.matches("token 1 is", files.read(own .. "/all/00_cached_lm.txt"))
  end)

  it("is one of policies, of the REPL and of its completion", function()
    kvlab("new", "policy", "mine", "--path=more")
    kvlab("new", "policy", "near")
    files.write(own .. "/see.lua", [[
      local kv = require "kvlab"
      print(kv.policy("mine").name, kv.policy("near").name, #kv.policy.names() > 20)
      local complete = require "kvlab.shell.repl.complete"
      for _, text in ipairs { 'require "kvl', 'dofile "./', 'kv.policy "ne' } do
        print(text, #complete.candidates(text, {}, _G) > 0)
      end]])
    local output = kvlab("run", "see.lua", "--device=cpu")
    assert.matches("^mine\tnear\ttrue\n", output)
    assert.is_nil(output:find "false")
    files.write(own .. "/input", "1 + 1\n")
    processes.sh(("cd %s && %s repl --device=cpu <input >/dev/null"):format(
      files.shell_line { own }, files.shell_line { root .. "/build/bin/release/kvlab" }))
  end)
end)
