--- Records what a policy does while it decodes: which blocks each layer and KV head reads
-- at each step, and the scores by which it chose them. It can draw maps of both.
--
--   local record = kv.record(engine.attention)
--   … decode …
--   plot.svg(record:selection_map())          -- steps x blocks, a panel a KV head
--   plot.svg(record:score_map { layers = { 2 } })
--   record:selection(1, 0, 0)                 -- first step, layer 0, KV head 0: a list
--
-- In the REPL: `:plot record:selection_map()`. A record copies every selection and all
-- scores to the host and waits for the device, so it does not fit timed steps or graphs.
-- A probe that was attached before it goes on observing.
local arguments = require "kvlab.arguments"
local constructor = require "kvlab.constructor"
local ffi = require "ffi"
local kinds = require "kvlab.tensor.kinds"
local library = require "kvlab.library"
local objects = require "kvlab.memory.objects"
local options = require "kvlab.options"
local plot = require "kvlab.report.plot"

local C, check = library.C, library.check
local M = {}

local PANELS_MAX = 16

---@class kvlab.Record
---@field steps table[]  for each step: blocks (how many the sequence then had), and for
--                       each layer the selection and the scores
local Record = {}
Record.__index = Record

--- Copies entry `seq` of the first dim of an i32 or f32 tensor to an array.
local function copy_rows(t, seq, ctype)
  local rows = t:index(seq - 1)
  local array = ffi.new(ctype .. "[?]", tonumber(rows.count))
  check(C.kvl_tensor_read(rows, array, 4 * tonumber(rows.count)))
  rows:free()
  return { heads = tonumber(t.sizes[1]), width = tonumber(t.sizes[2]), values = array }
end

--- Keeps the scores that the policy passes to Context:select, whoever calls it.
local function watch_scores(self, ctx)
  local select = ctx.select
  self.had_select = rawget(ctx, "select")
  ctx.select = function(context, scores, budget, limits)
    options.argument("select", "self", context, objects.context)
    if not context.is_prefill and self.seq <= context.seqs then
      self.scored = copy_rows(scores, self.seq, "float")
    end
    return select(context, scores, budget, limits)
  end
end

--- Attaches a record to an attention; record:detach() ends it. Engine:use_policy makes a
-- new attention, which the record does not see.
---@param attention kvlab.Attention
---@param o? {seq?: integer}  which sequence of the batch is recorded (1)
---@return kvlab.Record
local function attach(attention, o)
  o = options.check("record", o, { seq = options.count })
  local seq = o.seq or 1
  local self = setmetatable({ attention = attention, seq = seq, steps = {},
    layers = attention.shape.layers, heads = attention.shape.kv_heads,
    name = attention.decode_policy.name, inner = attention.probe }, Record)
  attention.probe = self
  watch_scores(self, attention.context)
  return self
end

--- Stops recording.
function Record:detach()
  self.attention.probe = self.inner
  self.attention.context.select = self.had_select
end

--- The attention calls this after each layer, see probe.lua.
function Record:observe(attention, ctx, selection, counts, tokens, out)
  if self.inner then
    self.inner:observe(attention, ctx, selection, counts, tokens, out)
  end
  if tokens then
    error(("record: policy %s lists tokens, expected a selection of blocks"):format(
      self.name), 3)
  end
  local scored = self.scored
  self.scored = nil
  if ctx.is_prefill or self.seq > ctx.seqs then return end
  local step = self.steps[#self.steps]
  if not step or ctx.layer == 0 then
    local length = ctx.sequences[self.seq]:length()
    step = { blocks = math.ceil(length / ctx.block_size), chosen = {}, scored = {} }
    self.steps[#self.steps + 1] = step
  end
  step.chosen[ctx.layer] = selection and copy_rows(selection, self.seq, "int32_t") or nil
  step.scored[ctx.layer] = scored
end

-- ---- looking --------------------------------------------------------------------------

local function check_place(self, i, layer, head)
  if not self.steps[i] then
    options.fail(("record: step is %s, expected 1 ... %d"):format(tostring(i),
      #self.steps))
  elseif not (layer >= 0 and layer < self.layers) then
    options.fail(("record: layer is %s, expected 0 ... %d"):format(tostring(layer),
      self.layers - 1))
  elseif not (head >= 0 and head < self.heads) then
    options.fail(("record: KV head is %s, expected 0 ... %d"):format(tostring(head),
      self.heads - 1))
  end
end

--- Where row `head` of a result of copy_rows begins. All heads may share one row.
local function offset(rows, head) return math.min(head, rows.heads - 1) * rows.width end

--- The blocks that a KV head of a layer read at a step, in ascending order; nil: all
-- blocks.
---@param i integer      1: the first recorded step
---@param layer integer  from 0
---@param head integer   KV head, from 0
---@return integer[]|nil
function Record:selection(i, layer, head)
  check_place(self, i, layer, head)
  local rows, blocks = self.steps[i].chosen[layer], {}
  if not rows then return nil end
  local first = offset(rows, head)
  for j = first, first + rows.width - 1 do
    if rows.values[j] >= 0 then blocks[#blocks + 1] = rows.values[j] end
  end
  return blocks
end

--- The scores of all blocks there, from block 0; nil when the policy gave no scores (it
-- reads everything, or chooses without scores).
---@return number[]|nil
function Record:scores(i, layer, head)
  check_place(self, i, layer, head)
  local rows, list = self.steps[i].scored[layer], {}
  if not rows then return nil end
  local first = offset(rows, head)
  for j = 1, self.steps[i].blocks do list[j] = rows.values[first + j - 1] end
  return list
end

--- Means over everything recorded: blocks_read (per KV head and layer), and kept, the
-- share of a step's blocks that the step before read too (1 when all blocks are read; NaN
-- when there is only one step).
---@return {blocks_read: number, kept: number}
function Record:metrics()
  local read, rows, kept, chosen = 0, 0, 0, 0
  for layer = 0, self.layers - 1 do
    for head = 0, self.heads - 1 do
      local before
      for i, step in ipairs(self.steps) do
        local now, count = {}, 0
        local list = self:selection(i, layer, head)
        for j = 1, list and #list or step.blocks do
          now[list and list[j] or j - 1] = true
        end
        for block in pairs(now) do
          count = count + 1
          if before and before[block] then kept = kept + 1 end
        end
        read, rows = read + count, rows + 1
        if before then chosen = chosen + count end
        before = now
      end
    end
  end
  return { blocks_read = read / rows, kept = kept / chosen }
end

-- ---- maps -----------------------------------------------------------------------------

--- Up to `most` of the numbers 0 ... n - 1, evenly spread, with both ends.
local function spread(n, most)
  local list = {}
  if most <= 1 then return { 0 } end
  for i = 0, math.min(n, most) - 1 do
    list[i + 1] = n <= most and i or math.floor(i * (n - 1) / (most - 1) + 0.5)
  end
  return list
end

--- What one KV head of one layer read at a step: 1 for each block that it read.
local function chosen_row(self, i, layer, head)
  local list, row = self:selection(i, layer, head), {}
  for j = 1, self.steps[i].blocks do row[j] = list and 0 or 1 end
  for _, block in ipairs(list or {}) do row[block + 1] = 1 end
  return row
end

--- The scores at a step as ranks: the share of the other blocks whose score is lower;
-- ties count half.
local function rank_row(self, i, layer, head)
  local scores, row, order = self:scores(i, layer, head), {}, {}
  for j, score in ipairs(scores or {}) do
    row[j] = 0 / 0
    if score == score then order[#order + 1] = j end
  end
  table.sort(order, function(a, b) return scores[a] < scores[b] end)
  local at = 1
  while at <= #order do
    local last = at
    while order[last + 1] and scores[order[last + 1]] == scores[order[at]] do
      last = last + 1
    end
    local rank = #order > 1 and ((at + last) / 2 - 1) / (#order - 1) or 1
    for j = at, last do row[order[j]] = rank end
    at = last + 1
  end
  return row
end

--- One panel, with a line for every step.
local function make_panel(self, row_of, layer, head, columns)
  local values = {}
  for i = 1, #self.steps do
    local row = row_of(self, i, layer, head)
    for j = 1, columns do values[#values + 1] = row[j] or 0 / 0 end
  end
  return { title = ("layer %d, KV head %d"):format(layer, head), values = values }
end

local VIEW = { layers = options.list_of(options.whole, 1),
               heads = options.list_of(options.whole, 1), title = options.string,
               step_names = options.list_of(options.string),
               block_names = options.list_of(options.string) }

local function make_map(self, row_of, view, words)
  view = options.check("record", view, VIEW, 3)
  if #self.steps == 0 then options.fail "record: no step has been decoded yet" end
  local heads = view.heads or spread(self.heads, PANELS_MAX)
  local layers = view.layers or spread(self.layers, math.floor(PANELS_MAX / #heads))
  local columns, panels = 1, {}
  for _, step in ipairs(self.steps) do columns = math.max(columns, step.blocks) end
  for _, layer in ipairs(layers) do
    for _, head in ipairs(heads) do
      check_place(self, 1, layer, head)
      panels[#panels + 1] = make_panel(self, row_of, layer, head, columns)
    end
  end
  return plot.heat_map { panels = panels, rows = #self.steps, columns = columns, low = 0,
    high = 1, xlabel = "block", ylabel = "step", zlabel = words.zlabel,
    ends = words.ends, file = words.file,
    row_names = view.step_names, column_names = view.block_names,
    title = view.title or words.title:format(self.name) }
end

--- A map of the blocks that each step chose. It has a panel for every layer and KV head,
-- or for those that the view names; if there are many layers, only some of them have
-- panels.
---@param view? table  layers, heads: lists of numbers from 0; title; step_names,
--                     block_names: what stands in place of the numbers of steps and
--                     blocks, such as their text
---@return kvlab.heat_map
function Record:selection_map(view)
  -- no tail call, since errors count frames
  return (make_map(self, chosen_row, view, { title = "Blocks that %s chose",
    zlabel = "chosen", ends = { "no", "yes" }, file = "selection" }))
end

--- A map of how each step scored the blocks, in the same panels: 1 is the best of all
-- blocks, 0 the worst. It shows ranks, because scores of different heads and steps cannot
-- be compared.
---@param view? table  as for selection_map
---@return kvlab.heat_map
function Record:score_map(view)
  return (make_map(self, rank_row, view, { title = "How %s scored the blocks",
    zlabel = "rank; 1 is the best", file = "scores" }))
end

local PLACE = { i = options.integer, layer = options.integer, head = options.integer }
arguments.methods(Record, "a record", {
  observe = { attention = objects.attention, ctx = objects.layer_context,
              selection = kinds.tensor_or_nil, tokens = kinds.tensor_or_nil },
  selection = PLACE, scores = PLACE,
})

return constructor(M, arguments.of("record", attach, { attention = objects.attention }))
