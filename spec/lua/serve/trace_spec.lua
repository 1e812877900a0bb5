--- Traces: reading, drawing, and replaying them without a model. KVLAB_TRACE=PATH replays
-- that file too.
local kv = require "kvlab"
local prefix_hits = require "spec.reference.prefix_hits"
local support = require "spec.support"
local temporary = require "spec.temporary"

local raises = support.raises
local SAMPLE = kv.paths.root .. "/lua/experiments/data/conversation_200.jsonl"

local function options(more)
  more = more or {}
  local o = { cost = kv.cost_model.llama_8b_h100(512), blocks = 800, block_size = 512,
              store_blocks = math.huge, max_seqs = 64 }
  for key, value in pairs(more) do
    if o.cost[key] then o.cost[key] = value elseif key ~= "rate" then o[key] = value end
  end
  return o
end

local function replay(path, more, limit)
  local server = kv.serve(options(more))
  kv.trace.submit(server, kv.trace.read(path, limit), { rate = more and more.rate })
  return server:run()
end

--- A file with these lines, read.
local function read_lines(...)
  return kv.trace.read(temporary.file(table.concat({ ... }, "\n") .. "\n"))
end

describe("trace", function()
  it("reads what it writes", function()
    local rows = kv.trace.generate { requests = 30, seed = 3 }
    local path = temporary.path()
    kv.trace.write(path, rows)
    assert.same(rows, kv.trace.read(path))
    assert.equal(7, #kv.trace.read(path, 7))
  end)

  it("writes no file where a row cannot be written", function()
    local rows, path = kv.trace.generate { requests = 2, seed = 3 }, temporary.path()
    rows[2].hash_ids.x = 1
    raises("trace.write: rows[2]: json.encode: value.hash_ids has list items and other "
      .. "keys", kv.trace.write, path, rows)
    assert.is_nil(io.open(path))
  end)

  it("names file and line of what is wrong", function()
    local good = '{"timestamp": 0, "input_length": 600, "output_length": 1, '
      .. '"hash_ids": [0, 1]}'
    assert.equal(1, #read_lines(good))
    raises("line 2: hash_ids has 1 ids, expected 2 for 600 tokens", read_lines, good,
      (good:gsub("0, 1", "0")))
    raises("line 1: output_length is nil", read_lines, (good:gsub("output", "out")))
    raises("line 2: ", read_lines, good, "{")
    raises("No such file", kv.trace.read, "/nowhere/at.all")
  end)

  it("draws conversations: the same for a seed, each turn on top of the last", function()
    local rows = kv.trace.generate { requests = 200, seed = 4 }
    assert.same(rows, kv.trace.generate { requests = 200, seed = 4 })
    assert.not_same(rows, kv.trace.generate { requests = 200, seed = 5 })
    assert.equal(200, #rows)
    local parent, longer = {}, 0
    for i, row in ipairs(rows) do
      assert.is_true(i == 1 or rows[i - 1].timestamp <= row.timestamp)
      assert.equal(math.ceil(row.input_length / 512), #row.hash_ids)
      for b, id in ipairs(row.hash_ids) do -- an id says what is before it
        local before = row.hash_ids[b - 1] or -1
        assert.equal(before, parent[id] or before)
        parent[id] = before
      end
      if row.input_length > 8192 then longer = longer + 1 end
    end
    assert.is_true(longer > 20)
    raises('"turn" is no option, did you mean turns?', kv.trace.generate, { turn = 3 })
  end)

  it("refuses a workload that Lua has no room for", function()
    local ok, why = pcall(kv.trace.generate, { requests = 100000, input_tokens = 900000 })
    assert.is_false(ok)
    assert.matches("about %d+ ids of blocks, expected at most 20000000", why)
  end)

  it("draws conversations with more blocks than Lua can unpack", function()
    local rows, most = kv.trace.generate { requests = 40, turns = 40, seed = 3,
      input_tokens = 1e6 }, 0
    for _, row in ipairs(rows) do
      assert.equal(math.ceil(row.input_length / 512), #row.hash_ids)
      most = math.max(most, #row.hash_ids)
    end
    assert.is_true(most > 10000)
  end)

  it("is the file that tools/make_trace.lua writes", function()
    assert.same(kv.trace.read(SAMPLE),
      kv.trace.generate { requests = 200, seed = 20, rate = 3 })
  end)
end)

describe("a replayed trace", function()
  --- Hits of a replay are those that the file's text has.
  local function check_hits(path, more, limit)
    local asked, found = prefix_hits.count(path, limit)
    local stats = replay(path, more, limit):stats()
    assert.equal(asked, stats.blocks_asked)
    assert.equal(found, stats.blocks_shared + stats.blocks_loaded)
    return stats
  end

  it("finds every prefix that an earlier request had, in any order of prefetches",
    function()
      for _, priority in ipairs { "queue_position", "shortest_transfer" } do
        for _, late in ipairs { "wait", "skip" } do
          local stats = check_hits(SAMPLE, { priority = priority, late = late,
                                             link_gbps = 2 })
          assert.is_true(stats.blocks_loaded > 0 and stats.blocks_shared > 0)
        end
      end
      check_hits(SAMPLE, { store_blocks = 0, blocks = 40000 })
      check_hits(SAMPLE, { prefetch_ahead = 0 })
      check_hits(SAMPLE, { max_tokens = 100, max_seqs = 3 })
    end)

  it("computes a prefix once for those that come at the same time", function()
    local row = { timestamp = 0, input_length = 3000, output_length = 5,
                  hash_ids = { 1, 2, 3, 4, 5, 6 } }
    for _, late in ipairs { "wait", "skip" } do
      local server = kv.serve(options { late = late, max_tokens = 2048 })
      kv.trace.submit(server, { row, row, row })
      local stats = server:run():stats()
      assert.equal(10, stats.blocks_shared)
      assert.equal(3000 + 2 * (3000 - 5 * 512), stats.prefill_tokens)
    end
  end)

  it("finds less where memory is scarce", function()
    local _, found = prefix_hits.count(SAMPLE)
    local stats = replay(SAMPLE, { store_blocks = 400, blocks = 150 }):stats()
    local hits = stats.blocks_shared + stats.blocks_loaded
    assert.is_true(hits > 0.2 * found and hits < 0.9 * found)
    assert.is_true(stats.store.records <= 400 and stats.store.evictions > 0)
  end)

  it("is the same from run to run", function()
    local o = { link_gbps = 1, late = "skip", store_blocks = 2000, blocks = 300 }
    local a, b = replay(SAMPLE, o), replay(SAMPLE, o)
    for i, r in ipairs(a.requests) do
      assert.equal(r.first_token_us, b.requests[i].first_token_us)
      assert.equal(r.finish_us, b.requests[i].finish_us)
    end
    assert.same(a:stats(), b:stats())
  end)

  it("is done with every request, each with all of its tokens", function()
    local rows = kv.trace.read(SAMPLE)
    local server = replay(SAMPLE, { blocks = 130, store_blocks = 300, rate = 4 })
    assert.is_true(server:stats().preemptions > 0)
    for i, r in ipairs(server.requests) do
      assert.equal("length", r.finish_reason)
      assert.equal(rows[i].output_length, r:output_length())
      assert.is_true(r.first_token_us >= r.arrival_us)
    end
    local prefix = server.scheduler.prefix
    assert.equal(130, prefix:available()) -- nothing is held any more
    assert.is_nil(next(server.scheduler.computing))
    assert.is_nil(next(server.scheduler.loading))
  end)

  it("says which request never fits", function()
    raises("blocks, there are 20", replay, SAMPLE, { blocks = 20 })
  end)

  local path = os.getenv "KVLAB_TRACE"
  if path then
    it("finds in " .. path .. " what its text has", function()
      local stats = check_hits(path, { max_seqs = 64 })
      print(("%d of %d blocks"):format(stats.blocks_shared + stats.blocks_loaded,
        stats.blocks_asked))
    end)
  end
end)
