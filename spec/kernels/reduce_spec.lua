-- Tolerance: 32 terms at most add up in f32 and those sums in double: 3e-7 of the sum of
-- magnitudes for random terms, whatever n. MAX and MIN are exact. f16 and bf16 results
-- add half a step. A GPU adds in another order: the same bounds.
local kv = require "kvlab"
local S = require "spec.support"
local reference = require "spec.reference.math"

local cpu = kv.device "cpu"

local function run(dev, op, a, shape, dim, out_dtype)
  local sizes = {}
  for i, size in ipairs(shape) do if i ~= dim + 1 then sizes[#sizes + 1] = size end end
  local out = S.poisoned(dev, out_dtype, sizes)
  kv.check(kv.C.kvl_reduce(kv.C["KVL_REDUCE_" .. op], a:to(dev), dim, out))
  return out
end

local function reference_of(op, values, shape, dim)
  local outer, inner = 1, 1
  for i, size in ipairs(shape) do
    if i <= dim then outer = outer * size elseif i > dim + 1 then inner = inner * size end
  end
  return reference.reduce(op, values, outer, shape[dim + 1], inner)
end

local CASES = {   -- shape, dim
  { { 7 }, 0 }, { { 1 }, 0 }, { { 5, 1 }, 1 }, { { 3, 37 }, 1 }, { { 3, 37 }, 0 },
  { { 40, 2, 130 }, 1 }, { { 2, 300, 67 }, 1 }, { { 2, 3, 5, 7 }, 2 }, { { 4, 5000 }, 1 },
  { { 3000, 17 }, 0 }, { { 513, 4 }, 1 }, { { 2, 140001 }, 1 }, { { 0, 3 }, 1 },
}

describe("reduce", function()
  for _, case in ipairs(CASES) do
    local shape, dim = case[1], case[2]
    local size = table.concat(shape, "x")
    for _, op in ipairs { "SUM", "MEAN", "MAX", "MIN" } do
      for _, dtypes in ipairs { { "f32", "f32" }, { "bf16", "f32" }, { "f16", "f16" } } do
        local a = S.randn(cpu, dtypes[1], shape, 3)
        local exact = op == "MAX" or op == "MIN"
        local n = op == "SUM" and shape[dim + 1] or 1
        S.agrees(("takes the %s of %s %s along %d into %s"):format(op, dtypes[1], size,
          dim, dtypes[2]),
          function(dev) return run(dev, op, a, shape, dim, dtypes[2]) end,
          function() return reference_of(op, a:list(), shape, dim) end,
          exact and 0 or 3e-7 * n,
          not exact and dtypes[2] == "f16" and 2 * S.eps.f16 or 0)
      end
    end
  end

  for _, op in ipairs { "SUM", "MAX", "MIN" } do
    for _, case in ipairs { { { 3, 1001 }, 1 }, { { 50, 33 }, 0 } } do
      local shape, dim = case[1], case[2]
      local a = kv.randint(cpu, "i32", shape, { seed = 1, low = -10 ^ 6, high = 10 ^ 6 })
      S.agrees(("is exact for i32: %s along %d"):format(op, dim),
        function(dev) return run(dev, op, a, shape, dim, "i32") end,
        function() return reference_of(op, a:list(), shape, dim) end, 0)
    end
  end

  S.agrees("is accurate over ten million numbers", function(dev)
    local a = kv.rand(cpu, "f32", { 10000000 }, { seed = 2 })
    return run(dev, "SUM", a, { 10000000 }, 0, "f32")
  end, function()
    local sum = 0
    for _, x in ipairs(kv.rand(cpu, "f32", { 10000000 }, { seed = 2 }):list()) do
      sum = sum + x
    end
    return { sum }
  end, 0, 3e-7)

  for _, op in ipairs { "SUM", "MEAN", "MAX", "MIN" } do
    for _, shape in ipairs { { 70 }, { 5, 70 }, { 70, 70 } } do
      S.agrees(("lets a NaN through %s (%d dims of %d)"):format(op, #shape, shape[1]),
        function(dev)
          local a = S.randn(cpu, "f32", shape, 1)
          a:reshape({ -1 }):narrow(a.count - 40, 1):fill_(0 / 0)
          return run(dev, op, a, shape, #shape - 1, "f32")
        end, function()
          local a = S.randn(cpu, "f32", shape, 1)
          local values = a:list()
          values[#values - 39] = 0 / 0
          return reference_of(op, values, shape, #shape - 1)
        end, 3e-5)
    end
  end

  S.agrees("gives 0, NaN and the infinities for an empty dimension", function(dev)
    local a, out = kv.tensor(cpu, "f32", { 3, 0 }), kv.tensor(dev, "f32", { 4, 3 })
    for i, op in ipairs { "SUM", "MEAN", "MAX", "MIN" } do
      out:index(i - 1):copy_(run(dev, op, a, { 3, 0 }, 1, "f32"))
    end
    return out
  end, function()
    local inf, nan = 1 / 0, 0 / 0
    return { 0, 0, 0, nan, nan, nan, -inf, -inf, -inf, inf, inf, inf }
  end, 0)

  it("refuses a dim out of range, a wrong out and the mean of whole numbers", function()
    local a, out = kv.zeros(cpu, "f32", { 2, 3 }), kv.zeros(cpu, "f32", { 3 })
    local i = kv.zeros(cpu, "i32", { 2, 3 })
    S.fails(kv.C.kvl_reduce(0, a, 2, out), "reduce", "dim is 2",
      "0 ... 1")
    S.fails(kv.C.kvl_reduce(0, a, 1, out), "out is f32 [3]", "[2]")
    S.fails(kv.C.kvl_reduce(kv.C.KVL_REDUCE_MEAN, i, 0, out),
      "a is i32 [2, 3]", "f32")
  end)
end)
