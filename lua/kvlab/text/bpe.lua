--- Byte-pair encoding: cuts a piece of text into symbols (bytes, or characters), and
-- merges the pair of the lowest rank, the leftmost of equals, until no pair is left that
-- can be merged.
--
-- Short pieces search all their pairs at every merge. Longer ones keep their symbols in a
-- linked list and their pairs in a heap, so a piece of n symbols takes n log n steps. The
-- tokens of short pieces are kept in a table of bounded size, because words come again.
local bit = require "bit"
local ffi = require "ffi"
local pairs_of = require "kvlab.text.pairs"
local numbers = require "kvlab.text.numbers"

local rshift = bit.rshift
local NONE = pairs_of.NONE

local M = {}

local BYTES_KEPT = 48      -- of the longest piece whose tokens are kept
local PIECES_KEPT = 2 ^ 16 -- at most; then all are forgotten
local SCANNED = 24         -- symbols of the longest piece without a heap
local SYMBOLS_KEPT = 2 ^ 18 -- of the work space between two texts

---@class kvlab.text.BPE
---@field merges kvlab.text.Pairs
---@field bytes ffi.cdata*|nil      int32_t[256]: the token of each byte, -1: none
---@field characters table<integer, integer>|nil  code point -> token; in place of bytes
---@field fallback ffi.cdata*|nil   int32_t[256]: tokens of bytes of other characters
---@field whole table<string, integer>|nil  pieces that are one token whatever merges say
---@field unk integer|nil           the token of other symbols; nil: they are left out
---@field fuses_unk boolean
local BPE = {}
BPE.__index = BPE

---@param o table  the fields above
---@return kvlab.text.BPE
function M.new(o)
  local self = setmetatable(o, BPE)
  self.kept, self.kept_count, self.pool, self.room = {}, 0, numbers.new(), 0
  self:make_room(SCANNED)
  return self
end

-- ---- work space -----------------------------------------------------------------------

--- Makes room for the symbols of a piece of n bytes. If there is no memory, this raises,
-- and there is no room at all.
function BPE:make_room(n)
  if self.room >= n then return end
  self.room, self.heap = 0, nil
  local room = math.max(n, 1024)
  for _, name in ipairs { "id", "rank", "new", "prev", "next" } do
    self[name] = ffi.new("int32_t[?]", room + 1)
  end
  self.room = room
end

--- Gives memory back that only a very long piece needs. The collector knows how large it
-- is but waits for twice as much, so it is called.
function BPE:give_back()
  if self.room <= SYMBOLS_KEPT then return end
  self.room = 0
  self:make_room(SCANNED)
  collectgarbage()
end

-- ---- symbols --------------------------------------------------------------------------

--- Writes the symbols of the bytes base[first … last) to self.id.
---@return integer n
local function symbols_of_bytes(self, base, first, last)
  local id, bytes, n, unk = self.id, self.bytes, 0, self.unk
  local was_unk = false
  for i = first, last - 1 do
    local token = bytes[base[i]]
    if token >= 0 then
      id[n], n, was_unk = token, n + 1, false
    elseif unk then
      if not (was_unk and self.fuses_unk) then id[n], n = unk, n + 1 end
      was_unk = true
    end
  end
  return n
end

local function code_at(base, i)
  local a = base[i]
  if a < 0x80 then return a, 1 end
  if a < 0xE0 then return (a - 0xC0) * 64 + base[i + 1] - 0x80, 2 end
  if a < 0xF0 then
    return (a - 0xE0) * 4096 + (base[i + 1] - 0x80) * 64 + base[i + 2] - 0x80, 3
  end
  return (a - 0xF0) * 262144 + (base[i + 1] - 0x80) * 4096 + (base[i + 2] - 0x80) * 64
    + base[i + 3] - 0x80, 4
end

--- Whether all bytes of a character have tokens of their own.
local function has_all(fallback, base, at, n)
  for i = at, at + n - 1 do if fallback[base[i]] < 0 then return false end end
  return true
end

--- The same of characters. As in `tokenizers`, an unknown symbol is written before the
-- next known one, so after bytes that stand between the two.
local function symbols_of_characters(self, base, first, last)
  local id, characters, fallback, n = self.id, self.characters, self.fallback, 0
  local waits, i = false, first
  while i < last do
    local code, length = code_at(base, i)
    local token = characters[code]
    if token then
      if waits then id[n], n, waits = self.unk, n + 1, false end
      id[n], n = token, n + 1
    elseif fallback and has_all(fallback, base, i, length) then
      for k = i, i + length - 1 do id[n], n = fallback[base[k]], n + 1 end
    elseif self.unk then
      if waits and not self.fuses_unk then id[n], n = self.unk, n + 1 end
      waits = true
    end
    i = i + length
  end
  if waits then id[n], n = self.unk, n + 1 end
  return n
end

-- ---- merges ---------------------------------------------------------------------------

--- Sets what the pair that begins at symbol i becomes.
local function rank_pair(self, i, right)
  local rank, token = self.merges:get(self.id[i], self.id[right])
  self.rank[i] = rank
  self.new[i] = token
end

--- Makes the first n symbols of self.id a list, and ranks their pairs.
local function begin(self, n)
  local prev, next, rank = self.prev, self.next, self.rank
  for i = 0, n - 1 do
    prev[i] = i - 1
    next[i] = i + 1
    rank[i] = NONE
  end
  for i = 0, n - 2 do rank_pair(self, i, i + 1) end
end

--- Merges the pair that begins at symbol i. The pairs that it leaves, at i and at the
-- symbol before, have new ranks; the symbol that is gone has none.
---@return integer before  -1 if there is none
local function merge(self, i, n)
  local prev, next = self.prev, self.next
  local gone, before = next[i], prev[i]
  local after = next[gone]
  self.id[i] = self.new[i]
  self.rank[i] = NONE
  self.rank[gone] = NONE
  next[i] = after
  if after < n then
    prev[after] = i
    rank_pair(self, i, after)
  end
  if before >= 0 then rank_pair(self, before, i) end
  return before
end

--- Moves the symbols that are left to the front of self.id: how many there are.
local function finish(self, n)
  local id, next = self.id, self.next
  local i, left = 0, 0
  while i < n do
    id[left] = id[i]
    left = left + 1
    i = next[i]
  end
  return left
end

--- Merges n symbols of self.id in place, by searching all pairs: how many are left.
local function merge_scanning(self, n)
  local rank = self.rank
  begin(self, n)
  while true do
    local best = NONE * SCANNED -- rank and symbol in one number
    for i = 0, n - 2 do
      local key = rank[i] * SCANNED + i
      if key < best then best = key end
    end
    if best >= NONE * SCANNED then return finish(self, n) end
    merge(self, best % SCANNED, n)
  end
end

-- A heap's entry is rank * 2^28 + position, so that the smallest is the pair to merge.
local POSITIONS = 2 ^ 28

-- Each loop has one variable that changes: LuaJIT has few registers for more.
local function heap_push(heap, count, key)
  local i = count
  while i > 0 do
    local parent = heap[rshift(i - 1, 1)]
    if parent <= key then break end
    heap[i] = parent
    i = rshift(i - 1, 1)
  end
  heap[i] = key
end

--- Removes the smallest of `count` entries.
local function heap_pop(heap, count)
  local last, child = heap[count - 1], 1
  while child < count - 1 do
    if child < count - 2 and heap[child + 1] < heap[child] then child = child + 1 end
    if heap[child] >= last then break end
    heap[rshift(child - 1, 1)] = heap[child]
    child = child * 2 + 1
  end
  heap[rshift(child - 1, 1)] = last
end

--- The same with a heap of the pairs.
local function merge_heaped(self, n)
  self.heap = self.heap or ffi.new("double[?]", self.room * 2 + 2)
  local heap, rank, count = self.heap, self.rank, 0
  begin(self, n)
  for i = 0, n - 2 do
    if rank[i] ~= NONE then
      heap_push(heap, count, rank[i] * POSITIONS + i)
      count = count + 1
    end
  end
  while count > 0 do
    local key = heap[0]
    heap_pop(heap, count)
    count = count - 1
    local r = math.floor(key / POSITIONS)
    local i = key - r * POSITIONS
    if rank[i] == r then -- otherwise the pair is no more
      local before = merge(self, i, n)
      if rank[i] ~= NONE then
        heap_push(heap, count, rank[i] * POSITIONS + i)
        count = count + 1
      end
      if before >= 0 and rank[before] ~= NONE then
        heap_push(heap, count, rank[before] * POSITIONS + before)
        count = count + 1
      end
    end
  end
  return finish(self, n)
end

--- Writes the tokens of one piece to self.id.
---@return integer n
local function tokens_of(self, base, first, last)
  self:make_room(last - first)
  if self.whole then
    local token = self.whole[ffi.string(base + first, last - first)]
    if token then
      self.id[0] = token
      return 1
    end
  end
  local n
  if self.bytes then n = symbols_of_bytes(self, base, first, last)
  else n = symbols_of_characters(self, base, first, last)
  end
  if n <= SCANNED then return merge_scanning(self, n) end
  return merge_heaped(self, n)
end

-- ---- pieces ---------------------------------------------------------------------------

--- Keeps the n tokens of self.id for a piece. One token is kept as its id, several as
-- -1 - their place in self.pool, where their number is in front.
local function keep(self, piece, n)
  if self.kept_count >= PIECES_KEPT then
    self.kept, self.kept_count = {}, 0
    self.pool:clear()
  end
  self.kept_count = self.kept_count + 1
  local id, pool = self.id, self.pool
  if n == 1 then
    self.kept[piece] = id[0]
    return
  end
  self.kept[piece] = -1 - pool.count
  pool:reserve(n + 1)
  pool:push(n)
  for i = 0, n - 1 do pool:push(id[i]) end
end

--- Appends the tokens of pieces of a text.
---@param base ffi.cdata*          const uint8_t *, the text
---@param pieces kvlab.text.Numbers  first and last byte of each, in turn
---@param out kvlab.text.Numbers
function BPE:encode(base, pieces, out)
  local ends = pieces.at
  for k = 0, pieces.count - 2, 2 do
    local first, last = ends[k], ends[k + 1]
    local length = last - first
    local piece = length <= BYTES_KEPT and ffi.string(base + first, length)
    local known = piece and self.kept[piece]
    if not known then
      local n, id = tokens_of(self, base, first, last), self.id
      out:reserve(n)
      for i = 0, n - 1 do out:push(id[i]) end
      if piece then keep(self, piece, n) end
    elseif known >= 0 then
      out:push(known)
    else
      local pool, at = self.pool.at, -1 - known
      for i = at + 1, at + pool[at] do out:push(pool[i]) end
    end
  end
  self:give_back()
end

return M
