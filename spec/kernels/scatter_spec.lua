-- Tolerance: none, elements are copied, or added once.
local kv = require "kvlab"
local S = require "spec.support"

local cpu = kv.device "cpu"

local function case(dtype, rows, n, m)
  local rng, index = S.rng(n + m), {}
  for r = 0, rows - 1 do -- -1 and n are out of range
    for j, at in ipairs(S.distinct(rng, m, n + 2)) do index[r * m + j] = at - 1 end
  end
  local src = kv.arange(cpu, "f32", rows * m, 3, 0.5):cast(dtype):reshape { rows, m }
  local dst = kv.arange(cpu, "f32", rows * n, -9):cast(dtype):reshape { rows, n }
  return src, kv.from(cpu, "i32", { rows, m }, index), dst, index
end

describe("scatter", function()
  for _, c in ipairs { { "f32", 3, 40, 17 }, { "i32", 1, 1, 1 }, { "f32", 200, 300, 302 },
                       { "i32", 5, 33, 20 }, { "f32", 0, 4, 4 }, { "f32", 2, 0, 2 },
                       { "f32", 2, 3, 0 } } do
    for add = 0, 1 do
      local dtype, rows, n, m = c[1], c[2], c[3], c[4]
      local what = ("%s %d %s in %d rows of %d"):format(add == 1 and "adds" or "puts", m,
        dtype, rows, n)
      S.agrees(what, function(dev)
        local src, index, dst = case(dtype, rows, n, m)
        local out = dst:to(dev):clone()
        kv.check(kv.C.kvl_scatter(src:to(dev), index:to(dev), add, out))
        return out
      end, function()
        local src, _, dst, index = case(dtype, rows, n, m)
        local values, out = src:list(), dst:list()
        for i, j in ipairs(index) do
          local at = math.floor((i - 1) / m) * n + j + 1
          if j >= 0 and j < n then out[at] = values[i] + add * out[at] end
        end
        return out
      end, 0)
    end
  end

  it("refuses indices of other rows, and other dtypes", function()
    local x, index = kv.zeros(cpu, "f32", { 4, 3 }), kv.zeros(cpu, "i32", { 2, 3 })
    S.fails(kv.C.kvl_scatter(x, index, 0, x), "scatter", "index is i32 [2, 3]", "rows=4")
    local half = kv.zeros(cpu, "f16", { 2, 3 })
    S.fails(kv.C.kvl_scatter(half, index, 0, half), "scatter", "src is f16 [2, 3]")
  end)
end)
