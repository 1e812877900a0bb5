--- Sums of n f32 numbers in log2 n steps: 1e-6 of the sum of sizes, then a rounding.
-- Every device gives the same bits.
local kv = require "kvlab"
local reference = require "spec.reference.index"
local support = require "spec.support"

local cases = {}
for _, dtype in ipairs { "f32", "f16", "bf16" } do
  for _, dims in ipairs { { 0, 8 }, { 5, 1 }, { 9, 2 }, { 7, 16 }, { 3, 32 },
                          { 2, 3, 64 }, { 5, 128 },
                          { 3, 256 }, { 2, 512 }, { 3, 1024 } } do
    cases[#cases + 1] = { dtype = dtype, dims = dims, scale = dims[#dims] ^ -0.5 }
  end
end

local function run(dev, c)
  local x = support.randn(kv.device "cpu", c.dtype, c.dims, 5)
  local out = support.poisoned(dev, c.dtype, c.dims)
  kv.check(kv.C.kvl_hadamard(x:to(dev), c.scale, out))
  return out, x
end

describe("the Hadamard transform", function()
  support.it_on_cpu("is the product with a matrix of signs", function(dev)
    for i, c in ipairs(cases) do
      local out, x = run(dev, c)
      local list, dim, want = x:list(), c.dims[#c.dims], {}
      for row = 0, tonumber(x.count) / dim - 1 do
        for _, v in ipairs(reference.hadamard(list, row * dim, dim, c.scale)) do
          want[#want + 1] = v
        end
      end
      support.close(out, want, 1e-5, support.eps[c.dtype], ("case %d"):format(i))
    end
  end)

  support.it_on_cpu("undoes itself, in place", function(dev)
    local x = support.randn(dev, "f32", { 33, 128 }, 6)
    local y = x:clone()
    for _ = 1, 2 do kv.check(kv.C.kvl_hadamard(y, 128 ^ -0.5, y)) end
    support.close(y, x, 2e-6)
    assert.is_true((kv.ops.hadamard(x) - x):abs():max():item() > 0.1)
  end)

  it("has words for what does not fit", function()
    local x = kv.zeros("cpu", "f32", { 2, 24 })
    support.fails(kv.C.kvl_hadamard(x, 1, x), "24", "power of two")
    local y = kv.zeros("cpu", "f32", { 2, 32 })
    support.fails(kv.C.kvl_hadamard(y, 0 / 0, y), "scale", "finite")
    support.fails(kv.C.kvl_hadamard(y, 1, kv.zeros("cpu", "bf16", { 2, 32 })), "out",
      "f32")
  end)
end)

describe("the Hadamard transform on CUDA #gpu", function()
  support.it_on_gpu("gives the CPU's bits", function(cuda, cpu)
    for i, c in ipairs(cases) do
      support.equal((run(cuda, c)), (run(cpu, c)), ("case %d"):format(i))
    end
  end)
end)
