-- Tolerance: none, a sum in double is rounded once.
local kv = require "kvlab"
local S = require "spec.support"
local reference = require "spec.reference.math"

describe("arange", function()
  for _, case in ipairs {
    { "f32", 0, 1, 1003 }, { "f32", -3.7, 0.1, 1003 }, { "f16", 5, -0.25, 37 },
    { "bf16", 1000, 1, 65 }, { "i32", 7, 3, 1003 }, { "i32", 0, 0.5, 33 },
    { "i32", 2147483600, 7, 20 }, { "i64", -4e9, 1e9, 9 }, { "u8", -5, 1, 300 },
    { "u64", 0, 2, 17 }, { "f32", 1, 1, 0 }, { "i32", 0, 1, 100003 },
  } do
    local dtype, start, step, n = case[1], case[2], case[3], case[4]
    S.agrees(("counts %d %s from %g by %g"):format(n, dtype, start, step), function(dev)
      local t = S.poisoned(dev, dtype, { n })
      kv.check(kv.C.kvl_arange(t, start, step))
      return t
    end, function()
      local out = {}
      for i = 0, n - 1 do out[i + 1] = reference.round(dtype, start + i * step) end
      return out
    end, 0)
  end

  it("refuses f8e4m3", function()
    local t = kv.tensor(kv.device "cpu", "f8e4m3", { 4 })
    S.fails(kv.C.kvl_arange(t, 0, 1), "arange", "t is f8e4m3 [4]",
      "expected f32")
  end)
end)
