--- What a cache counts of its own memory, against counts by hand: bytes held, the most
-- that were held, bytes that evictions gave back, and bytes moved.
local kv = require "kvlab"
local prefetch_cases = require "spec.runtime.prefetch_cases"
local rig = require "spec.rig"
local support = require "spec.support"
local tiny = require "spec.models.tiny"

local cpu = kv.device "cpu"
local model = tiny.attentive(cpu)
local LAYERS, BLOCK = 2, 4
local KV_HEADS, HEAD_DIM = model.config.kv_heads, model.config.head_dim
local TOKEN = 2 * HEAD_DIM * 4 -- bytes of a token's key and value in a layer and KV head
local PAGE = BLOCK * TOKEN
local CUTS = LAYERS * KV_HEADS

local function engine(o)
  o.blocks, o.block_size, o.chunk, o.max_seqs = o.blocks or 40, BLOCK, 16, 4
  return model:engine(o)
end

local function tokens(n)
  local list = {}
  for i = 1, n do list[i] = (i * 37 + 11) % 97 end
  return list
end

--- held, peak, evicted in pages of one layer and KV head, and copied in tokens of these.
local function counted(e)
  local s = e.cache:stats()
  for name, value in pairs(s) do assert.equal("number", type(value), name) end
  assert.equal(s.bytes_to_device + s.bytes_to_host + s.bytes_copied, s.bytes_moved)
  for _, name in ipairs { "held", "peak", "evicted" } do
    assert.equal(s["pages_" .. name] * s.bytes_page, s["bytes_" .. name])
  end
  assert.equal(e.cache.pages - e.cache:pages_free(), s.pages_held)
  return { s.bytes_held / PAGE, s.bytes_peak / PAGE, s.bytes_evicted / PAGE,
           s.bytes_copied / TOKEN }
end

describe("a cache's stats", function()
  for tables, page in pairs { one = CUTS, layer = KV_HEADS, head = 1 } do
    it("count what is held, forks and copies on write, with tables " .. tables, function()
      local e = engine { tables = tables }
      assert.equal(page * PAGE, e.cache:stats().bytes_page)
      assert.same({ 0, 0, 0, 0 }, counted(e))
      local seq = e:sequence()
      e:prefill(seq, tokens(9)) -- 3 blocks
      assert.same({ 3 * CUTS, 3 * CUTS, 0, 0 }, counted(e))
      local fork = seq:fork() -- shares them
      assert.same({ 3 * CUTS, 3 * CUTS, 0, 0 }, counted(e))
      e:decode({ fork }, { 3 }) -- copies the open one
      assert.same({ 4 * CUTS, 4 * CUTS, 0, BLOCK * CUTS }, counted(e))
      e:finish(fork)
      assert.same({ 3 * CUTS, 4 * CUTS, 0, BLOCK * CUTS }, counted(e))
      e.cache:reset_peak()
      e:decode({ seq }, { 3 }) -- alone in its block
      assert.same({ 3 * CUTS, 3 * CUTS, 0, BLOCK * CUTS }, counted(e))
      e:finish(seq)
      assert.same({ 0, 3 * CUTS, 0, BLOCK * CUTS }, counted(e))
      e.cache:close()
      support.raises("the cache is closed", function() e.cache:stats() end)
    end)
  end

  it("count what an eviction gives back and moves", function()
    for tables, heads in pairs { head = KV_HEADS, layer = 1 } do
      for _, graph in ipairs { false, true } do
        local e = engine { tables = tables, graph = graph,
          policy = kv.policy("streaming", { blocks = 4 }) }
        local seq = e:sequence()
        e:prefill(seq, tokens(30)) -- 8 blocks, of which 16 tokens stay
        local moved = 16 * CUTS
        assert.same({ 4 * CUTS, 12 * CUTS, 4 * CUTS, moved }, counted(e))
        e.cache:reset_peak()
        for step = 1, 6 do -- each keeps the token that it replaces until the step is over
          e:decode({ seq }, { step })
          moved = moved + CUTS
          assert.same({ 4 * CUTS, 4 * CUTS, 4 * CUTS, moved }, counted(e))
        end
        local fork = seq:fork() -- has copies of all pages
        moved = moved + 16 * CUTS
        assert.same({ 8 * CUTS, 8 * CUTS, 4 * CUTS, moved }, counted(e))
        e:decode({ seq, fork }, { 1, 2 })
        assert.same({ 8 * CUTS, 8 * CUTS, 4 * CUTS, moved + 2 * CUTS }, counted(e))
        assert.equal(16, seq:held(LAYERS - 1, heads - 1))
        e.cache:close()
      end
    end
  end)

  it("count what each head keeps where heads differ", function()
    local budgets = kv.from(cpu, "f32", { LAYERS, KV_HEADS }, { 1, 0.5, 0.5, 1 })
    local e = engine { policy = kv.policy("streaming", { ratio = budgets }) }
    local seq = e:sequence()
    e:prefill(seq, tokens(30))
    local s = counted(e)
    assert.equal(8 + 4 + 4 + 8, s[1])
    assert.equal(4 + 4, s[3])
    e.cache:close()
  end)

  it("count no eviction that a failed step takes back", function()
    local policy = kv.policy("tova", { blocks = 4 })
    local e = engine { policy = policy }
    local seq = e:sequence()
    e:prefill(seq, tokens(30))
    local before = counted(e)
    local function fails(fn)
      support.raises("half way", e.cache.transaction, e.cache, function()
        fn()
        error("half way", 0)
      end)
    end
    fails(function() e:prefill(seq, tokens(30)) end)
    local after = counted(e)
    assert.same({ before[1], before[3] }, { after[1], after[3] })
    assert.is_true(after[2] > before[2]) -- those pages were held
    e.cache:reset_peak()
    fails(function() e:decode({ seq }, { 1 }) end)
    -- the token that was replaced went away and came back
    assert.same({ before[1], before[1], before[3], after[4] + 2 * CUTS }, counted(e))
    e:prefill(seq, tokens(30))
    assert.equal(before[1], counted(e)[1])
    e.cache:close()
  end)

  it("count from an earlier result on", function()
    local e = engine { policy = kv.policy("streaming", { blocks = 4 }) }
    local seq = e:sequence()
    e:prefill(seq, tokens(30))
    local before = e.cache:stats()
    e:decode({ seq }, { 1 })
    local s = e.cache:stats(before)
    assert.same({ 4 * CUTS, 12 * CUTS, 0, CUTS * TOKEN, CUTS * TOKEN },
      { s.pages_held, s.pages_peak, s.pages_evicted, s.bytes_moved, s.bytes_copied })
    support.raises("since is a table, expected an earlier result of stats",
      e.cache.stats, e.cache, { bytes_moved = 3 })
    e.cache:close()
  end)

  it("count what a failed append took", function()
    local e = engine { blocks = 4 }
    local a, b = e:sequence(), e:sequence()
    e:prefill(a, tokens(5))
    support.raises("out of blocks", e.prefill, e, b, tokens(16))
    assert.same({ 2 * CUTS, 2 * CUTS, 0, 0 }, counted(e))
    e.cache:close()
  end)
end)

support.each_device(function(dev)
  describe("a cache's stats on " .. dev:name(), function()
    local SHAPE = rig.SHAPE
    local BLOCK_BYTES = SHAPE.block_size * 2 * SHAPE.head_dim * 4 * SHAPE.kv_heads
    local TOKEN_BYTES = BLOCK_BYTES / SHAPE.block_size

    it("count what crosses the link", function()
      for name, offload in pairs { ring = { slots = 2 }, hot = { hot_slots = 128 } } do
        local steps = { { "prefill", 1, 70 }, { "decode", 1 }, { "decode", 1 },
                        { "decode", 1 } }
        local _, its = rig.play(dev, { offload = offload }, steps)
        local s, to_device, to_host = its.cache:stats(), its.cache.tier:bytes()
        assert.same({ to_device, to_host }, { s.bytes_to_device, s.bytes_to_host }, name)
        assert.equal(to_device + to_host, s.bytes_moved, name)
        -- 70 tokens are 5 blocks; the decoded ones are written one by one
        assert.equal(SHAPE.layers * (5 * BLOCK_BYTES + 3 * TOKEN_BYTES), to_host, name)
        -- the hot cache fetches each block once; the ring brings the 4 full ones at
        -- every step
        assert.equal(SHAPE.layers * (name == "hot" and 5 or 3 * 4) * BLOCK_BYTES,
          to_device, name)
        local hot = its.cache.tier.hot
        if hot then -- a count that begins again takes nothing from the sum
          hot:reset_counts()
          assert.equal(0, hot:stats().bytes)
          assert.equal(s.bytes_moved, its.cache:stats().bytes_moved)
          hot:reset()
          assert.equal(s.bytes_moved, its.cache:stats().bytes_moved)
        end
        its.cache:close()
      end
    end)

    it("count prefetches that are over, once", function()
      local store = prefetch_cases.new_store()
      local _, keys = prefetch_cases.fill(store, "f32", 2)
      local cache = prefetch_cases.new_cache(dev, "f32")
      local prefetcher = prefetch_cases.new_prefetcher(dev, store)
      local ticket = prefetcher:submit { request = 1, cache = cache, keys = keys,
                                         blocks = { 3, 5 } }
      local bytes = ticket:wait().bytes
      assert.is_true(bytes > 0)
      ticket:poll()
      assert.equal(bytes, cache:stats().bytes_to_device)
      prefetcher:close()
      cache:close()
    end)
  end)
end)
