--- A decode step of several new tokens for a sequence, as policies see it. Speculative
-- decoding verifies a draft with such a step: the tokens of the draft are guesses of what
-- the model would say, and the wrong ones are taken back.
--
-- Every new token is a row of its own. To a policy, a step of rows looks like a decode
-- step of as many sequences: ctx.seqs counts rows, row r has one query, the length that
-- its sequence has with its token, and its sequence's table. So a policy needs no code
-- for such steps, and what it selects for a token does not depend on the tokens after it.
-- Row r of ctx.sequences is a view of the row's sequence: it has the sequence's state,
-- and the row's length. In step_begin, when no summary knows the new tokens yet, it has
-- the length of its sequence's first row.
--
-- A step that makes a token of a draft has one row for each sequence. In step_begin, the
-- views have the length of the draft's first step. So what a policy computes there from
-- full blocks does not depend on tokens that may be wrong, and that may lie in other
-- blocks once they are verified.
--
-- A step of rows is a view of its batch, with these fields in place of the batch's own:
--   seqs, count, counts, tables, lens, last    as above; every count is 1
--   first      for each sequence, the number of its first row
--   opens      i32 [rows, 2], of the sequences' placements in a host tier
--   row_starts i32 [rows + 1], with a draft tree: a GPU's kernels of prefill know trees
local sequence = require "kvlab.memory.sequence"
local tensor = require "kvlab.tensor.arithmetic"

local M = {}

---@class kvlab.Rows
---@field batch kvlab.Batch
---@field count integer      rows
---@field first integer[]    of each sequence of the batch
---@field own integer[]      the number of new tokens of each sequence
---@field tree kvlab.Tensor|nil  u64 [rows, words]
local Rows = {}

--- The rows of the steps of one attention.
function M.new(device)
  local self = { device = device, seqs = {}, counts = {}, first = {}, own = {},
                 buffers = {}, pool = {} }
  return setmetatable(self, { __index = function(rows, key)
    local own = Rows[key]
    if own ~= nil then return own end
    local batch = rawget(rows, "batch")
    return batch and batch[key]
  end })
end

local function make_buffers(self, rows, width)
  local b = { tables = tensor.tensor(self.device, "i32", { rows, width }),
              lens = tensor.tensor(self.device, "i32", { rows }),
              opens = tensor.tensor(self.device, "i32", { rows, 2 }) }
  b.lens_rows = b.lens:reshape { rows, 1 }
  b.starts = tensor.arange(self.device, "i32", rows + 1)
  return b
end

--- The arrays of a step of this shape, always the same ones: graphs read them.
local function buffers_for(self, rows, width)
  local key = rows * 2 ^ 32 + width
  local b = self.buffers[key]
  if not b then
    b = tensor.lasting(make_buffers, self, rows, width)
    self.buffers[key] = b
  end
  return b
end

--- Makes the rows those of a step of `batch`, in which every sequence has at least one
-- new token.
---@param batch kvlab.Batch
---@param before? integer  so many tokens of the same draft came before (0)
---@param open_limit? integer  the most blocks that all tokens of the draft can lie in
function Rows:begin(batch, before, open_limit)
  local seqs, row = self.seqs, 0
  self.batch, self.before, self.open_limit = batch, before or 0, open_limit
  for i = 1, batch.count do
    local seq, n = batch.seqs[i], batch.counts[i]
    local length = seq:length()
    self.first[i], self.own[i] = row + 1, n
    for nth = 0, n - 1 do
      row = row + 1
      local view = self.pool[row] or {}
      self.pool[row] = view
      seqs[row] = sequence.view(view, seq, length - n + 1 - self.before)
      view.row, view.past = row, (batch.tree and n - 1 or nth) + self.before
      self.counts[row] = 1
    end
  end
  for i = #seqs, row + 1, -1 do seqs[i], self.counts[i] = nil, nil end
  for i = #self.own, batch.count + 1, -1 do self.first[i], self.own[i] = nil, nil end
  local b = buffers_for(self, row, batch.width)
  self.count, self.tables, self.lens, self.lens_rows = row, b.tables, b.lens, b.lens_rows
  self.use_layer = batch.use_layer and Rows.use_layer_of
  self:fill_tables()
  self.row_starts, self.opens = batch.tree and b.starts or nil, nil
  if batch.placement.opens then
    batch.placement.opens:gather_rows(batch.owners, b.opens)
    self.opens = b.opens
  end
  return self
end

--- The tables and lengths of the rows.
function Rows:fill_tables()
  local batch = self.batch
  batch.tables:gather_rows(batch.owners, self.tables)
  if batch.tree or self.use_layer then
    batch.lens:reshape { batch.count, 1 }:gather_rows(batch.owners, self.lens_rows)
    if not batch.tree then self.lens:sub(batch.behind, self.lens) end
  else
    batch.positions:add(1, self.lens)
  end
end

--- Makes tables and lengths those of a layer, where the cache has tables by layer.
function Rows:use_layer_of(layer)
  if self.batch.layer ~= layer then self.batch:use_layer(layer) end
  self:fill_tables()
end

--- Gives the views of sequences the lengths of their rows, after step_begin.
function Rows:lengthen()
  for _, view in ipairs(self.seqs) do
    view.view_of_length, view.past = view.view_of_length + view.past, 0
  end
end

-- ---- parts of a step ------------------------------------------------------------------

local function narrowed(t, first, count) return t and t:narrow(first, count) end

--- Attends with reader:attend_rows(attention, selection, part, out, lse, hook) for at
-- most `most` rows at a time, where a memory tier has no room for all of them. A part is
-- a view of the context, of rows part.row ... part.row + part.seqs - 1.
function M.in_parts(reader, most, attention, selection, ctx, out, lse, hook)
  local q = ctx.query
  out = out or tensor.tensor(q.device, q:type(),
    { q:size(0), q:size(1), attention.cache.value_dim })
  for row = 0, ctx.seqs - 1, most do
    local n = math.min(most, ctx.seqs - row)
    local part = setmetatable({ row = row, seqs = n, query = ctx.query:narrow(row, n),
      tables = ctx.tables:narrow(row, n), lens = ctx.lens:narrow(row, n),
      opens = narrowed(ctx.opens, row, n), tree = narrowed(ctx.tree, row, n),
      starts = narrowed(ctx.starts, 0, n + 1) },
      { __index = ctx })
    reader:attend_rows(attention, narrowed(selection, row, n), part,
      out:narrow(row, n), narrowed(lse, row, n), hook)
  end
  return out
end

-- ---- taking back ----------------------------------------------------------------------

--- The length of sequence i at the end of the step.
function Rows:length(i) return self.seqs[self.first[i] + self.own[i] - 1]:length() end

--- Checks the number of newest tokens of each sequence that are to be taken back.
function Rows:check_taken(what, counts)
  for i = 1, self.batch.count do
    local n = counts[i]
    if type(n) ~= "number" or n % 1 ~= 0 or n < 0 or n > self.own[i] then
      return ("%s: count %d is %s, expected 0 ... %d, the new tokens of the sequence")
        :format(what, i, tostring(n), self.own[i])
    end
  end
end

return M
