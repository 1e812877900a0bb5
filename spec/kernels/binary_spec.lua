-- Tolerance: f32 exact but for division on a GPU (one step) and powers (the C library and
-- CUDA state 1 and 4 units in the last place); f16 and bf16 round once, powers by a
-- different number.
local ffi = require "ffi"
local kv = require "kvlab"
local S = require "spec.support"
local reference = require "spec.reference.math"

local OPS = { "ADD", "SUB", "MUL", "DIV", "MAX", "MIN", "POW",
              "EQ", "NE", "LT", "LE", "GT", "GE" }
local NAN = 0 / 0
local SHAPES = {   -- a, b, out
  { { 7 }, { 7 }, { 7 } }, { { 40003 }, { 40003 }, { 40003 } },
  { { 1 }, { 33 }, { 33 } }, { {}, { 2, 3 }, { 2, 3 } },
  { { 5, 1 }, { 5, 37 }, { 5, 37 } }, { { 3, 1, 17 }, { 4, 1 }, { 3, 4, 17 } },
  { { 2, 1, 3, 1, 5 }, { 4, 1, 2, 5 }, { 2, 4, 3, 2, 5 } },
  { { 700, 3 }, { 3 }, { 700, 3 } },
  { { 2, 600 }, { 600 }, { 2, 600 } }, { { 0, 4 }, { 4 }, { 0, 4 } },
}

local function words(shape) return "[" .. table.concat(shape, ",") .. "]" end

local function count(shape)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  return n
end

-- Coarse values, so that some are equal; NaN at places when floating.
local function input(dev, dtype, shape, seed)
  local rng, values, float = S.rng(seed), {}, dtype:find "f"
  for i = 1, count(shape) do
    values[i] = float and (rng(41) - 20) / 4 or rng(2001) - 1000
    if float and rng(50) == 0 then values[i] = NAN end
  end
  return kv.from(kv.device "cpu", dtype, shape, values):to(dev)
end

local function run(dev, op, dtype, shapes)
  local a, b = input(dev, dtype, shapes[1], 1), input(dev, dtype, shapes[2], 2)
  local compares = kv.C["KVL_BINARY_" .. op] >= kv.C.KVL_BINARY_EQ
  local out = S.poisoned(dev, compares and "u8" or dtype, shapes[3])
  kv.check(kv.C.kvl_binary(kv.C["KVL_BINARY_" .. op], a, b, out))
  return out
end

local function want(op, dtype, shapes, fn)
  local cpu = kv.device "cpu"
  local function spread(i)
    local values = input(cpu, dtype, shapes[i], i):list()
    return reference.broadcast(values, shapes[i], shapes[3])
  end
  local a, b = spread(1), spread(2)
  local out = reference.map(fn or reference.binary[op], a, b)
  for i, x in ipairs(out) do out[i] = reference.round(dtype, x) end
  return out
end

local function whole_divide(x, y)
  if y == 0 then return 0 end
  local q = x / y
  return q < 0 and math.ceil(q) or math.floor(q)
end

--- In 64 bits that wrap, by repeated products.
local function whole_power(dtype)
  local narrow = ffi.typeof(dtype == "i32" and "int32_t" or "int64_t")
  return function(x, y)
    if y < 0 then return x == 1 and 1 or x == -1 and (y % 2 == 0 and 1 or -1) or 0 end
    local r = 1LL
    for _ = 1, y do r = r * x end
    return tonumber(ffi.cast(narrow, r))
  end
end

local function tolerance(op, dtype)
  if op == "DIV" and dtype == "f32" then return 2 ^ -23 end
  if op ~= "POW" or dtype:find "i" then return 0 end
  return dtype == "f32" and 5e-7 or 2 * S.eps[dtype]
end

describe("binary", function()
  for _, shapes in ipairs(SHAPES) do
    for _, dtype in ipairs { "f32", "bf16", "i64" } do
      for _, op in ipairs { "SUB", "LT" } do
        S.agrees(("broadcasts %s %s and %s (%s)"):format(dtype, words(shapes[1]),
          words(shapes[2]), op),
          function(dev) return run(dev, op, dtype, shapes) end,
          function() return want(op, dtype, shapes) end, 0)
      end
    end
  end

  for _, op in ipairs(OPS) do
    for _, dtype in ipairs { "f32", "f16", "bf16", "i32", "i64" } do
      local shapes = { { 3, 1, 67 }, { 5, 67 }, { 3, 5, 67 } }
      local fn = nil
      if dtype:find "i" then
        fn = op == "DIV" and whole_divide or op == "POW" and whole_power(dtype) or nil
      end
      S.agrees(("computes %s of %s"):format(op, dtype),
        function(dev) return run(dev, op, dtype, shapes) end,
        function() return want(op, dtype, shapes, fn) end, 0, tolerance(op, dtype))
    end
  end

  S.it_on_cpu("squares exactly, and knows the edges of powers", function(dev)
    local a = S.randn(dev, "f32", { 1003 }, 7)
    S.equal(a ^ 2, a * a)
    local inf = 1 / 0
    local x = kv.from(dev, "f32", { 0, 0, -8, NAN, 1, inf, -inf, 2 })
    local y = kv.from(dev, "f32", { 0, -1, 1 / 3, 0, NAN, -1, 3, -2 })
    S.equal(x:pow(y), { 1, inf, NAN, 1, 1, 0, -inf, 0.25 })
    assert.same({ 8, -8, 0, 1 }, kv.from(dev, "i32", { 2, -2, 0, 1 }):pow(3):list())
    assert.same({ 1 }, kv.from(dev, "i64", { 0 }):pow(0):list())
  end)

  S.agrees("takes a scalar in f32 for bf16 tensors", function(dev)
    local a = input(dev, "bf16", { 131 }, 3)
    local out = S.poisoned(dev, "bf16", { 131 })
    kv.check(kv.C.kvl_binary_scalar(kv.C.KVL_BINARY_MUL, a, 0.1, out))
    return out
  end, function()
    local tenth = reference.round("f32", 0.1)
    return reference.map(function(x)
      return reference.round("bf16", reference.round("f32", x * tenth))
    end, input(kv.device "cpu", "bf16", { 131 }, 3):list())
  end, 0)

  S.agrees("truncates a scalar for whole numbers", function(dev)
    local a = input(dev, "i32", { 131 }, 3)
    local out = S.poisoned(dev, "i32", { 131 })
    kv.check(kv.C.kvl_binary_scalar(kv.C.KVL_BINARY_ADD, a, -2.9, out))
    return out
  end, function()
    return reference.map(function(x) return x - 2 end,
      input(kv.device "cpu", "i32", { 131 }, 3):list())
  end, 0)

  local lowest = -2 ^ 31
  S.agrees("wraps whole numbers and survives division by 0 and by -1", function(dev)
    local a = kv.from(dev, "i32", { 4 }, { lowest, 5, lowest, 2147483647 })
    local b = kv.from(dev, "i32", { 4 }, { -1, 0, 1, 1 })
    local divided, added = S.poisoned(dev, "i32", { 4 }), S.poisoned(dev, "i32", { 4 })
    kv.check(kv.C.kvl_binary(kv.C.KVL_BINARY_DIV, a, b, divided))
    kv.check(kv.C.kvl_binary(kv.C.KVL_BINARY_ADD, a, b, added))
    local out = kv.tensor(dev, "i32", { 2, 4 })
    out:index(0):copy_(divided)
    out:index(1):copy_(added)
    return out
  end, function()
    return { lowest, 0, lowest, 2147483647, 2147483647, 5, lowest + 1, lowest }
  end, 0)

  S.it_on_cpu("divides the least i64 by -1 without a trap", function(dev)
    local a = kv.full(dev, "i64", { 2 }, -2 ^ 63)
    kv.check(kv.C.kvl_binary_scalar(kv.C.KVL_BINARY_DIV, a, -1, a))
    assert.are.same({ -2 ^ 63, -2 ^ 63 }, a:list())
  end)

  S.it_on_cpu("may write over an input of its shape", function(dev)
    local a = input(dev, "f32", { 1003 }, 1)
    local b = input(dev, "f32", { 1003 }, 2)
    local expected = run(dev, "ADD", "f32", { { 1003 }, { 1003 }, { 1003 } })
    kv.check(kv.C.kvl_binary(kv.C.KVL_BINARY_ADD, a, b, b))
    S.equal(b, expected)
  end)

  it("refuses shapes that do not broadcast, and mixed dtypes", function()
    local cpu = kv.device "cpu"
    local a, b = kv.zeros(cpu, "f32", { 2, 3 }), kv.zeros(cpu, "f32", { 2, 4 })
    local h = kv.zeros(cpu, "f16", { 2, 3 })
    S.fails(kv.C.kvl_binary(0, a, b, a), "binary", "f32 [2, 3]",
      "f32 [2, 4]", "broadcast")
    S.fails(kv.C.kvl_binary(0, a, h, a), "b is f16 [2, 3]", "f32")
    S.fails(kv.C.kvl_binary(kv.C.KVL_BINARY_EQ, a, a, a),
      "out is f32 [2, 3]", "u8")
  end)
end)
