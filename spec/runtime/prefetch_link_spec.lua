--- The prefetcher under an emulated link: it has no threads there, so that order and
-- times are exact.
local kv = require "kvlab"
local cases = require "spec.runtime.prefetch_cases"
local support = require "spec.support"

local C, check = kv.C, kv.check
local cpu = kv.device "cpu"
local raises = support.raises
local new_store, fill, with_link = cases.new_store, cases.fill, support.with_link
local new_cache, new_prefetcher = cases.new_cache, cases.new_prefetcher
local LAYERS, BYTES = cases.LAYERS, 2 * cases.HEADS * cases.SIZE * cases.DIM * 4 -- f32

describe("prefetch under an emulated link", function()
  it("brings the same", function()
    with_link(10, 1, function()
      for _, n in ipairs { 0, 1, 12 } do
        cases.expect_arrival(cpu, "f32", false, n, 2)
        cases.expect_arrival(cpu, "bf16", true, n, 1)
      end
    end)
  end)

  --- Tasks that write one block, so that it tells who was last: tasks[i] has key i - 1
  -- and these options. fn(prefetcher, tickets, last): last() is the number of the task.
  local function with_tasks(tasks, max_pending, fn)
    with_link(10, 1, function()
      local store = new_store()
      local source, keys = fill(store, "f32", #tasks)
      local cache = new_cache(cpu, "f32")
      local prefetcher = new_prefetcher(cpu, store, { max_pending = max_pending })
      local tickets = {}
      for i, o in ipairs(tasks) do
        tickets[i] = prefetcher:submit { request = o.request or i, priority = o.priority,
          cache = cache, keys = keys + (i - 1), blocks = { 3 } }
      end
      fn(prefetcher, tickets, function()
        local got = cache:layer(0):index(3):index(0):list()[1]
        for i = 1, #tasks do
          if source:index(0):index(i - 1):list()[1] == got then return i end
        end
      end)
      prefetcher:close()
      cache:close()
    end)
  end

  it("runs the lowest priority first, and equals in the order of submission", function()
    local tasks = { { priority = 3 }, { priority = 1 }, {}, { priority = 1 },
                    { priority = 0 }, { priority = -7 } }
    for i, expected in ipairs { { 6 }, { 6, 5 }, { 6, 5, 2 }, { 6, 5, 2, 4 },
                                { 6, 5, 2, 4, 3 }, { 6, 5, 2, 4, 3, 1 } } do
      with_tasks(tasks, 64, function(prefetcher, tickets, last)
        tickets[expected[i]]:wait()
        assert.equal(i, prefetcher:stats().completed) -- those before it, no other
        assert.equal(expected[i], last())
      end)
    end
  end)

  it("reprioritises what waits", function()
    local tasks = { { request = 1 }, { request = 2 }, { request = 1 }, { request = 3 } }
    with_tasks(tasks, 64,
      function(prefetcher, tickets, last)
        assert.equal(2, prefetcher:reprioritise(1, prefetcher.LOW))
        assert.equal(0, prefetcher:reprioritise(4, 0))
        tickets[4]:wait()
        assert.equal(2, prefetcher:stats().completed)
        assert.equal(1, prefetcher:reprioritise(1, 0) - 1)
        tickets[3]:wait()
        assert.equal(3, last())
        assert.equal(0, prefetcher:reprioritise(1, 0))
      end)
  end)

  it("cancels what waits, which then has done nothing", function()
    local tasks = { { request = 1 }, { request = 2 }, { request = 1 }, { request = 3 } }
    with_tasks(tasks, 64,
      function(prefetcher, tickets, last)
        assert.equal(2, prefetcher:cancel(1))
        assert.equal(0, prefetcher:cancel(1))
        assert.is_true(tickets[4]:cancel())
        assert.is_false(tickets[4]:cancel())
        for _, i in ipairs { 1, 3, 4 } do
          local result = tickets[i]:poll()
          assert.same({ "cancelled", 0, 0, 0 },
            { result.state, result.blocks, result.missing, result.bytes })
          assert.is_false(tickets[i]:wait_layer(0))
        end
        assert.is_nil(last())
        assert.equal(1, tickets[2]:wait().blocks)
        local stats = prefetcher:stats()
        assert.same({ 4, 1, 3, 0 },
          { stats.submitted, stats.completed, stats.cancelled, stats.pending })
      end)
  end)

  it("makes room in a full queue by running its first task", function()
    with_tasks({ { priority = 1 }, { priority = 2 }, { priority = 0 }, {} }, 2,
      function(prefetcher, tickets)
        local stats = prefetcher:stats() -- the third ran the first, the fourth the third
        assert.same({ 2, 2, 2 }, { stats.completed, stats.pending, stats.pending_peak })
        assert.equal(1, tickets[4]:wait().blocks)
      end)
  end)

  it("models the transfers, beside what streams do", function()
    local us, gb_s = 10, 2
    with_link(gb_s, us, function()
      local store = new_store()
      local _, keys = fill(store, "f32", 5)
      local cache = new_cache(cpu, "f32")
      local prefetcher = new_prefetcher(cpu, store, { workers = 1, staging = 2 * 16384 })
      local first, stream = cpu:open_event(), cpu:stream()
      first:record(stream)
      -- two runs of neighbours: a copy each, layer after layer, one at a time
      local ticket = prefetcher:submit { request = 1, cache = cache, keys = keys,
                                     blocks = { 4, 5, 6, 9, 10 } }
      local layer_us = 2 * us + 5 * BYTES / gb_s * 1e-3
      for layer = 0, LAYERS - 1 do
        assert.is_true(ticket:wait_layer(layer))
        local there = cpu:open_event()
        there:record(stream)
        support.close({ first:elapsed_us(there) }, { (layer + 1) * layer_us }, 0.01)
      end
      local result = ticket:wait()
      support.close({ result.us_copying }, { LAYERS * layer_us }, 0.02)
      prefetcher:close()
      cache:close()
    end)
  end)

  it("wants to be opened under the link that it runs under", function()
    local store = new_store()
    local _, keys = fill(store, "f32", 1)
    local cache, prefetcher = new_cache(cpu, "f32"), new_prefetcher(cpu, store)
    local o = { request = 1, cache = cache, keys = keys, blocks = { 1 } }
    with_link(10, 1, function()
      raises("kvl_cpu_link was called since", prefetcher.submit, prefetcher, o)
      local other = new_prefetcher(cpu, store)
      local ticket = other:submit(o)
      check(C.kvl_cpu_link(0, 0))
      raises("kvl_cpu_link was called since", ticket.wait, ticket)
      other:close()
      assert.equal("cancelled", ticket:wait().state)
    end)
    prefetcher:close()
    cache:close()
  end)
end)
