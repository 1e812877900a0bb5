--- Finds blocks by content: it knows which full block of paged memory holds the tokens of
-- a block key, so that requests with a common prefix share blocks. A block stays here
-- after its request until its memory is needed. The least recently used block is
-- forgotten first, and among the blocks of one request the last, because nothing can be
-- found behind a gap. A cache with tables by layer or head has no blocks here.
-- Source  automatic prefix caching of vLLM (its block pool and free queue)
local ffi = require "ffi"
local library = require "kvlab.library"
local lru = require "kvlab.serve.lru"

local C, check = library.C, library.check
local M = {}

---@class kvlab.PrefixCache
---@field memory kvlab.Cache   or a result of kvlab.cache.pool
---@field evictions integer
local PrefixCache = {}
PrefixCache.__index = PrefixCache

---@param memory kvlab.Cache
---@return kvlab.PrefixCache
function M.new(memory)
  return setmetatable({
    memory = memory, evictions = 0, block_of = {}, key_of = {},
    idle = lru.new(), -- blocks that only this cache holds
    row = ffi.new("int32_t[?]", memory.blocks),
  }, PrefixCache)
end

--- How many pages are available: those that are free and those that nobody uses.
function PrefixCache:available() return self.memory:pages_free() + self.idle.count end

--- How far keys[first ... last] are cached without a gap: the index of the last cached
-- key, or first - 1.
---@param only? table<integer, string>  block -> key: no other blocks count
function PrefixCache:match(keys, first, last, only)
  local block_of = self.block_of
  for i = first, last do
    local block = block_of[keys[i]]
    if not block or only and only[block] ~= keys[i] then return i - 1 end
  end
  return last
end

--- Appends the blocks of keys[first ... last], which must be cached, to a sequence.
function PrefixCache:share(seq, keys, first, last)
  local row, n = self.row, last - first + 1
  for i = 0, n - 1 do row[i] = self.block_of[keys[first + i]] end
  check(C.kvl_sequence_share(seq.handle, row, n))
  for i = 0, n - 1 do
    if self.idle:has(row[i]) then self.idle:remove(row[i]) end
  end
end

--- Adds a complete full block of a live sequence. Of two blocks with the same key, the
-- first stays.
function PrefixCache:put(key, block)
  if self.block_of[key] then return end
  check(C.kvl_pool_hold(self.memory.pool, block))
  self.block_of[key], self.key_of[block] = block, key
end

--- Shortens a sequence to `length` tokens. Blocks that nobody else holds stay for others.
function PrefixCache:truncate(seq, length)
  local row, pool = self.row, self.memory.pool
  local n = check(C.kvl_sequence_table(seq.handle, 0, row, seq:blocks()))
  seq:truncate(length)
  for i = n - 1, seq:blocks(), -1 do
    local block = row[i]
    if self.key_of[block] and C.kvl_pool_block_refs(pool, block) == 1 then
      self.idle:add(block)
    end
  end
end

--- Ends a sequence.
function PrefixCache:close(seq)
  if self.memory.tables == "one" then self:truncate(seq, 0) end
  seq:close()
end

--- Makes at least n pages free by forgetting the least recently used ones. If fewer than
-- n are available, it forgets nothing and returns false.
function PrefixCache:reclaim(n)
  if self:available() < n then return false end
  while self.memory:pages_free() < n do
    local block = self.idle.oldest
    self.idle:remove(block)
    self.block_of[self.key_of[block]], self.key_of[block] = nil, nil
    check(C.kvl_pool_release(self.memory.pool, block))
    self.evictions = self.evictions + 1
  end
  return true
end

--- Forgets everything, and gives back the blocks that nobody else uses.
function PrefixCache:clear()
  for block in pairs(self.key_of) do
    check(C.kvl_pool_release(self.memory.pool, block))
  end
  self.block_of, self.key_of, self.idle = {}, {}, lru.new()
end

return M
