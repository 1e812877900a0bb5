--- How does the order of prefetches change the latency of requests that arrive as they
-- did at a real service? A trace in Mooncake's format is replayed without a model, for
-- each priority: with the cost model of Llama-8B on one H100, and a store behind a link.
--
--   ./kvlab run lua/experiments/09_trace.lua [--set trace=PATH] [--set link_gbps=5]
--
-- The default trace is a generated sample of 200 requests (tools/make_trace.lua).
-- Mooncake's own traces are published with the paper: github.com/kvcache-ai/Mooncake.
-- store_gb: size of the store (0: no limit). rate: how much faster than in the trace the
-- requests come. limit: how many of them are replayed (0: all). A request is in time if
-- its first token comes within slowdown times the time of its prefill on an idle server,
-- plus 100 ms.
--
-- model: a folder with a model (recall: the small one of this project). The time of its
-- steps is measured on --device, the trace is replayed with these times, and the rows
-- contain them.
local kv = require "kvlab"
local options = require "kvlab.options"

local COLUMNS = { "hit_rate", "hit_blocks", "ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms",
                  "in_time", "stall_ms", "stall_share" }

local function read(o)
  local path = o.trace ~= "sample" and o.trace
    or kv.paths.root .. "/lua/experiments/data/conversation_200.jsonl"
  return kv.trace.read(path, o.limit > 0 and o.limit or nil)
end

--- Returns the cost of a step: measured if a model is given, else from the cost model.
local function measure(o)
  local folder, engine = o.model, nil
  if folder == "recall" then folder = kv.paths.root .. "/lua/models/recall" end
  if folder ~= "" then
    local block = kv.trace.BLOCK
    engine = require("models.llama").load(folder):engine { block_size = block,
      blocks = kv.replay.CONTEXT / block + 2, max_seqs = 1 }
  end
  local cost = kv.replay.cost(engine, o)
  if engine then engine.cache:close() end
  return cost
end

local function run(config)
  local cost = kv.experiment.memo({ model = config.model, link_gbps = config.link_gbps,
    link_us = config.link_us }, measure)
  local rows = kv.experiment.memo({ trace = config.trace, limit = config.limit }, read)
  local stats = kv.replay.run(rows, cost, config, {
    blocks = math.floor(config.kv_gb * 1e9 / cost.bytes_block),
    store_blocks = config.store_gb == 0 and math.huge
      or math.floor(config.store_gb * 1e9 / cost.bytes_block) })
  return {
    requests = stats.finished, hit_rate = stats.hit_rate,
    hit_blocks = stats.blocks_shared + stats.blocks_loaded,
    device_hits = stats.blocks_shared, store_hits = stats.blocks_loaded,
    ttft_mean_ms = stats.ttft_mean_us / 1e3, ttft_p50_ms = stats.ttft_p50_us / 1e3,
    ttft_p99_ms = stats.ttft_p99_us / 1e3, tpot_ms = stats.tpot_mean_us / 1e3,
    in_time = stats.slo_met, stall_ms = stats.stall_us / 1e3,
    stall_share = stats.stall_share, steps = stats.steps, busy_s = stats.busy_us / 1e6,
    loaded_gb = stats.store.bytes / 1e9, preemptions = stats.preemptions,
    us_decode_base = cost.us_decode_base, us_token = cost.us_per_token_prefill,
    us_kv_block = cost.us_per_kv_block,
  }
end

kv.experiment.run {
  name = "09_trace",
  title = "A replayed trace: prefix hits, time to first token and stalls by priority",
  grid = {
    { "late", { "wait", "skip" } },
    { "priority", { "queue_position", "fifo", "shortest_transfer", "deadline",
                    "expected_reuse" } },
  },
  defaults = { trace = "sample", model = "", limit = 0, rate = 1, kv_gb = 55,
               store_gb = 0, link_gbps = 5, link_us = 100, max_seqs = 64,
               max_tokens = 8192, prefetch_ahead = 2, prefetch_workers = 4,
               max_pending_prefetch = 64, slowdown = 5 },
  kinds = kv.experiment.kinds({
    count = { "max_seqs", "max_tokens", "prefetch_workers", "max_pending_prefetch" },
    whole = { "limit", "prefetch_ahead" },
    positive = { "rate", "kv_gb", "link_gbps", "slowdown" },
    not_negative = { "store_gb", "link_us" }, text = { "trace", "model" },
  }, {
    late = options.one_of("wait", "skip"),
  }),
  metrics = { "requests", "hit_rate", "hit_blocks", "device_hits", "store_hits",
              "ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "tpot_ms", "in_time",
              "stall_ms", "stall_share", "steps", "busy_s", "loaded_gb", "preemptions",
              "us_decode_base", "us_token", "us_kv_block" },
  environment = not kv.command_line.set.model and kv.replay.ENVIRONMENT or nil,
  check = kv.replay.check, run = run,
  table = function(rows)
    local t = { header = { "late", "priority", unpack(COLUMNS) }, rows = {} }
    for i, row in ipairs(rows) do
      t.rows[i] = { row.config.late, row.config.priority }
      for c, name in ipairs(COLUMNS) do t.rows[i][c + 2] = row.metrics[name] end
    end
    return t
  end,
  plot = { x = "priority", y = "ttft_mean_ms", series = "late", ymin = 0,
           ylabel = "mean time to the first token (ms)",
           title = "Trace of requests: time to the first token, by order of prefetches" },
}
