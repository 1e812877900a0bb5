--- Selections that are read again. With the option reuse_layers = n, a policy selects in
-- every n-th of the layers in which it may, and the layers between read the last
-- selection. With reuse_steps = n, it selects for a sequence in every n-th of its
-- consecutive decode steps. The steps between read the same blocks or tokens, and those
-- that the sequence has begun since.
--
-- When a sequence selects depends on this sequence alone: in its first decode step, after
-- n steps, and after anything else that changed its length (a prompt, a step under
-- another policy). If only some sequences of a step select, the policy is called for all
-- of them, but the others have length 0 (ctx.lens), so that kernels read nothing for
-- them. If no sequence selects, the policy is not called.
--
-- The last selection of a sequence lies in a tally, so forks copy it, and it is restored
-- after steps that fail and tokens that are taken back. The lists end with the blocks or
-- tokens that the next steps may begin; a step leaves out those that are not there yet.
-- Source  IndexCache, arXiv:2603.12201
local ffi = require "ffi"
local library = require "kvlab.library"
local options = require "kvlab.options"
local policy = require "kvlab.policy.policy"
local tally = require "kvlab.policy.tally"
local tensor = require "kvlab.tensor.arithmetic"
local touched_limit = require("kvlab.memory.batch").touched_limit

local C, check = library.C, library.check
local M = {}

---@class kvlab.Kept
---@field policy table
---@field ask function         the policy's own select_blocks or select_tokens
---@field size integer         tokens of an entry of a list
---@field more integer         entries that may begin before the next selection
---@field source table         by layer: the layer whose selection it reads
---@field tallies table        by the number of their lists
---@field heads table          by layer: the number of lists of its selections
---@field reads_all table      layers in which the policy selected nothing: it is asked in
--                             each step
---@field shared table         by shape: the selection that layers share
---@field selected integer|nil the layer that selected last in this step
local Kept = {}
Kept.__index = Kept

--- The layer whose selection each layer reads. Layers with a window select nothing.
local function sources_of(shape, every)
  local source, last, n = {}, nil, 0
  for layer = 0, shape.layers - 1 do
    if not shape.windows or shape.windows[layer] == 0 then
      last = n % every == 0 and layer or last
      n, source[layer] = n + 1, last
    end
  end
  return source
end

--- Makes a policy with reuse_layers or reuse_steps above 1 select only in every n-th
-- layer or step.
---@param p table  attached to `shape`
function M.attach(p, shape)
  if p.reuse_layers == 1 and p.reuse_steps == 1 then return end
  local size = p.by_token and 1 or shape.block_size
  local self = setmetatable({ policy = p, shape = shape, size = size,
    steps = p.reuse_steps, more = touched_limit(p.reuse_steps, size) - 1,
    source = sources_of(shape, p.reuse_layers), shares = p.reuse_layers > 1,
    tallies = {}, heads = {}, reads_all = {}, views = {}, asked = {}, shared = {},
    states = setmetatable({}, { __mode = "k" }) }, Kept)
  p.kept = self
  if shape.keepers then table.insert(shape.keepers, self) end
  local select = p.by_token and "select_tokens" or "select_blocks"
  self.ask = p[select]
  p[select] = function(_, ctx) return self:select(ctx) end
  local begin, begin_layer, reset = p.step_begin, p.attention_begin, p.reset
  function p.step_begin(_, ctx)
    self:begin(ctx)
    if begin then begin(p, ctx) end
  end
  function p.attention_begin(_, ctx)
    for i = 1, ctx.is_prefill and #ctx.sequences or 0 do -- also by another policy
      if ctx.batch.counts[i] > 0 then ctx.sequences[i].state[self] = nil end
    end
    if begin_layer then begin_layer(p, ctx) end
  end
  function p.reset()
    for _, one in pairs(self.tallies) do one:reset() end
    for state in pairs(self.states) do state[self] = nil end
    if reset then reset(p) end
  end
  for _, hook in ipairs { "on_prefill_offload", "on_decode_offload" } do
    local fn = p[hook]
    p[hook] = fn and function(_, ev)
      if self.source[ev.layer] == ev.layer then fn(p, ev) end
    end
  end
end

-- ---- when a sequence selects ----------------------------------------------------------

-- A sequence keeps one number: the length that it had at the end of its last step, times
-- `steps`, plus the number of steps since it selected.

--- The tensors for a step of this shape. A graph of such a step may read them.
local function make_views(self, ctx)
  local dev, seqs = self.shape.device, ctx.seqs
  local numbers = tensor.tensor(dev, "i32", { 2, seqs })
  return { numbers = numbers, from = numbers:index(0), due = numbers:index(1),
           lens = tensor.tensor(dev, "i32", { seqs }), lists = {},
           host = ffi.new("int32_t[?]", 2 * seqs) }
end

--- Finds the rows that select in a decode step. Row i reads the selection that row
-- from[i] makes now or, if from[i] is seqs + j, the stored selection of row j.
local function find_due(self, ctx, host)
  local steps, is_rows, seqs, due = self.steps, ctx.is_rows, ctx.seqs, 0
  local length, before = nil, nil
  for i, seq in ipairs(ctx.sequences) do
    local follows = is_rows and before == seq.base
    length = follows and length + 1 or seq:length() + (is_rows and ctx.batch.before or 0)
    local kept, age = seq.state[self], 0
    if kept and math.floor(kept / steps) == length - 1 then
      age = (kept + 1) % steps
    end
    seq.state[self], self.states[seq.state] = length * steps + age, true
    self.asked[i] = age == 0
    host[i - 1] = age == 0 and i - 1 or follows and host[i - 2] or seqs + i - 1
    host[seqs + i - 1] = age == 0 and 1 or 0
    due, before = due + (age == 0 and 1 or 0), seq.base
  end
  for i = #self.asked, seqs + 1, -1 do self.asked[i] = nil end
  return due
end

--- Begins a step of the policy's phase.
function Kept:begin(ctx)
  self.selected = nil
  if ctx.is_prefill or self.steps == 1 then return end
  local views = self.views[ctx.shape_number]
    or tensor.lasting(make_views, self, ctx)
  self.views[ctx.shape_number], self.of_step = views, views
  local due = find_due(self, ctx, views.host)
  self.is_due, self.is_all = due > 0, due == ctx.seqs and not ctx.is_rows
  ctx.variant = due == 0 and "reads again" or not self.is_all and "some select" or nil
  check(C.kvl_tensor_write(views.numbers, views.host, 8 * ctx.seqs))
  for _, one in pairs(self.tallies) do one:begin(ctx) end
end

--- A fork continues as its parent does.
function Kept:inherit(seq, fork) fork.state[self] = seq.state[self] end

--- The newest tokens of a sequence are taken back. If the first step that is taken back
-- made it select early, the step that replaces it selects early again.
function Kept:take_back(seq, tokens)
  local kept, steps = seq.state[self], self.steps
  if not kept then return end
  local age = kept % steps
  seq.state[self] = kept - age - tokens * steps + (age - tokens) % steps
end

-- ---- a selection ----------------------------------------------------------------------

local function ask(self, ctx)
  if ctx.reads and self.policy.own_bytes then ctx.reads:own(self.policy, ctx) end
  return self.ask(self.policy, ctx)
end

--- Lets the policy select for the rows that are due.
local function ask_due(self, ctx)
  if self.is_all then return ask(self, ctx) end
  local lens, views = ctx.lens, self.of_step
  ctx.lens, ctx.asked = lens:mul(views.due, views.lens), self.asked
  local list, counts = ask(self, ctx)
  ctx.lens, ctx.asked = lens, nil
  return list, counts
end

--- The most entries that a list of n entries can get, when sequences have their greatest
-- length.
local function most_entries(self, n)
  local p, shape, most = self.policy, self.shape, 0
  if not p.ratio then return n end
  for layer = 0, shape.layers - 1 do
    most = math.max(most, policy.budget_blocks(p.budget, shape.max_blocks, layer))
  end
  if type(p.budget) ~= "cdata" then most = most * shape.kv_heads end -- it is divided
  return math.max(n, shape.block_size / self.size * math.min(most, shape.max_blocks))
end

--- The tally for selections like this one.
local function tally_for(self, ctx, list)
  local heads, n = tonumber(list.sizes[1]), tonumber(list.sizes[2])
  local one, before = self.tallies[heads], self.heads[ctx.layer]
  if before and before ~= heads then
    options.fail(("policy %s: a selection of %d lists in layer %d, expected %d as in the "
      .. "steps before"):format(self.policy.name, heads, ctx.layer, before))
  end
  self.heads[ctx.layer] = heads
  if not one then
    one = tally.tally(self.shape, heads, -1, most_entries(self, n) + self.more)
    self.tallies[heads] = one
    one:begin(ctx)
  end
  if n + self.more > one.own then
    options.fail(("policy %s: a selection of %d entries, expected at most %d where it is "
      .. "read again"):format(self.policy.name, n, one.own - self.more))
  end
  return one
end

--- The number of entries that each row has, i32 [seqs, 1, 1].
local function there(self, ctx)
  return ((ctx.lens + (self.size - 1)) / self.size):reshape { ctx.seqs, 1, 1 }
end

--- A list, followed by the entries that later steps may begin: f32 [seqs, heads, all].
local function extended(self, ctx, list, counts, all)
  local dev, more, dims = ctx.device, self.more, list:dims()
  local rows, n = dims[1] * dims[2], dims[3]
  local made = tensor.cat({ list,
    tensor.full(dev, "i32", { dims[1], dims[2], all - n }, -1) }, 2)
  if more == 0 then return made:cast "f32" end
  local after = tensor.arange(dev, "i32", more)
  local next = tensor.zeros(dev, "i32", { dims[1], dims[2], more })
    + there(self, ctx) + after:reshape { 1, 1, more }
  counts = self.policy.by_token and tensor.full(dev, "i32", { rows, 1 }, n)
    or (counts or list:ge(0):cast "i32":sum(-1)):reshape { rows, 1 }
  made:reshape { rows, all }:scatter_(counts + after:reshape { 1, more },
    next:reshape { rows, more })
  return made:cast "f32"
end

--- Stores what the policy selected. Returns the stored lists, f32 [seqs, heads, all].
local function keep(self, ctx, one, list, counts)
  local made = extended(self, ctx, list, counts, one.own)
  if not self.is_all then return one:choose(ctx, made, self.of_step.from) end
  one:store(ctx, made)
end

--- Writes the entries of stored lists that exist in this step to `out`.
local function read(self, ctx, lists, out)
  lists = lists:cast "i32"
  lists:lt(there(self, ctx)):where(lists, -1, out)
end

--- A list of this step's shape, for all of its layers.
local function list_for(self, ctx, one)
  local lists = self.of_step.lists
  lists[one] = lists[one]
    or tensor.lasting(tensor.tensor, ctx.device, "i32", { ctx.seqs, one.heads, one.own })
  return lists[one]
end

--- The selection that a layer of a decode step reads. nil: everything.
local function select_step(self, ctx)
  local layer, lists = ctx.layer, nil
  if self.reads_all[layer] then return ask(self, ctx) end
  if self.is_due then
    local list, counts = ask_due(self, ctx)
    if not list then
      self.reads_all[layer] = true
      return nil
    end
    local one = tally_for(self, ctx, list)
    lists = tensor.scope(keep, self, ctx, one, list, counts)
    if self.is_all then return list, counts end
  end
  local one = self.tallies[self.heads[layer]]
  local out = list_for(self, ctx, one)
  tensor.scope(read, self, ctx, lists or one:load(ctx), out)
  return out
end

--- Copies a selection to where it stays for the other layers of the step.
local function share(self, ctx, list, counts)
  self.selected = ctx.layer
  if not self.shares then return end
  local key = ctx.is_prefill and 0 or ctx.shape_number -- a prefill is in no graph
  local shared = self.shared[key] or {}
  self.shared[key], self.last = shared, shared
  for name, from in pairs { list = list or false, counts = counts or false } do
    local to = shared[name]
    if from and not (to and to.ndim == from.ndim and to.count == from.count
      and to:size(-1) == from:size(-1)) then
      to = tensor.lasting(tensor.tensor, ctx.device, "i32", from:dims())
    end
    shared[name] = from and to:copy_(from)
  end
end

--- Replaces the policy's select_blocks or select_tokens.
function Kept:select(ctx)
  local source = self.source[ctx.layer]
  if source == ctx.layer then
    local selects = (ctx.is_prefill or self.steps == 1) and ask or select_step
    local list, counts = selects(self, ctx)
    share(self, ctx, list, counts)
    return list, counts
  elseif self.selected ~= source then
    error(("policy %s: layer %d reads what layer %d selects, which selected nothing in "
      .. "this step"):format(self.policy.name, ctx.layer, source), 0)
  end
  return self.last.list or nil, self.last.counts or nil
end

return M
