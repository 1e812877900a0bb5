--- Does it matter where in the context a needle lies?
--
-- The small recall model (lua/models/recall) reads contexts with a needle in each of 16
-- equal parts, and is asked for every needle under each policy. A map for each policy
-- shows the accuracy by context and by depth (the percentage of the context that lies
-- before the needle). The policy streaming_blocks selects the newest blocks. h2o_blocks
-- adds up attention from the beginning on, so it keeps the oldest ones. Policies that
-- score every block at each step do not depend on the depth. Policies that evict tokens
-- for good (tova, snapkv) hold their budget of the context. A second table shows what
-- each policy read, bytes_share, or with --over=held_share what it held
-- (docs/experiments.md).
--
--   ./kvlab run lua/experiments/14_needle.lua [--device=cuda] [--set policy=quest,tova]
--                                             [--set budget=0.1]
local costs = require "kvlab.experiment.costs"
local exam = require "models.recall.exam"
local kv = require "kvlab"
local options = require "kvlab.options"

local DEPTHS = 8
local NEEDLES = exam.QUERIES -- so that every needle is asked for

local depths = {}
for i = 1, DEPTHS do depths[i] = 100 * (i - 0.5) / DEPTHS end

--- Returns which of the DEPTHS equal parts of the context a depth lies in, from 1.
local function part_of(depth) return math.floor(depth / 100 * DEPTHS) + 1 end

local function policy_of(o)
  return kv.policy(o.policy, o.policy ~= "full" and
    { ratio = o.budget, sink = 1, recent = 2, min_blocks = 0 } or nil)
end

local function exam_of(config)
  return { context = config.context, prompts = config.prompts, needles = NEEDLES,
           even = true, block_size = config.block_size, seed = config.seed,
           tables = policy_of(config).evict and "head" or nil }
end

--- Asks every question of some contexts under one policy. Returns for each part of the
-- context how many questions there were, and how many were answered right.
local function ask(o)
  local sitting = kv.experiment.memo(o.contexts, exam.open) -- for all policies
  local right, asked = {}, {}
  for i = 1, DEPTHS do right[i], asked[i] = 0, 0 end
  local policy = policy_of(o)
  local _, _, probe = sitting:ask(policy, kv.probe, function(query, is_right)
    local part = part_of(100 * (query.needle - 0.5) / NEEDLES)
    asked[part] = asked[part] + 1
    right[part] = right[part] + (is_right and 1 or 0)
  end)
  local blocks = math.ceil(o.contexts.context / o.contexts.block_size)
  return { right = right, asked = asked, seen = probe:metrics(), stats = sitting:stats(),
           note = kv.policy.note(policy, blocks, o.contexts.block_size) }
end

kv.experiment.run {
  name = "14_needle",
  title = "Does it matter where in the context a needle lies?",
  grid = {
    { "context", { 512, 1024, 2048, 4096 } },
    { "policy", { "oracle", "quest", "block_mean", "gsa_on_device", "h2o_blocks",
                  "snapkv_blocks", "streaming_blocks", "random" } },
    { "depth", depths },
  },
  defaults = { prompts = 8, budget = 0.1, block_size = 16 },
  kinds = kv.experiment.kinds({
    count = { "context", "prompts", "block_size" }, share = { "budget" },
  }, {
    depth = options.one_of(unpack(depths)),
  }),
  quick = { context = { 512, 1024 }, prompts = 2, depth = { 6.25, 31.25, 56.25, 93.75 } },
  metrics = { "accuracy", "questions", "bytes_share", "held_share", "moved_share",
              "bytes_peak", "bytes_evicted", "bytes_moved" },
  proportions = { accuracy = "questions", "bytes_share", "held_share" },
  check = function(config) exam.check(exam_of(config)) end,
  run = function(config)
    local part = part_of(config.depth)
    local answers = kv.experiment.memo({ policy = config.policy, budget = config.budget,
      contexts = exam_of(config) }, ask)
    return costs.add({ accuracy = answers.right[part] / answers.asked[part],
      questions = answers.asked[part], note = answers.note }, answers.seen, answers.stats)
  end,
  table = {
    { rows = "policy", columns = "depth", value = "accuracy", format = "%.3f",
      where = { context = 4096 } },
    { rows = "policy", columns = "context", value = "bytes_share", format = "%.3f",
      where = { depth = depths[1] } },
  },
  plot = function(rows)
    return kv.plot.heat_maps(rows, { x = "context", y = "depth", panel = "policy",
      value = "accuracy", low = 0, high = 1, format = "%.2f", file = "needle",
      title = ("Recall model: accuracy by context and depth of the needle, budget %g")
        :format(rows[1].config.budget),
      ylabel = "depth (%)", xlabel = "context (tokens)" })
  end,
}
