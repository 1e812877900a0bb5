--- A sequence holds the tokens of a request as blocks of a cache. It knows block numbers,
-- not memory. Blocks are counted, shared by forks, and copied when a fork writes to a
-- shared one.
local arguments = require "kvlab.arguments"
local ffi = require "ffi"
local library = require "kvlab.library"
local options = require "kvlab.options"
local protected = require "kvlab.protected"
local tensor = require "kvlab.tensor.tensor"

local C, check, argument = library.C, library.check, options.argument
local M = {}

---@class kvlab.Sequence
---@field cache kvlab.Cache
---@field state table  what policies and tallies keep for this sequence, by themselves
---@field evictor table|nil  evicts tokens of it for a policy
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
    C.kvl_sequence_open, cache.pool, cache.cut_layers, cache.cut_heads, out_sequence))
end

--- Whether a value is a sequence, closed or not.
function M.is_sequence(value)
  return type(value) == "table" and getmetatable(value) == Sequence
end

--- The C handle of a sequence; raises when the sequence is closed.
function M.handle(seq) return seq.handle or options.fail "the sequence is closed" end

local handle_of = M.handle

--- The number of tokens of the text so far.
function Sequence:length() return C.kvl_sequence_length(handle_of(self)) end
--- The number of tokens with those of the step: of a row of a step of several new tokens
-- (rows.lua), up to its own. In step_begin, `length` is that of the first row.
function Sequence:step_length() return self:length() + (rawget(self, "past") or 0) end
--- The number of blocks held by the longest table.
function Sequence:blocks() return C.kvl_sequence_blocks(handle_of(self)) end

--- The number of a table: 0 unless the cache has tables by layer, or by layer and head.
local function cut_of(self, layer, head)
  local cache = self.cache
  local function within(name, value, count)
    if type(value) == "number" and value % 1 == 0 and value >= 0 and value < count then
      return value
    end
    options.fail(("%s is %s, expected 0 ... %d: the cache has tables = %q"):format(name,
      options.shown(value), count - 1, cache.tables))
  end
  -- an argument by which the tables are not cut may be left out
  local cut = (layer ~= nil or cache.cut_layers > 1)
    and within("layer", layer, cache.layers) or 0
  local of_head = (head ~= nil or cache.cut_heads > 1)
    and within("head", head, cache.kv_heads) or 0
  return (cache.cut_layers > 1 and cut or 0) * cache.cut_heads
    + (cache.cut_heads > 1 and of_head or 0)
end

--- The physical blocks in logical order, of a layer and KV head where the cache has
-- tables by these.
---@param layer? integer
---@param head? integer
function Sequence:table(layer, head)
  local n, list = self:blocks(), {}
  local row = ffi.new("int32_t[?]", n + 1)
  n = check(C.kvl_sequence_table(self.handle, cut_of(self, layer, head), row, n))
  for i = 1, n do list[i] = row[i - 1] end
  return list
end

--- The number of tokens that are held, of a layer and KV head where the cache has tables
-- by these: all of the text, unless some were evicted.
---@param layer? integer
---@param head? integer
function Sequence:held(layer, head)
  return check(C.kvl_sequence_held(handle_of(self), cut_of(self, layer, head)))
end

--- The number of pages that are held, of all tables together.
function Sequence:pages()
  local cache, handle, pages = self.cache, handle_of(self), 0
  local cuts = cache.cut_layers * cache.cut_heads
  if cuts == 1 then return C.kvl_sequence_blocks(handle) end
  for cut = 0, cuts - 1 do
    pages = pages + math.ceil(C.kvl_sequence_held(handle, cut) / cache.block_size)
  end
  return pages
end

local function inherit_state(seq, fork)
  for keeper in pairs(seq.state) do
    if type(keeper) == "table" and keeper.inherit then keeper:inherit(seq, fork) end
  end
end

local function head_length(view) return view.base:length() end
local function head_blocks(view) return view.base:blocks() end
local function head_table(view, layer) return view.base:table(layer, view.head) end

--- The KV heads of a sequence, each as a sequence of its own: a view with a state of its
-- own, which policies and tallies of a cache with tables by head see.
---@return kvlab.Sequence[]
function Sequence:heads()
  local heads = self.head_views
  if not heads then
    heads = self.cache.cut_heads == 1 and { self } or {}
    for i = #heads + 1, self.cache.cut_heads do
      heads[i] = setmetatable({ base = self, cache = self.cache, head = i - 1,
        state = setmetatable({}, WEAK_KEYS), length = head_length, blocks = head_blocks,
        table = head_table }, Sequence)
    end
    self.head_views = heads
  end
  return heads
end

local function inherit(seq, fork)
  inherit_state(seq, fork)
  for i = 1, seq.cache.cut_heads > 1 and seq.head_views and #seq.head_views or 0 do
    inherit_state(seq.head_views[i], fork:heads()[i])
  end
end

local COPIES = 4096 -- of blocks at a time

--- Gives a fork blocks of its own: tokens will be evicted from them, and others written.
local function unshare(fork)
  local cache = fork.cache
  local copies = ffi.new("int32_t[?]", 2 * COPIES)
  repeat
    local n = check(C.kvl_sequence_unshare(fork.handle, copies, COPIES))
    local from, to = {}, {}
    for i = 1, n do from[i], to[i] = copies[2 * i - 2], copies[2 * i - 1] end
    if n > 0 then
      tensor.scope(function()
        cache:copy_blocks(tensor.from(cache.device, "i32", { n }, from),
          tensor.from(cache.device, "i32", { n }, to))
      end)
    end
  until n < COPIES
end

--- Makes a sequence of the same tokens that shares every block. A shared block that is
-- not full is copied when one of the two sequences grows. Where a policy evicts tokens,
-- the fork gets copies of all blocks at once. Objects that keep state for the sequence
-- are asked to copy that state; if one of them raises, there is no fork. A fork ends a
-- draft that no step has verified.
function Sequence:fork()
  local journal = self.cache.journal -- a pool has none, as it has no memory
  if journal then journal:end_draft() end
  local fork = wrap(self.cache, protected.open(C.kvl_sequence_close, out_sequence,
    C.kvl_sequence_fork, handle_of(self), out_sequence))
  fork.evictor = self.evictor
  local ok, why = pcall(inherit, self, fork)
  if ok and fork.evictor then ok, why = pcall(unshare, fork) end
  if ok and fork.evictor then ok, why = pcall(fork.evictor.forked, fork.evictor, fork) end
  if ok then return fork end
  fork:close()
  error(why, 0)
end

local out_places, out_places_size, out_copies, out_copies_size = nil, 0, nil, 0
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
  local cuts = self.cache.cut_layers * self.cache.cut_heads
  if tokens * cuts > out_places_size then
    out_places, out_places_size = ffi.new("int64_t[?]", tokens * cuts), tokens * cuts
  end
  if cuts > out_copies_size then
    out_copies, out_copies_size = ffi.new("int32_t[?]", 2 * cuts), cuts
  end
  one_handle[0], one_count[0] = handle_of(self), tokens
  check(C.kvl_sequences_append(one_handle, one_count, 1, 0, out_places, out_copies))
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
local function view_table(view, layer)
  local list = view.base:table(layer)
  for i = #list, view_blocks(view) + 1, -1 do list[i] = nil end
  return list
end

--- Makes `view` (a table) a view of a sequence as if it had `length` tokens: it has the
-- sequence's state, and can be read, but not changed. view.base is the sequence.
function M.view(view, seq, length)
  view.base, view.cache, view.state, view.view_of_length = seq, seq.cache, seq.state,
    length
  view.head = rawget(seq, "head")
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
