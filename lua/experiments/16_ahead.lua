--- Does a decode step still wait for blocks, when those that it will select are brought
-- before it?
--
-- GSA by means looks at a sequence every `refresh` steps; KV lies in host memory, behind
-- a hot cache. A look wants blocks that are not there. With prefetch_ahead n, what is
-- nearest to the queries of n steps before is asked for then, and comes beside the steps
-- between.
-- Queries drift by `drift` radians a step: what they want is less and less what was
-- expected. Times are the device's own events, against the same steps with KV on the
-- device: stall_share is what of a step is waiting for the link (and for what the hot
-- cache itself costs). missed_bytes came while the step waited, ahead_bytes before it;
-- wasted_share of these no step wanted.
--
--   ./kvlab run lua/experiments/16_ahead.lua [--device=cuda]
--
-- On the CPU links are emulated, in modelled time; on a GPU there is one, its own.
local experiment = require "kvlab.experiment"
local kv = require "kvlab"
local options = require "kvlab.options"
local synthetic = require "kvlab.synthetic"

local dev = kv.device()
local is_cpu = dev:is_cpu()

local function median(list)
  table.sort(list)
  return list[math.ceil(#list / 2)]
end

--- The mean time of a step, from the median of each step of a period of looks, and what
-- crossed the link.
local function time_steps(config, is_resident)
  local blocks = math.ceil(config.ratio * config.context / config.block_size)
  local s = synthetic.new { shape = config.shape, layers = config.layers,
    context = config.context, block_size = config.block_size, seed = config.seed,
    offload = not is_resident
      and { hot_slots = math.ceil(config.hot_ratio * blocks) + 64 } or nil,
    decode_policy = kv.policy.open("gsa", { scores = "mean", ratio = config.ratio,
      refresh = config.refresh, prefetch_ahead = config.prefetch_ahead }) }
  local seq = s:sequence(config.context - config.periods * config.refresh - 8)
  local hot = not is_resident and s.cache.offload.hot
  local times, sum = {}, 0
  for i = 1, config.refresh do times[i] = {} end
  for step = 0, config.periods * config.refresh - 1 do
    s:turn(config.drift, step)
    if step == config.refresh and hot then hot:reset_counts() end -- it was empty
    local us = s:time(function() s:decode { seq } end)
    if step >= config.refresh then table.insert(times[step % config.refresh + 1], us) end
  end
  for _, list in ipairs(times) do sum = sum + median(list) end
  local stats = hot and hot:stats()
  s:close()
  return sum / config.refresh, stats
end

local function run(config)
  if is_cpu then kv.check(kv.C.kvl_cpu_link(config.link_gbps, config.link_us)) end
  local ok, us, stats = pcall(time_steps, config, false)
  local resident_us = ok and time_steps(config, true)
  if is_cpu then
    kv.check(kv.C.kvl_cpu_link(options["link-gbps"] or 0, options["link-us"] or 0))
  end
  if not ok then error(us, 0) end
  local steps, ahead = (config.periods - 1) * config.refresh, stats.ahead
  return {
    step_us = us, resident_us = resident_us, stall_share = 1 - resident_us / us,
    hit_rate = stats.hit_rate, missed_bytes = (stats.bytes - ahead.bytes) / steps,
    ahead_bytes = ahead.bytes / steps,
    wasted_share = ahead.bytes > 0 and ahead.wasted_bytes / ahead.bytes or 0,
  }
end

experiment.run {
  name = "16_ahead",
  title = "Does a decode step still wait for blocks that were expected?",
  grid = {
    { "drift", { 0.02, 0.1, 0.3 } },
    { "link_gbps", is_cpu and { 1, 4, 16 } or { 0 } },
    { "prefetch_ahead", { 0, 1, 2, 3 } },
  },
  defaults = { shape = synthetic.default_shape(dev), layers = is_cpu and 4 or 8,
               context = is_cpu and 16384 or 65536, block_size = 16, ratio = 0.1,
               refresh = 4, periods = 8, hot_ratio = 2, link_us = 10 },
  quick = { drift = { 0.1 }, link_gbps = is_cpu and { 1 } or { 0 }, context = 4096,
            periods = 3 },
  metrics = { "stall_share", "step_us", "resident_us", "hit_rate", "missed_bytes",
              "ahead_bytes", "wasted_share" },
  run = run,
  table = {
    { rows = "prefetch_ahead", columns = "link_gbps", value = "stall_share",
      where = { drift = 0.02 }, format = "%.3f" },
    { rows = "prefetch_ahead", columns = "link_gbps", value = "stall_share",
      where = { drift = 0.1 }, format = "%.3f" },
    { rows = "prefetch_ahead", columns = "drift", value = "missed_bytes",
      format = "%.0f" },
    { rows = "prefetch_ahead", columns = "drift", value = "wasted_share",
      format = "%.3f" },
  },
  plot = { x = "prefetch_ahead", y = "stall_share", series = "drift",
           panel = "link_gbps", xlabel = "prefetch_ahead (steps)",
           ylabel = "share of step time" },
}
