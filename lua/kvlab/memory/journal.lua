--- The journal of a cache. What a step changes is provisional until the step is over:
-- the length of the sequences, blocks that stopped being shared, what policies keep for a
-- sequence, and what a memory tier holds on the device. Code that is about to change such
-- a thing while the journal is open (`is_open`) notes an entry. An entry has these
-- methods:
--
--   undo(self)     takes the change back
--   forget(self)   nobody will ask for the entry again: frees what it held. It is
--                  the last call, after undo, too take_back(self, first, own, kept) only
--                  of what changes token by token: the step had the rows first ... first
--                  + own - 1 for a sequence (memory/rows.lua), and now only the first
--                  `kept` of them have been
--
-- A step happens or it does not: `cache:transaction(fn, ...)` runs fn, and if fn raises,
-- the entries are undone in the reverse order. If an inner transaction raises, it alone
-- is undone; if the outer one raises, the inner one is undone with it. An undo is never
-- interrupted.
--
-- A step of several tokens for a sequence stays provisional after its transaction, until
-- its attention begins another step, since tokens of a draft may turn out to be wrong:
-- `take_back` takes back the newest tokens of a sequence, and the others stay. The steps
-- by which a policy makes a draft stay provisional until the draft is verified.
local ffi = require "ffi"
local library = require "kvlab.library"
local protected = require "kvlab.protected"

local C, check = library.C, library.check
local M = {}

---@class kvlab.Journal
---@field is_open boolean  something is provisional: changes must be noted
---@field depth integer    transactions that are under way, one inside the other
---@field count integer    entries of the transactions that are under way
---@field step table[]|nil  the entries with take_back of the step that began last
---@field is_draft boolean|nil  that step makes a token of a draft
---@field draft table|nil     the steps of a draft that no step has verified yet
---@field recording table[]|nil  entries of the work that is being recorded in a graph
local Journal = {}
Journal.__index = Journal

---@param cache kvlab.Cache
---@return kvlab.Journal
function M.new(cache)
  return setmetatable({ cache = cache, is_open = false, depth = 0, count = 0,
    entries = {}, appends = {}, appends_used = 0, states = {}, states_used = 0,
    drafted_states = {} }, Journal)
end

--- Notes an entry.
function Journal:note(entry)
  local step = entry.take_back and self.step
  if step then
    entry.step = step -- before it is in the list: an interrupt may come between the two
    step[#step + 1] = entry
  end
  if self.depth == 0 then return end
  local at = self.count + 1
  self.entries[at] = entry
  self.count = at
  entry.is_noted = true
end

--- A transaction or a step is done with an entry.
local function let_go(entry)
  if not entry.step and not entry.is_noted then entry:forget() end
end

--- Ends what a step kept for take_back.
---@param step table[]
local function settle(step)
  for i = #step, 1, -1 do
    local entry = step[i]
    step[i], entry.step = nil, nil
    let_go(entry)
  end
end

Journal.settle = function(_, step) settle(step) end

--- Begins a step of an attention, and settles its last step.
---@param step table[]  the attention's own list; step.is_known: all that the step changes
--                      is in it
---@param is_rows boolean  whether tokens of the step may be taken back
---@param is_draft? boolean  the step makes a token of a draft
function Journal:begin(step, is_rows, is_draft)
  settle(step)
  step.is_known, self.step, self.is_draft = false, is_rows and step or nil, is_draft
  self.is_open = self.depth > 0 or is_rows
end

--- Ends a draft that no step has verified: what it changed is taken back.
function Journal:end_draft()
  if self.draft then self.draft:finish() end
end

--- Whether a graph may be replayed. A replay writes to the graph's entries, so the
-- journal must no longer hold those of the last replay.
---@param entries table[]
function Journal.may_replay(_, entries)
  for i = 1, #entries do
    if entries[i].step or entries[i].is_noted then return false end
  end
  return true
end

--- Notes the entries of a step that a graph has just replayed. Interrupts must wait. The
-- steps of a draft replay one graph again and again, so copies of its entries are noted.
---@param entries table[]  with the methods replayed, which fills them, and copy
function Journal:replayed(entries)
  if self.step then self.step.is_known = true end
  self.cache.tier:replayed()
  for i = 1, #entries do
    entries[i]:replayed()
    self:note(self.is_draft and entries[i]:copy() or entries[i])
  end
end

--- Takes back the newest tokens of sequences in a step, and settles the step. Sequence i
-- had own[i] rows, the first of them first[i], and keeps own[i] - taken[i].
function Journal:take_back(step, first, own, taken)
  for i = #step, 1, -1 do
    for seq = 1, #own do
      if taken[seq] > 0 then
        step[i]:take_back(first[seq], own[seq], own[seq] - taken[seq])
      end
    end
  end
  settle(step)
end

--- Undoes the entries after the first `mark`, the newest first. If one fails, the others
-- are still undone. Returns nil, or the first error.
function Journal:undo(mark)
  local problem
  while self.count > mark do
    local entry = self.entries[self.count]
    self.entries[self.count], self.count = nil, self.count - 1
    entry.is_noted = nil
    if entry.step then entry.step[#entry.step], entry.step = nil, nil end
    local ok, why = pcall(entry.undo, entry)
    entry:forget()
    if not ok then problem = problem or why end
  end
  return problem
end

local function finish(self, mark, ok, ...)
  local problem
  self.depth = self.depth - 1
  if not ok then
    problem = self:undo(mark)
  elseif self.depth == 0 then
    for i = self.count, 1, -1 do
      local entry = self.entries[i]
      self.entries[i], entry.is_noted = nil, nil
      let_go(entry)
    end
    self.count = 0
  end
  self.is_open = self.depth > 0 or self.step ~= nil
  C.kvl_interrupt_hold(-1)
  if ok then return ... end
  local why = ...
  if problem then
    why = ("%s\n  and it could not be taken back: %s"):format(tostring(why),
      tostring(problem))
  end
  error(why, 0)
end

--- Runs fn(...). If fn raises, undoes the entries that it noted and raises the same
-- error. Once fn has returned, nothing interrupts the end of the transaction.
function Journal:transaction(fn, ...)
  local mark = self.count
  C.kvl_interrupt_hold(1)
  self.depth, self.is_open = self.depth + 1, true
  return finish(self, mark, protected.pcall(fn, ...))
end

-- ---- appends --------------------------------------------------------------------------

local Append = {}
Append.__index = Append

local function new_append(journal)
  return setmetatable({ journal = journal, seqs = {}, count = 0, room = 0,
    room_pairs = 0, pairs = 0 }, Append)
end

local function make_room(self, count, pairs)
  self.lengths = ffi.new("int32_t[?]", count)
  self.copies = ffi.new("int32_t[?]", 2 * pairs)
  self.handles = ffi.new("kvl_sequence *[?]", count)
  self.room, self.room_pairs = count, pairs
end

--- Notes that `seqs` were just lengthened by `counts` tokens each.
---@param seqs kvlab.Sequence[]
---@param counts integer[]
---@param copies ffi.cdata*  i32 [2 * pairs], as kvl_sequences_append wrote them
---@param pairs integer
function Journal:appended(seqs, counts, copies, pairs)
  local at = self.appends_used + 1
  local entry = self.appends[at] or new_append(self)
  if entry.room < #seqs or entry.room_pairs < pairs then
    make_room(entry, math.max(entry.room, #seqs),
      math.max(entry.room_pairs, #seqs, pairs))
  end
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
    if handle then -- a draft may have been cut off since
      local length = math.min(self.lengths[i - 1], C.kvl_sequence_length(handle))
      self.handles[n], self.lengths[n] = handle, length
      n = n + 1
    end
  end
  check(C.kvl_sequences_rewind(self.handles, self.lengths, n, self.copies, self.pairs))
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

--- Notes the present state that `keeper` keeps for a sequence.
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
end

-- The same for row `row` of a step that makes a token of a draft.
local DraftedState = { undo = State.undo }
DraftedState.__index = DraftedState

--- Notes the state that `keeper` keeps for the sequence of a row, in a draft's step.
function Journal:keeps_drafted(seq, keeper, row)
  local free = self.drafted_states
  local entry = table.remove(free) or setmetatable({ free = free }, DraftedState)
  entry.seq, entry.keeper, entry.row = seq, keeper, row
  entry.value = copy_of(seq.state[keeper])
  C.kvl_interrupt_hold(1)
  self:note(entry)
  C.kvl_interrupt_hold(-1)
end

function DraftedState:forget()
  self.seq, self.keeper, self.value = nil, nil, nil
  self.free[#self.free + 1] = self
end

function DraftedState:take_back(first, _, kept)
  if first == self.row and kept == 0 then self:undo() end
end

return M
