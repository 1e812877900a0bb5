-- Tolerance: none, every pair of dtypes has one right answer.
local kv = require "kvlab"
local S = require "spec.support"
local reference = require "spec.reference.math"

local INF, NAN = 1 / 0, 0 / 0

-- Ties to round, subnormals, the ends of every type.
local EDGES = {
  0, -0.0, 1, -1, 0.5, 1.5, 2.5, -2.5, 2.999, -2.999, 254.9, 255, 256, -0.9, 65504, 65519,
  65520, -65520, 1e6, 448, 449, 464, 465, 480, -500, 2 ^ -6, 2 ^ -7, 2 ^ -9, 2 ^ -10,
  1.5 * 2 ^ -10, 3 * 2 ^ -10, 2 ^ -14, 2 ^ -24, 2 ^ -25, 1.0001 * 2 ^ -25, 2 ^ -133,
  2 ^ -149,
  1 + 2 ^ -8, 1 + 3 * 2 ^ -8, 1 + 2 ^ -11, 1 + 3 * 2 ^ -11, 1.0625, 1.1875, 17, 19,
  2147483520, 2147483648, -2147483648, -2147483904, 1e10, -1e10, 3.3e38, INF, -INF, NAN,
}
local WHOLE = { 0, 1, -1, 255, 256, -300, 2047, 2049, 2051, 16777217, 16777219,
                2147483647, -2147483648, 65519, 65520, 123456789 }
local LONG = { 2147483648, -2147483649, 2 ^ 40 + 1, -2 ^ 45, 2 ^ 52 + 1 }

local function inputs(dtype)
  local values = {}
  if dtype == "i32" or dtype == "i64" then
    for i = 1, 83 do
      values[i] = WHOLE[(i - 1) % #WHOLE + 1] + math.floor(i / #WHOLE) % 2
    end
    if dtype == "i64" then for _, x in ipairs(LONG) do values[#values + 1] = x end end
    for i, x in ipairs(values) do values[i] = reference.round(dtype, x) end
  elseif dtype == "u8" then
    for i = 0, 255 do values[#values + 1] = i end
  else
    for _, x in ipairs(EDGES) do values[#values + 1] = x end
    for i = 1, 200 do values[#values + 1] = math.sin(i) * 2 ^ (i % 40 - 20) end
    for i, x in ipairs(values) do values[i] = reference.round(dtype, x) end
  end
  return values
end

local FLOATS = { f32 = true, f16 = true, bf16 = true, f8e4m3 = true }
-- f8e4m3 cannot be made from a table except through the cast under test
local FROM = { "f32", "f16", "bf16", "i32", "i64", "u8" }
local TO = { "f32", "f16", "bf16", "f8e4m3", "i32", "i64", "u8" }

describe("cast", function()
  for _, from in ipairs(FROM) do
    for _, to in ipairs(TO) do
      if to ~= "f8e4m3" or FLOATS[from] then
        local values = inputs(from)
        local function run(dev)
          local a = kv.from(dev, from, { #values }, values)
          local out = kv.tensor(dev, to, { #values })
          kv.check(kv.C.kvl_cast(a, out))
          return out
        end
        local function want()
          local out = {}
          for i, x in ipairs(values) do
            if not FLOATS[from] and FLOATS[to] then x = reference.round("f32", x) end
            out[i] = reference.round(to, x)
          end
          return out
        end
        S.agrees(("turns %s into %s"):format(from, to), run, want, 0)
      end
    end
  end

  for _, to in ipairs { "f32", "f16", "bf16" } do
    S.agrees("keeps every f8e4m3 number in " .. to, function(dev)
      local bits = require("ffi").new("uint8_t[256]")
      for i = 0, 255 do bits[i] = i end
      local a = kv.tensor(dev, "f8e4m3", { 256 })
      kv.check(kv.C.kvl_tensor_write(a, bits, 256))
      local out = S.poisoned(dev, to, { 256 })
      kv.check(kv.C.kvl_cast(a, out))
      return out
    end, function()
      local out = {}
      for i = 0, 255 do
        local e, m = math.floor(i / 8) % 16, i % 8
        local x = e == 0 and m * 2 ^ -9 or (1 + m / 8) * 2 ^ (e - 7)
        if i % 128 == 127 then x = NAN end
        out[i + 1] = i >= 128 and -x or x
      end
      return out
    end, 0)
  end

  S.it_on_cpu("converts a long tensor to its end", function(dev)
    local a = kv.arange(dev, "f32", 100003)
    assert.are.equal(100002, a:cast("i32"):narrow(100002, 1):item())
    assert.are.equal(99840, a:cast("bf16"):narrow(100002, 1):item())
  end)

  it("refuses f8e4m3 with whole numbers, and other shapes", function()
    local cpu = kv.device "cpu"
    local a, b = kv.tensor(cpu, "f8e4m3", { 4 }), kv.tensor(cpu, "i32", { 4 })
    S.fails(kv.C.kvl_cast(a, b), "cast", "f8e4m3", "i32")
    local c = kv.tensor(cpu, "f32", { 5 })
    S.fails(kv.C.kvl_cast(a, c), "out is f32 [5]", "f8e4m3 [4]")
  end)
end)
