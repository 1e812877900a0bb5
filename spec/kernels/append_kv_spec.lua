--- Exact: copying, or one rounding to nearest even that every device does alike; f8e4m3
-- after a division in f32, itself rounded to nearest even.
local kv = require "kvlab"
local link_bytes = require "spec.kernels.link_bytes"
local support = require "spec.support"
local reference = require "spec.reference.attention"

local BLOCKS = 5

--- Tokens go to random places; every third one is skipped. Returns the cache.
local function append(dev, c)
  local cpu, tokens = kv.device "cpu", c.tokens
  local rng = support.rng(tokens + c.head_dim)
  local places = support.distinct(rng, tokens, BLOCKS * c.block_size)
  for i = 3, tokens, 3 do places[i] = -1 end
  local shape = { tokens, c.kv_heads, c.head_dim }
  local k = support.randn(cpu, c.from, shape, 1)
  local v = support.randn(cpu, c.from, shape, 2)
  local cache = (c.pinned and kv.pinned or kv.tensor)(dev, c.dtype,
    { BLOCKS, 2, c.kv_heads, c.block_size, c.head_dim }):fill_(7)
  local function scale(scales)
    return scales and kv.from(dev, "f32", { c.kv_heads }, scales)
  end
  kv.check(kv.C.kvl_append_kv(k:to(dev), v:to(dev),
    kv.from(dev, "i64", { tokens }, places), cache,
    support.format_of(cache, scale(c.k_scale), scale(c.v_scale))))
  return cache, k, v, places
end

local function expected(c, k, v, places)
  local values = support.filled(BLOCKS * 2 * c.kv_heads * c.block_size * c.head_dim, 7)
  return reference.append_kv(values, c, support.stored(k, c.dtype, c.k_scale),
    support.stored(v, c.dtype, c.v_scale), places)
end

local cases = {}
for _, dtype in ipairs { "f32", "f16", "bf16" } do
  for _, from in ipairs(dtype == "f32" and { "f32" } or { "f32", dtype }) do
    for i, s in ipairs { { 0, 1, 8, 16 }, { 1, 1, 8, 1 }, { 4, 3, 80, 1 },
                         { 13, 2, 64, 16 }, { 60, 1, 24, 17 }, { 1000, 8, 128, 256 } } do
      cases[#cases + 1] = { dtype = dtype, from = from, tokens = s[1], kv_heads = s[2],
        head_dim = s[3], block_size = s[4], pinned = i % 2 == 0 }
    end
  end
end

for i, from in ipairs { "f32", "f16", "bf16" } do
  for j, s in ipairs { { 0, 1, 16, 16 }, { 1, 1, 16, 1 }, { 4, 3, 80, 1 },
                       { 13, 2, 64, 16 }, { 60, 1, 256, 17 }, { 1000, 8, 128, 256 } } do
    local k_scale = (i + j) % 3 > 0 and support.scales(s[2], j) or nil
    local v_scale = (i + j) % 3 < 2 and support.scales(s[2], 9 + j) or nil
    cases[#cases + 1] = { dtype = "f8e4m3", from = from, tokens = s[1], kv_heads = s[2],
      head_dim = s[3], block_size = s[4], pinned = j % 2 == 0, k_scale = k_scale,
      v_scale = v_scale }
  end
end

describe("appending K and V", function()
  support.it_on_cpu("writes every place that is not negative, and no other", function(dev)
    for i, c in ipairs(support.sample_for_isa(cases)) do
      local cache, k, v, places = append(dev, c)
      support.equal(cache, expected(c, k, v, places), ("cache of case %d"):format(i))
    end
  end)

  support.it_on_cpu("saturates f8e4m3 at 448 and rounds its subnormals", function(dev)
    local inf, nan = math.huge, 0 / 0
    local values = { 448, 463, 464, 465, -1e9, inf, -inf, nan, 2 ^ -6, 2 ^ -9, 2 ^ -10,
      1.5 * 2 ^ -10, 2.5 * 2 ^ -9, -3.5 * 2 ^ -9, 0.0158, 0 }
    local want = { 448, 448, 448, 448, -448, 448, -448, nan, 2 ^ -6, 2 ^ -9, 0, 2 ^ -9,
      2 * 2 ^ -9, -4 * 2 ^ -9, 2 ^ -6, 0 }
    local rows = kv.from(dev, "f32", { 1, 1, 16 }, values)
    local cache = kv.full(dev, "f8e4m3", { 1, 2, 1, 1, 16 }, 7)
    kv.check(kv.C.kvl_append_kv(rows, rows, kv.from(dev, "i64", { 1 }, { 0 }), cache,
      support.format_of(cache, nil, kv.from(dev, "f32", { 1 }, { 0.5 }))))
    support.equal(cache:index(0):index(0), want, "K")
    local doubled = { 448, 448, 448, 448, -448, 448, -448, nan, 2 ^ -5, 2 ^ -8, 2 ^ -9,
      2 * 2 ^ -9, 5 * 2 ^ -9, -7 * 2 ^ -9, 0.03125, 0 }
    support.equal(cache:index(0):index(1), doubled, "V")
  end)

  support.it_on_cpu("tells the link what goes to pinned memory", function(dev)
    local rows = kv.zeros(dev, "f32", { 4, 2, 8 })
    local places = kv.from(dev, "i64", { 4 }, { 5, -1, 0, 99 })
    local function crossed(open)
      local cache = open(dev, "bf16", { 3, 2, 2, 4, 8 })
      return { link_bytes(dev, function()
        kv.check(kv.C.kvl_append_kv(rows, rows, places, cache, nil))
      end) }
    end
    assert.same({ 0, 2 * 2 * 2 * 8 * 2 }, crossed(kv.pinned))
    assert.same({ 0, 0 }, crossed(kv.zeros))
  end)
end)

describe("appending K and V on CUDA #gpu", function()
  support.it_on_gpu("agrees with the CPU", function(cuda, cpu)
    for i, c in ipairs(cases) do
      support.equal((append(cuda, c)), (append(cpu, c)), ("cache of case %d"):format(i))
    end
  end)
end)
