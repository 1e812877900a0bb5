-- Tolerance: none, the value is rounded once.
local kv = require "kvlab"
local S = require "spec.support"
local reference = require "spec.reference.math"

local VALUES = { 0, 1, -1, 2.5, -2.5, 300, -300, 0.1, 1e10, -1e20, 3e38, 1e-40, 1 / 0,
                 -1 / 0, 0 / 0 }

describe("fill", function()
  for _, dtype in ipairs { "f32", "f16", "bf16", "i32", "i64", "u8", "u64" } do
    local function run(dev)
      local t = S.poisoned(dev, dtype, { #VALUES, 37 })
      for i, value in ipairs(VALUES) do
        -- neither 2^63 nor 2^64 - 1 is a Lua number
        local large = dtype:find "64" and math.abs(value) > 2 ^ 53
        kv.check(kv.C.kvl_fill(t:index(i - 1), large and 7 or value))
      end
      return t
    end
    local function want()
      local out = {}
      for _, value in ipairs(VALUES) do
        local large = dtype:find "64" and math.abs(value) > 2 ^ 53
        local x = reference.round(dtype, large and 7 or value)
        for _ = 1, 37 do out[#out + 1] = x end
      end
      return out
    end
    S.agrees("stores the nearest " .. dtype, run, want, 0)
  end

  S.agrees("reaches the last of many elements", function(dev)
    return kv.full(dev, "u8", { 1000003 }, 5):narrow(1000000 - 7, 10)
  end, function() return { 5, 5, 5, 5, 5, 5, 5, 5, 5, 5 } end, 0)

  S.it_on_cpu("fills nothing in an empty tensor", function(dev)
    assert.are.same({}, kv.full(dev, "f32", { 0, 3 }, 1):list())
  end)

  it("refuses a closed tensor", function()
    local t = kv.zeros(kv.device "cpu", "f32", { 2 })
    t:free()
    S.fails(kv.C.kvl_fill(t, 1), "fill", "t is closed", "tensor")
  end)
end)
