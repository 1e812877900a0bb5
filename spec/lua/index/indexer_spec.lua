--- The same tokens however logits are cut, within the memory that is allowed. Exact: what
-- is selected is the reference's top-k of the logits of all rows at once.
local kv = require "kvlab"
local S = require "spec.support"
local plans = require "kvlab.index.indexer_plan"
local reference = require "spec.reference.indexer"

local cpu = kv.device "cpu"
local BLOCK, DIM, HEADS, TOPK = 16, 32, 4, 24

--- Random queries and keys: sequences of `width` blocks each, `each` rows a sequence.
local function setting(dev, c)
  local rng, rows = S.rng(c.seed or 3), c.sequences * c.each
  local s = { dev = dev, rows = rows, c = c, n = c.width * BLOCK }
  local blocks = c.sequences * c.width
  local index = kv.index_cache { device = dev, blocks = blocks + 1, block_size = BLOCK,
                                 dim = DIM }
  s.table_list = S.distinct(rng, blocks, blocks + 1)
  s.tables = kv.from(dev, "i32", { c.sequences, c.width }, s.table_list)
  local order = {} -- tokens of all sequences in logical order
  for i = 0, blocks * BLOCK - 1 do
    order[i + 1] = s.table_list[math.floor(i / BLOCK) + 1] * BLOCK + i % BLOCK
  end
  local places = kv.from(dev, "i64", { #order }, order)
  index:append(0, kv.randn(dev, "f32", { #order, DIM }, { seed = 5 }), places)
  s.cache = index:layer(0)
  s.k, s.scales = index:gather(0, places)
  s.q, s.weights = index:queries(kv.randn(dev, "f32", { rows, HEADS, DIM }, { seed = 6 }),
    kv.rand(dev, "f32", { rows, HEADS }, { seed = 7, low = -0.2 }))
  s.lens_list, s.starts_list, s.sequence_list, s.offsets_list = {}, {}, {}, {}
  for r = 1, rows do
    local sequence = math.floor((r - 1) / c.each)
    s.lens_list[r] = c.short or rng(7) == 0 and rng(TOPK + 1) or rng(s.n + 1)
    s.starts_list[r], s.sequence_list[r] = sequence * s.n, sequence
    s.offsets_list[r] = rng(100000)
  end
  s.lens = kv.from(dev, "i32", { rows }, s.lens_list)
  s.starts = kv.from(dev, "i32", { rows }, s.starts_list)
  s.row_sequence = kv.from(dev, "i32", { rows }, s.sequence_list)
  s.offsets = kv.from(dev, "i32", { rows }, s.offsets_list)
  return s
end

--- What select is to find.
local function expected(s, to, dtype)
  local logits = kv.zeros(s.dev, dtype or "f32", { s.rows, s.n })
  kv.ops.mqa_logits_paged(s.q, s.weights, s.cache, s.tables, s.lens, logits)
  local transform
  if to == "places" then
    transform = { tables = s.table_list, width = s.c.width, block_size = BLOCK,
                  sequences = s.c.sequences }
  elseif to == "ragged" then
    transform = { offsets = s.offsets_list }
  end
  return reference.topk_transform { rows = s.rows, n = s.n, k = TOPK,
    logits = logits:list(), lens = s.lens_list, transform = transform }
end

--- A call of select, by paged keys or contiguous ones.
local function call_of(s, to, is_paged)
  local call = { q = s.q, weights = s.weights, lens = s.lens, to = to,
    out = S.poisoned(s.dev, "i32", { s.rows, TOPK }) }
  if is_paged then
    call.cache, call.tables = s.cache, s.tables
  else
    call.k, call.scales, call.starts = s.k, s.scales, s.starts
    if to == "places" then call.tables, call.row_sequence = s.tables, s.row_sequence end
  end
  if to == "places" then call.block_size = BLOCK end
  if to == "ragged" then call.offsets = s.offsets end
  return call
end

local CASES = {
  { sequences = 1, each = 1, width = 20 }, { sequences = 1, each = 37, width = 45 },
  { sequences = 5, each = 1, width = 33 }, { sequences = 3, each = 4, width = 40 },
  { sequences = 20, each = 4, width = 10 }, { sequences = 2, each = 50, width = 10 },
}

--- Options by name: from all rows at once to tiles of 256 columns.
local OPTIONS = {
  whole = {}, chunks = { logits_bytes_max = 130000 }, tiles = { logits_bytes_max = 6000 },
  ["small chunks"] = { logits_bytes_max = 32000 },
  streaming = { streaming = true, logits_bytes_max = 30000 },
  bf16 = { logits = "bf16", logits_bytes_max = 16000 },
  ["bf16 tiles"] = { logits = "bf16", streaming = true, logits_bytes_max = 6000 },
}

local function check_all(dev)
  for i, c in ipairs(CASES) do
    local s = setting(dev, c)
    for name, o in pairs(OPTIONS) do
      for _, to in ipairs { "indices", "places", "ragged" } do
        for _, is_paged in ipairs { true, false } do
          o.device, o.topk = dev, TOPK
          local got = kv.indexer(o):select(call_of(s, to, is_paged))
          S.equal(got, expected(s, to, o.logits), ("case %d, %s, %s, %s keys"):format(i,
            name, to, is_paged and "paged" or "contiguous"))
        end
      end
    end
  end
end

describe("an indexer", function()
  S.it_on_cpu("selects the same tokens in chunks, in tiles and at once", check_all)

  it("plans by rows where they fit, by tiles where few do", function()
    local rows, n = 137, 5000
    local function plan(most, together)
      local indexer = kv.indexer { device = cpu, topk = TOPK, logits_bytes_max = most }
      return indexer:plan(rows, n, 48, together)
    end
    local whole, chunks, tiles = plan(nil), plan(50 * 4 * n), plan(20 * 4 * n)
    assert.same({ rows, n, false }, { whole.rows, whole.columns, whole.streaming })
    assert.same({ n, false }, { chunks.columns, chunks.streaming })
    assert.is_true(chunks.rows >= 32 and chunks.rows < 50)
    local decode = plan(20 * 4 * n, 1) -- rows that cannot share a tile
    assert.is_true(decode.rows > 1 and decode.rows < 20 and not decode.streaming)
    assert.is_true(tiles.streaming and tiles.columns < n and tiles.columns % 48 == 0)
  end)

  it("uses no more memory than it is allowed, whatever the shape", function()
    for _, shape in ipairs { { 1, 100000 }, { 7, 30000 }, { 64, 4096 }, { 300, 1000 } } do
      for _, most in ipairs { 40000, 200000, 1000000 } do
        S.collect()
        local rows, n = shape[1], shape[2]
        local k, scales = kv.zeros(cpu, "f8e4m3", { n, DIM }), kv.ones(cpu, "f32", { n })
        local q = kv.zeros(cpu, "f8e4m3", { rows, HEADS, DIM })
        local call = { q = q, k = k, scales = scales,
          lens = kv.full(cpu, "i32", { rows }, n), weights = kv.ones(cpu, "f32",
            { rows, HEADS }), out = kv.tensor(cpu, "i32", { rows, TOPK }) }
        local indexer = kv.indexer { device = cpu, topk = TOPK, logits_bytes_max = most }
        local before = cpu:stats().bytes_live
        cpu:reset_peak()
        indexer:select(call)
        local used = cpu:stats().bytes_live_peak - before
        local words = ("%d x %d: %d bytes of %d"):format(rows, n, used, most)
        assert.is_true(used > 0 and used <= most, words)
        assert.is_true(4 * rows * n <= most or used > most / 4, words)
        indexer:free()
        assert.equal(before, cpu:stats().bytes_live)
      end
    end
  end)

  it("allows more than 8 000 000 logits by the memory that is there", function()
    local function memory(free, all) return function() return free, all end end
    assert.equal(math.huge, plans.allowed(1000, 7999, math.huge, function()
      error "memory is asked for"
    end))
    assert.equal(50, plans.allowed(1000, 8000, math.huge, memory(100, 1000)))
    assert.equal(300, plans.allowed(1000, 8000, math.huge, memory(900, 1000)))
    assert.equal(7, plans.allowed(1000, 8000, 7, memory(100, 1000)))
    assert.equal(7, plans.allowed(10, 10, 7, memory(100, 1000)))
  end)

  S.it_on_cpu("takes every token, without logits, where there are few", function(dev)
    local s = setting(dev, { sequences = 3, each = 2, width = 4, short = TOPK - 3 })
    local call = call_of(s, "places", true)
    call.q, call.weights, call.cache, call.max_len = nil, nil, nil, TOPK - 3
    local indexer = kv.indexer { device = dev, topk = TOPK }
    S.equal(indexer:select(call), expected(s, "places"))
    assert.equal(0, indexer:bytes())
  end)

  it("computes no more columns than the longest row has, by the thousand", function()
    local s = setting(cpu, { sequences = 2, each = 1, width = 200, short = 1000 })
    local call, indexer = call_of(s, "indices", true), kv.indexer { device = cpu,
      topk = TOPK }
    call.max_len = 1000
    S.equal(indexer:select(call), expected(s, "indices"))
    assert.equal(1024, indexer.work.of_n)
  end)

  it("allocates nothing from the second call on", function()
    local s = setting(cpu, CASES[3])
    local indexer = kv.indexer { device = cpu, topk = TOPK }
    local call = call_of(s, "places", true)
    indexer:select(call)
    local before = cpu:stats()
    for _ = 1, 20 do indexer:select(call) end
    local after = cpu:stats()
    assert.equal(before.allocations, after.allocations)
    assert.equal(before.bytes_live, after.bytes_live)
  end)

  it("can be recorded: a replay selects by the lengths that are there then", function()
    local s = setting(cpu, CASES[4])
    local indexer = kv.indexer { device = cpu, topk = TOPK }
    local call = call_of(s, "places", true)
    indexer:select(call)
    local graph = kv.graph(function() indexer:select(call) end)
    for r = 1, s.rows do s.lens_list[r] = s.n - 7 * r end
    s.lens:copy_(kv.from(cpu, "i32", { s.rows }, s.lens_list))
    call.out:fill_(-77)
    graph:replay()
    S.equal(call.out, expected(s, "places"))
  end)

  it("says what is wrong", function()
    local s = setting(cpu, CASES[3])
    local function select(change)
      local call = call_of(s, "places", true)
      for key, value in pairs(change) do call[key] = value or nil end
      return kv.indexer({ device = cpu, topk = TOPK }):select(call)
    end
    S.raises("topk is 0, expected a whole number", kv.indexer, { topk = 0 })
    S.raises("did you mean topk?", kv.indexer, { topp = 3 })
    S.raises('logits is "f16", expected one of f32, bf16', kv.indexer, { logits = "f16" })
    S.raises("logits_bytes_max is -1", kv.indexer, { logits_bytes_max = -1 })
    S.raises('to is "place", expected one of indices', select, { to = "place" })
    S.raises("expected tables and block_size", select, { block_size = false })
    S.raises("lens is missing", select, { lens = false })
    S.raises("expected one of cache and k", select, { k = s.k, scales = s.scales })
    S.raises("q or weights is missing", select, { q = false })
    S.raises("no row_sequence", select, { row_sequence = s.row_sequence })
    local tiny = kv.indexer { device = cpu, topk = TOPK, logits_bytes_max = 100 }
    S.raises("logits_bytes_max is 100, expected at least", tiny.select, tiny,
      call_of(s, "places", true))
  end)
end)

describe("an indexer on CUDA #gpu", function()
  S.it_on_gpu("selects the same tokens in chunks, in tiles and at once", check_all)

  S.it_on_gpu("stays below its limit for 4096 rows of a million tokens", function(cuda)
    local rows, n, most = 4096, 2 ^ 20, 64 * 2 ^ 20
    local q = kv.randn(cuda, "f32", { rows, 8, DIM }, { seed = 1 })
    local index = kv.index_cache { device = cuda, blocks = n / 64, dim = DIM }
    local places = kv.arange(cuda, "i64", n)
    index:append(0, kv.randn(cuda, "f32", { n, DIM }, { seed = 2 }), places)
    local call = { cache = index:layer(0), to = "places", block_size = 64,
      tables = kv.arange(cuda, "i32", n / 64):reshape { 1, n / 64 },
      lens = kv.arange(cuda, "i32", rows, n - rows + 1),
      out = kv.tensor(cuda, "i32", { rows, 2048 }) }
    call.q, call.weights = index:queries(q, kv.ones(cuda, "f32", { rows, 8 }))
    local got = {}
    for i, o in ipairs { { most }, { 32 * most }, { most, true } } do
      local indexer = kv.indexer { device = cuda, logits_bytes_max = o[1],
                                   streaming = o[2] }
      local before = cuda:stats().bytes_live
      cuda:reset_peak()
      indexer:select(call)
      local used = cuda:stats().bytes_live_peak - before
      assert.is_true(used > o[1] / 4 and used <= o[1],
        ("%d bytes of %d"):format(used, o[1]))
      got[i] = call.out:to "cpu"
      indexer:free()
    end
    S.equal(got[2], got[1])
    S.equal(got[3], got[1])
  end)
end)
