local json = require "kvlab.json"
local rig = require "spec.lua.experiment.sweep.rig"

local has, ok, sh = rig.has, rig.ok, rig.sh

describe("experiment --shard #release", function()
  if not rig.executable then return pending "no executable" end
  setup(function()
    rig.make()
    ok "kvlab run script.lua --out=alone"
  end)

  --- Runs some shards of `count`.
  local function run(out, count, first, last, options)
    for i = first, last do
      ok(("kvlab run script.lua --out=%s --shard=%d/%d %s"):format(out, i, count,
        options or ""))
    end
  end

  it("has every configuration in one shard, and merges to the results of one run",
    function()
      for _, count in ipairs { 1, 7 } do
        local out = "of" .. count
        run(out, count, 1, count)
        local rows = 0
        for i = 1, count do
          rows = rows + rig.count(("%s/shards/%d-of-%d"):format(out, i, count))
        end
        assert.equal(60, rows)
        has("merged 60 of 60\n", ok("kvlab sweep merge " .. out .. " script.lua"))
        assert.equal(rig.read "alone/results.jsonl", rig.read(out .. "/results.jsonl"))
        assert.equal(("%d shards: %d complete; 60 rows\n"):format(count, count),
          ok("kvlab sweep status " .. out))
      end
      local before = rig.read "of7/results.jsonl"
      ok "kvlab sweep merge of7 script.lua"
      assert.equal(before, rig.read "of7/results.jsonl")
      local manifest = json.decode(rig.read "of7/manifest.json")
      assert.equal(7, #manifest.shards)
      assert.equal("3/7", manifest.shards[3].shard)
      assert.equal("string", type(manifest.shards[3].finished))
    end)

  it("has shards without a configuration where there are more of them", function()
    local folder = rig.folder
    rig.make(2)
    run("many", 6, 1, 6, "--set repeats=1")
    has("merged 4 of 4\n", ok "kvlab sweep merge many script.lua")
    assert.equal("6 shards: 6 complete; 4 rows\n", ok "kvlab sweep status many")
    rig.folder = folder
  end)

  it("merges what is there, and says what is not", function()
    run("part", 4, 1, 3, "--set repeats=2")
    local status, output = sh "kvlab sweep merge part script.lua --csv"
    assert.equal(1, status)
    has("merged 30 of 40\n", output)
    has("x\na \\ b", output)
    has("10 of 40 rows are missing; unfinished shards of 4: 4", output)
    assert.equal(30, rig.count "part")
    has("seed,a,b,", rig.read "part/results.csv")
    run("part", 4, 4, 4, "--set repeats=2 --jobs=2")
    has("merged 40 of 40", ok "kvlab sweep merge part script.lua")
  end)

  it("does not compute again what was merged, when the grid grows", function()
    run("grown", 3, 1, 3, "--set repeats=2")
    ok "kvlab sweep merge grown script.lua"
    run("grown", 3, 1, 3, "--set repeats=3")
    local rows = 0
    for i = 1, 3 do rows = rows + rig.count(("grown/shards/%d-of-3"):format(i)) end
    assert.equal(60, rows)
    has("merged 60 of 60", ok "kvlab sweep merge grown script.lua")
    assert.equal(rig.read "alone/results.jsonl", rig.read "grown/results.jsonl")
  end)

  it("refuses another number of shards, another seed, and what is no shard", function()
    run("fixed", 2, 1, 1)
    local _, output = sh "kvlab run script.lua --out=fixed --shard=1/3"
    has("fixed is a sweep in 2 shards, not 3", output)
    _, output = sh "kvlab run script.lua --out=fixed --shard=1/2 --seed=4"
    has("holds results of seed 0, this run has 4", output)
    for _, bad in ipairs { "0/2", "3/2", "1", "1/2/3", "" } do
      local status
      status, output = sh("kvlab run script.lua --out=fixed --shard=" .. bad)
      assert.equal(2, status)
      has(("--shard is I/N, such as 1/4 to 4/4; given \"%s\""):format(bad), output)
    end
  end)

  it("says what is missing on the command line of sweep", function()
    local function says(status, words, command)
      local got, output = sh(command)
      assert.equal(status, got, output)
      has(words, output)
    end
    says(2, 'sweep has no "mrge"; there are submit SCRIPT', "kvlab sweep mrge x")
    says(2, "sweep needs an action: submit", "kvlab sweep")
    says(2, "sweep merge takes a folder", "kvlab sweep merge")
    says(2, "so it has to be named: kvlab sweep merge part script.lua",
      "kvlab sweep merge part")
    says(2, "submit needs --slurm", "kvlab sweep submit script.lua")
    says(2, "submit needs --shards=N", "kvlab sweep submit script.lua --slurm")
    says(2, "no such script: x.lua", "kvlab sweep submit x.lua --slurm --shards=2")
    says(2, "fresh would throw rows away",
      "kvlab sweep submit script.lua --slurm --shards=2 --set fresh=true")
    says(2, "unknown option --shard; did you mean --shards?",
      "kvlab sweep submit script.lua --slurm --shard=2")
    says(1, "--slurm needs sbatch, which is not in PATH",
      "PATH= kvlab sweep submit script.lua --slurm --shards=2")
    says(1, "alone has no shards that have begun", "kvlab sweep status alone")
    says(1, "nowhere has no shards that have begun",
      "kvlab sweep merge nowhere script.lua")
  end)
end)
