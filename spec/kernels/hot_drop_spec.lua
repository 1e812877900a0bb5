--- Exact: only whole numbers.
local kv = require "kvlab"
local ffi = require "ffi"
local support = require "spec.support"
local reference = require "spec.reference.hot_cache"

--- A cache of which about half the slots hold a block, each KV head others.
local function half_full(rng, kv_heads, blocks, slots)
  local hot = reference.new(kv_heads, blocks, slots)
  for head = 0, kv_heads - 1 do
    local held = support.distinct(rng, math.min(slots, blocks), blocks)
    for slot = 0, #held - 1 do
      if rng(2) == 0 then
        hot.block_of[head * slots + slot + 1] = held[slot + 1]
        hot.slot_of[head * blocks + held[slot + 1] + 1] = slot
      end
    end
  end
  return hot
end

local function drop(dev, hot, dropped)
  local shape, t = { hot.kv_heads, hot.slots }, {}
  t.memory = kv.tensor(dev, "bf16", { hot.slots, 2, hot.kv_heads, 4, 8 })
  t.slot_of = kv.from(dev, "i32", { hot.kv_heads, hot.blocks }, hot.slot_of)
  t.block_of = kv.from(dev, "i32", shape, hot.block_of)
  t.order = kv.from(dev, "i32", shape, hot.order)
  t.counters = kv.zeros(dev, "i64", { 5 })
  local view = ffi.new("kvl_hot", t)
  kv.check(kv.C.kvl_hot_drop(view, kv.from(dev, "i32", { #dropped }, dropped)))
  return t
end

describe("dropping blocks from a hot cache", function()
  local function frees_slots(dev)
    local sizes = { { 1, 1, 1 }, { 2, 30, 12 }, { 5, 17, 40 }, { 8, 3000, 1500 } }
    for i, size in ipairs(sizes) do
      local rng = support.rng(i)
      local hot = half_full(rng, size[1], size[2], size[3])
      local dropped = { -1, size[2], 0, 0 }
      for _ = 1, size[2] do dropped[#dropped + 1] = rng(size[2]) end
      local t = drop(dev, hot, dropped)
      reference.drop(hot, dropped)
      reference.check(hot)
      for _, name in ipairs { "slot_of", "block_of", "order", "counters" } do
        support.equal(t[name], hot[name], name)
      end
    end
  end
  local name = "frees their slots for every KV head and leaves order alone"
  support.it_on_cpu(name, frees_slots)
  support.it_on_gpu(name, frees_slots)

  support.each_device(function(dev)
    it("does nothing for an empty list", function()
      local hot = half_full(support.rng(5), 2, 10, 6)
      local t = drop(dev, hot, {})
      support.equal(t.slot_of, hot.slot_of, "slot_of")
      support.equal(t.block_of, hot.block_of, "block_of")
    end)
  end)
end)
