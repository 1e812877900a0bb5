--- How many bits does a hash of keys need, and what should be hashed?
--
-- GSA on-device selects blocks by hashes of keys. For each number of bits, the experiment
-- measures its block_recall and the accuracy of the small recall model
-- (lua/models/recall): with hashes of a block's mean key or of every token, and with
-- orthogonal or gaussian planes. It compares them with Quest's bound and with the mean
-- key itself. block_recall is the share of the oracle's blocks (those with the largest
-- q.k, within the same budget) that a policy selects too; sink and recent do not count.
-- bytes_share is what the policy read (01_recall).
--
--   ./kvlab run lua/experiments/07_hash_bits.lua [--device=cuda] [--set prompts=4]
--                                                [--set question=prompt]
--
-- question: how a question is asked, see lua/models/recall/exam.lua.
local costs = require "kvlab.experiment.costs"
local exam = require "models.recall.exam"
local kv = require "kvlab"
local options = require "kvlab.options"
local sorted = require "kvlab.sorted"

local SINK, RECENT = 1, 2

-- ---- how many of the oracle's blocks a policy selects ---------------------------------

local Overlap = {}
Overlap.__index = Overlap

local function rows_of(selection)
  local n, flat, rows = selection:size(2), selection:list(), {}
  for i = 0, #flat / n - 1 do
    local row = {}
    for j = 1, n do row[j] = flat[i * n + j] end
    rows[i + 1] = row
  end
  return rows
end

--- Counts the oracle's blocks and those of them that were selected. The attention calls
-- this after each decoded layer, see probe.lua.
function Overlap:observe(attention, ctx, selection, counts, tokens, out)
  self.probe:observe(attention, ctx, selection, counts, tokens, out)
  local reads = ctx.reads
  ctx.reads = nil -- what is read here is not the policy's
  kv.scope(function()
    local heads = attention.shape.kv_heads
    local scores = kv.ops.score_max_qk(ctx.query, ctx)
    local best = kv.tensor(ctx.device, "i32",
      { ctx.seqs, heads, selection:size(2) })
    kv.ops.select(scores, ctx.lens, ctx.block_size, attention.decode_policy.budget, best)
    local chosen, want, lens = rows_of(selection), rows_of(best), ctx.lens:list()
    for i, row in ipairs(want) do
      local blocks = math.ceil(lens[math.ceil(i / heads)] / ctx.block_size)
      local has = {}
      for _, b in ipairs(chosen[i]) do has[b] = true end
      for _, b in ipairs(row) do
        if b >= SINK and b < blocks - RECENT then
          self.wanted = self.wanted + 1
          self.found = self.found + (has[b] and 1 or 0)
        end
      end
    end
  end)
  ctx.reads = reads
end

local function overlap(attention)
  return setmetatable({ probe = kv.probe(attention), wanted = 0, found = 0 }, Overlap)
end

-- ---- the grid -------------------------------------------------------------------------

local OTHERS = { oracle = true, quest = true, block_mean = true }

local function policy_of(config)
  local o = { ratio = config.budget, sink = SINK, recent = RECENT, min_blocks = 0 }
  if OTHERS[config.hash_of] then return kv.policy(config.hash_of, o) end
  o.hash_bits, o.per, o.planes = config.bits, config.hash_of, config.planes
  return kv.policy("gsa_on_device", o)
end

local function exam_of(config)
  return { context = config.context, prompts = config.prompts, needles = config.needles,
           block_size = config.block_size, seed = config.seed,
           question = config.question }
end

local function check(config)
  exam.check(exam_of(config))
  policy_of(config)
end

local function run(config)
  local sitting = kv.experiment.memo(exam_of(config), exam.open)
  local policy = policy_of(config)
  local accuracy, step_us, found = sitting:ask(policy, overlap)
  return costs.add({ accuracy = accuracy, step_us = step_us,
    questions = sitting.questions * config.prompts,
    block_recall = found.wanted > 0 and found.found / found.wanted or 1,
    bytes_block = policy.hashes and policy.hashes:bytes_block() or 0 / 0,
    note = kv.policy.note(policy, math.ceil(config.context / config.block_size),
      config.block_size) }, found.probe:metrics())
end

kv.experiment.run {
  name = "07_hash_bits",
  title = "How many bits does a hash of keys need?",
  grid = {
    { "hash_of", { "block", "token", "quest", "block_mean", "oracle" } },
    { "planes", { "orthogonal", "gaussian" } },
    { "bits", { 32, 64, 128, 256, 512, 1024 } },
    { "budget", { 0.02, 0.05, 0.1, 0.3 } },
  },
  defaults = { context = 4096, prompts = 16, needles = 32, block_size = 16,
               question = "decode" },
  kinds = kv.experiment.kinds({
    count = { "context", "prompts", "needles", "block_size" }, share = { "budget" },
  }, {
    hash_of = options.one_of("block", "token", unpack(sorted.keys(OTHERS))),
    planes = options.one_of("orthogonal", "gaussian"), bits = options.within(1, 1024),
    question = exam.OPTIONS.question,
  }),
  quick = { context = 1024, prompts = 1, bits = { 32, 64, 256 }, budget = { 0.05, 0.3 } },
  when = function(config) -- policies without hashes have neither bits nor planes
    return not OTHERS[config.hash_of]
      or (config.bits == 64 and config.planes == "orthogonal")
  end,
  metrics = { "accuracy", "block_recall", "bytes_block", "bytes_share", "held_share",
              "moved_share", "step_us", "questions" },
  proportions = { accuracy = "questions", "block_recall", "bytes_share", "held_share" },
  check = check, run = run,
  table = {
    { rows = "bits", columns = "budget", value = "accuracy", beside = "bytes_share",
      format = "%.3f", where = { hash_of = "block", planes = "orthogonal" } },
    { rows = "bits", columns = "budget", value = "accuracy", beside = "bytes_share",
      format = "%.3f", where = { hash_of = "token", planes = "orthogonal" } },
    { rows = "bits", columns = "budget", value = "accuracy", beside = "bytes_share",
      format = "%.3f", where = { hash_of = "block", planes = "gaussian" } },
    { rows = "bits", columns = "budget", value = "accuracy", beside = "bytes_share",
      format = "%.3f", where = { hash_of = "token", planes = "gaussian" } },
    { rows = "hash_of", columns = "budget", value = "accuracy", beside = "bytes_share",
      format = "%.3f", where = { bits = 64, planes = "orthogonal" } },
    { rows = "hash_of", columns = "budget", value = "block_recall", format = "%.3f",
      where = { bits = 64, planes = "orthogonal" } },
  },
  plot = { x = "bits", y = "block_recall", series = "hash_of", panel = "budget",
           where = { planes = "orthogonal" }, logx = true, xlabel = "bits",
           ylabel = "share of the oracle's blocks",
           title = "Recall model: the oracle's blocks that hashes find, by their bits" },
}
