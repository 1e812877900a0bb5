--- What requests get while they wait: blocks that are already on the device, and
-- prefetches of blocks that a store has. This is a part of the scheduler (`self` is one).
-- The scheduler calls it before it admits a request, and for requests that it will reach
-- soon.
local M = {}

--- Records in `map` that request r's keys first ... last are being computed or fetched,
-- and for which request; nil says that they no longer are. Keys that are recorded for
-- another request do not change.
function M.mark(map, r, first, last, value)
  for i = first, last do
    local key = r.block_hashes[i]
    if map[key] == nil or map[key] == r then map[key] = value end
  end
end

--- The priority of a request's prefetch. A priority function gets the request and
--   view.queue_position  requests before it in the queue
--   view.blocks          blocks to be brought
--   view.bytes           their bytes
--   view.reuse           how many requests so far had these blocks in their prompt, on
--                        average
--   view.now_us, view.step
local function priority_of(self, r, position, count)
  local view, first = self.view, self:blocks_for(r.seq:length()) - count
  view.queue_position, view.blocks = position, count
  view.bytes = count * self.executor.bytes_block
  local uses = 0
  for i = first + 1, first + count do
    uses = uses + (self.uses and self.uses[r.block_hashes[i]] or 0)
  end
  view.reuse = uses / count
  return self.priority(r, view)
end

--- Takes the blocks that a prefetch brought: the leading run of blocks has arrived, the
-- others have not.
local function land(self, r, result)
  local asked = r.task_count
  local arrived = math.min(result and result.blocks or 0, asked)
  local first = self:blocks_for(r.seq:length()) - asked + 1
  M.mark(self.loading, r, first, first + asked - 1, nil)
  r.prefetch_task = nil
  local ids = arrived > 0 and r:block_ids()
  for i = first, first + arrived - 1 do
    if not self.executor:arrived(r, i, ids[i]) then
      arrived = i - first
      break
    end
    self.prefix:put(r.block_hashes[i], ids[i])
  end
  r.blocks_loaded = r.blocks_loaded + arrived
  if arrived < asked then -- evicted or damaged since it was found: do not ask again
    r.store_end = first + arrived - 1
    self.stats.blocks_lost = self.stats.blocks_lost + asked - arrived
    self.prefix:truncate(r.seq, r.store_end * self.block_size)
  end
end

local function submit(self, r, first, count, position)
  r.task_count, r.task_priority = count, priority_of(self, r, position, count)
  r.prefetch_task = self.executor:submit(r, first, count, r.task_priority)
end

--- Asks the executor for a request's blocks first ... last, as far as there is room.
local function load(self, r, first, last, position)
  local kept = #self.running > 0 and self.watermark or 0
  local room = self.prefix:available() - self.need - self.promised - self.reserved - kept
  last = math.min(last, first + room - 1)
  if last < first then return "crowded" end
  local count = last - first + 1
  self.prefix:reclaim(self.need + count)
  r.seq:extend(count * self.block_size)
  local ok, why = pcall(submit, self, r, first, count, position)
  if not r.prefetch_task then
    r.seq:truncate((first - 1) * self.block_size)
    if not ok then error(why, 0) end
    return "full"
  end
  M.mark(self.loading, r, first, last, r)
  return "loading"
end

--- Gives a waiting request everything that it can get without computing. Returns what is
--   left:
--   ready    nothing; the rest has to be computed
--   loading  blocks are on their way from the store
--   held     another request computes or loads its next block
--   full     the prefetcher takes no more at present
--   crowded  the device has no room for what the store has
function M.cover(self, r, position)
  if r.is_fork then return "ready" end
  r.seq = r.seq or self.executor.memory:sequence()
  if r.prefetch_task then
    local result = self.executor:poll(r.prefetch_task)
    if not result then return "loading" end
    land(self, r, result)
  end
  local keys, last = r.block_hashes, self:shareable(r)
  local have = self:blocks_for(r.seq:length())
  local there = self.prefix:match(keys, have + 1, last,
    r.shares_seen and self.executor:shared_only(r) or nil)
  if there > have then
    self.prefix:share(r.seq, keys, have + 1, there)
    r.blocks_shared, have = r.blocks_shared + there - have, there
  end
  if have >= last then return "ready" end
  local key = keys[have + 1]
  if self.loading[key] or self.computing[key] then return "held" end
  local found = self.executor:find(r, have + 1, math.min(last, r.store_end))
  if found == 0 then return "ready" end
  return load(self, r, have + 1, have + found, position)
end

--- Whether a waiting request may give its blocks back. A fork under a policy that evicts
-- may not, because its tokens would not be the same if they were computed again.
function M.may_give_back(r) return not (r.is_fork and r.evicts) end

--- A waiting request gives its blocks back and starts again.
function M.give_back(self, r)
  if r.prefetch_task then
    self.executor:cancel(r.prefetch_task)
    local have = self:blocks_for(r.seq:length())
    M.mark(self.loading, r, have - r.task_count + 1, have, nil)
    r.prefetch_task = nil
  end
  if r.seq then self.prefix:close(r.seq) end
  r.seq, r.prefetch_ready, r.is_fork, r.continues = nil, false, false, false
  r.shares_last = false
  r.blocks_shared, r.blocks_loaded, r.num_computed_tokens = 0, 0, 0
end

--- Makes the last waiting request after `keep` that has blocks give them back.
function M.give_back_last(self, keep)
  for i = #self.waiting, keep + 1, -1 do
    local r = self.waiting[i]
    if r.seq and r.seq:length() > 0 and M.may_give_back(r) then
      M.give_back(self, r)
      self.stats.given_back = self.stats.given_back + 1
      return true
    end
  end
  return false
end

-- ---- prefetch ahead -------------------------------------------------------------------

local function reprioritise(self, r, position)
  local priority = priority_of(self, r, position, r.task_count)
  if priority == r.task_priority then return end
  r.task_priority = priority
  self.executor:reprioritise(r, priority)
end

--- Prefetches for the waiting requests that the token budgets of the next prefetch_ahead
-- steps will reach, as long as memory has room for all requests before them.
function M.look_ahead(self)
  local ahead = self.ahead_tokens
  local reserved = self.watermark + self.need + self.promised + self.reserved
  for _, r in ipairs(self.running) do
    if not r:is_decoding() then ahead = ahead - (r.num_tokens - r.num_computed_tokens) end
  end
  self.window = 0
  for i, r in ipairs(self.waiting) do
    if ahead <= 0 then break end
    local need = self:pages_for(r.num_tokens) - (r.seq and r.seq:pages() or 0)
    if reserved + need > self.prefix:available() then break end
    if not r.prefetch_ready then
      local state = M.cover(self, r, i - 1)
      r.prefetch_ready = state == "ready"
      if state == "full" then break end
      if r.prefetch_task then reprioritise(self, r, i - 1) end
    end
    self.window = i
    ahead = ahead - (r.num_tokens - r.seq:length())
    reserved = reserved + self:pages_for(r.num_tokens) - r.seq:pages()
  end
  self.window = math.max(1, self.window)
end

return M
