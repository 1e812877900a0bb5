--- Some policies are equally accurate in the usual exam (01_recall). At which level of
-- difficulty do their accuracies differ?
--
-- The small recall model (lua/models/recall) takes exams of three levels under each
-- policy, with budgets in blocks, and with full attention for comparison:
--
--   plain    32 needles per context; a question needs one of them
--   crowded  128 needles per context: more than any of the budgets has blocks, and most
--            blocks hold a needle, so many blocks look like the one with the answer
--   row      32 needles, and all questions one after the other on one sequence, so a
--            policy that selects early must have selected the blocks for all of them
--
-- The model has learned to look up one needle. It can neither chain lookups nor add
-- numbers. How well a policy serves attention that is spread over many blocks is shown by
-- output_error and attention_mass, whose bound is mass_oracle.
--
--   ./kvlab run lua/experiments/17_levels.lua [--set policy=quest,h2o] [--set budget=8]
local exam = require "models.recall.exam"
local kv = require "kvlab"

local LEVELS = {
  plain = { needles = 32, question = "decode" },
  crowded = { needles = 128, question = "decode" },
  row = { needles = 32, question = "row" },
}

local function run(config)
  local level = LEVELS[config.level]
  if not level then
    error(("level is %s, expected plain, crowded or row"):format(tostring(config.level)),
      0)
  end
  local sitting = kv.experiment.memo({ context = config.context,
    prompts = config.prompts, needles = level.needles, question = level.question,
    block_size = config.block_size, seed = config.seed }, exam.open)
  local policy = kv.policy(config.policy, config.policy ~= "full" and
    { blocks = config.budget, sink = 1, recent = 2, min_blocks = 0 } or nil)
  local accuracy, _, probe = sitting:ask(policy, kv.probe)
  local metrics = probe:metrics()
  metrics.accuracy = accuracy
  return metrics
end

kv.experiment.run {
  name = "17_levels",
  title = "At which level of difficulty do policies separate?",
  grid = {
    { "level", { "plain", "crowded", "row" } },
    { "policy", kv.policy.names("decode", { "full", "mass_oracle", "oracle" }) },
    { "budget", { 4, 8, 16 },
      when = function(config) return config.policy ~= "full" end },
  },
  defaults = { context = 2048, prompts = 8, block_size = 16 },
  quick = { prompts = 1, budget = { 8 } },
  metrics = { "accuracy", "attention_mass", "output_error", "bytes_share" },
  run = run,
  table = {
    { rows = "policy", columns = "level", value = "accuracy", format = "%.3f",
      where = { budget = 8 } },
    { rows = "policy", columns = "level", value = "attention_mass", format = "%.3f",
      where = { budget = 8 } },
  },
  plot = { x = "budget", y = "accuracy", series = "policy", panel = "level", logx = true,
           xlabel = "blocks", ylabel = "exact-match accuracy" },
}
