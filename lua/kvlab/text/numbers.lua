--- A list of 32-bit numbers outside of Lua's heap that grows: token ids, and the ends of
-- pieces of a text.
local ffi = require "ffi"

---@class kvlab.text.Numbers
---@field at ffi.cdata*   int32_t[room]; another one after each call of `reserve`
---@field count integer
---@field room integer
local Numbers = {}
Numbers.__index = Numbers

local ROOM_FIRST = 1024
local ROOM_KEPT = 2 ^ 20 -- what a list keeps between two texts

local M = {}

---@return kvlab.text.Numbers
function M.new()
  return setmetatable({ at = ffi.new("int32_t[?]", ROOM_FIRST), count = 0,
                        room = ROOM_FIRST }, Numbers)
end

--- Makes room for n more numbers.
---@param n integer
function Numbers:reserve(n)
  if self.count + n <= self.room then return end
  local room = math.max(self.count + n, self.room * 2)
  local at = ffi.new("int32_t[?]", room)
  ffi.copy(at, self.at, self.count * 4)
  self.at, self.room = at, room
end

--- Appends a number.
---@param x integer
function Numbers:push(x)
  local count = self.count
  if count >= self.room then self:reserve(1) end
  self.at[count] = x
  self.count = count + 1
end

--- Appends n numbers.
---@param from ffi.cdata*  int32_t *
---@param n integer
function Numbers:append(from, n)
  self:reserve(n)
  ffi.copy(self.at + self.count, from, n * 4)
  self.count = self.count + n
end

--- Removes all numbers, and gives back memory that only a very long text needs.
function Numbers:clear()
  self.count = 0
  if self.room > ROOM_KEPT then
    self.at, self.room = ffi.new("int32_t[?]", ROOM_FIRST), ROOM_FIRST
  end
end

return M
