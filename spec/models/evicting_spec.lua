--- Engines whose policy evicts tokens: replayed = launched, chunked = whole, everything
-- kept = dense, a failed step = no step, and what is refused. That the right tokens go is
-- in spec/lua/policy/evictor_spec.lua.
local interrupted = require "spec.interrupted"
local kv = require "kvlab"
local support = require "spec.support"
local tiny = require "spec.models.tiny"
local tried = require "spec.tried_policies"

local BLOCK = 4
local NAMES = tried.evicting()

--- Options with which a policy holds so many blocks of a prompt.
local function holding(name, blocks)
  local o = { blocks = blocks, sink = 0, recent = 0 }
  if name == "rocketkv" then o.spare, o.min_blocks = 1, 0 end
  return o
end

local function tokens(n, first)
  local list = {}
  for i = 1, n do list[i] = ((i + (first or 0)) * 37 + 11) % 97 end
  return list
end

local function open(dev, o)
  local policy = o.policy
  if type(policy) == "string" then policy = kv.policy(policy, o.options) end
  return tiny.attentive(dev):engine { blocks = o.blocks or 60, block_size = BLOCK,
    chunk = o.chunk or 64, max_seqs = 4, max_blocks = 50, tables = o.tables or "head",
    graph = o.graph, policy = policy, draft_policy = o.draft_policy }
end

--- Two prompts, decode steps of one and of both, a fork, and a prompt that goes on: the
-- logits of all steps, and the free pages at the end.
local function play(dev, o)
  local e, out = open(dev, o), {}
  local function keep(logits)
    for _, x in ipairs(logits:list()) do out[#out + 1] = x end
  end
  local a, b = e:sequence(), e:sequence()
  keep(e:prefill(a, tokens(45)))
  for i = 1, 5 do keep(e:decode({ a }, { i })) end
  keep(e:prefill(b, tokens(30, 7)))
  for i = 1, 10 do keep(e:decode({ b, a }, { i, 2 * i })) end
  local c = a:fork()
  for i = 1, 6 do keep(e:decode({ a, c }, { i, 3 * i })) end
  keep(e:prefill(c, tokens(20, 3)))
  for i = 1, 6 do keep(e:decode({ c }, { i })) end
  local free, held = e.cache:pages_free(), {}
  for _, seq in ipairs { a, b, c } do held[#held + 1] = seq:held(1, 0) end
  for _, seq in ipairs { a, b, c } do e:finish(seq) end
  assert.equal(e.cache.pages, e.cache:pages_free())
  e.cache:close()
  return out, free, held
end

local function close(got, want, tolerance, what)
  assert.equal(#want, #got)
  for i, x in ipairs(want) do
    assert(math.abs(got[i] - x) <= tolerance, ("%s: %g, expected %g"):format(what, got[i],
      x))
  end
end

local function specs(dev)
  for _, name in ipairs(NAMES) do
    for _, tables in ipairs { "layer", "head" } do
      local what = "of %s, tables by %s, is the same in chunks and replayed #policy"
      it(what:format(name, tables), function()
        local o = { policy = name, tables = tables, options = holding(name, 4) }
        local want, free, held = play(dev, o)
        o.graph = true
        local got, free_too, held_too = play(dev, o)
        close(got, want, 0, "replayed")
        assert.equal(free, free_too)
        assert.same(held, held_too)
        assert.is_true(held[1] < 45 and (held[1] == 16 or held[1] == 16 + 21), held[1])
        o.graph, o.chunk = nil, 7
        close((play(dev, o)), want, 2e-4, "in chunks")
      end)
    end
  end

  it("of a budget that keeps everything is dense attention #policy", function()
    local want = play(dev, { policy = "full", tables = "one" })
    for _, name in ipairs(NAMES) do
      close((play(dev, { policy = name, options = { ratio = 1 } })), want, 0, name)
    end
  end)

  it("gives the pages of evicted tokens to others", function()
    local e = open(dev, { policy = "tova", options = { blocks = 4 }, blocks = 31 })
    local seqs = {}
    for i = 1, 4 do -- each prompt takes 15 blocks, and 4 stay
      seqs[i] = e:sequence()
      e:prefill(seqs[i], tokens(60, i))
      assert.equal(31 - 4 * i, e.cache:blocks_free())
      if i == 1 then
        local want = e.cache:pages_free()
        for step = 1, 100 do e:decode({ seqs[1] }, { step % 97 }) end
        assert.equal(want, e.cache:pages_free())
        assert.equal(16, seqs[1]:held(0, 0))
        assert.equal(160, seqs[1]:length())
      end
    end
    e.cache:close()
  end)

  it("leaves everything as it was where pages for what stays are missing", function()
    local e = open(dev, { policy = "tova", options = { blocks = 4 }, blocks = 18 })
    local a, b = e:sequence(), e:sequence()
    e:prefill(a, tokens(8))
    support.raises("an eviction needs", e.prefill, e, b, tokens(63, 1))
    assert.equal(0, b:length())
    assert.equal(16, e.cache:blocks_free())
    e:prefill(b, tokens(40, 1)) -- 10 of 16 blocks, and 4 for what stays
    assert.equal(12, e.cache:blocks_free())
    e.cache:close()
  end)
end

describe("eviction", function()
  support.each_device(specs)

  local cpu = kv.device "cpu"

  it("is whole or none where Ctrl-C comes at any call", function()
    for _, name in ipairs { "h2o", "snapkv" } do
      local o = { policy = name, options = { blocks = 3 } }
      local function start()
        local e = open(cpu, o)
        local seq = e:sequence()
        e:prefill(seq, tokens(10))
        return e, seq
      end
      local e, seq = start()
      local want = { e:prefill(seq, tokens(20, 5)):list() }
      want[2] = e:decode({ seq }, { 4 }):list()
      e.cache:close()
      e, seq = start()
      jit.flush() -- compiled code calls no hook
      for at, call in ipairs { function() return e:prefill(seq, tokens(20, 5)) end,
                               function() return e:decode({ seq }, { 4 }) end } do
        local nth, failed, ok, result = 1, 0
        local length, free = seq:length(), e.cache:pages_free()
        repeat
          ok, result = interrupted.call(e.cache, call, nth, failed % 2 == 0)
          if not ok then
            assert.matches("interrupted", tostring(result))
            assert.equal(length, seq:length())
            assert.equal(free, e.cache:pages_free())
            failed, nth = failed + 1, nth + 1 + math.floor(nth / 12)
          end
        until ok
        assert.is_true(failed > 30, failed)
        close(result:list(), want[at], 0, name)
      end
      e.cache:close()
    end
  end)

  it("replays graphs that were recorded before there were more sequences", function()
    local function run(graph)
      local e, out = open(cpu, { policy = "h2o", options = { blocks = 3 },
        graph = graph, blocks = 300 }), {}
      local seqs = {}
      for i = 1, 14 do -- 28 rows by head, of which a step may have 8
        seqs[i] = e:sequence()
        e:prefill(seqs[i], tokens(14 + i, i))
        for _ = 1, 3 do
          local pair = { seqs[math.max(1, i - 1)], seqs[i] }
          if i == 1 then pair[2] = nil end
          for _, x in ipairs(e:decode(pair, tokens(#pair, 5)):list()) do
            out[#out + 1] = x
          end
        end
      end
      for _, x in ipairs(e:decode({ seqs[1], seqs[2] }, { 1, 2 }):list()) do
        out[#out + 1] = x
      end
      e.cache:close()
      return out
    end
    close(run(true), run(false), 0, "replayed")
  end)

  it("works in a prompt and the decode steps of one transaction", function()
    for _, o in ipairs { { blocks = 4 }, { ratio = { 1, 0.3 } } } do
      local function run(together)
        local e = open(cpu, { policy = "streaming", options = o })
        local seq, logits = e:sequence(), nil
        local function steps()
          e:prefill(seq, tokens(16))
          for i = 1, 4 do logits = e:decode({ seq }, { i }) end
          return logits:list()
        end
        local list = together and e.cache:transaction(steps) or steps()
        local free = e.cache:pages_free()
        e.cache:close()
        return list, free
      end
      local want, free = run(false)
      local got, free_too = run(true)
      close(got, want, 0, "together")
      assert.equal(free, free_too)
    end
  end)

  it("works with one KV head", function()
    for _, name in ipairs(NAMES) do
      local dev, shape = cpu, { layers = 1, blocks = 40, block_size = 4, head_dim = 16 }
      local cache = kv.cache { device = dev, format = "f32", layers = shape.layers,
        blocks = shape.blocks, block_size = 4, kv_heads = 1, head_dim = 16,
        tables = "head" }
      local attention = kv.attention { cache = cache, heads = 2, max_blocks = 20,
        decode_policy = kv.policy(name, holding(name, 2)) }
      local batch = cache:batch { max_blocks = 20 }
      local seq = cache:sequence()
      batch:append({ seq }, { 30 })
      attention:begin(batch, true, { true })
      local function draw(n, heads, seed)
        return kv.randn(dev, "f32", { n, heads, 16 }, { seed = seed })
      end
      attention:forward(0, draw(30, 2, 1), draw(30, 1, 2), draw(30, 1, 3))
      assert.equal(8, seq:held(0, 0))
      cache:close()
    end
  end)

  it("forgets the queries and numbers of an older prompt", function()
    local function last(name, o, before)
      local e = open(cpu, { policy = name, options = o })
      local seq = e:sequence()
      before(e, seq)
      local logits = e:prefill(seq, tokens(40)):list()
      for i = 1, 4 do logits = e:decode({ seq }, { i }):list() end
      e.cache:close()
      return logits
    end
    for _, name in ipairs { "h2o", "tova", "snapkv" } do
      local o = { blocks = 4, sink = 0, recent = 0 }
      local want = last(name, o, function() end)
      close(last(name, o, function(e, seq)
        e:prefill(seq, tokens(9, 4))
        for i = 1, 8 do e:decode({ seq }, { i + 9 }) end
        seq:truncate(0)
      end), want, 0, name)
    end
  end)

  it("refuses sequences that it has not seen, and those of others", function()
    local e = open(cpu, { policy = "full" })
    local seq = e:sequence()
    e:prefill(seq, tokens(20))
    support.raises("prefill anew", e.use_policy, e, kv.policy("tova", { blocks = 3 }),
      { seq })
    e:use_policy(kv.policy("tova", { blocks = 3 }))
    support.raises("sequence 1 has 20 tokens that policy tova has not seen", e.decode, e,
      { seq }, { 1 })
    local other = e:sequence()
    e:prefill(other, tokens(30))
    e:use_policy(kv.policy "quest", { seq })
    support.raises("policy tova has evicted tokens of sequence 1", e.decode, e, { other },
      { 1 })
    e:decode({ seq }, { 1 }) -- nothing of it was evicted
    e.cache:close()
  end)

  it("refuses batches that were appended to in another way", function()
    local e = open(cpu, { policy = "tova", options = { blocks = 3 } })
    local seq = e:sequence()
    e:prefill(seq, tokens(30))
    local function step(is_prefill, replaces, ends)
      return e.cache.transaction, e.cache, function()
        e.batch:append({ seq }, { 1 }, { 5 }, nil, nil, replaces)
        e.attention:begin(e.batch, is_prefill, ends)
      end
    end
    support.raises("replaces = false, expected true in a decode step of policy tova",
      step(false, false))
    support.raises("replaces = true, expected false in a prefill step", step(true, true))
    support.raises("ends_prompts has 0 entries, expected 1", step(true, false, {}))
    e:use_policy(kv.policy "full")
    seq:truncate(0)
    support.raises("appended to with replaces, but no policy evicts", step(false, true))
    local narrow = kv.attention { cache = e.cache, heads = 4, max_blocks = 10 }
    support.raises("50 columns, expected at most the attention's max_blocks = 10",
      function()
        e.batch:append({ seq }, { 1 }, { 5 })
        narrow:begin(e.batch, true)
      end)
    e.cache:close()
  end)

  it("needs no more blocks than its budget in decode", function()
    local e = open(cpu, { policy = "tova", options = { blocks = 50 } })
    local seq = e:sequence()
    e:prefill(seq, tokens(200)) -- as many as max_blocks has room for
    for i = 1, 5 do e:decode({ seq }, { i }) end
    assert.equal(200, seq:held(0, 0))
    e.cache:close()
  end)

  it("refuses what does not go with it", function()
    support.raises("policy tova evicts tokens, which does not go with tables = \"one\"; "
      .. "expected \"layer\" or \"head\"", open, cpu, { policy = "tova", tables = "one" })
    support.raises("does not go with drafts", open, cpu, { policy = "tova",
      draft_policy = kv.policy "quest" })
    support.raises("a split among heads", open, cpu, { policy = "snapkv",
      tables = "layer", options = { split = "adaptive" } })
    support.raises("a budget of each head", open, cpu, { policy = "tova",
      tables = "layer", options = { ratio = kv.full(cpu, "f32", { 2, 2 }, 0.5) } })
    support.raises("expected [2, 2]: layers, KV heads", open, cpu, { policy = "tova",
      options = { ratio = kv.full(cpu, "f32", { 2, 3 }, 0.5) } })
    support.raises("draft_policy is tova, which evicts tokens", open, cpu,
      { policy = "full", draft_policy = kv.policy "tova" })
    support.raises("a budget of 2 blocks, expected more than sink + recent = 3 blocks",
      open, cpu, { policy = "tova", options = { blocks = 2, sink = 1, recent = 2 } })
    support.raises("a budget of 5 tokens is 2 blocks, expected more than sink + recent",
      open, cpu, { policy = "tova", options = { tokens = 5, sink = 1, recent = 2 } })
    support.raises("has prompt_only, expected evict beside it", kv.policy.define,
      { name = "x", decode = true, prompt_only = true, score = function() end })
    support.raises("has evict and score", kv.policy.define, { name = "x", decode = true,
      evict = function() end, score = function() end })
    support.raises('"keep_decoded" is no option', kv.policy, "knorm",
      { keep_decoded = false })
    local e = open(cpu, { policy = "tova", options = { blocks = 3 } })
    local seq = e:sequence()
    e:prefill(seq, tokens(30))
    support.raises("expected one token of each sequence in a decode step", e.verify, e,
      { seq }, { 2 }, { 1, 2 })
    assert.equal(30, seq:length())
    support.raises("an eviction left is not cut", seq.truncate, seq, 20)
    for i = 1, 5 do e:decode({ seq }, { i }) end
    support.raises("length is 33, expected 0 or 35: ", seq.truncate, seq, 33)
    seq:truncate(0)
    e:prefill(seq, tokens(5))
    assert.equal(5, seq:held(0, 0))
    e.cache:close()
  end)

  it("refuses a step within a step, which then is none", function()
    local e, seq
    local policy = kv.policy.define { name = "mine", decode = true, own_bytes = 0,
      evict = function() e:decode({ seq }, { 1 }) end } { blocks = 4 }
    e = open(cpu, { policy = policy })
    seq = e:sequence()
    support.raises("decode: the engine is in the middle of prefill", e.prefill, e, seq,
      tokens(30))
    assert.same({ 0, 60 }, { seq:length(), e.cache:blocks_free() })
    support.raises("prefill_batch: the engine is in the middle of prefill", e.prefill, e,
      seq, tokens(3), function() e:prefill_batch({ seq }, { 1 }, { 1 }) end)
    e:prefill(seq, tokens(3))
    e.cache:close()
  end)

  it("names a worth of another shape", function()
    local define = kv.policy.define
    local function wrong(evict, init)
      local e = open(cpu, { policy = define { name = "mine", decode = true,
        init = init, evict = evict } { blocks = 3 } })
      local seq = e:sequence()
      local ok, why = pcall(e.prefill, e, seq, tokens(30))
      e.cache:close()
      assert.is_false(ok)
      return why
    end
    assert.matches("policy mine: evict returns .* expected f32 %[2, 1 or 1, 200%]: "
      .. "sequences, KV heads, tokens", wrong(function() return 7 end))
    assert.matches("expected f32 %[2, 1 or 1, 200%]", wrong(function(_, ctx)
      return ctx:new_scores()
    end))
    assert.matches("tokens; or a tally by token", wrong(
      function(self) return self.blocks_tally end,
      function(self, shape) self.blocks_tally = kv.tally(shape) end))
  end)

  it("gives a token that takes another's place the initial number", function()
    for _, tables in ipairs { "layer", "head" } do
      local make = kv.policy.define { name = "mine", decode = true, own_bytes = 0,
        watches_prompt = true, -- nothing is stored while it decodes
        init = function(self, shape) self.worth = kv.tally(shape, nil, 1000, "token") end,
        attention_finished = function(self, ctx)
          if ctx.is_prefill then
            self.worth:load(ctx):mul(0, self.worth.values)
              :add(ctx:positions(), self.worth.values)
            self.worth:store(ctx)
          end
        end,
        evict = function(self) return self.worth end }
      for _, graph in ipairs { false, true } do
        local e = open(cpu, { policy = make { blocks = 3 }, tables = tables,
          graph = graph })
        local seq = e:sequence()
        e:prefill(seq, tokens(30))
        for i = 1, 8 do e:decode({ seq }, { i }) end
        local held, want = {}, {}
        for i, x in ipairs(e.attention.evictor.positions.layers[1]:list()) do
          if i <= 12 then held[i] = x end
        end
        table.sort(held)
        for i = 1, 12 do want[i] = 25 + i end
        assert.same(want, held)
        e.cache:close()
      end
    end
  end)

  it("counts NaN and -inf as the lowest worth", function()
    local policy = kv.policy.define { name = "mine", decode = true, own_bytes = 0,
      evict = function(_, ctx)
        local positions = ctx:positions()
        return positions:lt(10):where(0 / 0,
          positions:lt(20):where(-math.huge, positions))
      end } { blocks = 3 }
    local e = open(cpu, { policy = policy })
    local seq = e:sequence()
    e:prefill(seq, tokens(30))
    local held = policy.shape and e.attention.evictor.positions
    local row = held.layers[0]:reshape { held.row_count, held.row_cells }
      :index(seq:heads()[1].state[held]):list()
    local list = { unpack(row, 1, 12) }
    table.sort(list)
    assert.same({ 0, 1, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29 }, list)
    e.cache:close()
  end)

  --- What each head of layer 0 holds after a prompt of 40 tokens, by the worth of its
  -- tokens: worth(positions [seqs, heads, n], ctx).
  local function held_by(options, worth)
    local make = kv.policy.define { name = "mine", decode = true, own_bytes = 0,
      defaults = { sink = 1, recent = 1 },
      evict = function(_, ctx) return worth(ctx:positions(), ctx) end }
    local e = open(cpu, { policy = make(options) })
    local seq = e:sequence()
    e:prefill(seq, tokens(40))
    local positions, lists = e.attention.evictor.positions, {}
    for head = 1, e.model.config.kv_heads do
      local view = seq:heads()[head]
      local row = positions.layers[0]:reshape { positions.row_count,
        positions.row_cells }:index(view.state[positions]):list()
      lists[head] = { unpack(row, 1, seq:held(0, head - 1)) }
      table.sort(lists[head])
    end
    e.cache:close()
    return lists
  end

  it("keeps sink and recent whatever is worth inf", function()
    for _, list in ipairs(held_by({ blocks = 4 }, function(positions)
      return positions:mul(0):add(math.huge)
    end)) do
      assert.same({ 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 36, 37, 38, 39 }, list)
    end
  end)

  it("gives each head the floor of its share", function()
    local function counts(floor)
      local lists = held_by({ blocks = 5, sink = 0, recent = 0, min_blocks = 0,
        split = kv.split("adaptive", { floor = floor }) }, function(positions, ctx)
        local rows = kv.arange(ctx.device, "f32", ctx.seqs):reshape { ctx.seqs, 1, 1 }
        return positions:add(rows * 1e6) -- the last head has the best tokens
      end)
      return { #lists[1], #lists[2] }
    end
    assert.same({ 20, 20 }, counts(1))
    assert.same({ 10, 30 }, counts(0.5))
    assert.same({ 4, 36 }, counts(0.2))
  end)

  it("is refused for KV in host memory", function()
    local model = tiny.attentive(cpu)
    support.raises("engine: offload is given, and policy tova evicts tokens, expected KV "
      .. "on the device", model.engine, model, { policy = kv.policy("tova",
        { blocks = 3 }), blocks = 20, block_size = BLOCK, offload = { hot_slots = 8 } })
  end)

  it("needs a prompt before it decodes", function()
    local e = open(cpu, { policy = "tova", options = { blocks = 3 } })
    local seq = e:sequence()
    support.raises("begin: sequence 1 begins with a decode step, expected a prompt",
      e.decode, e, { seq }, { 1 })
    assert.equal(0, seq:length())
    e:prefill(seq, tokens(5))
    e:decode({ seq }, { 1 })
    e.cache:close()
  end)
end)
