--- The server: what a request is given does not depend on who else is served. With a
-- small trained model every request's tokens and logits are those that it gets alone, for
-- any chunking, mix, reuse of prefixes, preemption and store. Tolerance of logits: f32
-- sums in another order, on values up to about 35.
local files = require "kvlab.files"
local kv = require "kvlab"
local llama = require "models.llama"
local prompts = require "models.recall.prompts"
local processes = require "spec.processes"
local support = require "spec.support"
local temporary = require "spec.temporary"

local raises = support.raises
local FOLDER = kv.paths.root .. "/lua/models/recall"
local TOLERANCE = 2e-3

local models = {}
local function model_on(dev)
  models[dev:name()] = models[dev:name()] or llama.load(FOLDER, { device = dev,
                                                                  dtype = "f32" })
  return models[dev:name()]
end

--- Prompts: two questions about each of two contexts (so that they have a prefix in
-- common), the very same prompt twice, one token, and exactly two blocks.
local function workload()
  local list = {}
  for c = 1, 2 do
    local prompt = prompts.draw(256, 10, 2, 40 + c)
    for q = 1, 2 do
      local tokens = {}
      for i, id in ipairs(prompt.tokens) do tokens[i] = id end
      for _, id in ipairs(prompt.queries[q].ask) do tokens[#tokens + 1] = id end
      list[#list + 1] = { tokens = tokens, max_tokens = 26 - 5 * q }
    end
  end
  list[5] = { tokens = list[1].tokens, max_tokens = 20 }
  list[6] = { tokens = { 9 }, max_tokens = 18 }
  list[7] = { tokens = { unpack(list[2].tokens, 1, 32) }, max_tokens = 3 }
  return list
end

--- Serve requests; of each the tokens and, after each token, the logits. o: of the engine
-- (blocks, chunk) and of the server; each(server, requests) before they run.
local function serve(dev, list, o, each)
  local engine = model_on(dev):engine { blocks = o.blocks or 200, chunk = o.chunk or 64,
    max_seqs = 8, block_size = 16, policy = o.policy, prefill_policy = o.prefill_policy,
    offload = o.offload, format = o.format }
  local given = { engine = engine }
  for key, value in pairs(o.server or {}) do given[key] = value end
  local server, requests, logits = kv.serve(given), {}, {}
  for i, one in ipairs(list) do
    logits[i] = {}
    local function sample(row, r)
      logits[i][r:output_length() + 1] = row:list()
      return row:argmax():item()
    end
    requests[i] = assert(server:submit { tokens = one.tokens, max_tokens = one.max_tokens,
                                         sample = sample })
  end
  if each then each(server, requests) end
  local stats = server:run():stats()
  local free = server.scheduler.prefix:available()
  server:close()
  assert.equal(engine.cache.blocks, free)
  assert.equal(engine.cache.blocks, engine.cache:blocks_free()) -- for the next server
  engine.cache:close()
  return requests, logits, stats
end

local alone = {}

--- Each request by itself.
local function served_alone(dev)
  local name = dev:name()
  if not alone[name] then
    alone[name] = {}
    for i, one in ipairs(workload()) do
      local requests, logits = serve(dev, { one }, { chunk = 512 })
      alone[name][i] = { output = requests[1]:output(), logits = logits[1] }
    end
  end
  return alone[name]
end

--- The workload served with these options is each request alone.
local function same_as_alone(dev, o)
  local want = served_alone(dev)
  local requests, logits, stats = serve(dev, workload(), o)
  for i, one in ipairs(want) do
    assert.same(one.output, requests[i]:output(), "request " .. i)
    assert.equal(#one.logits, #logits[i])
    for t, row in ipairs(one.logits) do
      support.close(logits[i][t], row, TOLERANCE, 0, ("request %d token %d"):format(i, t))
    end
  end
  return stats, requests
end

local function open_store(url)
  return kv.store(url or "memory:", { model = "recall f32", block_size = 16 })
end

local function check(dev)
  describe("server on " .. dev:name(), function()
    it("gives each request what it gets alone, for any chunking and batch", function()
      local ways = { { chunk = 512 }, { chunk = 64 }, { chunk = 8 },
                     { chunk = 37, server = { max_seqs = 3 } },
                     { chunk = 16, server = { max_seqs = 1 } } }
      for _, o in ipairs(support.one_each(ways, 2, 2)) do
        same_as_alone(dev, o)
      end
    end)

    it("shares the blocks of common prefixes", function()
      local stats, requests = same_as_alone(dev, { chunk = 64 })
      assert.is_true(stats.blocks_shared >= 16 + 16 + 16)
      assert.equal(16, requests[2].blocks_shared) -- the context, not the question
      assert.equal(16, requests[5].blocks_shared) -- all but the last token's block
      assert.equal(stats.blocks_asked, 5 * 16 + 0 + 1)
      assert.equal(0, requests[6].blocks_asked)
    end)

    it("preempts the request admitted last when blocks run out; it resumes", function()
      local stats, requests = same_as_alone(dev, { blocks = 19, chunk = 64,
                                                   server = { watermark = 0 } })
      assert.is_true(stats.preemptions > 0)
      assert.equal(0, requests[1].preemptions)
    end)

    it("brings preempted and earlier blocks back from a store", function()
      local store = open_store()
      local o = { blocks = 19, chunk = 64, server = { watermark = 0, store = store } }
      local stats = same_as_alone(dev, o)
      assert.is_true(stats.preemptions > 0)
      for _, late in ipairs { "wait", "skip" } do -- another server, the same store
        o.server.late = late
        stats = same_as_alone(dev, o)
        assert.is_true(stats.blocks_loaded > 0)
        assert.equal(stats.blocks_asked, stats.blocks_shared + stats.blocks_loaded)
        assert.equal(0, stats.store.problems)
      end
      store:close()
    end)

    -- The rest of a prompt is computed in other chunks, so a sum may differ in its last
    -- bits, and a number of K or V round to the next one of the format.
    it("brings blocks of any format back from a store", function()
      for _, format in ipairs { "bf16", "f8e4m3", "int8" } do
        local list, store = { workload()[1], workload()[3] }, open_store()
        local _, want = serve(dev, list, { format = format })
        for time = 1, 2 do
          local requests, got = serve(dev, list, { format = format,
                                                   server = { store = store } })
          assert.equal(time == 2 and 16 or 0, requests[2].blocks_loaded)
          for i = 1, 2 do
            for t, row in ipairs(want[i]) do
              support.close(got[i][t], row, format == "bf16" and TOLERANCE or 0.1, 0,
                format)
            end
          end
        end
        store:close()
      end
    end)

    it("computes what the store has lost", function()
      local store = open_store()
      same_as_alone(dev, { server = { store = store } })
      local tokens = workload()[1].tokens
      local keys = store:keys(tokens)
      store:remove(keys + 7, 2) -- one layer of block 7: the blocks before it are of use
      local stats, requests = same_as_alone(dev, { server = { store = store } })
      assert.equal(7, requests[1].blocks_loaded)
      assert.is_true(stats.blocks_loaded > 0)
      store:close()
    end)

    it("computes what the store only claims to have", function()
      local store = open_store()
      same_as_alone(dev, { server = { store = store } })
      local keys = store:keys(workload()[1].tokens)
      for layer = 0, 3 do store:remove(keys + 7, layer) end
      function store.find(_, _, n) return n end
      local stats, requests = same_as_alone(dev, { server = { store = store } })
      assert.equal(7, requests[1].blocks_loaded)
      assert.is_true(stats.blocks_lost > 0)
      store:close()
    end)

    it("serves from host memory what it serves from the device", function()
      local ways = { { slots = 2 }, { slots = 3, hot_slots = 512 } }
      for _, offload in ipairs(support.one_each(ways, 1)) do
        same_as_alone(dev, { offload = offload, chunk = 32 })
      end
    end)

    it("lets policies select, each for its own requests", function()
      local function quest(ratio) return kv.policy("quest", { ratio = ratio }) end
      same_as_alone(dev, { chunk = 64, policy = quest(1) })
      local list, store = { workload()[1], workload()[3] }, open_store()
      local dense = served_alone(dev)[1].logits
      local _, want = serve(dev, list, { policy = quest(0.2) })
      assert.has_error(function() support.close(want[1][2], dense[2], TOLERANCE, 0) end)
      for time = 1, 2 do -- the second time its summaries are of blocks from the store
        local requests, got = serve(dev, list, { policy = quest(0.2),
                                                 server = { store = store } })
        assert.equal(time == 2 and 16 or 0, requests[2].blocks_loaded)
        for i = 1, 2 do
          for t, row in ipairs(want[i]) do support.close(got[i][t], row, TOLERANCE, 0) end
        end
      end
      store:close()
    end)

    --- Logits of the first request when its blocks were fetched for another one, which
    -- went before it was computed: it finds them on the device, where others were.
    local function after_another(name, offload, store)
      local first, other = workload()[1], workload()[3]
      local policy = kv.policy(name, { ratio = 0.2,
                                            scores = name == "gsa" and "mean" or nil })
      local engine = model_on(dev):engine { blocks = 64, chunk = 64, max_seqs = 1,
                                            offload = offload or nil, policy = policy }
      local server, logits = kv.serve { engine = engine, store = store }, {}
      for _ = 1, 3 do
        server:submit { tokens = other.tokens, max_tokens = 8 }
        server:run()
      end
      local busy = server:submit { tokens = other.tokens, max_tokens = 20 }
      local gone = server:submit { tokens = first.tokens, max_tokens = 8 }
      while gone.blocks_loaded < 16 do
        if gone.prefetch_task then gone.prefetch_task:wait() end -- not for busy to end
        server:step()
      end
      assert.equal("running", busy.state)
      server:cancel(gone)
      local last = server:submit { tokens = first.tokens, max_tokens = 8,
        sample = function(row, r)
          logits[r:output_length() + 1] = row:list()
          return row:argmax():item()
        end }
      server:run()
      assert.equal(16, last.blocks_shared)
      server:close()
      engine.cache:close()
      return logits
    end

    it("lets policies know the blocks that came from a store", function()
      local first, store = { tokens = workload()[1].tokens, max_tokens = 8 }, open_store()
      serve(dev, { first }, { server = { store = store } })
      local names = { "quest", "block_mean", "gsa_on_device", "gsa", "infllm" }
      for _, name in ipairs(support.one_each(names, 3, 2)) do
        local policy = kv.policy(name, { ratio = 0.2,
                                              scores = name == "gsa" and "mean" or nil })
        local _, want = serve(dev, { first }, { policy = policy })
        for _, offload in ipairs { false, { slots = 2 }, { hot_slots = 200 } } do
          local got = after_another(name, offload, store)
          for t, row in ipairs(want[1]) do
            support.close(got[t], row, TOLERANCE, 0, ("%s token %d"):format(name, t))
          end
        end
      end
      store:close()
    end)

    it("brings what the first decode step selects when a prompt ends", function()
      for _, max_seqs in ipairs { 1, 2 } do -- one after the other, and together
        local engine = model_on(dev):engine { blocks = 64, chunk = 64,
          max_seqs = max_seqs, offload = { hot_slots = 64 },
          policy = kv.policy("gsa", { ratio = 0.3 }) }
        local server, hot = kv.serve { engine = engine }, engine.cache.tier.hot
        for _, i in ipairs { 1, 3 } do
          server:submit { tokens = workload()[i].tokens, max_tokens = 3 }
        end
        server:run()
        local stats = hot:stats()
        local blocks = 6 * 4 * 2 -- of 17, in each layer and KV head
        assert.equal(2 * blocks, stats.ahead.predicted) -- once, not at every chunk
        assert.equal(stats.ahead.brought, stats.ahead.used)
        assert.equal(0, stats.misses)
        server:close()
        engine.cache:close()
      end
    end)

    it("computes every prompt for a policy that watches them", function()
      local list, store = { workload()[1], workload()[3] }, open_store()
      for _ = 1, 2 do
        local function policy() return kv.policy("snapkv_blocks", { ratio = 0.3 }) end
        local _, want = serve(dev, { list[2] }, { policy = policy() })
        local requests, got, stats = serve(dev, list, { policy = policy(),
                                                        server = { store = store } })
        assert.equal(0, requests[2].blocks_shared + stats.blocks_loaded)
        for t, row in ipairs(want[1]) do support.close(got[2][t], row, TOLERANCE, 0) end
      end
      store:close()
    end)

    it("ends a fork that waits for all of the cache and gives its own back", function()
      local engine = model_on(dev):engine { blocks = 2, block_size = 16, chunk = 32,
                                            max_seqs = 1 }
      local server, fork = kv.serve { engine = engine, watermark = 0 }, nil
      local request
      request = server:submit { tokens = { unpack(workload()[1].tokens, 1, 25) },
        max_tokens = 7, on_token = function()
          fork = fork or server:fork(request, { max_tokens = 6 })
        end }
      local steps = 0
      while server:step() and steps < 100 do steps = steps + 1 end
      assert.same({ "finished", "finished" }, { request.state, fork.state })
      server:close()
      engine.cache:close()
    end)

    it("shares no block of a sparse prefill with a dense one", function()
      local sparse = kv.policy("xattention", { ratio = 0.1 })
      local list, engine = workload(), model_on(dev):engine { blocks = 64, max_seqs = 1,
        block_size = 16, chunk = 64, prefill_policy = sparse }
      local full = engine:attention_of(kv.policy "full")
      local store = open_store()
      for time = 1, 2 do -- the second time from a store
        local server = kv.serve { engine = engine, store = store }
        server:submit { tokens = list[1].tokens, max_tokens = 1 }
        server:run()
        local r = server:submit { tokens = list[1].tokens, max_tokens = 20,
                                  attention = full }
        server:run()
        assert.same({ 0, time == 1 and 0 or 16 }, { r.blocks_shared, r.blocks_loaded })
        assert.same({ unpack(served_alone(dev)[1].output, 1, 20) }, r:output())
        server:close()
      end
      store:close()
      engine.cache:close()
    end)

    it("forks a running request, also within a block", function()
      local one = workload()[1]
      local forks = {}
      local requests = serve(dev, { one }, {}, function(server, requests)
        while requests[1]:output_length() < 5 do server:step() end
        forks[1] = server:fork(requests[1], { max_tokens = 6 })
        forks[2] = server:fork(requests[1], { tokens = { 9, 8 }, max_tokens = 6 })
      end)
      local want = served_alone(dev)[1].output
      assert.same(want, requests[1]:output())
      assert.same({ unpack(want, 6, 11) }, forks[1]:output())
      local tokens = { unpack(one.tokens) }
      for i = 1, 5 do tokens[#tokens + 1] = want[i] end
      tokens[#tokens + 1], tokens[#tokens + 2] = 9, 8
      local again = serve(dev, { { tokens = tokens, max_tokens = 6 } }, {})
      assert.same(again[1]:output(), forks[2]:output())
    end)
  end)
end

support.each_device(check)

describe("server whose Redis store goes away", function()
  if not processes.has "redis-server" then return pending "no redis-server" end

  it("serves on, right, says what happened, and finds it again", function()
    local dev, redis = kv.device "cpu", processes.redis()
    local ok, why = pcall(function()
      local function store()
        return kv.store(redis.url, { model = "recall f32", block_size = 16,
                                          timeout_ms = 60000 })
      end
      local filled = store()
      same_as_alone(dev, { server = { store = filled } })
      filled:close()
      local used = store()
      local steps = 0
      local function step()
        steps = steps + 1
        if steps == 3 then redis:stop() end
        if steps == 40 then redis:start() end
      end
      same_as_alone(dev, { blocks = 40, server = { store = used, max_seqs = 2,
        hooks = { build_sparse_meta = step } } })
      local stats = used:stats()
      assert.is_true(steps > 40 and stats.hits > 0 and stats.errors >= 1)
      assert.matches("redis store: 127.0.0.1:" .. redis.port, used:problem(), 1, true)
      processes.wait_until(function() -- a call every now and then tries to get through
        same_as_alone(dev, { server = { store = used } })
        return used:stats().hits > stats.hits
      end, "the store is found again")
      used:close()
    end)
    redis:stop()
    if not ok then error(why, 0) end
  end)
end)

describe("server", function()
  local dev = kv.device "cpu"

  local function small(o)
    o = o or {}
    o.engine = model_on(dev):engine { blocks = 40, chunk = 64, max_seqs = 4 }
    return kv.serve(o), o.engine
  end

  it("stops at a token, at a phrase, at max_tokens, and when it is told to", function()
    local want = served_alone(dev)[2].output
    local tokens, server = workload()[2].tokens, small()
    local function submit(more)
      more.tokens, more.max_tokens = tokens, more.max_tokens or 12
      return server:submit(more)
    end
    local seen = {}
    local token = submit { stop_tokens = { want[4] },
                           on_token = function(_, id) seen[#seen + 1] = id end }
    local across = submit { stop = { { tokens[#tokens], want[1] } }, max_tokens = 2 }
    local phrase = submit { stop = { { 1, 2, 3 }, { want[5], want[6] } } }
    local length = submit { max_tokens = 3 }
    local told = submit {
      on_token = function(r) if r:output_length() == 2 then server:cancel(r) end end }
    local waiting = submit {}
    server:cancel(waiting)
    server:run()
    local first = 4
    for i = 1, 3 do if want[i] == want[4] then first = math.min(first, i) end end
    assert.same({ unpack(want, 1, first) }, token:output())
    assert.same(token:output(), seen)
    assert.equal("stop", token.finish_reason)
    assert.equal("stop", phrase.finish_reason)
    assert.same({ want[5], want[6] }, { unpack(phrase:output(), #phrase:output() - 1) })
    assert.equal("length", length.finish_reason)
    assert.equal("length", across.finish_reason)
    assert.equal(3, length:output_length())
    assert.equal("cancelled", told.finish_reason)
    assert.equal(2, told:output_length())
    assert.equal("cancelled", waiting.finish_reason)
    assert.equal(40, server.scheduler.prefix:available())
  end)

  it("lets one request's token cancel another in the same step", function()
    local server, other = small(), nil
    server:submit { tokens = { 1, 2, 3 }, max_tokens = 4, on_token = function(r)
      if r:output_length() == 2 then server:cancel(other) end
    end }
    other = server:submit { tokens = { 4, 5 }, max_tokens = 9 }
    server:run()
    assert.equal("cancelled", other.finish_reason)
    assert.equal(1, other:output_length())
    assert.equal(40, server.scheduler.prefix:available())
  end)

  it("calls the hooks in the order of the work", function()
    local calls, layers = {}, 0
    local server = small { hooks = {
      request_begin = function(r) calls[#calls + 1] = "begin " .. r.request_id end,
      build_sparse_meta = function(_, plan)
        calls[#calls + 1] = ("step %d %d"):format(#plan.decode, #plan.prefill)
      end,
      attention_begin = function(ctx) layers = layers + (ctx.layer < 4 and 1 or 9) end,
      attention_finished = function() layers = layers - 1 end,
      request_finished = function(r) calls[#calls + 1] = "end " .. r.request_id end,
    } }
    server:submit { tokens = { 5, 6, 7 }, max_tokens = 2 }
    server:run()
    assert.same({ "begin 1", "step 0 1", "step 1 0", "end 1" }, calls)
    assert.equal(0, layers)
  end)

  it("keeps its state under the names of the seed", function()
    local server = small()
    local r = server:submit { tokens = workload()[1].tokens, max_tokens = 4 }
    assert.equal(16, #r.block_hashes)
    assert.equal(16, #r.block_hashes[1])
    server:step()
    assert.equal(64, r.num_computed_tokens)
    assert.equal(64, r.num_scheduled_tokens)
    assert.equal(0, r.index_in_batch)
    assert.equal(4, #r:block_ids())
    assert.is_nil(r.prefetch_task)
    server:run()
  end)

  it("draws tokens as requests ask, on branches and beside a sample", function()
    local server, prompt = small(), workload()[1].tokens
    local drawn = { tokens = prompt, max_tokens = 8, temperature = 3, seed = 5,
                    logprobs = 2 }
    local first = server:submit(drawn)
    local own = server:submit { tokens = { 9 }, max_tokens = 3,
                                sample = function() return 7 end }
    server:step()
    while first:output_length() < 3 do server:step() end
    local branch = server:fork(first, { max_tokens = 5, temperature = 3, seed = 6,
                                        logprobs = 0 })
    server:run()
    assert.same({ 7, 7, 7 }, own:output())
    assert.equal(8, #first.logprobs)
    assert.equal(2, #first.logprobs[8].top)
    assert.equal(5, #branch.logprobs)
    assert.same({}, branch.logprobs[1].top)
    local other = small()
    local again = other:submit(drawn)
    other:run()
    assert.same(again:output(), first:output())
    assert.are_not.same({ unpack(first:output(), 4) }, branch:output())
    raises("request: sample is a function, expected none beside temperature",
      server.submit, server, { tokens = { 1 }, max_tokens = 1, seed = 3, sample = print })
  end)

  it("refuses what can never run, with the reason", function()
    local server = small()
    local r, why = server:submit { tokens = workload()[1].tokens, max_tokens = 600 }
    assert.is_nil(r)
    assert.equal("260 tokens and 600 to come need 54 blocks, there are 40", why)
    raises("token 1 is 5000, expected 0 ... 1023", server.submit, server,
      { tokens = { 1, 5000 }, max_tokens = 1 })
    raises("max_tokens is missing", server.submit, server, { tokens = { 1 } })
    raises("tokens is a table, expected a list of at least one token id", server.submit,
      server, { tokens = {}, max_tokens = 1 })
    raises("tokens (or input_length, without a model) is missing", server.submit,
      server, { max_tokens = 1 })
    local done = server:submit { tokens = { 1 }, max_tokens = 1 }
    server:run()
    raises("request 1 is finished", server.fork, server, done, { max_tokens = 1 })
    local running = server:submit { tokens = { 1, 2, 3 }, max_tokens = 8 }
    server:step()
    raises("fork: 4 tokens and 2000 to come need 126 blocks, there are 40", server.fork,
      server, running, { max_tokens = 2000 })
    assert.equal(1, #server.scheduler.running)
    server:run()
    local modelled = kv.serve { cost = kv.cost_model.llama_8b_h100(512), blocks = 20,
                                block_size = 512 }
    local other = modelled:submit { input_length = 600, max_tokens = 2 }
    raises("cancel: the request belongs to another server", server.cancel, server, other)
    raises("fork: the request belongs to another server", server.fork, server, other,
      { max_tokens = 1 })
    assert.equal("arriving", other.state)
    modelled:run()
  end)

  it("forks a request without a model, too", function()
    local server = kv.serve { cost = kv.cost_model.llama_8b_h100(512), blocks = 20,
                              block_size = 512 }
    local parent = server:submit { input_length = 600, max_tokens = 9 }
    while parent:output_length() < 3 do server:step() end
    local fork = server:fork(parent, { max_tokens = 4 })
    server:run()
    assert.same({ 9, 4 }, { parent:output_length(), fork:output_length() })
    assert.equal(2, server:stats().finished)
    assert.equal(20, server.scheduler.prefix:available())
  end)

  it("takes no requests once it is closed", function()
    local server = kv.serve { cost = kv.cost_model.llama_8b_h100(512), blocks = 20,
                              block_size = 512 }
    server:submit { input_length = 600, max_tokens = 2 }
    server:close()
    server:close()
    raises("the server is closed", server.step, server)
    raises("the server is closed", server.run, server)
    raises("the server is closed", server.submit, server,
      { input_length = 600, max_tokens = 2 })
  end)

  it("names the option that is wrong", function()
    local cost = kv.cost_model.llama_8b_h100(512)
    local function refuses(words, o) raises(words, kv.serve, o) end
    refuses("one of engine", {})
    refuses("serve: an object came, expected a table of options",
      setmetatable({ logits = 1 }, { __index = {} }))
    refuses('"prefetch_aheed" is no option, did you mean prefetch_ahead?',
      { cost = cost, prefetch_aheed = 2 })
    refuses("blocks is nil", { cost = cost })
    local function with(more)
      more.cost, more.blocks, more.block_size = cost, 10, 512
      return more
    end
    refuses('late is "maybe", expected one of wait, skip', with { late = "maybe" })
    local store = kv.store("memory:", { model = "m", block_size = 16, capacity = 100 })
    local tiny = model_on(kv.device "cpu"):engine { blocks = 4, block_size = 16 }
    refuses("the store's capacity is 100 bytes, expected 16384 or more, a block of one "
      .. "layer", { engine = tiny, store = store })
    store:close()
    tiny.cache:close()
    refuses("no priority \"fifi\"; did you mean \"fifo\"", with { priority = "fifi" })
    local path, given = temporary.folder(), kv.command_line.path
    files.make_folder(path .. "/priorities")
    files.write(path .. "/priorities/empty.lua", "")
    kv.command_line.path = path
    local ok, why = pcall(refuses, path .. "/priorities/empty.lua returns nothing, "
      .. "expected a function of a request and a view", with { priority = "empty" })
    kv.command_line.path = given
    assert(ok, why)
    refuses("max_tokens is 3, expected a whole number >= max_seqs = 16",
      with { max_tokens = 3 })
    refuses('hooks: "attention_end" is no option, did you mean attention_begin?',
      with { hooks = {
      attention_end = function() end } })
    refuses("watermark is 1", with { watermark = 1 })
    cost.link_gbps = 0
    refuses("link_gbps is 0, expected a number > 0", with {})
    local _, engine = small()
    refuses("max_seqs is 9, expected at most the engine's 4",
      { engine = engine, max_seqs = 9 })
    refuses("blocks is 7, expected none", { engine = engine, blocks = 7 })
  end)

  it("takes the prefetch options of the decode policy, or its own", function()
    local policy = kv.policy("gsa", { prefetch_ahead = 5 })
    local engine = model_on(dev):engine { blocks = 40, chunk = 64, policy = policy }
    local function ahead(o)
      o.engine = engine
      return kv.serve(o).scheduler.ahead_tokens
    end
    assert.equal(5 * 64, ahead {})
    assert.equal(64, ahead { prefetch_ahead = 1 })
    assert.equal(2 * 64, select(1, small()).scheduler.ahead_tokens)
  end)

  it("has the time of the first token and of those after it", function()
    local server = small()
    local executor = server.executor
    local start = executor:now()
    function executor.now() return start end -- stands still until the server waits
    function executor:sleep_until(us)
      self.now, self.sleep_until = nil, nil
      self:sleep_until(us)
    end
    local r = server:submit { tokens = { 1, 2 }, max_tokens = 3,
                              arrival_us = start + 3000 }
    local stats = server:run():stats()
    assert.is_true(r.arrival_us <= r.admitted_us and r.admitted_us <= r.first_token_us
      and r.first_token_us <= r.finish_us)
    assert.is_true(stats.idle_us > 0 and stats.ttft_mean_us > 0)
    assert.is_true(stats.tpot_mean_us > 0)
    assert.equal(1, stats.finished)
    assert.equal(2, stats.decode_tokens)
    assert.equal(2, stats.prefill_tokens)
  end)

  it("calibrates a cost model on an engine #release", function()
    local engine = model_on(dev):engine { blocks = 200, chunk = 64, max_seqs = 1 }
    local cost
    for _ = 1, 10 do -- other programs may delay the steps over long contexts, once
      cost = kv.cost_model.calibrate(engine, { link_gbps = 10, link_us = 5,
                                               context = 1024 })
      if cost.us_per_token_prefill > 0 and cost.us_decode_base > 0 then break end
    end
    assert.is_true(cost.us_per_token_prefill > 0 and cost.us_decode_base > 0)
    assert.equal(4 * 2 * 2 * 64 * 4 * 16, cost.bytes_block)
    assert.equal(200, engine.cache:blocks_free())
  end)
end)
