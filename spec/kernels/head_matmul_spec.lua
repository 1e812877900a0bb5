-- Tolerance: sums of k products in f32, and a step of out's dtype.
local kv = require "kvlab"
local S = require "spec.support"

local cpu = kv.device "cpu"

--- x [tokens, heads, k + rest], weight [heads, k, n] or [heads, n, k].
local function inputs(dtype, tokens, heads, k, n, rest, is_transposed)
  return S.randn(cpu, dtype, { tokens, heads, k + rest }, 1),
    S.randn(cpu, dtype, is_transposed and { heads, n, k } or { heads, k, n }, 2)
end

local function reference(tokens, heads, k, n, rest, is_transposed, x, weight)
  local xs, ws, out = x:list(), weight:list(), {}
  for t = 0, tokens - 1 do
    for head = 0, heads - 1 do
      local at, of = (t * heads + head) * (k + rest), head * k * n
      for j = 0, n - 1 do
        local sum = 0
        for i = 0, k - 1 do
          local w = is_transposed and j * k + i or i * n + j
          sum = sum + xs[at + i + 1] * ws[of + w + 1]
        end
        out[#out + 1] = sum
      end
      for i = 0, rest - 1 do out[#out + 1] = xs[at + k + i + 1] end
    end
  end
  return out
end

describe("head_matmul", function()
  -- Few tokens of whole packs of eight, and what does not fit that: tokens, heads, k, n,
  -- rest.
  for _, size in ipairs { { 1, 3, 24, 40, 8 }, { 2, 2, 192, 512, 64 },
                          { 5, 1, 512, 128, 0 }, { 9, 4, 40, 72, 16 },
                          { 16, 2, 128, 64, 0 }, { 17, 3, 64, 32, 8 },
                          { 60, 2, 48, 24, 8 }, { 3, 2, 7, 5, 3 }, { 1, 1, 8, 8, 3 },
                          { 4, 2, 16, 0, 8 }, { 0, 2, 8, 8, 8 } } do
    for _, dtype in ipairs { "f32", "bf16", "f16" } do
      for _, is_transposed in ipairs { false, true } do
        local tokens, heads, k, n, rest = unpack(size)
        local text = ("%s %d x %d, %d to %d%s, and %d"):format(dtype, tokens, heads, k, n,
          is_transposed and " transposed" or "", rest)
        local rel = 1e-5 + (dtype == "f32" and 0 or 2 * S.eps[dtype])
        S.agrees(text, function(dev)
          local x, weight = inputs(dtype, tokens, heads, k, n, rest, is_transposed)
          local out = S.poisoned(dev, dtype, { tokens, heads, n + rest })
          return kv.ops.head_matmul(x:to(dev), weight:to(dev), out, is_transposed)
        end, function()
          return reference(tokens, heads, k, n, rest, is_transposed,
            inputs(dtype, tokens, heads, k, n, rest, is_transposed))
        end, 1e-5 * math.sqrt(k + 1), rel)
      end
    end
  end

  it("refuses shapes that do not fit, and memory that is shared", function()
    local x = kv.zeros(cpu, "f32", { 2, 3, 10 })
    local weight = kv.zeros(cpu, "f32", { 3, 8, 4 })
    local out = kv.zeros(cpu, "f32", { 2, 3, 6 })
    local function fails(a, b, c, is_transposed, ...)
      S.fails(kv.C.kvl_head_matmul(a, b, is_transposed and 1 or 0, c), "head_matmul", ...)
    end
    fails(x, weight, kv.zeros(cpu, "f32", { 2, 3, 4 }), false,
      "out has 4 numbers a head, expected 6",
      "4 of the product, and 2 of x behind the first 8")
    fails(x, kv.zeros(cpu, "f32", { 3, 12, 4 }), out, false,
      "x has 10 numbers a head, expected at least the 12 of weight")
    fails(x, kv.zeros(cpu, "f32", { 2, 8, 4 }), out, false, "weight is f32 [2, 8, 4]",
      "heads=3")
    fails(x, kv.zeros(cpu, "f32", { 3, 0, 4 }), out, false, "k is 0, expected at least 1")
    fails(x, kv.zeros(cpu, "bf16", { 3, 8, 4 }), out, false, "weight is bf16")
    S.raises("is_transposed", kv.ops.head_matmul, x, weight, out, "yes")
    fails(x, weight, x, false, "out has 10 numbers a head, expected 6")
    local square = kv.zeros(cpu, "f32", { 3, 8, 8 })
    fails(x, square, x, true, "out shares memory with x")
  end)
end)
