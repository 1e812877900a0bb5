--- The ring by hand, as a policy with a dataflow of its own drives it: the contract of
-- the policy guide's engine.
local ffi = require "ffi"
local kv = require "kvlab"
local support = require "spec.support"

local raises = support.raises
local LAYERS, BLOCKS, SIZE, HEADS, DIM = 2, 40, 16, 2, 32

local function new_cache(dev, offload)
  local cache = kv.cache { device = dev, format = "f32", layers = LAYERS, blocks = BLOCKS,
    block_size = SIZE, kv_heads = HEADS, head_dim = DIM, offload = offload }
  for layer = 0, LAYERS - 1 do
    kv.check(kv.C.kvl_random(cache:layer(layer), kv.C.KVL_RANDOM_NORMAL, 0, 1,
      layer + 1, 0))
  end
  dev:sync()
  return cache
end

local function block_of(memory, i) return memory:index(i):list() end

local function check(dev)
  describe("a ring on " .. dev:name(), function()
    it("brings blocks of a layer into slots, in their order", function()
      local cache = new_cache(dev, { slots = 2, slot_blocks = 4, max_seqs = 1 })
      local engine = cache.tier
      for layer = 0, LAYERS - 1 do
        engine:load_to_slot_layer(0, layer, { 7, 8, 9, 3 }) -- neighbours and others
        engine:load_to_slot_layer(1, layer, 39)
        engine:wait_slot_layer(0)
        engine:wait_slot_layer(1)
        local far, near = cache:layer(layer), engine:kv_for_slot(0)
        for i, block in ipairs { 7, 8, 9, 3 } do
          support.equal(block_of(near, i - 1), block_of(far, block))
        end
        support.equal(block_of(engine:kv_for_slot(1), 0), block_of(far, 39))
        engine:record_slot_compute_done(0)
        engine:record_slot_compute_done(1)
      end
      local bytes = 2 * HEADS * SIZE * DIM * 4
      assert.same({ 10 * bytes, 0 }, { engine:bytes() })
      cache:close()
    end)

    it("never overwrites a slot before its readers are done", function()
      -- the reader is slow (a long queue of work before it), the next load is not
      local cache = new_cache(dev, { slots = 1, slot_blocks = 1, max_seqs = 1 })
      local engine = cache.tier
      local busy = kv.randn(dev, "f32", { 512, 512 }, { seed = 1 })
      local product, got = kv.tensor(dev, "f32", { 512, 512 }), {}
      for block = 0, BLOCKS - 1 do
        engine:load_to_slot_layer(0, 0, block)
        engine:wait_slot_layer(0)
        busy:matmul(busy, product)
        got[block] = engine:kv_for_slot(0):index(0):clone()
        engine:record_slot_compute_done(0)
      end
      for block = 0, BLOCKS - 1 do
        support.equal(got[block], cache:layer(0):index(block), "block " .. block)
      end
      cache:close()
    end)

    it("sends the buffer to the host tier, and does not let it be overwritten before",
      function()
        local cache = new_cache(dev, { slots = 1, max_seqs = 2 })
        local engine, C = cache.tier, kv.C
        local from = kv.from(dev, "i32", { 1, 1, 2 }, { 0, 1 })
        for round = 1, 20 do
          local to = kv.from(dev, "i32", { 1, 1, 2 }, { round, round + 1 })
          kv.check(C.kvl_ring_wait_offload(engine.ring, 0))
          engine:decode_buffer(0):fill_(round)
          kv.check(C.kvl_ring_offload(engine.ring, 0, engine:decode_buffer(0), from,
            cache:layer(0), to, nil))
          engine:load_to_slot_layer(0, 0, round + 1) -- sees what was sent
          engine:wait_slot_layer(0)
          assert.equal(round, engine:kv_for_slot(0):index(0):min():item())
          engine:record_slot_compute_done(0)
        end
        dev:sync()
        for block = 1, 19 do
          local values = cache:layer(0):index(block)
          assert.equal(block, values:min():item())
          assert.equal(block, values:max():item())
        end
        cache:close()
      end)

    it("keeps a trace of loads and the compute that waited for them", function()
      local cache = new_cache(dev, { slots = 2, slot_blocks = 2, max_seqs = 1 })
      local engine = cache.tier
      engine:trace(5)
      for i = 0, 3 do
        engine:load_to_slot_layer(i % 2, 1, { i, i + 1 })
        engine:wait_slot_layer(i % 2)
        engine:record_slot_compute_done(i % 2)
      end
      local spans = engine:spans()
      assert.equal(5, #spans) -- load, compute, load, compute, load
      for i, span in ipairs(spans) do
        assert.equal(i % 2 == 1 and "load" or "compute", span.kind)
        assert.equal(1, span.layer)
        assert.equal(2, span.blocks)
        assert.equal(math.floor((i - 1) / 2) % 2, span.slot)
        assert.is_true(span.end_us >= span.begin_us)
        if i % 2 == 0 then assert.is_true(span.begin_us >= spans[i - 1].end_us) end
      end
      engine:trace(1)
      kv.check(kv.C.kvl_ring_wait(engine.ring, kv.C.KVL_RING_BUFFER))
      kv.check(kv.C.kvl_ring_done(engine.ring, kv.C.KVL_RING_BUFFER))
      assert.equal("compute", engine:spans()[1].kind)
      assert.equal(-1, engine:spans()[1].slot)
      engine:trace(0)
      assert.same({}, engine:spans())
      cache:close()
    end)

    it("refuses what it does not have", function()
      local cache = new_cache(dev, { slots = 2, slot_blocks = 2, max_seqs = 1 })
      local engine = cache.tier
      raises("slot is 2, expected 0 ... 1", engine.load_to_slot_layer, engine, 2, 0, 1)
      raises("block 1 is 40, expected 0 ... 39", engine.load_to_slot_layer, engine, 0, 0,
        { 1, 40 })
      raises("3 blocks, expected at most the 2", engine.load_to_slot_layer, engine, 0, 0,
        { 1, 2, 3 })
      raises("expected 0 ... 1", engine.load_to_slot_layer, engine, 0, 2, 1)
      raises("expected 0 ... 1", engine.kv_for_slot, engine, 2)
      local out = ffi.new "kvl_ring *[1]"
      local memory = kv.zeros(dev, "f32", { 33, 1, 2, 1, 4, 8 })
      raises("33 slots", function() kv.check(kv.C.kvl_ring_open(memory, nil, 1, out)) end)
      raises("seqs = 1", cache.batch, cache, { max_seqs = 2 })
      cache:close()
    end)
  end)

  describe("pinned memory on " .. dev:name(), function()
    it("is a tensor of the device in the host's memory", function()
      for _, huge in ipairs { false, true } do
        collectgarbage() -- what the specs before this one left
        collectgarbage()
        local before = dev:stats()
        local far = kv.pinned(dev, "f32", { 700, 1000 }, huge)
        assert.is_true(far:is_pinned())
        assert.equal(before.bytes_live, dev:stats().bytes_live)
        assert.equal(before.bytes_pinned + 700 * 1000 * 4, dev:stats().bytes_pinned)
        far:arange_()
        local near = kv.tensor(dev, "f32", { 700, 1000 })
        assert.is_false(near:is_pinned())
        near:copy_(far)
        local row = far:index(699)
        support.equal(near:index(699), row)
        row:free()
        assert.equal(699999, near:max():item())
        far:copy_(near:mul(2))
        assert.equal(2 * 699999, far:max():item())
        far:free()
        collectgarbage() -- views that the reductions made
        collectgarbage()
        assert.is_true(before.bytes_pinned >= dev:stats().bytes_pinned)
      end
    end)
  end)
end

support.each_device(check)
