--- Choosing blocks. P6 is exact top-k of f32 rows, through the top-k op and through
-- select; P6b the same of rows of 2^20, and of rows with few distinct values. E8 is top-k
-- of tokens: as indices, as places, and tile by tile. P8 is the scores of Quest's
-- bound.
local kv = require "kvlab"
local paged = require "bench.lib.paged"

local KV_HEADS, DIM, BLOCK = paged.KV_HEADS, paged.DIM, paged.BLOCK

-- ---- P6 -------------------------------------------------------------------------------

--- Rows of N(0, 1). kind "clustered": of 1 + 1e-3 N(0, 1), whose high bits are nearly all
-- equal; a number: of so many distinct values.
local function rows_of(b, rows, n, kind)
  if type(kind) == "number" then
    return kv.randint(b.device, "i32", { rows, n }, { seed = 1, low = 0, high = kind })
      :cast "f32"
  end
  local is_clustered = kind == "clustered"
  return kv.randn(b.device, "f32", { rows, n },
    { seed = 1, mean = is_clustered and 1 or 0, std = is_clustered and 1e-3 or 1 })
end

--- Compares the first and last rows with the CPU, whose top-k is another program.
local function check_rows(x, got, k, is_ascending)
  local cpu = kv.device "cpu"
  for _, row in ipairs { 0, x:size(0) - 1 } do
    kv.scope(function()
      local values = x:narrow(row, 1):to(cpu)
      local _, want = values:topk(k)
      local list, expected = got:index(row):list(), want:list()
      if is_ascending then table.sort(expected) end
      for i = 1, k do
        assert(list[i] == expected[i], ("row %d: place %d is %d, expected %d"):format(row,
          i - 1, list[i], expected[i]))
      end
    end)
  end
end

--- by_index: the same k indices in ascending order, as a selection needs them.
local function topk(rows, n, k, kind, by_index)
  local which = kv.C.KVL_TOPK_LARGEST + (by_index and kv.C.KVL_TOPK_BY_INDEX or 0)
  return function(b)
    local x = rows_of(b, rows, n, kind)
    local indices = kv.full(b.device, "i32", { rows, k }, -1)
    local function run() kv.check(kv.C.kvl_topk(x, which, nil, indices)) end
    return { run = run, bytes = 4 * rows * (n + k), check = function()
      run()
      check_rows(x, indices, k, by_index)
    end }
  end
end

local function select(rows, n, k, kind)
  return function(b)
    local x = rows_of(b, rows, n, kind)
    local scores, budget = x:reshape { rows, 1, n }, paged.budget(k)
    local lens = kv.full(b.device, "i32", { rows }, n * BLOCK)
    local selection = kv.full(b.device, "i32", { rows, 1, k }, -1)
    local function run() kv.ops.select(scores, lens, BLOCK, budget, selection) end
    return { run = run, bytes = 4 * rows * (n + k), check = function()
      run()
      check_rows(x, selection:reshape { rows, k }, k, true)
    end }
  end
end

-- ---- E8 ------------------------------------------------------------------------------

local BLOCK_SIZE = 64

--- Block tables in random order, with blocks for n tokens in each of `rows` sequences.
local function places_of(b, rows, n)
  local width = math.ceil(n / BLOCK_SIZE)
  local _, order = kv.rand("cpu", "f32", { 1, rows * width }, { seed = 5 }):sort()
  return order:reshape({ rows, width }):to(b.device)
end

--- Turns the places of one row back into indices by its block table.
local function indices_of(places, table_row)
  local logical, list = {}, {}
  for b, block in ipairs(table_row:list()) do logical[block] = b - 1 end
  for i, place in ipairs(places:list()) do
    list[i] = logical[math.floor(place / BLOCK_SIZE)] * BLOCK_SIZE + place % BLOCK_SIZE
  end
  return kv.from("cpu", "i32", { #list }, list)
end

--- to: "indices" or "places". fused: one op makes them; otherwise one op finds the
-- indices and a second one transforms them.
local function transform(rows, n, k, to, fused)
  return function(b)
    local x, dev = rows_of(b, rows, n), b.device
    local lens = kv.full(dev, "i32", { rows }, n)
    local out = kv.full(dev, "i32", { rows, k }, -1)
    local call = { logits = x, lens = lens, out = out }
    local later = { indices = out, out = out, block_size = BLOCK_SIZE }
    local tables = to == "places" and places_of(b, rows, n)
    if fused then call.tables, call.block_size = tables or nil, BLOCK_SIZE
    else later.tables = tables end
    local function run()
      kv.ops.step.topk_transform(call)
      if not fused then kv.ops.step.transform_indices(later) end
    end
    return { run = run, bytes = 4 * rows * (n + k), check = function()
      run()
      local got = out:to "cpu"
      for r = 0, tables and rows - 1 or -1, math.max(rows - 1, 1) do
        got:index(r):copy_(indices_of(got:index(r), tables:index(r)))
      end
      check_rows(x, got, k, true)
    end }
  end
end

--- Running top-k over tiles, each a tensor of its own, as an indexer computes them.
local function tiles(rows, n, k, tile)
  return function(b)
    local x, dev = rows_of(b, rows, n), b.device
    local parts, lens = {}, kv.full(dev, "i32", { rows }, n)
    for first = 0, n - 1, tile do
      local columns = kv.arange(dev, "i32", math.min(tile, n - first), first)
      local index = (kv.zeros(dev, "i32", { rows, 1 }) + columns:reshape { 1, -1 })
      parts[#parts + 1] = { first = first, logits = x:gather(index) }
    end
    local values = { kv.full(dev, "f32", { rows, k }, 0 / 0),
                     kv.full(dev, "f32", { rows, k }, 0 / 0) }
    local indices = { kv.full(dev, "i32", { rows, k }, -7),
                        kv.full(dev, "i32", { rows, k }, -7) }
    local call = { lens = lens }
    local function run()
      for i, part in ipairs(parts) do
        local from = i % 2 + 1
        call.logits, call.first = part.logits, part.first
        call.kept_values, call.kept_indices = values[from], indices[from]
        call.values, call.indices = values[3 - from], indices[3 - from]
        kv.ops.step.topk_merge(call)
      end
    end
    return { run = run, bytes = 4 * rows * (n + k), check = function()
      run()
      check_rows(x, call.indices, k, true)
    end }
  end
end

-- ---- P8 -------------------------------------------------------------------------------

--- Compares with the bound as two matrix products:
-- sum_d max(q_d min_d, q_d max_d) = max(q, 0) . max + min(q, 0) . min.
local function check_quest(q, summary, tables, scores, blocks)
  for _, at in ipairs { { 0, 0 }, { q:size(0) - 1, KV_HEADS - 1 } } do
    kv.scope(function()
      local s, g = at[1], at[2]
      local rows = summary:reshape { -1, DIM }
      local function bound(half)
        local index = tables:index(s) * (2 * KV_HEADS) + (half * KV_HEADS + g)
        return rows:gather_rows(index):cast "f32"
      end
      local heads = paged.group_rows(q, s, g)
      local positive = (heads + heads:abs()) * 0.5
      local want = positive:matmul_t(bound(1)) + (heads - positive):matmul_t(bound(0))
      local got = scores:index(s):index(g)
      paged.expect("score", got, want:max(0):reshape { blocks }, 1e-4)
    end)
  end
end

local function quest(seqs, len)
  return function(b)
    local dev, blocks, lens = b.device, len / BLOCK, {}
    for i = 1, seqs do lens[i] = len end
    local tables, count = paged.random_tables(dev, lens)
    local apart = kv.from(dev, "bf16", { 2, 1, 1 }, { -8, 8 }) -- min below max
    local summary = kv.randn(dev, "bf16", { count, 2, KV_HEADS, DIM }, { seed = 1 })
    summary:add(apart, summary)
    local q = kv.randn(dev, "bf16", { seqs, paged.HEADS, DIM }, { seed = 2 })
    local lens_there = kv.from(dev, "i32", { seqs }, lens)
    local scores = kv.full(dev, "f32", { seqs, KV_HEADS, blocks }, 0 / 0)
    local function run()
      kv.check(kv.C.kvl_score_minmax(q, summary, tables, lens_there, BLOCK,
        kv.C.KVL_GROUP_MAX, scores))
    end
    return { run = run, bytes = summary:bytes() + scores:bytes(), check = function()
      run()
      check_quest(q, summary, tables, scores, blocks)
    end }
  end
end

return function(b)
  for _, row in ipairs {
    { 1, 8192, 256, 8 }, { 64, 8192, 2048, 10 }, { 1, 131072, 2048, 15 },
    { 64, 131072, 2048, 35 }, { 64, 131072, 2048, 60, "clustered" },
    { 64, 1048576, 2048, 110 }, { 64, 131072, 2048, 60, 8 },
  } do
    local n, k, kind = b:shrunk(row[2]), b:shrunk(row[3]), row[5]
    local is_second = row[2] > 131072 or type(kind) == "number"
    local of = ("[%d, %d] k %d"):format(row[1], n, k)
    if kind then of = ("%s, %s%s"):format(of, kind, kind == 8 and " values" or "") end
    for _, op in ipairs { { "select ", select }, { "top-k ", topk, true },
                          { "sorted top-k ", topk, false } } do
      b:case { id = is_second and "P6b" or "P6", name = op[1] .. of,
               target = { us = row[4] },
               setup = op[2](row[1], n, k, kind, op[3]) }
    end
  end
  for _, row in ipairs { { 1, 131072 }, { 64, 131072 }, { 1, 1048576 },
                         { 64, 1048576 } } do
    local n, k = b:shrunk(row[2]), b:shrunk(2048)
    local of = ("of [%d, %d] k %d"):format(row[1], n, k)
    b:case { id = "E8", name = "top-k positions " .. of,
             setup = transform(row[1], n, k, "indices", true) }
    b:case { id = "E8", name = "top-k places " .. of,
             setup = transform(row[1], n, k, "places", true) }
    b:case { id = "E8", name = "top-k, then places, " .. of,
             setup = transform(row[1], n, k, "places", false) }
    if row[2] > 131072 then
      local tile = b:shrunk(131072)
      b:case { id = "E8", name = ("top-k in tiles of %d %s"):format(tile, of),
               setup = tiles(row[1], n, k, tile) }
    end
  end
  local len = math.max(BLOCK, b:shrunk(32768))
  b:case { id = "P8", name = ("scores by Quest's bound, 16 x %d"):format(len),
           setup = quest(16, len), target = { of_limit = 0.85 } }
end
