--- Which block selection keeps a trained model's long-context recall, at which budget?
--
-- A small trained model (lua/models/recall) reads contexts with hidden key-value needles,
-- densely. Then each policy decodes the answers to questions about them, with a budget of
-- blocks per KV head. Every question is asked on its own fork of the prefilled context:
-- read by decoding, or, with question=prompt, as the end of the prompt (densely).
-- Policies that watch the prompt (h2o, snapkv) prefill their contexts anew.
--
--   ./kvlab run lua/experiments/01_recall.lua [--device=cuda] [--set prompts=16]
--                                             [--set memory=ring] [--set question=prompt]
--
-- memory: resident (KV on the device), ring or hot (KV in host memory, read through a
-- ring or a hot cache); the accuracies are the same.
local experiment = require "kvlab.experiment"
local kv = require "kvlab"
local llama = require "models.llama"
local prompts = require "models.recall.prompts"

local QUERIES = 16 -- asked of each context, as one batch of forks

--- Options of the offload engine for a kind of memory.
local function offload_of(memory, slots)
  if memory == "resident" then return nil end
  if memory == "ring" then return { slots = 4 } end
  if memory == "hot" then return { slots = 4, hot_slots = slots } end
  error(("memory is %s, expected resident, ring or hot"):format(tostring(memory)), 0)
end

local function read_prompts(loaded)
  for i, prompt in ipairs(loaded.prompts) do
    loaded.seqs[i] = loaded.engine:sequence()
    loaded.engine:prefill(loaded.seqs[i], prompt.tokens)
  end
end

--- Contexts of one length, prefilled once for all policies and budgets.
local function prefill(s, config)
  local context = config.context
  if s.loaded and s.loaded.context == context then return s.loaded end
  if s.loaded then s.loaded.engine.cache:close() end
  s.model = s.model or llama.load(kv.paths.root .. "/lua/models/recall")
  local blocks = math.ceil((context + 8) / config.block_size)
  local loaded = { context = context, prompts = {}, seqs = {} }
  loaded.engine = s.model:engine {
    blocks = config.prompts * blocks + 2 * QUERIES, block_size = config.block_size,
    max_seqs = QUERIES, max_blocks = blocks,
    offload = offload_of(config.memory, QUERIES * blocks),
  }
  for i = 1, config.prompts do
    loaded.prompts[i] = prompts.draw(context, config.needles, QUERIES, config.seed + i)
  end
  read_prompts(loaded)
  s.loaded = loaded
  return loaded
end

--- Decode with a policy from now on. One that watches the prompt reads it again.
local function use_policy(loaded, policy)
  if not policy.watches_prompt then
    loaded.engine:use_policy(policy, loaded.seqs)
    return
  end
  loaded.engine:use_policy(policy)
  for _, seq in ipairs(loaded.seqs) do seq:close() end
  read_prompts(loaded)
end

--- One token of every question.
local function column(queries, i)
  local tokens = {}
  for n, query in ipairs(queries) do tokens[n] = query.ask[i] end
  return tokens
end

--- The first three tokens of every question, on its fork. Decode steps are timed.
local function read_questions(engine, forks, queries, question, times)
  if question == "prompt" then
    for i, fork in ipairs(forks) do
      engine:prefill(fork, { unpack(queries[i].ask, 1, 3) })
    end
    return
  end
  for i = 1, 3 do
    local start = kv.C.kvl_clock_ns()
    engine:decode(forks, column(queries, i))
    kv.device():sync()
    times[#times + 1] = tonumber(kv.C.kvl_clock_ns() - start) * 1e-3
  end
end

--- Ask all questions of one prompt: how many were answered right. Probed while the
-- answer is given.
local function ask(engine, seq, queries, question, probe, times)
  local forks = {}
  for i = 1, #queries do forks[i] = seq:fork() end
  engine.attention.probe = nil
  read_questions(engine, forks, queries, question, times)
  engine.attention.probe = probe
  local first = engine:decode(forks, column(queries, 4)):argmax():list()
  local second = engine:decode(forks, first):argmax():list()
  local right = 0
  for i, query in ipairs(queries) do
    if first[i] == query.answer[1] and second[i] == query.answer[2] then
      right = right + 1
    end
    forks[i]:close()
  end
  return right
end

local function median(list)
  table.sort(list)
  return list[math.ceil(#list / 2)] or 0 / 0
end

--- full and oracle first, then every other policy that selects in decode.
local function policies()
  local names = { "full", "oracle" }
  for _, name in ipairs(kv.policy.names "decode") do
    if name ~= "full" and name ~= "oracle" then names[#names + 1] = name end
  end
  return names
end

local function run(config, settings)
  local loaded = prefill(settings, config)
  local engine, right, times = loaded.engine, 0, {}
  use_policy(loaded, kv.policy.open(config.policy, config.policy ~= "full" and
    { ratio = config.budget, sink = 1, recent = 2, min_blocks = 0 } or nil))
  local probe = kv.probe.attach(engine.attention)
  for i, prompt in ipairs(loaded.prompts) do
    right = right + ask(engine, loaded.seqs[i], prompt.queries, config.question, probe,
      times)
  end
  local metrics = probe:metrics()
  metrics.accuracy = right / (QUERIES * config.prompts)
  metrics.step_us = median(times)
  return metrics
end

experiment.run {
  name = "01_recall",
  title = "Which block selection keeps long-context recall, at which budget?",
  grid = {
    { "context", { 512, 1024, 2048, 4096 } },
    { "policy", policies() },
    { "budget", { 0.02, 0.05, 0.1, 0.3, 1 } },
  },
  defaults = { prompts = 8, needles = 32, block_size = 16, memory = "resident",
               question = "decode" },
  quick = { context = { 512, 1024 }, prompts = 2 },
  when = function(config) return (config.policy == "full") == (config.budget == 1) end,
  metrics = { "accuracy", "attention_mass", "output_error", "blocks_read", "bytes_read",
              "step_us" },
  run = run,
  table = { rows = "policy", columns = "budget", value = "accuracy",
            where = { context = 4096 }, format = "%.3f" },
  plot = { x = "budget", y = "accuracy", series = "policy", panel = "context",
           logx = true, xlabel = "budget (share of blocks)",
           ylabel = "exact-match accuracy" },
}
