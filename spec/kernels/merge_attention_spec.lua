--- Tolerance: two products and a sum in fp32, weights from exp: 2e-6 relative; a 16-bit
-- output adds half a unit in the last place. Merging with nothing is exact.
local kv = require "kvlab"
local support = require "spec.support"
local reference = require "spec.reference.attention"

local INF = math.huge
local ulp = { f32 = 0, f16 = 2 ^ -11, bf16 = 2 ^ -8 }

--- Random parts of which some saw nothing; those hold NaN.
local function parts(dtype, tokens, heads, dim)
  local cpu, p = kv.device "cpu", {}
  for side = 1, 2 do
    local out = support.randn(cpu, dtype, { tokens, heads, dim }, side):list()
    local spread = { seed = 10 + side, std = 4 }
    local lse = kv.randn(cpu, "f32", { tokens, heads }, spread):list()
    for row = 0, tokens * heads - 1 do
      if row % 5 == side or row % 5 == 3 then
        lse[row + 1] = -INF
        for d = 1, dim do out[row * dim + d] = 0 / 0 end
      end
    end
    p[side] = { out = out, lse = lse }
  end
  return p
end

local function merge(dev, dtype, p, tokens, heads, dim, alias)
  local function side(i)
    return kv.from(dev, dtype, { tokens, heads, dim }, p[i].out),
      kv.from(dev, "f32", { tokens, heads }, p[i].lse)
  end
  local out_a, lse_a = side(1)
  local out_b, lse_b = side(2)
  local out = alias and out_a or support.poisoned(dev, dtype, { tokens, heads, dim })
  local lse = alias and lse_a or support.poisoned(dev, "f32", { tokens, heads })
  kv.check(kv.C.kvl_merge_attention(out_a, lse_a, out_b, lse_b, out, lse))
  return out, lse
end

local shapes = { { 1, 1, 8 }, { 0, 4, 64 }, { 7, 3, 80 }, { 33, 8, 128 }, { 600, 8, 24 } }

local function each_case(fn)
  for _, dtype in ipairs { "f32", "f16", "bf16" } do
    for _, s in ipairs(shapes) do fn(dtype, s[1], s[2], s[3]) end
  end
end

describe("merging attention", function()
  support.it_on_cpu("weighs the parts by their lse", function(dev)
    each_case(function(dtype, tokens, heads, dim)
      local p = parts(dtype, tokens, heads, dim)
      local out, lse = merge(dev, dtype, p, tokens, heads, dim)
      local want, want_lse = reference.merge(p[1].out, p[1].lse, p[2].out, p[2].lse, dim)
      support.close(out, want, 2e-6 + ulp[dtype] / 8, 2e-6 + ulp[dtype], "out")
      support.close(lse, want_lse, 2e-6, 2e-6, "lse")
    end)
  end)

  support.it_on_cpu("may write over its first part", function(dev)
    each_case(function(dtype, tokens, heads, dim)
      local p = parts(dtype, tokens, heads, dim)
      local out, lse = merge(dev, dtype, p, tokens, heads, dim, true)
      local want, want_lse = merge(dev, dtype, p, tokens, heads, dim)
      support.equal(out, want, "out")
      support.equal(lse, want_lse, "lse")
    end)
  end)

  support.it_on_cpu("leaves a part alone when the other one saw nothing", function(dev)
    local some = support.randn(dev, "f32", { 3, 2, 16 }, 5)
    local lse = support.randn(dev, "f32", { 3, 2 }, 6)
    local nothing = support.poisoned(dev, "f32", { 3, 2, 16 })
    local none = kv.full(dev, "f32", { 3, 2 }, -INF)
    for _, swap in ipairs { false, true } do
      local out = support.poisoned(dev, "f32", { 3, 2, 16 })
      local out_lse = support.poisoned(dev, "f32", { 3, 2 })
      local a, la, b, lb = some, lse, nothing, none
      if swap then a, la, b, lb = b, lb, a, la end
      kv.check(kv.C.kvl_merge_attention(a, la, b, lb, out, out_lse))
      support.equal(out, some, "out")
      support.equal(out_lse, lse, "lse")
    end
  end)

  support.it_on_cpu("runs without an lse output", function(dev)
    local p = parts("f32", 4, 2, 16)
    local want = merge(dev, "f32", p, 4, 2, 16)
    local out = support.poisoned(dev, "f32", { 4, 2, 16 })
    local rows, shape = { 4, 2 }, { 4, 2, 16 }
    kv.check(kv.C.kvl_merge_attention(kv.from(dev, "f32", shape, p[1].out),
      kv.from(dev, "f32", rows, p[1].lse), kv.from(dev, "f32", shape, p[2].out),
      kv.from(dev, "f32", rows, p[2].lse), out, nil))
    support.equal(out, want, "out")
  end)
end)

describe("merging attention on CUDA #gpu", function()
  support.it_on_gpu("agrees with the CPU", function(cuda, cpu)
    each_case(function(dtype, tokens, heads, dim)
      local p = parts(dtype, tokens, heads, dim)
      local out, lse = merge(cuda, dtype, p, tokens, heads, dim)
      local want, want_lse = merge(cpu, dtype, p, tokens, heads, dim)
      support.close(out, want, 4e-6 + ulp[dtype] / 8, 4e-6 + 2 * ulp[dtype], "out")
      support.close(lse, want_lse, 4e-6, 4e-6, "lse")
    end)
  end)
end)
