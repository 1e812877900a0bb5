--- The modelled prefetcher against times worked out by hand; the priorities; what a
-- step costs.
local kv = require "kvlab"
local link_model = require "kvlab.serve.link_model"

--- An engine of a link with 100 bytes a us and 5 us of latency; blocks are 1000 bytes.
local function open(o)
  local ended = {}
  local link = link_model.new { workers = o.workers or 1, max_pending = o.pending or 64,
    bytes_us = 100, us_latency = 5, begin = function(task) return task.count end }
  local function submit(name, priority, count)
    return link:submit { name = name, priority = priority, count = count or 1,
                         bytes_block = 1000 }
  end
  --- Names of the tasks in the order in which they end, with their times.
  local function finish(tasks)
    local left = #tasks
    while left > 0 do
      link:advance(link.now_us + 0.5)
      for _, task in ipairs(tasks) do
        if task.state == "complete" and not task.seen then
          task.seen, left = true, left - 1
          ended[#ended + 1] = task.name
        end
      end
    end
    return table.concat(ended, " ")
  end
  return link, submit, finish
end

describe("link model", function()
  it("serves by priority, in order of submission among equals", function()
    local _, submit, finish = open {}
    local tasks = { submit("first", 9), submit("c", 2), submit("a", 1), submit("d", 2),
                    submit("b", 1) }
    assert.equal("first a b c d", finish(tasks)) -- the first was taken at once
  end)

  it("takes the latency and the bytes over the bandwidth", function()
    local link, submit = open {}
    local task = submit("a", 0, 3)
    assert.equal(35, link:finish(task))
    link:advance(100)
    assert.equal(100, link.now_us)
    assert.equal(100 + 15, link:finish(submit("b", 0)))
  end)

  it("shares the bandwidth among its workers", function()
    local link, submit = open { workers = 2 }
    local short, long = submit("short", 0, 1), submit("long", 0, 3)
    local third = submit("third", 0, 1)
    -- both run at half speed from 5 to 25; then the third waits 5 us for its first byte
    assert.equal(25, link:finish(short))
    assert.equal(5 + 20 + 5 + 20, link:finish(third)) -- long has 1500 bytes left at 30
    assert.equal(55, link:finish(long))               -- and 500 at 50
    assert.equal(5000, link.stats.bytes)
    assert.equal(50, link.stats.us_busy)
    assert.equal(25, link.stats.us_queued)
  end)

  it("refuses more than max_pending, and cancels what has not ended", function()
    local link, submit = open { pending = 2 }
    local running, waiting = submit("a", 0), submit("b", 0)
    submit("c", 0)
    local none, why = submit("d", 0)
    assert.is_nil(none)
    assert.equal("full", why)
    link:cancel(waiting)
    link:cancel(running)
    assert.same({ "cancelled", "cancelled" }, { running.state, waiting.state })
    assert.equal(1, #link.active) -- c has the worker now
    link:advance(1000)
    link:cancel(running)
    assert.same({ 3, 1, 2, 1 }, { link.stats.submitted, link.stats.completed,
                                  link.stats.cancelled, link.stats.full })
  end)
end)

describe("priorities", function()
  local function ranks(name, views)
    local list = {}
    for i, view in ipairs(views) do
      list[i] = require("priorities." .. name)(view.request or {}, view)
    end
    return list
  end

  it("give whole numbers, the lower the sooner", function()
    assert.same({ 0, 1, 1, 2, 2, 3 }, ranks("queue_position", {
      { queue_position = 0 }, { queue_position = 1 }, { queue_position = 4 },
      { queue_position = 5 }, { queue_position = 16 }, { queue_position = 17 } }))
    assert.same({ 0, 0 }, ranks("fifo", { { queue_position = 0 },
                                          { queue_position = 9 } }))
    assert.same({ 16, 48 }, ranks("shortest_transfer", { { bytes = 2 ^ 20 },
                                                         { bytes = 3 * 2 ^ 20 } }))
    assert.same({ 1500, 2000 }, ranks("deadline", {
      { request = { deadline_us = 1500400 } }, { request = { deadline_us = 2e6 } } }))
    assert.same({ -7, -2 }, ranks("expected_reuse", { { reuse = 7.9 }, { reuse = 2 } }))
  end)
end)

describe("cost model", function()
  it("adds up a step as its head says", function()
    local cost = { us_per_token_prefill = 2, us_decode_base = 100, us_per_kv_block = 3,
                   us_per_prefill_block = 0.5, link_gbps = 1, link_us = 0,
                   bytes_block = 1000 }
    local function busy(input, output, max_tokens)
      local server = kv.serve { cost = cost, blocks = 50, block_size = 8,
                                max_tokens = max_tokens }
      server:submit { input_length = input, max_tokens = output }
      return server:run():stats().busy_us
    end
    -- 80 tokens at once; each sees half of 10 blocks
    assert.equal(2 * 80 + 0.5 * 80 * 5, busy(80, 1, 512))
    -- in two chunks of 40: the weights' time, then what the second sees
    assert.equal(100 + 0.5 * 40 * 2.5 + 100 + 0.5 * 40 * 7.5, busy(80, 1, 40))
    -- two decoded tokens more: 81 and 82 tokens lie in 11 blocks
    assert.equal(busy(80, 1, 512) + 2 * (100 + 3 * 11), busy(80, 3, 512))
  end)
end)
