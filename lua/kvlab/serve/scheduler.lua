--- The scheduler of a server. It decides which requests take part in the next step, with
-- how many tokens, and what is fetched for requests that wait (waiting.lua). It knows
-- requests, blocks and keys. An executor (engine_executor.lua, simulator.lua) computes,
-- moves blocks and has the clock.
--
-- A step takes running requests first, in the order of their admission: one token for
-- each request that decodes, with its draft if it makes drafts, and a chunk of the
-- remaining token budget for each that still reads its prompt. Then it takes waiting
-- requests in the order of the queue, while the batch, the budget and the memory have
-- room. When a running request finds no free block, the scheduler makes room in this
-- order: it forgets prefixes that nobody uses, takes back what was fetched for waiting
-- requests, and preempts the request that was admitted last. A preempted request gives
-- back all its blocks. When it is resumed, it uses the blocks that are still on the
-- device or in the store and computes the rest.
local draft = require "kvlab.serve.draft"
local prefix_cache = require "kvlab.serve.prefix_cache"
local waiting = require "kvlab.serve.waiting"

local M = {}

---@class kvlab.Scheduler
---@field waiting kvlab.Request[]
---@field running kvlab.Request[]
---@field prefix kvlab.PrefixCache
---@field computing table<any, kvlab.Request>  keys of blocks being computed, and for whom
---@field loading table<any, kvlab.Request>    keys of blocks on their way, and for whom
local Scheduler = {}
Scheduler.__index = Scheduler

--- o: max_seqs, max_tokens, watermark, prefetch_ahead, priority, late: see kv.serve
function M.new(executor, o)
  return setmetatable({
    executor = executor, prefix = prefix_cache.new(executor.memory), waiting = {},
    running = {}, computing = {}, loading = {}, plan = { decode = {}, prefill = {} },
    lengths = {}, view = { step = 0 }, uses = o.keep ~= false and {} or nil,
    max_seqs = o.max_seqs, max_tokens = o.max_tokens,
    ahead_tokens = o.prefetch_ahead * o.max_tokens, priority = o.priority,
    skips = o.late == "skip", block_size = executor.memory.block_size,
    watermark = math.ceil(o.watermark * executor.memory.blocks), window = 1,
    stats = { stall_us = 0, stalls = 0, preemptions = 0, given_back = 0, blocks_asked = 0,
              blocks_shared = 0, blocks_loaded = 0, blocks_lost = 0 },
  }, Scheduler)
end

function Scheduler:blocks_for(tokens) return math.ceil(tokens / self.block_size) end

--- How many full blocks a request may take from others. Its last token is always
-- computed, because the server wants the token after it. If a policy has to see the
-- prompt's queries, or the request asks for its log-probabilities, all are computed.
function Scheduler:shareable(r)
  if r.reads_prompt then return 0 end
  return math.floor((r.num_tokens - 1) / self.block_size)
end

-- ---- a step ---------------------------------------------------------------------------

--- How many blocks the next n tokens of a request take.
local function blocks_needed(self, r, n)
  local length = r.num_computed_tokens
  local need = self:blocks_for(length + n) - self:blocks_for(length)
  return need + (r.shares_last and length % self.block_size > 0 and 1 or 0)
end

local function preempt(self, r)
  table.remove(self.running)
  local ok, why = pcall(self.executor.finished, self.executor, r)
  waiting.mark(self.computing, r, 1, #r.block_hashes, nil)
  waiting.give_back(self, r)
  r.state, r.shares_last, r.store_end = "waiting", false, math.huge
  r.preemptions = r.preemptions + 1
  table.insert(self.waiting, 1, r)
  self.stats.preemptions = self.stats.preemptions + 1
  if not ok then error(why, 0) end
end

--- Frees the blocks of this step and those of n more tokens for r. Returns false if r
-- itself had to be preempted.
local function make_room(self, r, n)
  local need = self.need + blocks_needed(self, r, n)
  while not self.prefix:reclaim(need) do
    if not waiting.give_back_last(self, 0) then
      local victim = self.running[#self.running]
      preempt(self, victim)
      if victim == r then return false end
    end
  end
  self.need = need
  return true
end

local function add(self, r, n, is_decoding)
  local list = is_decoding and self.plan.decode or self.plan.prefill
  r.num_scheduled_tokens, r.index_in_batch = n, #list
  list[#list + 1] = r
end

--- How many tokens a request may have after its next one.
local function tokens_left(r) return r.max_tokens - r:output_length() - 1 end

--- How many tokens the policies of drafts make in this step: for each attention, as many
-- as the request that wants most of them. So the drafts of a batch have one length, which
-- one recorded step serves; what a request cannot use is dropped with its end.
local function measure_drafts(self)
  local lengths, drafting = self.lengths, 0
  for attention in pairs(lengths) do lengths[attention] = nil end
  for _, r in ipairs(self.running) do
    local d = r.draft
    if d and d.policy and r:is_decoding() then
      drafting = drafting + 1
      lengths[r.attention] = math.max(lengths[r.attention] or 0,
        math.min(draft.length(d), tokens_left(r)))
    end
  end
  local most = drafting > 0 and math.floor(self.room / drafting) or 0
  for attention, n in pairs(lengths) do lengths[attention] = math.min(n, most) end
end

--- How many tokens a request that decodes gets: its newest one, and a draft as far as the
-- token budget has room. Nobody is preempted for a draft.
local function decode_tokens(self, r)
  local d, n = r.draft, nil -- luacheck: ignore 311
  if not d then return 1 end
  if d.policy then
    local most = (self.executor.max_blocks or self.executor.memory.blocks)
      * self.block_size - r.num_tokens
    n = draft.expect(d, math.max(0, math.min(self.lengths[r.attention], self.room, most)))
  else
    n = draft.propose(d, r.tokens, r.num_tokens, math.min(self.room, tokens_left(r)))
  end
  if self.need + blocks_needed(self, r, n + 1) > self.prefix:available() then
    n = draft.expect(d, 0)
  end
  self.room = self.room - n
  return n + 1
end

--- Gives tokens to the running requests. Returns false when one had to be preempted.
local function continue_running(self)
  local running, decoding, i = self.running, 0, 1
  for _, r in ipairs(running) do
    r.num_scheduled_tokens, r.index_in_batch = 0, -1
    if r:is_decoding() then decoding = decoding + 1 end
  end
  local before = #running
  self.room = self.max_tokens - decoding
  measure_drafts(self)
  while i <= #running do
    local r = running[i]
    local is_decoding = r:is_decoding()
    local n = is_decoding and decode_tokens(self, r)
      or math.min(r.num_tokens - r.num_computed_tokens, self.room)
    if n > 0 then
      if not make_room(self, r, n) then break end
      if not is_decoding then self.room = self.room - n end
      add(self, r, n, is_decoding)
    end
    if not is_decoding then
      self.promised = self.promised + self:blocks_for(r.num_tokens)
        - self:blocks_for(r.num_computed_tokens + n)
    end
    i = i + 1
  end
  return #running == before
end

--- Whether memory has room for all tokens of a request, beside the blocks that are
-- already promised to others.
local function fits(self, r)
  local need = self.need + self.promised + self:blocks_for(r.num_tokens)
    - r.seq:blocks() + (r.shares_last and 1 or 0)
  local kept = #self.running > 0 and self.watermark or 0
  return need + kept <= self.prefix:available()
end

--- The waiting request at `index` starts, or goes on, to be computed. If a policy raises
-- when it is told so, the request goes on waiting.
local function admit(self, r, index)
  local stats = self.stats
  self.executor:begin(r)
  table.remove(self.waiting, index)
  r.num_computed_tokens = r.seq:length()
  r.blocks_put = math.floor(r.num_computed_tokens / self.block_size)
  r.state = "running"
  self.running[#self.running + 1] = r
  if not r.admitted_us then
    r.admitted_us = self.executor:now()
    r.blocks_asked = r.is_fork and 0 or self:shareable(r)
    stats.blocks_asked = stats.blocks_asked + r.blocks_asked
    stats.blocks_shared = stats.blocks_shared + r.blocks_shared
    stats.blocks_loaded = stats.blocks_loaded + r.blocks_loaded
  end
  waiting.mark(self.computing, r, self:blocks_for(r.num_computed_tokens) + 1,
    #r.block_hashes, r)
  local n = math.min(r.num_tokens - r.num_computed_tokens, self.room)
  self.need = self.need + blocks_needed(self, r, n)
  self.promised = self.promised + self:blocks_for(r.num_tokens)
    - self:blocks_for(r.num_computed_tokens + n)
  self.prefix:reclaim(self.need)
  self.room = self.room - n
  add(self, r, n, false)
end

--- Makes the step wait for a prefetch.
local function stall(self, r)
  local start = self.executor:now()
  self.executor:wait(r.prefetch_task)
  local us = self.executor:now() - start
  if us > 0 then
    self.stats.stall_us = self.stats.stall_us + us
    self.stats.stalls = self.stats.stalls + 1
  end
end

--- Admits waiting requests in the order of the queue.
local function admit_waiting(self)
  local index = 1
  while index <= #self.waiting and #self.running < self.max_seqs and self.room > 0 do
    local r = self.waiting[index]
    local state = waiting.cover(self, r, index - 1)
    if state == "ready" then
      if not fits(self, r) then return end
      admit(self, r, index)
    elseif state == "loading" and not self.skips then
      stall(self, r)
    elseif self.skips and index < self.window then
      index = index + 1
    else
      return
    end
  end
end

--- When nothing can be computed: waits for a prefetch, or else takes back room from
-- waiting requests. Raises when the blocks that are missing are none of the server's.
local function unblock(self)
  for _, r in ipairs(self.waiting) do
    if r.prefetch_task then return stall(self, r) end
  end
  if waiting.give_back_last(self, 1) then return end
  local r = self.waiting[1]
  waiting.give_back(self, r)
  local need, left = self:blocks_for(r.num_tokens), self.prefix:available()
  if need > left and #self.running == 0 then
    error(("request %d needs %d blocks and the cache has %d left: other sequences hold "
      .. "the rest"):format(r.request_id, need, left), 0)
  end
end

--- Chooses the next step: plan.decode and plan.prefill are requests with
-- num_scheduled_tokens. Both are empty when nothing waits or runs.
function Scheduler:schedule()
  local plan, view = self.plan, self.view
  view.step, view.now_us = view.step + 1, self.executor:now()
  repeat
    for i = #plan.decode, 1, -1 do plan.decode[i] = nil end
    for i = #plan.prefill, 1, -1 do plan.prefill[i] = nil end
    self.need, self.promised = 0, 0
    local untroubled = continue_running(self)
    if untroubled then
      if self.ahead_tokens > 0 and #self.waiting > 0 then waiting.look_ahead(self) end
      admit_waiting(self)
    end
    local is_empty = #plan.decode == 0 and #plan.prefill == 0
    if is_empty and #self.waiting > 0 then unblock(self) end
  until not is_empty or (#self.waiting == 0 and #self.running == 0)
  return plan
end

-- ---- life of a request ----------------------------------------------------------------

--- A request has arrived.
function Scheduler:enqueue(r)
  r.state = "waiting"
  for i = 1, self.uses and math.min(#r.block_hashes, self:shareable(r)) or 0 do
    local key = r.block_hashes[i]
    self.uses[key] = (self.uses[key] or 0) + 1
  end
  self.waiting[#self.waiting + 1] = r
end

--- Lets other requests share the full blocks of a request, or only those of its prompt if
-- it does not share its output. They go into the store, too. If that raises, the next
-- call goes on where this one stopped.
function Scheduler:share(r)
  local computed = r.num_computed_tokens
  if not r.keeps_output then computed = math.min(computed, r.prompt_length) end
  local full = math.floor(computed / self.block_size)
  if full <= r.blocks_put then return end
  local ids = r:block_ids()
  for i = r.blocks_put + 1, full do
    local key = self.executor:key(r, i)
    self.prefix:put(key, ids[i])
    self.executor:put(r, i, ids[i])
    if self.computing[key] == r then self.computing[key] = nil end
    r.blocks_put = i
  end
end

--- A running request is done: its blocks are given back. The caller takes it out of
-- `running`. Returns false and the error when a policy raised as it was told so.
function Scheduler:finish(r)
  local ok, why = pcall(self.executor.finished, self.executor, r)
  waiting.mark(self.computing, r, 1, #r.block_hashes, nil)
  self.prefix:close(r.seq)
  r.seq, r.state, r.num_scheduled_tokens, r.index_in_batch = nil, "finished", 0, -1
  return ok, why
end

--- Takes a request out of the queue.
function Scheduler:drop(r)
  for i, other in ipairs(self.waiting) do
    if other == r then
      waiting.give_back(self, r)
      r.state = "finished"
      return table.remove(self.waiting, i)
    end
  end
end

return M
