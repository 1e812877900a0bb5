--- Processes that write to an lmdb store: they are killed, or work beside each other.
local ffi = require "ffi"
local kv = require "kvlab"
local cases = require "spec.runtime.store_cases"
local lmdb_file = require "spec.runtime.lmdb_file"
local processes = require "spec.processes"
local support = require "spec.support"

local C = kv.C
local file -- the path of the present spec's

describe("a writer of an lmdb store", function()
  before_each(function() file = lmdb_file.fresh() end)
  local RECORDS, CAPACITY = 24, 700000

  local function bytes_of(i) return 20000 + i * 997 end

  local puts = processes.shared_number()

  --- Puts records without an end, each of one byte over and over, another every time, and
  -- counts them.
  local function write_on(capacity)
    local s, rng = lmdb_file.open(capacity), support.rng(ffi.C.getpid())
    for step = 1, math.huge do
      local i = rng(RECORDS)
      local b = ffi.new("uint8_t[?]", bytes_of(i), step % 256)
      ffi.fill(b, bytes_of(i), step % 256)
      kv.check(C.kvl_store_put(s.handle, cases.key(i), 0, b, bytes_of(i)))
      puts[0] = puts[0] + 1
      if rng(50) == 0 then kv.check(C.kvl_store_sync(s.handle)) end
    end
  end

  --- How many records there are; all of them whole.
  local function check_whole(s)
    local found = 0
    for i = 0, RECORDS - 1 do
      local text = s:get(i, 0, bytes_of(i))
      if text then
        found = found + 1
        assert.equal(text:sub(1, 1):rep(#text), text)
      end
    end
    assert.equal("", s:problem())
    return found
  end

  --- Kills writers: a moment after their first puts, or while they open the file.
  local function kill_often(rounds)
    local rng, found = support.rng(5), 0
    for round = 1, rounds do
      if round % 10 == 1 then processes.sh(("rm -f '%s'*"):format(file)) end
      puts[0] = 0
      local enough = rng(20)
      local writer = processes.fork(function() write_on(CAPACITY) end)
      processes.wait_until(function() return puts[0] >= enough end, "a writer puts")
      processes.sleep(rng(3000) * 1e-6)
      processes.kill(writer)
      local s = lmdb_file.open(CAPACITY)
      local stats = s:stats()
      assert.is_true(stats.bytes_held <= CAPACITY)
      local there = check_whole(s)
      assert.equal(stats.records, there)
      found = found + there
      s:close()
    end
    assert.is_true(found > rounds)
  end

  it("is killed 20 times and leaves whole blocks", function() kill_often(20) end)
  it("is killed often and leaves whole blocks #slow", function()
    kill_often(support.is_full and 200 or 80)
  end)

  it("works beside another process, which follows as the file grows", function()
    lmdb_file.open():close()
    local first = processes.fork(write_on)
    local grower = processes.fork(function()
      local s = lmdb_file.open()
      for i = 1, 50 do
        assert(s:put(1000 + i, 0, support.is_hostile and 9000 or 1500000, i) == 1)
      end
      s:close()
    end)
    local s, rng, steps = lmdb_file.open(), support.rng(6), 0
    repeat
      check_whole(s)
      local i = rng(RECORDS)
      local b = ffi.new("uint8_t[?]", bytes_of(i), 77)
      ffi.fill(b, bytes_of(i), 77)
      assert.equal(1, C.kvl_store_put(s.handle, cases.key(i), 0, b, bytes_of(i)))
      steps = steps + 1
    until steps >= 60 and ffi.C.waitpid(grower, nil, 1) ~= 0 -- 1: WNOHANG
    processes.kill(first)
    assert.is_true(check_whole(s) > 0)
    assert.equal(0, s:stats().errors)
    s:close()
  end)
end)
