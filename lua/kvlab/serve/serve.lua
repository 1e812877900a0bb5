--- A server: requests come in, wait, are computed together with others, step by step, and
-- leave. It does continuous batching with chunked prefill, admission by free blocks,
-- preemption and resume, prefix sharing by block keys, and prefetch from a store for
-- requests that still wait.
--
--   local server = kv.serve { engine = model:engine { chunk = 256 }, store = store }
--   local request = server:submit { tokens = prompt, max_tokens = 64 }
--   server:run()
--   request:output()
--
-- Without a model, times come from a cost model, and requests have lengths and the keys
-- of their blocks:
--
--   local server = kv.serve { cost = kv.cost_model.llama_8b_h100(512), blocks = 900,
--                             block_size = 512, store_blocks = math.huge }
--   server:submit { input_length = 6758, hash_ids = {…}, max_tokens = 500,
--                   arrival_us = 0 }
--
-- docs/serving.md describes all of it. Source: UCM GSA's scheduler side and the V1
-- scheduler of vLLM; hooks and parameters have the names that UCM GSA gives them.
local arguments = require "kvlab.arguments"
local C = require("kvlab.library").C
local draft = require "kvlab.serve.draft"
local evictor = require "kvlab.policy.evictor"
local options = require "kvlab.options"
local pages = require "kvlab.serve.pages"
local protected = require "kvlab.protected"
local request = require "kvlab.serve.request"
local scheduler = require "kvlab.serve.scheduler"
local serve_options = require "kvlab.serve.serve_options"

local M = {}

---@class kvlab.Server
---@field requests table<integer, kvlab.Request>  all requests by their request_id, 1, 2,
-- …;
--                                 those that finished are not kept if `keep` is false
---@field submitted integer         how many requests there were
---@field scheduler kvlab.Scheduler
---@field executor table            simulator.lua or engine_executor.lua
local Server = {}
Server.__index = Server

--- Makes a server.
---@param given table
--  engine        of a model (lua/models/engine.lua): it computes; its cache is the memory
--  cost          in place of engine: what steps cost (cost_model.lua); with blocks,
--                block_size, and store_blocks: blocks that the modelled store holds (0)
--  store         kv.store with the blocks of earlier requests; needs an engine
--  max_seqs      requests that run at once (16; the engine's)
--  max_tokens    token budget of a step (8192; the engine's chunk)
--  watermark     share of the blocks that admission leaves free (0.01)
--  prefetch_ahead  how many steps to look ahead: requests that the token budgets of these
--                steps will reach get their blocks while they wait; with 0 they get them
--                when they are admitted (2)
--  prefetch_workers, max_pending_prefetch   of the prefetcher (4, 64). A decode policy
--                that has these three options, as gsa does, sets their defaults
--  priority      orders prefetches, lower first: a name in lua/priorities/, or a function
--                (request, view) -> integer (queue_position)
--  late          what happens when a request is next but its blocks are still being
--                fetched: "wait", the step waits for them; "skip", others go first
--                ("wait")
--  keep          whether the server keeps requests that finished, for its stats. One that
--                runs for long does not; priorities then see no reuse (true)
--  draft         the draft of requests that name none: { policy = "quest", ratio = 0.05,
--                tokens = 4 } or { ngram = 3, tokens = 8 }, see draft.lua (none)
--  reserve       whether every request reserves, when it is admitted, the memory that it
--                may need, so that none is preempted; one whose policy evicts always does
--                (false)
--  slo_us        how long after its arrival a request's first token is due (2e6)
--  hooks         build_sparse_meta(server, plan), request_begin(request),
--                request_finished(request), attention_begin(ctx), attention_finished(ctx)
---@return kvlab.Server
function M.serve(given)
  local o = serve_options.take(given)
  local kind = o.engine and "kvlab.serve.engine_executor" or "kvlab.serve.simulator"
  local executor = require(kind).new(o)
  return setmetatable({
    executor = executor, scheduler = scheduler.new(executor, o), hooks = o.hooks or {},
    requests = {}, submitted = 0, arriving = {}, holding = {}, slo_us = o.slo_us,
    forgets = o.keep == false, draft = o.draft, drafts = draft.counts(),
    counts = { steps = 0, busy_us = 0, idle_us = 0, prefill_tokens = 0,
               decode_tokens = 0, finished = 0, failed = 0 },
  }, Server)
end

-- ---- requests -------------------------------------------------------------------------

--- Sorts `arriving` by arrival, with the next request last.
local function expect(self, r)
  local list = self.arriving
  local at = #list + 1
  while at > 1 and list[at - 1].arrival_us <= r.arrival_us do at = at - 1 end
  table.insert(list, at, r)
end

--- Adds a request to those of the server.
local function enlist(self, r)
  self.submitted = r.request_id
  self.requests[r.request_id] = r
  expect(self, r)
end

local function with_defaults(self, given)
  local o = {}
  for key, value in pairs(given) do o[key] = value end
  o.arrival_us = o.arrival_us or self.executor:now()
  o.deadline_us = o.deadline_us or o.arrival_us + self.slo_us
  if o.draft == nil and not o.sample then o.draft = self.draft end
  return o
end

--- The pages that a request needs, or why it can never run here.
---@param seq? kvlab.Sequence  that it goes on from
---@return kvlab.serve.Pages|nil
---@return string|nil
local function pages_of(self, r, seq)
  local memory = self.executor.memory
  local decoded = seq and r.read_length < r.num_tokens -- of a fork that decodes at once
  local new = r.num_tokens - (seq and seq:length() or 0)
  local needed = pages.needed(memory, r.attention, seq, decoded and 0 or new,
    (decoded and new or 0) + r.max_tokens - 1, decoded and r.read_length or nil)
  local most, length = self.executor.max_blocks or memory.blocks,
    r.num_tokens + r.max_tokens - 1
  if r.evicts and length > evictor.LONGEST then
    return nil, ("%d tokens are more than %d, the longest text that is evicted from")
      :format(length, evictor.LONGEST)
  end
  local of_request = ("%d tokens and %d to come need"):format(r.num_tokens, r.max_tokens)
  if needed.widest > most then
    return nil, ("%s %d blocks, there are %d"):format(of_request, needed.widest, most)
  elseif needed.prompt > memory.pages then
    return nil, ("%s %d pages, there are %d"):format(of_request, needed.prompt,
      memory.pages)
  end
  return needed
end

--- How many pages of the cache are neither taken nor reserved by requests, nor needed by
-- waiting ones. If all requests reserve, a request that needs no more than these can be
-- admitted.
---@return integer
function Server:pages_left() return self.scheduler:pages_left(self.arriving) end

--- Raises if a step has no room for the drafts that a request wants from a policy.
local function expect_room(self, what, r)
  local d, most = r.draft, self.scheduler.max_tokens - 1
  if not d or not d.policy or (d.tokens or 0) <= most then return end
  options.fail(("%s: draft.tokens is %d, expected at most %d: a step has room for %d "
    .. "tokens (max_tokens)"):format(what, d.tokens, most, most + 1))
end

local function expect_open(self)
  if self.is_closed then options.fail("the server is closed", 3) end
end

--- Submits a request.
---@param given table  tokens (or, without a model, input_length and hash_ids: the keys of
--                     its blocks of hash_block tokens), max_tokens; stop_tokens, a list
--                     of ids, and stop, a list of lists of ids: the request ends after
--                     any of them; arrival_us (now), deadline_us; temperature (0: the
--                     likeliest token), top_k (0: all), top_p (1), min_p (0),
--                     repetition_penalty (1), seed (0): how its tokens are drawn;
--                     logprobs: keeps the log-probability of each token and of that many
--                     of the likeliest in request.logprobs; or, in place of these,
--                     sample(logits, request) -> id; draft: { policy = "quest", ratio =
--                     0.05, tokens = 4 } or { ngram = 3, tokens = 8 } (draft.lua; the
--                     server's), false: none; on_token(request, id);
--                     prompt_logprobs: keeps the same of each token of the prompt in
--                     request.prompt_logprobs; attention: whose policies serve it (the
--                     engine's); keep_output: others may share the blocks of its output
--                     (true); watch: request.reads says which blocks each of its steps
--                     reads (false); hold: its tokens stay in memory when it ends, so
--                     that another request can continue from them, see continue (false)
---@return kvlab.Request|nil request
---@return string|nil reason   why it can never run here
function Server:submit(given)
  options.check("submit", given, request.KNOWN)
  expect_open(self)
  local o = with_defaults(self, given)
  local r = request.new(o, self.submitted + 1, 2)
  expect_room(self, "submit", r)
  self.executor:admit_keys(r, o)
  local needed, why = pages_of(self, r)
  if not needed then return nil, why end
  self.scheduler:claim(r, needed)
  enlist(self, r)
  return r
end

--- Raises for a request of another server.
local function expect_own(self, what, r)
  if self.requests[r.request_id] ~= r and not (self.forgets
    and r.state == "finished") then
    options.fail(what .. ": the request belongs to another server")
  end
end

--- Records the next token that a step gave.
local function reveal(r)
  r.num_tokens, r.unseen = r.num_tokens + 1, r.unseen - 1
  r.has_new, r.is_told = true, false
  local n = r:output_length()
  if r.logprobs then r.logprobs[n] = r.next_logprobs[n - r.next_from] end
end

--- Counts a step of a request with drafts, for the request and for the server.
local function count_draft(self, r, accepted)
  local proposed, us = #r.draft.ids, r.draft.us
  draft.count(r.draft, proposed, accepted)
  draft.count(self.drafts, proposed, accepted)
  if not us then return end
  draft.add_times(r.draft, us)
  if not us.is_counted then draft.add_times(self.drafts, us) end -- of several requests
  us.is_counted, r.draft.us = true, nil
end

--- Records the tokens that a step with a draft gave; the first of them is revealed at
-- once.
local function take_draft(self, r)
  local ids = r.next_tokens
  for i, id in ipairs(ids) do r.tokens[r.num_tokens + i] = id end
  count_draft(self, r, #ids - 1)
  r.unseen, r.next_tokens = #ids, nil
end

--- Takes note that a step computed a request's scheduled tokens: all of it or nothing.
local function advance(self, r, now)
  C.kvl_interrupt_hold(1)
  r.is_computed, r.shares_last = false, false
  r.num_computed_tokens = r.num_computed_tokens + r.num_scheduled_tokens
  if r.num_computed_tokens >= r.num_tokens and not r.error then
    r.next_from = r:output_length()
    if r.next_tokens then
      take_draft(self, r)
    else
      r.unseen = 1
      if r.tokens then r.tokens[r.num_tokens + 1] = r.next_token end
      if r.draft and r:output_length() > 0 then draft.count(r.draft, 0, 0) end
    end
    reveal(r)
    r.first_token_us = r.first_token_us or now
  end
  C.kvl_interrupt_hold(-1)
end

--- A request that continues from the first `count` tokens of another one. Its pages are
-- not claimed yet.
local function branch(self, what, parent, given, count)
  local o = with_defaults(self, given)
  local extra = o.tokens and #o.tokens or 0
  o.input_length, o.hash_ids = count + extra, nil
  if parent.tokens then
    local tokens = {}
    for i = 1, count do tokens[i] = parent.tokens[i] end
    for _, id in ipairs(o.tokens or {}) do tokens[#tokens + 1] = id end
    o.tokens = tokens
  end
  local r = request.new(o, self.submitted + 1, 3)
  r.attention = parent.attention
  expect_room(self, what, r)
  for i, key in ipairs(parent.block_hashes) do r.block_hashes[i] = key end
  self.executor:admit_keys(r, o)
  if r.attention ~= parent.attention and r.attention:watches_prompts() then
    options.fail(("%s: draft is by a policy, expected the parent's draft or none, as "
      .. "policy %s has seen the prompt in the parent's attention"):format(what,
      r.attention.decode_policy.name), 2)
  end
  if r.evicts and o.arrival_us > self.executor:now() then
    options.fail(("%s: arrival_us is in the future, expected none, as the policy of the "
      .. "request evicts tokens and holds memory from now on"):format(what), 2)
  end
  return r, extra
end

--- Makes a branch reserve the pages that it needs, if it has to reserve. Returns the
-- reason if there is no room for them, or nil.
---@param taken integer  pages of it that are taken already
local function claim_branch(self, r, needed, taken)
  local left = self.scheduler:pages_left(self.arriving, true)
  self.scheduler:claim(r, needed)
  if not r.claim or needed.prompt - taken <= left then return nil end
  return ("the request may need %d more pages, and %d are neither taken nor reserved")
    :format(needed.prompt - taken, left)
end

--- Makes a request that continues from what another request has so far, on its own
-- branch. It shares every block, also the last, which is copied when one of the two
-- grows. Where a policy evicts tokens, it gets copies of all pages at once, and reserves
-- what it may need.
---@param parent kvlab.Request  running
---@param given table           tokens: what follows (nothing); max_tokens, stop_tokens,
--                              stop, arrival_us, deadline_us, hold, how tokens are drawn
--                              and on_token as for submit
---@return kvlab.Request
function Server:fork(parent, given)
  options.check("fork", given, request.KNOWN_OF_FORK)
  expect_own(self, "fork", parent)
  if parent.state ~= "running" then
    error(("fork: request %d is %s, expected one that is running"):format(
      parent.request_id, parent.state), 2)
  end
  if parent.is_computed then advance(self, parent, self.executor:now()) end
  local r, extra = branch(self, "fork", parent, given, parent.num_tokens)
  if extra == 0 then r.read_length = parent.read_length end -- the rest is decoded
  local needed, why = pages_of(self, r, parent.seq)
  if needed and not r.evicts then -- a last block that both have is copied
    local cuts = self.scheduler.cuts
    needed.prompt, needed.after = needed.prompt + cuts, needed.after + cuts
  end
  why = why or claim_branch(self, r, needed, r.evicts and 0 or parent.seq:pages())
  if why then error("fork: " .. why, 2) end
  r.seq, r.is_fork = parent.seq:fork(), true
  if r.seq:length() >= parent.num_tokens then -- the rest of an accepted draft
    r.seq:truncate(parent.num_tokens - 1)
  end
  r.shares_last, parent.shares_last = not r.evicts, not r.evicts
  enlist(self, r)
  return r
end

--- Makes a request that continues from the tokens that another request holds, which was
-- submitted with `hold` and has ended. It holds the tokens that steps have computed, so
-- all but the newest one if it was not cut off. What follows is read as the continuation
-- of a prompt. Afterwards, the other request holds nothing.
---@param parent kvlab.Request  finished, and holding its tokens
---@param given table           as for fork; tokens: what follows, one or more
---@return kvlab.Request|nil request
---@return string|nil reason    why it cannot run here, or not now, as others need the
--                              memory; the other request then still holds its tokens
function Server:continue(parent, given)
  options.check("continue", given, request.KNOWN_OF_FORK)
  if not self.holding[parent] then
    error(("continue: request %d holds nothing, expected one that was submitted with "
      .. "hold = true, has ended, and from which no other went on"):format(
      parent.request_id), 2)
  end
  if not given.tokens or #given.tokens == 0 then
    options.fail("continue: tokens is missing or empty, expected a token or more", 2)
  end
  local seq = parent.seq
  if seq:length() > parent.num_tokens then seq:truncate(parent.num_tokens) end -- a draft
  local r = branch(self, "continue", parent, given, seq:length())
  local needed, why = pages_of(self, r, seq)
  why = why or claim_branch(self, r, needed, seq:pages())
  if why then return nil, why end
  C.kvl_interrupt_hold(1)
  r.seq, r.is_fork = seq, true
  r.continues = r.attention == parent.attention -- else its policies begin with it
  parent.seq, self.holding[parent] = nil, nil
  enlist(self, r)
  C.kvl_interrupt_hold(-1)
  return r
end

--- Ends a request that the scheduler is done with.
local function finish(self, r, reason)
  if r.holds and r.seq then self.holding[r] = true end
  r.finish_us, r.finish_reason = self.executor:now(), reason
  self.counts.finished = self.counts.finished + 1
  if reason == "error" then self.counts.failed = self.counts.failed + 1 end
  if self.forgets then self.requests[r.request_id] = nil end
  if self.hooks.request_finished then self.hooks.request_finished(r) end
end

local function cancel(self, r)
  if self.holding[r] then
    self.holding[r] = nil
    local ok, why = self.scheduler:release(r)
    if not ok then error(why, 0) end
  end
  if r.state == "finished" then return end
  local ok, why = true, nil
  if r.state == "running" then
    ok, why = self.scheduler:finish(r)
    local running = self.scheduler.running
    for i = #running, 1, -1 do if running[i] == r then table.remove(running, i) end end
  elseif r.state == "waiting" then
    self.scheduler:drop(r)
  else
    for i = #self.arriving, 1, -1 do
      if self.arriving[i] == r then table.remove(self.arriving, i) end
    end
    if r.seq then self.scheduler.prefix:close(r.seq) end
    r.seq, r.state = nil, "finished"
  end
  finish(self, r, "cancelled")
  if not ok then error(why, 0) end
end

--- Ends a request, whatever its state. If it has already ended, it gives back what it
-- holds.
function Server:cancel(r)
  expect_own(self, "cancel", r)
  protected.whole(cancel, self, r)
end

-- ---- steps ----------------------------------------------------------------------------

local function enqueue_next(self)
  local r = table.remove(self.arriving)
  self.scheduler:enqueue(r)
  return r
end

--- Moves requests whose time has come into the queue.
local function arrive(self)
  local list, now = self.arriving, self.executor:now()
  while #list > 0 and list[#list].arrival_us <= now do
    local r = protected.whole(enqueue_next, self)
    if self.hooks.request_begin then self.hooks.request_begin(r) end
  end
end

--- Calls on_token for the newest token, once. If it raises, the request has its error; an
-- interrupt is an error of the step.
local function tell(r)
  r.is_told = true
  if not r.on_token then return end
  local ok, why = pcall(r.on_token, r, r.tokens and r.tokens[r.num_tokens])
  if ok then return end
  if C.kvl_interrupted() ~= 0 then error(why, 0) end
  r.error = why or "on_token raised nil"
end

--- Ends a running request; the caller removes it from the running ones.
local function finish_running(self, r, reason)
  local ok, why = self.scheduler:finish(r)
  finish(self, r, reason)
  if not ok then error(why, 0) end
end

--- Processes what a step computed for a request. After an error, another call continues
-- where this one stopped.
local function settle(self, r, now)
  if r.state ~= "running" then return end -- another request's on_token cancelled it
  if r.is_computed then advance(self, r, now) end
  self.scheduler:share(r)
  local reason
  repeat
    if r.has_new and not r.is_told then tell(r) end
    if r.state ~= "running" then return end -- its own on_token cancelled it
    reason = r.error and "error" or r.has_new and r:stop_reason()
    r.has_new = false
    local has_more = not reason and r.unseen > 0
    if has_more then reveal(r) end
  until not has_more
  if reason then protected.whole(finish_running, self, r, reason) end
end

--- Takes the requests that are done out of `running`.
local function keep_running(running)
  local kept = 0
  for i = 1, #running do
    local r = running[i]
    if r.state == "running" then
      kept = kept + 1
      running[kept] = r
    end
  end
  for i = #running, kept + 1, -1 do running[i] = nil end
end

--- Settles some requests. If one raises, the others are still settled. Returns the first
-- error in a table, or nil.
local function settle_list(self, list, now)
  local problem
  for i = 1, #list do
    local ok, why = pcall(settle, self, list[i], now)
    if not ok then problem = problem or { why } end
  end
  return problem
end

--- Settles what the last step computed, unless that has been done.
local function settle_step(self)
  local s, now = self.scheduler, self.executor:now()
  local problem = settle_list(self, s.plan.decode, now)
  local other = settle_list(self, s.plan.prefill, now)
  keep_running(s.running)
  problem = problem or other
  if problem then error(problem[1], 0) end
  self.is_unsettled = false
end

--- Counts what a step computed.
local function count_step(counts, plan)
  counts.steps = counts.steps + 1
  for i = 1, #plan.decode do
    counts.decode_tokens = counts.decode_tokens + plan.decode[i].num_scheduled_tokens
  end
  for i = 1, #plan.prefill do
    counts.prefill_tokens = counts.prefill_tokens + plan.prefill[i].num_scheduled_tokens
  end
end

--- Runs one step. If there is nothing to do before the next arrival, it waits for that.
-- Returns false when no request is left. If the step fails, it raises; the requests are
-- as they were before the part that failed, and the next step continues. If a request's
-- sample or on_token raises, only that request ends, with finish_reason "error" and with
-- the error in request.error.
function Server:step()
  expect_open(self)
  local s, counts = self.scheduler, self.counts
  if self.is_unsettled then settle_step(self) end -- of a step that raised
  arrive(self)
  if #s.waiting == 0 and #s.running == 0 then
    if #self.arriving == 0 then return false end
    local start = self.executor:now()
    self.executor:sleep_until(self.arriving[#self.arriving].arrival_us)
    counts.idle_us = counts.idle_us + self.executor:now() - start
    arrive(self)
  end
  local plan = s:schedule()
  if self.hooks.build_sparse_meta then self.hooks.build_sparse_meta(self, plan) end
  self.is_unsettled = true
  local ok, us = pcall(self.executor.run, self.executor, plan)
  if ok then
    counts.busy_us = counts.busy_us + us
    count_step(counts, plan)
  end
  local is_settled, why = pcall(settle_step, self)
  if not ok then error(us, 0) end
  if not is_settled then error(why, 0) end
  return true
end

--- The requests whose computation failed, after a step that raised; none if something
-- else failed. The next step would compute them again.
---@return kvlab.Request[]
function Server:failing() return { unpack(self.executor.group or {}) } end

--- Runs steps until every request is done. After an error of a step it can be called
-- again.
function Server:run()
  while self:step() do end
  return self
end

-- ---- numbers --------------------------------------------------------------------------

--- The value below which a share `q` of a sorted list lies; NaN for an empty list.
local function quantile(sorted, q)
  return sorted[math.max(1, math.ceil(q * #sorted))] or 0 / 0
end

--- What happened so far. Times are in microseconds. hit_rate is a share of the blocks
-- that could be shared (full blocks of prompts, without the block of the last token).
-- stall_share is stall time as a share of busy and stall time. With an engine, memory is
-- what its cache counts (Cache:stats).
function Server:stats()
  local s, ttft, sum, met, tpot, outputs = self.scheduler, {}, 0, 0, 0, 0
  for i = 1, self.submitted do
    local r = self.requests[i] or {}
    if r.first_token_us then
      local us = r.first_token_us - r.arrival_us
      ttft[#ttft + 1], sum = us, sum + us
      if r.first_token_us <= r.deadline_us then met = met + 1 end
    end
    if r.finish_us and r.first_token_us and r:output_length() > 1 then
      tpot = tpot + (r.finish_us - r.first_token_us) / (r:output_length() - 1)
      outputs = outputs + 1
    end
  end
  table.sort(ttft)
  local out = {
    ttft_mean_us = sum / #ttft, ttft_p50_us = quantile(ttft, 0.5),
    ttft_p99_us = quantile(ttft, 0.99), tpot_mean_us = tpot / outputs,
    slo_met = met / #ttft, evictions = s.prefix.evictions,
  }
  for name, value in pairs(self.counts) do out[name] = value end
  for name, value in pairs(s.stats) do out[name] = value end
  out.stall_share = out.stall_us / (out.stall_us + out.busy_us)
  out.hit_rate = (out.blocks_shared + out.blocks_loaded) / out.blocks_asked
  out.store = self.executor.stats and self.executor:stats() or nil
  out.drafts = draft.summary(self.drafts)
  out.memory = self.executor.engine and self.executor.memory:stats() or nil
  return out
end

--- Ends all requests, gives back all blocks and closes what the server opened; the engine
-- and the store stay open. Raises the first error of a policy that is told that a request
-- ends.
function Server:close()
  local problem
  self.is_closed = true
  for i = 1, self.submitted do
    local r = self.requests[i]
    local ok, why = true, nil
    if r then ok, why = pcall(self.cancel, self, r) end
    if not ok then problem = problem or { why } end
  end
  for r in pairs(self.holding) do
    local ok, why = pcall(self.scheduler.release, self.scheduler, r)
    if not ok then problem = problem or { why } end
  end
  self.holding = {}
  self.scheduler.prefix:clear()
  if self.executor.close then self.executor:close() end
  if problem then error(problem[1], 0) end
end

arguments.methods(Server, "a server", { fork = { parent = request.REQUEST },
                                        continue = { parent = request.REQUEST },
                                        cancel = { r = request.REQUEST } })

return M
