--- What fails leaves nothing behind: every allocation of an open, of a recording and of
-- whole steps fails once, and what comes after it goes as if nothing had been. And what
-- runs beside something else gives the same however late it is.
local ffi = require "ffi"
local kv = require "kvlab"
local rig = require "spec.rig"
local support = require "spec.support"
local synthetic = require "kvlab.experiment.synthetic"

local C, check = kv.C, kv.check
local is_hostile = C.kvl_fail_allocation(0) == 0
local dev = kv.device "cpu"

local out_ring, out_event = ffi.new "kvl_ring *[1]", ffi.new "kvl_event *[1]"
local out_stream = ffi.new "kvl_stream *[1]"

-- ---- failing --------------------------------------------------------------------------

local function collect()
  support.collect()
  dev:sync()
  dev:trim()
end

--- How many streams can be opened.
local function free_streams()
  local open = {}
  while C.kvl_stream_open(dev, out_stream) >= 0 do open[#open + 1] = out_stream[0] end
  for _, stream in ipairs(open) do C.kvl_stream_close(stream) end
  return #open
end

--- What a leak would change.
local function holdings()
  collect()
  local stats = dev:stats()
  return { live = stats.bytes_live, pinned = stats.bytes_pinned,
           cached = stats.bytes_cached, streams = free_streams() }
end

--- Disarms the failure that was armed with n. Returns whether it had not come yet.
local function disarm(n)
  for _ = 1, n do -- an event is two allocations
    if C.kvl_event_open(dev, out_event) < 0 then return true end
    C.kvl_event_close(out_event[0])
  end
  return false
end

--- try(prepare()), once for each of its allocations, which fails. It raises and says
-- that memory is missing, or succeeds all the same, because it tried again. Then
-- after(ok, prepared, result). Returns how often it raised.
local function fail_each(prepare, try, after)
  local raised, n = 0, 0
  local was_left
  repeat
    local prepared = prepare()
    collect()
    n = n + 1
    check(C.kvl_fail_allocation(n))
    local ok, result = pcall(try, prepared)
    was_left = disarm(n)
    if not ok then
      raised = raised + 1
      assert.matches("memory", result)
    end
    assert.is_false(was_left and not ok)
    after(ok, prepared, result)
  until was_left
  return raised
end

local function nothing() end

--- Define a spec of the hostile build, after which the device holds what it held before.
local function it_leaves_nothing(name, fn)
  it(name, function()
    if not is_hostile then return pending "not a hostile build" end
    local before = holdings()
    fn()
    assert.same(before, holdings())
  end)
end

-- ---- steps ----------------------------------------------------------------------------

local SCRIPT = { { "prefill", 1, 40 }, { "decode", 1 }, { "prefill", 2, 20 },
                 { "chunks", 5, 1, 2 }, { "decode", 1, 2 }, { "decode", 1, 2 } }
local OTHER = { { "prefill", 3, 50 }, { "decode", 3 }, { "decode", 3 } }

local ENGINES = {
  ring = { slots = 2, slot_blocks = 1 },
  ["hot cache"] = { slots = 1, slot_blocks = 2, hot_slots = 80 },
  ["hot cache with overlap"] = { slots = 1, slot_blocks = 2, hot_slots = 80,
                                 hot_overlap = true },
}

local function new_rig(engine)
  return rig.new(dev, { offload = engine, policy = "quest", blocks = 32,
                        options = { ratio = 0.5, min_blocks = 0 } })
end

local function play(its_rig, script) return (rig.play(dev, { rig = its_rig }, script)) end

local function play_fresh(engine, script)
  local its_rig = new_rig(engine)
  local outs = play(its_rig, script)
  its_rig.cache:close()
  return outs
end

local function assert_same(want, got)
  for s, steps in pairs(want) do
    assert.equal(#steps, #got[s])
    for i, step in ipairs(steps) do support.equal(got[s][i], step) end
  end
end

-- ---- specs ----------------------------------------------------------------------------

describe("a failed allocation", function()
  lazy_setup(function() -- the rig keeps the numbers that it has drawn
    for _, script in ipairs { SCRIPT, OTHER } do play_fresh(ENGINES.ring, script) end
  end)

  it_leaves_nothing("of a ring closes what there was of it", function()
    local memory = kv.zeros(dev, "f32", { 32, 1, 2, 1, 4, 8 })
    local raised = fail_each(nothing, function()
      check(C.kvl_ring_open(memory, nil, 3, out_ring))
      return out_ring[0]
    end, function(ok, _, ring)
      if ok then C.kvl_ring_close(ring) end
    end)
    assert.is_true(raised > 32 * 6) -- a stream and two events of each slot
    memory:free()
  end)

  it_leaves_nothing("of a trace leaves a ring without one", function()
    local cache = kv.cache { device = dev, format = "f32", layers = 1, blocks = 4,
      block_size = 4, kv_heads = 1, head_dim = 8,
      offload = { slots = 2, slot_blocks = 1, max_seqs = 1 } }
    cache:layer(0):fill_(7)
    local engine, spans = cache.tier, ffi.new "kvl_span[5]"
    local raised = fail_each(nothing, function() engine:trace(5) end, function(ok)
      engine:load_to_slot_layer(1, 0, 3)
      engine:wait_slot_layer(1)
      assert.equal(7, engine:kv_for_slot(1):min():item())
      engine:record_slot_compute_done(1)
      assert.equal(ok and 2 or 0, check(C.kvl_ring_trace_get(engine.ring, spans, 5)))
    end)
    assert.is_true(raised > 2 * 2 * 5)
    cache:close()
  end)

  it_leaves_nothing("of a recording runs nothing, and the next one is whole", function()
    local side, forked, joined = dev:open_stream(), dev:open_event(), dev:open_event()
    local main = dev:stream()
    local x, y = kv.zeros(dev, "f32", { 900 }), kv.zeros(dev, "f32", { 900 })
    local function work()
      local two = x:add(1):add(1)
      forked:record(main)
      side:wait(forked)
      dev:with_stream(side, function() two:mul(10):add(y, y) end)
      joined:record(side)
      main:wait(joined)
    end
    local replays = 0
    local raised = fail_each(nothing, function()
      return kv.graph(work, dev)
    end, function(ok, _, graph)
      assert.equal(0, C.kvl_device_is_recording(dev))
      if ok then
        graph:replay()
        graph:close()
        replays = replays + 1
      end
      assert.equal(20 * replays, y:max():item())
      assert.equal(2, (x + 2):min():item())
    end)
    assert.is_true(raised > 4)
    side:close()
    forked:close()
    joined:close()
    x:free()
    y:free()
  end)

  it_leaves_nothing("of pinned memory gives none", function()
    for _, huge in ipairs { false, true } do
      local pinned = dev:stats().bytes_pinned
      local raised = fail_each(nothing, function()
        return kv.pinned(dev, "f32", { 1000, 1000 }, huge)
      end, function(ok, _, far)
        if ok then far:free() end
        assert.equal(pinned, dev:stats().bytes_pinned)
      end)
      assert.equal(2, raised)
    end
  end)

  for name, engine in pairs(ENGINES) do
    it_leaves_nothing("of a cache behind a " .. name .. " gives none of it", function()
      local want = play_fresh(engine, OTHER)
      local before = holdings()
      local raised = fail_each(nothing, function()
        return new_rig(engine)
      end, function(ok, _, its_rig)
        if ok then
          assert_same(want, play(its_rig, OTHER))
          its_rig.cache:close()
        end
      end)
      assert.same(before, holdings())
      assert.is_true(raised > 10)
    end)

    it_leaves_nothing("in a step through a " .. name .. " stays in that step", function()
      local want, other = play_fresh(engine, SCRIPT), play_fresh(engine, OTHER)
      local raised = fail_each(function()
        return new_rig(engine)
      end, function(its_rig)
        return play(its_rig, SCRIPT)
      end, function(ok, its_rig, outs)
        if ok then assert_same(want, outs)
        else assert.equal(32, its_rig.cache:blocks_free()) end
        outs = play(its_rig, OTHER)
        assert_same(other, outs)
        its_rig.cache:close()
      end)
      assert.is_true(raised > 0)
    end)
  end
end)

-- ---- what runs beside -----------------------------------------------------------------

local SPARE = 400
local busy = kv.randn(dev, "f32", { 384, 384 }, { seed = 1 })
local product = kv.tensor(dev, "f32", { 384, 384 })

--- Long work for the current stream, and longer one for the stream that takes blocks to
-- the host: a block of nobody's to blocks that nobody has.
local function hold_up(cache)
  local far, ring = cache:layer(0), cache.tier.ring
  local block = kv.zeros(dev, "f32", { 1, unpack(far:dims(), 2) })
  local from = kv.zeros(dev, "i32", { 1, 1, SPARE })
  local to = kv.arange(dev, "i32", SPARE, cache.blocks - SPARE):reshape { 1, 1, SPARE }
  cache.held_up = { block, from, to, cache.held_up } -- to free one waits
  busy:matmul(busy, product)
  for _ = 1, 20 do check(C.kvl_ring_offload(ring, 0, block, from, far, to, nil)) end
end

describe("an engine that lags behind the host", function()
  --- What every layer gives in steps of three sequences; nothing waits before the end.
  local function steps(engine, lags)
    local s = synthetic { device = dev, shape = "small", layers = 3, context = 8192,
      block_size = 16, max_seqs = 2, max_blocks = 16, dtype = "f32", chunk = 64,
      offload = engine }
    local a, b, c, outs = s:sequence(70), s:sequence(33), s.cache:sequence(), {}
    local forward = s.attention.forward
    function s.attention.forward(...)
      local out = forward(...)
      outs[#outs + 1] = out:clone()
      return out
    end
    local function late(fn, ...)
      if lags then hold_up(s.cache) end
      fn(s, ...)
    end
    for _ = 1, 6 do late(s.decode, { a, b }) end
    late(s.prefill, c, 50) -- it has no past, and so waits for no load
    s:prefill(c, 30)
    late(s.prefill, b, 50)
    s:decode { b, c }
    for _ = 1, 3 do late(s.decode, { b, c }) end
    late(s.prefill, a, 1)
    for _ = 1, 4 do s:decode { a, b } end
    for i = 1, #outs do outs[i] = outs[i]:list() end
    s:close()
    return outs
  end

  for name, engine in pairs(ENGINES) do
    it("gives the same through a " .. name, function()
      local want, stream = steps(engine), dev:open_stream()
      local got = dev:with_stream(stream, steps, engine, true)
      for i = 1, #want do support.equal(got[i], want[i], "output " .. i) end
      stream:close()
    end)
  end

  it("sends nothing elsewhere when a step is left and the next one begins", function()
    -- Blocks of sequence 1, in layer 0. The step of 5 tokens is left there as by an
    -- error, while its offload is late. Where that finds its block numbers, the next
    -- step has slot numbers, which would name a block of sequence 1.
    local function blocks_after(script)
      local its_rig = rig.new(dev, { offload = ENGINES.ring, blocks = SPARE + 30 })
      local attention, engine = its_rig.attention, its_rig.cache.tier
      local forward, offload = attention.forward, engine.offload
      local function is_left() return attention.context.batch.counts[1] == 5 end
      function engine.offload(self, layer)
        if is_left() then hold_up(self.cache) end
        return offload(self, layer)
      end
      function attention.forward(self, layer, q, k, v)
        return layer == 1 and is_left() and q or forward(self, layer, q, k, v)
      end
      play(its_rig, script)
      dev:sync()
      local blocks = its_rig.cache:layer(0):narrow(0, 10):list()
      its_rig.cache:close()
      return blocks
    end
    local want = blocks_after { { "prefill", 1, 160 }, { "prefill", 3, 80 } }
    support.equal(blocks_after { { "prefill", 1, 160 }, { "prefill", 2, 5 },
                                 { "prefill", 3, 80 } }, want)
  end)
end)
