--- The hot cache: blocks of the host tier that stay on the device, with slots of its own
-- for every KV head. A layer's step gives each selected block a slot (evicting the least
-- recently used, or the lowest of a priority), fetches those that were not there, and
-- attends over the slots. All of it runs on the device: the host never waits.
--
-- With hot_overlap, attention over what was there runs beside the fetch, and is joined
-- with attention over the rest by their log-sum-exp; without it, one attention follows
-- the fetch and the result equals the resident one bit for bit.
local ffi = require "ffi"
local library = require "kvlab.library"
local tensor = require "kvlab.tensor"

local C, check = library.C, library.check
local M = {}

---@class kvlab.HotCache
---@field slots integer            of each KV head
---@field priority ffi.cdata*|nil  f32 [layers, kv_heads, blocks], see use_priority
local HotCache = {}
HotCache.__index = HotCache

--- The hot cache of an offload engine: offload.hot_slots slots for each KV head.
---@param offload kvlab.Offload
---@return kvlab.HotCache
function M.new(offload)
  local cache = offload.cache
  local self = setmetatable({ offload = offload, cache = cache, layers = {}, keep = {},
    slots = offload.hot_slots, overlap = offload.hot_overlap, views = {} }, HotCache)
  local dev, heads, n = cache.device, cache.kv_heads, self.slots
  self.memory = tensor.tensor(dev, cache.dtype,
    { cache.layers, n, 2, heads, cache.block_size, cache.head_dim })
  self.slot_of = tensor.tensor(dev, "i32", { cache.layers, heads, cache.blocks })
  self.block_of = tensor.tensor(dev, "i32", { cache.layers, heads, n })
  self.order = tensor.tensor(dev, "i32", { cache.layers, heads, n })
  self.counters = tensor.tensor(dev, "i64", { 4 })
  self.fetched_bytes = self.counters:narrow(3, 1)
  for layer = 0, cache.layers - 1 do
    local keep = { self.memory:index(layer), self.slot_of:index(layer),
                   self.block_of:index(layer), self.order:index(layer) }
    self.keep[layer] = keep
    self.layers[layer] = ffi.new("kvl_hot", keep[1], keep[2], keep[3], keep[4], nil,
      self.counters)
  end
  self.miss = tensor.tensor(dev, "i32", { 2, heads * n })
  self.lists = tensor.tensor(dev, "i32", { 5, heads * n })
  self.resolve_call = ffi.new "kvl_resolve"
  self.stream = dev:open_stream()
  self.resolved, self.fetched = dev:open_event(), dev:open_event()
  self:reset()
  return self
end

--- Forget every block, and count from zero.
function HotCache:reset()
  self.slot_of:fill_(-1)
  self.block_of:fill_(-1)
  self.counters:fill_(0)
  local heads = self.cache.kv_heads
  for layer = 0, self.cache.layers - 1 do
    for head = 0, heads - 1 do self.keep[layer][4]:index(head):arange_() end
  end
end

--- Count from zero; what the slots hold stays.
function HotCache:reset_counts() self.counters:fill_(0) end

--- Evict by the lowest of a priority from now on, in place of the least recently used:
-- a policy writes to it, f32 [layers, kv_heads, blocks] with one number for each block of
-- the host tier; it begins as zeros. The same tensor at every call.
---@return ffi.cdata* priority
function HotCache:use_priority()
  if self.priority then return self.priority end
  local cache = self.cache
  self.priority = tensor.zeros(cache.device, "f32",
    { cache.layers, cache.kv_heads, cache.blocks })
  for layer = 0, cache.layers - 1 do
    self.keep[layer][5] = self.priority:index(layer)
    self.layers[layer].priority = self.keep[layer][5]
  end
  return self.priority
end

--- Append a step's k, v to the host tier, to the slots that hold its blocks, and to the
-- buffer of open blocks.
function HotCache:append(layer, k, v, batch, buffer)
  check(C.kvl_hot_append(self.layers[layer], k, v, batch.slots, self.cache:layer(layer),
    batch.buffer_slots, buffer, self.cache:scales(layer)))
end

--- Forget blocks that the host tier got by other means; i32 [n].
function HotCache:drop(layer, blocks)
  check(C.kvl_hot_drop(self.layers[layer], blocks))
end

-- ---- a step ---------------------------------------------------------------------------

local function make_views(self, seqs, n)
  local heads = self.cache.kv_heads
  if seqs * n > self.slots then
    error(("the hot cache has %d slots for a KV head, %d sequences with %d blocks each "
      .. "may need %d; give it more (hot_slots) or the policy a smaller budget"):format(
      self.slots, seqs, n, seqs * n), 0)
  end
  local function list(from, i)
    return from:index(i):narrow(0, seqs * heads * n):reshape { seqs, heads, n }
  end
  local views = { slots = list(self.lists, 0), hit_logical = list(self.lists, 1),
            hit_slots = list(self.lists, 2), miss_logical = list(self.lists, 3),
            miss_slots = list(self.lists, 4) }
  for i, name in ipairs { "miss_from", "miss_to" } do
    views[name] = self.miss:index(i - 1):narrow(0, heads * seqs * n)
      :reshape { 1, heads, seqs * n }
  end
  return views
end

--- The arrays of a resolve for selections of n blocks of `seqs` sequences.
local function views_for(self, seqs, n)
  local key = seqs * 2 ^ 32 + n
  local views = self.views[key]
  if not views then
    views = tensor.lasting(make_views, self, seqs, n)
    self.views[key] = views
  end
  return views
end

local function fetch(self, layer, views)
  check(C.kvl_move_blocks(self.cache:layer(layer), views.miss_from, self.keep[layer][1],
    views.miss_to, self.fetched_bytes))
end

local function resolve(self, layer, selection, tables, views)
  local call, overlap = self.resolve_call, self.overlap
  call.selection, call.tables, call.slots = selection, tables, views.slots
  call.miss_from, call.miss_to = views.miss_from, views.miss_to
  call.hit_logical = overlap and views.hit_logical or nil
  call.hit_slots = overlap and views.hit_slots or nil
  call.miss_logical = overlap and views.miss_logical or nil
  call.miss_slots = overlap and views.miss_slots or nil
  check(C.kvl_hot_resolve(self.layers[layer], call))
end

--- Attention of a decode step over a selection (nil: every block): attention.lua's way
-- of attending when the cache has a hot cache.
function HotCache:attend(attention, selection, ctx, out, lse)
  selection = selection or ctx:everything()
  local views = views_for(self, ctx.seqs, tonumber(selection.shape[2]))
  local layer, memory = ctx.layer, self.keep[ctx.layer][1]
  resolve(self, layer, selection, ctx.tables, views)
  if not self.overlap then
    fetch(self, layer, views)
    return attention:attend_slots(ctx, memory, selection, views.slots, out, lse)
  end
  local main, dev = self.cache.device:stream(), self.cache.device
  self.resolved:record(main)
  self.stream:wait(self.resolved)
  check(C.kvl_device_use_stream(dev, self.stream))
  local ok, why = pcall(fetch, self, layer, views)
  check(C.kvl_device_use_stream(dev, main))
  if not ok then error(why, 0) end
  self.fetched:record(self.stream)
  local part, part_lse = attention:scratch(ctx)
  attention:attend_slots(ctx, memory, views.hit_logical, views.hit_slots, part, part_lse)
  main:wait(self.fetched)
  return attention:attend_slots(ctx, memory, views.miss_logical, views.miss_slots, out,
    lse, part, part_lse)
end

--- hits, misses, evictions (of a KV head's block each), bytes fetched, and hit_rate,
-- since the last reset or reset_counts. Waits for the device.
function HotCache:stats()
  local c = self.counters:list()
  return { hits = c[1], misses = c[2], evictions = c[3], bytes = c[4],
           hit_rate = c[1] / (c[1] + c[2]) }
end

function HotCache:close()
  self.cache.device:sync()
  self.stream:close()
  self.resolved:close()
  self.fetched:close()
  for _, keep in pairs(self.keep) do
    for _, view in ipairs(keep) do view:free() end
  end
  for _, name in ipairs { "memory", "slot_of", "block_of", "order", "miss", "lists" } do
    self[name]:free()
  end
end

return M
