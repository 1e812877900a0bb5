--- Exact: copying, or one rounding to nearest even that every device does alike; f8e4m3
-- after a division in f32.
local kv = require "kvlab"
local ffi = require "ffi"
local link_bytes = require "spec.kernels.link_bytes"
local support = require "spec.support"
local reference = require "spec.reference.attention"

local BLOCKS, SLOTS = 6, 4

--- For each KV head another half of the blocks has a slot.
local function slots_of(rng, kv_heads)
  local slot_of, block_of = {}, {}
  for head = 0, kv_heads - 1 do
    for i = 1, BLOCKS do slot_of[head * BLOCKS + i] = -1 end
    local held = support.distinct(rng, SLOTS, BLOCKS)
    for slot = 0, SLOTS - 1 do
      local block = slot % 4 < 3 and held[slot + 1] or -1
      block_of[head * SLOTS + slot + 1] = block
      if block >= 0 then slot_of[head * BLOCKS + block + 1] = slot end
    end
  end
  return slot_of, block_of
end

--- Tokens go to random places of the host tier; every fifth one is skipped. Returns the
-- tensors, and what goes in as flat values.
local function prepare(dev, c)
  local cpu, tokens = kv.device "cpu", c.tokens
  local rng = support.rng(tokens + c.head_dim)
  local places = support.distinct(rng, tokens, BLOCKS * c.block_size)
  for i = 5, tokens, 5 do places[i] = -1 end
  local shape = { tokens, c.kv_heads, c.head_dim }
  local k = support.randn(cpu, c.from, shape, 1)
  local v = support.randn(cpu, c.from, shape, 2)
  local slot_of, block_of = slots_of(rng, c.kv_heads)
  local row = { 2, c.kv_heads, c.block_size, c.head_dim }
  local hot = {
    memory = kv.full(dev, c.dtype, { SLOTS, unpack(row) }, 9),
    slot_of = kv.from(dev, "i32", { c.kv_heads, BLOCKS }, slot_of),
    block_of = kv.from(dev, "i32", { c.kv_heads, SLOTS }, block_of),
    order = kv.zeros(dev, "i32", { c.kv_heads, SLOTS }),
    counters = kv.zeros(dev, "i64", { 5 }),
  }
  local buffer_places = support.distinct(rng, tokens, 2 * BLOCKS * c.block_size)
  for i = 3, tokens, 7 do buffer_places[i] = -1 end
  local t = { hot = hot, k = k:to(dev), v = v:to(dev),
    places = kv.from(dev, "i64", { tokens }, places),
    cache = kv.pinned(dev, c.dtype, { BLOCKS, unpack(row) }):fill_(7),
    buffer_places = kv.from(dev, "i64", { tokens }, buffer_places),
    buffer = kv.full(dev, c.dtype, { 2 * BLOCKS, unpack(row) }, 5) }
  if c.scales then
    t.k_scale = kv.from(dev, "f32", { c.kv_heads }, c.scales)
    t.v_scale = kv.from(dev, "f32", { c.kv_heads }, c.scales) * 3
    hot.format = support.format_of(t.cache, t.k_scale, t.v_scale)
  end
  return t, { k = support.stored(k, c.dtype, c.scales), places = places,
    v = support.stored(v, c.dtype, t.v_scale and t.v_scale:list()),
    slot_of = slot_of, buffer_places = buffer_places }
end

local function launch(t)
  kv.check(kv.C.kvl_hot_append(ffi.new("kvl_hot", t.hot), t.k, t.v, t.places, t.cache,
    t.buffer_places, t.buffer))
end

--- The host tier, the slots' memory and the buffer after the call, and what went in.
local function append(dev, c)
  local t, given = prepare(dev, c)
  launch(t)
  return t.cache, t.hot.memory, t.buffer, given
end

local function filled(c, blocks, value)
  return support.filled(blocks * 2 * c.kv_heads * c.block_size * c.head_dim, value)
end

-- tokens, KV heads, head_dim, block size
local LARGE = support.is_full and { 1000, 8, 128, 256 } or { 300, 8, 128, 64 }
local cases = {}
for _, dtype in ipairs { "f32", "f16", "bf16" } do
  for _, from in ipairs(dtype == "f32" and { "f32" } or { "f32", dtype }) do
    for _, s in ipairs { { 0, 1, 8, 16 }, { 1, 1, 8, 1 }, { 6, 3, 80, 1 },
                         { 13, 2, 64, 16 }, { 100, 1, 24, 17 }, LARGE } do
      cases[#cases + 1] = { dtype = dtype, from = from, tokens = s[1], kv_heads = s[2],
        head_dim = s[3], block_size = s[4] }
    end
  end
end

for i, from in ipairs { "f32", "f16", "bf16" } do
  for j, s in ipairs { { 0, 1, 16, 16 }, { 6, 3, 80, 1 }, { 100, 1, 48, 17 },
                       LARGE } do
    cases[#cases + 1] = { dtype = "f8e4m3", from = from, tokens = s[1], kv_heads = s[2],
      head_dim = s[3], block_size = s[4],
      scales = (i + j) % 2 == 0 and support.scales(s[2], j) or nil }
  end
end

describe("appending through a hot cache", function()
  support.it_on_cpu("writes the host tier and the slots of its blocks", function(dev)
    for i, c in ipairs(support.sample_for_isa(cases)) do
      local cache, memory, buffer, given = append(dev, c)
      support.equal(cache, reference.append_kv(filled(c, BLOCKS, 7), c, given.k, given.v,
        given.places), ("cache of case %d"):format(i))
      support.equal(memory, reference.append_kv(filled(c, SLOTS, 9), c, given.k, given.v,
        given.places, given.slot_of, BLOCKS), ("memory of case %d"):format(i))
      support.equal(buffer, reference.append_kv(filled(c, 2 * BLOCKS, 5), c, given.k,
        given.v, given.buffer_places), ("buffer of case %d"):format(i))
    end
  end)

  support.it_on_cpu("does without a buffer", function(dev)
    local c = cases[#cases]
    local t = prepare(dev, c)
    t.buffer, t.buffer_places = nil, nil
    launch(t)
    support.equal(t.cache, (append(dev, c)))
  end)

  support.it_on_cpu("tells the link what goes to the host tier", function(dev)
    local c = { tokens = 9, kv_heads = 3, head_dim = 16, block_size = 4, dtype = "f16",
      from = "f32" }
    local t = prepare(dev, c)
    local to_device, to_host = link_bytes(dev, function() launch(t) end)
    assert.equal(0, to_device)
    assert.equal(8 * 2 * 3 * 16 * 2, to_host)
  end)
end)

describe("appending through a hot cache on CUDA #gpu", function()
  support.it_on_gpu("agrees with the CPU", function(cuda, cpu)
    for i, c in ipairs(cases) do
      local cache, memory, buffer = append(cuda, c)
      local want_cache, want_memory, want_buffer = append(cpu, c)
      support.equal(buffer, want_buffer, ("buffer of case %d"):format(i))
      support.equal(cache, want_cache, ("cache of case %d"):format(i))
      support.equal(memory, want_memory, ("memory of case %d"):format(i))
    end
  end)
end)
