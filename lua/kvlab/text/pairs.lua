--- What a pair of tokens becomes: a map from two numbers to two numbers, outside of Lua's
-- heap and without a function call for a lookup.
local bit = require "bit"
local ffi = require "ffi"

local band, bxor, rol, rshift, tobit = bit.band, bit.bxor, bit.rol, bit.rshift, bit.tobit

ffi.cdef "typedef struct { int32_t left, right, rank, id; } kvl_text_pair;"

local M = {}

--- Ranks and ids are below this, so that a product with the factors below is exact.
M.LIMIT = 2 ^ 24
local NONE = 2 ^ 31 - 1
M.NONE = NONE

---@class kvlab.text.Pairs
---@field slots ffi.cdata*
---@field mask integer
local Pairs = {}
Pairs.__index = Pairs

--- A map that is to hold up to n pairs.
---@param n integer
---@return kvlab.text.Pairs
function M.new(n)
  local size = 16
  while size < n * 3 do size = size * 2 end
  local slots = ffi.new("kvl_text_pair[?]", size)
  for i = 0, size - 1 do slots[i].left = -1 end
  return setmetatable({ slots = slots, mask = size - 1 }, Pairs)
end

local function first_slot(left, right, mask)
  local x = bxor(tobit(left * 0x5BD1E9), rol(tobit(right * 0x6C50B5), 16))
  return band(bxor(x, rshift(x, 15)), mask)
end

--- Sets what a pair becomes; a later call replaces an earlier one.
function Pairs:set(left, right, rank, id)
  local slots, mask = self.slots, self.mask
  local i = first_slot(left, right, mask)
  while slots[i].left >= 0 and (slots[i].left ~= left or slots[i].right ~= right) do
    i = band(i + 1, mask)
  end
  local slot = slots[i]
  slot.left, slot.right, slot.rank, slot.id = left, right, rank, id
end

--- The slots after the first two; few pairs get here.
local function get_further(slots, mask, i, left, right)
  while true do
    i = band(i + 1, mask)
    local slot = slots[i]
    local l = slot.left
    if l == left and slot.right == right then return slot.rank, slot.id end
    if l < 0 then return NONE, -1 end
  end
end

--- What a pair becomes: its rank and the id; NONE and -1 if it is in no merge. The first
-- two slots are looked at without a loop, which LuaJIT could not compile into the loops
-- that call this.
---@return integer rank
---@return integer id
function Pairs:get(left, right)
  local slots, mask = self.slots, self.mask
  local i = first_slot(left, right, mask)
  local slot = slots[i]
  local l = slot.left
  if l == left and slot.right == right then return slot.rank, slot.id end
  if l < 0 then return NONE, -1 end
  i = band(i + 1, mask)
  slot = slots[i]
  l = slot.left
  if l == left and slot.right == right then return slot.rank, slot.id end
  if l < 0 then return NONE, -1 end
  return get_further(slots, mask, i, left, right)
end

return M
