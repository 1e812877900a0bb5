-- Tolerance: a sum of squares, a root and two products in f32: 1e-6 relative; f16 and
-- bf16 add half a step. With a residual, the sum is rounded to its dtype before it is
-- used.
local kv = require "kvlab"
local S = require "spec.support"
local reference = require "spec.reference.math"

local cpu = kv.device "cpu"

local function inputs(dtype, weight_dtype, rows, dim)
  return S.randn(cpu, dtype, { rows, dim }, 1), S.randn(cpu, dtype, { rows, dim }, 2),
    S.randn(cpu, weight_dtype, { dim }, 3)
end

describe("rmsnorm", function()
  for _, size in ipairs { { 1, 1 }, { 3, 37 }, { 5, 256 }, { 130, 1000 }, { 2, 5001 },
                          { 0, 8 } } do
    for _, dtypes in ipairs { { "f32", "f32" }, { "bf16", "bf16" }, { "f16", "f32" } } do
      local rows, dim, dtype = size[1], size[2], dtypes[1]
      local text = ("%dx%d %s, weight %s"):format(rows, dim, dtype, dtypes[2])
      local rel = 1e-6 + (dtype == "f32" and 0 or 2 * S.eps[dtype])

      S.agrees("normalises " .. text, function(dev)
        local x, _, weight = inputs(dtype, dtypes[2], rows, dim)
        local out = S.poisoned(dev, dtype, { rows, dim })
        kv.check(kv.C.kvl_rmsnorm(x:to(dev), nil, weight:to(dev), 1e-5, out))
        return out
      end, function()
        local x, _, weight = inputs(dtype, dtypes[2], rows, dim)
        return reference.rmsnorm(x:list(), weight:list(), 1e-5)
      end, 1e-7, rel)

      local function sum()
        local x, residual = inputs(dtype, dtypes[2], rows, dim)
        return reference.map(function(a, b) return reference.round(dtype, a + b) end,
          x:list(), residual:list())
      end
      local function with_residual(dev)
        local x, residual, weight = inputs(dtype, dtypes[2], rows, dim)
        x, residual = x:clone():to(dev), residual:clone():to(dev)
        kv.check(kv.C.kvl_rmsnorm(x, residual, weight:to(dev), 1e-5, x))   -- in place
        return x, residual
      end
      S.agrees("adds to the residual first: " .. text, function(dev)
        local _, residual = with_residual(dev)
        return residual
      end, sum, 0)
      S.agrees("normalises the sum: " .. text, with_residual, function()
        local _, _, weight = inputs(dtype, dtypes[2], rows, dim)
        return reference.rmsnorm(sum(), weight:list(), 1e-5)
      end, 1e-7, rel)
    end
  end

  S.it_on_cpu("gives 0 for a row of 0", function(dev)
    local x = kv.zeros(dev, "f32", { 1, 9 })
    kv.check(kv.C.kvl_rmsnorm(x, nil, kv.ones(dev, "f32", { 9 }), 1e-6, x))
    S.equal(x, { 0, 0, 0, 0, 0, 0, 0, 0, 0 })
  end)

  -- Rows of whole 16-byte packs, and others.
  for _, size in ipairs { { 3, 64, 576 }, { 200, 512, 576 }, { 5, 20, 27 } } do
    local rows, dim, width = unpack(size)
    S.agrees(("normalises the first %d of %d numbers"):format(dim, width), function(dev)
      local x = S.randn(cpu, "bf16", { rows, width }, 4):to(dev)
      local weight = S.randn(cpu, "bf16", { dim }, 5):to(dev)
      return kv.ops.rmsnorm(x, weight, 1e-5, x)
    end, function()
      local x = S.randn(cpu, "bf16", { rows, width }, 4)
      local normed = reference.rmsnorm(x:narrow(0, dim, 1):list(),
        S.randn(cpu, "bf16", { dim }, 5):list(), 1e-5)
      local list = x:list()
      for r = 1, rows do
        for i = 1, dim do list[(r - 1) * width + i] = normed[(r - 1) * dim + i] end
      end
      return list
    end, 1e-7, 1e-6 + 2 * S.eps.bf16)
  end

  it("refuses a weight of another size and a negative eps", function()
    local x, weight = kv.zeros(cpu, "f32", { 2, 3 }), kv.zeros(cpu, "f32", { 4 })
    S.fails(kv.C.kvl_rmsnorm(x, nil, weight, 1e-5, x), "rmsnorm",
      "weight has 4 numbers", "at most the 3 of a row of x")
    local two = kv.zeros(cpu, "f32", { 2 })
    for _, call in ipairs { { nil, kv.zeros(cpu, "f32", { 2, 3 }) }, { x:clone(), x } } do
      S.fails(kv.C.kvl_rmsnorm(x, call[1], two, 1e-5, call[2]),
        "weight has 2 of the 3 numbers", "out to be x, and no residual")
    end
    local three = kv.zeros(cpu, "f32", { 3 })
    S.fails(kv.C.kvl_rmsnorm(x, nil, three, -1, x), "eps is -1", ">= 0")
  end)
end)
