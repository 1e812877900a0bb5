--- Attention over a ring. It starts with the open blocks, causally, from the buffer,
-- while the first loads are on their way. Then the selected blocks of the host tier pass
-- through the slots: each slot is loaded during the attention over the slot before, and
-- every pass merges its result with the earlier ones.
--
-- A plan divides a selection into passes on the device, so the host never learns what
-- was selected. If nothing is selected (dense), every layer has the same plan: it is
-- made once per step, and loads run on into the next layers.
--
-- Where a policy emits in a prefill, K is read again after the attention, when the
-- log-sum-exp is known. If all passes of a layer fit in the slots, they stay there until
-- then. If not, the passes have a second round, and their blocks cross the link twice.
local ffi = require "ffi"
local library = require "kvlab.library"
local rows = require "kvlab.memory.rows"
local tensor = require "kvlab.tensor.tensor"

local C, check = library.C, library.check
local M = {}

-- Blocks of at least this size are copied by the copy engine if the host knows their
-- number. The same as BYTES_COPY_ENGINE in runtime/memory/ring.c.
local BYTES_COPY_ENGINE = 1024 * 1024

---@class kvlab.Ring
local Ring = {}
Ring.__index = Ring

--- The way `attention` attends through the ring of its cache. issued and consumed count
-- the loads of the present plan.
function M.new(attention)
  return setmetatable({ tier = attention.cache.tier, cut = ffi.new "kvl_cut",
    plans = {}, step = -1, issued = 0, consumed = 0 }, Ring)
end

--- Where block i of sequence s lies in a slot: s * n + i; i32 [seqs, heads, n].
local function slot_pattern(dev, seqs, heads, n)
  local list = {}
  for s = 0, seqs - 1 do
    for _ = 1, heads do
      for i = 0, n - 1 do list[#list + 1] = s * n + i end
    end
  end
  return tensor.from(dev, "i32", { seqs, heads, n }, list)
end

--- Arrays for a plan of `passes` passes for `seqs` sequences and `heads` heads, and
-- n_open open blocks of each.
local function new_plan(self, seqs, heads, passes, n_open)
  local dev, n = self.tier.cache.device, math.floor(self.tier.group / seqs)
  local function ints(...) return tensor.tensor(dev, "i32", { ... }) end
  local plan = {
    passes = passes, n = n, logical = ints(passes, seqs, heads, n),
    physical = ints(passes, seqs, heads, n), open_logical = ints(seqs, heads, n_open),
    open_slots = ints(seqs, heads, n_open), slots = slot_pattern(dev, seqs, heads, n),
    pass_logical = {}, pass_physical = {},
  }
  for p = 0, passes - 1 do
    plan.pass_logical[p] = plan.logical:index(p)
    plan.pass_physical[p] = plan.physical:index(p)
  end
  return plan
end

local function plan_for(self, is_dense, seqs, heads, passes, n_open)
  local key = (((passes * 64 + heads) * 1024 + seqs) * 8192 + n_open) * 2
    + (is_dense and 1 or 0)
  local plan = self.plans[key]
  if not plan then
    plan = tensor.lasting(new_plan, self, seqs, heads, passes, n_open)
    self.plans[key] = plan
  end
  return plan
end

--- Waits for loads that ran ahead and are no longer wanted, before their plan changes.
local function drain(self)
  local o = self.tier
  if self.issued > self.consumed then
    for slot = 0, o.slots - 1 do check(C.kvl_ring_wait(o.ring, slot)) end
  end
  self.issued, self.consumed = 0, 0
end

--- Divides the selection (nil: all blocks) of this layer into passes.
local function make_plan(self, selection, ctx)
  local o, placement = self.tier, self.tier.batch.placement
  drain(self)
  local heads = selection and tonumber(selection.sizes[1]) or 1
  local most = selection and math.min(tonumber(selection.sizes[2]), placement.history)
    or placement.history
  local passes = math.ceil(most / math.floor(o.group / ctx.seqs))
  local plan = plan_for(self, not selection, ctx.seqs, heads, passes, o.batch.open_max)
  local cut = self.cut
  cut.selection, cut.tables, cut.lens, cut.opens =
    selection, ctx.tables, ctx.lens, ctx.opens or placement.opens
  cut.logical, cut.physical = plan.logical, plan.physical
  cut.open_logical, cut.open_slots = plan.open_logical, plan.open_slots
  cut.block_size = ctx.block_size
  check(C.kvl_cut_selection(cut))
  plan.by_engine = not selection and o.batch.count == 1 and ctx.seqs == 1
    and o.bytes_block >= BYTES_COPY_ENGINE
  if not plan.by_engine then check(C.kvl_ring_planned(o.ring)) end -- gathers read the cut
  return plan
end

--- Starts load number i: pass i % passes of the layer i / passes after `layer`.
local function load(self, plan, layer, i)
  local o, batch = self.tier, self.tier.batch
  self.issued = self.issued + 1
  local slot, pass = i % o.slots, i % plan.passes
  layer = layer + math.floor(i / (plan.passes * plan.rounds))
  local cache = o.cache:layer(layer)
  if plan.by_engine then
    local first = pass * plan.n
    check(C.kvl_ring_load(o.ring, slot, layer, cache,
      batch.host_ints + batch.layout.tables + first,
      math.min(plan.n, batch.placement.history - first)))
  else
    check(C.kvl_ring_gather(o.ring, slot, layer, cache, plan.pass_physical[pass],
      plan.slots))
  end
end

--- Notes how the blocks of a plan are read: twice (reads_again) or once.
local function set_rounds(self, plan, reads_again, layers)
  plan.reads_again = reads_again
  plan.stays = reads_again and plan.passes <= self.tier.slots
  plan.rounds = reads_again and not plan.stays and 2 or 1
  plan.total = plan.passes * plan.rounds * layers
end

--- Returns the plan of this layer, the layer with which the plan's loads began, and the
-- number of this layer's first load. The first loads are under way when it returns.
local function prepare(self, selection, ctx, reads_again)
  local o = self.tier
  if selection then
    local plan = make_plan(self, selection, ctx)
    set_rounds(self, plan, reads_again, 1)
    self.step = -1
    for i = 0, math.min(o.slots, plan.total) - 1 do load(self, plan, ctx.layer, i) end
    return plan, ctx.layer, 0
  end
  if self.step ~= ctx.step or ctx.layer ~= self.next_layer or ctx.is_rows
     or self.dense.reads_again ~= reads_again then
    local plan = make_plan(self, nil, ctx)
    set_rounds(self, plan, reads_again, o.layers - ctx.layer)
    self.dense, self.step, self.first_layer = plan, ctx.step, ctx.layer
    for i = 0, math.min(o.slots, plan.total) - 1 do load(self, plan, ctx.layer, i) end
  end
  self.next_layer = ctx.layer + 1
  local dense = self.dense
  return dense, self.first_layer,
    (ctx.layer - self.first_layer) * dense.passes * dense.rounds
end

--- Nothing reads the slot of load number i any more, so the next load can begin.
local function end_pass(self, plan, layer, i)
  local o = self.tier
  check(C.kvl_ring_done(o.ring, i % o.slots))
  if i + o.slots < plan.total then load(self, plan, layer, i + o.slots) end
end

--- Gives K to hooks once more, after the attention of a layer whose first load was number
-- `first`.
local function read_again(self, plan, layer, first, ctx, lse, emitters)
  local o = self.tier
  for _, one in ipairs(emitters) do
    one:add_part(ctx, lse, o.buffer_views[ctx.layer], plan.open_logical, plan.open_slots)
  end
  if not plan.stays then first = first + plan.passes end
  for pass = 0, plan.passes - 1 do
    local i = first + pass
    local slot = i % o.slots
    if not plan.stays then
      check(C.kvl_ring_wait(o.ring, slot))
      self.consumed = self.consumed + 1
    end
    for _, one in ipairs(emitters) do
      one:add_part(ctx, lse, o.slot_views[slot], plan.pass_logical[pass], plan.slots)
    end
    end_pass(self, plan, layer, i)
  end
end

--- Attention of ctx.query over a selection (nil: every block) of this layer.
function Ring:attend(attention, selection, ctx, out, lse, hook, emitters)
  if ctx.is_rows and ctx.seqs > self.tier.group then
    return rows.in_parts(self, self.tier.group, attention, selection, ctx, out, lse, hook)
  end
  return self:attend_rows(attention, selection, ctx, out, lse, hook, emitters)
end

-- Attends for some of the rows: for no more than a slot has blocks.
function Ring:attend_rows(attention, selection, ctx, out, lse, hook, emitters)
  local o = self.tier
  if C.kvl_device_is_recording(o.cache.device) == 1 then
    error("attention through a ring cannot be recorded in a graph: how many loads it "
      .. "takes depends on the lengths. A hot cache can (hot_slots)", 0)
  end
  local plan, layer, first = prepare(self, selection, ctx, emitters ~= nil)
  local part, prev_lse, next_lse = attention:scratch(ctx)
  if plan.passes == 0 then part, prev_lse = out, lse end
  check(C.kvl_ring_wait(o.ring, C.KVL_RING_BUFFER))
  local result = attention:attend_part(ctx, hook, o.buffer_views[ctx.layer],
    plan.open_logical, plan.open_slots, part, prev_lse)
  check(C.kvl_ring_done(o.ring, C.KVL_RING_BUFFER))
  for pass = 0, plan.passes - 1 do
    local i, is_last = first + pass, pass == plan.passes - 1
    local slot, to = i % o.slots, part
    if is_last then to = out end
    check(C.kvl_ring_wait(o.ring, slot))
    self.consumed = self.consumed + 1
    result = attention:attend_part(ctx, hook, o.slot_views[slot], plan.pass_logical[pass],
      plan.slots, to, is_last and lse or next_lse, part, prev_lse, true)
    if not plan.stays then end_pass(self, plan, layer, i) end
    prev_lse, next_lse = next_lse, prev_lse
  end
  if emitters then read_again(self, plan, layer, first, ctx, lse, emitters) end
  return result
end

return M
