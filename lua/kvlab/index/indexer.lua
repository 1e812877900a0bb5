--- Selects the tokens that a lightning indexer finds. It computes logits of index keys,
-- takes the top-k and transforms them, all within a memory limit.
--
--   local indexer = kv.indexer { topk = 2048, logits_bytes_max = 64 * 2 ^ 20 }
--   local places = indexer:select { q = q8, weights = w, cache = index:layer(layer),
--     tables = tables, block_size = 64, lens = lens, to = "places" }
--
-- The logits of all rows at once may be too large: 16 GiB for 4096 queries after a
-- million tokens. They are computed in chunks of rows, and each chunk goes through top-k
-- before the next. If not even one row fits, they are computed in tiles of columns, which
-- are merged into a running top-k. The selection does not depend on this. If no row has
-- more than topk tokens, all tokens are selected without logits, and q and weights may be
-- missing.
--
-- indexer_plan.lua says how much memory is allowed. It is never more than
-- logits_bytes_max, which covers everything that a selection allocates. Tables are not
-- copied. The memory is kept for the next call, until free().
--
-- Source  SGLang's NSA indexer, where a chunk gathers a page table as large as its logits
local arguments = require "kvlab.arguments"
local device = require "kvlab.tensor.device"
local library = require "kvlab.library"
local kinds = require "kvlab.tensor.kinds"
local ops = require "kvlab.tensor.ops"
local options = require "kvlab.options"
local plans = require "kvlab.index.indexer_plan"
local tensor = require "kvlab.tensor.arithmetic"

local C, check = library.C, library.check
local M = {}

---@class kvlab.Indexer
---@field topk integer
---@field logits_bytes_max number
local Indexer = {}
Indexer.__index = Indexer

local OPTIONS = {
  device = kinds.device, topk = options.count,
  logits_bytes_max = { "a number of bytes > 0", function(x)
    return options.number[2](x) and x > 0
  end }, logits = options.one_of("f32", "bf16"), streaming = options.boolean,
}

--- Makes an indexer, which selects tokens on a device.
---@param o? table  topk (2048); logits_bytes_max (only indexer_plan's limit); logits:
--                  "f32" or "bf16"; streaming: tiles even where rows fit (false); device
---@return kvlab.Indexer
function M.indexer(o)
  o = options.check("indexer", o, OPTIONS)
  local self = setmetatable({ device = device.device(o.device), topk = o.topk or 2048,
    logits_bytes_max = o.logits_bytes_max or math.huge, dtype = o.logits or "f32",
    streaming = o.streaming or false,
    buffers = {}, part = {}, to = {}, merge = {} }, Indexer)
  self.memory = function()
    local stats = self.device:stats()
    return stats.bytes_free + stats.bytes_cached + self:bytes(), stats.bytes_total
  end
  return self
end

-- ---- memory --------------------------------------------------------------------------

--- Bytes of memory that are kept.
function Indexer:bytes()
  local sum = 0
  for _, held in pairs(self.buffers) do sum = sum + held:bytes() end
  return sum
end

--- Drops the views, which keep memory alive as tensors do.
local function drop_work(self)
  if not self.work then return end
  for _, t in pairs(self.work.views) do t:free() end
  self.work = nil
end

--- Gives back the memory that is kept. The next call allocates it again.
function Indexer:free()
  drop_work(self)
  for _, held in pairs(self.buffers) do held:free() end
  self.buffers = {}
end

--- How `rows` rows of n logits would be computed: how many rows and columns at a time. If
-- columns is n, rows are computed whole.
---@param block_size? integer  of paged keys: tiles are whole blocks
---@param together? integer    rows of a sequence of paged keys, which may share a tile
---@return { rows: integer, columns: integer, streaming: boolean }
function Indexer:plan(rows, n, block_size, together)
  local bytes = library.C.kvl_dtype_bytes(library.dtype(self.dtype))
  local limit = plans.allowed(rows, n, self.logits_bytes_max, self.memory)
  local count, columns = plans.chunk { rows = rows, n = n, topk = self.topk,
    bytes = bytes, block_size = block_size or 1, limit = limit,
    together = together or rows, streaming = self.streaming }
  if not count then
    error(("indexer: logits_bytes_max is %s, expected at least %d for %d rows and topk "
      .. "%d"):format(tostring(self.logits_bytes_max), columns, rows, self.topk), 2)
  end
  return { rows = count, columns = columns,
           streaming = self.streaming or columns < n }
end

--- A tensor in a named buffer, which is made, or made larger, when needed.
local function in_buffer(self, name, dtype, dims)
  local count = 1
  for _, size in ipairs(dims) do count = count * size end
  local held = self.buffers[name]
  if not held or held.count < count then
    if held then held:free() end
    self.buffers[name] = nil -- freed before the new memory is asked for
    held = tensor.lasting(tensor.tensor, self.device, dtype, { count })
    self.buffers[name] = held
  end
  return held:narrow(0, count):reshape(dims)
end

local function new_views(self, work)
  local windows = in_buffer(self, "windows", "i32", { 4, work.of_rows })
  local views = { starts = windows:index(0), ends = windows:index(1),
                  tile_starts = windows:index(2), tile_ends = windows:index(3) }
  in_buffer(self, "logits", self.dtype, { work.rows, work.columns })
  if work.streaming then
    local dims = { 2, work.rows, self.topk }
    local values = in_buffer(self, "values", "f32", dims)
    local indices = in_buffer(self, "indices", "i32", dims)
    views.values1, views.values2 = values:index(0), values:index(1)
    views.indices1, views.indices2 = indices:index(0), indices:index(1)
  end
  return views
end

--- The plan for a shape and the views of its buffers. Those of the last shape are kept.
local function work_for(self, rows, n, block_size, together)
  local work = self.work
  if work and work.of_rows == rows and work.of_n == n and work.together == together then
    return work
  end
  drop_work(self)
  work = self:plan(rows, n, block_size, together)
  work.of_rows, work.of_n, work.together = rows, n, together
  work.block_size = block_size
  work.views = tensor.lasting(tensor.scope, new_views, self, work)
  self.work = work
  return work
end

--- Logits of this many rows and columns, in the buffer.
local function logits_for(self, work, rows, columns)
  local key = rows * 2 ^ 32 + columns
  local logits = work.views[key]
  if not logits then
    logits = tensor.lasting(tensor.scope, in_buffer, self, "logits", self.dtype,
      { rows, columns })
    work.views[key] = logits
  end
  return logits
end

--- The first `count` rows of t.
local function head(t, count)
  return t:size(0) == count and t or t:narrow(0, count)
end

-- ---- a chunk of rows -----------------------------------------------------------------

local BY_ROW = { "q", "weights", "lens", "starts", "row_sequence", "offsets" }

--- The parts of a call's tensors for `count` rows from row `first` on. each: how many
-- rows a sequence has, if the rows follow the order of the tables.
local function part_of(self, call, out, rows, each, first, count)
  local part, is_all = self.part, count == rows
  for i = 1, #BY_ROW do
    local t = call[BY_ROW[i]]
    if t and not is_all then t = t:narrow(first, count) end
    part[BY_ROW[i]] = t
  end
  part.tables = call.tables
  if part.tables and each and not is_all then
    part.tables = call.tables:narrow(math.floor(first / each), math.ceil(count / each))
  end
  part.out = is_all and out or out:narrow(first, count)
  part.cache, part.k, part.scales = call.cache, call.k, call.scales
  part.edit = call.edit
  return part
end

--- How many rows a chunk that begins at `first` has: whole sequences, or a part of one.
local function chunk_rows(most, rows, each, first)
  if each and most < each then return math.min(most, each - first % each) end
  if each then most = math.floor(most / each) * each end
  return math.min(most, rows - first)
end

--- The transform as ops takes it, and the tensor that it writes.
local function transform_for(self, call, part)
  local to = self.to
  to.tables, to.row_sequence, to.offsets = nil, nil, nil
  if call.to == "places" then
    to.tables, to.row_sequence = part.tables, part.row_sequence
    to.block_size = call.block_size
  elseif call.to == "ragged" then
    to.offsets = part.offsets
  end
  to.starts, to.lens, to.out = part.starts, part.lens, part.out
  return to
end

--- Selects tokens for a chunk from whole rows of logits.
local function select_rows(self, work, part, to, rows)
  local logits = logits_for(self, work, rows, work.of_n)
  if part.cache then
    ops.mqa_logits_paged(part.q, part.weights, part.cache, part.tables, part.lens, logits)
  else
    ops.mqa_logits(part.q, part.weights, part.k, part.scales, part.starts, part.ends,
      logits)
  end
  if part.edit then part.edit(logits, part.lens, 0) end
  to.logits = logits
  ops.step.topk_transform(to)
end

--- Logits of the columns from `first` on, computed as if the keys began there.
local function tile_logits(part, work, first, logits)
  local rows, columns = logits:size(0), logits:size(1)
  local ends = head(work.views.tile_ends, rows)
  if part.cache then -- paged keys of one sequence
    check(C.kvl_binary_scalar(C.KVL_BINARY_SUB, part.lens, first, ends))
    local width, block = part.tables:size(1), first / work.block_size
    local blocks = math.min(math.ceil(columns / work.block_size), width - block)
    local there = part.tables:reshape({ width }):narrow(block, blocks)
    ops.mqa_logits_paged(part.q, part.weights, part.cache, there:reshape { 1, blocks },
      ends, logits)
    return
  end
  local starts = head(work.views.tile_starts, rows)
  check(C.kvl_binary_scalar(C.KVL_BINARY_SUB, part.starts, first, starts))
  check(C.kvl_binary_scalar(C.KVL_BINARY_SUB, part.ends, first, ends))
  ops.mqa_logits(part.q, part.weights, part.k:narrow(first, columns),
    part.scales:narrow(first, columns), starts, ends, logits)
end

--- Selects tokens for a chunk from tiles of logits.
local function stream_rows(self, work, part, to, rows)
  local merge, views, now = self.merge, work.views, 1
  local values = { head(views.values1, rows), head(views.values2, rows) }
  local indices = { head(views.indices1, rows), head(views.indices2, rows) }
  merge.starts, merge.lens = part.starts, part.lens
  for first = 0, work.of_n - 1, work.columns do
    local columns = math.min(work.columns, work.of_n - first)
    merge.logits, merge.first = logits_for(self, work, rows, columns), first
    tile_logits(part, work, first, merge.logits)
    if part.edit then part.edit(merge.logits, part.lens, first) end
    merge.kept_values, merge.kept_indices = values[now], indices[now]
    now = 3 - now
    merge.values, merge.indices = values[now], indices[now]
    ops.step.topk_merge(merge)
  end
  to.indices, to.lens = indices[now], nil
  ops.step.transform_indices(to)
end

-- ---- select --------------------------------------------------------------------------

local a_tensor = kinds.tensor
local CALL = {
  q = a_tensor, weights = a_tensor, lens = options.required(a_tensor), cache = a_tensor,
  tables = a_tensor, k = a_tensor, scales = a_tensor, starts = a_tensor,
  row_sequence = a_tensor, offsets = a_tensor, out = a_tensor, max_len = options.whole,
  to = options.one_of("indices", "places", "ragged"), block_size = options.count,
  edit = options.callable,
}
local COLUMNS = 1024 -- the rows of a growing cache get longer by this many columns

--- What is wrong with a call, or nil. all: the call takes every token, without logits.
local function complaint(call, all)
  if call.to == "places" and not (call.tables and call.block_size) then
    return "to is places, expected tables and block_size"
  elseif call.to == "ragged" and not call.offsets then
    return "to is ragged, expected offsets"
  elseif all then
    return nil
  elseif not (call.q and call.weights) then
    return "q or weights is missing"
  elseif not call.cache == not call.k then
    return "expected one of cache and k"
  elseif call.k and not call.scales then
    return "k is given without scales"
  elseif call.cache and (not call.tables or call.row_sequence) then
    return "cache is given, expected tables and no row_sequence"
  end
end

--- The number of columns of logits, and the tokens of a block of paged keys.
local function columns_of(call)
  if call.k then return call.k:size(0), 1 end
  local block_size = call.cache:size(1) / (call.q:size(2) + 4)
  local all = call.tables:size(1) * block_size
  if not call.max_len then return all, block_size end
  return math.min(all, math.ceil(call.max_len / COLUMNS) * COLUMNS), block_size
end

--- The windows of contiguous keys: the starts (0 unless given) and ends of the rows.
local function set_windows(call, work, part, count)
  if not call.k then return end
  if not part.starts then part.starts = head(work.views.starts, count):fill_(0) end
  part.ends = head(work.views.ends, count)
  check(C.kvl_binary(C.KVL_BINARY_ADD, part.starts, part.lens, part.ends))
end

local function select_chunk(self, call, work, out, each, first, count)
  local part = part_of(self, call, out, work.of_rows, each, first, count)
  set_windows(call, work, part, count)
  local to = transform_for(self, call, part)
  if work.streaming then stream_rows(self, work, part, to, count)
  else select_rows(self, work, part, to, count) end
end

--- The tokens that each row attends to: i32 [rows, topk], indices in ascending order,
-- or what the transform makes of them; padded with -1.
--  q        f8e4m3 [rows, heads, dim] and weights f32 [rows, heads], see kv.index_cache
--  lens     i32 [rows]: how many tokens a row sees
--  cache    paged keys, a layer of kv.index_cache, by tables i32 [sequences, width];
--           rows are a multiple of sequences; or
--  k, scales  contiguous keys, f8e4m3 [n, dim] and f32 [n]; a row sees those from starts
--           i32 [rows] (0) on
--  max_len  the longest of lens, where the host knows it
--  to       indices (default); places, by tables, block_size and maybe row_sequence i32
--           [rows]; ragged, index + offsets i32 [rows]
--  edit     function(logits, lens, first): may change logits [rows, columns] of the rows
--           with these lens, whose first column is token `first`, before the top-k. A
--           token with a logit of -inf or NaN is not selected. Not called where every row
--           has at most topk tokens and all of them are taken
--  out      i32 [rows, topk]
---@param call table
---@return kvlab.Tensor out
function Indexer:select(call)
  options.check("indexer", call, CALL)
  return self:select_step(call)
end

--- The same as select without checking the names and types of the call, for code that
-- runs in every step.
---@param call table  as for select
---@return kvlab.Tensor out
function Indexer:select_step(call)
  local all, n, block_size = call.max_len and call.max_len <= self.topk, nil, nil
  local words = complaint(call, all)
  if words then error("indexer: " .. words, 2) end
  if not all then
    n, block_size = columns_of(call)
    all = n <= self.topk
  end
  local rows = call.lens:size(0)
  local out = call.out or tensor.tensor(self.device, "i32", { rows, self.topk })
  if rows == 0 then return out end
  local each = call.tables and not call.row_sequence and rows / call.tables:size(0)
  if all then
    local to = transform_for(self, call, part_of(self, call, out, rows, each, 0, rows))
    return ops.step.transform_indices(to)
  end
  local work = work_for(self, rows, n, block_size, call.cache and each or rows)
  if work.rows == rows and not work.streaming then
    select_chunk(self, call, work, out, each, 0, rows)
    return out
  end
  tensor.scope(function() -- frees the views made for chunks and tiles
    local first = 0
    while first < rows do
      local count = chunk_rows(work.rows, rows, each, first)
      select_chunk(self, call, work, out, each, first, count)
      first = first + count
    end
  end)
  return out
end

local COUNT = options.optional(options.count)
arguments.methods(Indexer, "an indexer", {
  plan = { rows = options.count, n = options.count, block_size = COUNT,
           together = COUNT },
  select_step = { call = options.table },
})

return M
