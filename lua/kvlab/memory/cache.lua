--- Paged KV memory of all layers, the sequences that live in it, and batches: what the
-- kernels need to know of the sequences of one step, on the device.
local ffi = require "ffi"
local library = require "kvlab.library"
local tensor = require "kvlab.tensor.tensor"

local C, check = library.C, library.check
local M = {}

-- ---- sequence -------------------------------------------------------------------------

---@class kvlab.Sequence
---@field cache kvlab.Cache
---@field state table  what policies and tallies keep for this sequence, by themselves
local Sequence = {}
Sequence.__index = Sequence

local WEAK_KEYS = { __mode = "k" }
local out_sequence = ffi.new "kvl_sequence *[1]"

local function wrap_sequence(cache, handle)
  return setmetatable({ cache = cache, handle = ffi.gc(handle, C.kvl_sequence_close),
                        state = setmetatable({}, WEAK_KEYS) }, Sequence)
end

local function handle_of(seq, level)
  return seq.handle or error("the sequence is closed", (level or 2) + 1)
end

--- Tokens so far.
function Sequence:length() return C.kvl_sequence_length(handle_of(self)) end
--- Blocks held.
function Sequence:blocks() return C.kvl_sequence_blocks(handle_of(self)) end

--- The physical blocks in logical order.
function Sequence:table()
  local n, list = self:blocks(), {}
  local row = ffi.new("int32_t[?]", n + 1)
  check(C.kvl_sequence_table(self.handle, row, n))
  for i = 1, n do list[i] = row[i - 1] end
  return list
end

--- A sequence of the same tokens that shares every block; a shared block that is not full
-- is copied when one of them grows. Who keeps state for it is asked to copy that.
function Sequence:fork()
  check(C.kvl_sequence_fork(handle_of(self), out_sequence))
  local fork = wrap_sequence(self.cache, out_sequence[0])
  for keeper in pairs(self.state) do
    if type(keeper) == "table" and keeper.inherit then keeper:inherit(self, fork) end
  end
  return fork
end

local out_slots, out_slots_size, out_copy = nil, 0, ffi.new "int32_t[2]"
local one_handle, one_count = ffi.new "kvl_sequence *[1]", ffi.new "int32_t[1]"

--- Lengthen a sequence of whole blocks by `tokens` whose K and V something else writes.
function Sequence:extend(tokens)
  local length = self:length()
  if length % self.cache.block_size ~= 0 then
    error(("extend: the sequence has %d tokens, expected a multiple of block_size = %d")
      :format(length, self.cache.block_size), 2)
  end
  if tokens > out_slots_size then
    out_slots, out_slots_size = ffi.new("int64_t[?]", tokens), tokens
  end
  one_handle[0], one_count[0] = handle_of(self), tokens
  check(C.kvl_sequences_append(one_handle, one_count, 1, out_slots, out_copy))
end

--- Drop the tokens past `length`.
function Sequence:truncate(length)
  check(C.kvl_sequence_truncate(handle_of(self), length))
end

--- Give the blocks back.
function Sequence:close()
  if not self.handle then return end
  C.kvl_sequence_close(ffi.gc(self.handle, nil))
  self.handle = nil
end

-- ---- batch ----------------------------------------------------------------------------

--- The sequences of one step as the kernels see them. Made once, refilled every step: its
-- tensors are views of one buffer, which one copy fills, and are valid until the next
-- append.
---@class kvlab.Batch
---@field seqs kvlab.Sequence[]
---@field count integer          sequences
---@field counts integer[]       new tokens of each sequence
---@field tokens_count integer   new tokens of all sequences
---@field max_len integer        the longest sequence, new tokens included
---@field tokens ffi.cdata*      i32 [tokens_count]   token ids, where given
---@field positions ffi.cdata*   i32 [tokens_count]
---@field slots ffi.cdata*       i64 [tokens_count]
---@field tables ffi.cdata*      i32 [count, width]
---@field lens ffi.cdata*        i32 [count]
---@field starts ffi.cdata*      i32 [count + 1]
---@field last ffi.cdata*        i32 [count]          row of each sequence's newest token
---@field blocks ffi.cdata*      i32 [touched]        physical blocks that got tokens
---@field block_tokens ffi.cdata* i32 [touched]       valid tokens in each of them
-- Of a cache with an offload engine also where in its buffer the touched blocks are:
---@field open_blocks ffi.cdata* i32 [touched]
---@field opens ffi.cdata*       i32 [count, 2]       first open logical block, its index
---@field load_from ffi.cdata*   i32 [1, 1, count]    blocks the buffer has to be given
---@field load_to ffi.cdata*     i32 [1, 1, count]    first, and where; -1: none
---@field buffer_slots ffi.cdata* i64 [tokens_count]
---@field history integer        the most blocks that lie before the open ones
---@field loads integer          entries of load_from that are blocks
---@field open_max integer       the most open blocks of a sequence
---@field turns integer          blocks that this step began or filled
local Batch = {}
Batch.__index = Batch

local ALIGN = 16 -- i32 entries: every view starts at 64 bytes
local UPLOADS = 4 -- host buffers: so many steps may be on their way to the device

local function padded(n) return math.ceil(n / ALIGN) * ALIGN end

local function new_batch(cache, limits)
  local seqs, tokens = limits.max_seqs or 16, limits.max_tokens or 512
  local width = math.min(limits.max_blocks or cache.blocks, cache.blocks)
  local touched = seqs + math.ceil(tokens / cache.block_size)
  local ints = 2 * padded(2 * tokens) + padded(seqs * width) + 3 * padded(seqs + 1)
    + 2 * padded(tokens) + 3 * padded(touched + seqs) + 4 * padded(seqs)
    + padded(2 * seqs)
  local offload = cache.offload
  if offload and (seqs > offload.max_seqs or tokens > offload.max_tokens) then
    error(("a batch of %d sequences and %d tokens, expected at most the offload engine's "
      .. "max_seqs = %d and max_tokens = %d"):format(seqs, tokens, offload.max_seqs,
      offload.max_tokens), 3)
  end
  local self = setmetatable({
    cache = cache, max_seqs = seqs, max_tokens = tokens, max_blocks = width,
    fixed_width = limits.fixed_width and width or nil,
    host_counts = ffi.new("int32_t[?]", seqs),
    host_copies = ffi.new("int32_t[?]", 2 * seqs),
    handles = ffi.new("kvl_sequence *[?]", seqs),
    device_ints = tensor.tensor(cache.device, "i32", { ints }),
    layout = {}, uploads = {}, upload = 0,
  }, Batch)
  for i = 0, UPLOADS - 1 do
    local memory = tensor.pinned(cache.device, "i32", { ints })
    self.uploads[i] = { memory = memory, ints = ffi.cast("int32_t *", memory.ptr),
                        sent = cache.device:open_event() }
  end
  return self
end

--- The next host buffer, once what it held last is on the device.
local function next_upload(self)
  self.upload = (self.upload + 1) % UPLOADS
  local upload = self.uploads[self.upload]
  upload.sent:sync()
  self.host_ints, self.host_slots = upload.ints, ffi.cast("int64_t *", upload.ints)
  return upload
end

--- Send its first n entries.
local function send(self, upload, n)
  if self.sized ~= n then
    self.sized, self.device_part = n, tensor.lasting(self.device_ints.narrow,
      self.device_ints, 0, n)
    for i = 0, UPLOADS - 1 do
      local memory = self.uploads[i].memory
      self.uploads[i].part = tensor.lasting(memory.narrow, memory, 0, n)
    end
  end
  check(C.kvl_copy(upload.part, self.device_part))
  upload.sent:record(self.cache.device:stream())
end

--- Check what was asked for and fill handles and counts; returns the sum of counts.
local function take_counts(self, seqs, counts)
  if #seqs > self.max_seqs then
    error(("%d sequences, expected at most max_seqs = %d"):format(
      #seqs, self.max_seqs), 3)
  end
  local total, size = 0, self.cache.block_size
  for i, seq in ipairs(seqs) do
    if seq.cache ~= self.cache then
      error(("sequence %d belongs to another cache"):format(i), 3)
    end
    local handle, count = handle_of(seq, 3), counts[i]
    local blocks = math.ceil((C.kvl_sequence_length(handle) + count) / size)
    if blocks > self.max_blocks then
      error(("sequence %d would have %d blocks, expected at most max_blocks = %d"):format(
        i, blocks, self.max_blocks), 3)
    end
    self.handles[i - 1], self.host_counts[i - 1] = handle, count
    total = total + count
  end
  if total > self.max_tokens then
    error(("%d tokens, expected at most max_tokens = %d"):format(
      total, self.max_tokens), 3)
  end
  return total
end

--- Where each array starts in the packed ints, for these sizes.
local function lay_out(self, tokens, width, touched, copies)
  local at, o = 0, self.layout
  local function place(name, size)
    o[name] = at
    at = at + padded(size)
  end
  place("slots", 2 * tokens) -- i64; first, where the host finds it before the layout
  if self.cache.offload then place("buffer_slots", 2 * tokens) end
  place("tables", self.count * width)
  place("lens", self.count)
  place("starts", self.count + 1)
  place("last", self.count)
  place("positions", tokens)
  place("tokens", tokens)
  place("blocks", touched)
  place("block_tokens", touched)
  if self.cache.offload then
    place("open_blocks", touched)
    place("opens", 2 * self.count)
    place("load_from", self.count)
    place("load_to", self.count)
  end
  place("copy_from", copies) -- last: now and then there are some, and a graph that reads
  place("copy_to", copies)   -- the others must find them where they were
  o.size = at
end

--- Views of the device buffers.
local function make_views(self, tokens, width, touched, copies)
  local o = self.layout
  local function view(name, ...)
    local dims, size = { ... }, 1
    for _, d in ipairs(dims) do size = size * d end
    self[name] = self.device_ints:narrow(o[name], size):reshape(dims)
  end
  view("tables", self.count, width)
  view("lens", self.count)
  view("starts", self.count + 1)
  view("last", self.count)
  view("positions", tokens)
  view("tokens", tokens)
  view("blocks", touched)
  view("block_tokens", touched)
  view("copy_from", copies)
  view("copy_to", copies)
  local function wide_view(name)
    self[name] = tensor.wrap(self.cache.device, "i64", { tokens },
      ffi.cast("int32_t *", self.device_ints.ptr) + o[name])
  end
  wide_view "slots"
  if self.cache.offload then
    view("open_blocks", touched)
    view("opens", self.count, 2)
    view("load_from", 1, 1, self.count)
    view("load_to", 1, 1, self.count)
    self.blocks3 = self.blocks:reshape { 1, 1, touched }
    self.open_blocks3 = self.open_blocks:reshape { 1, 1, touched }
    wide_view "buffer_slots"
  end
  self.tokens_count, self.width = tokens, width
  self.touched, self.copies = touched, copies
  self.viewed = self.count
end

--- Blocks of a sequence that its newest `count` tokens fell into.
local function touched_blocks(length, count, block_size)
  if count == 0 then return 0, 0 end
  local first = math.floor((length - count) / block_size)
  return first, math.floor((length - 1) / block_size) - first + 1
end

local function fill_host(self, counts, tokens, width)
  local o, p, size = self.layout, self.host_ints, self.cache.block_size
  local row, touched = 0, 0
  for i = 0, self.count - 1 do
    local handle, count = self.handles[i], counts[i + 1]
    local length = C.kvl_sequence_length(handle)
    local table_row = p + o.tables + i * width
    C.kvl_sequence_table(handle, table_row, width)
    p[o.lens + i], p[o.starts + i] = length, row
    for t = 0, count - 1 do
      p[o.positions + row + t] = length - count + t
      p[o.tokens + row + t] = tokens and tokens[row + t + 1] or 0
    end
    row = row + count
    p[o.last + i] = row - 1
    local first, n = touched_blocks(length, count, size)
    for b = first, first + n - 1 do
      p[o.blocks + touched] = table_row[b]
      p[o.block_tokens + touched] = math.min(size, length - b * size)
      touched = touched + 1
    end
  end
  p[o.starts + self.count] = row
  for i = 0, self.pending_copies - 1 do
    p[o.copy_from + i] = self.host_copies[2 * i]
    p[o.copy_to + i] = self.host_copies[2 * i + 1]
  end
end

--- Lengthen the sequences, sequence i by counts[i] tokens (all or none of them), put what
-- the kernels need on the device, and copy the blocks that stopped being shared.
---@param seqs kvlab.Sequence[]
---@param counts integer[]
---@param tokens? integer[]  token ids, sequence after sequence
function Batch:append(seqs, counts, tokens)
  local total = take_counts(self, seqs, counts)
  local upload = next_upload(self)
  local copies = check(C.kvl_sequences_append(self.handles, self.host_counts, #seqs,
    self.host_slots, self.host_copies))
  self.seqs, self.count, self.counts, self.pending_copies = seqs, #seqs, counts, copies
  local widest, touched, max_len, open_max, turns = 1, 0, 0, 1, 0
  for i = 1, #seqs do
    local length = C.kvl_sequence_length(self.handles[i - 1])
    local size = self.cache.block_size
    local _, n = touched_blocks(length, counts[i], size)
    turns = turns + math.ceil(length / size) - math.ceil((length - counts[i]) / size)
      + math.floor(length / size) - math.floor((length - counts[i]) / size)
    touched, max_len = touched + n, math.max(max_len, length)
    open_max = math.max(open_max, n)
    widest = math.max(widest, C.kvl_sequence_blocks(self.handles[i - 1]))
  end
  local width = self.fixed_width
    or math.min(math.ceil(widest / 64) * 64, self.max_blocks)
  self.max_len, self.open_max, self.layout_width = max_len, open_max, width
  self.turns = turns
  lay_out(self, total, width, touched, copies)
  fill_host(self, counts, tokens, width)
  if self.cache.offload then self.cache.offload:place(self, counts, total) end
  send(self, upload, self.layout.size)
  if self.tokens_count ~= total or self.width ~= width or self.touched ~= touched
     or self.copies ~= copies or self.viewed ~= self.count then
    tensor.lasting(make_views, self, total, width, touched, copies)
  end
  if copies > 0 then self.cache:copy_blocks(self.copy_from, self.copy_to) end
  return self
end

-- ---- cache ----------------------------------------------------------------------------

---@class kvlab.Cache
---@field device ffi.cdata*
---@field layers integer
---@field blocks integer      blocks of each layer
---@field block_size integer  tokens of a block
---@field kv_heads integer
---@field head_dim integer
---@field dtype string        f32 f16 bf16 f8e4m3
---@field memory ffi.cdata*   [layers, blocks, 2, kv_heads, block_size, head_dim]; with an
--                            offload engine it is the host tier, in pinned host memory
---@field offload kvlab.Offload|nil
local Cache = {}
Cache.__index = Cache

--- The caches that are open, as keys.
M.open = setmetatable({}, { __mode = "k" })

--- A scale a KV head for each layer; none without `scale`.
local function scale_views(self, scale)
  local views = {}
  for layer = 0, scale and self.layers - 1 or -1 do views[layer] = scale:index(layer) end
  return views
end

local REQUIRED = { "layers", "blocks", "block_size", "kv_heads", "head_dim" }

--- KV memory for `blocks` blocks in each of `layers` layers.
---@param o table  layers, blocks, block_size, kv_heads, head_dim; device (--device's),
--                 dtype (bf16), watermark (0): blocks that an append must leave free;
--                 k_scale, v_scale: of an f8e4m3 cache, f32 [layers, kv_heads] (1): it
--                 holds k / k_scale;
--                 offload: options of an offload engine (see offload.lua), and KV lies in
--                 host memory
---@return kvlab.Cache
function M.cache(o)
  for _, name in ipairs(REQUIRED) do
    if type(o[name]) ~= "number" or o[name] < 1 or o[name] % 1 ~= 0 then
      error(("cache: %s is %s, expected a whole number >= 1"):format(name,
        tostring(o[name])), 2)
    end
  end
  local self = setmetatable({
    device = require("kvlab.tensor.device").device(o.device), dtype = o.dtype or "bf16",
    layers = o.layers, blocks = o.blocks, block_size = o.block_size,
    kv_heads = o.kv_heads, head_dim = o.head_dim, layer_views = {},
  }, Cache)
  local out = ffi.new "kvl_pool *[1]"
  check(C.kvl_pool_open(o.blocks, o.block_size, o.watermark or 0, out))
  self.pool = ffi.gc(out[0], C.kvl_pool_close)
  local shape = { o.layers, o.blocks, 2, o.kv_heads, o.block_size, o.head_dim }
  if o.offload then
    self.memory = tensor.pinned(self.device, self.dtype, shape, o.offload.huge_pages)
  else
    self.memory = tensor.tensor(self.device, self.dtype, shape)
  end
  for layer = 0, o.layers - 1 do self.layer_views[layer] = self.memory:index(layer) end
  self.k_scales = scale_views(self, o.k_scale)
  self.v_scales = scale_views(self, o.v_scale)
  if o.offload then
    self.offload = require("kvlab.memory.offload").new(self, o.offload)
  end
  M.open[self] = true
  return self
end

--- One layer's memory, [blocks, 2, kv_heads, block_size, head_dim]. Layers count from 0.
function Cache:layer(layer)
  return self.layer_views[layer]
    or error(("layer is %s, expected 0 ... %d"):format(
      tostring(layer), self.layers - 1), 2)
end

--- k_scale and v_scale of a layer, f32 [kv_heads]; nil where there are none.
function Cache:scales(layer) return self.k_scales[layer], self.v_scales[layer] end

--- Blocks that no sequence holds.
function Cache:blocks_free() return C.kvl_pool_blocks_free(self.pool) end

--- An empty sequence.
---@return kvlab.Sequence
function Cache:sequence()
  check(C.kvl_sequence_open(self.pool, out_sequence))
  return wrap_sequence(self, out_sequence[0])
end

--- A reusable batch. limits: max_seqs (16), max_tokens (512) of one step, max_blocks of
-- one sequence (all of the cache); fixed_width (false): tables are max_blocks wide from
-- the start, so that a step recorded in a graph serves any length.
---@return kvlab.Batch
function Cache:batch(limits) return new_batch(self, limits or {}) end

--- Copy blocks in every layer; from, to: i32 [n].
function Cache:copy_blocks(from, to)
  for layer = 0, self.layers - 1 do
    if self.offload then self.offload:before_copy(layer, to) end
    check(C.kvl_copy_blocks(from, to, self:layer(layer)))
  end
end

--- Bytes of K and V of one token in one layer and KV head.
function Cache:bytes_token()
  return 2 * self.head_dim * C.kvl_dtype_bytes(library.dtypes[self.dtype])
end

--- Bookkeeping of a cache without its memory: sequence, blocks_free, blocks and
-- block_size are there. For models of a server.
---@param blocks integer
---@param block_size integer
function M.pool(blocks, block_size)
  local out = ffi.new "kvl_pool *[1]"
  check(C.kvl_pool_open(blocks, block_size, 0, out))
  return { pool = ffi.gc(out[0], C.kvl_pool_close), blocks = blocks,
           block_size = block_size, sequence = Cache.sequence,
           blocks_free = Cache.blocks_free }
end

--- Give the memory and the blocks back. Sequences of it raise from now on.
function Cache:close()
  M.open[self] = nil
  if self.offload then self.offload:close() end
  self.memory:free()
  for _, view in pairs(self.layer_views) do view:free() end
  C.kvl_pool_close(ffi.gc(self.pool, nil))
end

return M
