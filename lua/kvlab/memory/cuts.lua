--- A step of a cache whose tables are by layer, or by layer and KV head, as kernels and
-- policies see it. A cut is a part of the KV memory with tables of its own.
--
-- Where tables are by head, every KV head of every sequence is a sequence of its own with
-- one KV head: ctx.seqs counts them, and the heads of a sequence are neighbours. So no
-- kernel and no policy has code for such tables. The rows of q, k and v are those of a
-- step with seqs * heads sequences, in which the new tokens of one head are neighbours;
-- `enter` brings q, k and v into this order, and `leave` brings the result back. In a
-- step of one token for each sequence, they already have this order.
--
-- Tables lie on the device for as long as the batch exists, and a step sends what has
-- changed (kvl_tables). Tables, lengths and touched blocks are those of one layer:
-- `use_layer` chooses it. In all other fields a Cuts is the batch.
local ffi = require "ffi"
local library = require "kvlab.library"
local options = require "kvlab.options"
local tensor = require "kvlab.tensor.tensor"

local C, check = library.C, library.check
local M = {}

---@class kvlab.Cuts
---@field batch kvlab.Batch
---@field layer integer       the layer in use
---@field heads integer       KV heads with tables of their own, or 1
---@field seqs kvlab.Sequence[]  [count]; of tables by head, the heads of each sequence
---@field count integer       sequences times heads
---@field counts integer[]    new tokens of each
---@field tables kvlab.Tensor      i32 [count, width], of the layer in use
---@field lens kvlab.Tensor        i32 [count]
---@field places kvlab.Tensor      i64 [tokens_count]
---@field blocks kvlab.Tensor      i32 [touched]
---@field block_tokens kvlab.Tensor i32 [touched]
---@field behind kvlab.Tensor      i32 [tokens_count]   new tokens that come after each
local Cuts = {}

-- Arrays of a batch (batch.lua). The fields of a Cuts have their names without cut_.
M.FIRST = { { "cut_places", "layers", "cut_tokens", wide = true } }
M.SECOND = {
  { "cut_lens", "layers", "cut_seqs" }, { "cut_blocks", "layers", "cut_touched" },
  { "cut_block_tokens", "layers", "cut_touched" }, { "cut_starts", "cut_edges" },
  { "cut_last", "cut_seqs" }, { "cut_positions", "cut_tokens" },
  { "cut_owners", "cut_tokens" }, { "cut_behind", "cut_tokens" },
  { "cut_order", "cut_tokens" },
}
-- The arrays of a batch that these take the place of.
M.REPLACED = { places = true, tables = true, blocks = true, block_tokens = true }

local BY_LAYER = { "lens", "places", "blocks", "block_tokens" }
local OF_STEP = { "starts", "last", "positions", "owners", "behind", "order" }
local CHANGES = 2 ^ 14 -- of tables, that are sent at a time
local UPLOADS = 4      -- buffers of changes: how many may be on their way to the device
                       -- at once

-- ---- making one -----------------------------------------------------------------------

---@param batch kvlab.Batch
---@param seqs integer   most sequences of a step
---@param width integer  most blocks of a table
---@return kvlab.Cuts
function M.new(batch, seqs, width)
  local cache = batch.cache
  local dev, layers, heads = cache.device, cache.cut_layers, cache.cut_heads
  local out = ffi.new "kvl_tables *[1]"
  check(C.kvl_tables_open(layers, heads, seqs, width, out))
  local self = { batch = batch, layers = layers, heads = heads, most = seqs,
    handle = ffi.gc(out[0], C.kvl_tables_close), seqs = {}, counts = {}, list = {},
    memory = tensor.full(dev, "i32", { layers, seqs * heads, width }, -1),
    changes = tensor.tensor(dev, "i32", { 2, CHANGES }), parts = {}, uploads = {},
    upload = 0, by_layer = {} }
  self.flat = self.memory:reshape { 1, layers * seqs * heads * width }
  for i = 0, UPLOADS - 1 do
    local memory = tensor.pinned(dev, "i32", { 2, CHANGES })
    self.uploads[i] = { memory = memory, ints = ffi.cast("int32_t *", memory.ptr),
                        sent = dev:open_event() }
  end
  return setmetatable(self, { __index = function(_, key)
    local own = Cuts[key]
    if own ~= nil then return own end
    return batch[key]
  end })
end

--- The sizes of the step's arrays, from those of the batch.
function Cuts:fill_sizes(s)
  s.layers, s.cut_seqs = self.layers, s.count * self.heads
  s.cut_edges, s.cut_tokens = s.cut_seqs + 1, s.tokens * self.heads
  s.cut_touched = s.touched * self.heads
end

-- ---- filling it -----------------------------------------------------------------------

--- Writes the arrays of a step to the batch's host buffer; the places of the tokens must
-- be known.
---@param counts integer[]  new tokens of each sequence
function Cuts:fill(counts)
  local batch, heads = self.batch, self.heads
  local o, p, s = batch.layout, batch.host_ints, batch.sizes
  check(C.kvl_sequences_step(batch.handles, batch.host_counts, batch.count,
    s.cut_touched, p + o.cut_lens, p + o.cut_blocks, p + o.cut_block_tokens))
  local row, token, v = 0, 0, 0
  self.is_permuted = false
  for i = 1, batch.count do
    local n, views = counts[i], batch.seqs[i]:heads()
    local length = batch.seqs[i]:length()
    self.is_permuted = self.is_permuted or n > 1 and heads > 1
    for head = 0, heads - 1 do
      p[o.cut_starts + v] = row
      for t = 0, n - 1 do
        p[o.cut_positions + row] = length - n + t
        p[o.cut_owners + row], p[o.cut_behind + row] = v, n - 1 - t
        p[o.cut_order + row] = (token + t) * heads + head
        row = row + 1
      end
      p[o.cut_last + v] = row - 1
      v = v + 1
      self.seqs[v], self.counts[v] = views[head + 1], n
    end
    token = token + n
  end
  p[o.cut_starts + v] = row
  for i = #self.seqs, v + 1, -1 do self.seqs[i], self.counts[i] = nil, nil end
  self.count, self.tokens_count = v, row
end

--- Views of the changes of a buffer, padded to `size` pairs.
local function parts_of(self, size)
  local parts = self.parts[size]
  if parts then return parts end
  parts = { where = self.changes:index(0):narrow(0, size):reshape { 1, size },
            blocks = self.changes:index(1):narrow(0, size):reshape { 1, size },
            to = { self.changes:index(0):narrow(0, size),
                   self.changes:index(1):narrow(0, size) }, from = {} }
  for i = 0, UPLOADS - 1 do
    local memory = self.uploads[i].memory
    parts.from[i] = { memory:index(0):narrow(0, size), memory:index(1):narrow(0, size) }
  end
  self.parts[size] = parts
  return parts
end

--- Sends what has changed in the tables of the step's sequences.
function Cuts:send()
  local batch = self.batch
  if self.is_sending then C.kvl_tables_forget(self.handle) end -- it stopped on the way
  self.is_sending = true
  local n
  repeat
    self.upload = (self.upload + 1) % UPLOADS
    local upload = self.uploads[self.upload]
    upload.sent:sync()
    n = check(C.kvl_tables_update(self.handle, batch.handles, batch.count, upload.ints,
      upload.ints + CHANGES, CHANGES))
    if n > 0 then
      local size = 2 ^ math.max(6, math.ceil(math.log(n) / math.log(2)))
      for i = n, size - 1 do upload.ints[i] = -1 end -- which are skipped
      local parts = tensor.lasting(parts_of, self, size)
      for i = 1, 2 do check(C.kvl_copy(parts.from[self.upload][i], parts.to[i])) end
      upload.sent:record(batch.cache.device:stream())
      self.flat:scatter_(parts.where, parts.blocks)
    end
  until n < CHANGES
  self.is_sending = false
end

--- Divides the batch's views among layers. Called when the batch has new ones.
function Cuts:split()
  local rows, by_layer = self.batch.sizes.cut_seqs, {}
  for layer = 0, self.layers - 1 do
    local one = { tables = self.memory:index(layer):narrow(0, rows) }
    for _, name in ipairs(BY_LAYER) do one[name] = self["cut_" .. name]:index(layer) end
    by_layer[layer] = one
  end
  for _, name in ipairs(OF_STEP) do self[name] = self["cut_" .. name] end
  self.by_layer = by_layer
  self:use_layer(0)
end

-- ---- a layer --------------------------------------------------------------------------

--- Makes tables, lengths, places and touched blocks those of a layer.
function Cuts:use_layer(layer)
  local one = options.entry("use_layer", "layer", self.by_layer, layer)
  self.layer, self.tables, self.lens = layer, one.tables, one.lens
  self.places, self.blocks, self.block_tokens = one.places, one.blocks, one.block_tokens
end

--- The rows of t [tokens, …] by KV head, in the order of the step: [tokens * heads, …].
---@param t kvlab.Tensor  [tokens, n, head_dim], n a multiple of heads
function Cuts:enter(t)
  if self.heads == 1 then return t end
  local rows, each = t:size(0) * self.heads, t:size(1) / self.heads
  t = t:reshape { rows, each, t:size(2) }
  return self.is_permuted and t:gather_rows(self.order) or t
end

--- The tensor that attention writes its result to, if the result is wanted in `out` (nil:
-- a new tensor).
---@param q kvlab.Tensor  that enter returned
function Cuts:room(q, out)
  if not out or self.heads == 1 then return out end
  return not self.is_permuted and out:reshape { q:size(0), q:size(1), out:size(2) }
    or nil
end

--- Brings the result back: `made` [tokens * heads, …] to [tokens, n, head_dim].
---@param out kvlab.Tensor|nil  where it is wanted
function Cuts:leave(made, out)
  local heads = self.heads
  if heads == 1 then return made end
  local tokens = made:size(0) / heads
  if not self.is_permuted then
    return out or made:reshape { tokens, heads * made:size(1), made:size(2) }
  end
  out = out or tensor.tensor(made.device, made:type(),
    { tokens, heads * made:size(1), made:size(2) })
  out:reshape(made:dims()):scatter_rows_(self.order, made)
  return out
end

return M
