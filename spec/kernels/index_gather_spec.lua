--- Exact: what was appended comes back, and zeros for places that are none.
local index = require "spec.kernels.index_cases"
local kv = require "kvlab"
local reference = require "spec.reference.index"
local support = require "spec.support"

local BLOCKS, cases, inputs = index.BLOCKS, index.cases, index.inputs

local function gather(dev, c)
  local cache, places = index.append(dev, c)
  local k = support.poisoned(dev, "f8e4m3", { c.n, c.dim })
  local scales = support.poisoned(dev, "f32", { c.n })
  kv.check(kv.C.kvl_index_gather(cache, places, k, scales))
  return k, scales
end

describe("gathering index keys", function()
  support.it_on_cpu("brings back what was appended, zeros for no place", function(dev)
    for i, c in ipairs(cases) do
      local k, scales = gather(dev, c)
      local list, want, want_scales = inputs(c).k:list(), {}, {}
      for t, place in ipairs(inputs(c).places) do
        local has = place >= 0 and place < BLOCKS * c.block_size
        local values, scale = reference.quantise(list, (t - 1) * c.dim, c.dim)
        for d = 1, c.dim do want[#want + 1] = has and values[d] or 0 end
        want_scales[t] = has and scale or 0
      end
      support.equal(k, want, ("keys of case %d"):format(i))
      support.equal(scales, want_scales, ("scales of case %d"):format(i))
    end
  end)

  it("has words for what does not fit", function()
    local cpu = kv.device "cpu"
    local places, scales = kv.zeros(cpu, "i64", { 2 }), kv.zeros(cpu, "f32", { 2 })
    local function keys(n, d) return kv.zeros(cpu, "f8e4m3", { n, d }) end
    local function cache(bytes) return kv.zeros(cpu, "u8", { 3, bytes }) end
    local op = kv.C.kvl_index_gather
    support.fails(op(cache(100), places, keys(2, 64), scales), "cache", "100", "68")
    support.fails(op(cache(68), places, keys(3, 64), scales), "places", "3")
    support.fails(op(cache(68), places:cast "i32", keys(2, 64), scales), "places", "i64")
    support.fails(op(cache(68), places, kv.zeros(cpu, "f32", { 2, 64 }), scales), "k",
      "f8e4m3")
  end)
end)

describe("gathering index keys on CUDA #gpu", function()
  support.it_on_gpu("brings back what the CPU does", function(cuda, cpu)
    for i, c in ipairs(cases) do
      local k, scales = gather(cuda, c)
      local want, want_scales = gather(cpu, c)
      support.equal(k, want, ("keys of case %d"):format(i))
      support.equal(scales, want_scales, ("scales of case %d"):format(i))
    end
  end)
end)
