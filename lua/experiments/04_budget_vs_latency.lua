--- How does a budget change the latency of a decoded token? The latency is measured for
-- several contexts and budgets, with KV on the device, or in host memory behind a ring or
-- a hot cache.
--
-- Quest selects blocks for each KV head. With resident KV they are read from device
-- memory. The ring loads them from host memory at every step. The hot cache loads only
-- those that its slots do not hold already. Queries drift slowly from step to step, as
-- the queries of a text do, so that each selection resembles the one before. Times come
-- from events of the device.
--
--   ./kvlab run lua/experiments/04_budget_vs_latency.lua [--device=cuda | --link-gbps=2]
local kv = require "kvlab"
local options = require "kvlab.options"

local dev = kv.device()
local is_cpu = dev:is_cpu()

local function run(config)
  local policy = config.budget == 0 and kv.policy "full"
    or kv.policy("quest", { tokens = config.budget, sink = 1, recent = 2 })
  local size, offload = config.block_size, nil
  if config.memory ~= "resident" then
    offload = { slots = 4 }
    if config.memory == "hot" then
      offload.evict = config.evict
      local blocks = config.budget == 0 and math.ceil(config.context / size) + 1
        or math.ceil(config.budget / size)
      offload.hot_slots = math.max(4, math.ceil(config.hot_ratio * blocks)) + 64
    end
  end
  local s = kv.synthetic { shape = config.shape, layers = config.layers,
    context = config.context, block_size = size, seed = config.seed,
    decode_policy = policy, offload = offload }
  local seq = s:sequence(config.context - config.steps - 8)
  local times, before = {}, 0
  for step = 1, config.steps do
    s:turn(config.drift, step)
    if step == config.warm_up + 1 then
      before = offload and s.cache.tier:bytes() or 0
      local hot = offload and s.cache.tier.hot
      if hot then hot:reset_counts() end
    end
    s:begin_decode { seq }
    local us = s:time(function() s:layers_of_step() end)
    if step > config.warm_up then times[#times + 1] = us end
  end
  local metrics = { us_layer = kv.statistics.median(times) / s.layers,
                    bytes_layer = 0, hit_rate = 0 }
  if offload then
    local engine, tokens = s.cache.tier, config.steps - config.warm_up
    if engine.hot then
      local stats = engine.hot:stats()
      metrics.hit_rate, metrics.bytes_layer = stats.hit_rate, stats.bytes
    else
      metrics.bytes_layer = engine:bytes() - before
    end
    metrics.bytes_layer = metrics.bytes_layer / (tokens * s.layers)
  end
  s:close()
  return metrics
end

kv.experiment.run {
  name = "04_budget_vs_latency",
  title = "The latency of a decoded token by context and budget",
  grid = {
    { "context", is_cpu and { 4096, 8192, 16384, 32768 }
                         or { 4096, 8192, 16384, 32768, 65536, 131072 } },
    { "memory", { "resident", "ring", "hot" } },
    { "budget", { 256, 512, 1024, 2048, 0 } },
  },
  defaults = { shape = kv.synthetic.default_shape(dev), layers = is_cpu and 2 or 4,
               block_size = 16, steps = 24, warm_up = 8, drift = 0.1, hot_ratio = 2,
               evict = "lru" },
  kinds = kv.experiment.kinds({
    count = { "context", "layers", "block_size", "steps" },
    whole = { "budget", "warm_up" }, not_negative = { "drift" },
    positive = { "hot_ratio" },
  }, {
    shape = kv.synthetic.SHAPE, memory = options.one_of("resident", "ring", "hot"),
  }),
  quick = { context = { 4096, 8192 }, budget = { 512, 1024, 0 } },
  metrics = { "us_layer", "bytes_layer", "hit_rate" },
  check = function(config)
    kv.eviction(config.evict)
    if config.warm_up >= config.steps then
      error(("warm_up is %d, expected less than steps = %d"):format(config.warm_up,
        config.steps), 0)
    elseif config.context <= config.steps + 8 then
      error(("context is %d, expected more than steps + 8 = %d"):format(config.context,
        config.steps + 8), 0)
    end
  end,
  run = run,
  table = {
    { rows = "memory", columns = "context", value = "us_layer", where = { budget = 1024 },
      format = "%.1f" },
    { rows = "memory", columns = "context", value = "us_layer", where = { budget = 0 },
      format = "%.1f" },
    { rows = "budget", columns = "context", value = "hit_rate",
      where = { memory = "hot" }, format = "%.3f" },
  },
  plot = { x = "context", y = "us_layer", series = "budget", panel = "memory",
           logx = true, logy = true, xlabel = "context (tokens)",
           ylabel = "time of a layer (us)",
           title = "Quest on shape {shape}: time of a layer for a decoded token, by"
             .. " context and budget in tokens (0: all)" },
}
