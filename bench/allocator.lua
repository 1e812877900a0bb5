--- What a fresh result costs (P20): an op into a new tensor, which is freed at once or
-- left to Lua's collector, beside the same op into `out`. The time is the mean of many
-- calls in a row with warm caches, the host's work included. The bound of a row is the
-- time of the op into `out`, so its share says how close a fresh result comes to that
-- time.
local kv = require "kvlab"

local MIB = 1024 * 1024
local SIZES = { 1, 8, 31, 33, 64, 256, 1024 }

--- The microseconds of a call of fn: the least mean of a few rounds of many calls.
local function mean_us(b, fn, calls)
  local best = math.huge
  for _ = 1, b.quick and 1 or 5 do
    b.device:sync()
    local start = kv.C.kvl_clock_ns()
    for _ = 1, calls do fn() end
    b.device:sync()
    best = math.min(best, tonumber(kv.C.kvl_clock_ns() - start) * 1e-3 / calls)
  end
  return best
end

local function fresh(mib, is_freed)
  return function(b)
    local n = mib * MIB / 4
    local x, out = kv.rand(b.device, "f32", { n }), kv.tensor(b.device, "f32", { n })
    local calls = b.quick and 2 or math.max(4, math.floor((b.kind == "cpu" and 256
      or 32768) / mib))
    local function into() x:add(1, out) end
    local function free() x:add(1):free() end
    local function leave() x:add(1) end
    local run = is_freed and free or leave
    b:settle(run)
    local us_into = mean_us(b, into, calls)
    local us = mean_us(b, run, calls)
    return { us = us, bound = math.min(us, us_into),
             note = ("into out %.1f us"):format(us_into),
             check = function()
               local got = x:add(1)
               assert((got - 1 - x):abs():max():item() < 1e-6, "the result is wrong")
             end }
  end
end

return function(b)
  for _, mib in ipairs(SIZES) do
    mib = math.max(1, math.floor(mib / (b.quick and 16 or 1)))
    b:case { id = "P20", name = ("a fresh result of %d MiB, freed"):format(mib),
             setup = fresh(mib, true), target = { of_limit = 1 / 1.2 } }
  end
  for _, mib in ipairs { 31, 33, 256 } do
    mib = math.max(1, math.floor(mib / (b.quick and 16 or 1)))
    b:case { id = "P20", setup = fresh(mib, false),
             name = ("a fresh result of %d MiB, left to the collector"):format(mib) }
  end
end
