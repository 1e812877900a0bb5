--- Which policies keep what a language model can do with text, at which budget?
--
-- A real language model reads texts with dense attention and then decodes under each
-- policy: the next tokens of a text (perplexity), and the questions and answers of tasks
-- (docs/tasks.md). Every policy gets the same texts. With question=prompt, questions are
-- read densely too. Policies that watch the prompt (h2o_blocks, snapkv_blocks) read the
-- texts again, and so do those that evict tokens of it for good (tova, snapkv), whose
-- budget is what they hold of the text.
--
-- score is the share of right answers, from 0 to 1; for perplexity, the share of tokens
-- that are the model's likeliest ones. score_low and score_high are the interval of its
-- mean over texts (95 %; docs/experiments.md says which). texts is how many there are,
-- and zero_one how many of them have a score that can only be 0 or 1. gap is the loss
-- against dense attention on the same texts, with an interval over texts, too: in the
-- score, or for perplexity in -log p of a token (log_p is the mean of log p). The gap
-- says more than the scores, because their intervals include how much the texts differ.
-- Tables show bytes_share (01_recall) in brackets, and pictures have it on the x axis,
-- with the Pareto front. bytes_share counts all decoded tokens, those of questions
-- included.
--
--   ./kvlab get smollm2
--   ./kvlab run lua/experiments/18_text_budget.lua --set model=smollm2 [--device=cuda]
--       [--set text=FILE] [--set length=4096] [--set examples=16] [--set task=needle]
--
-- model: a name that ./kvlab get knows, a folder of Hugging Face or a GGUF file. text: a
-- file for perplexity, or kjv, the King James Bible of Debian's package bible-kjv-text.
-- format: what K and V are kept in (f32, f16, bf16, f8e4m3 or int8; model: the model's
-- dtype). split: even, or the name of a split that divides the budget among layers or
-- heads (lua/splits), which is then their mean. reuse_steps, reuse_layers: with n,
-- policies select in every n-th step or layer. heads: a folder or a file of results of
-- 24_heads for this model, which the policy duo needs. Without a model here, a small one
-- with random weights reads made-up sentences (model = sample). It only serves as a test:
-- its answers are never right.
local costs = require "kvlab.experiment.costs"
local downloads = require "kvlab.downloads"
local files = require "kvlab.files"
local kv = require "kvlab"
local opener = require "models.open"
local options = require "kvlab.options"
local readings = require "models.reading"
local writers = require "kvlab.task.writer"

local TASKS = { "perplexity", "needle", "needle_multikey", "needle_multivalue",
                "needle_multiquery", "variable_tracking", "common_words",
                "frequent_words" }

-- ---- models and texts -----------------------------------------------------------------

--- A file of made-up sentences, so that a sample has something to read.
local function made_up(out)
  local path = out .. "/sentences.txt"
  files.make_folder(out)
  files.write(path, table.concat(writers.new(1):noise(4000), " "))
  return path
end

--- The task of a row with its options.
local function task_of(config, out)
  local o = { length = config.length, chat = config.task ~= "perplexity" and config.chat
    or nil }
  if config.task == "perplexity" then
    o.decode, o.text = config.decode, config.text
    if config.model == "sample" and config.text == "kjv" then o.text = made_up(out) end
  elseif config.task == "common_words" and config.length < 4096 then
    o.often, o.seldom = 10, 1 -- 300 entries of the list would not fit
  end
  return kv.task(config.task, o)
end

local out -- the folder of the results

--- The texts of a task, read by the model, and how well it does with dense attention.
local function open(o)
  local evicts = o.tables ~= "one"
  local loaded = kv.experiment.memo({ model = o.model, dtype = o.dtype, seed = o.seed },
    opener.for_experiment)
  local task = task_of(o, out)
  local engine = loaded.model:engine { block_size = o.block_size,
    format = o.format ~= "model" and o.format or nil, tables = o.tables,
    max_seqs = math.min(o.examples, 64),
    blocks = readings.blocks(task, o.examples, o.block_size, evicts),
    max_blocks = math.ceil(task.length / o.block_size) + 2 }
  local reading = readings.open { engine = engine, tokenizer = loaded.tokenizer,
    task = task, examples = o.examples, seed = o.seed, question = o.question }
  return { reading = reading, dense = reading:ask(kv.policy "full"),
           close = function() engine.cache:close() end }
end

-- ---- a row ----------------------------------------------------------------------------

--- What each text loses against dense attention: its mean and interval. Dense attention
-- itself loses exactly nothing.
local function gap(policy, dense, result)
  if policy == "full" then return 0 end
  local lost = {}
  for i, own in ipairs(result.each) do
    local all = dense.each[i]
    lost[i] = own.nll and own.nll - all.nll or all.score - own.score
  end
  return (result.nll and kv.statistics.interval or kv.statistics.difference)(lost)
end

--- The result of each text: its score, and its mean log p of a token.
local function each_of(result)
  local each = { score = {}, log_p = result.nll and {} or nil }
  for i, own in ipairs(result.each) do
    each.score[i] = own.score
    if own.nll then each.log_p[i] = -own.nll end
  end
  return each
end

local function policy_of(config)
  if config.policy == "full" then return kv.policy "full" end
  if config.policy == "duo" and config.heads == "" then
    error("policy duo: heads is not set, expected results of 24_heads for the model", 0)
  end
  return kv.policy(config.policy, { ratio = config.budget, sink = 1, recent = 2,
    min_blocks = 0, split = config.split ~= "even" and config.split or nil,
    reuse_steps = config.reuse_steps, reuse_layers = config.reuse_layers,
    heads = config.policy == "duo" and config.heads or nil })
end

local KEYS = { "model", "dtype", "task", "length", "decode", "examples", "text",
               "question", "chat", "block_size", "format", "seed" }

local function run(config, settings)
  out = settings.out
  local keys = {}
  for _, name in ipairs(KEYS) do keys[name] = config[name] end
  local policy = policy_of(config)
  keys.tables = policy.evict and "head" or "one"
  local sitting = kv.experiment.memo(keys, open)
  local start = kv.C.kvl_clock_ns()
  local result, probe = sitting.reading:ask(policy, kv.probe)
  local metrics = probe:metrics()
  costs.add(metrics, metrics, sitting.reading:stats())
  metrics.seconds = tonumber(kv.C.kvl_clock_ns() - start) * 1e-9
  metrics.note = kv.policy.note(policy,
    math.ceil(config.length / config.block_size), config.block_size)
  metrics.score, metrics.score_low, metrics.score_high = result.score, result.low,
    result.high
  metrics.gap, metrics.gap_low, metrics.gap_high = gap(config.policy,
    sitting.dense, result)
  metrics.texts, metrics.zero_one = #result.each, result.zero_one
  metrics.each = each_of(result)
  if result.nll then
    metrics.perplexity, metrics.log_p = math.exp(result.nll), -result.nll
    metrics.log_p_low = result.nll_high and -result.nll_high
    metrics.log_p_high = result.nll_low and -result.nll_low
    metrics.perplexity_low = result.nll_low and math.exp(result.nll_low)
    metrics.perplexity_high = result.nll_high and math.exp(result.nll_high)
  end
  return metrics
end

-- ---- tables and pictures --------------------------------------------------------------

--- The tasks of the rows, those with or without a perplexity.
local function tasks_of(rows, has_perplexity)
  local list = {}
  for _, name in ipairs(kv.table.distinct(rows, "task")) do
    if (name == "perplexity") == has_perplexity then list[#list + 1] = name end
  end
  return list
end

local function tables(rows, settings)
  local over = settings.over
  local list, by = {}, ""
  if rows[1] and rows[1].config.model == "sample" then by = " by random weights" end
  local function add(task, value)
    list[#list + 1] = kv.table.pivot(rows, { rows = "policy", columns = "budget",
      value = value, beside = over, where = { task = task }, format = "%.3f",
      caption = ("%s of %s%s (%s)"):format(value, task, by, over) })
  end
  for _, task in ipairs(tasks_of(rows, true)) do
    add(task, "perplexity")
    add(task, "gap")
  end
  for _, task in ipairs(tasks_of(rows, false)) do add(task, "score") end
  for _, task in ipairs(kv.table.distinct(rows, "task")) do
    local front = task == "perplexity" and "log_p" or "score"
    list[#list + 1] = kv.table.front(rows, { front = front, over = over,
      axes = { "policy", "budget" }, where = { task = task }, format = "%.3f",
      caption = ("Pareto front of %s%s"):format(task, by) })
  end
  return list
end

local function pictures(rows, settings)
  local over = settings.over
  local texts, list = kv.table.where(rows, { task = "perplexity" }), {}
  local function add(of, y, o)
    if #of == 0 then return end
    local config = of[1].config
    local view = { x = over, y = y, series = "policy", logx = true,
      xlabel = costs.label(over), title = ("%s, %d tokens: %s over %s"):format(
        config.model, config.length, o.ylabel, costs.words(over)) }
    for key, value in pairs(o) do view[key] = value end
    list[#list + 1] = kv.plot.lines(of, view)
    list[#list].file = y .. "_by_" .. over
  end
  local asked = {}
  for _, row in ipairs(rows) do
    if row.config.task ~= "perplexity" then asked[#asked + 1] = row end
  end
  add(texts, "perplexity", { logy = true, ylabel = "perplexity" })
  add(texts, "log_p", { front = true, ylabel = "log p of a token" })
  add(texts, "gap", { ylabel = "extra -log p of a token, against dense attention" })
  add(asked, "score", { panel = "task", front = true, ylabel = "score" })
  return list
end

-- All but duo, which needs `heads`.
local policies = {}
for _, name in ipairs(kv.policy.names("decode", { "full", "mass_oracle", "oracle" })) do
  if name ~= "duo" then policies[#policies + 1] = name end
end

kv.experiment.run {
  name = "18_text_budget",
  title = "Which policies keep what a language model can do with text?",
  grid = {
    { "task", TASKS },
    { "policy", policies },
    { "budget", { 0.05, 0.1, 0.2 },
      when = function(config) return config.policy ~= "full" end },
  },
  defaults = { model = downloads.find "smollm2" and kv.task.has_kjv() and "smollm2"
                 or "sample", text = "kjv", length = 2048, decode = 64, examples = 8,
               block_size = 16, question = "decode", chat = false, dtype = "bf16",
               format = "model", split = "even", heads = "", reuse_steps = 1,
               reuse_layers = 1 },
  kinds = kv.experiment.kinds({
    count = { "length", "decode", "examples", "block_size", "reuse_steps",
      "reuse_layers" }, share = { "budget" },
    yes_or_no = { "chat" }, text = { "model", "text", "split", "heads" },
    dtype = { "dtype" }, format_or_model = { "format" },
  }, {
    task = options.one_of(unpack(TASKS)), question = options.one_of("decode", "prompt"),
  }),
  quick = { task = { "perplexity", "needle" }, budget = { 0.1 }, length = 512,
            decode = 24, examples = 4 },
  proportions = { score = "zero_one", "attention_mass", "bytes_share", "held_share" },
  metrics = { "score", "gap", "bytes_share", "held_share", "moved_share", "bytes_peak",
              "bytes_evicted", "bytes_moved", "bytes_read", "blocks_read",
              "attention_mass", "output_error", "texts", "zero_one", "seconds" },
  check = policy_of, run = run, table = tables, plot = pictures,
}
