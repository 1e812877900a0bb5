-- Which heads need the whole text?
--
-- A model is asked for needles while one KV head of one layer holds only the first tokens
-- and the newest ones (StreamingLLM), and all other heads hold everything. lost is the
-- share of answers that this costs, against dense attention. If much is lost without a
-- head, DuoAttention calls it a retrieval head. The policy duo reads the results of this
-- experiment. The model is the small recall model (lua/models/recall), or a language
-- model, whose layers and heads have to be named:
--
--   ./kvlab run lua/experiments/24_heads.lua [--device=cuda] [--set context=1024]
--   ./kvlab run 01_recall --set policy=duo --set budget=0.25,0.5
--   ./kvlab run lua/experiments/24_heads.lua --device=cuda --set model=smollm2 \
--     --set prompts=64 --set head=0,1,2 --set layer=$(seq -s, 0 29)
local exam = require "models.recall.exam"
local kv = require "kvlab"
local opener = require "models.open"
local readings = require "models.reading"

local function range(n)
  local list = {}
  for i = 1, n do list[i] = i - 1 end
  return list
end

--- The policy under which one head streams, in a model of so many layers and KV heads.
local function policy_of(config, layers, heads)
  if config.layer >= layers or config.head >= heads then
    error(("layer is %d and head %d, expected less than %d and %d, those of %s"):format(
      config.layer, config.head, layers, heads, config.model), 0)
  end
  local whole = {}
  for i = 1, layers * heads do
    whole[i] = i - 1 == config.layer * heads + config.head and 0 or 1
  end
  return kv.policy("streaming", { ratio = kv.from(kv.device(), "f32", { layers, heads },
    whole), sink = config.sink, recent = config.recent })
end

--- The recall model with its contexts. ask(policy) returns the share of right answers.
local function open_recall(o)
  local sitting = exam.open { tables = "head", context = o.context, prompts = o.prompts,
    needles = o.needles, block_size = o.block_size, seed = o.seed }
  return { engine = sitting.engine, questions = sitting.questions * o.prompts,
           ask = function(policy) return (sitting:ask(policy)) end,
           close = function() sitting:close() end }
end

--- A model of text with texts that have a needle each.
local function open_text(o)
  local loaded = kv.experiment.memo({ model = o.model, dtype = "bf16", seed = o.seed },
    opener.for_experiment)
  local task = kv.task("needle", { length = o.context })
  local engine = loaded.model:engine { block_size = o.block_size, tables = "head",
    max_seqs = math.min(o.prompts, 64),
    blocks = readings.blocks(task, o.prompts, o.block_size, true),
    max_blocks = math.ceil(task.length / o.block_size) + 2 }
  local reading = readings.open { engine = engine, tokenizer = loaded.tokenizer,
    task = task, examples = o.prompts, seed = o.seed }
  return { engine = engine, questions = o.prompts,
           ask = function(policy) return reading:ask(policy).score end,
           close = function() engine.cache:close() end }
end

local function open(o)
  local opened = (o.model == "recall" and open_recall or open_text)(o)
  opened.dense = opened.ask(kv.policy "full")
  return opened
end

local LAYERS, HEADS = 4, 2 -- of the recall model

local function check(config)
  kv.policy("streaming", { tokens = config.context, sink = config.sink,
                           recent = config.recent })
  if config.sink + config.recent >= config.context then
    error(("sink is %d and recent %d, expected less together than context = %d, since "
      .. "else no head streams"):format(config.sink, config.recent, config.context), 0)
  elseif config.model == "recall" then
    if config.layer >= LAYERS or config.head >= HEADS then
      error(("layer is %d and head %d, expected fewer than the %d layers and %d KV heads "
        .. "of the model"):format(config.layer, config.head, LAYERS, HEADS), 0)
    end
    exam.check { context = config.context, prompts = config.prompts,
                 needles = config.needles, block_size = config.block_size }
  end
end

local function run(config)
  local o = {}
  for _, name in ipairs { "model", "context", "prompts", "needles", "block_size",
                          "seed" } do
    o[name] = config[name]
  end
  local opened = kv.experiment.memo(o, open)
  local c = opened.engine.model.config
  local accuracy = opened.ask(policy_of(config, c.layers, c.kv_heads))
  return { accuracy = accuracy, lost = opened.dense - accuracy,
           questions = opened.questions }
end

kv.experiment.run {
  name = "24_heads",
  title = "Which heads need the whole text?",
  grid = { { "layer", range(LAYERS) }, { "head", range(HEADS) } },
  defaults = { model = "recall", context = 2048, prompts = 8, needles = 32,
               block_size = 16, sink = 1, recent = 8 },
  kinds = kv.experiment.kinds {
    count = { "context", "prompts", "needles", "block_size" },
    whole = { "layer", "head", "sink", "recent" }, text = { "model" },
  },
  quick = { context = 512, prompts = 2 },
  proportions = { accuracy = "questions" },
  metrics = { "lost", "accuracy", "questions" },
  check = check, run = run,
  table = { { rows = "layer", columns = "head", value = "lost", format = "%.3f" } },
  plot = function(rows)
    return kv.plot.heat_maps(rows, { x = "head", y = "layer", value = "lost",
      title = "Answers that are lost if a head streams" })
  end,
}
