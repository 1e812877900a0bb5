-- Tolerance: fp32 sums of k products of numbers near 1, in any order:
-- 8e-7 sqrt(k) + 2e-7 k absolute; f16 and bf16 results add half a step.
local kv = require "kvlab"
local S = require "spec.support"
local reference = require "spec.reference.math"

local cpu = kv.device "cpu"

local function inputs(dtype, s)
  local a_shape = s.batched and { s.batch, s.m, s.k } or { s.m, s.k }
  local b_shape = s.transposed and { s.n, s.k } or { s.k, s.n }
  if s.batched and not s.b_shared then table.insert(b_shape, 1, s.batch) end
  return S.randn(cpu, dtype, a_shape, 1), S.randn(cpu, dtype, b_shape, 2)
end

local function run(dev, dtype, out_dtype, s)
  local a, b = inputs(dtype, s)
  local shape = s.batched and { s.batch, s.m, s.n } or { s.m, s.n }
  local out = S.poisoned(dev, out_dtype, shape)
  kv.check(kv.C.kvl_matmul(a:to(dev), b:to(dev), s.transposed and 1 or 0, out))
  return out
end

local SIZES = {   -- m, n, k
  { 1, 1, 1 }, { 1, 256, 256 }, { 1, 37, 100 }, { 2, 33, 65 }, { 3, 300, 17 },
  { 5, 64, 31 }, { 7, 513, 129 }, { 16, 70, 40 }, { 17, 20, 300 }, { 49, 35, 33 },
  { 70, 600, 5 },
  { 0, 3, 4 }, { 3, 0, 4 }, { 3, 4, 0 }, { 60, 4, 0 }, { 33, 1, 50 },
}

local function tolerance(k) return 8e-7 * math.sqrt(k) + 2e-7 * k end

local function check(text, dtype, out_dtype, s)
  S.agrees(text, function(dev) return run(dev, dtype, out_dtype, s) end, function()
    local a, b = inputs(dtype, s)
    return reference.matmul(a:list(), b:list(), s)
  end, tolerance(s.k), out_dtype == "f32" and 0 or 2 * S.eps[out_dtype])
end

describe("matmul", function()
  for _, size in ipairs(SIZES) do
    for _, transposed in ipairs { true, false } do
      for from, to in pairs { f32 = "f32", bf16 = "bf16", f16 = "f32" } do
        check(("%dx%dx%d %s into %s%s"):format(size[1], size[2], size[3], from, to,
          transposed and ", b transposed" or ""), from, to,
          { batch = 1, m = size[1], n = size[2], k = size[3], transposed = transposed,
            b_shared = true })
      end
    end
  end

  for _, shared in ipairs { true, false } do
    for _, transposed in ipairs { true, false } do
      for _, size in ipairs { { 3, 2, 40, 24 }, { 2, 60, 33, 17 }, { 0, 2, 3, 4 } } do
        check(("%d batches of %dx%dx%d%s%s"):format(size[1], size[2], size[3], size[4],
          shared and ", one b" or "", transposed and ", b transposed" or ""),
          "bf16", "f32", { batched = true, batch = size[1], m = size[2], n = size[3],
            k = size[4], b_shared = shared, transposed = transposed })
      end
    end
  end

  -- Several panels and pieces: all rows equal, so that one row of reference is enough.
  for _, size in ipairs { { 1100, 300, 64 }, { 64, 5000, 900 }, { 4, 5000, 900 } } do
    for _, transposed in ipairs { true, false } do
      local m, n, k = size[1], size[2], size[3]
      S.it_on_cpu(("crosses panels at %dx%dx%d%s"):format(m, n, k,
        transposed and ", b transposed" or ""), function(dev)
        local row = S.randn(dev, "bf16", { 1, k }, 1)
        local b = S.randn(dev, "bf16", transposed and { n, k } or { k, n }, 2)
        local a, out = kv.tensor(dev, "bf16", { m, k }), S.poisoned(dev, "f32", { m, n })
        kv.check(kv.C.kvl_gather_rows(row, kv.zeros(dev, "i32", { m }), a))
        kv.check(kv.C.kvl_matmul(a, b, transposed and 1 or 0, out))
        local want = reference.matmul(row:list(), b:list(),
          { batch = 1, m = 1, n = n, k = k, transposed = transposed })
        for _, i in ipairs { 0, 1, m - 2, m - 1 } do
          S.close(out:index(i), want, tolerance(k))
        end
        local mean = S.poisoned(dev, "f32", { n })   -- the rows between are like them
        kv.check(kv.C.kvl_reduce(kv.C.KVL_REDUCE_MEAN, out, 0, mean))
        S.close(mean, want, tolerance(k))
      end)
    end
  end

  it("refuses inner sizes that differ and mixed dtypes", function()
    local a, b = kv.zeros(cpu, "f32", { 2, 3 }), kv.zeros(cpu, "f32", { 4, 5 })
    local out, h = kv.zeros(cpu, "f32", { 2, 5 }), kv.zeros(cpu, "f16", { 3, 5 })
    S.fails(kv.C.kvl_matmul(a, b, 0, out), "matmul",
      "b is f32 [4, 5]", "k=3")
    S.fails(kv.C.kvl_matmul(a, h, 0, out), "b is f16 [3, 5]", "f32")
  end)
end)
