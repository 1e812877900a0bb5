-- Tolerance: exponential and division in f32: 1e-6 relative; scale * a and its distance
-- from the maximum round too, a step of up to 80 here: 80 * 2^-23. Results below 1e-37
-- may be 0. f16 and bf16 results add half a step.
local kv = require "kvlab"
local S = require "spec.support"
local reference = require "spec.reference.math"

local cpu = kv.device "cpu"
local INF, NAN = 1 / 0, 0 / 0

local function run(dev, a, scale, out_dtype)
  local out = S.poisoned(dev, out_dtype, a:dims())
  kv.check(kv.C.kvl_softmax(a:to(dev), scale, out))
  return out
end

describe("softmax", function()
  for _, shape in ipairs { { 1, 1 }, { 3, 5 }, { 2, 3, 64 }, { 5, 1000 }, { 2, 100003 },
                           { 0, 4 }, { 3, 0 } } do
    for _, dtypes in ipairs { { "f32", "f32" }, { "f16", "f32" }, { "bf16", "bf16" } } do
      for _, scale in ipairs { 1, -9.5 } do
        local a = S.randn(cpu, dtypes[1], shape, 4)
        local n = shape[#shape]
        S.agrees(("of %s %s into %s, scale %g"):format(dtypes[1],
          table.concat(shape, "x"), dtypes[2], scale),
          function(dev) return run(dev, a, scale, dtypes[2]) end,
          function() return n == 0 and {} or reference.softmax(a:list(), n, scale) end,
          1e-37, 1e-6 + 80 * 2 ^ -23 + (dtypes[2] == "f32" and 0 or 2 * S.eps[dtypes[2]]))
      end
    end
  end

  local rows = {
    -INF, -INF, -INF, -INF, -INF,   0, -INF, 0, -INF, -INF,
    1e30, 1e30, -1e30, 0, 1e30,     3, NAN, 1, 2, -INF,     NAN, NAN, NAN, NAN, NAN,
    -1e38, -1e38, -1e38, -1e38, -1e38,
  }
  S.agrees("gives zeros for a row of -inf and NaN for a row with a NaN", function(dev)
    return run(dev, kv.from(cpu, "f32", { 6, 5 }, rows), 1, "f32")
  end, function()
    local third = 1 / 3
    return { 0, 0, 0, 0, 0,  0.5, 0, 0.5, 0, 0,  third, third, 0, 0, third,
             NAN, NAN, NAN, NAN, NAN,  NAN, NAN, NAN, NAN, NAN,  .2, .2, .2, .2, .2 }
  end, 1e-7)

  S.it_on_cpu("may write over its input", function(dev)
    local a = S.randn(dev, "f32", { 3, 77 }, 1)
    local out = run(dev, a, 2, "f32")
    kv.check(kv.C.kvl_softmax(a, 2, a))
    S.equal(a, out)
  end)

  it("refuses whole numbers and another shape", function()
    local i, f = kv.zeros(cpu, "i32", { 2, 3 }), kv.zeros(cpu, "f32", { 2, 3 })
    local g = kv.zeros(cpu, "f32", { 3, 3 })
    S.fails(kv.C.kvl_softmax(i, 1, f), "softmax", "a is i32 [2, 3]",
      "f32")
    S.fails(kv.C.kvl_softmax(f, 1, g), "out is f32 [3, 3]",
      "[2, 3]")
  end)
end)
