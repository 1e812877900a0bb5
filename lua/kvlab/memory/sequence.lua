--- A sequence holds the tokens of a request as blocks of a cache. It knows block numbers,
-- not memory. Blocks are counted, shared by forks, and copied when a fork writes to a
-- shared one.
local arguments = require "kvlab.arguments"
local ffi = require "ffi"
local library = require "kvlab.library"
local options = require "kvlab.options"
local protected = require "kvlab.protected"

local C, check, argument = library.C, library.check, options.argument
local M = {}

---@class kvlab.Sequence
---@field cache kvlab.Cache
---@field state table  what policies and tallies keep for this sequence, by themselves
local Sequence = {}
Sequence.__index = Sequence

local WEAK_KEYS = { __mode = "k" }
local out_sequence = ffi.new "kvl_sequence *[1]"

local function wrap(cache, handle)
  return setmetatable({ cache = cache, handle = handle,
                        state = setmetatable({}, WEAK_KEYS) }, Sequence)
end

--- Makes an empty sequence over the pool of a cache.
---@param cache kvlab.Cache
---@return kvlab.Sequence
function M.new(cache)
  return wrap(cache, protected.open(C.kvl_sequence_close, out_sequence,
    C.kvl_sequence_open, cache.pool, out_sequence))
end

--- Whether a value is a sequence, closed or not.
function M.is_sequence(value)
  return type(value) == "table" and getmetatable(value) == Sequence
end

--- The C handle of a sequence; raises when the sequence is closed.
function M.handle(seq) return seq.handle or options.fail "the sequence is closed" end

local handle_of = M.handle

--- The number of tokens so far.
function Sequence:length() return C.kvl_sequence_length(handle_of(self)) end
--- The number of blocks held.
function Sequence:blocks() return C.kvl_sequence_blocks(handle_of(self)) end

--- The physical blocks in logical order.
function Sequence:table()
  local n, list = self:blocks(), {}
  local row = ffi.new("int32_t[?]", n + 1)
  check(C.kvl_sequence_table(self.handle, row, n))
  for i = 1, n do list[i] = row[i - 1] end
  return list
end

local function inherit(seq, fork)
  for keeper in pairs(seq.state) do
    if type(keeper) == "table" and keeper.inherit then keeper:inherit(seq, fork) end
  end
end

--- Makes a sequence of the same tokens that shares every block. A shared block that is
-- not full is copied when one of the two sequences grows. Objects that keep state for
-- the sequence are asked to copy that state; if one of them raises, there is no fork. It
-- ends a draft that no step has verified.
function Sequence:fork()
  self.cache.journal:end_draft()
  local fork = wrap(self.cache, protected.open(C.kvl_sequence_close, out_sequence,
    C.kvl_sequence_fork, handle_of(self), out_sequence))
  local ok, why = pcall(inherit, self, fork)
  if ok then return fork end
  fork:close()
  error(why, 0)
end

local out_places, out_places_size, out_copy = nil, 0, ffi.new "int32_t[2]"
local one_handle, one_count = ffi.new "kvl_sequence *[1]", ffi.new "int32_t[1]"

--- Lengthens a sequence of whole blocks by `tokens` tokens, whose K and V something else
-- writes.
function Sequence:extend(tokens)
  argument("extend", "tokens", tokens, options.whole)
  local length = self:length()
  if length % self.cache.block_size ~= 0 then
    error(("extend: the sequence has %d tokens, expected a multiple of block_size = %d")
      :format(length, self.cache.block_size), 2)
  end
  if tokens > out_places_size then
    out_places, out_places_size = ffi.new("int64_t[?]", tokens), tokens
  end
  one_handle[0], one_count[0] = handle_of(self), tokens
  check(C.kvl_sequences_append(one_handle, one_count, 1, out_places, out_copy))
end

--- Drops the tokens past `length`.
function Sequence:truncate(length)
  argument("truncate", "length", length, options.whole)
  check(C.kvl_sequence_truncate(handle_of(self), length))
  self.cut_at = length -- so that the next append counts its open block as a turn
end

local function view_length(view) return view.view_of_length end
local function view_blocks(view)
  return math.ceil(view.view_of_length / view.cache.block_size)
end
local function view_table(view)
  local list = view.base:table()
  for i = #list, view_blocks(view) + 1, -1 do list[i] = nil end
  return list
end

--- Makes `view` (a table) a view of a sequence as if it had `length` tokens: it has the
-- sequence's state, and can be read, but not changed. view.base is the sequence.
function M.view(view, seq, length)
  view.base, view.cache, view.state, view.view_of_length = seq, seq.cache, seq.state,
    length
  if view.length ~= view_length then
    view.length, view.blocks, view.table = view_length, view_blocks, view_table
    setmetatable(view, Sequence)
  end
  return view
end

--- Drops the sequence's references to its blocks.
function Sequence:close()
  protected.close(self, "handle", C.kvl_sequence_close)
end

arguments.methods(Sequence, "a sequence", {})

return M
