-- Tolerance: none, bytes are copied.
local kv = require "kvlab"
local S = require "spec.support"

local cpu = kv.device "cpu"

local function case(dtype, rows, width, n)
  local rng, index = S.rng(rows * 3 + n), {}
  for i = 1, n do index[i] = rng(rows + 2) - 1 end   -- with duplicates, -1 and `rows`
  local src = kv.arange(cpu, "f32", n * width):cast(dtype):reshape { n, width }
  return src, kv.from(cpu, "i32", { n }, index), index
end

describe("scatter_rows", function()
  for _, c in ipairs { { "f32", 5, 1, 9 }, { "bf16", 7, 3, 20 }, { "i64", 4, 6, 0 },
                       { "u8", 100, 17, 1000 }, { "f16", 33, 512, 600 },
                       { "f32", 50, 300, 400 }, { "i32", 1, 5, 3 },
                       { "f32", 3, 0, 4 } } do
    local dtype, rows, width, n = c[1], c[2], c[3], c[4]
    S.agrees(("puts %d rows of %d %s into %d, the last of equals stays"):format(n, width,
      dtype, rows), function(dev)
      local src, index = case(dtype, rows, width, n)
      local dst = kv.full(dev, dtype, { rows, width }, 9)
      kv.check(kv.C.kvl_scatter_rows(src:to(dev), index:to(dev), dst))
      return dst
    end, function()
      local src, _, index = case(dtype, rows, width, n)
      local values, out = src:list(), {}
      for i = 1, rows * width do out[i] = 9 end
      for i, row in ipairs(index) do
        for d = 1, row >= 0 and row < rows and width or 0 do
          out[row * width + d] = values[(i - 1) * width + d]
        end
      end
      return out
    end, 0)
  end

  it("refuses rows of another size and another number of indices", function()
    local src, dst = kv.zeros(cpu, "f32", { 4, 3 }), kv.zeros(cpu, "f32", { 9, 5 })
    local four, two = kv.zeros(cpu, "i32", { 4 }), kv.zeros(cpu, "i32", { 2 })
    S.fails(kv.C.kvl_scatter_rows(src, four, dst), "scatter_rows",
      "src is f32 [4, 3]", "f32 [9, 5]")
    S.fails(kv.C.kvl_scatter_rows(src, two, src),
      "index is i32 [2]", "n=4")
  end)
end)
