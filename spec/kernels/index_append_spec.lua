--- Exact, byte by byte.
local index = require "spec.kernels.index_cases"
local kv = require "kvlab"
local reference = require "spec.reference.index"
local support = require "spec.support"

local BLOCKS, cases = index.BLOCKS, index.cases
local inputs, append = index.inputs, index.append

local function expected(c)
  local i, bytes = inputs(c), {}
  local row = c.block_size * (c.dim + 4)
  for b = 1, BLOCKS * row do bytes[b] = 77 end
  local k = i.k:list()
  for t, place in ipairs(i.places) do
    if place >= 0 and place < BLOCKS * c.block_size then
      local values, scale = reference.quantise(k, (t - 1) * c.dim, c.dim)
      local block, offset = math.floor(place / c.block_size), place % c.block_size
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

describe("appending index keys", function()
  support.it_on_cpu("writes keys and scales of the places that there are", function(dev)
    for i, c in ipairs(cases) do
      support.equal((append(dev, c)), expected(c), ("cache of case %d"):format(i))
    end
  end)

  it("has words for what does not fit", function()
    local cpu = kv.device "cpu"
    local k, places = kv.zeros(cpu, "f32", { 2, 64 }), kv.zeros(cpu, "i64", { 2 })
    local function cache(bytes) return kv.zeros(cpu, "u8", { 3, bytes }) end
    local function fails(keys, at, bytes, ...)
      support.fails(kv.C.kvl_index_append(keys, at, 0, 0, cache(bytes)), ...)
    end
    fails(k, places, 100, "cache", "100", "68")
    fails(k, places, 0, "cache", "68")
    fails(kv.zeros(cpu, "f32", { 2, 48 }), places, 52, "dim is 48", "32, 64 or 128")
    fails(k, places:cast "i32", 68, "places", "i64")
  end)
end)

describe("appending index keys on CUDA #gpu", function()
  support.it_on_gpu("writes the CPU's bytes", function(cuda, cpu)
    for i, c in ipairs(cases) do
      support.equal((append(cuda, c)), (append(cpu, c)), ("cache of case %d"):format(i))
    end
  end)
end)
