--- Exact: bytes are copied.
local kv = require "kvlab"
local support = require "spec.support"

local shapes = { { 6, 1, 1, 8 }, { 6, 1, 1, 16 }, { 9, 2, 16, 64 }, { 7, 3, 17, 80 },
                 { 5, 8, 256, 128 } }

--- Copies two blocks, skipping entries that are -1. Returns cache, and its values before.
local function copy(dev, dtype, s)
  local shape = { s[1], 2, s[2], s[3], s[4] }
  local before = support.randn(kv.device "cpu", dtype, shape, 3)
  local cache = before:to(dev):clone()
  kv.check(kv.C.kvl_copy_blocks(kv.from(dev, "i32", { 4 }, { 4, -1, 2, 1 }),
    kv.from(dev, "i32", { 4 }, { 0, 3, 3, -1 }), cache))
  return cache, support.numbers(before)
end

local function each_case(fn)
  for _, dtype in ipairs { "f32", "f16", "bf16", "f8e4m3" } do
    for _, s in ipairs(shapes) do
      if dtype ~= "f8e4m3" or s[4] % 16 == 0 then fn(dtype, s) end
    end
  end
end

describe("copying blocks", function()
  support.it_on_cpu("copies whole blocks and skips -1", function(dev)
    each_case(function(dtype, s)
      local cache, want = copy(dev, dtype, s)
      local cells = 2 * s[2] * s[3] * s[4]
      for i = 1, cells do
        want[i], want[3 * cells + i] = want[4 * cells + i], want[2 * cells + i]
      end
      support.equal(cache, want, "cache")
    end)
  end)

  support.it_on_cpu("does nothing for an empty list", function(dev)
    local before = support.randn(dev, "f32", { 3, 2, 1, 4, 8 }, 3)
    local cache, none = before:clone(), kv.tensor(dev, "i32", { 0 })
    kv.check(kv.C.kvl_copy_blocks(none, none, cache))
    support.equal(cache, before, "cache")
  end)
end)

describe("copying blocks on CUDA #gpu", function()
  support.it_on_gpu("agrees with the CPU", function(cuda, cpu)
    each_case(function(dtype, s)
      support.equal((copy(cuda, dtype, s)), (copy(cpu, dtype, s)), "cache")
    end)
  end)
end)
