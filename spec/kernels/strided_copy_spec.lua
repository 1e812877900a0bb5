--- transpose, expand, take_part and put_part, which one kernel computes.
-- Tolerance: none, elements are copied.
local kv = require "kvlab"
local S = require "spec.support"
local reference = require "spec.reference.math"

local cpu = kv.device "cpu"
local DTYPES = { "f32", "bf16", "f8e4m3", "i64" } -- one of each size
local at_each, element = reference.at_each, reference.element

--- Different numbers, as far as the dtype has so many.
local function input(dtype, shape)
  local n = 1
  for _, size in ipairs(shape) do n = n * size end
  local t = kv.tensor(cpu, dtype == "i64" and "i64" or "f32", shape):arange_(0, 1)
  if n > 100 and dtype == "f8e4m3" then t = S.randn(cpu, "f32", shape, 1) end
  return dtype == "i64" and t or t:cast(dtype)
end

local function words(shape) return "[" .. table.concat(shape, ",") .. "]" end

local function swapped(list, i, j)
  local copy = { unpack(list) }
  copy[i], copy[j] = copy[j], copy[i]
  return copy
end

describe("transpose", function()
  for _, case in ipairs {
    { { 3, 5 }, 0, 1 }, { { 1, 7 }, 0, 1 }, { { 7, 1 }, 1, 0 }, { { 4 }, 0, 0 },
    { { 65, 67 }, 0, 1 }, { { 200, 131 }, 1, 0 }, { { 2, 3, 5 }, 0, 2 },
    { { 2, 40, 33 }, 1, 2 }, { { 33, 2, 40 }, 0, 1 }, { { 2, 3, 4, 5, 2, 3 }, 1, 4 },
    { { 0, 5 }, 0, 1 }, { { 3, 64, 128 }, 1, 2 }, { { 5, 3, 4, 70 }, 0, 2 },
    { { 34, 3, 35, 2 }, 0, 2 },
  } do
    local shape, i, j = case[1], case[2], case[3]
    for _, dtype in ipairs(DTYPES) do
      S.agrees(("swaps dims %d and %d of %s %s"):format(i, j, dtype, words(shape)),
        function(dev)
          local a = input(dtype, shape):to(dev)
          local out = S.poisoned(dev, dtype, swapped(shape, i + 1, j + 1))
          kv.check(kv.C.kvl_transpose(a, i, j, out))
          return out
        end,
        function()
          local list = input(dtype, shape):list()
          return at_each(swapped(shape, i + 1, j + 1), function(index)
            return element(list, shape, swapped(index, i + 1, j + 1))
          end)
        end, 0)
    end
  end

  it("refuses dims that are not there, another shape, and to work in place", function()
    local a, b = kv.zeros(cpu, "f32", { 2, 3 }), kv.zeros(cpu, "f32", { 3, 2 })
    S.fails(kv.C.kvl_transpose(a, 0, 2, b), "transpose: dim1 is 2, expected 0 ... 1")
    S.fails(kv.C.kvl_transpose(a, -1, 1, b), "transpose: dim0 is -1, expected 0 ... 1")
    S.fails(kv.C.kvl_transpose(a, 0, 1, a), "out is f32 [2, 3]", "swapped, f32 [3, 2]")
    S.fails(kv.C.kvl_transpose(a, 0, 1, kv.zeros(cpu, "i32", { 3, 2 })), "out is i32")
    S.fails(kv.C.kvl_transpose(a, 0, 1, a:reshape { 3, 2 }), "out shares memory")
  end)
end)

describe("expand", function()
  for _, case in ipairs {
    { {}, { 3, 2 } }, { { 1 }, { 70001 } }, { { 5 }, { 3, 5 } }, { { 5, 1 }, { 5, 64 } },
    { { 3, 1, 17 }, { 2, 3, 4, 17 } }, { { 1, 4, 1, 8 }, { 6, 4, 5, 8 } },
    { { 1 }, { 0 } },
    { { 2, 1, 3, 1 }, { 2, 2, 3, 2 } }, { { 4, 3 }, { 4, 3 } }, { { 0, 1 }, { 0, 4 } },
  } do
    local shape, to = case[1], case[2]
    for _, dtype in ipairs(DTYPES) do
      S.agrees(("broadcasts %s %s to %s"):format(dtype, words(shape), words(to)),
        function(dev)
          local out = S.poisoned(dev, dtype, to)
          kv.check(kv.C.kvl_expand(input(dtype, shape):to(dev), out))
          return out
        end,
        function()
          return reference.broadcast(input(dtype, shape):list(), shape, to)
        end, 0)
    end
  end

  it("refuses shapes that do not broadcast", function()
    local a = kv.zeros(cpu, "f32", { 2, 3 })
    S.fails(kv.C.kvl_expand(a, kv.zeros(cpu, "f32", { 4, 3 })), "expand: a is f32 [2, 3]",
      "out is f32 [4, 3]")
    S.fails(kv.C.kvl_expand(a, kv.zeros(cpu, "f32", { 3 })), "does not broadcast")
  end)
end)

describe("parts of a tensor", function()
  for _, case in ipairs { -- shape, dim, start, length
    { { 10 }, 0, 3, 4 }, { { 6, 7 }, 1, 2, 3 }, { { 6, 64 }, 1, 16, 32 },
    { { 3, 5, 4 }, 1, 1, 3 }, { { 3, 5, 4 }, 1, 5, 0 }, { { 3, 5, 4 }, 2, 3, 1 },
    { { 2, 300, 130 }, 1, 7, 290 }, { { 1, 4, 1 }, 1, 0, 4 }, { { 0, 4 }, 1, 1, 2 },
    { { 2, 3, 2, 3, 2, 3 }, 3, 1, 2 },
  } do
    local shape, dim, start, length = unpack(case)
    local part = { unpack(shape) }
    part[dim + 1] = length
    for _, dtype in ipairs(DTYPES) do
      local text = ("%d entries from %d on along dim %d of %s %s"):format(length, start,
        dim, dtype, words(shape))
      S.agrees("takes " .. text, function(dev)
        local out = S.poisoned(dev, dtype, part)
        kv.check(kv.C.kvl_take_part(input(dtype, shape):to(dev), dim, start, out))
        return out
      end, function()
        local list = input(dtype, shape):list()
        return at_each(part, function(index)
          local from = { unpack(index) }
          from[dim + 1] = from[dim + 1] + start
          return element(list, shape, from)
        end)
      end, 0)
      S.agrees("puts " .. text, function(dev)
        local out = kv.full(dev, dtype, shape, 99)
        kv.check(kv.C.kvl_put_part(input(dtype, part):to(dev), dim, start, out))
        return out
      end, function()
        local list = input(dtype, part):list()
        local other = reference.round(dtype, dtype == "f8e4m3" and 96 or 99)
        return at_each(shape, function(index)
          local at = { unpack(index) }
          at[dim + 1] = at[dim + 1] - start
          if at[dim + 1] < 0 or at[dim + 1] >= length then return other end
          return element(list, part, at)
        end)
      end, 0)
    end
  end

  it("refuses entries that are not there, and other sizes", function()
    local a = kv.zeros(cpu, "f32", { 2, 5 })
    local b, c = kv.zeros(cpu, "f32", { 2, 3 }), kv.zeros(cpu, "f32", { 3, 3 })
    S.fails(kv.C.kvl_take_part(a, 1, 3, b),
      "take_part: entries 3 ... 6 of dim 1, expected within 0 ... 5")
    S.fails(kv.C.kvl_take_part(a, 1, -1, b), "entries -1 ... 2 of dim 1")
    S.fails(kv.C.kvl_take_part(a, 2, 0, b), "dim is 2, expected 0 ... 1")
    S.fails(kv.C.kvl_take_part(a, 1, 0, c), "out is f32 [3, 3]", "f32 [2, 3]")
    S.fails(kv.C.kvl_put_part(c, 1, 0, a), "put_part: a is f32 [3, 3]", "f32 [2, 3]")
    S.fails(kv.C.kvl_put_part(a:narrow(0, 1), 0, 1, a), "out shares memory")
  end)
end)
