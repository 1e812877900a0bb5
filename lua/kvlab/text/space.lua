--- The work space of one text that is being encoded. A tokenizer may encode several texts
-- at a time, a slice of each (kvlab.slices), so each text has memory of its own.
local ffi = require "ffi"
local numbers = require "kvlab.text.numbers"

ffi.cdef [[
void *malloc(size_t bytes);
void free(void *memory);
]]
local C = ffi.C

local M = {}

local SYMBOLS_FIRST = 1024
local SYMBOLS_KEPT = 2 ^ 18 -- of a space that waits for the next text
local LISTS = { "id", "rank", "new", "prev", "next" }

---@class kvlab.text.Space
---@field out kvlab.text.Numbers     token ids
---@field ends kvlab.text.Numbers    first and last byte of each piece, in turn
---@field others kvlab.text.Numbers  … of smaller pieces
---@field parts kvlab.text.Numbers   matches of a rule, and what is between them
---@field merges kvlab.text.Pairs
---@field most integer               ids that are asked for
---@field room integer               symbols of the longest piece that there is room for
---@field id ffi.cdata*              int32_t[room + 1]: the symbols of a piece
---@field rank ffi.cdata*            … and of each the rank of the pair that it begins
---@field new ffi.cdata*             … what that pair becomes
---@field prev ffi.cdata*            … the symbols before and after it
---@field next ffi.cdata*
---@field heap ffi.cdata*|nil        double[2 * room + 2]: pairs, the next to merge on top
local Space = {}
Space.__index = Space

--- Memory outside of Lua's heap, which can be used again as soon as it is freed.
local function allocate(kind, bytes)
  local memory = C.malloc(bytes)
  if memory == nil then
    error(("encode: no host memory for %d bytes"):format(bytes), 0)
  end
  return ffi.cast(kind, ffi.gc(memory, C.free)), memory
end

local function release(self)
  for name, memory in pairs(self.memory) do
    C.free(ffi.gc(memory, nil))
    self.memory[name], self[name] = nil, nil
  end
  self.room = 0
end

--- Makes room for a piece of n symbols. If there is no memory, this raises, and there is
-- no room at all.
function Space:make_room(n)
  if self.room >= n then return end
  release(self)
  local room = math.max(n, SYMBOLS_FIRST)
  for _, name in ipairs(LISTS) do
    self[name], self.memory[name] = allocate("int32_t *", (room + 1) * 4)
  end
  self.room = room
end

--- The heap for the pairs of a piece that there is room for.
function Space:make_heap()
  if not self.heap then
    self.heap, self.memory.heap = allocate("double *", (self.room * 2 + 2) * 8)
  end
  return self.heap
end

--- Empties it. Gives memory back that only a long text needs.
function Space:clear()
  if self.room > SYMBOLS_KEPT then release(self) end
  for _, name in ipairs { "out", "ends", "others", "parts" } do self[name]:clear() end
end

---@return kvlab.text.Space
function M.new()
  return setmetatable({ out = numbers.new(), ends = numbers.new(), others = numbers.new(),
    parts = numbers.new(), memory = {}, room = 0 }, Space)
end

return M
