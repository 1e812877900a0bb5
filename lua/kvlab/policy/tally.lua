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
local ffi = require "ffi"
local library = require "kvlab.library"
local tensor = require "kvlab.tensor.arithmetic"

local C, check = library.C, library.check
local M = {}

local ROWS = 16 -- rows for sequences at first

---@class kvlab.Tally
---@field values kvlab.Tensor  f32 [seqs, heads, width]: what load read; store writes it
local Tally = {}
Tally.__index = Tally

local function open_memory(self, rows)
  local s = self.shape
  local memory = tensor.full(s.device, "f32", { s.layers, rows * self.row_cells },
    self.initial)
  self.memory, self.row_count, self.layers = memory, rows, {}
  for layer = 0, s.layers - 1 do
    self.layers[layer] = memory:index(layer):reshape { 1, rows * self.row_cells }
  end
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
  }, Tally)
  tensor.lasting(open_memory, self, ROWS)
  return self
end

-- ---- rows -----------------------------------------------------------------------------

--- The cells of one row in a layer: f32 [row_cells].
local function cells(self, layer, row)
  return self.layers[layer]:reshape { self.row_count * self.row_cells }
    :narrow(row * self.row_cells, self.row_cells)
end

local function grow(self)
  local old, rows = self.layers, self.row_count
  open_memory(self, 2 * rows)
  local count = rows * self.row_cells
  for layer = 0, self.shape.layers - 1 do
    self.layers[layer]:reshape { 2 * count }:narrow(0, count)
      :copy_(old[layer]:reshape { count })
  end
  self.placed = nil
end

local function find_free(self)
  for row = 0, self.row_count - 1 do
    local owner = self.owners[row]
    if not owner or not owner.handle then return row end
  end
  tensor.lasting(grow, self)
  return self.row_count / 2
end

local function claim(self, seq)
  local row = find_free(self)
  self.owners[row], seq.state[self], self.ages[row] = seq, row, nil
  return row
end

--- The row of a sequence. It is claimed and filled when it is first asked for.
local function row_of(self, seq)
  local row = seq.state[self]
  if row then return row end
  row = claim(self, seq)
  for layer = 0, self.shape.layers - 1 do cells(self, layer, row):fill_(self.initial) end
  return row
end

--- Copies the numbers of a sequence to its fork. Called when a sequence is forked.
function Tally:inherit(seq, fork)
  local from, to = seq.state[self], claim(self, fork)
  for layer = 0, self.shape.layers - 1 do
    cells(self, layer, to):copy_(cells(self, layer, from))
  end
end

-- ---- a step ---------------------------------------------------------------------------

local function make_views(self, ctx)
  local dev, heads, n = self.shape.device, ctx.seqs * self.heads, ctx.width
  self.firsts = tensor.tensor(dev, "i32", { heads, 1 })
  self.columns = tensor.arange(dev, "i32", n)
  self.places = tensor.tensor(dev, "i32", { heads, n })
  self.places_flat = self.places:reshape { 1, heads * n }
  self.values = tensor.tensor(dev, "f32", { ctx.seqs, self.heads, n })
  self.flat = self.values:reshape { 1, heads * n }
  self.host_firsts = ffi.new("int32_t[?]", heads)
end

--- Finds the cells of this step's sequences. Call it once a step, in step_begin.
function Tally:begin(ctx)
  local heads, width = self.heads, self.shape.max_blocks
  if self.shape_number ~= ctx.shape_number then
    tensor.lasting(make_views, self, ctx)
    self.shape_number, self.placed = ctx.shape_number, nil
  end
  local same = self.placed
  for i = 0, ctx.seqs - 1 do
    local first = row_of(self, ctx.sequences[i + 1]) * self.row_cells
    same = same and self.placed and self.host_firsts[i * heads] == first
    for head = 0, heads - 1 do
      self.host_firsts[i * heads + head] = first + head * width
    end
  end
  if same then return end
  check(C.kvl_tensor_write(self.firsts, self.host_firsts, 4 * ctx.seqs * heads))
  self.firsts:add(self.columns, self.places)
  self.placed = true
end

--- Reads this layer's numbers: f32 [seqs, heads, width].
function Tally:load(ctx)
  self.layers[ctx.layer]:gather(self.places_flat, self.flat)
  return self.values
end

--- Writes self.values back.
function Tally:store(ctx)
  self.layers[ctx.layer]:scatter_(self.places_flat, self.flat)
end

--- Adds `more` to this layer's numbers, which load has read.
---@param more kvlab.Tensor  f32 [seqs, heads, width]
function Tally:count(ctx, more)
  self.values:add(more, self.values)
  self:store(ctx)
end

--- Finds which sequences of a step are due: at their first step, and at every `period`-th
-- step after it. `renew` works for those. Also finds which are not due, but will be in
-- one of the next `ahead` (0) steps; `foresee` works for those. Call it once a step,
-- after begin.
---@return integer due
function Tally:due(ctx, period, ahead)
  self.due_count, self.soon_count = 0, 0
  for i, seq in ipairs(ctx.sequences) do
    local row = seq.state[self]
    local age = ((self.ages[row] or -1) + 1) % period
    self.ages[row] = age
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
  local made = count > 0 and make(owner, ctx)
  if made and count == ctx.seqs then
    self.values:copy_(made)
    return self.values
  end
  self:load(ctx)
  for i = 0, count > 0 and ctx.seqs - 1 or -1 do
    if is_chosen[i + 1] then self.values:index(i):copy_(made:index(i)) end
  end
  return self.values
end

--- Keeps the values of make(owner, ctx), f32 [seqs, heads, width], for the sequences that
-- are due. Returns the kept values of all sequences.
function Tally:renew(ctx, make, owner)
  mix(self, ctx, self.is_due, self.due_count, make, owner)
  if self.due_count > 0 then self:store(ctx) end
  return self.values
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
  local places = tensor.arange(dev, "i32", self.heads, 0, self.shape.max_blocks)
    :reshape { self.heads, 1 } + tensor.arange(dev, "i32", n)
  local row = cells(self, layer, row_of(self, seq)):reshape { 1, self.row_cells }
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

--- Forgets every sequence.
function Tally:reset()
  for _, seq in pairs(self.owners) do seq.state[self] = nil end
  self.owners = setmetatable({}, { __mode = "v" })
  self.placed = nil
end

return M
