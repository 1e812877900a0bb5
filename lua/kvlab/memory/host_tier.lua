--- The host tier keeps KV in pinned host memory (`offload = { … }` of kv.cache). This
-- file has the buffer that holds the open blocks of every layer: the blocks that the
-- present step writes to. ring.lua and hot_cache.lua bring the other blocks to the
-- device; resident.lua describes the interface of every memory tier.
--
-- A step writes K and V to the buffer. A prefill chunk then goes to host memory on a
-- stream of its own; a decoded token is written there at once. The blocks before the
-- open ones are complete in host memory, and only they cross the link.
--
-- Policies with a dataflow of their own call these, by the names in docs/policies.md:
-- load_to_slot_layer, wait_slot_layer, kv_for_slot, record_slot_compute_done,
-- prefill_buffer_slice, decode_buffer.
local arguments = require "kvlab.arguments"
local closed = require "kvlab.closed"
local evictions = require "kvlab.memory.evictions"
local ffi = require "ffi"
local hot_cache = require "kvlab.memory.hot_cache"
local kinds = require "kvlab.tensor.kinds"
local library = require "kvlab.library"
local most_touched = require("kvlab.memory.batch").most_touched
local objects = require "kvlab.memory.objects"
local ops = require "kvlab.tensor.ops"
local options = require "kvlab.options"
local protected = require "kvlab.protected"
local ring = require "kvlab.memory.ring"
local tensor = require "kvlab.tensor.tensor"

local C, check, argument = library.C, library.check, options.argument
local BLOCKS = objects.blocks
local M = {}

-- Bytes of a slot, unless slot_blocks says otherwise. A transfer of this size takes so
-- long (600 us at 55 GB/s) that the fixed costs of a copy, a launch and a join do not
-- matter.
local BYTES_SLOT = 32 * 1024 * 1024

---@class kvlab.HostTier
---@field slots integer         slots of the ring
---@field slot_blocks integer   blocks of one sequence that a slot holds
---@field group integer         blocks of a slot: max_seqs * slot_blocks
---@field hot kvlab.HotCache|nil
local HostTier = { is_resident = false }
HostTier.__index = HostTier

-- What a batch's placement has:
--   open_blocks  i32 [touched]      where in the buffer the touched blocks are
--   opens        i32 [count, 2]     the first open logical block, its place in the buffer
--   load_from    i32 [1, 1, count]  the block that must be copied in first, or -1
--   load_to      i32 [1, 1, count]  and where
--   buffer_places i64 [tokens]       place of each new token in the buffer
--   history      the most blocks of a sequence that lie before the open ones
--   loads        entries of load_from that are blocks
--   by_token     no sequence got more than one token
HostTier.ARRAYS = {
  { "buffer_places", "tokens", wide = true }, { "open_blocks", "touched" },
  { "opens", "count", 2 }, { "load_from", 1, 1, "count" }, { "load_to", 1, 1, "count" },
  { "open_blocks3", 1, 1, "touched", like = "open_blocks" },
  { "blocks3", 1, 1, "touched", like = "blocks" },
}

--- The kind of the option `offload`, for code that checks a table with this option.
M.OFFLOAD = options.nested {
  slots = options.within(1, 32), slot_blocks = options.whole, max_seqs = options.count,
  max_tokens = options.count, huge_pages = options.boolean, hot_slots = options.whole,
  hot_tokens = options.whole, hot_overlap = options.boolean, evict = evictions.KIND,
}

--- Opens the KV of a cache in host memory. o: slots of the ring (4); slot_blocks: the
-- blocks of a sequence that one slot holds (32 MiB for all sequences); max_seqs (16) and
-- max_tokens (512) of a step; huge_pages (false); hot_slots: the slots for each KV head
-- of a hot cache (0: no hot cache), each for a block; hot_tokens: the same, each for a
-- token, for policies that list tokens; hot_overlap (false): attend to what is present
-- while the rest is fetched; evict ("lru"): which block leaves the hot cache when another
-- needs its slot, the name of a file (policy/eviction.lua) or what kv.eviction makes.
---@param cache kvlab.Cache
---@param o table  checked: M.OFFLOAD
---@return kvlab.HostTier
function M.new(cache, o)
  local self = setmetatable({ cache = cache, layers = cache.layers,
    slots = o.slots or 4, slot_blocks = o.slot_blocks or 0, max_seqs = o.max_seqs or 16,
    max_tokens = o.max_tokens or 512, huge_pages = o.huge_pages or false,
    hot_slots = o.hot_slots or 0, hot_tokens = o.hot_tokens or 0,
    hot_overlap = o.hot_overlap or false }, HostTier)
  if o.evict and self.hot_slots == 0 then
    options.fail("offload: evict is given, but there is no hot cache of blocks, expected "
      .. "hot_slots")
  elseif self.hot_slots > 0 and self.hot_tokens > 0 then
    options.fail("offload: hot_slots and hot_tokens are given, expected one of the two")
  elseif self.hot_tokens > 0 and cache.format.scales_apart then
    options.fail(("offload: hot_tokens is given for a cache of %s, expected hot_slots: "
      .. "%s keeps the scales of a block together"):format(cache.format.name,
      cache.format.name))
  end
  local eviction = evictions.of(o.evict)
  self.bytes_block = cache.format:bytes_page()
  self.name = self.hot_slots > 0 and "host, hot cache"
    or self.hot_tokens > 0 and "host, hot cache of tokens" or "host, ring"
  if self.slot_blocks == 0 then
    self.slot_blocks = math.max(1, math.floor(
      BYTES_SLOT / (self.bytes_block * self.max_seqs)))
  end
  self.group = self.max_seqs * self.slot_blocks
  local page = cache.format.dims
  self.slot_memory = tensor.tensor(cache.device, cache.format.memory,
    { self.slots, self.group, unpack(page) })
  self.slot_views = {}
  for i = 0, self.slots - 1 do self.slot_views[i] = self.slot_memory:index(i) end
  self.buffer_blocks = most_touched(self.max_seqs, self.max_tokens, cache.block_size)
  self.buffer = tensor.tensor(cache.device, cache.format.memory,
    { cache.layers, self.buffer_blocks, unpack(page) })
  self.buffer_views = {}
  for i = 0, cache.layers - 1 do self.buffer_views[i] = self.buffer:index(i) end
  self.tails, self.placed = setmetatable({}, { __mode = "k" }), {}
  self.moved = tensor.zeros(cache.device, "i64", { 1 })
  self.bytes_appended, self.bytes_read = 0, 0
  self.step, self.layers_left = 0, 0
  local out = ffi.new "kvl_ring *[1]"
  local function open_ring()
    return protected.open(C.kvl_ring_close, out, C.kvl_ring_open, self.slot_memory,
      cache.format:of(0), cache.layers, out)
  end
  local ok, opened = pcall(open_ring)
  if not ok then
    collectgarbage() -- rings that nobody holds any more have streams to give back
    collectgarbage()
    opened = open_ring()
  end
  self.ring = opened
  if self.hot_slots + self.hot_tokens > 0 then
    self.hot = hot_cache.new(self, eviction)
  end
  return self
end

function HostTier:allocate(dims)
  return tensor.pinned(self.cache.device, self.cache.format.memory, dims,
    self.huge_pages)
end

function HostTier:expect_limits(seqs, tokens)
  if seqs <= self.max_seqs and tokens <= self.max_tokens then return end
  error(("batch: %d sequences and %d tokens, expected at most the max_seqs = %d and "
    .. "max_tokens = %d of offload"):format(seqs, tokens, self.max_seqs,
    self.max_tokens), 4)
end

--- Returns the readers that attend in prefill and in decode. Prefill goes through the
-- ring. Decode goes through the hot cache if there is one, or through the reader that
-- `through` names ("ring" or "hot").
function HostTier:readers(attention, through, level)
  through = through or (self.hot and "hot" or "ring")
  if through == "hot" and not self.hot then
    error('attention: decode_through is "hot", expected "ring": this cache has no hot '
      .. "cache (hot_slots or hot_tokens)", level + 1)
  end
  local by_ring = ring.new(attention)
  if through == "ring" then return by_ring, by_ring end
  if self.hot.eviction then self.hot.eviction:watch(attention) end
  return by_ring, self.hot
end

-- ---- the buffer -----------------------------------------------------------------------

--- A free index of the buffer for a sequence whose open block is not in it. No other
-- sequence of this step has this index.
local function free_index(self)
  local taken = {}
  for _, tail in pairs(self.tails) do
    if tail.step == self.step then taken[tail.index] = true end
  end
  for index = 0, self.buffer_blocks - 1 do
    if not taken[index] then
      for seq, tail in pairs(self.tails) do
        local back = tail.index - index
        if back >= 0 and back < tail.blocks then self.tails[seq] = nil end
      end
      return index
    end
  end
end

-- What a step left in the buffer of a sequence, tails[seq]: the blocks up to number
-- `block` of the sequence, which is at `index`; `blocks` of them, one after the other.
-- length: of the sequence at the end of that step; nil if the step never ended.

--- Looks for the block that a step of one token writes to among the blocks that an
-- earlier step left in the buffer. The sequence may have been cut since then. tail.lacks:
-- the buffer does not have the block's earlier contents.
local function find_open(self, tail, length)
  local size = self.cache.block_size
  local block = math.floor((length - 1) / size)
  local back = tail.block - block
  local is_there = tail.length and tail.length >= length - 1 and back >= 0
    and back < tail.blocks
  if is_there then tail.index = tail.index - back end
  tail.block, tail.blocks = block, 1
  tail.lacks = not is_there and (length - 1) % size > 0
  tail.step, tail.length, tail.next_length = self.step, nil, length
end

--- Returns where a sequence's open block is, for a step of one token, and whether its
-- contents must first come from the host tier.
local function place_token(self, seq, length)
  local tail = self.tails[seq]
  if not tail then
    tail = { index = free_index(self), block = 0, blocks = 0 }
    find_open(self, tail, length)
    self.tails[seq] = tail
  end
  self.placed[#self.placed + 1] = tail
  return tail.index, tail.lacks
end

--- Notes that `tokens` tokens of one layer each were written to the host tier at once.
function HostTier:count_appended(tokens)
  self.bytes_appended = self.bytes_appended
    + tokens * self.cache.kv_heads * self.cache:bytes_token()
end

--- Notes that a kernel reads so many bytes of host memory through the link.
function HostTier:count_read(bytes) self.bytes_read = self.bytes_read + bytes end

--- Ends the previous step, and decides whether the blocks that its sequences left in the
-- buffer are valid. That step may be over, have stopped with an error, or never have
-- begun. A step that was replayed from a graph ran without this file; an engine reports
-- this (replayed), but a script with its own graph need not.
local function settle(self)
  local is_over = self.is_begun and not self.is_undone and (self.layers_left == 0
    or self.is_recorded and self.layers_left == self.layers)
  if is_over and self.layers_left > 0 then -- replayed
    self:count_appended(self.step_tokens * self.layers)
  end
  for i, tail in ipairs(self.placed) do
    if is_over then tail.length = tail.next_length end
    self.placed[i] = nil
  end
  if self.is_undone or self.is_begun and not is_over then self.cache.device:sync() end
  if self.is_undone and self.hot then self.hot:forget() end
  self.is_begun, self.is_undone = false, false
end

--- The batch of the step that has begun.
local function batch_of(self, what)
  return self.batch or options.fail(what .. ": no step has begun, expected begin before")
end

--- A graph computed the step that began last.
function HostTier:replayed()
  batch_of(self, "replayed")
  self.layers_left = 0
  self:count_appended(self.step_tokens * self.layers)
end

--- The step that began last was undone. The next step then ignores what that step left in
-- the buffer, and the hot cache begins again without blocks, because some slots may have
-- been given to blocks that never arrived.
function HostTier:undone() self.is_undone = true end

--- Raises for a batch of another cache, which is laid out in another way.
local function expect_own(self, what, batch)
  if batch.cache ~= self.cache then
    options.fail(what .. ": batch belongs to another cache")
  end
end

--- Places the open blocks of a batch in the buffer and fills the arrays of its placement.
-- A step of one token per sequence finds the block where the previous step left it.
function HostTier:place(batch)
  expect_own(self, "place", batch)
  local o, p, size = batch.layout, batch.host_ints, self.cache.block_size
  local counts, placement = batch.counts, batch.placement
  local places = ffi.cast("int64_t *", p + o.buffer_places)
  settle(self)
  if self.hot then self.hot:join() end -- it reads tables that are written next
  local by_token, next_index, row, touched = true, 0, 0, 0
  self.step = self.step + 1
  if self.pending then -- the last step's offloads read the arrays that are written next
    check(C.kvl_ring_wait_offload(self.ring, self.layers - 1))
  end
  for i = 1, batch.count do
    by_token = by_token and counts[i] <= 1
    local tail = self.tails[batch.seqs[i]]
    if tail and counts[i] == 1 then find_open(self, tail, p[o.lens + i - 1]) end
  end
  if not by_token then self.tails = setmetatable({}, { __mode = "k" }) end
  placement.history, placement.loads, placement.by_token = 0, 0, by_token
  for i = 0, batch.count - 1 do
    local seq, count = batch.seqs[i + 1], counts[i + 1]
    local length = p[o.lens + i]
    local before = length - count
    local first = math.floor(before / size)
    local blocks = count == 0 and 0 or math.floor((length - 1) / size) - first + 1
    local index, load = next_index, before % size > 0
    if count == 0 then
      first, load = math.ceil(length / size), false
    elseif by_token then
      index, load = place_token(self, seq, length)
    else
      next_index = next_index + blocks
      local tail = { index = index + blocks - 1, block = first + blocks - 1,
        blocks = blocks, next_length = length, step = self.step }
      self.tails[seq], self.placed[#self.placed + 1] = tail, tail
    end
    p[o.opens + 2 * i], p[o.opens + 2 * i + 1] = first, index
    p[o.load_from + i] = load and p[o.tables + i * batch.sizes.width + first] or -1
    p[o.load_to + i] = load and index or -1
    local pads = batch.pads[i + 1]
    for b = 0, blocks + pads - 1 do
      p[o.open_blocks + touched + b] = index + math.min(b, blocks - 1)
    end
    for t = 0, count - 1 do
      places[row + t] = (index - first) * size + before + t
    end
    placement.history = math.max(placement.history, first)
    placement.loads = placement.loads + (load and 1 or 0)
    row, touched = row + count, touched + blocks + pads
  end
  assert(row == batch.sizes.tokens)
  self.step_tokens = row
end

--- Starts a step for `batch`, which was appended to. A decode step finds all earlier
-- tokens in the host tier, and its open blocks in the buffer.
function HostTier:begin(batch, is_prefill)
  expect_own(self, "begin", batch)
  self.batch, self.is_prefill = batch, is_prefill
  self.is_begun, self.layers_left = true, self.layers
  check(C.kvl_ring_planned(self.ring))
  if is_prefill then
    self.pending = true
    return
  end
  for layer = 0, self.layers - 1 do
    if self.pending then check(C.kvl_ring_wait_offload(self.ring, layer)) end
    if batch.placement.loads > 0 then self:load_open(layer) end
  end
  self.pending = false
end

--- Copies the contents that open blocks already have from the host tier to the buffer.
function HostTier:load_open(layer)
  local placement = batch_of(self, "load_open").placement
  check(C.kvl_move_blocks(self.cache:layer(layer), placement.load_from,
    self.buffer_views[layer], placement.load_to, self.cache.format:of(layer),
    self.moved))
end

--- Appends k, v of the step to the buffer; a decode step also writes them to host memory
-- and to the hot cache. Returns the layer's buffer and the indices of the touched blocks
-- in it.
function HostTier:append(layer, q, k, v, batch, inv_freq)
  expect_own(self, "append", batch)
  local buffer = options.entry("append", "layer", self.buffer_views, layer)
  local cache, placement = self.cache, batch.placement
  if inv_freq then
    local first = cache.format.is_shared and cache.value_dim or 0
    ops.rope(q, batch.positions, inv_freq, first)
    ops.rope(k, batch.positions, inv_freq, first)
  end
  self.is_recorded = C.kvl_device_is_recording(cache.device) == 1
  if self.is_prefill then
    check(C.kvl_ring_wait_offload(self.ring, layer))
    if placement.loads > 0 then self:load_open(layer) end
    cache.format:append(layer, k, v, placement.buffer_places, buffer)
  elseif self.hot then
    self.hot:append(layer, k, v, batch, buffer)
  else
    cache.format:append(layer, k, v, placement.buffer_places, buffer)
    cache.format:append(layer, k, v, batch.places, cache:layer(layer))
  end
  return buffer, placement.open_blocks
end

--- Sends the step's blocks of a layer to host memory while later work runs. A decode step
-- has written its tokens there already.
function HostTier:appended(layer)
  local batch = batch_of(self, "appended")
  local placement = batch.placement
  if self.is_prefill and batch.touched > 0 then
    check(C.kvl_ring_offload(self.ring, layer, self.buffer_views[layer],
      placement.open_blocks3, self.cache:layer(layer), placement.blocks3,
      not placement.by_token and batch.host_ints + batch.layout.blocks or nil))
    if self.hot then self.hot:drop(layer, batch.blocks) end
  end
  self.layers_left = self.layers_left - 1
  if not self.is_prefill then self:count_appended(batch.tokens_count) end
end

--- Call this before something else writes blocks of host memory: the hot cache drops
-- them.
---@param first integer    layer
---@param layers integer   how many
---@param blocks integer[]
function HostTier:written(first, layers, blocks)
  if not self.hot or #blocks == 0 then return end
  local list = tensor.from(self.cache.device, "i32", { #blocks }, blocks)
  for layer = first, first + layers - 1 do self.hot:drop(layer, list) end
  list:free()
end

--- Prepares for copies of whole blocks inside the host tier (when a fork grows): the
-- copies come after the transfers to host memory that are under way.
function HostTier:before_copy(layer, to)
  check(C.kvl_ring_wait_offload(self.ring, layer))
  if self.hot then self.hot:drop(layer, to) end
end

-- ---- for policies with a dataflow of their own ----------------------------------------

local host_blocks = ffi.new("int32_t[?]", 4096)

--- Starts to copy a block of the host tier, or a list of blocks, into a slot of the ring.
---@param slot integer     0 ... slots - 1
---@param layer integer
---@param blocks integer|integer[]
function HostTier:load_to_slot_layer(slot, layer, blocks)
  argument("load_to_slot_layer", "slot", slot, options.whole)
  if type(blocks) == "number" then blocks = { blocks } end
  argument("load_to_slot_layer", "blocks", blocks, BLOCKS)
  if #blocks > self.group then
    error(("%d blocks, expected at most the %d of a slot"):format(
      #blocks, self.group), 2)
  end
  if #blocks > 4096 then error("expected at most 4096 blocks in a load", 2) end
  for i, block in ipairs(blocks) do host_blocks[i - 1] = block end
  check(C.kvl_ring_load(self.ring, slot, layer, self.cache:layer(layer), host_blocks,
    #blocks))
end

--- Makes all later work wait for the slot's load.
function HostTier:wait_slot_layer(slot)
  argument("wait_slot_layer", "slot", slot, options.whole)
  check(C.kvl_ring_wait(self.ring, slot))
end

--- The slot's memory, [group, 2, kv_heads, block_size, head_dim]; the blocks of its load
-- come first. The memory past the valid tokens of a partial block has undefined
-- contents, so give attention the sequence's length.
function HostTier:kv_for_slot(slot)
  return self.slot_views[slot]
    or error(("slot is %s, expected 0 ... %d"):format(tostring(slot), self.slots - 1), 2)
end

--- Tells the ring that no later work reads the slot. Call it before the slot's next load.
function HostTier:record_slot_compute_done(slot)
  argument("record_slot_compute_done", "slot", slot, options.whole)
  check(C.kvl_ring_done(self.ring, slot))
end

--- The blocks of a layer's buffer, [n, 2, kv_heads, block_size, head_dim]. They hold the
-- present chunk of one or more sequences, and the tokens before it in its first block.
function HostTier:prefill_buffer_slice(layer)
  local batch = batch_of(self, "prefill_buffer_slice")
  local first = batch.host_ints[batch.layout.open_blocks]
  return options.entry("prefill_buffer_slice", "layer", self.buffer_views, layer)
    :narrow(first, batch.touched)
end

--- A layer's buffer; open block i of the batch is at batch.placement.open_blocks[i].
function HostTier:decode_buffer(layer)
  return options.entry("decode_buffer", "layer", self.buffer_views, layer)
end

-- ---- what happened --------------------------------------------------------------------

local out_bytes = ffi.new "int64_t[2]"

--- Bytes that crossed the link so far: to_device, to_host. Waits for the device.
function HostTier:bytes()
  check(C.kvl_ring_bytes(self.ring, out_bytes, out_bytes + 1))
  local to_device = tonumber(out_bytes[0]) + self.moved:item() + self.bytes_read
  if self.hot then to_device = to_device + self.hot:bytes() end
  return to_device, tonumber(out_bytes[1]) + self.bytes_appended
end

local SPANS = options.within(0, 2 ^ 24)

--- Traces the next n spans of the ring: loads, the work between wait and done, offloads.
function HostTier:trace(n)
  argument("trace", "n", n, SPANS)
  check(C.kvl_ring_trace(self.ring, n))
  self.trace_room = n
end

local KINDS = { [0] = "load", "compute", "offload" } -- ORDER kvl_span_kind

--- The traced spans, each with kind, slot, layer, blocks, begin_us and end_us.
function HostTier:spans()
  local buffer = ffi.new("kvl_span[?]", math.max(1, self.trace_room or 0))
  local n = check(C.kvl_ring_trace_get(self.ring, buffer, self.trace_room or 0))
  local spans = {}
  for i = 0, n - 1 do
    local s = buffer[i]
    spans[i + 1] = { kind = KINDS[s.kind], slot = s.slot, layer = s.layer,
                     blocks = s.blocks, begin_us = s.begin_us, end_us = s.end_us }
  end
  return spans
end

--- Waits for the transfers under way and frees the memory.
function HostTier:close()
  protected.close(self, "ring", C.kvl_ring_close)
  for _, list in ipairs { self.slot_views, self.buffer_views } do
    for _, view in pairs(list) do view:free() end
  end
  self.slot_memory:free()
  self.buffer:free()
  if self.hot then self.hot:close() end
  closed(self, "host tier")
end

local LAYER = { layer = options.whole }
arguments.methods(HostTier, "a host tier", {
  readers = { attention = objects.attention, level = options.optional(options.whole),
              through = options.optional(options.one_of("ring", "hot")) },
  count_appended = { tokens = options.whole }, count_read = { bytes = options.whole },
  place = { batch = objects.filled_batch },
  begin = { batch = objects.batch }, load_open = LAYER, appended = LAYER,
  append = { layer = options.whole, q = kinds.tensor, k = kinds.tensor,
             v = kinds.tensor_or_nil, batch = objects.batch,
             inv_freq = kinds.tensor_or_nil },
  written = { first = options.whole, layers = options.whole, blocks = BLOCKS },
  before_copy = { layer = options.whole, to = kinds.tensor },
  load_to_slot_layer = LAYER, prefill_buffer_slice = LAYER,
})

return M
