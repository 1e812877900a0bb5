--- Byte-pair encoding: cuts a piece of text into symbols (bytes, or characters), and
-- merges the pair of the lowest rank, the leftmost of equals, until no pair is left that
-- can be merged.
--
-- Short pieces search all their pairs at every merge. Longer ones keep their symbols in a
-- linked list and their pairs in a heap, so a piece of n symbols takes n log n steps. The
-- tokens of short pieces are kept in a table of bounded size, because words come again.
-- A long piece is merged in slices (kvlab.slices); each slice continues where the last
-- one stopped, so the tokens do not depend on the slices.
local bit = require "bit"
local ffi = require "ffi"
local pairs_of = require "kvlab.text.pairs"
local numbers = require "kvlab.text.numbers"
local rest = require("kvlab.slices").rest

local rshift = bit.rshift
local NONE = pairs_of.NONE

local M = {}

local BYTES_KEPT = 48      -- of the longest piece whose tokens are kept
local PIECES_KEPT = 2 ^ 16 -- at most; then all are forgotten
local SCANNED = 24         -- symbols of the longest piece without a heap
local PART = 2 ^ 12        -- symbols or merges between two rests
local PIECES_PART = 2 ^ 8  -- pieces between two rests

--- Raised when a text has more tokens than the caller allows.
M.TOO_MANY = {}

---@class kvlab.text.BPE
---@field merges kvlab.text.Pairs
---@field bytes ffi.cdata*|nil      int32_t[256]: the token of each byte, -1: none
---@field characters table<integer, integer>|nil  code point -> token; in place of bytes
---@field fallback ffi.cdata*|nil   int32_t[256]: tokens of bytes of other characters
---@field whole table<string, integer>|nil  pieces that are one token whatever merges say
---@field unk integer|nil           the token of other symbols; nil: they are left out
---@field fuses_unk boolean
---@field longest integer          bytes of the longest token, as it is written
---@field bytes_most number         of a piece that one token may stand for; math.huge if
--                                  there is no bound
local BPE = {}
BPE.__index = BPE

---@param o table  the fields above
---@return kvlab.text.BPE
function M.new(o)
  local self = setmetatable(o, BPE)
  self.kept, self.kept_count, self.pool = {}, 0, numbers.new()
  return self
end

-- ---- symbols --------------------------------------------------------------------------

--- Writes the symbols of the bytes base[first … last) to w.id.
---@return integer n
local function symbols_of_bytes(self, w, base, first, last)
  local id, bytes, n, unk = w.id, self.bytes, 0, self.unk
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

--- Writes the symbols of some characters, after n symbols. As in `tokenizers`, an unknown
-- symbol is written only before the next known one, so it comes after the bytes between
-- the two.
---@param waits boolean  an unknown symbol is still to be written
---@return integer i     the byte after the last one of this part
---@return integer n
---@return boolean waits
local function add_characters(self, w, base, i, last, n, waits)
  local id, characters, fallback = w.id, self.characters, self.fallback
  local part = i + PART
  while i < last and i < part do
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
  return i, n, waits
end

local function symbols_of_characters(self, w, base, first, last)
  local i, n, waits = first, 0, false
  while i < last do
    i, n, waits = add_characters(self, w, base, i, last, n, waits)
    if i < last then rest() end
  end
  if waits then w.id[n], n = self.unk, n + 1 end
  return n
end

-- ---- merges ---------------------------------------------------------------------------

--- Sets the rank and the result of the pair that begins at symbol i.
local function rank_pair(w, i, right)
  local rank, token = w.merges:get(w.id[i], w.id[right])
  w.rank[i] = rank
  w.new[i] = token
end

--- Ranks the pairs that begin at the symbols from … to - 1.
local function rank_pairs(w, from, to)
  for i = from, to - 1 do rank_pair(w, i, i + 1) end
end

--- Makes the first n symbols of w.id a list.
local function link(w, n)
  local prev, next, rank = w.prev, w.next, w.rank
  for i = 0, n - 1 do
    prev[i] = i - 1
    next[i] = i + 1
    rank[i] = NONE
  end
end

--- Merges the pair that begins at symbol i. The pairs at i and at the symbol before it
-- get new ranks; the symbol that disappears has none.
---@return integer before  -1 if there is none
local function merge(w, i, n)
  local prev, next = w.prev, w.next
  local gone, before = next[i], prev[i]
  local after = next[gone]
  w.id[i] = w.new[i]
  w.rank[i] = NONE
  w.rank[gone] = NONE
  next[i] = after
  if after < n then
    prev[after] = i
    rank_pair(w, i, after)
  end
  if before >= 0 then rank_pair(w, before, i) end
  return before
end

--- Moves the remaining symbols to the front of w.id. Returns how many there are.
local function finish(w, n)
  local id, next = w.id, w.next
  local i, left = 0, 0
  while i < n do
    id[left] = id[i]
    left = left + 1
    i = next[i]
  end
  return left
end

--- Merges n symbols of w.id in place, by searching all pairs. Returns how many are left.
local function merge_scanning(w, n)
  local rank = w.rank
  link(w, n)
  rank_pairs(w, 0, n - 1)
  while true do
    local best = NONE * SCANNED -- rank and symbol in one number
    for i = 0, n - 2 do
      local key = rank[i] * SCANNED + i
      if key < best then best = key end
    end
    if best >= NONE * SCANNED then return finish(w, n) end
    merge(w, best % SCANNED, n)
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

--- Adds the pairs that begin at the symbols from … to - 1 to a heap.
local function push_pairs(w, heap, count, from, to)
  local rank = w.rank
  for i = from, to - 1 do
    if rank[i] ~= NONE then
      heap_push(heap, count, rank[i] * POSITIONS + i)
      count = count + 1
    end
  end
  return count
end

--- Takes up to PART pairs from the heap and merges them. Returns how many pairs the heap
-- has then.
local function merge_part(w, heap, count, n)
  local rank, left = w.rank, PART
  while count > 0 and left > 0 do
    local key = heap[0]
    heap_pop(heap, count)
    count, left = count - 1, left - 1
    local r = math.floor(key / POSITIONS)
    local i = key - r * POSITIONS
    if rank[i] == r then -- otherwise the pair no longer exists
      local before = merge(w, i, n)
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
  return count
end

--- The same with a heap of the pairs.
local function merge_heaped(w, n)
  local heap, count = w:make_heap(), 0
  link(w, n)
  for from = 0, n - 2, PART do
    local to = math.min(from + PART, n - 1)
    rank_pairs(w, from, to)
    count = push_pairs(w, heap, count, from, to)
    rest()
  end
  while count > 0 do
    count = merge_part(w, heap, count, n)
    rest()
  end
  return finish(w, n)
end

--- Writes the tokens of one piece to w.id.
---@return integer n
local function tokens_of(self, w, base, first, last)
  w:make_room(last - first)
  if self.whole and last - first <= self.longest then
    local token = self.whole[ffi.string(base + first, last - first)]
    if token then
      w.id[0] = token
      return 1
    end
  end
  local n
  if self.bytes then n = symbols_of_bytes(self, w, base, first, last)
  else n = symbols_of_characters(self, w, base, first, last)
  end
  if n <= SCANNED then return merge_scanning(w, n) end
  return merge_heaped(w, n)
end

-- ---- pieces ---------------------------------------------------------------------------

--- Keeps the n tokens of `id` for a piece. A single token is stored as its id. Several
-- tokens are stored as -1 - their index in self.pool, where their number comes first.
local function keep(self, id, piece, n)
  if self.kept_count >= PIECES_KEPT then
    self.kept, self.kept_count = {}, 0
    self.pool:clear()
  end
  self.kept_count = self.kept_count + 1
  local pool = self.pool
  if n == 1 then
    self.kept[piece] = id[0]
    return
  end
  self.kept[piece] = -1 - pool.count
  pool:reserve(n + 1)
  pool:push(n)
  for i = 0, n - 1 do pool:push(id[i]) end
end

--- Appends the tokens of some pieces of a text.
local function encode_some(self, w, base, pieces, from, to)
  local ends, out = pieces.at, w.out
  for k = from, to - 2, 2 do
    local first, last = ends[k], ends[k + 1]
    local length = last - first
    local piece = length <= BYTES_KEPT and ffi.string(base + first, length)
    local known = piece and self.kept[piece]
    if not known then
      if out.count + length / self.bytes_most > w.most then error(M.TOO_MANY, 0) end
      local n, id = tokens_of(self, w, base, first, last), w.id
      out:append(id, n)
      if piece then keep(self, id, piece, n) end
    elseif known >= 0 then
      out:push(known)
    else
      local pool, at = self.pool.at, -1 - known
      for i = at + 1, at + pool[at] do out:push(pool[i]) end
    end
  end
end

--- Appends the tokens of pieces of a text to w.out. Raises M.TOO_MANY when there are more
-- than w.most tokens, perhaps before all of them are made.
---@param w kvlab.text.Space
---@param base ffi.cdata*          const uint8_t *, the text
---@param pieces kvlab.text.Numbers  first and last byte of each, in turn
function BPE:encode(w, base, pieces)
  w.merges = self.merges -- loops over merges have registers for one table
  for from = 0, pieces.count - 1, PIECES_PART do
    encode_some(self, w, base, pieces, from, math.min(from + PIECES_PART, pieces.count))
    if w.out.count > w.most then error(M.TOO_MANY, 0) end
    rest()
  end
end

return M
