--- Some policies are equally accurate in the usual exam (01_recall). At which level of
-- difficulty do their accuracies differ?
--
-- The small recall model (lua/models/recall) takes exams of five levels under each
-- policy, with budgets in blocks, and with full attention for comparison:
--
--   plain    32 needles per context; a question needs one of them
--   crowded  128 needles per context: more than any of the budgets has blocks, and most
--            blocks hold a needle, so many blocks look like the one with the answer
--   row      32 needles, and all questions one after the other on one sequence, so a
--            policy that selects early must have selected the blocks for all of them
--   chain    32 needles in chains of 4: the answer to a lookup is the key of the next,
--            and the last answer counts
--   sum      128 needles, 8 of which (mostly in 8 different blocks) are looked up and
--            added; the sum counts
--
-- The model has learned to look up one needle. It can neither chain lookups nor add
-- numbers by itself: the exam asks for each needle in turn, on one sequence, puts the
-- model's answer into the next question, and adds. So chain and sum show whether every
-- lookup of several was right, and an accuracy of p in one of them becomes about p^4 or
-- p^8. output_error and attention_mass show how well a policy serves attention that is
-- spread over many blocks at once; mass_oracle is the bound of attention_mass for this
-- number of blocks. Pictures have bytes_share on the x axis (see 01_recall), with the
-- Pareto front.
--
-- Policies that evict tokens for good (tova, snapkv) hold their budget of the prompt.
--
--   ./kvlab run lua/experiments/17_levels.lua [--set policy=quest,tova] [--set budget=8]
local costs = require "kvlab.experiment.costs"
local exam = require "models.recall.exam"
local kv = require "kvlab"
local options = require "kvlab.options"

local LEVELS = {
  plain = { needles = 32, question = "decode" },
  crowded = { needles = 128, question = "decode" },
  row = { needles = 32, question = "row" },
  chain = { needles = 32, question = "chain", hops = 4 },
  sum = { needles = 128, question = "sum", hops = 8 },
}
local NAMES = { "plain", "crowded", "row", "chain", "sum" }

local function policy_of(config)
  return kv.policy(config.policy, config.policy ~= "full" and
    { blocks = config.budget, sink = 1, recent = 2, min_blocks = 0 } or nil)
end

local function exam_of(config)
  local level = LEVELS[config.level]
  return { context = config.context, prompts = config.prompts, needles = level.needles,
           question = level.question, hops = level.hops, block_size = config.block_size,
           seed = config.seed, tables = policy_of(config).evict and "head" or nil }
end

local function run(config)
  local policy = policy_of(config)
  local sitting = kv.experiment.memo(exam_of(config), exam.open)
  local accuracy, _, probe = sitting:ask(policy, kv.probe)
  local metrics = probe:metrics()
  costs.add(metrics, metrics, sitting:stats())
  metrics.accuracy, metrics.questions = accuracy, sitting.questions * config.prompts
  metrics.note = kv.policy.note(policy,
    math.ceil(config.context / config.block_size), config.block_size)
  return metrics
end

kv.experiment.run {
  name = "17_levels",
  title = "At which level of difficulty do policies separate?",
  grid = {
    { "level", NAMES },
    { "policy", kv.policy.names("decode", { "full", "mass_oracle", "oracle" }) },
    { "budget", { 4, 5, 8, 16 },
      when = function(config) return config.policy ~= "full" end },
  },
  defaults = { context = 2048, prompts = 8, block_size = 16 },
  kinds = kv.experiment.kinds({
    count = { "budget", "context", "prompts", "block_size" },
  }, {
    level = options.one_of(unpack(NAMES)),
  }),
  quick = { prompts = 1, budget = { 8 } },
  metrics = { "accuracy", "attention_mass", "output_error", "bytes_share", "held_share",
              "moved_share", "bytes_peak", "bytes_evicted", "bytes_moved", "questions" },
  proportions = { accuracy = "questions", "attention_mass", "bytes_share",
                  "held_share" },
  check = function(config) exam.check(exam_of(config)) end, run = run,
  table = {
    { rows = "policy", columns = "level", value = "accuracy", format = "%.3f",
      where = { budget = 5 } },
    { rows = "policy", columns = "level", value = "accuracy", format = "%.3f",
      where = { budget = 8 } },
    { rows = "policy", columns = "level", value = "attention_mass", format = "%.3f",
      where = { budget = 8 } },
    { rows = "policy", columns = "budget", value = "bytes_share", format = "%.3f",
      where = { level = "plain" } },
    { front = "accuracy", over = "bytes_share", format = "%.3f",
      where = { level = "plain" } },
  },
  plot = {
    { x = "bytes_share", y = "accuracy", series = "policy", panel = "level", logx = true,
      front = true, ylabel = "exact-match accuracy",
      title = "Recall model, {context} tokens: accuracy over {over}" },
    { x = "budget", y = "accuracy", series = "policy", panel = "level", logx = true,
      xlabel = "blocks asked for", ylabel = "exact-match accuracy",
      title = "Recall model, {context} tokens: accuracy by budget" },
  },
}
