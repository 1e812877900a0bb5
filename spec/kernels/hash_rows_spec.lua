--- Exact but for bits whose projection is next to 0, see hash_cases. Every instruction
-- set and device gives the same bits: the order of each sum is fixed.
local kv = require "kvlab"
local hashes = require "spec.kernels.hash_cases"
local support = require "spec.support"

local cases = {}
for _, dtype in ipairs { "f32", "f16", "bf16" } do
  for _, s in ipairs { { 0, 64, 64 }, { 1, 8, 32 }, { 7, 24, 64 }, { 33, 80, 128 },
                       { 5, 128, 192 }, { 3, 256, 1024 }, { 300, 64, 64 } } do
    cases[#cases + 1] = { dtype = dtype, rows = s[1], dim = s[2], bits = s[3] }
  end
end

local inputs = support.latest(function(c)
  local cpu = kv.device "cpu"
  return { x = support.randn(cpu, c.dtype, { c.rows, c.dim }, 3),
           planes = support.randn(cpu, "f32", { c.bits, c.dim }, 4) }
end)

local function run(dev, c)
  local i = inputs(c)
  local out = support.poisoned(dev, "u64", { c.rows, math.ceil(c.bits / 64) })
  kv.check(kv.C.kvl_hash_rows(i.x:to(dev), i.planes:to(dev), out))
  return out
end

--- Numbers without a sign: no bit may be set by them, whatever is computed on the way.
local function odd_rows(dev)
  local x = kv.zeros(dev, "f32", { 4, 16 })
  x:index(1):fill_(0 / 0)
  x:index(2):fill_(-0.0)
  x:index(3):narrow(3, 1):fill_(1e-44) -- too small for a product
  return kv.hash.rows(x, kv.full(dev, "f32", { 64, 16 }, 0.01))
end

describe("hashing rows", function()
  support.it_on_cpu("takes the sides of the planes", function(dev)
    local near, all = 0, 0
    for i, c in ipairs(cases) do
      local words = hashes.words(run(dev, c))
      local x, planes = inputs(c).x:list(), inputs(c).planes:list()
      for row = 0, c.rows - 1 do
        near = near + hashes.check(words, row * math.ceil(c.bits / 64), x, row * c.dim,
          planes, c.bits, c.dim, ("row %d of case %d"):format(row, i))
        all = all + c.bits
      end
    end
    assert.is_true(near < all / 10000)
  end)

  support.it_on_cpu("gives the bits of every other instruction set", function(dev)
    for i, c in ipairs(cases) do
      local got, isa = run(dev, c), support.isa()
      for _, other in ipairs(support.isas()) do
        kv.check(kv.C.kvl_cpu_use_isa(other))
        hashes.equal(got, run(dev, c), ("case %d in %s"):format(i, other))
      end
      kv.check(kv.C.kvl_cpu_use_isa(isa))
    end
  end)

  support.it_on_cpu("is 0 where there is no side", function(dev)
    hashes.equal(odd_rows(dev), kv.zeros(dev, "u64", { 4, 1 }), "hashes")
  end)
end)

describe("hashing rows on CUDA #gpu", function()
  support.it_on_gpu("gives the CPU's bits", function(cuda, cpu)
    for i, c in ipairs(cases) do
      hashes.equal(run(cuda, c), run(cpu, c), ("case %d"):format(i))
    end
    hashes.equal(odd_rows(cuda), odd_rows(cpu), "rows without a side")
  end)

  support.it_on_gpu("gives the CPU's bits of many rows", function(cuda, cpu)
    for _, dtype in ipairs { "f32", "f16", "bf16" } do
      local c = { dtype = dtype, rows = 5000, dim = 128, bits = 256 }
      hashes.equal(run(cuda, c), run(cpu, c), dtype)
    end
  end)
end)
