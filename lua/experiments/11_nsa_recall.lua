--- Which tokens does an indexer find, and does the model answer correctly with them?
--
-- The policy nsa runs on the small recall model (lua/models/recall). Its index keys are
-- the model's keys, unchanged (key) or randomly projected to 32, 64 or 128 dims (random),
-- in f8e4m3. The experiment tries them with and without a Hadamard rotation. It selects
-- tokens, as DeepSeek's indexer does, or blocks. It also selects only in every second or
-- fourth layer, and the layers between read the same tokens (index_layers). To compute
-- token_recall, it finds the tokens with the most exact attention (the sum over heads),
-- as many as are selected; token_recall is the share of these that is selected. Tables of
-- accuracy show in brackets what the policy read, bytes_share (01_recall).
--
--   ./kvlab run lua/experiments/11_nsa_recall.lua [--device=cuda] [--set prompts=4]
local costs = require "kvlab.experiment.costs"
local exam = require "models.recall.exam"
local kv = require "kvlab"
local options = require "kvlab.options"

-- ---- how many of the best tokens are selected -----------------------------------------

local Observer = {}
Observer.__index = Observer

--- Returns the exact attention of a decoded token to each of the first `columns` tokens
-- of its sequence, summed over heads: f32 [1, columns].
local function exact_attention(attention, ctx, seq, columns, length)
  local s, dev, n = attention.shape, attention.cache.device, columns / ctx.block_size
  local rows = (ctx.tables:index(seq):narrow(0, n) * (2 * s.kv_heads)):reshape { 1, n }
    + kv.arange(dev, "i32", s.kv_heads):reshape { s.kv_heads, 1 }
  local keys = ctx.cache:reshape { -1, ctx.block_size * s.head_dim }
    :gather_rows(rows:reshape { s.kv_heads * n }):cast "f32"
    :reshape { s.kv_heads, columns, s.head_dim }
  local logits = ctx:group_queries(ctx.query, ctx.layer, seq, 1):matmul_t(keys)
    :reshape { s.heads, columns }
  local is = (kv.zeros(dev, "i32", { s.heads, 1 }) + kv.arange(dev, "i32", columns))
    :lt(length)
  return is:where(logits, kv.full(dev, "f32", { s.heads, columns }, -math.huge))
    :softmax(s.scale):sum(0):reshape { 1, columns }
end

--- Returns the indices of the tokens that a list of blocks of `size` tokens selects, as
-- the keys of a table, and their number.
local function selected(list, length, size)
  local taken, count = {}, 0
  for _, x in ipairs(list) do
    if x >= 0 then
      for t = x * size, math.min((x + 1) * size, length) - 1 do
        taken[t], count = true, count + 1
      end
    end
  end
  return taken, count
end

--- Adds the selections of a layer to the counts; called like the observe of a probe.
function Observer:observe(attention, ctx, selection, counts, tokens, out)
  self.probe:observe(attention, ctx, selection, counts, tokens, out)
  local lens = ctx.lens:list()
  for seq = 0, ctx.seqs - 1 do
    kv.scope(function()
      local list = tokens and tokens:index(seq) or selection:index(seq):index(0)
      local taken, k = selected(list:list(), lens[seq + 1],
        tokens and 1 or ctx.block_size)
      local columns = math.ceil(lens[seq + 1] / ctx.block_size) * ctx.block_size
      local _, best = exact_attention(attention, ctx, seq, columns, lens[seq + 1])
        :topk(math.min(k, columns))
      for _, t in ipairs(best:list()) do
        self.wanted, self.found = self.wanted + 1, self.found + (taken[t] and 1 or 0)
      end
    end)
  end
end

local function observer(attention)
  return setmetatable({ probe = kv.probe(attention), wanted = 0, found = 0 },
    Observer)
end

-- ---- the grid -------------------------------------------------------------------------

local function exam_of(config)
  return { context = config.context, prompts = config.prompts, needles = config.needles,
           block_size = config.block_size, seed = config.seed }
end

local function policy_of(config)
  return kv.policy("nsa", { ratio = config.budget, sink = config.sink,
    recent = config.recent, min_blocks = 0, index = config.index,
    index_dim = config.index_dim, index_bits = config.bits,
    rotate = config.rotate == "yes", granularity = config.granularity,
    index_layers = config.index_layers, seed = config.seed })
end

local function check(config)
  exam.check(exam_of(config))
  policy_of(config)
end

local function run(config)
  local sitting = kv.experiment.memo(exam_of(config), exam.open)
  local policy = policy_of(config)
  local accuracy, step_us, found = sitting:ask(policy, observer)
  local metrics = found.probe:metrics()
  return costs.add({ accuracy = accuracy,
    token_recall = found.found / math.max(found.wanted, 1),
    attention_mass = metrics.attention_mass, output_error = metrics.output_error,
    bytes_read = metrics.bytes_read, step_us = step_us,
    questions = sitting.questions * config.prompts,
    note = kv.policy.note(policy,
      math.ceil(config.context / config.block_size), config.block_size) }, metrics)
end

local function table_of(value, index, granularity)
  return { rows = "index_dim", columns = "budget", value = value, format = "%.3f",
           beside = value == "accuracy" and "bytes_share" or nil,
           where = { index = index, granularity = granularity, rotate = "no", bits = 8,
                     index_layers = 1 } }
end

local function bits_table(index, rotate)
  return { rows = "bits", columns = "budget", value = "token_recall", format = "%.3f",
           where = { index = index, granularity = "token", rotate = rotate,
                     index_dim = 128, index_layers = 1 } }
end

local function layers_table(value)
  return { rows = "index_layers", columns = "budget", value = value, format = "%.3f",
           beside = value == "accuracy" and "bytes_share" or nil,
           where = { index = "key", granularity = "token", rotate = "no", bits = 8,
                     index_dim = 128 } }
end

kv.experiment.run {
  name = "11_nsa_recall",
  title = "Which tokens does an indexer find?",
  grid = {
    { "index", { "key", "random" } },
    { "granularity", { "token", "block" } },
    { "rotate", { "no", "yes" } },
    { "bits", { 8, 4, 2 } },
    { "index_dim", { 32, 64, 128 } },
    { "index_layers", { 1, 2, 4 } },
    { "budget", { 0.02, 0.05, 0.1, 0.3 } },
  },
  defaults = { context = 4096, prompts = 8, needles = 32, block_size = 16, sink = 1,
               recent = 2 },
  kinds = kv.experiment.kinds({
    count = { "context", "prompts", "needles", "block_size", "index_layers" },
    whole = { "sink", "recent" }, share = { "budget" },
  }, {
    index = options.one_of("key", "random"),
    granularity = options.one_of("token", "block"), rotate = options.one_of("no", "yes"),
    bits = options.one_of(2, 4, 8), index_dim = options.one_of(32, 64, 128),
  }),
  quick = { context = 1024, prompts = 1, index_dim = { 64, 128 }, bits = { 8, 2 },
            index_layers = { 1, 2 }, budget = { 0.05, 0.3 } },
  when = function(config) -- the model's keys have 128 dims
    return (config.index == "random" or config.index_dim == 128)
      and (config.bits == 8 or config.granularity == "token" and config.index_dim == 128)
      and (config.index_layers == 1 or config.index == "key" and config.bits == 8
           and config.granularity == "token" and config.rotate == "no")
  end,
  metrics = { "accuracy", "token_recall", "attention_mass", "output_error", "bytes_read",
              "bytes_share", "held_share", "moved_share", "step_us", "questions" },
  proportions = { accuracy = "questions", "token_recall", "attention_mass",
                  "bytes_share", "held_share" },
  check = check, run = run,
  table = { table_of("accuracy", "key", "token"),
            table_of("accuracy", "random", "token"),
            table_of("accuracy", "key", "block"), table_of("accuracy", "random", "block"),
            table_of("token_recall", "key", "token"),
            table_of("token_recall", "random", "token"),
            bits_table("key", "no"), bits_table("key", "yes"),
            bits_table("random", "no"), bits_table("random", "yes"),
            layers_table "accuracy", layers_table "token_recall",
            layers_table "attention_mass" },
  plot = { x = "budget", y = "token_recall", series = "index_dim", panel = "index",
           where = { granularity = "token", rotate = "no", bits = 8, index_layers = 1 },
           logx = true,
           xlabel = "budget (share of tokens)", ylabel = "share of the best tokens",
           title = "Recall model: the best tokens that an index finds, by budget" },
}
