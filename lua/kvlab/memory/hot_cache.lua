--- The hot cache keeps blocks of the host tier on the device, with slots of its own for
-- every KV head. In each layer, a step gives every selected block a slot (evicting the
-- least recently used block, or another one if the cache has another eviction), fetches
-- the blocks that were missing, and attends over the slots. All of it runs on the device,
-- so the host never waits. Blocks that a policy expects its next steps to select are
-- brought ahead, on a stream of their own.
--
-- Its slots hold blocks (hot_slots), or single tokens for policies that list tokens
-- (hot_tokens). Everything here then holds for tokens in place of blocks, but no token is
-- fetched ahead.
--
-- With hot_overlap, attention over the present blocks runs while the others are fetched.
-- The two attentions are then merged by their log-sum-exp. Without it, one attention
-- follows the fetch, and the result equals the resident one bit for bit.
local arguments = require "kvlab.arguments"
local closed = require "kvlab.closed"
local ffi = require "ffi"
local kinds = require "kvlab.tensor.kinds"
local library = require "kvlab.library"
local objects = require "kvlab.memory.objects"
local options = require "kvlab.options"
local present = require "kvlab.memory.present"
local rows = require "kvlab.memory.rows"
local tensor = require "kvlab.tensor.tensor"

local C, check = library.C, library.check
local M = {}

local COUNTERS = 5 -- of kvl_hot: hits, misses, evictions, bytes, brought ahead and used

---@class kvlab.HotCache
---@field slots integer              of each KV head
---@field by_token boolean           a slot holds a token
---@field priority kvlab.Tensor|nil  f32 [layers, kv_heads, blocks], see use_priority
---@field eviction kvlab.Eviction|nil  decides what leaves; nil: the least recently used
local HotCache = {}
HotCache.__index = HotCache

--- Gives every layer its part of values [layers, kv_heads, blocks], as a field of
-- kvl_hot.
local function give(self, name, values)
  for layer = 0, self.cache.layers - 1 do
    local view = values:index(layer)
    self.views_of[layer][name], self.layers[layer][name] = view, view
    if self.ahead then self.ahead.layers[layer][name] = view end
  end
end

--- Opens the hot cache of a host tier, with tier.hot_slots or tier.hot_tokens slots for
-- each KV head.
---@param tier kvlab.HostTier
---@param eviction? kvlab.Eviction  nil: evicts the least recently used block
---@return kvlab.HotCache
function M.new(tier, eviction)
  local cache = tier.cache
  local self = setmetatable({ tier = tier, cache = cache, layers = {}, views_of = {},
    by_token = tier.hot_tokens > 0, slots = math.max(tier.hot_slots, tier.hot_tokens),
    overlap = tier.hot_overlap, views = {},
    under_way = {}, is_ahead = false, bytes_counted = 0 }, HotCache)
  local dev, heads, n = cache.device, cache.kv_heads, self.slots
  local each = self.by_token and cache.block_size or 1 -- of what slots hold, in a block
  self.memory = tensor.tensor(dev, cache.format.memory,
    { cache.layers, math.ceil(n / each), unpack(cache.format.dims) })
  self.slot_of = tensor.tensor(dev, "i32", { cache.layers, heads, cache.blocks * each })
  self.block_of = tensor.tensor(dev, "i32", { cache.layers, heads, n })
  self.order = tensor.tensor(dev, "i32", { cache.layers, heads, n })
  self.counters = tensor.zeros(dev, "i64", { COUNTERS })
  self.fetched_bytes = self.counters:narrow(3, 1)
  for layer = 0, cache.layers - 1 do
    local views = { memory = self.memory:index(layer),
      slot_of = self.slot_of:index(layer), block_of = self.block_of:index(layer),
      order = self.order:index(layer) }
    self.views_of[layer] = views
    self.layers[layer] = ffi.new("kvl_hot", views.memory, views.slot_of, views.block_of,
      views.order, nil, self.counters, nil, nil, nil, cache.format:of(layer),
      self.by_token and 1 or 0)
  end
  for name, values in pairs(eviction and eviction:attach(cache) or {}) do
    self.eviction = eviction
    give(self, name, values)
  end
  self.miss = tensor.tensor(dev, "i32", { 2, heads * n })
  self.lists = tensor.tensor(dev, "i32", { 5, heads * n })
  self.resolve_call = ffi.new "kvl_resolve"
  self.present = present.new(self)
  self.stream = dev:open_stream()
  self.resolved, self.fetched = dev:open_event(), dev:open_event()
  self:reset()
  return self
end

--- Drops every block and sets the counters to zero.
function HotCache:reset()
  self:forget()
  self:reset_counts()
end

--- Drops every block; the counters go on.
function HotCache:forget()
  self:join()
  self.slot_of:fill_(-1)
  self.block_of:fill_(-1)
  if self.ahead then self.ahead.marks:fill_(0) end
  local heads = self.cache.kv_heads
  for layer = 0, self.cache.layers - 1 do
    for head = 0, heads - 1 do self.views_of[layer].order:index(head):arange_() end
  end
end

--- All bytes that were fetched since the cache was made. Waits for the device.
function HotCache:bytes() return self.bytes_counted + self:stats().bytes end

--- Sets the counters to zero; the slots keep their blocks. Waits for the device.
function HotCache:reset_counts()
  self.bytes_counted = self:bytes()
  self.counters:fill_(0)
  if not self.ahead then return end
  self.ahead.counters:fill_(0)
  self.ahead.marks:fill_(0) -- using a block that was brought before this is no hit of the
                            -- new count
end

--- From now on, evicts the block with the lowest priority instead of the least recently
-- used. Returns the priorities, f32 [layers, kv_heads, blocks], one number for each
-- block of the host tier; a policy writes to them. They start as zeros. Every call
-- returns the same tensor. Raises if the cache has an eviction that decides.
---@return kvlab.Tensor priority
function HotCache:use_priority()
  if self.eviction then
    options.fail(('use_priority: the eviction %s decides what leaves, expected evict = '
      .. '"lru"'):format(self.eviction.name))
  end
  if self.priority then return self.priority end
  local cache = self.cache
  self.priority = tensor.zeros(cache.device, "f32",
    { cache.layers, cache.kv_heads, cache.blocks })
  give(self, "priority", self.priority)
  return self.priority
end

--- Appends a step's k, v to the host tier, to the slots that hold its blocks, and to the
-- buffer of open blocks.
function HotCache:append(layer, k, v, batch, buffer)
  local hot = options.entry("append", "layer", self.layers, layer)
  check(C.kvl_hot_append(hot, k, v, batch.places, self.cache:layer(layer),
    batch.placement.buffer_places, buffer))
end

--- Drops blocks, i32 [n], that something else wrote in the host tier.
function HotCache:drop(layer, blocks)
  if self.under_way[layer] then self:join() end
  check(C.kvl_hot_drop(options.entry("drop", "layer", self.layers, layer), blocks))
end

-- ---- a step ---------------------------------------------------------------------------

local function make_views(self, seqs, n)
  local heads = self.cache.kv_heads
  if seqs * n > self.slots then
    error(("the hot cache has %d slots for a KV head, %d sequences with %d %s each may "
      .. "need %d; give it more (%s) or the policy a smaller budget"):format(self.slots,
      seqs, n, self.by_token and "tokens" or "blocks", seqs * n,
      self.by_token and "hot_tokens" or "hot_slots"), 0)
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

local function fetch(self, layer, views, fetched_bytes)
  local memory = self.views_of[layer].memory
  local move = self.by_token and C.kvl_move_tokens or C.kvl_move_blocks
  check(move(self.cache:layer(layer), views.miss_from, memory, views.miss_to,
    self.cache.format:of(layer), fetched_bytes))
end

--- Calls fn(self, …), whose launches go to another stream than the current one. Like
-- device:with_stream, but it makes no table. Ctrl-C is noticed only at a launch or
-- afterwards, so the stream is always restored.
local function on_stream(self, stream, fn, ...)
  local dev = self.cache.device
  local main = dev:stream()
  C.kvl_interrupt_hold(1)
  local ok, why = pcall(check, C.kvl_device_use_stream(dev, stream))
  if ok then ok, why = pcall(fn, self, ...) end
  C.kvl_device_use_stream(dev, main)
  C.kvl_interrupt_hold(-1)
  if not ok then error(why, 0) end
end

local function resolve(self, layer, selection, tables, views)
  local call, overlap = self.resolve_call, self.overlap
  call.selection, call.tables, call.slots = selection, tables, views.slots
  call.miss_from, call.miss_to = views.miss_from, views.miss_to
  call.hit_logical = overlap and views.hit_logical or nil
  call.hit_slots = overlap and views.hit_slots or nil
  call.miss_logical = overlap and views.miss_logical or nil
  call.miss_slots = overlap and views.miss_slots or nil
  if self.eviction then self.eviction:rank(layer) end
  check(C.kvl_hot_resolve(self.layers[layer], call))
end

--- Attends over a selection, or over listed tokens: in parts, if there are too few slots
-- for a step's rows.
local function attend_all(self, attention, selection, ctx, out, lse, hook)
  local most = math.floor(self.slots / tonumber(selection.sizes[2]))
  if ctx.is_rows and ctx.seqs > most then
    return rows.in_parts(self, math.max(most, 1), attention, selection, ctx, out, lse,
      hook)
  end
  return self:attend_rows(attention, selection, ctx, out, lse, hook)
end

--- Attends in a decode step over a selection (nil: every block). attention.lua calls it
-- when the cache has a hot cache.
function HotCache:attend(attention, selection, ctx, out, lse, hook)
  if self.by_token then
    error(("layer %d reads blocks, and the hot cache has slots for tokens (hot_tokens), "
      .. 'expected a policy that lists tokens, or decode_through = "ring"'):format(
      ctx.layer), 0)
  elseif ctx.is_draft then
    return self.present:attend(attention, selection, ctx, out, lse, hook)
  end
  selection = selection or ctx:everything()
  if self.eviction then self.eviction:expect_scores(ctx) end
  return attend_all(self, attention, selection, ctx, out, lse, hook)
end

--- The same over listed tokens, for a hot cache by token.
---@param listed kvlab.Tensor  i32 [rows, kv_heads or 1, n]
function HotCache:attend_listed(attention, listed, ctx, out, lse)
  if ctx.is_draft then
    error("a draft's step behind a hot cache reads blocks, expected a draft policy that "
      .. "selects blocks", 0)
  end
  return attend_all(self, attention, listed, ctx, out, lse)
end

--- Attends over a selection, or over listed tokens, of which `slots` says where they lie.
local function attend_slots(self, attention, ctx, hook, memory, read, slots, out, lse,
                            prev, prev_lse)
  local selection, listed = read, nil
  if self.by_token then selection, listed = nil, read end
  return attention:attend_part(ctx, hook, memory, selection, slots, out, lse, prev,
    prev_lse, nil, listed)
end

-- Attends for some of the rows: for no more than there are slots for.
function HotCache:attend_rows(attention, selection, ctx, out, lse, hook)
  local views = views_for(self, ctx.seqs, tonumber(selection.sizes[2]))
  local layer = ctx.layer
  local memory = options.entry("attend", "ctx.layer", self.views_of, layer).memory
  resolve(self, layer, selection, ctx.tables, views)
  if not self.overlap then
    fetch(self, layer, views, self.fetched_bytes)
    return attend_slots(self, attention, ctx, hook, memory, selection, views.slots, out,
      lse)
  end
  local main = self.cache.device:stream()
  self.resolved:record(main)
  self.stream:wait(self.resolved)
  on_stream(self, self.stream, fetch, layer, views, self.fetched_bytes)
  self.fetched:record(self.stream)
  local part, part_lse = attention:scratch(ctx)
  attend_slots(self, attention, ctx, hook, memory, views.hit_logical, views.hit_slots,
    part, part_lse)
  main:wait(self.fetched)
  return attend_slots(self, attention, ctx, hook, memory, views.miss_logical,
    views.miss_slots, out, lse, part, part_lse)
end

-- ---- ahead of a step ------------------------------------------------------------------

--- Makes what is needed to bring blocks ahead: a stream, arrays of its own (the main
-- stream goes on meanwhile), marks of the slots that were filled ahead, and counters.
local function new_ahead(self)
  local cache, dev = self.cache, self.cache.device
  local heads, n = cache.kv_heads, self.slots
  local ahead = { stream = dev:open_stream(), asked = dev:open_event(),
    there = dev:open_event(), views = {}, layers = {}, call = ffi.new "kvl_resolve",
    marks = tensor.zeros(dev, "i32", { cache.layers, heads, n }),
    counters = tensor.zeros(dev, "i64", { COUNTERS }),
    lists = tensor.tensor(dev, "i32", { 3, heads * n }) }
  ahead.call.is_ahead, ahead.bytes = 1, ahead.counters:narrow(3, 1)
  for layer = 0, cache.layers - 1 do
    local views = self.views_of[layer]
    views.marks = ahead.marks:index(layer)
    self.layers[layer].ahead = views.marks
    ahead.layers[layer] = ffi.new("kvl_hot", views.memory, views.slot_of, views.block_of,
      views.order, views.priority, ahead.counters, views.marks, views.uses, views.age,
      cache.format:of(layer))
  end
  return ahead
end

--- Copies of a layer's selection, because the next layer selects while they are read.
local function new_ahead_views(self, seqs, lists, n)
  local a, heads, dev = self.ahead, self.cache.kv_heads, self.cache.device
  local function list(i, ...)
    return a.lists:index(i):narrow(0, seqs * heads * n):reshape { ... }
  end
  local views = { selections = {}, rows = {}, slots = list(0, seqs, heads, n),
    miss_from = list(1, 1, heads, seqs * n), miss_to = list(2, 1, heads, seqs * n) }
  local all = tensor.tensor(dev, "i32", { self.cache.layers, seqs, lists, n })
  for layer = 0, self.cache.layers - 1 do
    views.selections[layer], views.rows[layer] = all:index(layer), {}
    for i = 0, seqs - 1 do views.rows[layer][i + 1] = views.selections[layer]:index(i) end
  end
  return views
end

local function bring(self, layer, tables, views)
  local a, call = self.ahead, self.ahead.call
  call.selection, call.tables, call.slots =
    views.selections[layer], tables, views.slots
  call.miss_from, call.miss_to = views.miss_from, views.miss_to
  if self.tier.pending then -- a prefill chunk is on its way to the host tier
    check(C.kvl_ring_wait_offload(self.tier.ring, layer))
  end
  if self.eviction then self.eviction:rank(layer) end
  check(C.kvl_hot_resolve(a.layers[layer], call))
  fetch(self, layer, views, a.bytes)
end

--- Starts to bring the blocks that ctx.layer is expected to select in a later step, while
-- later work on the current stream runs. Expected blocks that are present stay; other
-- blocks are evicted to make room for the missing ones. The next step begins when the
-- blocks are there. If there are too few slots for the selection, nothing is brought: the
-- sequences of a prompt's step need not decode together.
---@param selection kvlab.Tensor  i32 [seqs, kv_heads or 1, n]
---@param ctx kvlab.Context
---@param wanted? boolean[]  for which sequences (all)
function HotCache:bring_ahead(selection, ctx, wanted)
  local layer, lists, n = ctx.layer, selection:size(1), selection:size(2)
  if self.by_token then return end
  if ctx.seqs * n > self.slots then return end
  self.ahead = self.ahead or tensor.lasting(new_ahead, self)
  local a = self.ahead
  local key = (ctx.seqs * 2 + (lists > 1 and 1 or 0)) * 2 ^ 32 + n
  local views = a.views[key] or tensor.lasting(new_ahead_views, self, ctx.seqs, lists, n)
  a.views[key] = views
  options.entry("bring_ahead", "ctx.layer", views.selections, layer):copy_(selection)
  for i = 1, wanted and ctx.seqs or 0 do
    if not wanted[i] then views.rows[layer][i]:fill_(-1) end
  end
  a.asked:record(self.cache.device:stream())
  a.stream:wait(a.asked)
  on_stream(self, a.stream, bring, layer, ctx.tables, views)
  a.there:record(a.stream)
  self.under_way[layer], self.is_ahead = true, true
  -- a graph ends only when everything that it began has ended
  if layer == self.cache.layers - 1
     and C.kvl_device_is_recording(self.cache.device) == 1 then self:join() end
end

--- Makes later work on the current stream wait for the blocks that were brought ahead.
function HotCache:join()
  if not self.is_ahead then return end
  self.cache.device:stream():wait(self.ahead.there)
  for layer in pairs(self.under_way) do self.under_way[layer] = nil end
  self.is_ahead = false
end

-- ---- numbers --------------------------------------------------------------------------

--- The counters since the last reset or reset_counts. hits, misses and evictions count
-- the blocks (or tokens) of single KV heads in steps; hit_rate follows; bytes are all
-- bytes fetched. Of the blocks brought ahead: predicted (asked for), brought (were
-- missing), used (brought and selected since), bytes, wasted_bytes (of blocks not used
-- so far). Waits for the device.
function HotCache:stats()
  self:join()
  local c = self.counters:list()
  local a = self.ahead and self.ahead.counters:list() or { 0, 0, 0, 0, 0 }
  local bytes = self.tier.bytes_block / self.cache.kv_heads
  return { hits = c[1], misses = c[2], evictions = c[3] + a[3], bytes = c[4] + a[4],
           hit_rate = c[1] / (c[1] + c[2]),
           ahead = { predicted = a[1] + a[2], brought = a[2], used = c[5], bytes = a[4],
                     wasted_bytes = (a[2] - c[5]) * bytes } }
end

--- Frees the memory.
function HotCache:close()
  self.cache.device:sync()
  self.stream:close()
  self.resolved:close()
  self.fetched:close()
  if self.ahead then
    for _, name in ipairs { "stream", "asked", "there" } do self.ahead[name]:close() end
    for _, name in ipairs { "marks", "counters", "lists" } do self.ahead[name]:free() end
  end
  for _, views in pairs(self.views_of) do
    for _, view in pairs(views) do view:free() end
  end
  if self.eviction then self.eviction:free() end
  for _, name in ipairs { "memory", "slot_of", "block_of", "order", "miss", "lists" } do
    self[name]:free()
  end
  closed(self, "hot cache")
end

local ATTEND = { attention = objects.attention, selection = kinds.tensor,
                 ctx = objects.layer_context, out = kinds.tensor_or_nil,
                 lse = kinds.tensor_or_nil }
arguments.methods(HotCache, "a hot cache", {
  attend_rows = ATTEND,
  append = { layer = options.whole, k = kinds.tensor, v = kinds.tensor_or_nil,
             batch = objects.batch, buffer = kinds.tensor },
  attend_listed = { attention = objects.attention, listed = kinds.tensor,
                    ctx = objects.layer_context, out = kinds.tensor_or_nil,
                    lse = kinds.tensor_or_nil },
  drop = { layer = options.whole, blocks = kinds.tensor },
  attend = { attention = objects.attention, selection = kinds.tensor_or_nil,
             ctx = objects.layer_context, out = kinds.tensor_or_nil,
             lse = kinds.tensor_or_nil },
  bring_ahead = { selection = kinds.tensor, ctx = objects.layer_context,
                  wanted = options.optional(options.table) },
})

return M
