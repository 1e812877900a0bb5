--- Blocks that a policy expects a later step to select are brought into the hot cache
-- ahead of it. What comes out is the same bits as without; what the step itself has to
-- fetch is less.
local kv = require "kvlab"
local rig = require "spec.rig"
local small = require "spec.policies.small"
local support = require "spec.support"

local LAYERS, KV_HEADS = rig.SHAPE.layers, rig.SHAPE.kv_heads
local BYTES = 2 * rig.SHAPE.block_size * rig.SHAPE.head_dim * 4 -- a KV head's block, f32

local function decode(dev, options, o)
  local all = { ratio = 0.3, min_blocks = 0, sink = 1, recent = 1 }
  for key, value in pairs(options) do all[key] = value end
  local given = { policy = "gsa", options = all, lengths = { 1000, 400 }, steps = 12,
                  offload = { hot_slots = 40 } }
  for key, value in pairs(o or {}) do given[key] = value end
  return rig.decode(dev, given).steps
end

local function last(steps) return steps[#steps].hot end

local MODES = {
  { scores = "history" }, { scores = "mean", refresh = 3 },
  { scores = "mean", refresh = 4, prefetch_ahead = 1 },
  { scores = "mean", refresh = 3, prefetch_ahead = 5, prefetch_cache_size = 2 },
}

local function with_ahead(mode, ahead)
  local options = { prefetch_ahead = ahead }
  for key, value in pairs(mode) do options[key] = options[key] or value end
  return options
end

local cases = {}
for mode = 1, #MODES do
  for _, slots in ipairs { 40, 200 } do
    for _, fork in ipairs { false, true } do
      cases[#cases + 1] = { mode = mode, slots = slots, fork = fork }
    end
  end
end

describe("blocks brought ahead", function()
  support.each_device(function(dev)
    it("change no bit of what comes out", function()
      for _, c in ipairs(support.sample(cases)) do
        local o = { offload = { hot_slots = c.slots }, fork = c.fork, chunk = 140,
                    heads = 4 }
        local want = decode(dev, with_ahead(MODES[c.mode], 0), o)
        local got = decode(dev, with_ahead(MODES[c.mode]), o)
        for i, step in ipairs(want) do
          support.equal(got[i].selection, step.selection, "selection")
          support.equal(got[i].out, step.out, "step " .. i)
        end
        assert.equal(0, last(want).ahead.predicted)
        assert.is_true(last(got).ahead.used > 0)
      end
    end)

    it("are there for the first step after a prompt: of history all of them", function()
      for _, lengths in ipairs { { 250 }, { 250, 90, 1 } } do
        local o = { lengths = lengths, steps = 1, offload = { hot_slots = 60 } }
        local without = last(decode(dev, { prefetch_ahead = 0 }, o))
        local with = last(decode(dev, {}, o))
        assert.is_true(without.misses > 0 and without.hits == 0)
        assert.equal(0, with.misses)
        assert.equal(without.misses, with.hits)
        assert.equal(without.bytes, with.ahead.bytes)
        assert.equal(with.ahead.brought, with.ahead.used)
        assert.equal(0, with.ahead.wasted_bytes)
      end
    end)

    it("are those of the next look of means, and that step misses fewer", function()
      local o = { lengths = { 1000, 900 }, steps = 10, steady = 2 }
      local function misses(ahead)
        local mode = { scores = "mean", refresh = 3, prefetch_ahead = ahead }
        local steps = decode(dev, mode, o)
        local looks = 0
        for i = 4, 10, 3 do
          looks = looks + steps[i].hot.misses - steps[i - 1].hot.misses
        end
        return looks, last(steps)
      end
      local without, none = misses(0)
      local one = misses(1)
      local two, hot = misses(2)
      assert.is_true(without > 0 and none.bytes == none.misses * BYTES)
      assert.is_true(one < without and two < without, ("%d, %d with 1, %d with 2")
        :format(without, one, two))
      assert.equal((hot.misses + hot.ahead.brought) * BYTES, hot.bytes)
      assert.equal(hot.ahead.brought * BYTES, hot.ahead.bytes)
      assert.equal((hot.ahead.brought - hot.ahead.used) * BYTES, hot.ahead.wasted_bytes)
    end)

    it("are none between two looks, and none where every step looks", function()
      local steps = decode(dev, { scores = "mean", refresh = 5, prefetch_ahead = 1 },
        { lengths = { 250 } })
      for i = 2, 10 do -- looks at steps 1, 6 and 11; asks after 5 and 10
        local asked = steps[i].hot.ahead.predicted - steps[i - 1].hot.ahead.predicted
        assert.equal(i % 5 == 0, asked > 0, "step " .. i)
      end
      local prompt = last(decode(dev, { scores = "mean", refresh = 1 },
        { lengths = { 250 }, steps = 1 })).ahead
      assert.same(prompt, last(decode(dev, { scores = "mean", refresh = 1 },
        { lengths = { 250 }, steps = 1 })).ahead)
      assert.equal(prompt.predicted, last(decode(dev, { scores = "mean", refresh = 1 },
        { lengths = { 250 } })).ahead.predicted)
    end)

    it("are at most prefetch_cache_size of a sequence, the best ones", function()
      for _, most in ipairs { 2, 3, 5, 1000 } do
        local hot = last(decode(dev, { prefetch_cache_size = most },
          { lengths = { 250 }, steps = 1 }))
        assert.equal(math.min(most, 5) * LAYERS * KV_HEADS, hot.ahead.predicted)
        assert.equal(hot.ahead.predicted, hot.hits)
      end
      -- of 63 and 26 blocks, 19 and 8 are selected; with at most 10 in all, 10 and 5 come
      local mode = { scores = "mean", refresh = 2, prefetch_cache_size = 10 }
      local steps = decode(dev, mode, { steps = 2 })
      local asked = steps[2].hot.ahead.predicted - steps[1].hot.ahead.predicted
      assert.equal((10 + 5) * LAYERS * KV_HEADS, asked)
    end)

    it("are none where the slots are too few for all of a prompt's sequences", function()
      local its_rig = rig.new(dev, { policy = "gsa", offload = { hot_slots = 20 },
                                     options = { ratio = 0.3, min_blocks = 0 } })
      local hot, seqs = its_rig.cache.tier.hot, {}
      for count = 1, 3 do
        for i = 1, count do seqs[i] = its_rig.cache:sequence() end
        local counts = { 40, count > 1 and 30 or nil, count > 2 and 1 or nil }
        its_rig.batch:append(seqs, counts)
        its_rig.attention:begin(its_rig.batch, true, { true, true, true })
        local n = its_rig.batch.tokens_count
        local q = kv.randn(dev, "f32", { n, rig.SHAPE.heads, rig.SHAPE.head_dim })
        local k = kv.randn(dev, "f32", { n, KV_HEADS, rig.SHAPE.head_dim })
        its_rig.attention:forward(0, q, k, k)
        assert.equal(count == 1, hot:stats().ahead.predicted > 0)
        hot:reset_counts()
        for i = 1, count do seqs[i]:close() end
      end
      its_rig.cache:close()
    end)

    it("are brought inside a graph that is replayed", function()
      local known = kv.policy.define { name = "known", decode = true, defaults = {},
        score = function(_, ctx) return ctx:new_scores(1):fill_(1) end,
        predict = function(_, ctx)
          return ctx:expect(ctx:new_scores(1):fill_(1), kv.policy.everything, 1000)
        end }
      local function play(is_recorded)
        local its_rig = rig.new(dev, { offload = { hot_slots = 128 } })
        local cache = its_rig.cache
        local attention = kv.attention { cache = cache, heads = rig.SHAPE.heads,
          max_seqs = 8, decode_policy = known() }
        local batch = cache:batch { max_seqs = 8, fixed_width = true }
        local seq, outs, graph = cache:sequence(), {}, nil
        local q = kv.randn(dev, "f32", { 1, rig.SHAPE.heads, rig.SHAPE.head_dim })
        local k = kv.randn(dev, "f32", { 1, KV_HEADS, rig.SHAPE.head_dim }, { seed = 3 })
        local out = kv.tensor(dev, "f32", { 1, rig.SHAPE.heads, rig.SHAPE.head_dim })
        local function layers()
          for layer = 0, LAYERS - 1 do attention:forward(layer, q, k, k, out) end
        end
        for step = 1, 40 do
          batch:append({ seq }, { 1 })
          attention:begin(batch, false)
          if not is_recorded or step == 1 then
            layers()
          else
            graph = graph or kv.graph(layers, dev)
            graph:replay()
          end
          outs[step] = out:list()
        end
        local stats = cache.tier.hot:stats()
        if graph then graph:close() end
        cache:close()
        return outs, stats
      end
      local want, eager = play(false)
      local got, replayed = play(true)
      assert.same(want, got)
      assert.same(eager, replayed)
      assert.is_true(eager.ahead.predicted > 0)
    end)

    it("wait for what a prefill chunk still writes to the host tier", function()
      for chunk = 1, 20, 3 do
        local o = { lengths = { 61 }, chunk = chunk, steps = 3 }
        local want = decode(dev, { prefetch_ahead = 0 }, o)
        local got = decode(dev, {}, o)
        for i, step in ipairs(want) do support.equal(got[i].out, step.out) end
      end
    end)
  end)

  --- fn(attention, batch, seq, us_of) over a link of a byte a millisecond, beside which
  -- compute is nothing on any machine. The policy reads the first block and expects all;
  -- us_of(fn) is the modelled time of fn, and of what it began ahead of the next step.
  local function with_slow_link(fn)
    local dev = kv.device "cpu"
    local first = kv.policy.define { name = "first", decode = true,
      defaults = { blocks = 1 },
      score = function(_, ctx) return ctx:new_scores(1):fill_(0) end,
      predict = function(self, ctx)
        return ctx:expect(self:score(ctx), kv.policy.everything, 1000)
      end }
    support.with_link(1e-6, 0, function()
      local cache = rig.new(dev, { offload = { hot_slots = 128 } }).cache
      local attention = kv.attention { cache = cache, heads = rig.SHAPE.heads,
        max_seqs = 8, decode_policy = first() }
      local batch, seq = cache:batch { max_seqs = 8 }, cache:sequence()
      fn(dev, attention, batch, seq, function(step)
        local from, to = dev:open_event(), dev:open_event()
        from:record(dev:stream())
        step()
        batch:append({ seq }, { 1 })
        to:record(dev:stream())
        return from:elapsed_us(to)
      end)
      cache:close()
    end)
  end

  local function layers(dev, attention, n)
    local q = kv.randn(dev, "f32", { n, rig.SHAPE.heads, rig.SHAPE.head_dim })
    local k = kv.randn(dev, "f32", { n, KV_HEADS, rig.SHAPE.head_dim })
    for layer = 0, LAYERS - 1 do attention:forward(layer, q, k, k) end
  end

  local function assert_time(bytes, us)
    local ms, block = us / 1e3, KV_HEADS * BYTES -- one more block takes eight seconds
    assert.is_true(ms >= bytes and ms < bytes + block, ("%d ms for %d"):format(ms, bytes))
  end

  it("begin when they are in the host tier; the next step begins after them", function()
    with_slow_link(function(dev, attention, batch, seq, us_of)
      batch:append({ seq }, { 16 })
      attention:begin(batch, true, { true })
      -- layer 0 goes to the host; layer 0 comes back while 1 goes; 1 comes back
      assert_time((LAYERS + 1) * KV_HEADS * BYTES,
        us_of(function() layers(dev, attention, 16) end))
      local hot = attention.cache.tier.hot
      hot:reset_counts()
      attention:begin(batch, false)
      layers(dev, attention, 1)
      local stats = hot:stats() -- what was brought before the count is a hit, no more
      assert.same({ LAYERS * KV_HEADS, 0 }, { stats.hits, stats.ahead.used })
    end)
  end)

  it("come after the layer that asked for them", function()
    with_slow_link(function(dev, attention, batch, seq, us_of)
      batch:append({ seq }, { 16 })
      attention:begin(batch, true)
      layers(dev, attention, 16)
      batch:append({ seq }, { 1 })
      attention:begin(batch, false)
      layers(dev, attention, 1)
      local second = kv.from(dev, "i32", { seq:table()[2] })
      for layer = 0, LAYERS - 1 do attention.cache.tier.hot:drop(layer, second) end
      batch:append({ seq }, { 1 })
      attention:begin(batch, false)
      local block = KV_HEADS * BYTES
      local far = kv.pinned(dev, "u8", { 4 * block })
      local near = kv.zeros(dev, "u8", { 4 * block })
      -- a copy to the host; then the second block is brought for layer after layer
      assert_time((4 + LAYERS) * block, us_of(function()
        far:copy_(near)
        layers(dev, attention, 1)
      end))
    end)
  end)

  it("are asked for in decode and at the end of a prompt only", function()
    local asked = {}
    local policy = kv.policy.define { name = "watch", decode = true, defaults = {},
      score = function(_, ctx) return ctx:new_scores(1):fill_(1) end,
      predict = function(_, ctx)
        asked[#asked + 1] = ctx.is_prefill and "prompt" or "decode"
      end }
    small.play(policy(), { 10, 10 }, 2) -- resident: nobody asks
    assert.same({}, asked)
  end)
end)
