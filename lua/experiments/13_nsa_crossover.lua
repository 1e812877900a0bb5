--- From which context length on is selecting tokens faster than attending to all of them?
--
-- One layer runs dense attention; or it runs an indexer (logits of fp8 index keys, top-k,
-- places) and then attention over the topk tokens that the indexer selects. In decode,
-- there are `batch` sequences with one token each; in prefill, the last `chunk` tokens of
-- one sequence. Keys, queries and block tables are random, because the indexer's time
-- does not depend on the contents of its keys. Without a GPU, sizes are small. Times are
-- medians of device time in microseconds; whole_us is the time of the indexer and the
-- attention together.
--
-- With a value_dim, the KV memory holds latents (MLA), keys of head_dim numbers of which
-- the first value_dim are the value, and queries are absorbed. 0: values have rows of
-- their own.
--
--   ./kvlab run lua/experiments/13_nsa_crossover.lua [--device=cuda] [--set topk=1024]
--       [--set heads=128 --set kv_heads=1 --set head_dim=576 --set value_dim=512]
local kv = require "kvlab"
local options = require "kvlab.options"

local dev = kv.device()
local SMALL = dev:is_cpu()
local BLOCK, REPEATS = 64, SMALL and 5 or 15

--- Returns the median time of fn between two events, in microseconds.
local function time(fn)
  local from, to, stream, times = dev:open_event(), dev:open_event(), dev:stream(), {}
  fn()
  for i = 1, REPEATS do
    from:record(stream)
    fn()
    to:record(stream)
    times[i] = from:elapsed_us(to)
  end
  from:close()
  to:close()
  table.sort(times)
  return times[math.ceil(REPEATS / 2)]
end

--- Calls fn(first, count) for one piece of n rows after the other.
local function in_pieces(n, piece, fn)
  for first = 0, n - 1, piece do kv.scope(fn, first, math.min(piece, n - first)) end
end

local function index_of(c, blocks)
  local index = kv.index_cache { blocks = blocks, block_size = BLOCK, dim = c.index_dim,
                                 device = dev }
  in_pieces(blocks * BLOCK, 65536, function(first, n)
    local k = kv.randn(dev, "bf16", { n, c.index_dim },
      { seed = 5, offset = first * c.index_dim })
    index:append(0, k, kv.arange(dev, "i64", n, first))
  end)
  return index
end

--- Makes everything that dense attention and the indexer read.
local function setting(c)
  local decodes = c.phase == "decode"
  local seqs, rows = decodes and c.batch or 1, decodes and c.batch or c.chunk
  local each = c.context / BLOCK
  local blocks = seqs * each
  local _, order = kv.rand(dev, "f32", { 1, blocks }, { seed = 7 }):sort()
  local first = decodes and c.context or c.context - rows + 1
  local latent = c.value_dim ~= 0
  local page = latent and { blocks, c.kv_heads, BLOCK, c.head_dim }
    or { blocks, 2, c.kv_heads, BLOCK, c.head_dim }
  return { rows = rows, tables = order:reshape { seqs, each },
    format = latent and kv.format { codec = "bf16", kv_heads = c.kv_heads,
      block_size = BLOCK, head_dim = c.head_dim, value_dim = c.value_dim } or nil,
    cache = kv.randn(dev, "bf16", page, { seed = 1 }),
    lens = kv.full(dev, "i32", { seqs }, c.context),
    starts = not decodes and kv.from(dev, "i32", { 2 }, { 0, rows }) or nil,
    sees = decodes and kv.full(dev, "i32", { rows }, c.context)
      or kv.arange(dev, "i32", rows, first),
    q = kv.randn(dev, "bf16", { rows, c.heads, c.head_dim }, { seed = 2 }),
    asks = kv.randn(dev, "bf16", { rows, c.index_heads, c.index_dim }, { seed = 3 }),
    weights = kv.rand(dev, "f32", { rows, c.index_heads }, { seed = 4 }),
    index = index_of(c, blocks), out = kv.tensor(dev, "bf16", { rows, c.heads,
      latent and c.value_dim or c.head_dim }) }
end

local function run(c)
  local s = setting(c)
  local indexer = kv.indexer { topk = c.topk, device = dev,
                               logits_bytes_max = c.logits_mb * 2 ^ 20 }
  local listed = kv.tensor(dev, "i32", { s.rows, c.topk })
  local function select()
    kv.scope(function()
      local q8, weights = s.index:queries(s.asks, s.weights)
      indexer:select { q = q8, weights = weights, cache = s.index:layer(0),
        tables = s.tables, block_size = BLOCK, lens = s.sees, max_len = c.context,
        out = listed }
    end)
  end
  local listing = { q = s.q, cache = s.cache, format = s.format, tables = s.tables,
    lens = s.lens, starts = s.starts, listed = listed:reshape { s.rows, 1, c.topk },
    out = s.out }
  local function attend()
    kv.ops.step.paged_attention(listing)
  end
  local metrics = {
    dense_us = time(function()
      kv.ops.step.paged_attention { q = s.q, cache = s.cache, format = s.format,
        tables = s.tables, lens = s.lens, starts = s.starts, out = s.out }
    end),
    index_us = time(select), attend_us = time(attend),
    whole_us = time(function()
      select()
      attend()
    end),
  }
  metrics.speedup = metrics.dense_us / metrics.whole_us
  indexer:free()
  return metrics
end

local tables = {}
for _, phase in ipairs { "decode", "prefill" } do
  for _, value in ipairs { "dense_us", "index_us", "attend_us", "whole_us", "speedup" } do
    tables[#tables + 1] = { rows = "phase", columns = "context", value = value,
      format = value == "speedup" and "%.2f" or "%.0f", where = { phase = phase } }
  end
end

kv.experiment.run {
  name = "13_nsa_crossover",
  title = "From which length on is selecting tokens faster?",
  grid = {
    { "phase", { "decode", "prefill" } },
    { "context", SMALL and { 1024, 2048, 4096, 8192 }
      or { 4096, 8192, 16384, 32768, 65536, 131072, 262144 } },
  },
  defaults = { batch = SMALL and 1 or 16, chunk = SMALL and 64 or 4096,
               heads = SMALL and 8 or 32, kv_heads = SMALL and 2 or 8, head_dim = 128,
               value_dim = 0,
               topk = SMALL and 512 or 2048, index_heads = SMALL and 8 or 64,
               index_dim = 128, logits_mb = SMALL and 64 or 1024 },
  kinds = kv.experiment.kinds({
    count = { "context", "batch", "chunk", "heads", "kv_heads", "head_dim", "topk",
      "index_heads", "logits_mb" },
    whole = { "value_dim" },
  }, {
    phase = options.one_of("decode", "prefill"), index_dim = options.one_of(32, 64, 128),
  }),
  quick = { context = SMALL and { 1024, 2048 } or { 4096, 16384 } },
  metrics = { "dense_us", "index_us", "attend_us", "whole_us", "speedup" },
  check = function(config)
    kv.experiment.expect_multiple(config, "context", BLOCK)
    if config.phase == "prefill" and config.chunk > config.context then
      error(("chunk is %d, expected at most context = %d"):format(config.chunk,
        config.context), 0)
    end
  end,
  run = function(config) return kv.scope(run, config) end,
  table = tables,
  plot = { x = "context", y = "speedup", series = "phase", logx = true, logy = true,
           xlabel = "context (tokens)", ylabel = "time of dense / of selected",
           title = "Speedup of attention over selected tokens, by context" },
}
