--- How much of the transfer hides behind attention, and which block size and how many
-- slots does that take?
--
-- The experiment computes the last chunk of a prompt whose KV lies in host memory. The
-- history passes through the ring, one block per slot and load, while attention runs over
-- the blocks that were loaded before. Times come from events of the device. The picture
-- shows one such chunk: every load, and the attention that waited for it. With small
-- blocks, the fixed cost of each load and launch dominates; with large blocks, nothing
-- hides the first load and the last attention. So the curve of the time over the block
-- size has the shape of a U.
--
-- Without a GPU, --link-gbps=55 --link-us=10 emulates a link.
--
--   ./kvlab run lua/experiments/03_overlap.lua [--device=cuda | --link-gbps=2]
local json = require "kvlab.json"
local kv = require "kvlab"

local dev = kv.device()
local is_cpu = dev:is_cpu()
local REPEATS = 5

local function run(config)
  local s = kv.synthetic { shape = config.shape, layers = config.layers,
    context = config.context + config.chunk, block_size = config.block_size,
    chunk = config.chunk, seed = config.seed,
    offload = { slots = config.slots, slot_blocks = 1 } }
  local engine, best = s.cache.tier, nil
  local seq = s:sequence(config.context)
  local passes = s.layers * config.context / config.block_size
  for i = 1, REPEATS do
    engine:trace(2 * (passes + s.layers))
    local us = s:time(function() s:prefill(seq, config.chunk) end)
    if i > 1 and (not best or us < best.us) then
      best = kv.timeline.overlap(engine:spans())
      best.us = us
    end
    seq:truncate(config.context)
  end
  local bytes = passes * engine.bytes_block
  s:close()
  return { us = best.us, load_us = best.load_us, compute_us = best.compute_us,
           hidden = best.hidden, idle_us = best.idle_us, bytes = bytes,
           gb_s = bytes / best.load_us * 1e-3,
           over_bound = best.us / math.max(best.load_us, best.compute_us) }
end

--- Returns the spans (loads and attention) of one chunk through three layers.
local function trace_chunk(config)
  local s = kv.synthetic { shape = config.shape, layers = 3,
    context = config.context + config.chunk, block_size = config.drawn_block_size,
    chunk = config.chunk, offload = { slots = 4, slot_blocks = 1 } }
  local seq = s:sequence(config.context)
  s:prefill(seq, config.chunk)
  seq:truncate(config.context)
  s.cache.tier:trace(1000)
  s:prefill(seq, config.chunk)
  local spans, own = s.cache.tier:spans(), 0
  for _, span in ipairs(spans) do -- a layer begins with attention over the chunk itself
    if span.layer < 0 then span.layer, own = own, own + 1 end
  end
  s:close()
  return spans
end

--- Writes the spans as lines of JSON next to the results, so that they are there even if
-- no picture can be drawn.
local function write_spans(settings)
  local lines = {}
  for i, span in ipairs(trace_chunk(settings)) do
    lines[i] = json.encode(span, { order = { "kind", "slot", "layer", "blocks",
                                             "begin_us", "end_us" } })
  end
  require("kvlab.files").write(settings.out .. "/spans.jsonl",
    table.concat(lines, "\n") .. "\n")
end

local function picture(config)
  return kv.timeline.plot(trace_chunk(config), { file = "timeline",
    title = ("A chunk of %d tokens over %d of history, blocks of %d, 4 slots"):format(
      config.chunk, config.context, config.drawn_block_size) })
end

kv.experiment.run {
  name = "03_overlap",
  title = "How much of the transfer hides under attention?",
  grid = {
    { "block_size", { 16, 64, 256, 1024, 4096 } },
    { "slots", { 1, 2, 4, 8 } },
  },
  defaults = { shape = kv.synthetic.default_shape(dev), layers = is_cpu and 2 or 4,
               context = is_cpu and 8192 or 32768, chunk = is_cpu and 256 or 4096,
               drawn_block_size = is_cpu and 1024 or 4096 },
  kinds = kv.experiment.kinds({
    count = { "block_size", "slots", "layers", "context", "chunk", "drawn_block_size" },
  }, {
    shape = kv.synthetic.SHAPE,
  }),
  quick = { block_size = { 256, 1024 }, slots = { 1, 4 } },
  metrics = { "us", "load_us", "compute_us", "hidden", "idle_us", "bytes", "gb_s",
              "over_bound" },
  check = function(config)
    kv.experiment.expect_multiple(config, "context", config.block_size)
  end,
  run = run,
  teardown = write_spans,
  table = {
    { rows = "slots", columns = "block_size", value = "us", format = "%.0f" },
    { rows = "slots", columns = "block_size", value = "hidden", format = "%.3f" },
    { rows = "slots", columns = "block_size", value = "over_bound", format = "%.3f" },
  },
  plot = function(rows)
    local config = rows[1].config
    local lines = kv.plot.lines(rows, { x = "block_size", y = "us", series = "slots",
      logx = true, logy = true, xlabel = "block size (tokens)",
      ylabel = "one chunk through all layers (us)",
      title = "Time of a prefill chunk, by block size and slots of the ring" })
    lines.file = "us_by_block_size"
    local hidden = kv.plot.lines(rows, { x = "block_size", y = "hidden", series = "slots",
      logx = true, xlabel = "block size (tokens)",
      ylabel = "share of the transfer under attention",
      title = "Share of the transfer that attention hides, by block size and slots" })
    hidden.file = "hidden_by_block_size"
    return { picture(config), lines, hidden }
  end,
}
