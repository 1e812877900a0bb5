-- Tolerance: none, bytes are copied.
local kv = require "kvlab"
local S = require "spec.support"

local cpu = kv.device "cpu"

local function case(dtype, rows, row_shape, n)
  local rng, shape, width, index = S.rng(rows + n), { rows }, 1, {}
  for _, size in ipairs(row_shape) do
    shape[#shape + 1] = size
    width = width * size
  end
  for i = 1, n do index[i] = rng(rows + 2) - 1 end   -- -1 and `rows` are out of range
  local src = kv.arange(cpu, "f32", rows * width):cast(dtype):reshape(shape)
  return src, kv.from(cpu, "i32", { n }, index), index, width
end

describe("gather_rows", function()
  for _, c in ipairs { { "f32", 5, {}, 9 }, { "bf16", 7, { 3 }, 20 },
                       { "i64", 4, { 2, 3 }, 0 }, { "u8", 100, { 17 }, 1000 },
                       { "f16", 33, { 8, 64 }, 200 },
                       { "i32", 1, { 5 }, 3 }, { "f32", 3, { 0 }, 4 } } do
    S.agrees(("takes %d rows of %s %d"):format(c[4], c[1], c[2]), function(dev)
      local src, index = case(c[1], c[2], c[3], c[4])
      local shape = src:dims()
      shape[1] = c[4]
      local out = S.poisoned(dev, c[1], shape)
      kv.check(kv.C.kvl_gather_rows(src:to(dev), index:to(dev), out))
      return out
    end, function()
      local src, _, index, width = case(c[1], c[2], c[3], c[4])
      local values, out = src:list(), {}
      for _, row in ipairs(index) do
        for d = 1, width do
          out[#out + 1] = row >= 0 and row < c[2] and values[row * width + d] or 0
        end
      end
      return out
    end, 0)
  end

  it("refuses another row, another dtype and an index that is not i32", function()
    local src, index = kv.zeros(cpu, "f32", { 4, 3 }), kv.zeros(cpu, "i32", { 2 })
    local out, long = kv.zeros(cpu, "f32", { 2, 5 }), kv.zeros(cpu, "i64", { 2 })
    S.fails(kv.C.kvl_gather_rows(src, index, out), "gather_rows",
      "out is f32 [2, 5]", "f32 [4, 3]")
    S.fails(kv.C.kvl_gather_rows(src, long, out),
      "index is i64 [2]", "i32")
  end)
end)
