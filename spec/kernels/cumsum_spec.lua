-- Tolerance: sums are in double and rounded once: half a step of the dtype. The order of
-- additions in double moves an f32 result by one step at most.
local kv = require "kvlab"
local S = require "spec.support"
local reference = require "spec.reference.math"

local cpu = kv.device "cpu"
local INF, NAN = 1 / 0, 0 / 0
local CASES = { -- shape, dim
  { { 1 }, 0 }, { { 7 }, 0 }, { { 3, 37 }, 1 }, { { 3, 37 }, 0 }, { { 200, 5 }, 1 },
  { { 2, 300, 67 }, 1 }, { { 2, 3, 5, 7 }, 2 }, { { 4, 5000 }, 1 }, { { 2, 100001 }, 1 },
  { { 3000, 17 }, 0 }, { { 0, 3 }, 1 }, { { 3, 0 }, 1 }, { { 5, 1, 4 }, 1 },
  { { 3, 1024 }, 1 }, { { 3, 1028 }, 1 },
}

local function outer_inner(shape, dim)
  local outer, inner = 1, 1
  for i, size in ipairs(shape) do
    if i <= dim then outer = outer * size elseif i > dim + 1 then inner = inner * size end
  end
  return outer, shape[dim + 1], inner
end

local function run(dev, a, dim)
  local out = S.poisoned(dev, a:type(), a:dims())
  kv.check(kv.C.kvl_cumsum(a:to(dev), dim, out))
  return out
end

describe("cumsum", function()
  for _, case in ipairs(CASES) do
    local shape, dim = case[1], case[2]
    for _, dtype in ipairs { "f32", "f16", "bf16", "i32", "i64" } do
      local a
      local function made()
        a = a or (dtype:find "i"
          and kv.randint(cpu, dtype, shape, { seed = 2, low = -1000, high = 1000 })
          or S.randn(cpu, dtype, shape, 2))
        return a
      end
      S.agrees(("adds up %s %s along %d"):format(dtype, table.concat(shape, "x"), dim),
        function(dev) return run(dev, made(), dim) end,
        function()
          local sums = reference.cumsum(made():list(), outer_inner(shape, dim))
          for i, x in ipairs(sums) do sums[i] = reference.round(dtype, x) end
          return sums
        end, dtype:find "i" and 0 or 1e-9, dtype:find "i" and 0 or 2 * S.eps[dtype])
    end
  end

  S.agrees("is NaN after a NaN, and knows infinities", function(dev)
    return run(dev, kv.from(cpu, "f32", { 3, 4 }, {
      1, NAN, 2, INF,  1, INF, 2, -INF,  3e38, 3e38, -3e38, -3e38 }), 1)
  end, function()
    return { 1, NAN, NAN, NAN, 1, INF, INF, NAN, reference.round("f32", 3e38), INF,
             reference.round("f32", 3e38), 0 }
  end, 0)

  S.agrees("wraps whole numbers", function(dev)
    return run(dev, kv.from(cpu, "i32", { 2 ^ 31 - 1, 1, -1 }), 0)
  end, function() return { 2 ^ 31 - 1, -2 ^ 31, 2 ^ 31 - 1 } end, 0)

  S.it_on_cpu("works in place, and along the last dim by default", function(dev)
    local a = kv.ones(dev, "f32", { 2, 3 })
    assert.same({ 1, 2, 3, 1, 2, 3 }, a:cumsum():list())
    a:cumsum(-2, a)
    assert.same({ 1, 1, 1, 2, 2, 2 }, a:list())
  end)

  it("refuses other dtypes, shapes and dims", function()
    local a, u = kv.zeros(cpu, "f32", { 2, 3 }), kv.zeros(cpu, "u8", { 2, 3 })
    S.fails(kv.C.kvl_cumsum(u, 0, u), "cumsum: a is u8 [2, 3], expected",
      "f32|f16|bf16|i32|i64")
    S.fails(kv.C.kvl_cumsum(a, 2, a), "cumsum: dim is 2, expected 0 ... 1")
    S.fails(kv.C.kvl_cumsum(a, 0, kv.zeros(cpu, "f32", { 3 })), "out is f32 [3]")
    S.raises("cumsum: dim is 2 of 2 dims", a.cumsum, a, 2)
    S.raises("cumsum: dim is \"x\", expected a whole number", a.cumsum, a, "x")
    S.raises("cumsum: dim is -1 of 0 dims", a.cumsum, kv.zeros(cpu, "f32", {}))
  end)
end)
