--- How often is a drafted token right, if tokens are drawn?
--
-- A drafted token is right if the policy and the model choose the same token. When tokens
-- are drawn, both draw with the same random numbers (docs/generation.md), so their tokens
-- differ only because the probabilities under the policy and under full attention differ.
-- For the next tokens of texts, without any drafts:
--
--   common_share     the share that the two distributions have in common, sum of min(p,
--                    q): the most that any method could accept, speculative sampling
--                    included
--   alike_share      draws in which both have the same token
--   likeliest_share  steps in which both have the same likeliest token, as temperature 0
--                    would accept it
--
-- Intervals are over texts.
--
--   ./kvlab run lua/experiments/25_drawn_drafts.lua --set model=smollm2 [--device=cuda]
--       [--set temperature=0.7,1] [--set policy=quest] [--set examples=64]
--
-- model: a name that ./kvlab get knows, a folder of Hugging Face or a GGUF file. text: a
-- file, or kjv, the King James Bible of Debian's package bible-kjv-text. Without a model
-- here, a small one with random weights reads made-up sentences (model = sample), which
-- only serves as a test.
local downloads = require "kvlab.downloads"
local files = require "kvlab.files"
local kv = require "kvlab"
local opener = require "models.open"
local writers = require "kvlab.task.writer"

local out -- the folder of the results

--- A file of made-up sentences, so that a sample has something to read.
local function made_up()
  local path = out .. "/sentences.txt"
  files.make_folder(out)
  files.write(path, table.concat(writers.new(1):noise(4000), " "))
  return path
end

--- The policy of a row; raises for a row that cannot be computed.
local function policy_of(config)
  local policy = kv.policy(config.policy, { ratio = config.ratio, sink = 1, recent = 2,
    min_blocks = 0 })
  if policy.watches_prompt or policy.evict then
    error(("policy is %s, which %s: expected one that only selects while it decodes")
      :format(config.policy, policy.evict and "evicts" or "watches the prompt"), 0)
  end
  return policy
end

--- Decodes the next tokens of all texts on forks: seen(step, logits [texts, vocab]).
local function decode(self, policy, seen)
  local forks = {}
  for i, seq in ipairs(self.seqs) do forks[i] = seq:fork() end
  self.engine:use_policy(policy, forks)
  for step = 1, self.steps do
    local tokens = {}
    for i, example in ipairs(self.examples) do
      tokens[i] = step == 1 and example.ids[#example.ids] or example.target[step - 1]
    end
    kv.scope(function() seen(step, self.engine:decode(forks, tokens)) end)
  end
  for _, fork in ipairs(forks) do self.engine:finish(fork) end
end

--- A model that has read the texts, and what full attention says of their next tokens.
local function open(o)
  local loaded = kv.experiment.memo({ model = o.model, dtype = o.dtype, seed = o.seed },
    opener.for_experiment)
  local text = o.model == "sample" and o.text == "kjv" and made_up() or o.text
  local task = kv.task("perplexity", { length = o.length, decode = o.steps, text = text })
  local own = math.ceil(o.length / o.block_size) + math.ceil(o.steps / o.block_size) + 4
  local engine = loaded.model:engine { block_size = o.block_size, max_seqs = o.examples,
    blocks = o.examples * own } -- forks share the blocks of a text
  local self = { engine = engine, steps = o.steps, seqs = {}, full = {},
                 examples = task:draw(loaded.tokenizer, o.examples, o.seed),
                 close = function() engine.cache:close() end }
  for i, example in ipairs(self.examples) do
    self.seqs[i] = engine:sequence()
    engine:prefill(self.seqs[i], { unpack(example.ids, 1, #example.ids - 1) })
  end
  decode(self, kv.policy "full", function(step, logits)
    self.full[step] = kv.lasting(logits.clone, logits)
  end)
  return self
end

--- Adds 1 / count for each row of two lists that has the same token.
local function add_equal(sums, a, b, count)
  for i, x in ipairs(a:eq(b):list()) do sums[i] = sums[i] + x / count end
end

--- Adds what two batches of scores [texts, vocab] have in common, of `count` of them.
local function compare(sums, p, q, step, config)
  local count, texts, vocab = config.steps, p:size(0), p:size(1)
  add_equal(sums.likeliest_share, p:argmax(), q:argmax(), count)
  p, q = p / config.temperature, q / config.temperature
  for i, x in ipairs(p:softmax():minimum(q:softmax()):sum(-1):list()) do
    sums.common_share[i] = sums.common_share[i] + x / count
  end
  for draw = 0, config.draws - 1 do
    local numbers = {}
    for i = 1, texts do
      numbers[2 * i - 1] = 1000 * config.seed + i
      numbers[2 * i] = (step * config.draws + draw) * vocab
    end
    numbers = kv.from(p.device, "i64", { texts, 2 }, numbers)
    add_equal(sums.alike_share, p:draw(numbers), q:draw(numbers), count * config.draws)
  end
end

local KEYS = { "model", "dtype", "text", "length", "steps", "examples", "block_size",
               "seed" }

local function run(config, settings)
  out = settings.out
  local keys, sums, m = {}, {}, {}
  for _, name in ipairs(KEYS) do keys[name] = config[name] end
  local policy, self = policy_of(config), kv.experiment.memo(keys, open)
  for _, name in ipairs { "common_share", "alike_share", "likeliest_share" } do
    sums[name] = {}
    for i = 1, #self.examples do sums[name][i] = 0 end
  end
  decode(self, policy, function(step, logits)
    compare(sums, self.full[step], logits, step, config)
  end)
  for name, values in pairs(sums) do
    for i, x in ipairs(values) do values[i] = math.min(1, x) end -- sums of f32
    m[name], m[name .. "_low"], m[name .. "_high"] = kv.statistics.share(values)
  end
  return m
end

local function tables(rows)
  local list = {}
  for _, temperature in ipairs(kv.table.distinct(rows, "temperature")) do
    for _, name in ipairs { "common_share", "alike_share", "likeliest_share" } do
      list[#list + 1] = kv.table.pivot(rows, { rows = "policy", columns = "ratio",
        value = name, format = "%.3f", where = { temperature = temperature },
        caption = ("%s at temperature %g"):format(name, temperature) })
    end
  end
  return list
end

kv.experiment.run {
  name = "25_drawn_drafts",
  title = "How often is a drafted token right, if tokens are drawn?",
  grid = {
    { "policy", { "quest", "block_mean", "gsa_on_device", "streaming_blocks" } },
    { "ratio", { 0.05, 0.1 } },
    { "temperature", { 0.7, 1 } },
  },
  defaults = { model = downloads.find "smollm2" and kv.task.has_kjv() and "smollm2"
                 or "sample", text = "kjv", length = 2048, steps = 48, examples = 8,
               draws = 32, block_size = 16, dtype = "f32" },
  kinds = kv.experiment.kinds {
    count = { "length", "steps", "examples", "draws", "block_size" }, share = { "ratio" },
    positive = { "temperature" }, text = { "model", "text" }, dtype = { "dtype" },
  },
  quick = { policy = { "quest" }, ratio = { 0.1 }, temperature = { 1 }, model = "sample",
            length = 256, steps = 4, examples = 2, draws = 4 },
  proportions = { "common_share", "alike_share", "likeliest_share" },
  metrics = { "common_share", "alike_share", "likeliest_share" },
  check = policy_of, run = run, table = tables,
  plot = { x = "ratio", y = "alike_share", series = "policy", panel = "temperature",
           title = "Drawn tokens that a policy shares with full attention" },
}
