--- The attention of a draft's step behind a hot cache. It reads only what is on the
-- device: the selected blocks that have a slot, and the block that the step writes to,
-- which is in the host tier's buffer. The other blocks are left out. Nothing is fetched,
-- and slots keep their blocks and their order: a draft is a guess, and the step that
-- verifies it reads everything that its own policy selects.
local ffi = require "ffi"
local library = require "kvlab.library"
local tensor = require "kvlab.tensor.arithmetic"

local C, check = library.C, library.check
local M = {}

---@class kvlab.Present
local Present = {}
Present.__index = Present

--- Reads the slots of a hot cache.
---@param hot kvlab.HotCache
function M.new(hot)
  return setmetatable({ hot = hot, arrays = {}, flat = {}, cut = ffi.new "kvl_cut" },
    Present)
end

--- Arrays for selections of n blocks by `heads` lists of each of `seqs` sequences.
local function make_arrays(self, seqs, heads, n)
  local cache = self.hot.cache
  local dev, kv_heads = cache.device, cache.kv_heads
  local function ints(...) return tensor.tensor(dev, "i32", { ... }) end
  local a = { logical = ints(1, seqs, heads, n), physical = ints(1, seqs, heads, n),
    open_logical = ints(seqs, heads, 1), open_slots = ints(seqs, heads, 1),
    places = ints(seqs, kv_heads, n), slots = ints(seqs, kv_heads, n),
    first = tensor.arange(dev, "i32", kv_heads, 0, cache.blocks)
      :reshape { 1, kv_heads, 1 } }
  a.closed, a.blocks = a.logical:index(0), a.physical:index(0)
  a.places_row = a.places:reshape { 1, seqs * kv_heads * n }
  a.slots_row = a.slots:reshape { 1, seqs * kv_heads * n }
  return a
end

local function arrays_for(self, seqs, heads, n)
  local key = (seqs * 2 + (heads > 1 and 1 or 0)) * 2 ^ 32 + n
  local a = self.arrays[key]
  if not a then
    a = tensor.lasting(make_arrays, self, seqs, heads, n)
    self.arrays[key] = a
  end
  return a
end

--- A layer's slot_of, i32 [1, kv_heads * blocks].
local function flat_for(self, layer)
  local flat = self.flat[layer]
  if not flat then
    local slot_of = self.hot.views_of[layer].slot_of
    flat = tensor.lasting(slot_of.reshape, slot_of, { 1, slot_of.count })
    self.flat[layer] = flat
  end
  return flat
end

--- Attends over what is present of a selection (nil: of every block).
function Present:attend(attention, selection, ctx, out, lse, hook)
  local tier, layer = self.hot.tier, ctx.layer
  local a = arrays_for(self, ctx.seqs, selection and tonumber(selection.sizes[1]) or 1,
    selection and tonumber(selection.sizes[2]) or ctx.width)
  local cut = self.cut
  cut.selection, cut.tables, cut.lens, cut.opens =
    selection, ctx.tables, ctx.lens, ctx.opens
  cut.logical, cut.physical = a.logical, a.physical
  cut.open_logical, cut.open_slots = a.open_logical, a.open_slots
  cut.block_size = ctx.block_size
  check(C.kvl_cut_selection(cut))
  -- attention skips a block whose slot is -1
  a.blocks:add(a.first, a.places)
  flat_for(self, layer):gather(a.places_row, a.slots_row)
  if hook then hook:forget_scores(ctx) end
  local part, part_lse = attention:scratch(ctx)
  attention:attend_part(ctx, hook, tier:decode_buffer(layer), a.open_logical,
    a.open_slots, part, part_lse)
  return attention:attend_part(ctx, hook, self.hot.views_of[layer].memory, a.closed,
    a.slots, out, lse, part, part_lse)
end

return M
