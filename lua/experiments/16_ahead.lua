--- Does a decode step still wait for blocks if the blocks that it will probably select
-- are loaded before it begins?
--
-- GSA with means selects blocks of a sequence every `refresh` steps. KV lies in host
-- memory behind a hot cache, and a new selection needs blocks that are not in the cache.
-- With prefetch_ahead n, GSA scores the blocks n steps before the new selection, with the
-- queries of that step, and requests the best ones; they are loaded during the steps
-- between. The direction of queries changes by `drift` radians per step, so the more
-- steps lie between, the more the selection differs from the expected one. stall_share is
-- the share of a step that is spent waiting, compared with the same steps with KV on the
-- device. missed_bytes were loaded while a step waited, ahead_bytes before it;
-- wasted_share is the share of ahead_bytes that no step used.
--
--   ./kvlab run lua/experiments/16_ahead.lua [--device=cuda]
--
-- Besides attention, a layer does the other work of a layer of Llama-8B. On a GPU it
-- multiplies by as many weights. On the CPU it takes us_layer in modelled time, and the
-- links are emulated. One microsecond of the model is a thousand microseconds of the
-- machine's clock, so attention itself and other work of the machine hardly count. The
-- transfer of a block takes as long as that of a block of Llama-8B.
local kv = require "kvlab"

local dev = kv.device()
local is_cpu = dev:is_cpu()
local SLOWER = is_cpu and 1000 or 1
local LINKS = is_cpu and { 4, 16, 55 } or { 0 } -- GB/s; 0: the device's own link
local LAYER_ROWS, HIDDEN = 53248, 4096 -- a layer's weights, as one matrix

--- Returns a function that does the work of a layer besides attention.
local function other_work(config)
  if not is_cpu then
    local weights = kv.randn(dev, "bf16", { LAYER_ROWS, HIDDEN }, { seed = 1 })
    local x = kv.randn(dev, "bf16", { 1, HIDDEN }, { seed = 2 })
    local y = kv.tensor(dev, "bf16", { 1, LAYER_ROWS })
    return function() x:matmul_t(weights, y) end
  end
  -- a copy to the host takes time on the stream, and no other transfer goes that way
  local bytes = math.ceil(config.us_layer * SLOWER * config.bytes_us)
  local near, far = kv.zeros(dev, "u8", { bytes }), kv.pinned(dev, "u8", { bytes })
  return function() far:copy_(near) end
end

--- Returns the mean time of a step in microseconds, and the hot cache's statistics.
local function time_steps(config, is_resident)
  local blocks = math.ceil(config.ratio * config.context / config.block_size)
  local s = kv.synthetic { shape = config.shape, layers = config.layers,
    context = config.context, block_size = config.block_size, seed = config.seed,
    offload = not is_resident
      and { hot_slots = math.ceil(config.hot_ratio * blocks) + 64, evict = config.evict }
      or nil,
    decode_policy = kv.policy("gsa", { scores = "mean", ratio = config.ratio,
      refresh = config.refresh, prefetch_ahead = config.prefetch_ahead }) }
  s.attention.hooks = { attention_begin = other_work(config) }
  local steps = config.periods * config.refresh
  local seq = s:sequence(config.context - steps - config.refresh - 8)
  local hot = not is_resident and s.cache.tier.hot
  local function decode(from, to)
    for step = from, to do
      s:turn(config.drift, step)
      s:decode { seq }
    end
  end
  decode(1, config.refresh) -- fills the hot cache, which was empty
  if hot then hot:reset_counts() end
  local us = s:time(function() decode(config.refresh + 1, config.refresh + steps) end)
  local stats = hot and hot:stats()
  s:close()
  return us / steps / SLOWER, stats
end

--- Returns fn(config, ...), run over an emulated link of config.link_gbps; on a GPU, over
-- the device's own link.
local function over_link(config, fn, ...)
  if not is_cpu then return fn(config, ...) end
  local shape = kv.synthetic.SHAPES[config.shape]
  local block = 4 * shape.kv_heads * shape.head_dim * config.block_size -- bf16
  local gb_s = config.link_gbps * block / 65536 / SLOWER
  config.bytes_us = gb_s * 1000
  kv.check(kv.C.kvl_cpu_link(gb_s, 0))
  local results = { pcall(fn, config, ...) }
  local given = kv.command_line
  kv.check(kv.C.kvl_cpu_link(given["link-gbps"] or 0, given["link-us"] or 0))
  config.bytes_us = nil
  if not results[1] then error(results[2], 0) end
  return unpack(results, 2)
end

local function run(config)
  local us, stats = over_link(config, time_steps, false)
  local resident_us = over_link(config, time_steps, true)
  local steps, ahead = config.periods * config.refresh, stats.ahead
  return {
    step_us = us, resident_us = resident_us, stall_share = 1 - resident_us / us,
    hit_rate = stats.hit_rate, missed_bytes = (stats.bytes - ahead.bytes) / steps,
    ahead_bytes = ahead.bytes / steps,
    wasted_share = ahead.bytes > 0 and ahead.wasted_bytes / ahead.bytes or 0,
  }
end

kv.experiment.run {
  name = "16_ahead",
  title = "Does a decode step still wait for blocks that were expected?",
  grid = {
    { "drift", { 0.01, 0.03, 0.1 } },
    { "link_gbps", LINKS },
    { "prefetch_ahead", { 0, 1, 2, 3 } },
  },
  defaults = { shape = kv.synthetic.default_shape(dev), layers = 8,
               context = 32768, block_size = 16, ratio = 0.1, refresh = 4, periods = 6,
               hot_ratio = 2, us_layer = 200, evict = "lru" },
  kinds = kv.experiment.kinds({
    count = { "layers", "context", "block_size", "refresh", "periods" },
    whole = { "prefetch_ahead" }, share = { "ratio" },
    positive = { "hot_ratio", "us_layer" }, not_negative = { "drift", "link_gbps" },
  }, {
    shape = kv.synthetic.SHAPE,
  }),
  quick = { drift = { 0.03 }, link_gbps = { LINKS[#LINKS] }, context = 4096,
            periods = 3 },
  metrics = { "stall_share", "step_us", "resident_us", "hit_rate", "missed_bytes",
              "ahead_bytes", "wasted_share" },
  check = function(config)
    kv.eviction(config.evict)
    local steps = (config.periods + 1) * config.refresh + 8
    if config.context <= steps then
      error(("context is %d, expected more than (periods + 1) * refresh + 8 = %d"):format(
        config.context, steps), 0)
    end
  end,
  run = run,
  table = {
    { rows = "prefetch_ahead", columns = "link_gbps", value = "stall_share",
      where = { drift = 0.01 }, format = "%.4f" },
    { rows = "prefetch_ahead", columns = "link_gbps", value = "stall_share",
      where = { drift = 0.03 }, format = "%.4f" },
    { rows = "prefetch_ahead", columns = "link_gbps", value = "stall_share",
      where = { drift = 0.1 }, format = "%.4f" },
    { rows = "prefetch_ahead", columns = "drift", value = "missed_bytes",
      where = { link_gbps = LINKS[#LINKS] }, format = "%.0f" },
    { rows = "prefetch_ahead", columns = "drift", value = "wasted_share",
      where = { link_gbps = LINKS[#LINKS] }, format = "%.3f" },
  },
  plot = { x = "prefetch_ahead", y = "stall_share", series = "drift",
           panel = "link_gbps", xlabel = "prefetch_ahead (steps)",
           ylabel = "share of step time spent waiting",
           title = "Hot cache: waiting of a decode step, by steps loaded ahead" },
}
