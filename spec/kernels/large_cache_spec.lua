--- Every op that indexes KV memory, over memory of more than 2^32 elements: it gives bit
-- for bit what it gives over a small memory that holds the same blocks. The blocks lie on
-- both sides of 2^31 and 2^32 elements, of as many bytes, and at the very end. On the CPU
-- the rest of the memory is never touched, so the system gives no pages for it.
local ffi = require "ffi"
local kv = require "kvlab"
local policy = require "kvlab.policy.policy"
local support = require "spec.support"
local wrap = require("kvlab.tensor.tensor").wrap

local KV_HEADS, HEADS, BLOCK, DIM = 8, 16, 16, 128
local ELEMENTS = 2 * KV_HEADS * BLOCK * DIM -- of a block
local BYTES = 2 ^ 33 + 2 ^ 28               -- of bf16: 4.4e9 elements
local ROOM = 2 ^ 30                         -- what a spec needs besides
local LENS = { 90, 61 }
local TABLES = { { 0, 3, 6, 9, 2, 5 }, { 8, 1, 7, 4, -1, -1 } }
local COUNT = 10                            -- blocks that are used

local check = kv.check

--- Why there is no such memory here, or nil.
local function lacking(dev)
  if support.is_hostile then return "a hostile build would poison 9 GB" end
  local stats = dev:stats()
  local there = dev:is_cpu() and stats.bytes_total
    or stats.bytes_free + stats.bytes_cached
  if there > BYTES + ROOM then return nil end
  return ("%s has %.1f GB of memory, and this needs %.1f"):format(dev:name(),
    there / 1e9, (BYTES + ROOM) / 1e9)
end

--- Where the block number i of COUNT lies among `rows` rows of so many elements each: on
-- both sides of 2^31 and of 2^32 elements and bytes, at the beginning and at the end.
local function places_of(rows, elements, bytes_element)
  local list, seen = {}, {}
  local function add(row)
    row = math.floor(row)
    if row >= 0 and row < rows and not seen[row] and #list < COUNT then
      list[#list + 1], seen[row] = row, true
    end
  end
  add(rows - 1)
  for _, limit in ipairs { 2 ^ 32, 2 ^ 31, 2 ^ 32 / bytes_element,
                           2 ^ 31 / bytes_element } do
    add(limit / elements)
    add(limit / elements - 1)
  end
  add(0)
  for row = 1, COUNT * 2 do add(rows - 2 - row) end
  assert(#list == COUNT)
  return list
end

--- A world has memory for `rows` rows of any shape, and where its rows lie. The small one
-- has COUNT rows; the large one takes as many as the whole memory has.
local function small_world(dev)
  local world = { device = dev }
  function world.memory(dtype, shape)
    local rows = {}
    for i = 1, COUNT do rows[i] = i - 1 end
    return kv.tensor(dev, dtype, { COUNT, unpack(shape) }), rows
  end
  return world
end

local function large_world(dev, bytes)
  local world = { device = dev }
  --- part: which of `parts` equal parts of the memory (0 of 1)
  function world.memory(dtype, shape, part, parts)
    local elements, size = 1, kv.dtype_bytes(dtype)
    for _, n in ipairs(shape) do elements = elements * n end
    local share = BYTES / (parts or 1)
    local rows = math.floor(share / (elements * size))
    local memory = wrap(dev, dtype, { rows, unpack(shape) },
      ffi.cast("char *", bytes.ptr) + share * (part or 0))
    return memory, places_of(rows, elements, size)
  end
  return world
end

--- Fills the rows with the same random numbers in both worlds.
local function fill(world, memory, rows, seed)
  local shape = memory:dims()
  shape[1] = 1
  for i, row in ipairs(rows) do
    kv.scope(function()
      memory:narrow(row, 1):copy_(
        kv.randn(world.device, "f32", shape, { seed = seed + i }):cast(memory:type()))
    end)
  end
  return memory
end

--- What the rows hold, as text.
local function bytes_of(memory, rows)
  local parts = {}
  for i, row in ipairs(rows) do
    parts[i] = kv.scope(function()
      local host = memory:narrow(row, 1):to "cpu"
      return ffi.string(ffi.cast("char *", host:data()), host:bytes())
    end)
  end
  return table.concat(parts)
end

local function text_of(t)
  local host = t:to "cpu"
  return ffi.string(ffi.cast("char *", host:data()), host:bytes())
end

local function i32(world, shape, list)
  return kv.from(world.device, "i32", shape, list)
end

local function tables_of(world, rows)
  local list = {}
  for s, row in ipairs(TABLES) do
    for j, i in ipairs(row) do list[(s - 1) * #row + j] = i < 0 and -1 or rows[i + 1] end
  end
  return i32(world, { #TABLES, #TABLES[1] }, list)
end

local function lens_of(world) return i32(world, { #LENS }, LENS) end

--- n places of tokens, all over the rows.
local function token_places(rows, n, tokens)
  local list = {}
  for i = 0, n - 1 do
    list[i + 1] = rows[i % #rows + 1] * tokens + (i * 7 + math.floor(i / #rows)) % tokens
  end
  return list
end

local function randn(world, dtype, shape, seed)
  return kv.randn(world.device, "f32", shape, { seed = seed }):cast(dtype)
end

local PAGE = { 2, KV_HEADS, BLOCK, DIM }

--- Pages of random numbers, their rows, and tables and lengths for them.
local function pages(world, dtype)
  local cache, rows = world.memory(dtype or "bf16", PAGE)
  fill(world, cache, rows, 100)
  return cache, rows, tables_of(world, rows), lens_of(world)
end

local function scores(world)
  return kv.full(world.device, "f32", { #LENS, KV_HEADS, #TABLES[1] }, 7)
end

-- ---- the ops: each returns the bytes of its results -----------------------------------

local ops = {}

local function new_tokens(world, n)
  return randn(world, "bf16", { n, KV_HEADS, DIM }, 1),
    randn(world, "bf16", { n, KV_HEADS, DIM }, 2)
end

function ops.append_kv(world)
  local out = {}
  for i, dtype in ipairs { "bf16", "f8e4m3" } do
    local cache, rows = pages(world, dtype)
    local k, v = new_tokens(world, 24)
    local places = kv.from(world.device, "i64", token_places(rows, 24, BLOCK))
    kv.ops.append_kv(k, v, places, cache)
    out[i] = bytes_of(cache, rows)
  end
  return table.concat(out)
end

function ops.rope_append(world)
  local cache, rows = pages(world)
  local k, v = new_tokens(world, 24)
  local q = randn(world, "bf16", { 24, HEADS, DIM }, 3)
  local frequencies = kv.rand(world.device, "f32", { DIM / 2 }, { seed = 4 })
  kv.ops.rope_append(q, k, v, kv.arange(world.device, "i32", 24), frequencies,
    kv.from(world.device, "i64", token_places(rows, 24, BLOCK)), cache)
  return text_of(q) .. bytes_of(cache, rows)
end

function ops.copy_blocks(world)
  local cache, rows = pages(world)
  local from, to = {}, {}
  for i = 1, COUNT / 2 do from[i], to[i] = rows[i], rows[COUNT + 1 - i] end
  kv.ops.copy_blocks(kv.from(world.device, "i32", from), kv.from(world.device, "i32", to),
    cache)
  return bytes_of(cache, rows)
end

function ops.move_blocks(world)
  local cache, rows = pages(world)
  local dev, list, numbers = world.device, {}, {}
  for i = 1, COUNT do list[i], numbers[i] = rows[i], COUNT - i end
  local here, there = i32(world, { 1, 1, COUNT }, list), i32(world, { 1, 1, COUNT },
    numbers)
  local slots = kv.zeros(dev, "bf16", { COUNT, unpack(PAGE) })
  check(kv.C.kvl_move_blocks(cache, here, slots, there, nil, nil))
  local out = text_of(slots)
  slots:fill_(3)
  check(kv.C.kvl_move_blocks(slots, there, cache, here, nil, nil))
  return out .. bytes_of(cache, rows)
end

local function attend(world, dtype, heads, more)
  local cache, _, tables, lens = pages(world, dtype)
  local starts = more.starts and i32(world, { #more.starts }, more.starts)
  local tokens = starts and more.starts[#more.starts] or #LENS
  local lse = kv.tensor(world.device, "f32", { tokens, heads })
  local out = kv.ops.paged_attention { cache = cache, tables = tables, lens = lens,
    q = randn(world, dtype == "f32" and dtype or "bf16", { tokens, heads, DIM }, 5),
    starts = starts, lse = lse,
    selection = more.selection and i32(world, { 2, 1, 3 }, { 0, 2, 5, 1, 3, -1 }) }
  return text_of(out) .. text_of(lse)
end

function ops.paged_attention(world)
  local out = {}
  for _, case in ipairs { { "bf16", 16 }, { "bf16", 128 }, { "bf16", 256 },
                          { "f8e4m3", 32 }, { "f32", 16 } } do
    for _, more in ipairs { {}, { selection = true }, { starts = { 0, 70, 100 } },
                            { starts = { 0, 3, 5 } } } do
      out[#out + 1] = attend(world, case[1], case[2], more)
    end
  end
  return table.concat(out)
end

ops["paged_attention by slots"] = function(world)
  local cache, rows = pages(world)
  local dev, slots = world.device, {}
  for s, list in ipairs { { 0, 4, 5 }, { 9, 2, 0 } } do
    for j, i in ipairs(list) do slots[(s - 1) * 3 + j] = rows[i + 1] end
  end
  local none = kv.zeros(dev, "i32", { 2, #TABLES[1] })
  return text_of(kv.ops.paged_attention { cache = cache, tables = none,
    lens = lens_of(world), q = randn(world, "bf16", { 2, HEADS, DIM }, 5),
    selection = i32(world, { 2, 1, 3 }, { 0, 2, 5, 1, 3, -1 }),
    slots = i32(world, { 2, 1, 3 }, slots) })
end

ops["paged_attention over blocks of 12"] = function(world)
  local out = {}
  for i, dtype in ipairs { "bf16", "f8e4m3" } do
    local cache, rows = world.memory(dtype, { 2, KV_HEADS, 12, DIM })
    fill(world, cache, rows, 200)
    for _, starts in ipairs { { 0, 40, 70 }, { 0, 3, 5 } } do
      out[#out + 1] = text_of(kv.ops.paged_attention { cache = cache,
        tables = tables_of(world, rows), lens = i32(world, { 2 }, { 70, 47 }),
        q = randn(world, "bf16", { starts[3], HEADS, DIM }, 4 + i),
        starts = i32(world, { 3 }, starts) })
    end
  end
  return table.concat(out)
end

function ops.listed_attention(world)
  local out = {}
  for i, dtype in ipairs { "bf16", "f8e4m3" } do
    local cache, rows = pages(world, dtype)
    local list = {}
    for j = 1, 128 do list[j] = j * 7 % LENS[j > 64 and 2 or 1] end
    out[i] = text_of(kv.ops.paged_attention { cache = cache,
      tables = tables_of(world, rows), lens = lens_of(world),
      q = randn(world, "bf16", { 2, HEADS, DIM }, 5),
      listed = i32(world, { 2, 1, 64 }, list) })
  end
  return table.concat(out)
end

--- blocks, tokens and rows as the ops that summarise take them.
local function touched(world, rows)
  local tokens = {}
  for i = 1, COUNT do tokens[i] = i % 3 == 0 and 5 or BLOCK end
  return kv.from(world.device, "i32", rows), kv.from(world.device, "i32", tokens)
end

function ops.block_minmax(world)
  local cache, rows = pages(world)
  local blocks, tokens = touched(world, rows)
  local summary = kv.zeros(world.device, "bf16", { COUNT, 2, KV_HEADS, DIM })
  check(kv.C.kvl_block_minmax(cache, nil, blocks, tokens, kv.arange(world.device, "i32",
    COUNT), summary))
  return text_of(summary)
end

function ops.block_mean(world)
  local cache, rows = pages(world)
  local blocks, tokens = touched(world, rows)
  local summary = kv.zeros(world.device, "f32", { COUNT, KV_HEADS, DIM })
  check(kv.C.kvl_block_mean(cache, nil, blocks, tokens, kv.arange(world.device, "i32",
    COUNT), summary))
  return text_of(summary)
end

function ops.block_hash(world)
  local cache, rows = pages(world)
  local blocks, tokens = touched(world, rows)
  local planes = randn(world, "f32", { 128, DIM }, 6)
  local here = kv.arange(world.device, "i32", COUNT)
  local means = kv.zeros(world.device, "u64", { COUNT, KV_HEADS, 2 })
  local each = kv.zeros(world.device, "u64", { COUNT, KV_HEADS, BLOCK, 2 })
  check(kv.C.kvl_block_hash(cache, nil, blocks, tokens, here, planes, means))
  check(kv.C.kvl_block_hash(cache, nil, blocks, tokens, here, planes, each))
  return text_of(means) .. text_of(each)
end

--- Summaries that are large themselves: rows of theirs are written and then scored.
local function summarised(world, dtype, shape, summarise, score)
  local small = kv.tensor(world.device, "bf16", { COUNT, unpack(PAGE) })
  local order = {}
  for i = 1, COUNT do order[i] = i - 1 end
  fill(world, small, order, 100)
  local blocks, tokens = touched(world, order)
  local summary, rows = world.memory(dtype, shape)
  for _, row in ipairs(rows) do summary:narrow(row, 1):fill_(0) end
  summarise(small, blocks, tokens, kv.from(world.device, "i32", rows), summary)
  local into = scores(world)
  score(summary, tables_of(world, rows), lens_of(world), into)
  return bytes_of(summary, rows) .. text_of(into)
end

function ops.score_minmax(world)
  local q = randn(world, "bf16", { 2, HEADS, DIM }, 5)
  return summarised(world, "bf16", { 2, KV_HEADS, DIM }, function(cache, ...)
    check(kv.C.kvl_block_minmax(cache, nil, ...))
  end, function(summary, tables, lens, into)
    check(kv.C.kvl_score_minmax(q, summary, tables, lens, BLOCK, kv.C.KVL_GROUP_MAX,
      into))
  end)
end

function ops.score_mean(world)
  local q = randn(world, "bf16", { 2, HEADS, DIM }, 5)
  return summarised(world, "bf16", { KV_HEADS, DIM }, function(cache, ...)
    check(kv.C.kvl_block_mean(cache, nil, ...))
  end, function(summary, tables, lens, into)
    check(kv.C.kvl_score_mean(q, summary, tables, lens, BLOCK, kv.C.KVL_GROUP_MEAN,
      into))
  end)
end

local function hamming(world, shape)
  local planes = randn(world, "f32", { 128, DIM }, 6)
  local q = randn(world, "bf16", { 2, HEADS, DIM }, 5)
  local selection = kv.zeros(world.device, "i32", { 2, KV_HEADS, 4 })
  return summarised(world, "u64", shape, function(cache, blocks, tokens, rows, summary)
    check(kv.C.kvl_block_hash(cache, nil, blocks, tokens, rows, planes, summary))
  end, function(summary, tables, lens, into)
    local hashes = kv.tensor(world.device, "u64", { 2 * KV_HEADS, 2 })
    check(kv.C.kvl_hash_rows(randn(world, "bf16", { 2 * KV_HEADS, DIM }, 8), planes,
      hashes))
    check(kv.C.kvl_score_hamming(hashes:reshape { 2, KV_HEADS, 2 }, summary, tables, lens,
      BLOCK, into))
    local call = ffi.new "kvl_hamming"
    call.q, call.planes, call.hashes, call.tables, call.lens = q, planes, summary, tables,
      lens
    call.selection, call.block_size = selection, BLOCK
    call.budget = ffi.new("kvl_budget", -1, 3, 0, 1, 1)
    check(kv.C.kvl_select_hamming(call))
  end) .. text_of(selection)
end

ops["score_hamming and select_hamming"] = function(world)
  return hamming(world, { KV_HEADS, 2 }) .. hamming(world, { KV_HEADS, BLOCK, 2 })
end

function ops.score_max_qk(world)
  local out = {}
  for i, dtype in ipairs { "bf16", "f8e4m3" } do
    local cache, _, tables, lens = pages(world, dtype)
    local into = scores(world)
    check(kv.C.kvl_score_max_qk(randn(world, "bf16", { 2, HEADS, DIM }, 5), cache, nil,
      tables, lens, kv.C.KVL_GROUP_MAX, into))
    out[i] = text_of(into)
  end
  return table.concat(out)
end

ops["index_append, index_gather and mqa_logits_paged"] = function(world)
  local size, dev = 64, world.device
  local cache, rows = world.memory("u8", { size * (DIM + 4) })
  for _, row in ipairs(rows) do cache:narrow(row, 1):fill_(0) end
  local all = {}
  for i, row in ipairs(rows) do
    for t = 0, size - 1 do all[(i - 1) * size + t + 1] = row * size + t end
  end
  local places = kv.from(dev, "i64", all)
  kv.ops.index_append(randn(world, "bf16", { #all, DIM }, 9), places, cache)
  local k = kv.tensor(dev, "f8e4m3", { #all, DIM })
  local scale = kv.tensor(dev, "f32", { #all })
  kv.ops.index_gather(cache, places, k, scale)
  local q = kv.ops.quantise_rows(randn(world, "bf16", { 2, 64, DIM }, 10))
  local logits = kv.full(dev, "f32", { 2, 6 * size }, 7)
  kv.ops.mqa_logits_paged(q, randn(world, "f32", { 2, 64 }, 11), cache,
    tables_of(world, rows), i32(world, { 2 }, { 6 * size - 3, 4 * size - 1 }), logits)
  return bytes_of(cache, rows) .. text_of(k) .. text_of(scale) .. text_of(logits)
end

ops["the vLLM layout"] = function(world)
  local out = {}
  for version = 1, 2 do
    local keys, rows = world.memory("f8e4m3", { KV_HEADS, DIM / 16, BLOCK, 16 }, 0, 2)
    local values = world.memory("f8e4m3", { KV_HEADS, DIM, BLOCK }, 1, 2)
    fill(world, keys, rows, 300)
    fill(world, values, rows, 400)
    local k, v = new_tokens(world, 24)
    local places = kv.from(world.device, "i64", token_places(rows, 24, BLOCK))
    kv.vllm.append(k, v, places, keys, values)
    out[version] = bytes_of(keys, rows) .. bytes_of(values, rows)
      .. text_of(kv.vllm.attention { key_cache = keys, value_cache = values,
        q = randn(world, "bf16", { 2, HEADS, DIM }, 5), tables = tables_of(world, rows),
        lens = lens_of(world), version = version })
  end
  return table.concat(out)
end

ops["hot_append to a host tier, and slots"] = function(world)
  local cache, rows = pages(world)
  local dev, block_of = world.device, {}
  local blocks = cache:size(0)
  local t = { slot_of = kv.full(dev, "i32", { KV_HEADS, blocks }, -1) }
  for head = 0, KV_HEADS - 1 do
    for slot = 0, 3 do
      block_of[head * 4 + slot + 1] = rows[slot * 2 + 1]
      kv.scope(function()
        t.slot_of:index(head):narrow(rows[slot * 2 + 1], 1):fill_(slot)
      end)
    end
  end
  t.memory = kv.zeros(dev, "bf16", { 4, unpack(PAGE) })
  t.block_of = i32(world, { KV_HEADS, 4 }, block_of)
  t.order, t.counters = kv.zeros(dev, "i32", { KV_HEADS, 4 }), kv.zeros(dev, "i64", { 5 })
  local hot = ffi.new "kvl_hot"
  for name, tensor in pairs(t) do hot[name] = tensor end
  local k, v = new_tokens(world, 24)
  check(kv.C.kvl_hot_append(hot, k, v, kv.from(dev, "i64", token_places(rows, 24, BLOCK)),
    cache, nil, nil))
  return bytes_of(cache, rows) .. text_of(t.memory)
end

ops["rows: gather, scatter, narrow and copy"] = function(world)
  local memory, rows = world.memory("bf16", { 64 })
  fill(world, memory, rows, 500)
  local index = kv.from(world.device, "i32", rows)
  local got = memory:gather_rows(index)
  memory:scatter_rows_(index, got * 2)
  return text_of(got) .. bytes_of(memory, rows)
end

local EXPRESSIONS = "kernels of expressions"
ops[EXPRESSIONS] = function(world)
  local e = kv.expr
  local cache, rows, tables, lens = pages(world)
  local into = scores(world)
  local format = support.formats_of(cache)
  local ctx = { layer = 0, seqs = 2, kv_heads = KV_HEADS, width = #TABLES[1],
    is_prefill = false, tables = tables, lens = lens, cache = cache, format = format,
    query = randn(world, "bf16", { 2, HEADS, DIM }, 5),
    new_scores = function() return into end }
  local shape = { device = world.device, layers = 1, blocks = cache:size(0),
    block_size = BLOCK, heads = HEADS, kv_heads = KV_HEADS, head_dim = DIM,
    dtype = "bf16", max_blocks = #TABLES[1], scale = 1, format = format }
  local function attach(def)
    def.name, def.decode = "large", true
    return policy.attach(policy.define(def) {}, shape)
  end
  attach { score = (e.q * e.k):sum "dim":max "token":max "head" }:score(ctx)
  local out = text_of(into)
  local p = attach { summary = { high = e.k:max "token" },
    score = (e.q * e.high):sum "dim":max "head" }
  local blocks, tokens = touched(world, rows)
  p:on_prefill_offload { layer = 0, k = cache, k_blocks = blocks, blocks = blocks,
                         num_tokens = tokens }
  p:score(ctx)
  return out .. text_of(into) .. bytes_of(p.summary.high:layer(0), rows)
end

--- Why expressions cannot be compiled here, or nil.
local function uncompiled(dev)
  if dev:is_cpu() then
    local has = require("kvlab.kernel.run.compiler").find()
    return not has and "there is no C compiler" or nil
  end
  local lib, why = require("kvlab.kernel.run.nvrtc").open()
  return not lib and why or nil
end

-- ---- both worlds -------------------------------------------------------------------

support.each_device(function(dev)
  describe("memory of more than 2^32 elements on " .. dev:name(), function()
    local why = lacking(dev)
    local bytes
    setup(function()
      if not why then bytes = kv.tensor(dev, "u8", { BYTES }) end
    end)
    teardown(function()
      if not bytes then return end
      bytes:free()
      support.collect()
      dev:trim()
    end)

    local names = {}
    for name in pairs(ops) do names[#names + 1] = name end
    table.sort(names)
    for _, name in ipairs(names) do
      it("gives what a small one gives: " .. name, function()
        local no = why or name == EXPRESSIONS and uncompiled(dev)
        if no then return pending(no) end
        local want = kv.scope(ops[name], small_world(dev))
        local got = kv.scope(ops[name], large_world(dev, bytes))
        assert.is_true(#want > 0 and got == want) -- not assert.equal: megabytes
      end)
    end
  end)
end)

assert(BYTES / 2 > 2 ^ 32 and BYTES / 2 / ELEMENTS > 2 ^ 17)
