--- What does a long answer cost when only a budget of tokens is held?
--
-- Each sequence reads a prompt and then generates `generate` tokens. Under full attention
-- a step reads all of them, and all of them stay in memory. A policy that evicts holds
-- `tokens` tokens for each layer and KV head, so a step takes the same time at any length
-- (docs/eviction.md).
--
--   ms_first, ms_last  of a step in the first and the last eighth of the text
--   ms_step            the mean over the text
--   tokens_s           generated tokens per second, of all sequences
--   pages_peak         the most pages that were held, and
--   pages_share        of those that the whole text takes
--   bytes_share, held_share, moved_share  what a step reads, holds and moves, beside
--                      dense attention at the end of the text (docs/experiments.md)
--   prompt_ms          of reading all prompts, evictions included
--
-- Weights are random, so the generated text means nothing; only time and memory are
-- measured. Full attention is timed at eight lengths, over random keys and values that
-- were not computed. With steps = 0, an evicting policy generates all of the text.
-- Otherwise it generates `steps` tokens in the first and in the last eighth of the text.
-- What such a step reads, holds and moves is then measured on a shorter text, and divided
-- by what dense attention reads and holds for the whole text.
--
--   ./kvlab run lua/experiments/23_endless.lua
--   ./kvlab run lua/experiments/23_endless.lua --device=cuda --set model=8b
--       --set prompts=8x2K,16x2K --set generate=32768 --set tokens=2048
local costs = require "kvlab.experiment.costs"
local kv = require "kvlab"
local options = require "kvlab.options"
local shapes = require "models.shapes"

local is_cuda = kv.cuda_available()
local WINDOWS = 8 -- of the text
local WARM = 4    -- steps before the clock starts: one makes buffers, one records a graph

local function now_s() return tonumber(kv.C.kvl_clock_ns()) * 1e-9 end

--- Milliseconds of a step, over `steps` of them; ids: of the newest tokens.
local function time_steps(engine, seqs, ids, steps)
  engine.model.device:sync()
  local start = now_s()
  for _ = 1, steps do ids = engine:decode(seqs, ids):argmax() end
  engine.model.device:sync()
  return 1e3 * (now_s() - start) / steps, ids
end

local function warm(engine, seqs, ids)
  for _ = 1, WARM do ids = engine:decode(seqs, ids):argmax() end
  return ids
end

local function new_ids(engine, seqs)
  return kv.full(engine.model.device, "i32", { #seqs }, 1)
end

--- The steps of full attention that are timed in each window.
local function steps_of_full(config) return config.steps > 0 and config.steps or 32 end

--- Full attention: at the middle of each window.
local function run_full(engine, seqs, config)
  local ms, ids = {}, new_ids(engine, seqs)
  local size = config.block_size
  engine.cache.memory:rand_(config.seed)
  for i = 1, WINDOWS do
    local middle = math.floor((i - 0.5) * config.generate / WINDOWS / size) * size
    for _, seq in ipairs(seqs) do
      seq:truncate(0)
      seq:extend(config.context + middle)
    end
    ids = warm(engine, seqs, ids)
    ms[i], ids = time_steps(engine, seqs, ids, steps_of_full(config))
  end
  return ms
end

local function run_evicting(engine, seqs, config)
  local ids, ms = warm(engine, seqs, new_ids(engine, seqs)), {}
  local whole = math.floor((config.generate - WARM) / WINDOWS)
  for i = 1, WINDOWS do
    if config.steps == 0 or i == 1 or i == WINDOWS then
      ms[i], ids = time_steps(engine, seqs, ids,
        config.steps > 0 and config.steps or whole)
    end
  end
  for i = 1, WINDOWS do ms[i] = ms[i] or (ms[1] + ms[WINDOWS]) / 2 end
  return ms
end

--- What a probe counts in one more step, of a text of `length` tokens.
local function observe(engine, seqs, length)
  engine.uses_graphs = false -- a probe looks at every launch
  local probe = kv.probe(engine.attention)
  engine:decode(seqs, new_ids(engine, seqs))
  probe:detach()
  engine.uses_graphs = true
  local seen = probe:metrics()
  for _, name in ipairs(costs.NAMES) do
    seen[name] = seen[name] * seqs[1]:length() / length
  end
  return seen
end

local function mean(list)
  local sum = 0
  for _, x in ipairs(list) do sum = sum + x end
  return sum / #list
end

local function policy_of(config)
  return kv.policy(config.policy, config.policy ~= "full" and
    { tokens = config.tokens, sink = config.sink, recent = config.recent } or nil)
end

local function run(config)
  local count, context = shapes.prompts(config.prompts)
  config.context = context
  local model = kv.experiment.memo({ model = config.model, dtype = config.dtype,
    seed = config.seed }, shapes.open)
  local is_full, size = config.policy == "full", config.block_size
  local text = math.ceil((context + config.generate) / size) + 1
  local held = math.ceil(math.max(context, config.tokens) / size) + 1
  local room = text + math.ceil((WARM + steps_of_full(config)) / size)
  local engine = model:engine { graph = true, max_seqs = count, block_size = size,
    chunk = math.min(context, 2048), format = config.cache, policy = policy_of(config),
    tables = is_full and "one" or config.tables, max_blocks = is_full and room or held,
    blocks = is_full and count * room or (count + 1) * held }
  local cache, seqs = engine.cache, {}
  local each = is_full and 1 or cache.pages / cache.blocks
  local start = now_s()
  for i = 1, count do
    local tokens = {}
    for t = 1, context do tokens[t] = (t * 7919 + i * 104729) % model.config.vocab end
    seqs[i] = engine:sequence()
    engine:prefill(seqs[i], tokens)
  end
  model.device:sync()
  local prompt_ms = 1e3 * (now_s() - start)
  local ms = (is_full and run_full or run_evicting)(engine, seqs, config)
  local peak = cache:stats().pages_peak
  local seen = observe(engine, seqs, is_full and seqs[1]:length() + 1
    or context + config.generate)
  cache:close()
  local ms_step = mean(ms)
  return costs.add({ ms_first = ms[1], ms_last = ms[WINDOWS], ms_step = ms_step,
    tokens_s = 1e3 * count / ms_step, prompt_ms = prompt_ms, pages_peak = peak,
    pages_share = peak / (count * text * each) }, seen)
end

local function check(config)
  local policy = policy_of(config)
  shapes.prompts(config.prompts)
  if config.policy ~= "full" and (not policy.evict or policy.prompt_only
      or policy.keep_decoded) then
    error(("policy is %s, which %s, expected full or one that holds its budget while it "
      .. "decodes"):format(config.policy, policy.evict and "keeps all decoded tokens"
      or "evicts nothing"), 0)
  end
  local least = WINDOWS * (WARM + math.max(config.steps, 1))
  if config.generate < least or config.steps < 0 then
    error(("generate is %s and steps %s, expected steps >= 0, and %d * (steps + %d) "
      .. "tokens or more to generate"):format(config.generate, config.steps, WINDOWS,
      WARM), 0)
  end
end

kv.experiment.run {
  name = "23_endless",
  title = "What does a long answer cost when only a budget of tokens is held?",
  grid = {
    { "prompts", is_cuda and { "8x2K", "16x2K" } or { "2x256" } },
    { "policy", { "full", "streaming", "tova", "h2o" } },
  },
  defaults = { model = is_cuda and "8b" or "small", dtype = is_cuda and "bf16" or "f32",
               cache = is_cuda and "bf16" or "f32", block_size = 16, tables = "head",
               tokens = is_cuda and 2048 or 256, generate = is_cuda and 32768 or 1024,
               sink = 1, recent = 2, steps = is_cuda and 128 or 16 },
  kinds = kv.experiment.kinds({
    count = { "block_size", "tokens", "generate" }, whole = { "sink", "recent", "steps" },
    text = { "model" }, dtype = { "dtype" }, format = { "cache" },
  }, {
    tables = options.one_of("layer", "head"),
  }),
  quick = { model = "small", prompts = { "2x64" }, tokens = 64, generate = 256,
            steps = 2 },
  proportions = { "pages_share", "bytes_share", "held_share" },
  metrics = { "tokens_s", "ms_step", "ms_first", "ms_last", "pages_share", "pages_peak",
              "bytes_share", "held_share", "moved_share", "prompt_ms" },
  check = check, run = run,
  table = function(rows, settings)
    local list = {}
    for _, value in ipairs { "tokens_s", "ms_first", "ms_last", "pages_share",
                             settings.over } do
      list[#list + 1] = kv.table.pivot(rows, { rows = "policy", columns = "prompts",
        value = value, format = value:find "share$" and "%.4f" or "%.2f",
        caption = value })
    end
    return list
  end,
}
