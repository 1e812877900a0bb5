-- Tolerance: none, elements are copied.
local kv = require "kvlab"
local S = require "spec.support"

local cpu = kv.device "cpu"

local function case(dtype, rows, n, m)
  local rng, index = S.rng(n + m), {}
  for i = 1, rows * m do index[i] = rng(n + 2) - 1 end   -- -1 and n are out of range
  local src = kv.arange(cpu, "f32", rows * n):cast(dtype):reshape { rows, n }
  return src, kv.from(cpu, "i32", { rows, m }, index), index
end

describe("gather", function()
  for _, c in ipairs { { "f32", 3, 17, 40 }, { "f16", 1, 1, 1 }, { "bf16", 5, 100, 33 },
                       { "i32", 200, 64, 300 }, { "f32", 0, 4, 4 }, { "f32", 2, 0, 3 },
                       { "f32", 2, 3, 0 } } do
    local dtype, rows, n, m = c[1], c[2], c[3], c[4]
    S.agrees(("takes %d of %d %s in %d rows"):format(m, n, dtype, rows), function(dev)
      local src, index = case(dtype, rows, n, m)
      local out = S.poisoned(dev, dtype, { rows, m })
      kv.check(kv.C.kvl_gather(src:to(dev), index:to(dev), out))
      return out
    end, function()
      local src, _, index = case(dtype, rows, n, m)
      local values, out = src:list(), {}
      for i, j in ipairs(index) do
        local row = math.floor((i - 1) / m)
        out[i] = j >= 0 and j < n and values[row * n + j + 1] or 0
      end
      return out
    end, 0)
  end

  it("refuses indices of other rows", function()
    local src, index = kv.zeros(cpu, "f32", { 4, 3 }), kv.zeros(cpu, "i32", { 2, 3 })
    S.fails(kv.C.kvl_gather(src, index, src), "gather",
      "index is i32 [2, 3]", "rows=4")
  end)
end)
