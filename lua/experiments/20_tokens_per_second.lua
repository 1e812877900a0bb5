--- How many tokens a second does a large model decode under each policy?
--
-- A model of Llama-8B's shape with random weights reads prompts, and then decodes
-- greedily under one policy after the other: a step is every layer, the policy, the
-- logits and the choice of the next token, and steps are replayed from a graph. The time
-- of a step does not depend on what the weights are.
--
--   tokens_s   tokens of all sequences in a second, the median of a few runs of steps
--   ms         of a step
--   speedup    over dense attention for the same prompts
--   bytes      that a step has to read, in GB: the weights, and of K and V (and of what a
--              policy scores with) what the policy read, as a probe counted it
--   gb_s       bytes over the time of a step: beside the device's bandwidth, this is how
--              much of the limit is reached
--   hit_rate   of the hot cache, with memory=hot: the share of selected blocks that were
--              on the device already
--
--   ./kvlab run lua/experiments/20_tokens_per_second.lua --device=cuda
--       [--set prompts=8x32K] [--set policy=quest] [--set budget=0.05]
--       [--set cache=f8e4m3]
--       [--set memory=hot --set policy=quest,gsa_on_device]
--
-- memory: resident (KV on the device) or hot (KV in host memory, read through a hot cache
-- that has room for a share `hot` of all blocks). Dense attention reads every block at
-- every step, so it cannot be behind a hot cache: set policy=quest,gsa_on_device, too.
-- Policies have no speedup then.
--
-- nsa is DeepSeek's sparse attention: the indexer of a model with one (v32, 8 layers of
-- DeepSeek-V3.2) selects `listed` tokens for each query. It has no budget. Its prompts
-- are read anew, because its index keys are made while they are read. A hot cache for nsa
-- has slots for twice as many tokens as a step lists.
--
-- If the results' folder has a file peers.jsonl with what bench/tokens_peers.py printed
-- on the same GPU, its rows are shown, too. They are given the bytes of dense attention
-- over a bf16 cache, which is what they have to read. If it has a file bench.jsonl with
-- what `./kvlab bench R --json` printed on that GPU, the picture shows the limit of each
-- bar: the tokens a second if a step took as long as a plain read of its bytes.
--
-- prompts: SEQUENCESxTOKENS, K is 1024. model: 8b, glm-flash, v32, v32-experts, or small
-- (4 layers), which is what a CPU gets, and v32-small (models/shapes.lua). 8b takes 16 GB
-- for the weights, and 34 GB for K and V of 8 x 32K or 2 x 128K.
local costs = require "kvlab.experiment.costs"
local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"
local options = require "kvlab.options"
local shapes = require "models.shapes"

local WARM = 4 -- steps before the clock starts: one makes buffers, one records the graph

-- ---- prompts that were read -----------------------------------------------------------

local Sitting = {}
Sitting.__index = Sitting

local function open_sitting(keys)
  local model = kv.experiment.memo({ model = keys.model, dtype = keys.dtype,
    seed = keys.seed }, shapes.open)
  local more, offload = (WARM + keys.steps) * keys.runs + keys.steps, nil
  if keys.listed then
    local count = shapes.prompts(keys.prompts)
    offload = { hot_tokens = 2 * count * keys.listed }
  elseif keys.memory == "hot" then
    local _, all = shapes.blocks(keys.prompts, keys.block_size, more)
    offload = { hot_slots = math.ceil(keys.hot * all), hot_overlap = true }
  end
  local engine, seqs, context = shapes.read(model, keys.prompts, {
    block_size = keys.block_size, format = keys.cache, offload = offload }, more)
  return setmetatable({ model = model, context = context, seqs = seqs,
    engine = engine }, Sitting)
end

function Sitting:close() self.engine.cache:close() end

--- Goes back to the prompts and takes a policy. A policy that watches prompts reads them
-- anew.
function Sitting:begin(policy)
  for _, seq in ipairs(self.seqs) do seq:truncate(self.context) end
  if self.policy == policy then return end
  self.policy = policy
  if not policy.watches_prompt then
    self.engine:use_policy(policy, self.seqs)
    return
  end
  for _, seq in ipairs(self.seqs) do seq:close() end
  self.engine:use_policy(policy)
  self.seqs = shapes.read_again(self.engine, #self.seqs, self.context)
end

--- n steps; returns the seconds of one.
function Sitting:decode(ids, n)
  local device = self.model.device
  device:sync()
  local start = kv.C.kvl_clock_ns()
  for _ = 1, n do ids = self.engine:decode(self.seqs, ids):argmax() end
  device:sync()
  return tonumber(kv.C.kvl_clock_ns() - start) * 1e-9 / n
end

--- Seconds of a step: the median of `runs` runs. And the hot cache's rate of hits, if
-- there is one.
function Sitting:seconds(policy, steps, runs)
  self:begin(policy)
  local ids, list = kv.full(self.model.device, "i32", { #self.seqs }, 1), {}
  local hot = self.engine.cache.tier.hot
  for i = 1, runs do
    self:decode(ids, WARM)
    if hot and i == 1 then hot:reset_counts() end
    list[i] = self:decode(ids, steps)
  end
  return kv.statistics.median(list), hot and hot:stats().hit_rate or 0 / 0
end

--- Bytes of a step after the first one: of the weights, and of what the policy reads. And
-- the metrics of a probe in that step.
function Sitting:bytes(policy)
  self:begin(policy)
  local engine, ids = self.engine, kv.full(self.model.device, "i32", { #self.seqs }, 1)
  engine.uses_graphs = false -- a probe looks at every launch
  engine:decode(self.seqs, ids)
  local probe = kv.probe(engine.attention)
  engine:decode(self.seqs, ids)
  engine.uses_graphs = true
  probe:detach()
  local seen = probe:metrics()
  return self.model:weight_bytes(#self.seqs) + #self.seqs * seen.bytes_read, seen
end

-- ---- rows -----------------------------------------------------------------------------

local KEYS = { "model", "dtype", "cache", "memory", "hot", "prompts", "block_size",
               "steps", "runs", "seed" }

local function policy_of(config)
  if config.policy == "nsa" then
    return kv.policy("nsa", { granularity = "token", index = "model", sink = 0,
      recent = 0, min_blocks = 0, tokens = config.listed })
  end
  return kv.policy(config.policy, config.policy ~= "full"
    and { ratio = config.budget, sink = 1, recent = 2, min_blocks = 0 } or nil)
end

local function check(config)
  if config.memory == "hot" and config.policy == "full" then
    error("policy is full, expected one that selects blocks since memory is hot: --set "
      .. "policy=quest,gsa_on_device", 0)
  elseif config.memory == "hot" and config.hot == 0 then
    error("hot is 0, expected a share of all blocks, above 0 and at most 1", 0)
  end
  shapes.prompts(config.prompts)
  policy_of(config)
  if not shapes.has(config.model) then shapes.open(config) end
end

local function run(config)
  local keys, is_full = {}, config.policy == "full"
  for _, name in ipairs(KEYS) do keys[name] = config[name] end
  if config.policy == "nsa" and config.memory == "hot" then
    keys.listed = config.listed
  end
  local sitting = kv.experiment.memo(keys, open_sitting)
  local function seconds(policy)
    return sitting:seconds(policy, config.steps, config.runs)
  end
  local dense = sitting.dense
  if config.memory == "resident" and not dense then
    dense = seconds(kv.policy "full")
    sitting.dense = dense
  end
  local policy = policy_of(config)
  local bytes, seen = sitting:bytes(policy)
  local time, hit_rate = dense, 0 / 0
  if not is_full then time, hit_rate = seconds(policy) end
  return costs.add({ tokens_s = #sitting.seqs / time, ms = 1e3 * time,
    hit_rate = hit_rate, speedup = dense and dense / time or 0 / 0, bytes = 1e-9 * bytes,
    gb_s = 1e-9 * bytes / time, note = seen.note }, seen)
end

--- The rows, and the rows of peers.jsonl whose prompts dense attention has decoded, too.
local function with_peers(rows, settings)
  local all = {}
  for i, row in ipairs(rows) do all[i] = row end
  local text = files.read(settings.out .. "/peers.jsonl") or ""
  for line in text:gmatch "[^\n]+" do
    local peer = json.decode(line)
    local dense = kv.table.where(rows, { prompts = peer.prompts, policy = "full",
                                         cache = "bf16", model = "8b" })[1]
    if dense and peer.tokens_s then
      local seen = dense.metrics
      all[#all + 1] = { config = { prompts = peer.prompts, policy = peer.name },
        metrics = { tokens_s = peer.tokens_s, ms = peer.ms, bytes = seen.bytes,
                    speedup = peer.tokens_s / seen.tokens_s, bytes_share = 1,
                    held_share = 1, moved_share = 0, gb_s = 1e3 * seen.bytes / peer.ms } }
    end
  end
  return all
end

--- The rows with their limits, if bench.jsonl says how fast a plain read is.
local function with_limits(rows, settings)
  local read_gb_s = 0
  for line in (files.read(settings.out .. "/bench.jsonl") or ""):gmatch "[^\n]+" do
    local row = json.decode(line)
    if row.id == "R" then read_gb_s = math.max(read_gb_s, row.gb_s) end
  end
  if read_gb_s == 0 then return rows end
  local list = {}
  for i, row in ipairs(rows) do
    local m = row.metrics
    list[i] = { config = row.config, low = row.low, high = row.high, metrics = {
      tokens_s = m.tokens_s, limit = m.tokens_s * read_gb_s / m.gb_s } }
  end
  return list
end

local function tables(rows, settings)
  local list, over = {}, settings.over
  local shown = ("share of K and V, %s"):format(costs.words(over))
  rows = with_peers(rows, settings)
  for _, prompts in ipairs(kv.table.distinct(rows, "prompts")) do
    local function add(value, beside, format, text)
      list[#list + 1] = kv.table.pivot(rows, { rows = "policy", columns = "budget",
        value = value, beside = beside, format = format, where = { prompts = prompts },
        caption = ("%s, %s"):format(prompts, text) })
    end
    add("tokens_s", "ms", "%.0f", "tokens a second (ms of a step)")
    if rows[1].config.memory == "hot" then
      add("hit_rate", over, "%.3f", ("hits of the hot cache (%s)"):format(shown))
    else
      add("speedup", over, "%.2f", ("speedup over dense attention (%s)"):format(shown))
    end
    add("gb_s", "bytes", "%.0f", "GB/s of what has to be read (GB of a step)")
  end
  return list
end

local is_cuda = kv.cuda_available()
kv.experiment.run {
  name = "20_tokens_per_second",
  title = "How many tokens a second does a large model decode under each policy?",
  grid = {
    { "prompts", { "1x32K", "1x128K", "8x32K" } },
    { "policy", { "full", "quest", "gsa_on_device" } },
    { "budget", { 0.05, 0.1 },
      when = function(config)
        return config.policy ~= "full" and config.policy ~= "nsa"
      end },
  },
  defaults = { model = is_cuda and "8b" or "small", dtype = "bf16", cache = "bf16",
               memory = "resident", hot = 0.2, listed = 2048, block_size = 16,
               steps = 16, runs = 3 },
  kinds = kv.experiment.kinds({
    count = { "listed", "block_size", "steps", "runs" }, share = { "budget", "hot" },
    text = { "model" }, dtype = { "dtype" }, format = { "cache" },
  }, {
    memory = options.one_of("resident", "hot"),
  }),
  quick = { model = "small", prompts = { "2x512" }, steps = 4, runs = 1 },
  proportions = { "bytes_share", "held_share", "hit_rate" },
  metrics = { "tokens_s", "ms", "speedup", "bytes", "gb_s", "bytes_share", "held_share",
              "moved_share", "hit_rate" },
  check = check, run = run,
  table = tables,
  plot = function(rows, settings)
    return kv.plot.bars(with_limits(with_peers(rows, settings), settings), {
      value = "tokens_s", bar = "policy", split = "budget", panel = "prompts",
      limit = "limit", limit_label = "limit: a plain read of the bytes of a step",
      title = ("Tokens a second of a model of shape %s, %s cache, by prompts"):format(
        rows[1].config.model, rows[1].config.cache),
      xlabel = "tokens a second", format = "%.0f" })
  end,
}
