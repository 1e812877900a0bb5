-- Which heads need the whole text?
--
-- The small recall model (lua/models/recall) answers while one KV head of one layer holds
-- the first tokens and the newest ones alone (StreamingLLM), and all other heads hold
-- everything. lost is the share of answers that it loses by that, against dense
-- attention. DuoAttention calls those without which much is lost retrieval heads. The
-- policy duo reads the results of this experiment.
--
--   ./kvlab run lua/experiments/24_heads.lua [--device=cuda] [--set context=1024]
--   ./kvlab run 01_recall --set policy=duo --set budget=0.25,0.5
local exam = require "models.recall.exam"
local kv = require "kvlab"

local LAYERS, HEADS = 4, 2 -- of the recall model

local function range(n)
  local list = {}
  for i = 1, n do list[i] = i - 1 end
  return list
end

--- The policy under which one head streams.
local function policy_of(config)
  local whole = {}
  for i = 1, LAYERS * HEADS do
    whole[i] = i - 1 == config.layer * HEADS + config.head and 0 or 1
  end
  return kv.policy("streaming", { ratio = kv.from(kv.device(), "f32", { LAYERS, HEADS },
    whole), sink = config.sink, recent = config.recent })
end

local function open(o)
  local sitting = exam.open(o)
  return { sitting = sitting, dense = (sitting:ask(kv.policy "full")),
           close = function() sitting:close() end }
end

local function run(config)
  local o = { tables = "head" }
  for _, name in ipairs { "context", "prompts", "needles", "block_size", "seed" } do
    o[name] = config[name]
  end
  local opened = kv.experiment.memo(o, open)
  local accuracy = opened.sitting:ask(policy_of(config))
  return { accuracy = accuracy, lost = opened.dense - accuracy,
           questions = opened.sitting.questions * config.prompts,
           held_share = opened.sitting:held_share() }
end

kv.experiment.run {
  name = "24_heads",
  title = "Which heads need the whole text?",
  grid = { { "layer", range(LAYERS) }, { "head", range(HEADS) } },
  defaults = { context = 2048, prompts = 8, needles = 32, block_size = 16, sink = 1,
               recent = 8 },
  quick = { context = 512, prompts = 2 },
  proportions = { accuracy = "questions", "held_share" },
  metrics = { "lost", "accuracy", "held_share", "questions" },
  run = run,
  table = { { rows = "layer", columns = "head", value = "lost", format = "%.3f" } },
  plot = function(rows)
    return kv.plot.heat_maps(rows, { x = "head", y = "layer", value = "lost",
      title = "Recall model: answers that are lost if a head streams" })
  end,
}
