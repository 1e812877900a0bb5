--- A server whose policies evict tokens: each request gets what the same prompt and
-- steps give by hand on an engine alone, whatever else is served, and memory is reserved
-- so that none has to be computed again.
local interrupted = require "spec.interrupted"
local kv = require "kvlab"
local support = require "spec.support"
local tiny = require "spec.models.tiny"
local tried = require "spec.tried_policies"

local C = kv.C
local cpu = kv.device "cpu"
local raises = support.raises
local BLOCK = 4
local NAMES = tried.evicting()
local TOLERANCE = 1e-3 -- of logits up to about 10: sums in another order, of chunks

local models = {}
local function model_on(dev)
  local model = models[dev:name()]
  if model then return model end
  model = tiny.attentive(dev)
  local head = kv.randn(dev, "f32", { 97, 32 }, { seed = 5, std = 0.5 })
  function model.logits(_, states, out) states:matmul_t(head, out) end
  models[dev:name()] = model
  return model
end

local function open(dev, o)
  local all = { blocks = 60, block_size = BLOCK, chunk = 64, max_seqs = 4,
                max_blocks = 30 }
  for name, value in pairs(o) do all[name] = value end
  return model_on(dev):engine(all)
end

local function prompt(i, n)
  local list = {}
  for t = 1, n or 30 + 7 * (i % 4) do list[t] = (t * 31 + i * t * t * 7 + 11) % 97 end
  return list
end

--- The likeliest tokens after some logits, and the logits of every step.
local function steps(e, seq, logits, count, ids, rows)
  ids, rows = ids or {}, rows or {}
  for i = 1, count do
    rows[#rows + 1] = logits:list()
    ids[#ids + 1] = logits:argmax():item()
    if i < count then logits = e:decode({ seq }, { ids[#ids] }) end
  end
  return ids, rows
end

--- A prompt and `count` tokens on an engine alone.
local function by_hand(dev, o, tokens, count)
  local e = open(dev, o)
  local seq = e:sequence()
  local ids, rows = steps(e, seq, e:prefill(seq, tokens), count)
  e:finish(seq)
  e.cache:close()
  return ids, rows
end

--- Options of a request that keep the logits of its tokens in `rows`.
local function watched(rows, o)
  o.sample = function(row)
    rows[#rows + 1] = row:list()
    return row:argmax():item()
  end
  return o
end

local function close(got, want, what)
  assert.equal(#want, #got)
  for t, row in ipairs(want) do
    support.close(got[t], row, TOLERANCE, 0, ("%s, token %d"):format(what, t))
  end
end

--- Closes a server and its engine, which must hold nothing then.
local function finish(server)
  local cache = server.executor.memory
  server:close()
  assert.equal(cache.pages, cache:pages_free())
  cache:close()
end

local function specs(dev)
  for nth, name in ipairs(NAMES) do
    it("gives what steps by hand give under " .. name .. " #policy", function()
      local ways = {
        { tables = "head", chunk = 16 }, { tables = "layer", chunk = 64 },
        { tables = "head", chunk = 64, graph = true }, { tables = "head", chunk = 7 },
        { tables = "layer", chunk = 16, graph = true },
      }
      for _, way in ipairs(support.one_each(ways, 2 * nth, 2)) do
        local function options(more)
          local o = { tables = way.tables, policy = kv.policy(name, { blocks = 4 }) }
          for key, value in pairs(more) do o[key] = value end
          return o
        end
        local server, list = kv.serve { engine = open(dev, options(way)) }, {}
        for i = 1, 6 do
          local rows = {}
          list[i] = { rows = rows, request = assert(server:submit(watched(rows,
            { tokens = prompt(i), max_tokens = 8 + 4 * i }))) }
        end
        server:run()
        for i, one in ipairs(list) do
          local ids, rows = by_hand(dev, options {}, prompt(i), 8 + 4 * i)
          close(one.rows, rows, ("%s by %s, request %d"):format(name, way.tables, i))
          assert.same(ids, one.request:output())
        end
        assert.are_not.same((by_hand(dev, { policy = kv.policy "full" }, prompt(1), 12)),
          list[1].request:output())
        finish(server)
      end
    end)
  end
end

describe("a server whose policy evicts", function()
  support.each_device(specs)

  it("serves in turn what memory has no room for at once", function()
    for _, name in ipairs { "tova", "snapkv" } do
      local want, policy = {}, { blocks = 4 }
      for i = 1, 6 do
        want[i] = by_hand(cpu, { policy = kv.policy(name, policy) }, prompt(i), 20)
      end
      for _, blocks in ipairs { 60, 31, 18 } do
        local server, list = kv.serve { engine = open(cpu, { blocks = blocks,
          policy = kv.policy(name, policy) }) }, {}
        for i = 1, 6 do
          list[i] = assert(server:submit { tokens = prompt(i), max_tokens = 20 })
        end
        local most = 0
        while server:step() do most = math.max(most, #server.scheduler.running) end
        assert.equal(0, server:stats().preemptions)
        for i, r in ipairs(list) do assert.same(want[i], r:output()) end
        assert.is_true(blocks == 31 or (blocks == 60) == (most == 4), most)
        finish(server)
      end
    end
  end)

  it("gives the pages of evicted tokens to those that wait", function()
    local e = open(cpu, { blocks = 21, policy = kv.policy("tova", { blocks = 4 }) })
    local server, list = kv.serve { engine = e }, {}
    for i = 1, 4 do -- 10 blocks and 4 more for what stays, of which 4 remain
      list[i] = assert(server:submit { tokens = prompt(i, 40), max_tokens = 40 })
    end
    server:step()
    assert.equal(1, #server.scheduler.running) -- 14 of 21 blocks are reserved
    assert.equal(17 * 4, e.cache:pages_free())
    local memory = server:stats().memory
    assert.same({ 4 * 4, 14 * 4, 6 * 4 }, { memory.pages_held, memory.pages_peak,
                                             memory.pages_evicted })
    server:step()
    assert.equal(2, #server.scheduler.running) -- 14 of the other 17
    server:run()
    for i, r in ipairs(list) do
      assert.same(by_hand(cpu, { policy = kv.policy("tova", { blocks = 4 }) },
        prompt(i, 40), 40), r:output())
    end
    finish(server)
  end)

  it("reserves as much as a request may hold, and no more", function()
    local cases = {
      { "tova", { blocks = 3 } }, { "tova", { ratio = 0.4 } },
      { "snapkv", { blocks = 4 } }, { "h2o", { ratio = { 1, 0.2 } } },
      { "streaming", { tokens = 30, sink = 1 } },
      { "knorm", { ratio = kv.from(cpu, "f32", { 2, 2 }, { 0.5, 0.1, 0.2, 1 }) } },
      { "streaming", { ratio = 1 } },
    }
    for i, case in ipairs(cases) do
      for _, n in ipairs(support.one_each({ 1, 15, 16, 17, 45 }, 2 * i, 2)) do
        local function serve(blocks)
          local e = open(cpu, { blocks = blocks, max_blocks = 30,
            policy = kv.policy(unpack(case)) })
          local server = kv.serve { engine = e }
          local r, why = server:submit { tokens = prompt(3, n), max_tokens = 25 }
          return server, r, why
        end
        local server, r = serve(60)
        server:run()
        local want, claim = r:output(), r.claim
        finish(server)
        -- a pool of as many pages serves it, as far as blocks divide them
        local blocks = math.ceil(claim.prompt / 4)
        server, r = serve(math.max(blocks, claim.widest))
        server:run()
        assert.same(want, r:output())
        finish(server)
        if blocks - 1 >= claim.widest then
          local why
          server, r, why = serve(blocks - 1)
          assert.is_nil(r)
          assert.matches("need %d+ pages, there are " .. (blocks - 1) * 4, why)
          finish(server)
        end
      end
    end
  end)

  it("reserves enough where a split divides a budget by scores", function()
    for _, name in ipairs { "snapkv", "keydiff", "h2o" } do
      for _, n in ipairs { 15, 33, 60 } do
        local function engine(blocks)
          return open(cpu, { blocks = blocks, policy = kv.policy(name,
            { blocks = 4, split = "adaptive" }) })
        end
        local server = kv.serve { engine = engine(90) }
        local r = assert(server:submit { tokens = prompt(5, n), max_tokens = 25 })
        server:run()
        local want, claim = r:output(), r.claim
        finish(server)
        local blocks = math.max(claim.widest, math.ceil(claim.prompt / 4))
        server = kv.serve { engine = engine(blocks) }
        r = assert(server:submit { tokens = prompt(5, n), max_tokens = 25 })
        server:run()
        assert.same(want, r:output())
        finish(server)
      end
    end
  end)

  it("generates a text that is longer than its memory", function()
    local server = kv.serve { engine = open(cpu, { blocks = 12, max_blocks = 8,
      policy = kv.policy("streaming", { blocks = 4 }) }) }
    local r = assert(server:submit { tokens = prompt(1, 20), max_tokens = 300 })
    server:run()
    assert.equal(300, r:output_length())
    finish(server)
  end)

  it("serves policies that evict and others at once, with forks, each as alone",
    function()
      local function policy(i)
        return i == 1 and kv.policy("tova", { blocks = 4 })
          or i == 2 and kv.policy("snapkv", { ratio = 0.4 })
          or i == 3 and kv.policy "full" or kv.policy("quest", { ratio = 1 })
      end
      local want = {}
      for i = 1, 8 do
        want[i] = by_hand(cpu, { tables = "head", policy = policy(i % 4 + 1) }, prompt(i),
          24)
      end
      for _, blocks in ipairs { 90, 34 } do
        local e = open(cpu, { blocks = blocks, tables = "head", chunk = 16 })
        local server = kv.serve { engine = e, watermark = 0 }
        local attentions, list = {}, {}
        for i = 1, 4 do attentions[i] = e:attention_of(policy(i)) end
        for i = 1, 8 do
          list[i] = assert(server:submit { tokens = prompt(i), max_tokens = 24,
                                           attention = attentions[i % 4 + 1] })
        end
        server:run()
        for i, r in ipairs(list) do
          assert.same(want[i], r:output(), ("%d blocks, request %d"):format(blocks, i))
          assert(i % 4 > 1 or r.preemptions == 0)
        end
        if blocks < 90 then assert.is_true(server:stats().preemptions > 0) end
        finish(server)
      end
    end)

  it("forks a request, which decodes on or reads more", function()
    for _, name in ipairs(NAMES) do
      local o = { policy = kv.policy(name, { blocks = 4 }) }
      local e = open(cpu, o)
      local seq = e:sequence()
      local ids = steps(e, seq, e:prefill(seq, prompt(2)), 6)
      local fork = seq:fork()
      local read = steps(e, fork, e:prefill(fork, { ids[6], 9, 8, 7 }), 10)
      local same = steps(e, seq, e:decode({ seq }, { ids[6] }), 10)
      e.cache:close()

      o.policy = kv.policy(name, { blocks = 4 })
      local server, forks = kv.serve { engine = open(cpu, o) }, {}
      local r = assert(server:submit { tokens = prompt(2), max_tokens = 16 })
      while r:output_length() < 6 do server:step() end
      forks[1] = server:fork(r, { max_tokens = 10 })
      forks[2] = server:fork(r, { tokens = { 9, 8, 7 }, max_tokens = 10 })
      server:run()
      assert.same(ids, { unpack(r:output(), 1, 6) })
      assert.same(same, { unpack(r:output(), 7) })
      assert.same(same, forks[1]:output())
      assert.same(read, forks[2]:output())
      finish(server)
    end
  end)

  it("refuses a fork that memory has no room for, and keeps room for one that waits",
    function()
      local e = open(cpu, { blocks = 20, max_seqs = 2,
        policy = kv.policy("snapkv", { blocks = 4 }) })
      local server = kv.serve { engine = e }
      local r = assert(server:submit { tokens = prompt(2, 30), max_tokens = 12 })
      local other = assert(server:submit { tokens = prompt(3, 8), max_tokens = 4 })
      while r:output_length() < 6 do server:step() end
      while other.state == "running" do server:step() end
      local fork = server:fork(r, { max_tokens = 12 })
      raises("are neither taken nor reserved",
        function() for _ = 1, 4 do server:fork(r, { max_tokens = 20 }) end end)
      local late = assert(server:submit { tokens = prompt(4, 40), max_tokens = 4 })
      server:run()
      assert.same({ unpack(r:output(), 7, 12) }, { unpack(fork:output(), 1, 6) })
      assert.same(by_hand(cpu, { policy = kv.policy("snapkv", { blocks = 4 }) },
        prompt(4, 40), 4), late:output())
      raises("arrival_us is in the future", function()
        local one = assert(server:submit { tokens = prompt(2, 30), max_tokens = 12 })
        server:step()
        server:fork(one, { max_tokens = 5, arrival_us = 1e15 })
      end)
      finish(server)
    end)

  it("goes on from what a request holds that has ended", function()
    for _, name in ipairs(NAMES) do
      local o = { policy = kv.policy(name, { blocks = 4 }) }
      local e = open(cpu, o)
      local seq = e:sequence()
      local first = steps(e, seq, e:prefill(seq, prompt(2)), 6)
      local second = steps(e, seq, e:prefill(seq, { first[6], unpack(prompt(5, 25)) }), 9)
      e.cache:close()

      o.policy = kv.policy(name, { blocks = 4 })
      local server = kv.serve { engine = open(cpu, o), keep = false }
      local r = assert(server:submit { tokens = prompt(2), max_tokens = 6, hold = true })
      server:run()
      local other = assert(server:submit { tokens = prompt(1), max_tokens = 6 })
      server:run()
      assert.equal(6, other:output_length())
      raises("tokens is missing or empty", server.continue, server, r, { max_tokens = 3 })
      raises("request 2 holds nothing", server.continue, server, other,
        { tokens = { 1 }, max_tokens = 3 })
      local more = assert(server:continue(r, { max_tokens = 9, hold = true,
        tokens = { r:output()[6], unpack(prompt(5, 25)) } }))
      raises("request 1 holds nothing", server.continue, server, r, { tokens = { 1 },
                                                                      max_tokens = 3 })
      server:run()
      assert.same(first, r:output())
      assert.same(second, more:output())
      assert.is_nil((server:continue(more, { tokens = prompt(1, 200), max_tokens = 1 })))
      server:cancel(more)
      assert.equal(server.executor.memory.pages, server.executor.memory:pages_free())
      finish(server)
    end
  end)

  it("refuses what needs one table for all layers and heads, and drafts", function()
    local function engine(o)
      o = o or { policy = kv.policy("tova", { blocks = 4 }) }
      return open(cpu, o)
    end
    local store = kv.store("memory:", { model = "tiny", block_size = BLOCK })
    raises("expected none, as the engine's cache has tables by head, and a store has",
      kv.serve, { engine = engine(), store = store })
    raises("serve: draft is a table, expected none, as policy tova evicts", kv.serve,
      { engine = engine(), draft = { ngram = 2 } })
    local server = kv.serve { engine = engine() }
    local function submit(o)
      o.tokens, o.max_tokens = prompt(1), 4
      return server:submit(o)
    end
    raises("request: keep_output is true, expected false where the cache has tables by "
      .. "head", submit, { keep_output = true })
    raises("request: watch is true, expected false where", submit, { watch = true })
    raises("request: draft is given, and policy tova evicts tokens, which does not go "
      .. "with drafts, expected draft = false", submit, { draft = { ngram = 2 } })
    assert.truthy(submit { keep_output = false, draft = false })
    finish(server)
    store:close()
    local one = open(cpu, { policy = kv.policy "full" })
    raises('which does not go with tables = "one"', one.attention_of, one,
      kv.policy("tova", { blocks = 4 }))
    one.cache:close()
  end)
end)

-- ---- failed steps ---------------------------------------------------------------------

--- Serves with a server that `fail(server)` makes fail now and then. Returns the tokens
-- of the requests, and how often it raised.
local function served(policy, fail)
  local e = open(cpu, { blocks = 40, chunk = 16, policy = kv.policy(policy,
    { blocks = 4 }) })
  local server, list, raised = kv.serve { engine = e }, {}, 0
  for i = 1, 5 do
    list[i] = assert(server:submit { tokens = prompt(i), max_tokens = 14 })
  end
  if fail then fail(server) end
  repeat
    local ok, why = pcall(server.run, server)
    C.kvl_interrupt(0)
    raised = raised + (ok and 0 or 1)
    assert(ok or tostring(why):find "it fails" or tostring(why):find "interrupted", why)
    assert.is_true(raised < 500, raised)
  until ok
  local outputs = {}
  for i, r in ipairs(list) do outputs[i] = r:output() end
  finish(server)
  return outputs, raised
end

--- Calls fn at every period-th call of owner[name], before its work, and halfway after
-- its work.
local function now_and_then(owner, name, period, fn)
  local own, calls = owner[name], 0
  owner[name] = function(...)
    calls = calls + 1
    if calls % period == 0 then fn() end
    local result = own(...)
    if calls % period == math.floor(period / 2) then fn() end
    return result
  end
end

describe("a server whose policy evicts and whose steps fail", function()
  local FAILURES = {
    ["a layer"] = function(server)
      now_and_then(server.executor.engine.attention, "forward", 13, function()
        error "it fails"
      end)
    end,
    ["a layer, by Ctrl-C"] = function(server)
      now_and_then(server.executor.engine.attention, "forward", 17, function()
        C.kvl_interrupt(1)
      end)
    end,
    ["an eviction"] = function(server)
      now_and_then(server.executor.engine.attention.evictor, "end_prompt", 7, function()
        error "it fails"
      end)
    end,
    ["the logits"] = function(server)
      now_and_then(server.executor.engine, "decode", 3, function() error "it fails" end)
      now_and_then(server.executor.engine, "prefill_batch", 4, function()
        error "it fails"
      end)
    end,
    ["the admission"] = function(server)
      now_and_then(server.executor, "begin", 3, function() error "it fails" end)
    end,
    ["the end of a request"] = function(server)
      now_and_then(server.executor, "finished", 2, function() error "it fails" end)
    end,
  }
  for what, fail in pairs(FAILURES) do
    it("gives each request what it gets without failures: " .. what, function()
      for _, policy in ipairs { "tova", "snapkv" } do
        local got, raised = served(policy, fail)
        assert.is_true(raised > 1, raised)
        assert.same((served(policy)), got)
      end
    end)
  end

  it("goes on after Ctrl-C at any call", function()
    local want = served "h2o"
    local e = open(cpu, { blocks = 40, chunk = 16, policy = kv.policy("h2o",
      { blocks = 4 }) })
    local server, list, came = kv.serve { engine = e }, {}, 0
    for i = 1, 5 do
      list[i] = assert(server:submit { tokens = prompt(i), max_tokens = 14 })
    end
    for nth = 20, math.huge, support.is_full and 37 or 97 do
      jit.flush() -- compiled code calls no hook
      local ok, why = interrupted.at_calls(function() return server:step() end,
        function(n)
          if n < nth or C.kvl_interrupt_hold(0) > 0 then return end
          debug.sethook()
          error("interrupted", 0)
        end)
      assert(ok or tostring(why):find("interrupted", 1, true), why)
      if not ok then came = came + 1 end
      if ok and not why then break end -- nothing is left to do
    end
    assert.is_true(came > 20, came)
    for i, r in ipairs(list) do assert.same(want[i], r:output()) end
    finish(server)
  end)
end)
