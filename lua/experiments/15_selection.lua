--- Which blocks does a policy choose, and how many does it choose again at the next step?
--
-- The small recall model (lua/models/recall) reads a context and is then asked for some
-- of its needles; a question and its answer are six tokens (Q k1 k2 A v1 v2). kv.record
-- records every selection of every layer and KV head. The metric kept is the share of a
-- step's blocks that the step before read too; the higher it is, the more a cache of
-- blocks helps. One map shows the blocks that each policy chooses in one layer, another
-- shows one policy's scores in every layer and KV head.
--
--   ./kvlab run lua/experiments/15_selection.lua [--device=cuda] [--set layer=0]
--                                                [--set scored=h2o_blocks]
local costs = require "kvlab.experiment.costs"
local kv = require "kvlab"
local llama = require "models.llama"
local options = require "kvlab.options"
local prompts = require "models.recall.prompts"

local model -- loaded at its first use
local LAYERS = 4 -- of the model
local QUERY = 6 -- tokens of a question and its answer

local function policy_of(config)
  return kv.policy(config.policy, config.policy ~= "full" and
    { ratio = config.budget, sink = 1, recent = 2, min_blocks = 0 } or nil)
end

--- Decodes the questions of a prompt under a policy. Returns the record and the probe.
local function play(config)
  model = model or llama.load(kv.paths.root .. "/lua/models/recall")
  local policy = policy_of(config)
  local tokens = config.context + QUERY * config.questions
  local engine = model:engine { policy = policy, block_size = config.block_size,
    blocks = math.ceil(tokens / config.block_size), max_seqs = 1 }
  local prompt = prompts.draw(config.context, config.needles, config.questions,
    (config.seed or 0) + 1) -- rows that summarise repeats have no seed
  local seq = engine:sequence()
  engine:prefill(seq, prompt.tokens)
  local probe = kv.probe(engine.attention)
  local record = kv.record(engine.attention)
  for _, query in ipairs(prompt.queries) do
    for _, list in ipairs { query.ask, query.answer } do
      for _, token in ipairs(list) do engine:decode({ seq }, { token }) end
    end
  end
  engine:finish(seq)
  engine.cache:close()
  return record, probe
end

local records = {} -- the records of this run, by policy

--- Returns the two maps: the selections of all policies in one layer, and one policy's
-- scores.
local function draw(rows)
  local panels, pictures = {}, {}
  for _, row in ipairs(rows) do
    local config = row.config
    -- a row of an earlier run has no record, so its policy plays again
    local record = records[config.policy] or play(config)
    if config.policy ~= "full" then
      local map = record:selection_map { layers = { config.layer } }
      for head, panel in ipairs(map.panels) do
        panel.title = ("%s, KV head %d"):format(config.policy, head - 1)
        panels[#panels + 1] = panel
      end
      map.panels = panels
      map.title = ("Recall model, %d tokens, budget %g: blocks chosen in layer %d")
        :format(config.context, config.budget, config.layer)
      pictures[1] = map
    end
    if config.policy == config.scored then pictures[2] = record:score_map() end
  end
  return pictures
end

kv.experiment.run {
  name = "15_selection",
  title = "Which blocks does a policy choose, and how many of them again?",
  grid = {
    { "policy", { "full", "oracle", "quest", "block_mean", "gsa_on_device", "h2o_blocks",
                  "streaming_blocks", "random" } },
  },
  defaults = { context = 2048, needles = 32, questions = 8, budget = 0.1,
               block_size = 16, layer = 2, scored = "quest" },
  kinds = kv.experiment.kinds({
    count = { "context", "needles", "questions", "block_size" }, share = { "budget" },
  }, {
    layer = options.within(0, LAYERS - 1),
  }),
  quick = { context = 512, questions = 4 },
  metrics = { "kept", "blocks_read", "attention_mass", "output_error", "bytes_share",
              "held_share", "moved_share" },
  check = function(config)
    kv.policy(config.scored)
    prompts.check(config.context, config.needles)
    if policy_of(config).evict then
      error(("policy is %s, which evicts tokens, expected one that selects blocks")
        :format(config.policy), 0)
    end
  end,
  run = function(config)
    local record, probe = play(config)
    records[config.policy] = records[config.policy] or record
    local metrics, seen = record:metrics(), probe:metrics()
    for _, name in ipairs { "attention_mass", "output_error" } do
      metrics[name] = seen[name]
    end
    costs.add(metrics, seen)
    metrics.note = kv.policy.note(policy_of(config),
      math.ceil(config.context / config.block_size), config.block_size)
    return metrics
  end,
  table = {
    { rows = "policy", value = "kept", format = "%.3f" },
    { rows = "policy", value = "attention_mass", format = "%.3f" },
    { rows = "policy", value = "bytes_share", format = "%.3f" },
  },
  plot = draw,
}
