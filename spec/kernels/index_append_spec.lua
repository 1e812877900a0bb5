--- Exact, byte by byte; what index_gather brings back is what was written.
local kv = require "kvlab"
local reference = require "spec.reference.index"
local support = require "spec.support"

local BLOCKS = 5

local cases = {}
for i, dtype in ipairs { "f32", "f16", "bf16" } do
  for j, s in ipairs { { 0, 32, 16 }, { 1, 64, 1 }, { 4, 128, 1 }, { 13, 32, 7 },
                       { 60, 64, 17 }, { 300, 128, 64 } } do
    cases[#cases + 1] = { dtype = dtype, n = s[1], dim = s[2], block_size = s[3],
                          seed = 10 * i + j }
  end
end

--- Tokens at random slots, some of which are none.
local inputs = support.latest(function(c)
  local rng = support.rng(c.seed)
  local slots = support.distinct(rng, c.n, BLOCKS * c.block_size)
  for i = 3, c.n, 3 do slots[i] = -1 end
  if c.n > 1 then slots[2] = BLOCKS * c.block_size + 1 end
  local k = support.randn(kv.device "cpu", c.dtype, { c.n, c.dim }, c.seed)
  return { slots = slots, k = k }
end)

local function append(dev, c)
  local i = inputs(c)
  local cache = support.poisoned(dev, "u8", { BLOCKS, c.block_size * (c.dim + 4) })
  local slots = kv.from(dev, "i64", { c.n }, i.slots)
  kv.check(kv.C.kvl_index_append(i.k:to(dev), slots, cache))
  return cache, slots
end

local function expected(c)
  local i, bytes = inputs(c), {}
  local row = c.block_size * (c.dim + 4)
  for b = 1, BLOCKS * row do bytes[b] = 77 end
  local k = i.k:list()
  for t, slot in ipairs(i.slots) do
    if slot >= 0 and slot < BLOCKS * c.block_size then
      local values, scale = reference.quantise(k, (t - 1) * c.dim, c.dim)
      local block, offset = math.floor(slot / c.block_size), slot % c.block_size
      for d = 1, c.dim do
        bytes[block * row + offset * c.dim + d] = reference.byte(values[d])
      end
      for b, byte in ipairs(reference.float_bytes(scale)) do
        bytes[block * row + c.block_size * c.dim + 4 * offset + b] = byte
      end
    end
  end
  return bytes
end

local function gather(dev, c)
  local cache, slots = append(dev, c)
  local k = support.poisoned(dev, "f8e4m3", { c.n, c.dim })
  local scales = support.poisoned(dev, "f32", { c.n })
  kv.check(kv.C.kvl_index_gather(cache, slots, k, scales))
  return k, scales
end

describe("appending index keys", function()
  support.it_on_cpu("writes keys and scales of the slots that there are", function(dev)
    for i, c in ipairs(cases) do
      support.equal((append(dev, c)), expected(c), ("cache of case %d"):format(i))
    end
  end)

  it("has words for what does not fit", function()
    local cpu = kv.device "cpu"
    local k, slots = kv.zeros(cpu, "f32", { 2, 64 }), kv.zeros(cpu, "i64", { 2 })
    local function cache(bytes) return kv.zeros(cpu, "u8", { 3, bytes }) end
    support.fails(kv.C.kvl_index_append(k, slots, cache(100)), "cache", "100", "68")
    support.fails(kv.C.kvl_index_append(k, slots, cache(0)), "cache", "68")
    local odd = kv.zeros(cpu, "f32", { 2, 48 })
    support.fails(kv.C.kvl_index_append(odd, slots, cache(52)), "dim is 48",
      "32, 64 or 128")
    support.fails(kv.C.kvl_index_append(k, slots:cast "i32", cache(68)), "slots", "i64")
  end)
end)

describe("gathering index keys", function()
  support.it_on_cpu("brings back what was appended, zeros for no slot", function(dev)
    for i, c in ipairs(cases) do
      local k, scales = gather(dev, c)
      local list, want, want_scales = inputs(c).k:list(), {}, {}
      for t, slot in ipairs(inputs(c).slots) do
        local has = slot >= 0 and slot < BLOCKS * c.block_size
        local values, scale = reference.quantise(list, (t - 1) * c.dim, c.dim)
        for d = 1, c.dim do want[#want + 1] = has and values[d] or 0 end
        want_scales[t] = has and scale or 0
      end
      support.equal(k, want, ("keys of case %d"):format(i))
      support.equal(scales, want_scales, ("scales of case %d"):format(i))
    end
  end)
end)

describe("index keys on CUDA #gpu", function()
  support.it_on_gpu("are the CPU's bytes, and come back", function(cuda, cpu)
    for i, c in ipairs(cases) do
      support.equal((append(cuda, c)), (append(cpu, c)), ("cache of case %d"):format(i))
      local k, scales = gather(cuda, c)
      local want, want_scales = gather(cpu, c)
      support.equal(k, want, ("keys of case %d"):format(i))
      support.equal(scales, want_scales, ("scales of case %d"):format(i))
    end
  end)
end)
