--- The journal of a cache: what has to be taken back if a step fails. A step happens or
-- it does not: `cache:transaction(fn, ...)` runs fn, and if fn raises, everything that
-- the steps in it changed is as it was before. That is the length of the sequences,
-- blocks that stopped being shared, what policies keep for a sequence, and what a memory
-- tier holds on the device.
--
-- Whoever is about to change such a thing inside a transaction (`is_open`) notes an
-- entry: entry:undo() takes the change back, entry:forget() is called when it stays.
-- Entries are undone in the reverse order. A transaction inside another one is undone by
-- itself when it raises, and is undone with the outer one. An undo is never interrupted.
local ffi = require "ffi"
local library = require "kvlab.library"
local protected = require "kvlab.protected"

local C, check = library.C, library.check
local M = {}

---@class kvlab.Journal
---@field is_open boolean  a transaction is under way: changes must be noted
---@field count integer    entries
---@field recording table[]|nil  entries of the work that is being recorded in a graph
local Journal = {}
Journal.__index = Journal

---@param cache kvlab.Cache
---@return kvlab.Journal
function M.new(cache)
  return setmetatable({ cache = cache, is_open = false, count = 0, entries = {},
    appends = {}, appends_used = 0, states = {}, states_used = 0 }, Journal)
end

--- Notes an entry. It needs the methods undo and forget.
function Journal:note(entry)
  local at = self.count + 1
  self.entries[at] = entry
  self.count = at
end

--- Takes back the entries after the first `mark`, the newest first. One that fails does
-- not stop the others. Returns nil, or the first error.
function Journal:undo(mark)
  local problem
  while self.count > mark do
    local entry = self.entries[self.count]
    self.entries[self.count], self.count = nil, self.count - 1
    local ok, why = pcall(entry.undo, entry)
    if not ok then problem = problem or why end
  end
  return problem
end

local function finish(self, mark, was_open, ok, ...)
  local problem
  if ok then
    for i = self.count, was_open and self.count + 1 or 1, -1 do
      self.entries[i]:forget()
      self.entries[i] = nil
    end
    if not was_open then self.count = 0 end
  else
    problem = self:undo(mark)
  end
  self.is_open = was_open
  C.kvl_interrupt_hold(-1)
  if ok then return ... end
  local why = ...
  if problem then
    why = ("%s\n  and it could not be taken back: %s"):format(tostring(why),
      tostring(problem))
  end
  error(why, 0)
end

--- Runs fn(...). If it raises, takes back what it noted and raises the same error. Once
-- fn has returned, nothing interrupts the end of the transaction.
function Journal:transaction(fn, ...)
  local mark, was_open = self.count, self.is_open
  C.kvl_interrupt_hold(1)
  self.is_open = true
  return finish(self, mark, was_open, protected.pcall(fn, ...))
end

-- ---- appends --------------------------------------------------------------------------

local Append = {}
Append.__index = Append

local function new_append(journal)
  return setmetatable({ journal = journal, seqs = {}, count = 0, room = 0, pairs = 0 },
    Append)
end

local function make_room(self, count)
  self.room = count
  self.lengths = ffi.new("int32_t[?]", count)
  self.copies = ffi.new("int32_t[?]", 2 * count)
  self.handles = ffi.new("kvl_sequence *[?]", count)
end

--- Notes that `seqs` were just lengthened by `counts` tokens each.
---@param seqs kvlab.Sequence[]
---@param counts integer[]
---@param copies ffi.cdata*  i32 [2 * pairs], as kvl_sequences_append wrote them
---@param pairs integer
function Journal:appended(seqs, counts, copies, pairs)
  local at = self.appends_used + 1
  local entry = self.appends[at] or new_append(self)
  if entry.room < #seqs then make_room(entry, #seqs) end
  for i = 1, #seqs do
    entry.seqs[i] = seqs[i]
    entry.lengths[i - 1] = C.kvl_sequence_length(seqs[i].handle) - counts[i]
  end
  entry.count, entry.pairs = #seqs, pairs
  for i = 0, pairs - 1 do
    entry.copies[2 * i], entry.copies[2 * i + 1] = copies[2 * i], copies[2 * i + 1]
    check(C.kvl_pool_hold(self.cache.pool, copies[2 * i])) -- it may have to come back
  end
  self.appends[at], self.appends_used = entry, at
  self:note(entry)
end

function Append:forget()
  for i = 0, self.pairs - 1 do
    C.kvl_pool_release(self.journal.cache.pool, self.copies[2 * i])
  end
  for i = 1, self.count do self.seqs[i] = nil end
  self.journal.appends_used = self.journal.appends_used - 1
end

--- Sequences that were closed since the append stay closed.
function Append:undo()
  local n = 0
  for i = 1, self.count do
    local handle = self.seqs[i].handle
    if handle then
      self.handles[n], self.lengths[n] = handle, self.lengths[i - 1]
      n = n + 1
    end
  end
  local status = C.kvl_sequences_rewind(self.handles, self.lengths, n, self.copies,
    self.pairs)
  self:forget()
  check(status)
end

-- ---- states ---------------------------------------------------------------------------

local State = {}
State.__index = State

--- A copy of a value: of tables without a metatable, and of the tables in them; other
-- values are the same.
local function copy_of(value)
  if type(value) ~= "table" or getmetatable(value) then return value end
  local copy = {}
  for key, part in pairs(value) do copy[key] = copy_of(part) end
  return copy
end

--- Notes what `keeper` keeps for a sequence now.
function Journal:keeps(seq, keeper)
  local at = self.states_used + 1
  local entry = self.states[at] or setmetatable({ journal = self }, State)
  entry.seq, entry.keeper = seq, keeper
  entry.value = copy_of(seq.state[keeper])
  C.kvl_interrupt_hold(1)
  self.states[at], self.states_used = entry, at
  self:note(entry)
  C.kvl_interrupt_hold(-1)
end

function State:forget()
  self.seq, self.keeper, self.value = nil, nil, nil
  self.journal.states_used = self.journal.states_used - 1
end

function State:undo()
  self.seq.state[self.keeper] = self.value
  self:forget()
end

return M
