local cluster = require "spec.slurm"
local rig = require "spec.lua.experiment.sweep.rig"
local slurm = require "kvlab.experiment.sweep.slurm"

local has, ok, sh = rig.has, rig.ok, rig.sh

describe("sweep.slurm #release", function()
  it("writes numbers as ranges", function()
    assert.equal("0-3,7,9-10", slurm.ranges { 0, 1, 2, 3, 7, 9, 10 })
    assert.equal("5", slurm.ranges { 5 })
    assert.equal("", slurm.ranges {})
  end)

  it("cuts shards into arrays, every shard once, tasks below the limit", function()
    for _, limit in ipairs { 1, 7, 8, 1001 } do
      for count = 1, 60 do
        local next_shard, arrays = 1, {}
        for shard = 1, count do arrays[shard] = shard end
        for _, array in ipairs(slurm.arrays(arrays, limit)) do
          for _, task in ipairs(array.tasks) do
            assert(task >= 0 and task < limit)
            assert.equal(next_shard, array.offset + task + 1)
            next_shard = next_shard + 1
          end
        end
        assert.equal(count + 1, next_shard)
      end
    end
    assert.same({ { offset = 0, tasks = { 2, 7 } }, { offset = 16, tasks = { 0 } } },
      slurm.arrays({ 3, 8, 17 }, 8))
  end)
end)

describe("kvlab sweep on a Slurm cluster #slow #release", function()
  if not rig.executable then return pending "no executable" end
  local missing = cluster.missing()
  if missing then return pending("no " .. missing) end
  local machine
  setup(function()
    rig.make()
    ok "kvlab run script.lua --out=alone"
    machine = cluster.start(8)
  end)
  teardown(function()
    if machine then machine:stop() end
  end)

  local submit = "kvlab sweep submit script.lua --slurm --shards=20 --out=%s"

  it("runs 20 shards in arrays of 8; one that was killed is run again; all are merged",
    function()
      local printed = ok(submit:format "one" .. " --set deadly=4 --set once=$PWD/once")
      has("60 configurations in 20 shards: 0 complete, 0 queued or running\n", printed)
      has("submitted 20 shards (1-20) as jobs ", printed)
      local function count_arrays()
        return select(2, rig.read "one/slurm/jobs.jsonl":gsub("\n", ""))
      end
      assert.equal(3, count_arrays())
      machine:wait()
      assert.equal(4, count_arrays()) -- one more, of the shard that was killed
      has('"tasks": [2]}\n', rig.read "one/slurm/jobs.jsonl")
      assert.equal("20 shards: 20 complete; 60 rows\n", ok "kvlab sweep status one")
      assert.equal(rig.read "alone/results.jsonl":gsub('"deadly": 0', '"deadly": 4')
        :gsub('"once": ""', '"once": "' .. rig.folder .. '/once"'),
        rig.read "one/results.jsonl")
      has("<title>A sweep</title>", rig.read "one/report.html")
      has('"shard": "20/20"', rig.read "one/manifest.json")
    end)

  it("submits what is not complete, when it is asked again", function()
    local command = submit:format "two" .. " --retries=0 --set deadly=9"
      .. " --set once=$PWD/two-once"
    ok("touch gate; SPEC_GATE=$PWD/gate " .. command) -- no task ends before we open it
    has("nothing is left to submit", ok(command))
    ok "scancel --name=two --state=PENDING; rm gate"
    machine:wait()
    local _, status = sh "kvlab sweep status two"
    has("20 shards: ", status)
    assert.is_nil(status:find("20 complete", 1, true))
    for _ = 1, 3 do -- the second time, one shard is killed
      ok(command)
      machine:wait()
    end
    has("20 complete, 0 queued or running\nkvlab sweep merge two script.lua", ok(command))
    assert.equal("20 shards: 20 complete; 60 rows\n", ok "kvlab sweep status two")
    ok "kvlab sweep merge two script.lua"
    assert.equal(60, rig.count "two")
  end)

  it("says what went wrong in a shard, and merges the others", function()
    ok("kvlab sweep submit script.lua --slurm --shards=4 --retries=0 --out=bad"
      .. " --set bad=10 --keep-going")
    machine:wait()
    local status = ok "kvlab sweep status bad"
    has("failed; ", status)
    local merged, output = sh "kvlab sweep merge bad script.lua"
    assert.equal(1, merged)
    has("6 of 60 rows are missing; unfinished shards of 4: ", output)
    assert.equal(54, rig.count "bad")
  end)

  it("passes sbatch's refusal on", function()
    local status, output = sh("kvlab sweep submit script.lua --slurm=--partition=none"
      .. " --shards=2 --out=refused")
    assert.equal(1, status)
    has("sbatch refused: ", output)
    has("invalid partition", output)
  end)

  it("needs no more shards than there are configurations", function()
    has("60 configurations in 60 shards", ok("kvlab sweep submit script.lua --slurm"
      .. " --shards=1000 --at-once=2 --retries=0 --out=many"))
    has("_[0-7%2]\n", ok "squeue -h -o %i")
    ok "scancel --me"
    machine:wait()
  end)
end)
