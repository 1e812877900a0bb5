-- Tolerance: fp32 sums of k products of numbers near 1, in any order:
-- 8e-7 sqrt(k) + 2e-7 k absolute; f16 and bf16 results add half a step. A GPU's tensor
-- cores align the products of f8e4m3 to the largest of 32 and keep some 13 bits of them:
-- 2^-9 sqrt(k) (measured: 0.014 of 0.017 at k = 80, 0.028 of 0.062 at 1024).
local kv = require "kvlab"
local S = require "spec.support"
local reference = require "spec.reference.math"

local cpu = kv.device "cpu"

local function inputs(dtype, s)
  local a_shape = s.batched and not s.a_shared and { s.batch, s.m, s.k } or { s.m, s.k }
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

  for _, shared in ipairs { "a", "b", "nothing" } do
    for _, transposed in ipairs { true, false } do
      for _, size in ipairs { { 3, 2, 40, 24 }, { 2, 60, 33, 17 }, { 0, 2, 3, 4 } } do
        check(("%d batches of %dx%dx%d, %s shared%s"):format(size[1], size[2], size[3],
          size[4], shared, transposed and ", b transposed" or ""), "bf16", "f32",
          { batched = true, batch = size[1], m = size[2], n = size[3], k = size[4],
            a_shared = shared == "a", b_shared = shared == "b", transposed = transposed })
      end
    end
  end

  -- Several panels and pieces: all rows equal, so that one row of reference is enough.
  for _, size in ipairs { { 1100, 300, 64 }, { 64, 5000, 900 }, { 4, 5000, 900 } } do
    for _, transposed in ipairs { true, false } do
      local m, n, k = size[1], size[2], size[3]
      local given = S.for_all_isas(function()
        local row = S.randn(cpu, "bf16", { 1, k }, 1)
        local b = S.randn(cpu, "bf16", transposed and { n, k } or { k, n }, 2)
        return row, b, reference.matmul(row:list(), b:list(),
          { batch = 1, m = 1, n = n, k = k, transposed = transposed })
      end)
      S.it_on_cpu(("crosses panels at %dx%dx%d%s"):format(m, n, k,
        transposed and ", b transposed" or ""), function(dev)
        local row, b, want = given()
        local a, out = kv.tensor(dev, "bf16", { m, k }), S.poisoned(dev, "f32", { m, n })
        kv.check(kv.C.kvl_gather_rows(row, kv.zeros(dev, "i32", { m }), a))
        kv.check(kv.C.kvl_matmul(a, b, transposed and 1 or 0, out))
        for _, i in ipairs { 0, 1, m - 2, m - 1 } do
          S.close(out:index(i), want, tolerance(k))
        end
        local mean = S.poisoned(dev, "f32", { n })   -- the rows between are like them
        kv.check(kv.C.kvl_reduce(kv.C.KVL_REDUCE_MEAN, out, 0, mean))
        S.close(mean, want, tolerance(k))
      end)
    end
  end

  local F8_SIZES = {   -- m, n, k
    { 1, 8, 16 }, { 3, 8, 16 }, { 1, 24, 48 }, { 5, 40, 32 }, { 64, 104, 80 },
    { 17, 256, 1024 }, { 0, 8, 16 }, { 3, 0, 16 }, { 3, 8, 0 },
  }
  for _, size in ipairs(F8_SIZES) do
    for _, to in ipairs { "f32", "f16", "bf16" } do
      local s = { batch = 1, m = size[1], n = size[2], k = size[3], transposed = true,
                  b_shared = true }
      local name = ("%dx%dx%d f8e4m3 into %s"):format(s.m, s.n, s.k, to)
      local rel = to == "f32" and 0 or 2 * S.eps[to]
      S.it_on_cpu(name, function(dev)
        local a, b = inputs("f8e4m3", s)
        S.close(run(dev, "f8e4m3", to, s), reference.matmul(a:list(), b:list(), s),
          tolerance(s.k), rel)
      end)
      S.it_on_gpu(name, function(cuda)
        S.close(run(cuda, "f8e4m3", to, s), run(cpu, "f8e4m3", to, s),
          2 ^ -9 * math.sqrt(s.k), rel)
      end)
    end
  end

  for _, shared in ipairs { true, false } do
    local s = { batched = true, batch = 3, m = 5, n = 16, k = 32, b_shared = shared,
                transposed = true }
    local name = "3 batches of f8e4m3" .. (shared and ", one b" or "")
    S.it_on_cpu(name, function(dev)
      local a, b = inputs("f8e4m3", s)
      S.close(run(dev, "f8e4m3", "f32", s), reference.matmul(a:list(), b:list(), s),
        tolerance(s.k))
    end)
    S.it_on_gpu(name, function(cuda)
      S.close(run(cuda, "f8e4m3", "f32", s), run(cpu, "f8e4m3", "f32", s),
        2 ^ -9 * math.sqrt(s.k))
    end)
  end

  it("refuses f8e4m3 that the tensor cores do not take", function()
    local function f8(...) return kv.zeros(cpu, "f32", { ... }):cast "f8e4m3" end
    local function out(m, n) return kv.zeros(cpu, "f32", { m, n }) end
    S.fails(kv.C.kvl_matmul(f8(4, 16), f8(16, 8), 0, out(4, 8)), "a is f8e4m3", "f32")
    S.fails(kv.C.kvl_matmul(f8(4, 8), f8(8, 8), 1, out(4, 8)), "k is 8", "16")
    S.fails(kv.C.kvl_matmul(f8(4, 16), f8(12, 16), 1, out(4, 12)), "n 12", "8")
    S.fails(kv.C.kvl_matmul(f8(4, 16), f8(8, 16), 1, f8(4, 8)), "out is f8e4m3")
    local odd = f8(5 * 16):narrow(8, 64):reshape { 4, 16 }
    S.fails(kv.C.kvl_matmul(odd, f8(8, 16), 1, out(4, 8)), "multiple of 16 bytes")
  end)

  it("refuses inner sizes that differ and mixed dtypes", function()
    local a, b = kv.zeros(cpu, "f32", { 2, 3 }), kv.zeros(cpu, "f32", { 4, 5 })
    local out, h = kv.zeros(cpu, "f32", { 2, 5 }), kv.zeros(cpu, "f16", { 3, 5 })
    S.fails(kv.C.kvl_matmul(a, b, 0, out), "matmul",
      "b is f32 [4, 5]", "k=3")
    S.fails(kv.C.kvl_matmul(a, h, 0, out), "b is f16 [3, 5]", "f32")
  end)
end)
