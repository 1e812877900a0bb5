local rig = require "spec.lua.experiment.sweep.rig"

local has, ok, sh = rig.has, rig.ok, rig.sh

describe("experiment --jobs #release", function()
  if not rig.executable then return pending "no executable" end
  setup(function()
    rig.make()
    ok "kvlab run script.lua --out=alone"
  end)

  it("makes the same results as one process", function()
    for _, jobs in ipairs { 2, 3, 100 } do
      local name = "jobs" .. jobs
      local printed = ok(("kvlab run script.lua --out=%s --jobs=%d"):format(name, jobs))
      assert.equal(rig.read "alone/results.jsonl", rig.read(name .. "/results.jsonl"))
      has("x\na \\ b", printed)
    end
    assert.equal(60, rig.count "alone")
  end)

  it("shares out the cores", function()
    ok("unset OMP_NUM_THREADS; " -- which the runner of the specs sets
      .. "SPEC_SHOW=OMP_NUM_THREADS kvlab run script.lua --out=threads --jobs=2")
    local cores = tonumber(ok "env -u OMP_NUM_THREADS nproc")
    local expected = math.max(1, math.floor(cores / 2))
    has(('"shown": "%d"'):format(expected), rig.read "threads/results.jsonl")
    ok("OMP_NUM_THREADS=5 SPEC_SHOW=OMP_NUM_THREADS kvlab run script.lua --out=five"
      .. " --jobs=2")
    has('"shown": "5"', rig.read "five/results.jsonl")
  end)

  --- Which GPUs the rows of a run with three jobs saw: "3 5 3".
  local function gpus_of(options)
    rig.ok("rm -rf gpus; SPEC_US=2000 SPEC_DEVICE=cuda:0 SPEC_SHOW=CUDA_VISIBLE_DEVICES"
      .. " CUDA_VISIBLE_DEVICES=3,GPU-5 kvlab run script.lua --out=gpus --jobs=3 "
      .. options)
    local seen, list = {}, {}
    for shown in rig.read "gpus/results.jsonl":gmatch '"shown": "([^"]*)"' do
      if not seen[shown] then seen[shown], list[#list + 1] = true, shown end
    end
    table.sort(list)
    return list
  end

  it("gives each process one of the GPUs that it may use", function()
    assert.same({ "3", "GPU-5" }, gpus_of "")
    assert.same({ "3,GPU-5" }, gpus_of "--device=cuda:1") -- all on that one
  end)

  it("fails when a teardown does", function()
    local status, output = sh "kvlab run script.lua --out=torn --jobs=2 --set after=raise"
    assert.equal(1, status)
    has("torn", output)
    assert.equal(1, (sh "kvlab run script.lua --out=torn1 --set after=raise"))
  end)

  it("stops at the first failure, once the rows that are being computed have come",
    function()
      local status, output = sh "kvlab run script.lua --out=bad --jobs=2 --set bad=7"
      assert.equal(1, status)
      has("it is bad\n  configuration a=7 b=u\n", output)
      local rows = rig.count "bad"
      has(("%d of 60 rows are in bad/results.jsonl"):format(rows), output)
      assert.is_true(rows > 0 and rows < 60)
    end)

  it("goes on after failures with --keep-going", function()
    local status, output = sh("kvlab run script.lua --out=on --jobs=2 --keep-going"
      .. " --set bad=7")
    assert.equal(1, status)
    has("6 configurations failed; 54 of 60 rows", output)
    local _, count = output:gsub("it is bad\n  configuration a=7 b=[uv]\n", "")
    assert.equal(6, count)
  end)

  it("says which configuration ended its process, and replaces that", function()
    local command = "kvlab run script.lua --jobs=2 --set deadly=4 --set once=%s --out=%s"
    local status, output = sh(command:format("once1", "died1"))
    assert.equal(1, status)
    has("its process ended: signal 9\n  configuration a=4 b=", output)
    local _, output2 = sh(command:format("once2", "died2") .. " --keep-going")
    has("1 configurations failed; 59 of 60 rows", output2)
  end)

  it("ends with all its processes at Ctrl-C, and goes on from there", function()
    local out = rig.folder .. "/stopped"
    local status, output = sh(([[
      SPEC_US=500000 setsid '%s' run script.lua --jobs=2 --out=%s &
      for try in $(seq 2400); do sleep 0.05; [ ! -s %s/results.jsonl ] || break; done
      env kill -s INT -- -$!
      wait $!]]):format(rig.executable, out, out))
    assert.equal(130, status, output)
    local rows = rig.count "stopped"
    -- Ctrl-C may come between a row's writing and its counting
    local counted = tonumber(output:match "interrupted: (%d+) of 60 rows are in")
    assert.is_true(counted == rows or counted == rows - 1, output)
    assert.is_true(rows > 0 and rows < 60, output)
    assert.equal("0\n", select(2, sh("pgrep -fc '[-]-worker.*" .. out .. "' || true")))
    has(("resumed %d of 60"):format(rows), ok("kvlab run script.lua --out=" .. out))
    assert.equal(rig.read "alone/results.jsonl", rig.read "stopped/results.jsonl")
  end)

  it("does not go with -i", function()
    local status, output = sh "kvlab run -i script.lua --jobs=2"
    assert.equal(2, status)
    has("-i and --jobs do not go together", output)
  end)
end)
