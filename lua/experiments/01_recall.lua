--- Which block selection keeps a trained model's long-context recall, at which budget?
--
-- A small trained model (lua/models/recall) reads contexts with hidden key-value needles,
-- with dense attention. Then it decodes the answers to questions about them under each
-- policy, with a budget of blocks per KV head. Every question is asked on its own fork of
-- the prefilled context. The question itself is decoded too; with question=prompt, it is
-- read with dense attention as the end of the prompt. Policies that watch the prompt
-- (h2o_blocks, snapkv_blocks) prefill their own contexts. Policies that evict tokens for
-- good (tova, snapkv) do so, too, and their budget limits what they hold of the prompt;
-- name them with --set policy=tova.
--
-- A budget says how many blocks a policy may select. bytes_share says what it reads: the
-- bytes of K and V that its attention reads, and those that it reads to select, as a
-- share of the bytes of all K and V. Tables show bytes_share in brackets, and pictures
-- have it on the x axis, with the Pareto front: the highest accuracy for so many bytes.
-- Results are marked if the budget has no effect, because sink and recent alone are as
-- much or more, and if a policy does not say what it reads.
--
-- full is dense attention. mass_oracle selects the blocks with most of the attention's
-- mass: for the same queries, no selection of as many blocks keeps more of it. oracle
-- selects the blocks with the largest q.k: no summary of keys can find larger ones.
-- Neither bounds the accuracy. Both read all keys, so at equal bytes a policy can beat
-- them.
--
--   ./kvlab run lua/experiments/01_recall.lua [--device=cuda] [--set prompts=16]
--                                             [--set memory=ring] [--set question=prompt]
--       [--set unit=tokens --set budget=64,128,256] [--set repeats=5]
--       [--set split=adaptive]
--
-- unit: ratio (a budget is a share of the context's blocks), tokens or blocks. split:
-- even, or the name of a split that divides the budget among layers or heads
-- (lua/splits); the budget is then their mean. memory: resident (KV on the device), ring
-- or hot (KV in host memory, read through a ring or a hot cache); all of them give the
-- same accuracies. tables: of the cache where a policy evicts, by layer or by head.
-- held_share and moved_share are what is held and moved (docs/experiments.md);
-- --over=held_share shows one of them in the place of bytes_share. format: how K and V
-- are stored (f32, f16, bf16, f8e4m3 or int8; latents also as f8_latent).
--
-- model: recall, or recall_latent, whose attention is over latents (MLA) and has an
-- indexer that was trained with it (DSA). Policies that read values are refused there.
-- Options of the policy nsa: granularity (block or token), index (key, random or
-- model) and index_pool. So --set model=recall_latent --set policy=nsa --set
-- granularity=token --set index=model is the model's own selection. reuse_steps and
-- reuse_layers: with n, policies select in every n-th step or layer; questions in a row
-- on one sequence (--set question=row) show the effect of the steps between.
local costs = require "kvlab.experiment.costs"
local kv = require "kvlab"
local exam = require "models.recall.exam"
local options = require "kvlab.options"

local exams = exam.OPTIONS
local KINDS = kv.experiment.kinds({ count = { "context", "prompts", "needles",
  "block_size", "index_pool", "reuse_steps", "reuse_layers" },
  not_negative = { "budget" }, text = { "split" }, format = { "format" } },
  { unit = options.one_of("ratio", "tokens", "blocks"),
    memory = options.one_of("resident", "ring", "hot"), question = exams.question,
    model = exams.model, tables = exams.tables,
    granularity = options.one_of("block", "token"),
    index = options.one_of("key", "random", "model") })

--- Returns the cache's `offload` options for a kind of memory.
local function offload_of(memory, slots)
  if memory == "resident" then return nil end
  if memory == "ring" then return { slots = 4 } end
  return { slots = 4, hot_slots = slots }
end

--- Returns the options of exam.open.
local function exam_of(config)
  local o = { offload = offload_of(config.memory, exam.QUERIES
    * math.ceil((config.context + 8) / config.block_size)) }
  for _, name in ipairs { "context", "prompts", "needles", "block_size", "seed",
                          "question", "format", "model" } do
    o[name] = config[name]
  end
  if kv.policy(config.policy).evict then o.tables = config.tables end
  return o
end

local function policy_of(config)
  local given = config.policy ~= "full" and
    { [config.unit] = config.budget, sink = 1, recent = 2, min_blocks = 0,
      reuse_steps = config.reuse_steps, reuse_layers = config.reuse_layers,
      split = config.split ~= "even" and config.split or nil } or nil
  if config.policy == "nsa" then
    given.granularity, given.index = config.granularity, config.index
    given.index_pool = config.index_pool
    if config.granularity == "token" then given.sink, given.recent = 0, 0 end
  end
  return kv.policy(config.policy, given)
end

local function check(config) exam.check(exam_of(config), policy_of(config)) end

local function run(config)
  local policy = policy_of(config)
  -- contexts are read once for all policies and budgets
  local sitting = kv.experiment.memo(exam_of(config), exam.open)
  local accuracy, step_us, probe = sitting:ask(policy, kv.probe)
  local metrics = probe:metrics()
  metrics.questions = sitting.questions * config.prompts
  metrics.note = kv.policy.note(policy,
    math.ceil(config.context / config.block_size), config.block_size)
  metrics.accuracy, metrics.step_us = accuracy, step_us
  costs.add(metrics, metrics, sitting:stats())
  return metrics
end

kv.experiment.run {
  name = "01_recall",
  title = "Which block selection keeps long-context recall, at which budget?",
  grid = {
    { "context", { 512, 1024, 2048, 4096 } },
    { "policy", kv.policy.names("decode", { "full", "mass_oracle", "oracle" }) },
    { "budget", { 0.02, 0.05, 0.1, 0.3 },
      when = function(config) return config.policy ~= "full" end },
  },
  defaults = { prompts = 8, needles = 32, block_size = 16, memory = "resident",
               question = "decode", unit = "ratio", format = "bf16",
               split = "even", tables = "head", model = "recall",
               granularity = "block", index = "key", index_pool = 1, reuse_steps = 1,
               reuse_layers = 1 },
  kinds = KINDS,
  quick = { context = { 512, 1024 }, prompts = 2 },
  proportions = { accuracy = "questions", "attention_mass", "bytes_share",
                  "held_share" },
  metrics = { "accuracy", "attention_mass", "output_error", "blocks_read", "bytes_read",
              "bytes_share", "held_share", "moved_share", "bytes_peak", "bytes_evicted",
              "bytes_moved", "step_us", "questions" },
  check = check, run = run,
  table = {
    { rows = "policy", columns = "budget", value = "accuracy", beside = "bytes_share",
      where = { context = 4096 }, format = "%.3f" },
    { front = "accuracy", over = "bytes_share", where = { context = 4096 },
      format = "%.3f" },
  },
  plot = {
    { x = "bytes_share", y = "accuracy", series = "policy", panel = "context",
      logx = true, front = true, ylabel = "exact-match accuracy",
      title = "Recall model: accuracy over {over}" },
    { x = "bytes_share", y = "output_error", series = "policy", panel = "context",
      logx = true, ylabel = "relative error of the output",
      title = "Recall model: error of attention over {over}" },
    { x = "budget", y = "accuracy", series = "policy", panel = "context", logx = true,
      xlabel = "budget asked for", ylabel = "exact-match accuracy",
      title = "Recall model: accuracy by the budget that a policy is given" },
  },
}
