--- Tallies: numbers that a policy keeps on the device for the blocks of each sequence,
-- such as how often a block was selected. There is one f32 for every layer, sequence,
-- head and logical block, or token. A summary belongs to a physical block, and sequences
-- that share the block share it; a tally belongs to one sequence. A fork begins with a
-- copy. When a sequence is closed, its row becomes free. Truncating a sequence does not
-- change its numbers. Where tokens are evicted, tallies by token keep the numbers of the
-- tokens that stay, and a new token that replaces another begins with `initial`.
--
--   init       = function(self, shape) self.counts = kv.tally(shape) end,
--   step_begin = function(self, ctx) self.counts:begin(ctx) end,
--   score      = function(self, ctx) return self.counts:load(ctx) end,
--
-- A graph keeps the memory that the tally had at its recording. A tally has rows for 16
-- sequences at first, or for as many as a step may have; where tables are by head, each
-- KV head has a row. When these are not enough, the number of rows is doubled;
-- shape.growths counts this, and an engine records its graphs again.
local arguments = require "kvlab.arguments"
local ffi = require "ffi"
local kinds = require "kvlab.tensor.kinds"
local library = require "kvlab.library"
local objects = require "kvlab.memory.objects"
local options = require "kvlab.options"
local tensor = require "kvlab.tensor.arithmetic"

local C, check = library.C, library.check
local M = {}

local ROWS = 16 -- rows for sequences at first, at least

---@class kvlab.Tally
---@field values kvlab.Tensor  f32 [seqs, heads, width]: what load read; store writes it,
--                             unless it is given others
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
---@param per? string|integer  "block", or "token": a number for each token of a block; or
--                   how many numbers a head has, however long the sequence is ("block")
---@return kvlab.Tally
function M.tally(shape, heads, initial, per)
  heads = heads or shape.kv_heads
  local each = per == "token" and shape.block_size or 1
  local own = type(per) == "number" and per or nil
  local self = setmetatable({ shape = shape, heads = heads, initial = initial or 0,
    by_token = per == "token", each = each, own = own,
    row_cells = heads * (own or shape.max_blocks * each),
    owners = setmetatable({}, { __mode = "v" }),
    ages = {}, is_due = {}, is_soon = {}, due_count = 0, soon_count = 0,
    views_of = {}, unnoted = {}, admitted = {}, journal = shape.journal,
    row_count = math.max(ROWS, shape.rows or 0),
  }, Tally)
  shape.has_tally = true
  if self.by_token and shape.token_tallies then
    table.insert(shape.token_tallies, self)
  end
  self.memory, self.layers = tensor.lasting(new_memory, self, self.row_count)
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
  self.shape.growths = (self.shape.growths or 0) + 1
end

local function find_free(self)
  for row = 0, self.row_count - 1 do
    local owner = self.owners[row]
    if not owner or not (owner.head and owner.base or owner).handle then return row end
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
  local from = seq.state[self]
  if not from then return end -- seq has no numbers yet
  local to = find_free(self)
  for layer = 0, self.shape.layers - 1 do
    cells(self, layer, to):copy_(cells(self, layer, from))
  end
  claim(self, fork, to)
end

--- The parts of a tensor of `count` rows of `cells_row` numbers, each [1, cells_row].
local function rows_of(t, count, cells_row)
  local list, all = {}, t:reshape { count, cells_row }
  for i = 1, count do list[i] = all:narrow(i - 1, 1) end
  return list
end

-- ---- taking back ----------------------------------------------------------------------

-- Entries of the cache's journal, which are noted before a change.

--- Numbers that store is about to replace: of the cells that begin at `firsts`. In a step
-- of rows, also the numbers after each row.
local Store = {}
Store.__index = Store

local function new_store(self, views)
  local entry = setmetatable({ tally = self, views = views,
    firsts = ffi.new("int32_t[?]", views.heads),
    values = tensor.tensor(self.shape.device, "f32", { 1, views.values.count }) }, Store)
  entry.matrix = entry.values:reshape(views.matrix:dims())
  return entry
end

--- Makes the tensors of an entry large enough for a step of `rows` rows.
local function add_rows(entry, rows)
  local cells_row = entry.values.count / rows
  local after = tensor.tensor(entry.values.device, "f32", { rows, cells_row })
  entry.before_rows = rows_of(entry.values, rows, cells_row)
  entry.after_rows = rows_of(after, rows, cells_row)
  entry.after = after -- set last, because it says that everything is there
end

--- An entry for the numbers that store is about to replace, if this may be undone or if
-- the rows of a step are added up; nil if not.
---@return table|nil entry
---@return any noted  where it is to be noted
local function take_entry(self, ctx)
  local journal, layer = self.journal, ctx.layer
  local is_recorded = C.kvl_device_is_recording(self.shape.device) == 1
  local noted = journal and is_recorded and journal.recording
    or journal and not is_recorded and journal.is_open
  if not noted and not ctx.is_rows then return nil end
  local stored = self.views.stored
  if ctx.is_rows and stored[layer] == ctx.step then
    options.fail(("tally: layer %d is stored twice in a step of several tokens, expected "
      .. "once"):format(layer))
  end
  stored[layer] = ctx.step
  local entry = not is_recorded and table.remove(self.views.free_stores)
    or tensor.lasting(new_store, self, self.views)
  if ctx.is_rows and not entry.after then tensor.lasting(add_rows, entry, ctx.seqs) end
  entry.layer, entry.is_recorded = layer, is_recorded
  return entry, noted
end

--- Notes an entry with the numbers that are replaced. In a recorded step, each replay
-- fills the entry, and the engine then notes it in the journal.
local function note_entry(self, entry, noted)
  if entry.is_recorded then
    -- The graph keeps writing to this entry, but no engine will note it.
    table.insert(noted or self.unnoted, entry)
  elseif noted then
    entry:replayed()
    self.journal:note(entry)
  else
    table.insert(self.views.free_stores, entry) -- read in this call only
  end
end

--- Keeps the numbers that a step of rows is about to replace.
local function keep_stored(self, ctx)
  local entry, noted = take_entry(self, ctx)
  self.layers[ctx.layer]:gather(self.views.places_flat, entry.values)
  note_entry(self, entry, noted)
  return entry
end

--- The numbers are those of this step's sequences.
function Store:replayed()
  ffi.copy(self.firsts, self.tally.views.host_firsts, 4 * self.views.heads)
end

-- A copy of the entry. No replay writes to the copy.
function Store:copy()
  local views = self.views
  local entry = table.remove(views.free_stores)
    or tensor.lasting(new_store, self.tally, views)
  if self.after then
    if not entry.after then tensor.lasting(add_rows, entry, self.after:size(0)) end
    entry.after:copy_(self.after)
  end
  entry.values:copy_(self.values)
  entry.layer, entry.is_recorded = self.layer, false
  ffi.copy(entry.firsts, self.firsts, 4 * views.heads)
  return entry
end

function Store:forget()
  if not self.is_recorded then table.insert(self.views.free_stores, self) end
end

function Store:undo()
  local tally, views = self.tally, self.views
  tally.placed = nil -- the cells of this step are overwritten
  check(C.kvl_tensor_write(views.firsts, self.firsts, 4 * views.heads))
  views.firsts:add(views.columns, views.places)
  tally.layers[self.layer]:scatter_(views.places_flat, self.values)
end

function Store:take_back(first, _, kept)
  self.tally.layers[self.layer]:scatter_(self.views.row_places[first],
    kept > 0 and self.after_rows[first + kept - 1] or self.before_rows[first])
end

--- An entry for a sequence's numbers in a layer, which put is about to change; in a step
-- of rows, for one row.
local Put = {}
Put.__index = Put

local function keep_put(self, seq, layer, row)
  local values = tensor.lasting(function() return cells(self, layer, row):clone() end)
  self.journal:note(setmetatable({ tally = self, layer = layer, row = row,
    step_row = seq.base and seq.row, values = values }, Put))
end

function Put:forget() self.values:free() end

function Put:undo() cells(self.tally, self.layer, self.row):copy_(self.values) end

function Put:take_back(first, own, kept)
  local at = self.step_row
  if at and at >= first + kept and at < first + own then self:undo() end
end

--- An entry for the ages of a step's sequences, before and after `due` changes them.
local Ages = {}
Ages.__index = Ages

local function keep_ages(self, seqs)
  local entry = self.kept_ages
    or setmetatable({ tally = self, rows = {}, before = {}, after = {} }, Ages)
  self.kept_ages = nil
  entry.count = #seqs
  for i = 1, #seqs do
    local row = row_of(self, seqs[i])
    entry.rows[i], entry.before[i] = row, self.ages[row] or false
  end
  self.journal:note(entry)
  return entry
end

function Ages:forget() self.tally.kept_ages = self end

function Ages:undo()
  for i = 1, self.count do self.tally.ages[self.rows[i]] = self.before[i] or nil end
end

function Ages:take_back(first, _, kept)
  self.tally.ages[self.rows[first]] = kept > 0 and self.after[first + kept - 1]
    or self.before[first] or nil
end

-- ---- a step ---------------------------------------------------------------------------

--- What a step of this shape needs. A graph of such a step may read it.
local function make_views(self, ctx)
  local dev, heads = self.shape.device, ctx.seqs * self.heads
  local n = self.own or ctx.width * self.each
  local v = { heads = heads, firsts = tensor.tensor(dev, "i32", { heads, 1 }),
    columns = tensor.arange(dev, "i32", n),
    places = tensor.tensor(dev, "i32", { heads, n }),
    values = tensor.tensor(dev, "f32", { ctx.seqs, self.heads, n }),
    host_firsts = ffi.new("int32_t[?]", heads), free_stores = {}, stored = {} }
  v.places_flat = v.places:reshape { 1, heads * n }
  v.flat, v.matrix = v.values:reshape { 1, heads * n }, v.values:reshape { heads, n }
  v.fresh = tensor.full(dev, "f32", { heads, 1 }, self.initial)
  return v
end

--- Whether the cells were found for this step's sequences.
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
  local heads, width = self.heads, self.row_cells / self.heads
  local views = self.views_of[ctx.shape_number]
  if not views then
    views = tensor.lasting(make_views, self, ctx)
    self.views_of[ctx.shape_number] = views
  end
  if self.views ~= views then
    self.views, self.values, self.placed = views, views.values, nil
  end
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

--- Whether x is a tally by token.
function M.is_by_token(x) return getmetatable(x) == Tally and x.by_token end

--- Where this layer's numbers lie, for kernels that read them directly: the memory, f32
-- [1, cells], and where each row begins in it, i32 [seqs * heads, 1].
function Tally:memory_of(ctx)
  local numbers = layer_of(self, ctx)
  if ctx.reads and self.own then
    ctx.reads:add(4 * tonumber(self.views.values.count))
  elseif ctx.reads then
    ctx.reads:each_block(ctx, self:bytes_block())
  end
  return numbers, self.views.firsts
end

--- The index of the new tokens in a tally by token, if they replaced other tokens.
local function fresh_of(self, ctx)
  return self.by_token and ctx.new_tokens and ctx.new_tokens.of_heads[self.heads] or nil
end

--- Makes self.values the numbers of a layer.
local function read(self, ctx, numbers)
  numbers:gather(self.views.places_flat, self.views.flat)
  local fresh = fresh_of(self, ctx)
  if fresh then self.views.matrix:scatter_(fresh, self.views.fresh) end
  return self.values
end

--- Reads this layer's numbers: f32 [seqs, heads, width], by token [seqs, heads, width *
-- block_size].
function Tally:load(ctx) return read(self, ctx, (self:memory_of(ctx))) end

-- ---- steps of several tokens a sequence -----------------------------------------------

-- The rows of a sequence (memory/rows.lua) share one row of the tally. self.values has a
-- copy of it for each of them.

--- The views of the rows that steps of several tokens need in addition to make_views.
local function add_row_views(ctx, v)
  local cells_row = v.values.count / ctx.seqs
  v.row_places = rows_of(v.places, ctx.seqs, cells_row)
  v.chosen = tensor.open_like(v.values)
  v.rows = rows_of(v.values, ctx.seqs, cells_row) -- set last, because it says that
                                                  -- everything is there
end

--- Computes the values after each row, stores them in the entry, and gives all rows of a
-- sequence the values after its last row, which store then writes. is_sum: the values of
-- a row are the numbers that load read, plus what this row alone adds.
local function join_rows(self, ctx, entry, is_sum)
  local v, step = self.views, ctx.batch
  if not v.rows then tensor.lasting(add_row_views, ctx, v) end
  for i = 1, #step.own do
    local first, last = step.first[i], step.first[i] + step.own[i] - 1
    for row = first + 1, is_sum and last or first do
      local own = v.rows[row]
      own:sub(entry.before_rows[row], own):add(v.rows[row - 1], own)
    end
  end
  entry.after:copy_(v.values:reshape(entry.after:dims()))
  for i = 1, #step.own do
    local first, last = step.first[i], step.first[i] + step.own[i] - 1
    for row = first, last - 1 do v.rows[row]:copy_(v.rows[last]) end
  end
end

--- Sets this layer's numbers, or adds to them, in one launch.
local function update(self, ctx, values, is_add)
  local numbers, views = layer_of(self, ctx), self.views
  local entry, noted = take_entry(self, ctx)
  local rows = values == self.values and views.matrix
    or values:reshape { views.heads, tonumber(views.columns.count) }
  C.kvl_interrupt_hold(1) -- what has changed is noted
  local status = C.kvl_update_rows(numbers, views.firsts, rows, is_add and 1 or 0,
    is_add and fresh_of(self, ctx) or nil, self.initial, entry and entry.matrix or nil)
  if status >= 0 and entry then note_entry(self, entry, noted) end
  C.kvl_interrupt_hold(-1)
  check(status)
  if ctx.new_tokens then self.admitted[ctx.layer] = ctx.step end
end

--- Resets the numbers of tokens that replaced others, unless this step has stored numbers
-- for them already.
function Tally:admit(ctx)
  layer_of(self, ctx)
  if self.admitted[ctx.layer] == ctx.step then return end
  local views = self.views
  views.zeros = views.zeros
    or tensor.lasting(tensor.zeros, self.shape.device, "f32", views.matrix:dims())
  update(self, ctx, views.zeros, true)
end

--- Makes this layer's numbers `values` (self.values). In a step of several tokens a
-- sequence, the differences between each token's values and the numbers that load read
-- are added up.
---@param values? kvlab.Tensor  f32 [seqs, heads, width]
function Tally:store(ctx, values)
  local numbers = layer_of(self, ctx)
  if values and values.count ~= self.values.count then
    options.fail(("store: values is [%s], expected [%s]"):format(
      table.concat(values:dims(), ", "), table.concat(self.values:dims(), ", ")))
  end
  if not ctx.is_rows then return update(self, ctx, values or self.values, false) end
  if values then self.values:copy_(values) end
  join_rows(self, ctx, keep_stored(self, ctx), true)
  numbers:scatter_(self.views.places_flat, self.views.flat)
end

--- Adds `more` to this layer's numbers.
---@param more kvlab.Tensor  f32 [seqs, heads or 1, width]
function Tally:count(ctx, more)
  local numbers = layer_of(self, ctx)
  if not ctx.is_rows and more.count == self.values.count then
    return update(self, ctx, more, true)
  end
  read(self, ctx, numbers):add(more, self.values)
  self:store(ctx)
end

--- Finds which sequences of a step are due: at their first step, and at every `period`-th
-- step after it. `renew` works for those. Also finds which will be due in one of the next
-- `ahead` (0) steps; `foresee` works for these. Call it once a step, after begin.
---@return integer due
function Tally:due(ctx, period, ahead)
  self.due_count, self.soon_count = 0, 0
  local entry = self.journal and self.journal.is_open and keep_ages(self, ctx.sequences)
  for i, seq in ipairs(ctx.sequences) do
    local row = row_of(self, seq)
    local age = ((self.ages[row] or -1) + 1) % period
    self.ages[row] = age
    if entry then entry.after[i] = age end
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
      self.values:index(i):copy_(self.values:index(i - 1)) -- the values of the previous
                                                           -- row
    end
  end
  return self.values
end

--- Stores self.values, the values after each row. Returns them.
local function keep_values(self, ctx)
  if not ctx.is_rows then
    self:store(ctx)
    return self.values
  end
  local numbers, entry = layer_of(self, ctx), keep_stored(self, ctx)
  local v = self.views
  if not v.rows then tensor.lasting(add_row_views, ctx, v) end
  v.chosen:copy_(v.values)
  join_rows(self, ctx, entry, false)
  numbers:scatter_(v.places_flat, v.flat)
  return v.chosen -- in v.values every row has its sequence's last
end

--- Keeps the values of make(owner, ctx), f32 [seqs, heads, width], for the sequences that
-- are due. Returns the kept values of all sequences.
function Tally:renew(ctx, make, owner)
  mix(self, ctx, self.is_due, self.due_count, make, owner)
  return self.due_count == 0 and self.values or keep_values(self, ctx)
end

local function choose(self, made, from)
  local rows, cells_row = tonumber(from.count), tonumber(made.count / from.count)
  tensor.cat({ made, self.values }, 0):reshape { 2 * rows, cells_row }
    :gather_rows(from, self.values:reshape { rows, cells_row })
end

--- The same if only the device knows which values are new: row i stores the values of row
-- from[i] of `made` or, if from[i] is seqs + j, the present values of row j. A graph can
-- record it.
---@param made kvlab.Tensor  f32 [seqs, heads, width]
---@param from kvlab.Tensor  i32 [seqs]
function Tally:choose(ctx, made, from)
  self:load(ctx)
  tensor.scope(choose, self, made, from)
  return keep_values(self, ctx)
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

local function put(self, seq, layer, values, add)
  local dev, n = self.shape.device, values:size(1)
  local places = tensor.arange(dev, "i32", self.heads, 0, self.row_cells / self.heads)
    :reshape { self.heads, 1 } + tensor.arange(dev, "i32", n)
  local row = row_of(self, seq)
  if self.journal and self.journal.is_open then keep_put(self, seq, layer, row) end
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

--- Of a sequence's tokens in a layer, only the tokens kept[i] stay, and become token i:
-- moves their numbers.
---@param kept kvlab.Tensor  i32 [1 or heads, n]; -1: none
function Tally:keep(seq, layer, kept)
  local width, n = self.row_cells / self.heads, kept:size(1)
  local row = cells(self, layer, row_of(self, seq)):reshape { self.heads, width }
  if tonumber(kept.sizes[0]) ~= self.heads then kept = kept:expand { self.heads, n } end
  local numbers = row:gather(kept)
  self:put(seq, layer, tensor.full(numbers.device, "f32", { self.heads, width },
    self.initial))
  self:put(seq, layer, numbers)
end

--- Bytes that load reads for one block, per KV head.
function Tally:bytes_block() return 4 * self.heads * self.each / self.shape.kv_heads end

--- Forgets every sequence.
function Tally:reset()
  for _, seq in pairs(self.owners) do seq.state[self] = nil end
  self.owners = setmetatable({}, { __mode = "v" })
  self.placed = nil
end

M.tally = arguments.of("tally", M.tally, { shape = objects.sequence_shape,
  heads = options.optional(options.count), initial = options.optional(options.number),
  per = options.optional(options.either(options.one_of("block", "token"),
    options.count)) })

local STEP = { ctx = objects.context, make = options.callable }
arguments.methods(Tally, "a tally", {
  inherit = { seq = objects.sequence, fork = objects.sequence },
  begin = { ctx = objects.context }, load = { ctx = objects.context },
  memory_of = { ctx = objects.context }, admit = { ctx = objects.context },
  store = { ctx = objects.context, values = kinds.tensor_or_nil },
  count = { ctx = objects.context, more = kinds.tensor },
  due = { ctx = objects.context, period = options.count,
          ahead = options.optional(options.whole) },
  renew = STEP, foresee = STEP,
  choose = { ctx = objects.context, made = kinds.tensor, from = kinds.tensor },
  put = { seq = objects.sequence, layer = options.whole, values = kinds.tensor },
  keep = { seq = objects.sequence, layer = options.whole, kept = kinds.tensor },
})

return M
