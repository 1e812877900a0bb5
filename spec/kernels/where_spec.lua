-- Tolerance: none, elements are copied.
local kv = require "kvlab"
local S = require "spec.support"
local reference = require "spec.reference.math"

local function inputs(dev, dtype, n)
  local cpu, rng, bits, x, y = kv.device "cpu", S.rng(n + 1), {}, {}, {}
  for i = 1, n do bits[i], x[i], y[i] = rng(3), i % 100, 100 + i % 100 end
  return kv.from(cpu, "u8", { n }, bits):to(dev), kv.from(cpu, dtype, { n }, x):to(dev),
    kv.from(cpu, dtype, { n }, y):to(dev), bits, x, y
end

describe("where", function()
  for _, dtype in ipairs { "f32", "f16", "bf16", "i32", "i64", "u8" } do
    for _, n in ipairs { 0, 1, 37, 70001 } do
      S.agrees(("chooses between %d %s"):format(n, dtype), function(dev)
        local cond, a, b = inputs(dev, dtype, n)
        local out = S.poisoned(dev, dtype, { n })
        kv.check(kv.C.kvl_where(cond, a, b, out))
        return out
      end, function()
        local _, _, _, bits, x, y = inputs(kv.device "cpu", dtype, n)
        local out = {}
        for i = 1, n do out[i] = bits[i] ~= 0 and x[i] or y[i] end
        return out
      end, 0)
    end
  end

  for _, dtype in ipairs { "f32", "f16", "bf16", "f8e4m3", "i32", "i64", "u8",
                           "u64" } do
    for sides, n in pairs { a = 37, b = 70001, both = 1003, none = 0 } do
      S.agrees(("takes a number for %s of %d %s"):format(sides, n, dtype), function(dev)
        local cond, a, b = inputs(dev, "f32", n)
        if dtype == "f32" or dtype == "f16" or dtype == "bf16" or dtype == "f8e4m3" then
          a, b = a:cast(dtype), b:cast(dtype)
        else
          a = kv.from(dev, dtype, { n }, a:list())
          b = kv.from(dev, dtype, { n }, b:list())
        end
        local out = S.poisoned(dev, dtype, { n })
        if sides == "a" or sides == "both" then a = nil end
        if sides == "b" or sides == "both" then b = nil end
        kv.check(kv.C.kvl_where_scalar(cond, a, 2.5, b, 300, out))
        return out
      end, function()
        local _, _, _, bits, x, y = inputs(kv.device "cpu", "f32", n)
        local out = {}
        for i = 1, n do
          local from_a = (sides == "a" or sides == "both") and 2.5 or x[i]
          local from_b = (sides == "b" or sides == "both") and 300 or y[i]
          out[i] = reference.round(dtype, bits[i] ~= 0 and from_a or from_b)
        end
        return out
      end, 0)
    end
  end

  S.it_on_cpu("keeps NaN and infinities that are numbers", function(dev)
    local cond = kv.from(dev, "u8", { 1, 0 })
    S.equal(cond:where(0 / 0, -1 / 0), { 0 / 0, -1 / 0 })
    assert.equal("f32", cond:where(1, 2):type())
    assert.equal("i32", cond:where(kv.ones(dev, "i32", { 2 }), 2.9):type())
    assert.same({ 1, 2 }, cond:where(kv.ones(dev, "i32", { 2 }), 2.9):list())
  end)

  S.it_on_cpu("may write over either choice", function(dev)
    local cond, a, b = inputs(dev, "f32", 1003)
    local out = S.poisoned(dev, "f32", { 1003 })
    kv.check(kv.C.kvl_where(cond, a, b, out))
    local over_a, over_b = a:clone(), b:clone()
    kv.check(kv.C.kvl_where(cond, over_a, b, over_a))
    kv.check(kv.C.kvl_where(cond, a, over_b, over_b))
    S.equal(over_a, out)
    S.equal(over_b, out)
  end)

  it("refuses a condition that is not u8, and other shapes", function()
    local cpu = kv.device "cpu"
    local f, c = kv.zeros(cpu, "f32", { 3 }), kv.zeros(cpu, "u8", { 3 })
    local g = kv.zeros(cpu, "f32", { 4 })
    S.fails(kv.C.kvl_where(f, f, f, f), "where",
      "cond is f32 [3]", "u8")
    S.fails(kv.C.kvl_where(c, f, g, f), "b is f32 [4]", "[3]")
    S.raises("where: a is \"x\", expected a tensor or a number", c.where, c, "x", f)
    S.raises("where: b is nil, expected a tensor or a number", c.where, c, f)
    S.fails(kv.C.kvl_where(c, nil, f, f), "where: a is missing")
  end)
end)
