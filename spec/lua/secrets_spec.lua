--- Passwords in URLs are in nothing that kvlab writes.
local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"
local secrets = require "kvlab.secrets"
local temporary = require "spec.temporary"

local SECRET = "p@ss:wo rd'7"
local URL = "redis://me:" .. SECRET .. "@host:1/2"

local SCRIPT = [[
local json = require "kvlab.json"
local kv = require "kvlab"
kv.experiment.run {
  name = "small", title = "Does it stay secret?", defaults = { url = "", fails = false },
  grid = { { "x", { 1, 2 } }, { "store", { "memory:" } } },
  run = function(c, settings)
    if c.fails then error("cannot open " .. c.url .. " and " .. c.store) end
    return { bytes = #c.url + #c.store + #settings.url, word = c.url }
  end,
  table = { rows = "x", columns = "store", value = "bytes" },
  plot = { x = "x", y = "bytes", series = "store" },
}
]]

describe("a password", function()
  it("is replaced in URLs, wherever they are in a text", function()
    for text, want in pairs {
      [URL] = "redis://***@host:1/2",
      ["rediss://:x@h"] = "rediss://***@h",
      ["redis://h:1/2"] = "redis://h:1/2",
      ["a redis://u:p@h, 'rediss://:a/b@i'"] = "a redis://***@h, 'rediss://***@i'",
      ["lmdb:a@b"] = "lmdb:a@b",
    } do
      assert.equal(want, secrets.mask(text))
      assert.equal(want ~= text, secrets.has(text))
    end
    local list = setmetatable({ { URL }, x = 1 }, { __len = 7 })
    local masked = secrets.mask(list)
    assert.equal("redis://***@host:1/2", masked[1][1])
    assert.equal(getmetatable(list), getmetatable(masked))
    assert.equal(URL, list[1][1])
  end)

  if not kv.paths.executable then return end

  it("given by --set is in no file of an experiment and in nothing it prints", function()
    local folder = temporary.folder()
    files.write(folder .. "/script.lua", SCRIPT)
    local function kvlab(...)
      local pipe = io.popen(("cd %s && %s 2>&1; echo $?"):format(folder,
        files.shell_line { kv.paths.executable, ... }))
      local output, status = pipe:read "*a":match "^(.*)(%d+)\n$"
      pipe:close()
      assert.is_nil(output:find(SECRET, 1, true), output)
      for _, path in ipairs(files.find(folder, "")) do
        assert.is_nil(files.read(path):find("wo rd", 1, true), path)
      end
      return tonumber(status), output
    end
    local function run(...)
      return kvlab("run", "script.lua", "--device=cpu", "--out=out", "--csv", "--set",
        "url=" .. URL, "--set", "store=" .. URL, ...)
    end
    local status, output = run()
    assert.equal(0, status, output)
    local rows = json.decode("[" .. files.read(folder .. "/out/results.jsonl")
      :gsub("\n(.)", ",%1") .. "]")
    assert.equal(2, #rows)
    for _, row in ipairs(rows) do
      assert.equal("redis://***@host:1/2", row.config.url)
      assert.equal(3 * #URL, row.metrics.bytes) -- the script itself gets the password
    end
    assert.matches("resumed 2 of 2", select(2, run()))
    assert.equal(0, (run("--jobs=2", "--set", "fresh=true")))
    assert.equal(0, (run("--list")))
    status, output = run("--set", "fails=true")
    assert.equal(1, status)
    assert.matches("cannot open redis://***@host:1/2", output, 1, true)
    assert.equal(1, (run("--set", "fails=true", "--keep-going", "--jobs=2")))
    assert.equal(2, (kvlab("run", "script.lua", "--set", URL)))
    assert.equal(2, (kvlab("run", URL)))
    files.write(folder .. "/broken.lua",
      'local set = require("kvlab").command_line.set\nerror("no " .. set.url)')
    status, output = kvlab("run", "broken.lua", "--set", "url=" .. URL)
    assert.equal(1, status)
    assert.matches("no redis://***@host:1/2", output, 1, true)
    status, output = kvlab("sweep", "submit", "script.lua", "--slurm", "--shards=2",
      "--set", "url=" .. URL)
    assert.equal(1, status)
    assert.matches("KVLAB_REDIS_PASSWORD_FILE", output, 1, true)
  end)
end)
