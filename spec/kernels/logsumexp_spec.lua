-- Tolerance: an exponential is good to 4e-7, and the sum has positive terms only, so its
-- logarithm is good to 4e-7 absolute; adding the maximum rounds once. f16 and bf16
-- results add half a step.
local kv = require "kvlab"
local S = require "spec.support"
local reference = require "spec.reference.math"

local cpu = kv.device "cpu"
local INF, NAN = 1 / 0, 0 / 0

local function run(dev, a, dim, out_dtype)
  local sizes = a:dims()
  table.remove(sizes, dim + 1)
  local out = S.poisoned(dev, out_dtype or a:type(), sizes)
  kv.check(kv.C.kvl_logsumexp(a:to(dev), dim, out))
  return out
end

local function want(a, dim)
  local shape, outer, inner = a:dims(), 1, 1
  for i, size in ipairs(shape) do
    if i <= dim then outer = outer * size elseif i > dim + 1 then inner = inner * size end
  end
  return reference.logsumexp(a:list(), outer, shape[dim + 1], inner)
end

describe("logsumexp", function()
  for _, case in ipairs { -- shape, dim
    { { 7 }, 0 }, { { 1 }, 0 }, { { 5, 1 }, 1 }, { { 3, 37 }, 1 }, { { 3, 37 }, 0 },
    { { 40, 2, 130 }, 1 }, { { 2, 300, 67 }, 1 }, { { 2, 3, 5, 7 }, 2 },
    { { 4, 5000 }, 1 }, { { 3000, 17 }, 0 }, { { 513, 4 }, 1 }, { { 2, 140001 }, 1 },
    { { 0, 3 }, 1 },
    { { 3, 0 }, 1 }, { { 3, 0, 2 }, 1 },
  } do
    local shape, dim = case[1], case[2]
    for _, dtypes in ipairs { { "f32", "f32" }, { "bf16", "f32" }, { "f16", "f16" } } do
      local a
      local function made()
        a = a or kv.randn(cpu, "f32", shape, { seed = 4, std = 8 }):cast(dtypes[1])
        return a
      end
      S.agrees(("of %s %s along %d into %s"):format(dtypes[1], table.concat(shape, "x"),
        dim, dtypes[2]), function(dev) return run(dev, made(), dim, dtypes[2]) end,
        function() return want(made(), dim) end, 6e-7,
        dtypes[2] == "f16" and 2 * S.eps.f16 or 2 * S.eps.f32)
    end
  end

  local ODD = { { -INF, -INF, -INF }, { -INF, 3, -INF }, { INF, 1, -INF },
                { INF, INF, 0 }, { NAN, 1, 2 }, { INF, NAN, 1 },
                { -INF, NAN, -INF }, { 1000, 1000, -1000 },
                { -1000, -1001, -5000 }, { 3e38, 3e38, 0 } }
  S.agrees("knows infinities, NaN and large numbers", function(dev)
    return run(dev, kv.from(cpu, "f32", ODD), 1)
  end, function() return want(kv.from(cpu, "f32", ODD), 1) end, 6e-7, 2 * S.eps.f32)
  S.agrees("knows them in columns, too", function(dev)
    return run(dev, kv.from(cpu, "f32", ODD):transpose(), 0)
  end, function() return want(kv.from(cpu, "f32", ODD), 1) end, 6e-7, 2 * S.eps.f32)

  S.it_on_cpu("takes all elements without a dim", function(dev)
    local a = S.randn(dev, "f32", { 5, 40 }, 3)
    S.close(a:logsumexp(), want(a:reshape { 200 }, 0), 6e-7, 2 * S.eps.f32)
    S.equal(a:logsumexp(-2), a:logsumexp(0))
  end)

  it("refuses other dtypes, shapes and dims", function()
    local a, i = kv.zeros(cpu, "f32", { 2, 3 }), kv.zeros(cpu, "i32", { 2, 3 })
    local out = kv.zeros(cpu, "f32", { 2 })
    S.fails(kv.C.kvl_logsumexp(i, 1, out), "logsumexp: a is i32 [2, 3]")
    S.fails(kv.C.kvl_logsumexp(a, 2, out), "logsumexp: dim is 2, expected 0 ... 1")
    S.fails(kv.C.kvl_logsumexp(a, 0, out), "out is f32 [2]", "f32 [3]")
    S.raises("logsumexp: dim is 2 of 2 dims", a.logsumexp, a, 2)
  end)
end)
