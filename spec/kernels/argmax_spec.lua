-- Tolerance: none, the answer is an index.
local kv = require "kvlab"
local S = require "spec.support"
local reference = require "spec.reference.math"

local cpu = kv.device "cpu"
local INF, NAN = 1 / 0, 0 / 0

local function run(dev, a, find)
  local sizes = a:dims()
  sizes[#sizes] = nil
  local out = S.poisoned(dev, "i32", sizes)
  kv.check(kv.C[find or "kvl_argmax"](a:to(dev), out))
  return out
end

local function negated(list)
  for i, x in ipairs(list) do list[i] = -x end
  return list
end

-- Few different values, so that rows have several largest ones.
local function coarse(dtype, shape)
  local rng, values, n = S.rng(5), {}, 1
  for _, size in ipairs(shape) do n = n * size end
  for i = 1, n do
    values[i] = rng(30) == 0 and dtype ~= "i32" and NAN or rng(50) - 25
  end
  return kv.from(cpu, dtype, shape, values)
end

describe("argmax", function()
  for _, dtype in ipairs { "f32", "f16", "bf16", "i32" } do
    for _, shape in ipairs { { 1 }, { 9, 1 }, { 200, 17 }, { 2, 3, 64 }, { 3, 40003 },
                             { 0, 5 } } do
      for name, make in pairs { normal = S.randn, coarse = false } do
        local a = make and make(cpu, dtype, shape, 8) or coarse(dtype, shape)
        S.agrees(("finds the first largest of %s %s %s"):format(name, dtype,
          table.concat(shape, "x")), function(dev) return run(dev, a) end,
          function() return reference.argmax(a:list(), shape[#shape]) end, 0)
        S.agrees(("finds the first least of %s %s %s"):format(name, dtype,
          table.concat(shape, "x")), function(dev) return run(dev, a, "kvl_argmin") end,
          function() return reference.argmax(negated(a:list()), shape[#shape]) end, 0)
      end
    end
  end

  S.agrees("never takes a NaN unless there is nothing else", function(dev)
    return run(dev, kv.from(cpu, "f32", { 5, 3 }, {
      NAN, -INF, -INF,  NAN, NAN, NAN,  -INF, -INF, -INF,  1, NAN, 1,  NAN, -5, INF }))
  end, function() return { 1, 0, 0, 0, 2 } end, 0)

  S.agrees("never takes a NaN as the least", function(dev)
    return run(dev, kv.from(cpu, "f32", { 5, 3 }, {
      NAN, INF, INF,  NAN, NAN, NAN,  INF, INF, INF,  1, NAN, 1,  NAN, 5, -INF }),
      "kvl_argmin")
  end, function() return { 1, 0, 0, 0, 2 } end, 0)

  for find, want in pairs { kvl_argmax = { 1, 0, 0 }, kvl_argmin = { 0, 1, 1 } } do
    S.agrees(find .. " takes the ends of i32", function(dev)
      local least, most = -2 ^ 31, 2 ^ 31 - 1
      local rows = { least, most, most, least, 0, least }
      return run(dev, kv.from(cpu, "i32", { 3, 2 }, rows), find)
    end, function() return want end, 0)
  end

  S.agrees("finds the last of a long row", function(dev)
    local a = kv.arange(cpu, "f32", 100003)
    return run(dev, a:reshape { 1, 100003 })
  end, function() return { 100002 } end, 0)

  it("refuses empty rows and an out that is not i32", function()
    local a, out = kv.zeros(cpu, "f32", { 2, 0 }), kv.zeros(cpu, "i32", { 2 })
    local f = kv.zeros(cpu, "f32", { 2 })
    S.fails(kv.C.kvl_argmax(a, out), "argmax", "0 elements",
      "1 or more")
    S.fails(kv.C.kvl_argmax(kv.zeros(cpu, "f32", { 2, 3 }), f),
      "out is f32 [2]", "i32")
  end)
end)
