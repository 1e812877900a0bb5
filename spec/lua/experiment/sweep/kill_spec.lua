--- A sweep that is killed at random moments, again and again, ends with the results of
-- one that was left alone.
local kv = require "kvlab"
local process = require "kvlab.experiment.sweep.process"
local processes = require "spec.processes"
local results = require "kvlab.experiment.results"
local rig = require "spec.lua.experiment.sweep.rig"
local support = require "spec.support"

local SHARDS, KILLS = 4, support.is_full and 20 or 12
local ROWS = 120 * KILLS
local PREFIX = "cd '%s' && SPEC_US=3000 exec '%s' %s >/dev/null 2>&1"

--- The size of a file; 0 if there is none.
local function size_of(path)
  local file = io.open(path)
  local bytes = file and file:seek "end" or 0
  if file then file:close() end
  return bytes
end

--- Starts a command, and kills it after some milliseconds, or as soon as its results have
-- grown by `bytes`. Whether it was still running.
local function kill_one(command, ms, path, bytes)
  local last_ns = kv.C.kvl_clock_ns() + ms * 1e6
  local full = size_of(path) + bytes
  local child = process.spawn { "sh", "-c", PREFIX:format(rig.folder, rig.executable,
    command) }
  while kv.C.kvl_clock_ns() < last_ns and size_of(path) < full do
    processes.sleep(0.001)
  end
  return child:close(true) == "signal 9"
end

--- The rows that a folder holds now: none torn but the last, none twice, all as they are
-- in the end.
local function check(name, expected)
  local seen = {}
  local _, lines = results.read(rig.folder .. "/" .. name)
  for _, line in ipairs(lines) do
    assert(expected[line] and not seen[line], line)
    seen[line] = true
  end
  return #lines
end

--- Kills what `next_command` says until that has hit a running process KILLS times: at
-- any moment from its start to a few times what it takes to start here and now, more when
-- nothing gets done, less when much does; but before it has done a KILLS-th of all, so
-- that on no machine it is done too early. Returns the most rows that were there.
local function kill_many(next_command, expected)
  local state, hits, tries, most, rows = 7, 0, 0, 0, {}
  local bytes_most = size_of(rig.folder .. "/alone/results.jsonl") / KILLS
  local window_ms = 3 * processes.ms(function()
    rig.ok "kvlab run script.lua --out=start --shard=1/3000 --jobs=2 --set fresh=true"
  end)
  local function random(n) -- MINSTD: the moments are the same every time
    state = state * 48271 % 2147483647
    return state % n + 1
  end
  while hits < KILLS do
    tries = tries + 1
    assert(tries < 4 * KILLS, "the sweep ends too early to be killed")
    local command, name = next_command(random)
    local is_hit = kill_one(command, random(1000) / 1000 * window_ms,
      ("%s/%s/results.jsonl"):format(rig.folder, name), random(1000) / 1000 * bytes_most)
    if is_hit then hits = hits + 1 end
    local before = rows[name] or 0
    rows[name] = check(name, expected)
    if is_hit and rows[name] == before then window_ms = window_ms * 1.2 end
    if rows[name] - before > ROWS / KILLS / 2 then window_ms = window_ms * 0.8 end
    most = math.max(most, rows[name])
  end
  return most
end

local function count_processes()
  local pattern = ("[o]ut=%s/"):format(rig.folder)
  return tonumber((select(2, rig.sh("pgrep -fc '" .. pattern .. "' || true"))))
end

describe("a sweep that is killed with kill -9 #release", function()
  if not rig.executable then return pending "no executable" end
  local whole, expected = nil, {}
  setup(function()
    rig.make(ROWS / 6)
    rig.ok "kvlab run script.lua --out=alone"
    whole = rig.read "alone/results.jsonl"
    for line in whole:gmatch "[^\n]+" do expected[line] = true end
  end)

  it("has whole rows, each once, and ends as if it had been left alone", function()
    local command = "run script.lua --out=" .. rig.folder .. "/killed"
    local rows = kill_many(function(random)
      return command .. " --jobs=" .. random(3), "killed"
    end, expected)
    assert.is_true(rows > KILLS and rows < ROWS, rows)
    -- workers end after the one that started them
    processes.wait_until(function() return count_processes() == 0 end, "all have ended")
    rig.ok("kvlab " .. command)
    assert.equal(whole, rig.read "killed/results.jsonl")
  end)

  it("in shards ends so, too, with mergers that are killed", function()
    local root = rig.folder .. "/merged"
    local command = "run script.lua --out=" .. root .. " --shard="
    kill_many(function(random)
      if random(4) == 1 then return "sweep merge " .. root .. " script.lua", "merged" end
      local shard = ("%d/%d"):format(random(SHARDS), SHARDS)
      return ("%s%s --jobs=%d"):format(command, shard, random(2)),
        "merged/shards/" .. shard:gsub("/", "-of-")
    end, expected)
    for i = 1, SHARDS do rig.ok(("kvlab %s%d/%d"):format(command, i, SHARDS)) end
    rig.ok("kvlab sweep merge " .. root .. " script.lua")
    assert.equal(whole, rig.read "merged/results.jsonl")
  end)
end)
