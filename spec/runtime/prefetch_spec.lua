--- The prefetcher: what arrives, what is missing, when it may be read, and what is
-- left behind. Its order and times under an emulated link are in prefetch_link_spec;
-- races and failing stores and devices in prefetch_stress.c.
local ffi = require "ffi"
local kv = require "kvlab"
local cases = require "spec.runtime.prefetch_cases"
local support = require "spec.support"

local C, check = kv.C, kv.check
local cpu = kv.device "cpu"
local raises = support.raises
local new_store, keys_of, fill = cases.new_store, cases.keys_of, cases.fill
local new_cache, new_prefetcher = cases.new_cache, cases.new_prefetcher
local expect_block, expect_arrival = cases.expect_block, cases.expect_arrival
local LAYERS, BLOCKS = cases.LAYERS, cases.BLOCKS

--- What does not depend on threads or on a link.
local function arrives_on(dev)
  for _, dtype in ipairs { "f32", "bf16", "f8e4m3" } do
    it("brings blocks in " .. dtype, function()
      for _, n in ipairs { 0, 1, 5, 12 } do
        for _, workers in ipairs { 1, 3 } do
          expect_arrival(dev, dtype, false, n, workers)
          expect_arrival(dev, dtype, true, n, workers)
        end
      end
    end)
  end

  for _, o in ipairs { { format = "int8", kv_heads = 2, head_dim = 64 },
    { format = "f8_latent", kv_heads = 1, head_dim = 576, value_dim = 512 },
    { format = "bf16", kv_heads = 1, head_dim = 24, value_dim = 16 } } do
    it(("brings pages of %s with %d numbers for a key"):format(o.format, o.head_dim),
      function()
      o.device, o.layers, o.blocks, o.block_size = dev, LAYERS, BLOCKS, 8
      local source, cache, store = kv.cache(o), kv.cache(o), kv.store "memory:"
      local random = kv.rand(cpu, "f32", source.memory:dims(), { seed = 5 })
      check(C.kvl_copy((random * 127):cast(source.memory:type()):to(dev), source.memory))
      check(C.kvl_fill(cache.memory, 3))
      local keys, places = keys_of(5), { 7, 0, 11, 3, 4 }
      for layer = 0, LAYERS - 1 do
        for i = 0, 4 do
          assert.is_true(store:put_block(keys + i, layer, source:layer(layer), i))
        end
      end
      local prefetcher = kv.prefetch { device = dev, store = store, prefetch_workers = 2,
                                       max_pending_prefetch = 4 }
      assert.equal(5, prefetcher:submit { request = 1, cache = cache, keys = keys,
                                          blocks = places }:wait().leading)
      for layer = 0, LAYERS - 1 do
        for i, block in ipairs(places) do
          support.equal(cache:layer(layer):index(block):cast "f32",
            source:layer(layer):index(i - 1):cast "f32")
        end
        assert.equal(3, cache:layer(layer):index(1):cast "f32":max():item())
      end
      for _, one in ipairs { prefetcher, source, cache, store } do one:close() end
    end)
  end

  it("says which blocks are missing, and brings the others", function()
    local store = new_store()
    local function lacks(i, layer) return i == 4 and layer == 1 or i == 6 or i == 9 end
    local source, keys = fill(store, "f32", 10, lacks)
    local cache, prefetcher = new_cache(dev, "f32"), new_prefetcher(dev, store)
    local places = { 11, 10, 9, 8, 7, 6, 5, 4, 3, 2 }
    local result = prefetcher:submit { request = 1, cache = cache, keys = keys,
                                   blocks = places }:wait()
    assert.same({ 7, 4, 3 }, { result.blocks, result.leading, result.missing })
    assert.same({ true, true, true, true, false, true, false, true, true, false },
      result.arrived)
    for i, block in ipairs(places) do
      if result.arrived[i] then expect_block(cache, block, source, i - 1) end
    end
    for _, block in ipairs { 0, 1, 5, 2 } do expect_block(cache, block) end
    local stats = prefetcher:stats()
    assert.same({ 7 * LAYERS + 1, 3 }, { stats.hits, stats.misses })
    prefetcher:close()
    cache:close()
  end)

  it("brings some of the layers", function()
    local store = new_store()
    local source, keys = fill(store, "f32", 2, function(_, layer) return layer == 0 end)
    local cache, prefetcher = new_cache(dev, "f32"), new_prefetcher(dev, store)
    local ticket = prefetcher:submit { request = 1, cache = cache, keys = keys + 1,
                                   blocks = { 5 }, first_layer = 1, layers = 1 }
    raises("layer is 0, expected 1 ... 1", ticket.wait_layer, ticket, 0)
    raises("layer is 2, expected 1 ... 1", ticket.wait_layer, ticket, 2)
    assert.is_true(ticket:wait_layer(1))
    assert.equal(1, ticket:wait().blocks)
    support.equal(cache:layer(1):index(5), source:index(1):index(1))
    for _, layer in ipairs { 0, 2 } do
      assert.equal(-3, cache:layer(layer):max():item())
    end
    prefetcher:close()
    cache:close()
  end)

  it("has a stream wait for a layer", function()
    local store = new_store()
    local source, keys = fill(store, "f32", BLOCKS, function(i, layer)
      return i == 2 and layer == 2
    end)
    local cache = new_cache(dev, "f32")
    local prefetcher = new_prefetcher(dev, store, { workers = 1 })
    local stream, places = dev:open_stream(), {}
    for i = 1, BLOCKS do places[i] = BLOCKS - i end
    local ticket = prefetcher:submit { request = 1, cache = cache, keys = keys,
                                   blocks = places }
    for layer = 0, LAYERS - 1 do
      assert.equal(layer < 2, ticket:wait_layer(layer, layer == 1 and stream or nil))
      local copy = dev:with_stream(layer == 1 and stream or dev:stream(), function()
        return cache:layer(layer):clone()
      end)
      dev:sync()
      for i, block in ipairs(places) do
        if i ~= 3 or layer < 2 then
          support.equal(copy:index(block), source:index(layer):index(i - 1))
        end
      end
    end
    assert.equal(BLOCKS - 1, ticket:wait().blocks)
    stream:close()
    prefetcher:close()
    cache:close()
  end)

  it("writes after what streams were given before", function()
    local store = new_store()
    local source, keys = fill(store, "f32", BLOCKS)
    local cache, prefetcher = new_cache(dev, "f32"), new_prefetcher(dev, store)
    local busy = kv.randn(dev, "f32", { 768, 768 }, { seed = 1 })
    local product, copies = kv.tensor(dev, "f32", { 768, 768 }), {}
    local streams, places = { dev:open_stream(), dev:open_stream() }, {}
    for i = 1, BLOCKS do places[i] = i - 1 end
    dev:sync()
    for i, stream in ipairs(streams) do
      dev:with_stream(stream, function()
        for _ = 1, 3 do busy:matmul(busy, product) end
        copies[i] = cache:layer(i):clone()
      end)
    end
    local ticket = prefetcher:submit { request = 1, cache = cache, keys = keys,
                                   blocks = places }
    assert.equal(BLOCKS, ticket:wait().blocks)
    for i, stream in ipairs(streams) do
      stream:sync()
      assert.same({ -3, -3 }, { copies[i]:min():item(), copies[i]:max():item() })
      stream:close()
    end
    for block = 0, BLOCKS - 1 do expect_block(cache, block, source, block) end
    prefetcher:close()
    cache:close()
  end)

  it("has the hot cache forget what it writes to the host tier", function()
    local store = new_store()
    local _, keys = fill(store, "f32", 1)
    local cache, prefetcher = new_cache(dev, "f32", true), new_prefetcher(dev, store)
    local hot = cache.tier.hot
    hot.slot_of:fill_(2)
    hot.block_of:fill_(5)
    prefetcher:submit { request = 1, cache = cache, keys = keys, blocks = { 5 },
                    first_layer = 1 }:wait()
    for layer = 0, LAYERS - 1 do
      local slots = hot.slot_of:index(layer):index(1):list()
      assert.equal(layer == 0 and 2 or -1, slots[6])
    end
    prefetcher:close()
    cache:close()
  end)
end

describe("prefetch", function()
  support.each_device(function(dev)
    describe("on " .. dev:name(), function() arrives_on(dev) end)
  end)

  -- So many tasks of four blocks of 8 MiB, which are read one after the other, are never
  -- done before the test goes on: that is 30 GiB.
  local MANY = 1000

  --- A block of 8 MiB a layer: reading one takes milliseconds, submitting microseconds.
  local function heavy(workers, max_pending)
    local store, o = new_store(), { layers = 1, blocks = 4, kv_heads = 1,
                                    block_size = 4096, head_dim = 256, format = "f32" }
    o.device = cpu
    local cache, keys = kv.cache(o), keys_of(4)
    check(C.kvl_fill(cache.memory, 1))
    for i = 0, 3 do
      check(C.kvl_store_put(store.handle, keys + i, 0, cache.memory.ptr, 8 * 2 ^ 20))
    end
    check(C.kvl_fill(cache.memory, -3))
    local prefetcher = kv.prefetch { device = cpu, store = store,
      prefetch_workers = workers, max_pending_prefetch = max_pending }
    return prefetcher, cache, keys
  end

  it("says when the queue is full, and drops nothing", function()
    local prefetcher, cache, keys = heavy(1, 1)
    local tickets, fulls = {}, 0
    for i = 1, 1000 do
      local ticket, why = prefetcher:submit { request = i, cache = cache, keys = keys,
                                          blocks = { 0, 1, 2, 3 }, timeout = 0 }
      if not ticket then
        assert.equal("full", why)
        fulls = fulls + 1
        if fulls == 3 then break end
      end
      tickets[#tickets + 1] = ticket
    end
    assert.equal(3, fulls)
    local last = prefetcher:submit { request = 0, cache = cache, keys = keys,
      blocks = { 0 } }
    assert.equal(1, last:wait().blocks) -- it waited for room
    for _, ticket in ipairs(tickets) do assert.equal(4, ticket:wait().blocks) end
    local stats = prefetcher:stats()
    assert.same({ #tickets + 1, #tickets + 1, 1, 0 },
      { stats.submitted, stats.completed, stats.pending_peak, stats.pending })
    prefetcher:close()
    cache:close()
  end)

  it("times out, counts the wait, and then has the result", function()
    local prefetcher, cache, keys = heavy(1, MANY)
    local function submit(request)
      return prefetcher:submit { request = request, cache = cache, keys = keys,
                             blocks = { 0, 1, 2, 3 } }
    end
    for _ = 1, MANY - 1 do submit(2) end
    local ticket = submit(1)
    local result, why = ticket:poll()
    assert.same({ nil, "pending" }, { result, why })
    assert.equal(0, prefetcher:stats().waits)
    result, why = ticket:wait(0.0001)
    assert.same({ nil, "timeout" }, { result, why })
    prefetcher:cancel(2)
    result = ticket:wait()
    assert.equal(4, result.blocks)
    assert.is_true(result.us_queued > 0 and result.us_reading > 0)
    assert.equal(result.bytes, ticket:poll().bytes)
    local stats = prefetcher:stats()
    assert.equal(2, stats.waits)
    assert.is_true(stats.us_stalled >= 100)
    ticket:close()
    ticket:close()
    for _, name in ipairs { "wait", "poll", "cancel" } do
      raises("the ticket is closed", ticket[name], ticket)
    end
    raises("the ticket is closed", ticket.wait_layer, ticket, 0)
    raises("layer is nil, expected a whole number", ticket.wait_layer, ticket)
    prefetcher:close()
    cache:close()
  end)

  it("tells tickets of a closed prefetcher what became of their tasks", function()
    local prefetcher, cache, keys = heavy(1, MANY)
    local tickets, states = {}, { completed = 0, cancelled = 0 }
    for i = 1, MANY do
      tickets[i] = prefetcher:submit { request = 1, cache = cache, keys = keys,
                                   blocks = { 0, 1, 2, 3 } }
    end
    prefetcher:close()
    prefetcher:close()
    for _, ticket in ipairs(tickets) do
      local result = ticket:wait()
      states[result.state] = states[result.state] + 1
      assert.equal(result.blocks, result.leading) -- a cancelled task has a first part
      assert.is_false(ticket:cancel())
    end
    assert.equal(MANY, states.completed + states.cancelled)
    assert.is_true(states.cancelled >= 3)
    raises("the prefetcher is closed", prefetcher.stats, prefetcher)
    raises("the prefetcher is closed", prefetcher.submit, prefetcher, {})
    cache:close()
  end)

  it("leaves nothing behind, whatever is closed first or not at all", function()
    local function holdings()
      jit.flush()
      collectgarbage()
      collectgarbage()
      cpu:trim()
      local stats = cpu:stats()
      return { stats.bytes_live, stats.bytes_pinned, stats.bytes_cached }
    end
    local before = holdings()
    for _, close in ipairs { "prefetcher", "cache", "ticket", "nothing" } do
      local prefetcher, cache, keys = heavy(2, 64)
      for i = 1, 3 do
        local ticket = prefetcher:submit { request = i, cache = cache, keys = keys,
                                       blocks = { i } }
        if close == "ticket" then ticket:close() end
      end
      if close == "prefetcher" then prefetcher:close() end
      if close == "cache" then cache:close() end
    end
    assert.same(before, holdings())
  end)

  it("refuses what is wrong", function()
    local store = new_store()
    local _, keys = fill(store, "f32", 4)
    local cache, prefetcher = new_cache(cpu, "f32"), new_prefetcher(cpu, store)
    local function refused(words, change)
      local o = { request = 1, cache = cache, keys = keys, blocks = { 1, 2 } }
      for name, value in pairs(change) do o[name] = value ~= "nil" and value or nil end
      raises(words, prefetcher.submit, prefetcher, o)
    end
    refused("block 1 is 12, expected 0 ... 11", { blocks = { 1, 12 } })
    refused("block 0 is -1, expected 0 ... 11", { blocks = { -1 } })
    refused('block 2 is "x", expected a whole number', { blocks = { 1, "x" } })
    refused("4 keys for 5 blocks", { blocks = { 1, 2, 3, 4, 5 } })
    refused("keys is missing, expected an array of kvl_key", { keys = "nil" })
    for _, bad in ipairs { 5LL, ffi.new "int[4]" } do -- a pointer could be made of these
      refused("expected an array of kvl_key", { keys = bad })
    end
    refused("cache is missing, expected a cache", { cache = "nil" })
    refused("blocks is 3, expected a list", { blocks = 3 })
    refused("layers 1 ... 3, expected some of 0 ... 2", { first_layer = 1, layers = 3 })
    refused("layers -1 ... 2", { first_layer = -1 })
    refused("request is missing, expected a whole number", { request = "nil" })
    refused("priority is 0.5, expected a whole number", { priority = 0.5 })
    refused("timeout is -1, expected seconds", { timeout = -1 })
    refused('did you mean priority?', { prioriti = 1 })
    assert.equal(0, prefetcher:stats().submitted)
    raises("store is missing, expected a store that is open", kv.prefetch, {})
    raises("prefetch_workers is 0, expected a whole number from 1 to 64", kv.prefetch,
      { store = store, prefetch_workers = 0 })
    raises("max_pending_prefetch is 0, expected", kv.prefetch,
      { store = store, max_pending_prefetch = 0 })
    raises('did you mean prefetch_workers?', kv.prefetch,
      { store = store, prefetch_worker = 1 })
    prefetcher:close()
    cache:close()
  end)

  it("fails whole where an allocation fails", function()
    if C.kvl_fail_allocation(0) < 0 then return pending "not a hostile build" end
    local store = new_store()
    local source, keys = fill(store, "f32", 3)
    local function try(fn, n)
      check(C.kvl_fail_allocation(n))
      local ok, result = pcall(fn)
      check(C.kvl_fail_allocation(0))
      if not ok then assert.matches("memory", result) end
      return ok, result
    end
    local function each(link)
      local raised = 0
      for n = 1, 40 do
        local ok, prefetcher = try(function() return new_prefetcher(cpu, store) end, n)
        if not ok then
          raised, prefetcher = raised + 1, new_prefetcher(cpu, store)
        end
        local cache = new_cache(cpu, "f32")
        local function submit()
          return prefetcher:submit { request = 1, cache = cache, keys = keys,
                                 blocks = { 3, 4, 5 } }
        end
        local submitted, ticket = try(submit, n)
        if not submitted then
          assert.equal(0, prefetcher:stats().submitted)
          raised, ticket = raised + 1, submit()
        end
        assert.equal(3, ticket:wait().blocks)
        for i = 0, 2 do expect_block(cache, 3 + i, source, i) end
        prefetcher:close()
        cache:close()
      end
      assert.is_true(raised >= (link and 20 or 5))
    end
    each(false)
    support.with_link(10, 1, function() each(true) end)
  end)
end)
