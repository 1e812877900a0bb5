--- Which block should leave a hot cache when another one needs its slot?
--
-- KV lies in host memory behind a hot cache, and one sequence after the other decodes
-- under a policy that reads `blocks` blocks of each KV head. The hot cache has slots for
-- `slots` times as many blocks. Evictions are compared on the same steps:
--
-- - questions: the small trained model (lua/models/recall) reads contexts with hidden
--   needles and answers 16 questions about each, one after the other on one sequence
-- - drift: random keys, and queries whose direction changes by `drift` radians from step
-- to step
--
-- hit_rate is the share of the selected blocks that a step finds in its hot cache.
-- fetched_share is the number of blocks that were fetched, in a step or ahead of it, for
-- each selected one. optimal is not an eviction of kvlab: it is what an eviction that
-- knows all later selections (Belady's) would reach, without fetching ahead. gsa scores
-- at every 4th step and fetches ahead; only with gsa does predicted_score differ from
-- last_score. Nothing depends on the device or its speed.
--
--   ./kvlab run lua/experiments/22_evictions.lua [--set evict=lru,mine]
local kv = require "kvlab"
local exam = require "models.recall.exam"
local options = require "kvlab.options"
local sorted = require "kvlab.sorted"

local SLOTS = "slots, as a multiple of the blocks that a step reads"

local POLICIES = {
  quest = function(blocks) return kv.policy("quest", { blocks = blocks }) end,
  gsa = function(blocks)
    return kv.policy("gsa", { blocks = blocks, scores = "mean", refresh = 4 })
  end,
}

--- Collects what the steps of one sequence after the other select: lists of the cache's
-- blocks, for each layer and KV head.
local function collector()
  local self = { of = {} }
  function self.observe(_, _, ctx, selection)
    local heads, n, list = ctx.kv_heads, selection:size(2), selection:list()
    local blocks_of = ctx.tables:list()
    for head = 0, heads - 1 do
      local key = ctx.layer * heads + head
      local row, blocks = selection:size(1) > 1 and head or 0, {}
      for i = row * n + 1, (row + 1) * n do
        if list[i] >= 0 then blocks[#blocks + 1] = blocks_of[list[i] + 1] end
      end
      self.of[key] = self.of[key] or {}
      table.insert(self.of[key], blocks)
    end
  end
  return self
end

--- Options of exam.open.
local function exam_of(config, offload)
  return { context = config.context, prompts = config.prompts, needles = 32,
           block_size = config.block_size, seed = config.seed, question = "row",
           offload = offload }
end

--- Decodes the questions of every context.
local function decode_questions(config, policy, offload, seen)
  local sitting = exam.open(exam_of(config, offload))
  local engine = sitting.engine
  engine:use_policy(policy, sitting.seqs)
  engine.attention.probe = seen
  for i, prompt in ipairs(sitting.prompts) do
    local fork = sitting.seqs[i]:fork()
    for _, query in ipairs(prompt.queries) do
      for t = 1, 4 do engine:decode({ fork }, { query.ask[t] }) end
      for t = 1, 2 do engine:decode({ fork }, { query.answer[t] }) end
    end
    fork:close()
  end
  return engine.cache
end

local function decode_drift(config, policy, offload, seen)
  local s = kv.synthetic { shape = "small", context = config.context + config.steps + 8,
    block_size = config.block_size, seed = config.seed, decode_policy = policy,
    offload = offload }
  s.attention.probe = seen
  local seq = s:sequence(config.context)
  for step = 1, config.steps do
    s:turn(config.drift, step)
    s:decode { seq }
  end
  return s.cache
end

local TRACES = { questions = decode_questions, drift = decode_drift }

--- The fewest blocks that must be fetched so that each step finds its own in `slots`
-- slots: what is needed last leaves first.
local function fewest_fetches(steps, slots)
  local next_use, needed = {}, {}
  for i = #steps, 1, -1 do
    needed[i] = {}
    for _, block in ipairs(steps[i]) do
      needed[i][block] = next_use[block] or math.huge
      next_use[block] = i
    end
  end
  local present, count, fetched = {}, 0, 0
  for i, blocks in ipairs(steps) do
    for _, block in ipairs(blocks) do
      if not present[block] then count, fetched = count + 1, fetched + 1 end
      present[block] = needed[i][block]
    end
    while count > slots do
      local last, latest = nil, -1
      for block, use in pairs(present) do
        if not needed[i][block] and use > latest then last, latest = block, use end
      end
      present[last] = nil
      count = count - 1
    end
  end
  return fetched
end

local function run(config)
  local slots = math.ceil(config.slots * config.blocks)
  local is_bound, seen = config.evict == "optimal", collector()
  local cache = TRACES[config.trace](config, POLICIES[config.policy](config.blocks),
    { hot_slots = slots, evict = not is_bound and config.evict or nil }, seen)
  local stats = cache.tier.hot:stats()
  cache:close()
  local selected, fetched = stats.hits + stats.misses, stats.misses + stats.ahead.brought
  local hit_rate = stats.hit_rate
  if is_bound then
    fetched = 0
    for _, steps in pairs(seen.of) do fetched = fetched + fewest_fetches(steps, slots) end
    hit_rate = 1 - fetched / selected
  end
  return { hit_rate = hit_rate, fetched_share = fetched / selected, selected = selected }
end

local function check(config)
  if config.slots < 1 then
    error(("slots is %g, expected 1 or more"):format(config.slots), 0)
  elseif config.evict ~= "optimal" then
    kv.eviction(config.evict)
  end
  if config.trace == "questions" then exam.check(exam_of(config)) end
end

kv.experiment.run {
  name = "22_evictions",
  title = "Which block should leave a hot cache?",
  grid = {
    { "trace", { "questions", "drift" } },
    { "policy", { "quest", "gsa" } },
    { "slots", { 1.25, 1.5, 2, 3, 4 } },
    { "evict", { "lru", "lfu", "last_score", "predicted_score", "optimal" } },
  },
  when = function(config)
    return config.evict ~= "predicted_score" or config.policy == "gsa"
  end,
  defaults = { context = 2048, prompts = 4, blocks = 16, block_size = 16, drift = 0.1,
               steps = 384 },
  kinds = kv.experiment.kinds({
    count = { "context", "prompts", "blocks", "block_size", "steps" },
    not_negative = { "drift" }, positive = { "slots" },
  }, {
    trace = options.one_of(unpack(sorted.keys(TRACES))),
    policy = options.one_of(unpack(sorted.keys(POLICIES))),
  }),
  quick = { context = 512, prompts = 1, slots = { 1.5, 3 }, blocks = 8, steps = 48 },
  metrics = { "hit_rate", "fetched_share", "selected" },
  check = check, run = run,
  table = {
    { rows = "evict", columns = "slots", value = "hit_rate",
      where = { trace = "questions", policy = "quest" }, format = "%.3f" },
    { rows = "evict", columns = "slots", value = "hit_rate",
      where = { trace = "drift", policy = "quest" }, format = "%.3f" },
    { rows = "evict", columns = "slots", value = "fetched_share",
      where = { trace = "questions", policy = "gsa" }, format = "%.3f" },
    { rows = "evict", columns = "slots", value = "fetched_share",
      where = { trace = "drift", policy = "gsa" }, format = "%.3f" },
  },
  plot = {
    { x = "slots", y = "hit_rate", series = "evict", panel = "trace",
      where = { policy = "quest" }, ymax = 1, xlabel = SLOTS,
      ylabel = "share of the selected blocks that are present",
      title = "Hot cache under Quest: hit rate by eviction" },
    { x = "slots", y = "fetched_share", series = "evict", panel = "trace",
      where = { policy = "gsa" }, ymin = 0, xlabel = SLOTS,
      ylabel = "fetched blocks for each selected one",
      title = "Hot cache under GSA: fetched blocks by eviction" },
  },
}
