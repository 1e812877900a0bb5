--- The verb `time`: how long a decode step takes under policies, and where it goes.
--
--   kvlab time quest,policies/mine.lua [--device=cuda] [--set context=32768]
--
-- Random queries, keys and values go through all layers of a model's attention
-- (kv.synthetic). Every policy decodes its own sequences, whose blocks are forks of the
-- same ones. The end of the context is prefilled with dense attention, so that a policy
-- that watches the prompt has seen one; the earlier blocks are shown to the policy as if
-- they had been prefilled. A policy that evicts has a cache of its own, with tables by
-- head or by layer (--set tables=layer), and prefills all of its context densely.
--
-- What makes the times comparable:
--   - The policies take turns, step by step. Each round begins with another policy, and
--     every second round goes backwards, so that no policy always follows the same other
--     one.
--   - Before each layer a buffer larger than the caches is read, because a model reads
--     its weights between two layers: what a layer reads comes from memory.
--   - On a GPU, times are those of the device, from events. The buffer is read often
--     enough that the host has launched the layer before the device begins with it.
--   - Stages are timed in steps of their own, because their events take time, too.
--   - Times are medians of the steps, with intervals of statistics.median_interval. The
--     ratio is the median of the ratios to the first policy in the same turn.
local attention_of = require("kvlab.policy.attention").attention
local grids = require "kvlab.experiment.grid"
local json = require "kvlab.json"
local kv = require "kvlab"
local options = require "kvlab.options"
local policy_file = require "kvlab.shell.policy_file"
local stages = require "kvlab.observe.stages"
local synthetic = require "kvlab.experiment.synthetic"
local median_interval = require("kvlab.experiment.statistics").median_interval
local text_table = require "kvlab.report.table"

local M = {}

local WARM_UP = 4  -- steps that are not counted
local PROMPT = 64  -- tokens at the end of the context that are prefilled
local CHUNK = 512  -- of a context that is prefilled whole
local MIB = 2 ^ 20

-- ---- what is asked for ----------------------------------------------------------------

--- The settings that --set may change, with their defaults.
local function settings_of(given, dev)
  local shape = given.set.shape or synthetic.default_shape(dev)
  local is_cpu, known = dev:is_cpu(), synthetic.SHAPES[shape]
  local o = grids.new({}, {
    context = given.quick and 1024 or is_cpu and 8192 or 32768, seqs = 1,
    budget = 0.1, unit = "ratio", block_size = 16, dtype = "bf16", shape = shape,
    layers = given.quick and 2 or known and known.layers or 1,
    steps = given.quick and 9 or 31, flush_mib = is_cpu and 64 or 512, tables = "head",
  })
  for key, value in pairs(given.set) do grids.override(o, key, value, "--set") end
  for _, name in ipairs { "context", "seqs", "block_size", "layers", "steps" } do
    options.argument("--set", name, o.defaults[name], options.count)
  end
  options.argument("--set", "flush_mib", o.defaults.flush_mib, options.whole)
  for name, kind in pairs { unit = options.one_of("ratio", "tokens", "blocks"),
    tables = options.one_of("layer", "head"), shape = synthetic.SHAPE,
    dtype = options.one_of("f32", "f16", "bf16") } do
    options.argument("--set", name, o.defaults[name], kind)
  end
  return o.defaults
end

--- The names of the policies, each once; full, the reference, is added if it is missing.
---@param policies {name: string|nil, path: string|nil}[]  by name, or by file
local function names_of(policies)
  local names, is_there = {}, {}
  for i, one in ipairs(policies) do
    local name = one.name or policy_file(one.path)
    if is_there[name] then
      error(("time: there are two policies %s, expected each once"):format(name), 0)
    end
    names[i], is_there[name] = name, true
  end
  if not is_there.full then names[#names + 1] = "full" end
  return names
end

local function open_policy(name, o)
  return kv.policy(name, name ~= "full" and
    { [o.unit] = o.budget, sink = 1, recent = 2, min_blocks = 0 } or nil)
end

-- ---- lanes ----------------------------------------------------------------------------

---@class kvlab.shell.Lane  a policy with its attention and its sequences
---@field name string
---@field model kvlab.Synthetic  whose cache it reads
---@field attention kvlab.Attention
---@field stages kvlab.Stages
---@field seqs kvlab.Sequence[]
---@field samples table<string, number[]>  microseconds by stage and step; also `total`,
--                                         and `host` on a GPU

--- A fork of a sequence with all of the context, as a policy would have seen it.
local function prompt_of(s, base, o)
  local seq, tokens = base:fork(), {}
  s.attention:request_begin(seq)
  local blocks = seq:table()
  for i = 1, #blocks do tokens[i] = o.block_size end
  if #blocks > 0 then s.attention:show(blocks, tokens) end
  s:prefill(seq, o.context - seq:length())
  return seq
end

local function open_lane(s, name, policy, o, blocks)
  local attention = attention_of { cache = s.cache, heads = s.shape.heads,
    decode_policy = policy, max_seqs = o.seqs, max_blocks = blocks }
  s.attention = attention
  return { name = name, model = s, attention = attention, seqs = {}, samples = {},
           stages = stages.new(attention) }
end

--- A lane whose sequences are forks of `bases`, in the cache of s.
local function open_sharing(s, name, policy, bases, o, blocks)
  local lane = open_lane(s, name, policy, o, blocks)
  for i, base in ipairs(bases) do lane.seqs[i] = prompt_of(s, base, o) end
  return lane
end

--- A lane of a policy that evicts, with a cache of its own. open(more) opens a synthetic
-- model.
local function open_evicting(open, name, policy, o, blocks)
  local s = open { tables = o.tables, chunk = math.max(CHUNK, o.seqs),
                   context = 2 * o.seqs * blocks * o.block_size } -- evictions copy pages
  local lane = open_lane(s, name, policy, o, blocks)
  for i = 1, o.seqs do
    lane.seqs[i] = s.cache:sequence()
    lane.attention:request_begin(lane.seqs[i])
    s:prefill(lane.seqs[i], o.context, true)
  end
  return lane
end

--- Returns a synthetic model, and a lane for each policy.
local function open_lanes(names, o, dev, seed)
  local size, steps = o.block_size, 2 * (o.steps + WARM_UP)
  local before = math.max(0, math.floor((o.context - PROMPT) / size) * size)
  local blocks = math.ceil((o.context + steps) / size) + 1
  local function open(more)
    local all = { device = dev, shape = o.shape, layers = o.layers, dtype = o.dtype,
      block_size = size, max_seqs = o.seqs, seed = seed, max_blocks = blocks }
    for key, value in pairs(more) do all[key] = value end
    return kv.synthetic(all)
  end
  local s = open { chunk = PROMPT + size,
    context = o.seqs * (before + #names * (blocks * size - before)) }
  local bases, lanes = {}, {}
  for i = 1, o.seqs do bases[i] = s:sequence(before) end
  for i, name in ipairs(names) do
    local policy = open_policy(name, o)
    lanes[i] = policy.evict and open_evicting(open, name, policy, o, blocks)
      or open_sharing(s, name, policy, bases, o, blocks)
  end
  return s, lanes
end

-- ---- time -----------------------------------------------------------------------------

---@class kvlab.shell.Flush
---@field reads integer  how often the buffer is read before a layer
local Flush = {}
Flush.__index = Flush

local function new_flush(dev, mib)
  return setmetatable({ reads = mib > 0 and 1 or 0, device = dev,
    buffer = mib > 0 and kv.rand(dev, "f32", { mib * MIB / 4 }),
    sum = kv.tensor(dev, "f32", {}) }, Flush)
end

function Flush:run()
  for _ = 1, self.reads do self.buffer:sum(0, self.sum) end
end

local function clock_us() return tonumber(kv.C.kvl_clock_ns()) * 1e-3 end

--- How often the buffer has to be read so that the reads take at least host_us, the
-- host's time to launch a layer.
function Flush:cover(host_us)
  if self.reads == 0 or self.device:is_cpu() then return end
  self.device:sync()
  local start = clock_us()
  self:run()
  self.device:sync()
  self.reads = math.ceil(1.5 * host_us / ((clock_us() - start) / self.reads))
end

--- Runs a step of a lane. Returns how long the host took for it, and for its longest
-- layer.
local function step(lane, flush, is_apart)
  local s, host_us, longest = lane.model, 0, 0
  local function timed(fn, ...)
    flush:run()
    local start = clock_us()
    lane.stages:begin(is_apart)
    fn(...)
    local us = clock_us() - start
    host_us, longest = host_us + us, math.max(longest, us)
    lane.stages:finish()
  end
  local counts = {}
  for i = 1, #lane.seqs do counts[i] = 1 end
  s.attention = lane.attention
  s.batch:append(lane.seqs, counts, nil, nil, nil, lane.attention.evictor ~= nil)
  lane.stages:reset()
  timed(lane.attention.begin, lane.attention, s.batch, false)
  for layer = 0, s.layers - 1 do timed(s.layer_of_step, s, layer) end
  return host_us, longest
end

local function add_sample(lane, name, us)
  local samples = lane.samples[name] or {}
  lane.samples[name] = samples
  samples[#samples + 1] = us
end

--- One step of a lane as a whole, and one in stages.
local function measure(lane, flush)
  local host_us = step(lane, flush, false)
  add_sample(lane, "total", lane.stages.us.total)
  if not lane.model.device:is_cpu() then add_sample(lane, "host", host_us) end
  step(lane, flush, true)
  for _, stage in ipairs(stages.NAMES) do
    if lane.stages.us[stage] then add_sample(lane, stage, lane.stages.us[stage]) end
  end
end

local function measure_all(s, lanes, o)
  local flush, host_us = new_flush(s.device, o.flush_mib), 0
  for turn = 1, WARM_UP do
    for _, lane in ipairs(lanes) do
      step(lane, flush, true)
      local _, longest = step(lane, flush, true)
      if turn == WARM_UP then host_us = math.max(host_us, longest) end
    end
  end
  flush:cover(host_us)
  for turn = 1, o.steps do
    local way = turn % 2 == 0 and 1 or -1
    for i = 1, #lanes do measure(lanes[(turn + way * i) % #lanes + 1], flush) end
  end
  for _, lane in ipairs(lanes) do
    lane.samples.ratio = {}
    for i, us in ipairs(lane.samples.total) do
      lane.samples.ratio[i] = us / lanes[1].samples.total[i]
    end
  end
end

-- ---- what is printed ------------------------------------------------------------------

local function shown(samples, format)
  if not samples then return "-" end
  local median, low, high = median_interval(samples)
  local text = format:format(median)
  return low and ("%s [%s, %s]"):format(text, format:format(low), format:format(high))
    or text
end

local function as_table(lanes)
  local t = { header = { "us a step" }, rows = {} }
  local rows = { unpack(stages.NAMES) }
  rows[#rows + 1] = "total"
  if lanes[1].samples.host then rows[#rows + 1] = "host" end
  rows[#rows + 1] = "ratio"
  for i, lane in ipairs(lanes) do t.header[i + 1] = lane.name end
  for r, name in ipairs(rows) do
    t.rows[r] = { name == "ratio" and "ratio to " .. lanes[1].name or name }
    for i, lane in ipairs(lanes) do
      t.rows[r][i + 1] = shown(lane.samples[name], name == "ratio" and "%.3f" or "%.0f")
    end
  end
  return t
end

local function describe(s, o)
  local shape = s.shape
  return ([[
%s
%d layers, %d query heads on %d KV heads of %d, %s; %d x %d tokens in blocks of %d
budget: %s = %s, sink 1 and recent 2 in it; K, V and queries are random, KV on the device
%s
medians of %d steps, with 95 %% intervals; the policies take turns

]]):format(s.device:description(), s.layers, shape.heads, shape.kv_heads, shape.head_dim,
    o.dtype, o.seqs, o.context, o.block_size, o.unit, text_table.format_number(o.budget),
    o.flush_mib > 0 and ("cold caches: %d MiB are read before each layer"):format(
      o.flush_mib) or "warm caches: nothing else is read between the layers", o.steps)
end

local function print_json(lanes, o, dev)
  for _, lane in ipairs(lanes) do
    local row = { policy = lane.name, device = dev:name(), settings = o, us = {} }
    for name, samples in pairs(lane.samples) do
      local interval = { median_interval(samples) }
      if name == "ratio" then row.ratio = interval else row.us[name] = interval end
    end
    io.write(json.encode(row, { order = { "policy", "device", "settings", "us",
      "ratio" } }), "\n")
  end
end

--- kvlab time
---@param policies {name: string|nil, path: string|nil}[]  each by its name or its file
---@param given kvlab.CommandLine
---@return integer  # the exit status
function M.main(policies, given)
  local dev = kv.device(given.device)
  local o, names = settings_of(given, dev), names_of(policies)
  local s, lanes = open_lanes(names, o, dev, given.seed)
  measure_all(s, lanes, o)
  if given.json then
    print_json(lanes, o, dev)
  else
    io.write(describe(s, o), text_table.text(as_table(lanes)))
    io.write("- : the policy has no such stage; other: K and V are appended, ",
      "tokens evicted, and what else a policy does\n")
    if not dev:is_cpu() then
      io.write "host: to launch a step, which is not in the total\n"
    end
  end
  return 0
end

return M
