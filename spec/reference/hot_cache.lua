--- The bookkeeping of a hot cache, slow and obvious: which slot holds which block, what
-- is evicted, in which order. The truth that both devices are checked against, exactly.
--
-- Arrays are flat Lua arrays of 0-based indices, hence the + 1.
local M = {}

--- An empty cache; `orders` (optional): the slots of each KV head in another order.
function M.new(kv_heads, blocks, slots, orders)
  local hot = { kv_heads = kv_heads, blocks = blocks, slots = slots,
    slot_of = {}, block_of = {}, order = {}, ahead = {}, uses = {}, age = {},
    counters = { 0, 0, 0, 0, 0 } }
  for head = 1, kv_heads do
    for _ = 1, blocks do
      hot.slot_of[#hot.slot_of + 1] = -1
      hot.uses[#hot.uses + 1], hot.age[#hot.age + 1] = 0, 0
    end
    for i = 1, slots do
      hot.block_of[#hot.block_of + 1] = -1
      hot.ahead[#hot.ahead + 1] = 0
      hot.order[#hot.order + 1] = orders and orders[head][i] or i - 1
    end
  end
  return hot
end

local function fill(count, value)
  local list = {}
  for i = 1, count do list[i] = value end
  return list
end

--- The entries of one KV head in order: { seq, i, logical, block }, without those that
-- name nothing.
local function entries_of(hot, call, head)
  local entries, row = {}, call.selection_heads > 1 and head or 0
  for seq = 0, call.seqs - 1 do
    for i = 0, call.n - 1 do
      local at = (seq * call.selection_heads + row) * call.n + i
      local logical = call.selection[at + 1]
      if logical >= 0 and logical < call.max_blocks then
        local block = call.tables[seq * call.max_blocks + logical + 1]
        if block >= 0 and block < hot.blocks then
          entries[#entries + 1] = { seq = seq, i = i, logical = logical, block = block }
        end
      end
    end
  end
  return entries
end

--- Which slots `count` misses get, in the order of `order`.
local function victims(hot, call, head, protected, count)
  local candidates = {}
  for position = 0, hot.slots - 1 do
    local slot = hot.order[head * hot.slots + position + 1]
    local block = hot.block_of[head * hot.slots + slot + 1]
    if not protected[slot] then
      local class, priority = 2, 0             -- 0 free, 1 NaN, 2 a number
      if block == -1 then class = 0
      elseif call.priority then
        local of = type(call.priority) == "string" and hot[call.priority] or call.priority
        priority = of[head * hot.blocks + block + 1]
        if priority ~= priority then class, priority = 1, 0 end
      end
      candidates[#candidates + 1] = { slot = slot, position = position, class = class,
        priority = priority }
    end
  end
  table.sort(candidates, function(x, y)
    if x.class ~= y.class then return x.class < y.class end
    if x.priority ~= y.priority then return x.priority < y.priority end
    return x.position < y.position
  end)
  local chosen = {}
  for i = 1, count do chosen[i] = candidates[i] end
  table.sort(chosen, function(x, y) return x.position < y.position end)
  return chosen
end

--- Counts a call for the blocks that had a slot and keep it.
local function count_call(hot, call, head, used, chosen)
  local leaves = {}
  for _, victim in ipairs(chosen) do leaves[victim.slot] = true end
  for slot = 0, hot.slots - 1 do
    local block = hot.block_of[head * hot.slots + slot + 1]
    local at = head * hot.blocks + block + 1
    if block >= 0 and used[slot] then
      if not call.is_ahead then hot.uses[at] = hot.uses[at] + 1 end
      hot.age[at] = 0
    elseif block >= 0 and not leaves[slot] and not call.is_ahead then
      hot.age[at] = hot.age[at] + 1
    end
  end
end

local function resolve_head(hot, call, head, out)
  local of, held = head * hot.blocks + 1, head * hot.slots + 1
  local entries = entries_of(hot, call, head)
  local missing, is_missing, used = {}, {}, {}
  for _, e in ipairs(entries) do
    local slot = hot.slot_of[of + e.block]
    if slot >= 0 then
      used[slot] = true
      hot.counters[1] = hot.counters[1] + 1
      if hot.ahead[held + slot] == 1 and not call.is_ahead then
        hot.ahead[held + slot] = 0
        hot.counters[5] = hot.counters[5] + 1
      end
    elseif not is_missing[e.block] then
      is_missing[e.block] = true
      missing[#missing + 1] = e.block
      hot.counters[2] = hot.counters[2] + 1
    end
  end
  local chosen = victims(hot, call, head, used, #missing)
  count_call(hot, call, head, used, chosen)
  for m, victim in ipairs(chosen) do
    local old = hot.block_of[held + victim.slot]
    if old >= 0 then
      hot.slot_of[of + old] = -1
      hot.counters[3] = hot.counters[3] + 1
    end
    hot.block_of[held + victim.slot] = missing[m]
    hot.slot_of[of + missing[m]] = victim.slot
    hot.ahead[held + victim.slot] = call.is_ahead and 1 or 0
    hot.uses[of + missing[m]], hot.age[of + missing[m]] = call.is_ahead and 0 or 1, 0
    used[victim.slot] = true
    local at = head * call.seqs * call.n + m
    out.miss_from[at], out.miss_to[at] = missing[m], victim.slot
  end

  local unused_first, used_last = {}, {}
  for i = 0, hot.slots - 1 do
    local slot = hot.order[held + i]
    local list = used[slot] and used_last or unused_first
    list[#list + 1] = slot
  end
  for i, slot in ipairs(unused_first) do hot.order[held + i - 1] = slot end
  for i, slot in ipairs(used_last) do hot.order[held + #unused_first + i - 1] = slot end

  local parted = {}              -- per row: entries written so far
  for _, e in ipairs(entries) do
    local slot, row = hot.slot_of[of + e.block], (e.seq * hot.kv_heads + head) * call.n
    out.slots[row + e.i + 1] = slot
    local kind = is_missing[e.block] and "miss" or "hit"
    local key = kind .. row
    parted[key] = (parted[key] or 0) + 1
    out[kind .. "_logical"][row + parted[key]] = e.logical
    out[kind .. "_slots"][row + parted[key]] = slot
  end
end

--- call: selection, selection_heads, seqs, n, tables, max_blocks, is_ahead, priority
-- (optional): numbers, or the name of those of `hot`: uses or age.
-- Changes hot; returns slots, miss_from, miss_to and the four parted lists by name.
function M.resolve(hot, call)
  local out = {}
  for _, name in ipairs { "slots", "miss_from", "miss_to", "hit_logical", "hit_slots",
                          "miss_logical", "miss_slots" } do
    out[name] = fill(call.seqs * hot.kv_heads * call.n, -1)
  end
  for head = 0, hot.kv_heads - 1 do resolve_head(hot, call, head, out) end
  return out
end

--- Changes hot.
function M.drop(hot, blocks)
  for head = 0, hot.kv_heads - 1 do
    for _, block in ipairs(blocks) do
      local at = head * hot.blocks + block + 1
      if block >= 0 and block < hot.blocks and hot.slot_of[at] >= 0 then
        hot.block_of[head * hot.slots + hot.slot_of[at] + 1] = -1
        hot.slot_of[at] = -1
      end
    end
  end
end

--- Raise unless slot_of and block_of are each other's inverse and order has every slot.
function M.check(hot)
  for head = 0, hot.kv_heads - 1 do
    local of, held, seen = head * hot.blocks + 1, head * hot.slots + 1, {}
    for block = 0, hot.blocks - 1 do
      local slot = hot.slot_of[of + block]
      assert(slot == -1 or hot.block_of[held + slot] == block,
        "a block is not in the slot that it names")
    end
    for slot = 0, hot.slots - 1 do
      local block = hot.block_of[held + slot]
      assert(block == -1 or hot.slot_of[of + block] == slot,
        "a slot is not named by the block that it holds")
      seen[hot.order[held + slot]] = true
    end
    for slot = 0, hot.slots - 1 do assert(seen[slot], "a slot is missing in order") end
  end
end

return M
