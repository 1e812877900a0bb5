--- How much memory and time does it take to select tokens if logits are computed all at
-- once, in chunks of rows, or in tiles?
--
-- A chunk of queries at the end of a long context asks an indexer for the 2048 best
-- tokens of each query. `way` says how the logits are computed. `rule` is SGLang's rule:
-- all logits at once as long as they take less than half of the free memory and 0.3 of
-- all memory. `cap` allows 64 MiB for everything that a selection allocates. `tiles`
-- allows the same, and never holds a whole row. All three must select the same tokens.
-- bytes_peak is the most memory in use during the first selection, by the allocator's
-- count; us is the median time of the others.
--
--   ./kvlab run lua/experiments/10_nsa_memory.lua [--device=cuda] [--set cap=16777216]
local kv = require "kvlab"
local options = require "kvlab.options"
local seeds = require "kvlab.seeds"
local tensor = require "kvlab.tensor.tensor"

local dev = kv.device()
local is_cpu = dev:is_cpu()
local BLOCK, PIECE = 64, 65536

--- Makes the paged index keys of a sequence of n tokens, with its blocks in random order.
local function keys_of(n, dim, seed)
  local blocks = n / BLOCK
  local index = kv.index_cache { device = dev, blocks = blocks, dim = dim,
                                 block_size = BLOCK }
  for first = 0, n - 1, PIECE do
    kv.scope(function()
      local count = math.min(PIECE, n - first)
      local k = kv.randn(dev, "bf16", { count, dim },
        { seed = seeds.derive(seed, 3), offset = first * dim })
      index:append(0, k, kv.arange(dev, "i64", count, first))
    end)
  end
  local _, order = kv.rand("cpu", "f32", { 1, blocks },
    { seed = seeds.derive(seed, 4) }):sort()
  return { index = index, tables = order:to(dev) }
end

local made = {} -- keys of the present length and seed, which vary slowest

local function keys_for(config)
  if made.n ~= config.keys or made.seed ~= config.seed then
    made = { n = config.keys, seed = config.seed }
    collectgarbage()
    made.keys = tensor.lasting(keys_of, config.keys, config.dim, config.seed)
  end
  return made.keys
end

local function indexer_of(config)
  local is_rule = config.way == "rule"
  return kv.indexer { device = dev, topk = config.topk,
    logits_bytes_max = not is_rule and config.cap or nil,
    streaming = config.way == "tiles" }
end

--- Returns the median time of a call in microseconds, by events. It repeats the call at
-- least three times and for 100 ms, but at most 31 times.
local function median_us(fn)
  local times, from, to = {}, dev:open_event(), dev:open_event()
  local start, stream = kv.C.kvl_clock_ns(), dev:stream()
  repeat
    from:record(stream)
    fn()
    to:record(stream)
    times[#times + 1] = from:elapsed_us(to)
  until #times >= 3 and tonumber(kv.C.kvl_clock_ns() - start) > 1e8 or #times >= 31
  from:close()
  to:close()
  return kv.statistics.median(times)
end

local function run(config)
  local keys, rows, n = keys_for(config), config.queries, config.keys
  local call = { cache = keys.index:layer(0), tables = keys.tables, block_size = BLOCK,
    lens = kv.arange(dev, "i32", rows, n - rows + 1), to = "places",
    out = kv.full(dev, "i32", { rows, config.topk }, -77) }
  call.q, call.weights = keys.index:queries(
    kv.randn(dev, "bf16", { rows, config.heads, config.dim },
      { seed = seeds.derive(config.seed, 1) }),
    kv.rand(dev, "f32", { rows, config.heads }, { seed = seeds.derive(config.seed, 2) }))
  local indexer = indexer_of(config)
  local plan = indexer:plan(rows, n, BLOCK)
  dev:sync()
  local before = dev:stats().bytes_live
  dev:reset_peak()
  indexer:select(call)
  local peak = dev:stats().bytes_live_peak - before
  assert(config.way == "rule" or peak <= config.cap, "the selection exceeds `cap`")
  local checksum = call.out:cast("f32"):sum(-1):sum(-1):item()
  assert((made[rows] or checksum) == checksum, "the ways select different tokens")
  made[rows] = checksum
  local us = median_us(function() indexer:select(call) end)
  indexer:free()
  return { bytes_logits = 4 * rows * n, bytes_peak = peak, us = us, rows = plan.rows,
           columns = plan.columns, ns_logit = us * 1e3 / (rows * n) }
end

local WAYS = { "rule", "cap", "tiles" }
local MOST = is_cpu and 128 or 4096

kv.experiment.run {
  name = "10_nsa_memory",
  title = "Selecting tokens in bounded memory",
  grid = {
    { "keys", is_cpu and { 4096, 16384, 65536 } or { 16384, 65536, 262144, 1048576 } },
    { "queries", is_cpu and { 1, 16, 128 } or { 1, 64, 1024, 4096 } },
    { "way", WAYS },
  },
  defaults = { topk = is_cpu and 512 or 2048, heads = is_cpu and 4 or 64,
               dim = is_cpu and 32 or 128, cap = is_cpu and 2 ^ 20 or 2 ^ 26 },
  kinds = kv.experiment.kinds({
    count = { "keys", "queries", "topk", "heads", "cap" },
  }, {
    way = options.one_of(unpack(WAYS)), dim = options.one_of(32, 64, 128),
  }),
  quick = { keys = { 4096 }, queries = { 1, 16 } },
  metrics = { "bytes_logits", "bytes_peak", "us", "rows", "columns", "ns_logit" },
  check = function(config)
    kv.experiment.expect_multiple(config, "keys", BLOCK)
    if config.queries > config.keys then
      error(("queries is %d, expected at most keys = %d"):format(config.queries,
        config.keys), 0)
    end
  end,
  run = function(config) return kv.scope(run, config) end,
  table = {
    { rows = "keys", columns = "way", value = "bytes_peak", where = { queries = MOST },
      format = "%.0f" },
    { rows = "keys", columns = "way", value = "us", where = { queries = MOST },
      format = "%.1f" },
    { rows = "keys", columns = "way", value = "us", where = { queries = 1 },
      format = "%.1f" },
  },
  plot = { x = "keys", y = "bytes_peak", series = "way", panel = "queries", logx = true,
           logy = true, xlabel = "tokens", ylabel = "bytes of a selection",
           title = "Memory of an indexer's selection, by tokens and queries" },
}
