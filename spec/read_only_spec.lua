--- A tree that somebody else has built, on a file system that is mounted read-only, works
-- for a user who can write to his own folder alone. Where the spec may not mount, the
-- tree is only made unwritable; where it may not become another user, it stays this one.
local files = require "kvlab.files"
local kv = require "kvlab"
local processes = require "spec.processes"
local support = require "spec.support"
local temporary = require "spec.temporary"

local paths = kv.paths
if not paths.executable or not io.open(paths.root .. "/premake5.lua") then return end

local NOBODY = "setpriv --reuid=65534 --regid=65534 --clear-groups env -u XDG_CACHE_HOME "
  .. "HOME=%s "
local MOUNTED = "mount --bind %s %s && mount -o remount,ro,bind %s && "

local function works(command)
  return os.execute(("{ %s; } >/dev/null 2>&1"):format(command)) == 0
end

describe("a built tree that cannot be written to", function()
  if support.is_hostile then return pending(support.SAME_PROGRAMS) end
  local tree, user, before

  --- The exit status and output of `kvlab …` in the user's folder.
  local function kvlab(words, input)
    files.write(user .. "/input", input or "")
    files.write(user .. "/command", ("cd %s && %s%s/kvlab %s <input 2>&1"):format(user,
      before.user, tree, words))
    local pipe = io.popen(("%s %s/command; echo $?"):format(before.shell, user))
    local output, status = pipe:read "*a":match "^(.-)(%d+)\n$"
    pipe:close()
    return tonumber(status), output
  end

  local function ok(...)
    local status, output = kvlab(...)
    assert.equal(0, status, output)
    return output
  end

  lazy_setup(function()
    local folder = temporary.folder()
    tree, user = folder .. "/tree", folder .. "/user"
    processes.sh(([[mkdir -p %s %s/runtime %s/build/bin/release && cd '%s' &&
      cp -R kvlab premake5.lua VERSION lua spec tools kernels %s/ &&
      cp runtime/*.h %s/runtime/ && cp -L '%s' '%s/libkvlab.so' %s/build/bin/release/ &&
      { for file in $(grep -l '#policy' -r %s/spec/lua %s/spec/models); do
        echo >$file; done; } &&
      touch %s/build/lock && chmod -R a+rX %s %s/.. && chmod 777 %s && cd %s &&
      { git init -q && git add VERSION && git -c user.name=spec -c user.email=s@s \
        commit -qm spec || true; } && chmod -R a-w %s]]):format(user, tree, tree,
      paths.root, tree, tree, paths.executable, paths.library_dir, tree, tree, tree, tree,
      folder, folder, user, tree, tree))
    local mounted = MOUNTED:format(tree, tree, tree)
    local nobody = NOBODY:format(user)
    before = { user = works(nobody .. "true") and nobody or "", shell = "sh" }
    if works(("unshare -m sh -c '%strue'"):format(mounted)) then
      before.shell = ("unshare -m sh -c '%sexec sh \"$0\"'"):format(mounted)
    end
  end)
  lazy_teardown(function() os.execute("chmod -R u+w " .. tree) end)

  it("is as unwritable as the spec says", function()
    local script = ('io.open("%s/lua/x", "w"):close()'):format(tree)
    files.write(user .. "/write.lua", script)
    if before.user == "" and before.shell == "sh" and works "test $(id -u) = 0" then
      return pending "root may write anywhere"
    end
    assert.equal(1, (kvlab "run write.lua"))
  end)

  it("runs experiments, whose results lie in the user's folder", function()
    ok "run lua/experiments/00_cached_lm.lua --quick --device=cpu"
    ok "new experiment mine"
    assert.matches("results/mine%-quick/report.html",
      ok "run experiments/mine.lua --quick --device=cpu --jobs=2")
    local manifest = files.read(user .. "/results/mine-quick/manifest.json")
    assert.truthy(manifest:find '"commit"' or not works "git --version")
    assert.matches("resumed (%d+) of %1\n",
      ok "run experiments/mine.lua --quick --device=cpu")
  end)

  it("has a REPL, and holds the user's policies to the contract", function()
    assert.matches("^42\n$", ok("repl --device=cpu", "6 * 7\n"))
    ok "new policy mine"
    -- A policy that compiles nothing; spec/lua/shell/new_spec.lua tries the template, and
    -- all that `test policy` runs beside the contract.
    files.write(user .. "/policies/my_quest.lua",
      (files.read(paths.root .. "/lua/policies/quest.lua"):gsub('"quest"', '"my_quest"')))
    assert.matches("0 failed\n$", ok "test policy policies/my_quest.lua --device=cpu")
    assert.matches("ok +CPU", select(2, kvlab "doctor"))
  end)

  it("is not built again, and says so", function()
    local status, output = kvlab "build"
    assert.equal(1, status)
    assert.matches("kvlab: .*/tree cannot be written to, so nothing can be built there",
      output)
    status, output = kvlab "run --config=debug write.lua"
    assert.equal(1, status)
    assert.matches("its debug build was never made", output)
  end)
end)
