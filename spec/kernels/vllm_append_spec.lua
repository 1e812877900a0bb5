--- Exact: copying, or one rounding to nearest even that every device does alike.
local kv = require "kvlab"
local support = require "spec.support"
local attention = require "spec.reference.attention"
local reference = require "spec.reference.vllm"

local BLOCKS = 5

local function x_of(dtype) return 16 / kv.dtype_bytes(dtype) end

--- Tokens go to random places; every third one is skipped and one is out of range.
local function append(dev, c)
  local cpu, tokens = kv.device "cpu", c.tokens
  local places = support.distinct(support.rng(tokens + c.head_dim), tokens,
    BLOCKS * c.block_size)
  for i = 3, tokens, 3 do places[i] = i == 6 and BLOCKS * c.block_size or -1 end
  local shape = { tokens, c.kv_heads, c.head_dim }
  local k = support.randn(cpu, c.from, shape, 1)
  local v = support.randn(cpu, c.from, shape, 2)
  local keys, values = kv.vllm.cache(dev, c.dtype, BLOCKS, c.kv_heads, c.block_size,
    c.head_dim)
  keys:fill_(7)
  values:fill_(7)
  local k_scale = c.k_scale and kv.full(dev, "f32", { 1 }, c.k_scale)
  local v_scale = c.v_scale and kv.full(dev, "f32", { 1 }, c.v_scale)
  kv.vllm.append(k:to(dev), v:to(dev), kv.from(dev, "i64", { tokens }, places), keys,
    values, k_scale, v_scale)
  return keys, values, k, v, places
end

--- x / scale in f32, rounded to the cache's dtype.
local function stored(x, scale, dtype)
  local f32 = x:cast "f32"
  if scale then f32 = f32 / kv.full(x.device, "f32", { 1 }, scale) end
  return f32:cast(dtype):list()
end

local function expected(c, k, v, places)
  local cache, kept = {}, {}
  for i = 1, BLOCKS * 2 * c.kv_heads * c.block_size * c.head_dim do cache[i] = 7 end
  for i, place in ipairs(places) do
    kept[i] = place < BLOCKS * c.block_size and place or -1
  end
  attention.append_kv(cache, c, stored(k, c.k_scale, c.dtype),
    stored(v, c.v_scale, c.dtype), kept)
  return reference.from_blocks(cache, { blocks = BLOCKS, kv_heads = c.kv_heads,
    block_size = c.block_size, head_dim = c.head_dim }, x_of(c.dtype))
end

local cases = {}
for _, pair in ipairs { { "f32", "f32" }, { "f16", "f32" }, { "f16", "f16" },
                        { "bf16", "f32" }, { "bf16", "bf16" }, { "f8e4m3", "f32" },
                        { "f8e4m3", "f16" }, { "f8e4m3", "bf16" } } do
  for _, s in ipairs { { 0, 1, 32, 16 }, { 1, 1, 32, 8 }, { 4, 3, 80, 32 },
                       { 13, 2, 120, 16 }, { 60, 1, 64, 16 }, { 100, 8, 256, 32 } } do
    local dim = s[3] % x_of(pair[1]) == 0 and s[3] or 112
    local scaled = pair[1] == "f8e4m3" and s[1] % 2 == 0
    cases[#cases + 1] = { dtype = pair[1], from = pair[2], tokens = s[1], kv_heads = s[2],
      head_dim = dim, block_size = s[4], k_scale = scaled and 0.37 or nil,
      v_scale = scaled and 3 or nil }
  end
end

describe("appending K and V in vLLM's layout", function()
  support.it_on_cpu("writes every place that there is, and no other", function(dev)
    for i, c in ipairs(cases) do
      local keys, values, k, v, places = append(dev, c)
      local want_keys, want_values = expected(c, k, v, places)
      support.equal(keys, want_keys, ("keys of case %d"):format(i))
      support.equal(values, want_values, ("values of case %d"):format(i))
    end
  end)

  support.it_on_cpu("lets the last of two tokens with one place win", function(dev)
    local k = support.randn(dev, "f32", { 2, 1, 32 }, 1)
    local keys, values = kv.vllm.cache(dev, "f32", 1, 1, 8, 32)
    kv.vllm.append(k, k, kv.from(dev, "i64", { 3, 3 }), keys, values)
    assert.equal(k:list()[33], values:list()[4])
  end)
end)

support.each_device(function(dev)
  describe("kvlab's blocks in vLLM's layout on " .. dev:name(), function()
    it("hold the same elements, whatever the dtype", function()
      local layout = { blocks = 3, kv_heads = 2, block_size = 8, head_dim = 112 }
      for _, dtype in ipairs { "f32", "f16", "bf16", "f8e4m3" } do
        local cache = support.randn(dev, dtype, { 3, 2, 2, 8, 112 }, 1)
        local keys, values = kv.vllm.from_blocks(cache)
        local want_keys, want_values = reference.from_blocks(cache:list(), layout,
          x_of(dtype))
        assert.same({ 3, 2, 112 / x_of(dtype), 8, x_of(dtype) }, keys:dims())
        assert.same({ 3, 2, 112, 8 }, values:dims())
        support.equal(keys, want_keys, "keys of " .. dtype)
        support.equal(values, want_values, "values of " .. dtype)
      end
    end)
  end)
end)

describe("appending K and V in vLLM's layout on CUDA #gpu", function()
  support.it_on_gpu("agrees with the CPU", function(cuda, cpu)
    for i, c in ipairs(cases) do
      local keys, values = append(cuda, c)
      local want_keys, want_values = append(cpu, c)
      support.equal(keys, want_keys, ("keys of case %d"):format(i))
      support.equal(values, want_values, ("values of case %d"):format(i))
    end
  end)
end)
