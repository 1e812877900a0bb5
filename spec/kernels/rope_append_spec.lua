--- Exact: rope and append_kv, the ops that it joins, give the same bits on the same
-- device. The specs of these two have their tolerances.
local kv = require "kvlab"
local link_bytes = require "spec.kernels.link_bytes"
local support = require "spec.support"

local cpu = kv.device "cpu"
local BLOCKS, POSITIONS = 5, { 0, 1, 2, 511, 4095, 131071, 1000003, -5 }

--- What one call takes, on `dev`. Every third token has no place, and one has a
-- place past the end.
local function latents_of(c)
  return kv.format { codec = c.dtype, kv_heads = c.kv_heads, block_size = c.block_size,
                     head_dim = c.head_dim, value_dim = c.value_dim }
end

--- The dtype and the dims of a case's memory.
local function memory_of(c)
  if c.dtype == "f8_latent" then
    return { "u8", { BLOCKS, tonumber(kv.C.kvl_format_bytes_page(latents_of(c))) } }
  end
  return { c.dtype, { BLOCKS, c.value_dim and 1 or 2, c.kv_heads, c.block_size,
                      c.head_dim } }
end

local function prepare(dev, c)
  local rng, positions, inv_freq = support.rng(c.tokens + c.head_dim), {}, {}
  local places = support.distinct(rng, c.tokens, BLOCKS * c.block_size)
  for i = 3, c.tokens, 3 do places[i] = -1 end
  if c.tokens > 4 then places[4] = BLOCKS * c.block_size + 1 end
  for t = 1, c.tokens do positions[t] = POSITIONS[(t - 1) % #POSITIONS + 1] + t end
  for i = 1, c.pairs do inv_freq[i] = 10000 ^ (-(i - 1) / c.pairs) end
  local function rows(heads, seed)
    local shape = { c.tokens, heads, c.head_dim }
    return support.randn(cpu, c.from, shape, seed):clone():to(dev)
  end
  local function scale(seed)
    return c.scaled and kv.from(dev, "f32", { c.kv_heads },
      support.scales(c.kv_heads, seed)) or nil
  end
  return { q = rows(c.heads, 1), k = rows(c.kv_heads, 2),
    v = not c.value_dim and rows(c.kv_heads, 3) or nil,
    positions = kv.from(dev, "i32", { c.tokens }, positions),
    inv_freq = kv.from(dev, "f32", { c.pairs }, inv_freq),
    places = kv.from(dev, "i64", { c.tokens }, places),
    cache = (c.pinned and kv.pinned or kv.tensor)(dev, unpack(memory_of(c))):fill_(7),
    k_scale = scale(4), v_scale = scale(5) }
end

local function format_of(t, c)
  return c.value_dim and latents_of(c) or support.format_of(t.cache, t.k_scale, t.v_scale)
end

local function fused(dev, c)
  local t = prepare(dev, c)
  kv.ops.rope_append(t.q, t.k, t.v, t.positions, t.inv_freq, t.places, t.cache,
    format_of(t, c))
  return t
end

local function apart(dev, c)
  local t = prepare(dev, c)
  kv.ops.rope(t.q, t.positions, t.inv_freq, c.value_dim)
  local k = kv.ops.rope(t.k:clone(), t.positions, t.inv_freq, c.value_dim)
  kv.ops.append_kv(k, t.v, t.places, t.cache, format_of(t, c))
  return t
end

local SHAPES = {   -- tokens, heads, kv_heads, head_dim, pairs, block_size
  { 0, 2, 1, 16, 8, 16 }, { 1, 4, 1, 16, 8, 1 }, { 5, 3, 3, 48, 24, 4 },
  { 7, 4, 2, 80, 40, 16 }, { 9, 2, 2, 64, 8, 5 }, { 6, 2, 1, 32, 3, 8 },
  { 4, 1, 1, 16, 0, 4 }, { 600, 8, 2, 128, 64, 256 }, { 3, 2, 2, 256, 128, 16 },
}
local LATENTS = {   -- the same, and value_dim
  { 5, 16, 1, 576, 32, 16, 512 }, { 9, 3, 2, 64, 5, 4, 48 }, { 70, 4, 1, 40, 4, 32, 24 },
  { 3, 2, 1, 24, 0, 4, 24 },
}

local function case(i, s, dtype, from)
  return { dtype = dtype, from = from, tokens = s[1], heads = s[2], kv_heads = s[3],
    head_dim = s[4], pairs = s[5], block_size = s[6], value_dim = s[7],
    pinned = i % 4 == 0, scaled = dtype == "f8e4m3" and i % 2 == 0 }
end

local cases, latents = {}, {}
for _, dtype in ipairs { "f32", "f16", "bf16", "f8e4m3", "f8_latent" } do
  for _, from in ipairs { "f32", "f16", "bf16" } do
    if from == "f32" or from == dtype or dtype:find "^f8" then
      for i, s in ipairs(dtype ~= "f8_latent" and SHAPES or {}) do
        cases[#cases + 1] = case(i, s, dtype, from)
      end
      for i, s in ipairs(dtype ~= "f8e4m3" and LATENTS or {}) do
        if dtype ~= "f8_latent" or s[7] % 16 == 0 then
          latents[#latents + 1] = case(i, s, dtype, from)
        end
      end
    end
  end
end

local function same(dev, list)
  for i, c in ipairs(list) do
    local got, want = fused(dev, c), apart(dev, c)
    for _, name in ipairs { "q", "k", "cache" } do
      support.equal(got[name], want[name], ("%s of case %d"):format(name, i))
    end
    if got.v then support.equal(got.v, want.v, ("v of case %d"):format(i)) end
  end
end

describe("rotating and appending", function()
  for what, list in pairs { [""] = support.sample(cases), [" of latents"] = latents } do
    support.it_on_cpu("gives the bits of rope and append_kv" .. what, function(dev)
      same(dev, list)
    end)
    support.it_on_gpu("gives the bits of rope and append_kv" .. what .. " on CUDA",
      function(dev) same(dev, list) end)
  end

  support.it_on_cpu("tells the link what goes to pinned memory", function(dev)
    local c = { dtype = "bf16", from = "bf16", tokens = 7, heads = 2, kv_heads = 2,
                head_dim = 16, pairs = 8, block_size = 4, pinned = true }
    local t = prepare(dev, c)   -- 7 tokens, 3 of which go nowhere
    assert.same({ 0, 4 * 2 * 2 * 16 * 2 }, { link_bytes(dev, function()
      kv.ops.rope_append(t.q, t.k, t.v, t.positions, t.inv_freq, t.places, t.cache)
    end) })
  end)

  it("refuses what it cannot rotate or append", function()
    local c = { dtype = "bf16", from = "bf16", tokens = 2, heads = 2, kv_heads = 1,
                head_dim = 16, pairs = 8, block_size = 4 }
    local function refuses(words, changes)
      local t = prepare(cpu, c)
      for name, value in pairs(changes) do t[name] = value end
      support.raises(words, kv.ops.rope_append, t.q, t.k, t.v, t.positions, t.inv_freq,
        t.places, t.cache, support.format_of(t.cache))
    end
    refuses("inv_freq has 9 pairs, expected at most head_dim / 2 = 8",
      { inv_freq = kv.zeros(cpu, "f32", { 9 }) })
    refuses("q is f16 [2, 2, 16]", { q = kv.zeros(cpu, "f16", { 2, 2, 16 }) })
    refuses("k is f32 [2, 1, 16]", { k = kv.zeros(cpu, "f32", { 2, 1, 16 }) })
    refuses("positions is i32 [3]", { positions = kv.zeros(cpu, "i32", { 3 }) })
  end)
end)

--- Prefill 37 tokens, then decode 3 steps; the outputs of all, with what is to be rotated
-- rotated by the attention or before it.
local function attend(dev, rotates, offload, value_dim)
  local heads, kv_heads, dim = 4, 2, 16
  local cache = kv.cache { device = dev, format = "f32", layers = 1, blocks = 16,
    block_size = 4, kv_heads = kv_heads, head_dim = dim,
    value_dim = value_dim, offload = offload }
  local inv_freq = kv.from(dev, "f32", { 4 }, { 1, 0.5, 0.1, 0.01 })
  local attention = kv.attention { cache = cache, heads = heads, max_seqs = 1,
    inv_freq = rotates and inv_freq or nil }
  local batch, seq = cache:batch { max_seqs = 1, max_tokens = 40 }, cache:sequence()
  local outs = {}
  for step = 0, 3 do
    local tokens = step == 0 and 37 or 1
    local function rows(count, seed)
      return kv.randn(dev, "f32", { tokens, count, dim }, { seed = 10 * step + seed })
    end
    local q, k, v = rows(heads, 1), rows(kv_heads, 2)
    if not value_dim then v = rows(kv_heads, 3) end
    batch:append({ seq }, { tokens })
    attention:begin(batch, step == 0)
    if not rotates then
      kv.ops.rope(q, batch.positions, inv_freq, value_dim)
      kv.ops.rope(k, batch.positions, inv_freq, value_dim)
    end
    outs[step + 1] = attention:forward(0, q, k, v):list()
  end
  seq:close()
  cache:close()
  return outs
end

support.each_device(function(dev)
  describe("attention that rotates on " .. dev:name(), function()
    it("sees what one sees that is given rotated rows", function()
      local want = attend(dev, false)
      for i, out in ipairs(attend(dev, true)) do support.equal(out, want[i]) end
      local options = { slots = 2, slot_blocks = 2, max_seqs = 1, max_tokens = 40 }
      for i, out in ipairs(attend(dev, true, options)) do
        support.close(out, want[i], 1e-5)
      end
    end)

    it("turns the numbers behind the values of latents", function()
      local want = attend(dev, false, nil, 8)
      for i, out in ipairs(attend(dev, true, nil, 8)) do support.equal(out, want[i]) end
    end)
  end)
end)
