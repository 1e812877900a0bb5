--- How far ahead, in which order and over which link must blocks be fetched, so that no
-- step waits for them? Blocks of earlier turns of a conversation lie in a store, and each
-- new turn needs them. The experiment runs in modelled time, with the cost model of
-- Llama-8B on one H100.
--
--   ./kvlab run lua/experiments/06_prefetch.lua [--set late=skip] [--set requests=2000]
--
-- When a conversation's next turn comes, its blocks are no longer on the device, only in
-- the store. Requests queue for admission to the batch (max_seqs). With late=wait, a step
-- waits for the blocks of a request that it admits; with late=skip, other requests go
-- first. With prefetch_ahead 0, blocks are fetched when a request is admitted; with n,
-- they are fetched as soon as the token budgets of the next n steps will reach the
-- request. max_pending_prefetch is how many fetches may wait for a worker.
local kv = require "kvlab"
local options = require "kvlab.options"

local function rows_of(config)
  return kv.experiment.memo({ requests = config.requests, seed = config.seed,
    rate = config.requests_s, turns = 5, think_s = config.think_s,
    input_tokens = config.input_tokens }, kv.trace.generate)
end

local function run(config)
  local stats = kv.replay.run(rows_of(config),
    kv.replay.cost(nil, config), config,
    { blocks = config.blocks, store_blocks = math.huge })
  local link, asked = stats.store, stats.blocks_asked
  return {
    stall_share = stats.stall_share, stall_ms = stats.stall_us / 1e3,
    hit_rate = stats.hit_rate, device_hit_rate = stats.blocks_shared / asked,
    ttft_mean_ms = stats.ttft_mean_us / 1e3, ttft_p50_ms = stats.ttft_p50_us / 1e3,
    ttft_p99_ms = stats.ttft_p99_us / 1e3, tpot_ms = stats.tpot_mean_us / 1e3,
    in_time = stats.slo_met, busy_s = stats.busy_us / 1e6,
    link_share = link.us_busy / (stats.busy_us + stats.stall_us + stats.idle_us),
    pending_peak = link.pending_peak, refused = link.full,
    queued_ms = link.us_queued / 1e3 / math.max(1, link.completed),
  }
end

local PICK = { late = "wait", max_pending_prefetch = 64 }

local function picked(more)
  local where = {}
  for key, value in pairs(PICK) do where[key] = value end
  for key, value in pairs(more) do where[key] = value end
  return where
end

kv.experiment.run {
  name = "06_prefetch",
  title = "Stalls and hits by how far ahead, in which order and over which link",
  grid = {
    { "late", { "wait", "skip" } },
    { "link_gbps", { 55, 4, 2 } },
    { "max_pending_prefetch", { 2, 64 } },
    { "prefetch_ahead", { 0, 1, 2, 4, 16 } },
    { "priority", { "queue_position", "fifo", "shortest_transfer", "deadline",
                    "expected_reuse" } },
  },
  defaults = { requests = 800, requests_s = 10, think_s = 30, input_tokens = 3000,
               blocks = 850, link_us = 100, max_seqs = 12, max_tokens = 4096,
               prefetch_workers = 4, slowdown = 5 },
  kinds = kv.experiment.kinds({
    count = { "max_pending_prefetch", "requests", "input_tokens", "blocks", "max_seqs",
      "max_tokens", "prefetch_workers" },
    whole = { "prefetch_ahead" }, positive = { "link_gbps", "requests_s", "slowdown" },
    not_negative = { "think_s", "link_us" },
  }, {
    late = options.one_of("wait", "skip"),
  }),
  quick = { link_gbps = { 4, 2 }, max_pending_prefetch = { 64 },
            prefetch_ahead = { 0, 2, 16 },
            priority = { "queue_position", "shortest_transfer" } },
  environment = kv.replay.ENVIRONMENT,
  metrics = { "stall_share", "stall_ms", "hit_rate", "ttft_mean_ms", "ttft_p99_ms",
              "in_time" },
  check = kv.replay.check, run = run,
  table = {
    { rows = "prefetch_ahead", columns = "link_gbps", value = "stall_share",
      where = picked { priority = "queue_position" }, format = "%.4f" },
    { rows = "priority", columns = "prefetch_ahead", value = "stall_share",
      where = picked { link_gbps = 2 }, format = "%.4f" },
    { rows = "priority", columns = "prefetch_ahead", value = "ttft_mean_ms",
      where = picked { link_gbps = 2, late = "skip" }, format = "%.1f" },
  },
  plot = { x = "prefetch_ahead", y = "stall_share", series = "priority",
           panel = "link_gbps", where = PICK, xlabel = "prefetch_ahead (steps)",
           ylabel = "share of step time stalled",
           title = "Decode steps that wait for prefetched blocks, by steps ahead" },
}
