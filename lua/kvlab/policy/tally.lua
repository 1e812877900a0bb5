--- Tallies: numbers that a policy keeps on the device for the blocks of each sequence,
-- such as how often a block was selected. There is one f32 for every layer, sequence,
-- head and logical block. A summary belongs to a physical block, and sequences that share
-- the block share it; a tally belongs to one sequence. A fork begins with a copy. When a
-- sequence is closed, its row becomes free. Truncating a sequence does not change its
-- numbers.
--
--   init       = function(self, shape) self.counts = kv.tally(shape) end,
--   step_begin = function(self, ctx) self.counts:begin(ctx) end,
--   score      = function(self, ctx) return self.counts:load(ctx) end,
--
-- A graph keeps the memory that the tally had at its recording. After the recording there
-- may be no more sequences than the tally has rows (16 at first; the number doubles).
local arguments = require "kvlab.arguments"
local ffi = require "ffi"
local kinds = require "kvlab.tensor.kinds"
local library = require "kvlab.library"
local objects = require "kvlab.memory.objects"
local options = require "kvlab.options"
local tensor = require "kvlab.tensor.arithmetic"

local C, check = library.C, library.check
local M = {}

local ROWS = 16 -- rows for sequences at first

---@class kvlab.Tally
---@field values kvlab.Tensor  f32 [seqs, heads, width]: what load read; store writes it
local Tally = {}
Tally.__index = Tally

--- Memory for `rows` rows, and its layers.
local function new_memory(self, rows)
  local s, layers = self.shape, {}
  local memory = tensor.full(s.device, "f32", { s.layers, rows * self.row_cells },
    self.initial)
  for layer = 0, s.layers - 1 do
    layers[layer] = memory:index(layer):reshape { 1, rows * self.row_cells }
  end
  return memory, layers
end

--- A tally for each of `heads` heads (kv_heads), whose numbers start at `initial` (0).
---@param shape table  as policy.init gets it
---@param heads? integer
---@param initial? number
---@return kvlab.Tally
function M.tally(shape, heads, initial)
  heads = heads or shape.kv_heads
  local self = setmetatable({ shape = shape, heads = heads, initial = initial or 0,
    row_cells = heads * shape.max_blocks, owners = setmetatable({}, { __mode = "v" }),
    ages = {}, is_due = {}, is_soon = {}, due_count = 0, soon_count = 0,
    views_of = {}, journal = shape.journal, stores = {}, stores_used = 0,
    row_count = ROWS, row_ages = {}, ages_before = {}, puts = {},
  }, Tally)
  if shape.followers then table.insert(shape.followers, self) end
  self.memory, self.layers = tensor.lasting(new_memory, self, ROWS)
  return self
end

-- ---- rows -----------------------------------------------------------------------------

--- The cells of one row in a layer: f32 [row_cells].
local function cells(self, layer, row)
  return options.entry("tally", "layer", self.layers, layer)
    :reshape { self.row_count * self.row_cells }
    :narrow(row * self.row_cells, self.row_cells)
end

local function grow(self)
  local rows = self.row_count
  local memory, layers = new_memory(self, 2 * rows)
  local count = rows * self.row_cells
  for layer = 0, self.shape.layers - 1 do
    layers[layer]:reshape { 2 * count }:narrow(0, count)
      :copy_(self.layers[layer]:reshape { count })
  end
  self.memory, self.layers, self.row_count, self.placed = memory, layers, 2 * rows, nil
end

local function find_free(self)
  for row = 0, self.row_count - 1 do
    local owner = self.owners[row]
    if not owner or not owner.handle then return row end
  end
  tensor.lasting(grow, self)
  return self.row_count / 2
end

--- Gives a free row to a sequence, once the row is filled. seq may be a view of one.
local function claim(self, seq, row)
  self.owners[row], seq.state[self], self.ages[row] = seq.base or seq, row, nil
  return row
end

--- The row of a sequence. It is claimed and filled when it is first asked for.
local function row_of(self, seq)
  local row = seq.state[self]
  if row then return row end
  row = find_free(self)
  for layer = 0, self.shape.layers - 1 do cells(self, layer, row):fill_(self.initial) end
  return claim(self, seq, row)
end

--- Copies the numbers of a sequence to its fork. Called when a sequence is forked.
function Tally:inherit(seq, fork)
  local from, to = seq.state[self], find_free(self)
  if not from then return end -- seq has no numbers yet
  for layer = 0, self.shape.layers - 1 do
    cells(self, layer, to):copy_(cells(self, layer, from))
  end
  claim(self, fork, to)
end

-- ---- taking back ----------------------------------------------------------------------

-- Inside a transaction of the cache, these are noted in its journal before a change.

--- Numbers that store is about to replace: of the cells that begin at `firsts`.
local Store = {}
Store.__index = Store

local function new_store(self)
  local heads = self.views.heads
  return setmetatable({ tally = self, views = self.views,
    firsts = ffi.new("int32_t[?]", heads),
    values = tensor.tensor(self.shape.device, "f32", { 1, self.values.count }) }, Store)
end

--- An entry of the present shape; those that were used before serve again.
local function next_store(self)
  local at = self.stores_used + 1
  local entry = self.stores[at]
  if not entry or entry.views ~= self.views then
    entry = tensor.lasting(new_store, self)
    self.stores[at] = entry
  end
  return entry
end

--- Keeps what store is about to replace. In a recorded step this only prepares the entry:
-- each replay fills it, and the engine then notes it in the journal.
local function keep_stored(self, layer)
  local journal = self.journal
  local is_recorded = C.kvl_device_is_recording(self.shape.device) == 1
  if is_recorded and not journal.recording then return end
  local entry = is_recorded and tensor.lasting(new_store, self) or next_store(self)
  entry.layer, entry.is_recorded = layer, is_recorded
  self.layers[layer]:gather(self.views.places_flat, entry.values)
  if is_recorded then
    journal.recording[#journal.recording + 1] = entry
  else
    entry:replayed()
    C.kvl_interrupt_hold(1)
    self.stores_used = self.stores_used + 1
    journal:note(entry)
    C.kvl_interrupt_hold(-1)
  end
end

--- The numbers are those of this step's sequences, and so are those that take_back needs.
function Store:replayed()
  local tally, kept = self.tally, self.views.kept
  ffi.copy(self.firsts, tally.views.host_firsts, 4 * self.views.heads)
  if self.is_recorded and kept then kept[self.layer].step = tally.step end
end

function Store:forget()
  if not self.is_recorded then self.tally.stores_used = self.tally.stores_used - 1 end
end

function Store:undo()
  local tally, views = self.tally, self.views
  self:forget()
  tally.placed = nil -- this step's places are overwritten
  check(C.kvl_tensor_write(views.firsts, self.firsts, 4 * views.heads))
  views.firsts:add(views.columns, views.places)
  tally.layers[self.layer]:scatter_(views.places_flat, self.values)
end

--- A sequence's numbers of a layer, which put is about to change.
local Put = {}
Put.__index = Put

local function keep_put(self, layer, row)
  local values = tensor.lasting(function() return cells(self, layer, row):clone() end)
  self.journal:note(setmetatable({ tally = self, layer = layer, row = row,
                                   values = values }, Put))
end

function Put:forget() self.values:free() end

function Put:undo()
  cells(self.tally, self.layer, self.row):copy_(self.values)
  self.values:free()
end

--- The ages of the sequences of a step, which due is about to change.
local Ages = {}
Ages.__index = Ages

local function keep_ages(self, seqs)
  local entry = self.kept_ages or setmetatable({ tally = self, rows = {}, ages = {} },
    Ages)
  self.kept_ages = nil
  entry.count = #seqs
  for i = 1, #seqs do
    local row = row_of(self, seqs[i])
    entry.rows[i], entry.ages[i] = row, self.ages[row] or false
  end
  self.journal:note(entry)
end

function Ages:forget() self.tally.kept_ages = self end

function Ages:undo()
  for i = 1, self.count do self.tally.ages[self.rows[i]] = self.ages[i] or nil end
  self:forget()
end

-- ---- a step ---------------------------------------------------------------------------

--- What a step of this shape needs. A graph of such a step may read it.
local function make_views(self, ctx)
  local dev, heads, n = self.shape.device, ctx.seqs * self.heads, ctx.width
  local v = { heads = heads, firsts = tensor.tensor(dev, "i32", { heads, 1 }),
    columns = tensor.arange(dev, "i32", n),
    places = tensor.tensor(dev, "i32", { heads, n }),
    values = tensor.tensor(dev, "f32", { ctx.seqs, self.heads, n }),
    host_firsts = ffi.new("int32_t[?]", heads) }
  v.places_flat = v.places:reshape { 1, heads * n }
  v.flat = v.values:reshape { 1, heads * n }
  return v
end

--- Forgets what take_back would need of the last step.
local function forget_puts(self)
  for i = #self.puts, 1, -1 do
    self.puts[i].values:free()
    self.puts[i] = nil
  end
end

--- Whether the places are those of the step's sequences.
local function is_placed(self, ctx)
  if not self.placed then return false end
  for i = 0, ctx.seqs - 1 do
    local first = row_of(self, ctx.sequences[i + 1]) * self.row_cells
    if self.views.host_firsts[i * self.heads] ~= first then return false end
  end
  return true
end

--- Finds the cells of this step's sequences. Call it once a step, in step_begin.
function Tally:begin(ctx)
  local heads, width = self.heads, self.shape.max_blocks
  local views = self.views_of[ctx.shape_number]
  if not views then
    views = tensor.lasting(make_views, self, ctx)
    self.views_of[ctx.shape_number] = views
  end
  if self.views ~= views then
    self.views, self.values, self.placed = views, views.values, nil
  end
  forget_puts(self)
  self.step = ctx.step
  if is_placed(self, ctx) then return end
  self.placed = nil -- until all is done: a step may be interrupted anywhere
  for i = 0, ctx.seqs - 1 do
    local first = row_of(self, ctx.sequences[i + 1]) * self.row_cells
    for head = 0, heads - 1 do
      views.host_firsts[i * heads + head] = first + head * width
    end
  end
  check(C.kvl_tensor_write(views.firsts, views.host_firsts, 4 * ctx.seqs * heads))
  views.firsts:add(views.columns, views.places)
  self.placed = true
end

--- The numbers of the context's layer. Raises outside of a step.
local function layer_of(self, ctx)
  if not self.views then
    options.fail "tally: begin was not called, expected a call in step_begin"
  end
  return options.entry("tally", "layer", self.layers, ctx.layer)
end

--- Reads this layer's numbers: f32 [seqs, heads, width].
function Tally:load(ctx)
  layer_of(self, ctx):gather(self.views.places_flat, self.views.flat)
  if ctx.reads then ctx.reads:each_block(ctx, self:bytes_block()) end
  return self.values
end

-- ---- steps of several tokens a sequence -----------------------------------------------

-- The rows of a sequence (memory/rows.lua) have one row of the tally. self.values has a
-- copy of it for each of them; after[layer] keeps what each of them left, so that tokens
-- can be taken back.

--- The views of the rows of values that steps of several tokens need in addition to
-- make_views.
local function add_row_views(self, ctx, v)
  local dev, cells_row = self.shape.device, self.heads * ctx.width
  local function rows_of(t)
    local list, all = {}, t:reshape { ctx.seqs, cells_row }
    for i = 1, ctx.seqs do list[i] = all:narrow(i - 1, 1) end
    return list
  end
  local kept, rows, places = {}, rows_of(v.values), rows_of(v.places)
  for layer = 0, self.shape.layers - 1 do
    local before = tensor.tensor(dev, "f32", { 1, ctx.seqs * cells_row })
    local after = tensor.tensor(dev, "f32", { ctx.seqs, cells_row })
    kept[layer] = { before = before, before_rows = rows_of(before), after = after,
                    after_rows = rows_of(after) }
  end
  v.rows, v.row_places, v.kept = rows, places, kept
end

--- Makes the values of each row those after it, keeps them, and gives all rows of a
-- sequence the last ones, which store then writes. is_sum: the values of a row are the
-- numbers that load read with what this row alone adds to them.
local function join_rows(self, ctx, numbers, is_sum)
  local v, step = self.views, ctx.batch
  if not v.kept then tensor.lasting(add_row_views, self, ctx, v) end
  local kept = v.kept[ctx.layer]
  numbers:gather(v.places_flat, kept.before)
  for i = 1, #step.own do
    local first, last = step.first[i], step.first[i] + step.own[i] - 1
    for row = first + 1, is_sum and last or first do
      local own = v.rows[row]
      own:sub(kept.before_rows[row], own):add(v.rows[row - 1], own)
    end
  end
  kept.after:copy_(v.values:reshape(kept.after:dims()))
  for i = 1, #step.own do
    local first, last = step.first[i], step.first[i] + step.own[i] - 1
    for row = first, last - 1 do v.rows[row]:copy_(v.rows[last]) end
  end
  kept.step = ctx.step
  if C.kvl_device_is_recording(self.shape.device) == 1 then
    -- The journal's entry says at each replay that it was this step's. Without a journal
    -- nobody does, and every step of the shape is taken to be a replay.
    kept.is_replayed = not (self.journal and self.journal.recording)
  end
end

--- Takes back what put changed for rows from `row` on of a sequence.
local function undo_puts(self, seq, row)
  for i = #self.puts, 1, -1 do
    local one = self.puts[i]
    if one.seq == seq and one.at >= row then
      cells(self, one.layer, one.row):copy_(one.values)
      one.values:free()
      table.remove(self.puts, i)
    end
  end
end

--- Makes the numbers of a sequence what they were after the first `kept` of its tokens in
-- step number `step` of the attention, whose rows begin with `first`. The attention calls
-- this (shape.followers) when tokens are taken back.
function Tally:take_back(seq, first, kept, step)
  if not self.step or self.step ~= step then return end
  undo_puts(self, seq, first + kept)
  local v = self.views
  for layer = 0, v.kept and self.shape.layers - 1 or -1 do
    local k = v.kept[layer]
    if k.step == step or k.is_replayed then
      self.layers[layer]:scatter_(v.row_places[first],
        kept > 0 and k.after_rows[first + kept - 1] or k.before_rows[first])
    end
  end
  if self.due_step == step then
    local age = self.row_ages[first + kept - 1]
    if kept == 0 then age = self.ages_before[first] end
    self.ages[seq.state[self]] = age
  end
end

--- Writes self.values back. In a step of several tokens a sequence, what each of them
-- adds to the numbers that load read is added up.
function Tally:store(ctx)
  local numbers = layer_of(self, ctx)
  if self.journal and self.journal.is_open then keep_stored(self, ctx.layer) end
  if ctx.is_rows then join_rows(self, ctx, numbers, true) end
  numbers:scatter_(self.views.places_flat, self.views.flat)
end

--- Adds `more` to this layer's numbers, which load has read.
---@param more kvlab.Tensor  f32 [seqs, heads, width]
function Tally:count(ctx, more)
  layer_of(self, ctx)
  self.values:add(more, self.values)
  self:store(ctx)
end

--- Finds which sequences of a step are due: at their first step, and at every `period`-th
-- step after it. `renew` works for those. Also finds which are not due, but will be in
-- one of the next `ahead` (0) steps; `foresee` works for those. Call it once a step,
-- after begin.
---@return integer due
function Tally:due(ctx, period, ahead)
  self.due_step = ctx.step
  self.due_count, self.soon_count = 0, 0
  if self.journal and self.journal.is_open then keep_ages(self, ctx.sequences) end
  for i, seq in ipairs(ctx.sequences) do
    local row = row_of(self, seq)
    local before = self.ages[row]
    local age = ((before or -1) + 1) % period
    self.ages[row], self.row_ages[i], self.ages_before[i] = age, age, before
    self.is_due[i] = age == 0
    self.is_soon[i] = age > 0 and age + (ahead or 0) >= period
    if age == 0 then self.due_count = self.due_count + 1 end
    if self.is_soon[i] then self.soon_count = self.soon_count + 1 end
  end
  return self.due_count
end

--- Sets self.values: to the values of make(owner, ctx), f32 [seqs, heads, width], for the
-- `count` sequences where `is_chosen` is set; to the kept values for the others.
local function mix(self, ctx, is_chosen, count, make, owner)
  layer_of(self, ctx)
  local made = count > 0
    and options.argument("tally", "what make returns", make(owner, ctx), kinds.tensor)
  if made and count == ctx.seqs then
    self.values:copy_(made)
    return self.values
  end
  self:load(ctx)
  for i = 0, count > 0 and ctx.seqs - 1 or -1 do
    if is_chosen[i + 1] then
      self.values:index(i):copy_(made:index(i))
    elseif ctx.is_rows and i > 0 and ctx.sequences[i].base == ctx.sequences[i + 1].base
    then
      self.values:index(i):copy_(self.values:index(i - 1)) -- what the row before kept
    end
  end
  return self.values
end

--- Keeps the values of make(owner, ctx), f32 [seqs, heads, width], for the sequences that
-- are due. Returns the kept values of all sequences.
function Tally:renew(ctx, make, owner)
  mix(self, ctx, self.is_due, self.due_count, make, owner)
  if self.due_count == 0 then return self.values end
  if not ctx.is_rows then
    self:store(ctx)
    return self.values
  end
  local numbers, chosen = layer_of(self, ctx), ctx:new_scores(self.heads)
  if self.journal and self.journal.is_open then keep_stored(self, ctx.layer) end
  chosen:copy_(self.values)
  join_rows(self, ctx, numbers, false)
  numbers:scatter_(self.views.places_flat, self.views.flat)
  return chosen -- in self.values every row has its sequence's last
end

--- The values that would be kept if the sequences that are due soon were due now; at the
-- end of a prompt, if all were due. Returns nil when none is due soon.
function Tally:foresee(ctx, make, owner)
  if ctx.is_prefill then
    self:begin(ctx)
    return tensor.scope(make, owner, ctx)
  end
  return self.soon_count > 0
    and mix(self, ctx, self.is_soon, self.soon_count, make, owner) or nil
end

-- ---- one sequence ---------------------------------------------------------------------

--- Keeps what put is about to change in a step of rows, for take_back.
local function note_put(self, seq, layer, row)
  local values = tensor.lasting(function() return cells(self, layer, row):clone() end)
  table.insert(self.puts, { layer = layer, row = row, seq = seq.base, at = seq.row,
                            values = values })
end

local function put(self, seq, layer, values, add)
  local dev, n = self.shape.device, values:size(1)
  local places = tensor.arange(dev, "i32", self.heads, 0, self.shape.max_blocks)
    :reshape { self.heads, 1 } + tensor.arange(dev, "i32", n)
  local row = row_of(self, seq)
  if self.journal and self.journal.is_open then keep_put(self, layer, row) end
  if seq.base then note_put(self, seq, layer, row) end
  row = cells(self, layer, row):reshape { 1, self.row_cells }
  local from = values:reshape { 1, self.heads * n }
  places = places:reshape { 1, self.heads * n }
  if add then row:scatter_add_(places, from) else row:scatter_(places, from) end
end

--- Sets the numbers of a sequence's first blocks in a layer; with `add`, adds to them. It
-- makes tensors, so it is not for every step.
---@param values kvlab.Tensor  f32 [heads, n]
---@param add? boolean
function Tally:put(seq, layer, values, add)
  tensor.scope(put, self, seq, layer, values, add)
end

--- Bytes that load reads for one block, per KV head.
function Tally:bytes_block() return 4 * self.heads / self.shape.kv_heads end

--- Forgets every sequence.
function Tally:reset()
  for _, seq in pairs(self.owners) do seq.state[self] = nil end
  self.owners = setmetatable({}, { __mode = "v" })
  self.placed = nil
end

M.tally = arguments.of("tally", M.tally, { shape = objects.sequence_shape,
  heads = options.optional(options.count), initial = options.optional(options.number) })

local STEP = { ctx = objects.context, make = options.callable }
arguments.methods(Tally, "a tally", {
  inherit = { seq = objects.sequence, fork = objects.sequence },
  begin = { ctx = objects.context }, load = { ctx = objects.context },
  store = { ctx = objects.context },
  count = { ctx = objects.context, more = kinds.tensor },
  due = { ctx = objects.context, period = options.count,
          ahead = options.optional(options.whole) },
  renew = STEP, foresee = STEP,
  put = { seq = objects.sequence, layer = options.whole, values = kinds.tensor },
  take_back = { seq = objects.sequence, first = options.whole, kept = options.whole },
})

return M
