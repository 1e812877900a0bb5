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
--
-- Memory is counted in pages. A block is one page; where the cache has tables by layer or
-- by head, it is as many pages as there are tables. A request under a policy that evicts
-- **reserves** the most pages that it may ever hold (pages.lua) and is never preempted,
-- because computing its tokens again as a prompt would evict other tokens than its decode
-- steps did. Reserved pages that it has not taken stay free for it. Once tokens of its
-- prompt have been evicted, it needs fewer pages, and other requests get the rest in the
-- next step.
local draft = require "kvlab.serve.draft"
local prefix_cache = require "kvlab.serve.prefix_cache"
local protected = require "kvlab.protected"
local waiting = require "kvlab.serve.waiting"

local M = {}

---@class kvlab.Scheduler
---@field waiting kvlab.Request[]
---@field running kvlab.Request[]
---@field prefix kvlab.PrefixCache
---@field computing table<any, kvlab.Request>  keys of blocks being computed, and for whom
---@field loading table<any, kvlab.Request>    keys of blocks on their way, and for whom
---@field cuts integer      pages of a block; more than 1: no two requests share one
---@field need integer      pages that this step takes
---@field promised integer  pages that the rest of the running prompts take
---@field reserved integer  pages that requests have reserved and not taken
local Scheduler = {}
Scheduler.__index = Scheduler

--- o: max_seqs, max_tokens, watermark, prefetch_ahead, priority, late, reserve: see
-- kv.serve
function M.new(executor, o)
  local memory = executor.memory
  return setmetatable({
    executor = executor, prefix = prefix_cache.new(memory), waiting = {},
    running = {}, computing = {}, loading = {}, plan = { decode = {}, prefill = {} },
    lengths = {}, view = { step = 0 }, uses = o.keep ~= false and {} or nil,
    max_seqs = o.max_seqs, max_tokens = o.max_tokens,
    ahead_tokens = o.prefetch_ahead * o.max_tokens, priority = o.priority,
    skips = o.late == "skip", block_size = memory.block_size, reserves = o.reserve,
    cuts = memory.cut_layers * memory.cut_heads,
    watermark = math.ceil(o.watermark * memory.pages), window = 1,
    stats = { stall_us = 0, stalls = 0, preemptions = 0, given_back = 0, blocks_asked = 0,
              blocks_shared = 0, blocks_loaded = 0, blocks_lost = 0 },
  }, Scheduler)
end

function Scheduler:blocks_for(tokens) return math.ceil(tokens / self.block_size) end

--- The pages of tokens, where nothing is evicted.
function Scheduler:pages_for(tokens) return self:blocks_for(tokens) * self.cuts end

--- How many full blocks a request may share with others. Its last token is always
-- computed, because the server wants the token after it. If a policy has to see the
-- prompt's queries, or the request asks for the prompt's log-probabilities, all blocks
-- are computed. Pages of tables by layer or head are never shared.
function Scheduler:shareable(r)
  if r.reads_prompt or self.cuts > 1 then return 0 end
  return math.floor((r.num_tokens - 1) / self.block_size)
end

--- Takes note of the pages that a request needs (pages.lua). It reserves them if its
-- policy evicts, or if all requests do.
---@param needed kvlab.serve.Pages
function Scheduler:claim(r, needed)
  r.claim = (r.evicts or self.reserves) and needed or nil
end

--- How many pages a request has reserved and not taken.
local function left_of(r)
  if not r.claim then return 0 end
  local most = r.num_computed_tokens < r.read_length and r.claim.prompt or r.claim.after
  return math.max(0, most - (r.seq and r.seq:pages() or 0))
end

--- How many pages are free for admission: neither taken, nor reserved, nor needed by
-- requests ahead that will reserve them when they are admitted.
---@param arriving kvlab.Request[]
---@param is_for_fork? boolean  without those that wait: a fork reserves before they do
---@return integer
function Scheduler:pages_left(arriving, is_for_fork)
  local left = self.prefix:available()
  for _, list in ipairs { self.running, self.waiting, arriving } do
    for _, r in ipairs(list) do
      if list == self.running or r.is_fork or not is_for_fork then
        left = left - left_of(r)
      end
    end
  end
  return left
end

--- How many requests at the head of the queue have reserved already: forks, and requests
-- that continue from what another one held. They are admitted first, so that no other
-- request waits for their pages.
local function reserving(self)
  local n = 0
  while self.waiting[n + 1] and self.waiting[n + 1].is_fork
    and self.waiting[n + 1].claim do n = n + 1 end
  return n
end

--- How many pages requests have reserved and not taken.
local function reserved(self)
  local pages = 0
  for _, r in ipairs(self.running) do pages = pages + left_of(r) end
  for i = 1, reserving(self) do pages = pages + left_of(self.waiting[i]) end
  return pages
end

-- ---- a step ---------------------------------------------------------------------------

--- How many pages the next n tokens of a request take.
local function pages_needed(self, r, n)
  local length = r.num_computed_tokens
  local need = self:blocks_for(length + n) - self:blocks_for(length)
  return (need + (r.shares_last and length % self.block_size > 0 and 1 or 0)) * self.cuts
end

--- The same as two numbers: pages that the request has reserved, and others. Under a
-- policy that evicts, all of its pages are reserved, and stay so until they are taken.
local function parted(self, r, n)
  if r.evicts then return 0, 0 end
  local need = pages_needed(self, r, n)
  local own = math.min(need, left_of(r))
  return own, need - own
end

--- Subtracts the pages of this step's n tokens of a request from the pages that are
-- available.
local function take(self, r, n)
  local own, others = parted(self, r, n)
  self.need, self.reserved = self.need + own + others, self.reserved - own
end

local function preempt(self, index)
  local r = table.remove(self.running, index)
  local ok, why = pcall(self.executor.finished, self.executor, r)
  waiting.mark(self.computing, r, 1, #r.block_hashes, nil)
  waiting.give_back(self, r)
  r.state, r.shares_last, r.store_end = "waiting", false, math.huge
  r.preemptions = r.preemptions + 1
  table.insert(self.waiting, reserving(self) + 1, r)
  self.stats.preemptions = self.stats.preemptions + 1
  if not ok then error(why, 0) end
end

--- The index of the last admitted request that may be preempted, from r on; nil if there
-- is none.
local function victim_of(self, r)
  for i = #self.running, 1, -1 do
    if not self.running[i].claim then return i end
    if self.running[i] == r then return nil end
  end
end

--- Frees the pages of this step and those of n more tokens for r. Returns false if r
-- itself had to be preempted.
local function make_room(self, r, n)
  local _, others = parted(self, r, n)
  while others > 0 and self.need + self.reserved + others > self.prefix:available() do
    if not waiting.give_back_last(self, 0) then
      local index = victim_of(self, r)
      if not index then break end -- the step says so, if no page is free
      local victim = self.running[index]
      protected.whole(preempt, self, index)
      if victim == r then return false end
    end
  end
  take(self, r, n)
  self.prefix:reclaim(self.need)
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
-- as the request that wants most of them. So all drafts of a batch have the same length,
-- and one recorded step serves them; tokens past a request's end are dropped.
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

--- How many tokens a request that decodes gets: its newest token, and a draft if the
-- token budget has room. No request is preempted for a draft.
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
  local _, others = parted(self, r, n + 1)
  if self.need + self.reserved + others > self.prefix:available() then
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
    if not is_decoding and not r.claim then
      self.promised = self.promised + self:pages_for(r.num_tokens)
        - self:pages_for(r.num_computed_tokens + n)
    end
    i = i + 1
  end
  return #running == before
end

--- How many pages a waiting request needs besides those that it has: pages for all of its
-- tokens or, if it reserves, all that it has not reserved yet.
local function pages_to_admit(self, r)
  if r.claim then return r.is_fork and 0 or left_of(r) end -- a fork reserves when made
  return self:pages_for(r.num_tokens) - r.seq:pages()
    + (r.shares_last and self.cuts or 0)
end

--- Whether memory has room for a request, beside the pages that are already promised to
-- others.
local function fits(self, r)
  local kept = not r.claim and #self.running > 0 and self.watermark or 0
  return self.need + self.promised + self.reserved + pages_to_admit(self, r) + kept
    <= self.prefix:available()
end

--- Moves the waiting request at `index` to the running requests.
local function move(self, r, index)
  local stats, to_admit = self.stats, pages_to_admit(self, r)
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
  if r.claim then
    self.reserved = self.reserved + to_admit
  else
    self.promised = self.promised + self:pages_for(r.num_tokens)
      - self:pages_for(r.num_computed_tokens + n)
  end
  take(self, r, n)
  self.prefix:reclaim(self.need)
  self.room = self.room - n
  add(self, r, n, r:is_decoding())
end

--- Starts or resumes the waiting request at `index`. If a policy raises when it is told
-- so, the request stays in the queue.
local function admit(self, r, index)
  self.executor:begin(r)
  protected.whole(move, self, r, index)
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

--- When nothing can be computed: waits for a prefetch, or else takes memory back from
-- waiting requests. Raises if the missing blocks do not belong to the server.
local function unblock(self)
  for _, r in ipairs(self.waiting) do
    if r.prefetch_task then return stall(self, r) end
  end
  if waiting.give_back_last(self, 1) then return end
  local r = self.waiting[1]
  if waiting.may_give_back(r) then waiting.give_back(self, r) end
  local need, left = self:pages_for(r.num_tokens), self.prefix:available()
  if r.claim then need = r.is_fork and reserved(self) or left_of(r) end
  if need > left and #self.running == 0 then
    error(("request %d needs %d %s and the cache has %d left: other sequences hold "
      .. "the rest"):format(r.request_id, need, self.cuts > 1 and "pages" or "blocks",
      left), 0)
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
    self.need, self.promised, self.reserved = 0, 0, reserved(self)
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
  local has_reserved = r.is_fork and r.claim
  table.insert(self.waiting, (has_reserved and reserving(self) or #self.waiting) + 1, r)
end

--- Lets other requests share the full blocks of a request, or only those of its prompt if
-- it does not share its output. They go into the store, too. If that raises, the next
-- call continues where this one stopped.
function Scheduler:share(r)
  if self.cuts > 1 then return end
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

--- Ends a running request: its blocks are given back, unless another request may continue
-- from them. The caller removes it from `running`. Returns false and the error when a
-- policy raised as it was told so.
function Scheduler:finish(r)
  local ok, why = true, nil
  if not r.holds then
    ok, why = pcall(self.executor.finished, self.executor, r)
  end
  waiting.mark(self.computing, r, 1, #r.block_hashes, nil)
  if not r.holds then
    self.prefix:close(r.seq)
    r.seq = nil
  end
  r.state, r.num_scheduled_tokens, r.index_in_batch = "finished", 0, -1
  return ok, why
end

--- Gives back what a finished request holds.
function Scheduler:release(r)
  local ok, why = pcall(self.executor.finished, self.executor, r)
  self.prefix:close(r.seq)
  r.seq = nil
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
