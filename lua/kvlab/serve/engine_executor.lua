--- The executor of a server with a model. The model's engine computes, the engine's cache
-- is the memory, blocks come from a kv.store through a prefetcher, and the clock is the
-- machine's. The clock decides when requests get their results, but not what the results
-- are.
local draft = require "kvlab.serve.draft"
local ffi = require "ffi"
local library = require "kvlab.library"
local options = require "kvlab.options"
local policies = require "kvlab.policy.policy"
local protected = require "kvlab.protected"
local sampler = require "kvlab.serve.sampler"
local tensor = require "kvlab.tensor.tensor"
local watch = require "kvlab.serve.watch"

local C, check = library.C, library.check
local M = {}

ffi.cdef "int usleep(unsigned int us);"

---@class kvlab.EngineExecutor
---@field memory kvlab.Cache
---@field bytes_block number
local EngineExecutor = {}
EngineExecutor.__index = EngineExecutor

--- o: engine, store (nil), hooks, max_seqs, max_tokens, prefetch_workers,
-- max_pending_prefetch
function M.new(o)
  local engine = o.engine
  for name, most in pairs { max_seqs = engine.max_seqs, max_tokens = engine.chunk } do
    if o[name] > most then
      error(("serve: %s is %d, expected at most the engine's %d"):format(name, o[name],
        most), 3)
    end
  end
  local cache, prefetch = engine.cache, nil
  local bytes_block = cache:bytes_token() * cache.block_size * cache.kv_heads
  if o.store and (o.store.capacity or 0) > 0 and o.store.capacity < bytes_block then
    error(("serve: the store's capacity is %d bytes, expected %d or more, a block of one "
      .. "layer"):format(o.store.capacity, bytes_block), 3)
  end
  if o.store then
    if not o.store.model or o.store.block_size ~= cache.block_size then
      error(("serve: the store was opened with model %s and block_size %s, expected a "
        .. "model and block_size = %d"):format(tostring(o.store.model),
        tostring(o.store.block_size), cache.block_size), 3)
    end
    prefetch = require("kvlab.memory.prefetch").prefetch { device = cache.device,
      store = o.store, prefetch_workers = o.prefetch_workers,
      max_pending_prefetch = o.max_pending_prefetch }
  end
  local attention = engine.attention
  attention.hooks = o.hooks
  return setmetatable({
    engine = engine, memory = cache, store = o.store, prefetch = prefetch,
    model = o.store and o.store.model or "", start = C.kvl_clock_ns(), problems = 0,
    max_blocks = math.min(engine.max_blocks or cache.blocks, cache.blocks),
    bytes_block = bytes_block * cache.layers,
    seqs = {}, counts = {}, tokens = {}, ends = {}, wrong = {}, marks = {},
    hooks = o.hooks,
    seen = setmetatable({}, { __mode = "k" }), -- attention -> block -> key of the content
                                               -- that its policies have seen in it
  }, EngineExecutor)
end

function EngineExecutor:now() return tonumber(C.kvl_clock_ns() - self.start) * 1e-3 end

function EngineExecutor:sleep_until(us)
  local left = us - self:now()
  while left > 0 do
    ffi.C.usleep(math.min(left, 1e5)) -- in parts, so that Ctrl-C can end it
    left = us - self:now()
  end
end

-- ---- keys and store -------------------------------------------------------------------

--- The text that the keys of a text's first block begin with. What a policy that selects
-- in prefill leaves in a block is not what others would.
local function model_of(self, attention)
  local prefill = attention.prefill_policy
  return prefill.dense and self.model
    or ("%s prefill=%s"):format(self.model, policies.text(prefill))
end

--- Makes the keys of a request's blocks first ... last. The keys of all earlier blocks
-- must be known.
local function make_keys(self, r, first, last)
  local size, n = self.memory.block_size, last - first + 1
  local ids = ffi.new("int32_t[?]", n * size)
  for i = 0, n * size - 1 do ids[i] = r.tokens[(first - 1) * size + i + 1] end
  local parent = first > 1 and r.keys + (first - 2) or nil
  check(C.kvl_block_keys(model_of(self, r.attention), parent, ids, n * size, size,
    r.keys + (first - 1)))
  for i = first, last do r.block_hashes[i] = ffi.string(r.keys + (i - 1), 16) end
end

--- Raises for a request with options that need one table for all layers and heads.
function EngineExecutor:expect_no_sharing(r, o)
  local name = o.keep_output and "keep_output" or r.watches and "watch"
  if not name then return end
  options.fail(("request: %s is true, expected false where the cache has tables by %s: "
    .. "its pages are no blocks of all layers and heads"):format(name,
    self.memory.tables))
end

--- Checks a request's tokens and makes the keys of its prompt, where blocks have keys.
-- Its attention is the engine's if it names none.
function EngineExecutor:admit_keys(r, o)
  local vocab = self.engine.model.config.vocab
  if not r.tokens then options.fail "request: tokens is missing, expected ids" end
  for i, id in ipairs(r.tokens) do
    if type(id) ~= "number" or id < 0 or id >= vocab or id % 1 ~= 0 then
      options.fail(("request: token %d is %s, expected 0 ... %d"):format(i - 1,
        tostring(id), vocab - 1))
    end
  end
  local attention, d = r.attention or self.engine.attention, r.draft
  r.evicts = attention.evictor ~= nil
  if d and r.evicts then
    options.fail(("request: draft is given, and policy %s evicts tokens, which does not "
      .. "go with drafts, expected draft = false"):format(attention.decode_policy.name))
  end
  if attention.cache ~= self.memory then
    options.fail("request: attention is over another cache, expected one over the "
      .. "engine's")
  end
  if d and d.policy and attention.draft_policy ~= d.policy then
    attention = self.engine:drafting(attention, d.policy, d.key, d.reuses)
  end
  attention.hooks, r.attention = self.hooks, attention
  local watches = attention:watches_prompts()
  r.reads_prompt = r.prompt_logprobs ~= nil or watches == true
  r.shares_seen = watches == "blocks"
  if self.memory.tables ~= "one" then return self:expect_no_sharing(r, o) end
  local size = self.memory.block_size
  local most = r.num_tokens + r.max_tokens + (d and draft.MOST or 0)
  r.keys = ffi.new("kvl_key[?]", math.floor(most / size) + 1)
  local full = math.floor(r.num_tokens / size)
  if full > 0 then make_keys(self, r, 1, full) end
end

--- The key of a full block.
function EngineExecutor:key(r, i)
  if not r.block_hashes[i] then make_keys(self, r, i, i) end
  return r.block_hashes[i]
end

--- How many of the blocks first ... last the store has, with all that the request's
-- attention needs of them and without a gap.
function EngineExecutor:find(r, first, last)
  if not self.store or last < first then return 0 end
  local keys = r.keys + (first - 1)
  local n = self.store:find(keys, last - first + 1, self.memory.layers)
  return r.shares_seen and r.attention:find(self.store, keys, n) or n
end

--- What an attention's policies have seen: block -> key.
local function seen_by(self, attention)
  local seen = self.seen[attention]
  if not seen then
    seen = {}
    self.seen[attention] = seen
  end
  return seen
end

--- The blocks that a request may share, with their keys, if these are not all: those
-- whose computation its attention's policies have seen.
function EngineExecutor:shared_only(r)
  return r.shares_seen and seen_by(self, r.attention) or nil
end

--- Called when a block has been computed: puts it into the store if it is not there yet,
-- and lets the policies store their summaries of it. A block that the store cannot take
-- is counted, and computed again when it is needed.
function EngineExecutor:put(r, i, block)
  seen_by(self, r.attention)[block] = r.block_hashes[i]
  if not self.store then return end
  local is_there = self:find(r, i, i) == 1
  r.attention:keep(r.block_hashes[i], block, self.store)
  if is_there then return end
  for layer = 0, self.memory.layers - 1 do
    local ok = self.store:put_block(r.keys + (i - 1), layer, self.memory:layer(layer),
      block)
    if not ok then
      self.problems = self.problems + 1
      return
    end
  end
end

-- ---- prefetch -------------------------------------------------------------------------

--- Starts to bring `count` blocks of a request, beginning with block `first`. Returns a
-- ticket, or nil, "full".
function EngineExecutor:submit(r, first, count, priority)
  local ids, blocks = r:block_ids(), {}
  for i = 1, count do blocks[i] = ids[first + i - 1] end
  return self.prefetch:submit { request = r.request_id, priority = priority,
    cache = self.memory, keys = r.keys + (first - 1), blocks = blocks, timeout = 0 }
end

--- The blocks that a ticket has loaded: nil until it is done, no blocks if it failed.
local function take(self, ok, result)
  if not ok then
    self.problems = self.problems + 1
    self.problem = result
    return { blocks = 0 }
  end
  return result and { blocks = result.leading }
end

function EngineExecutor:poll(ticket) return take(self, pcall(ticket.poll, ticket)) end
function EngineExecutor.wait(_, ticket) pcall(ticket.wait, ticket) end -- poll tells why

--- Cancels a ticket. Returns when nothing is written to the ticket's blocks any more.
function EngineExecutor.cancel(_, ticket)
  ticket:cancel()
  pcall(ticket.wait, ticket)
end

function EngineExecutor:reprioritise(r, priority)
  self.prefetch:reprioritise(r.request_id, priority)
end

-- ---- steps ----------------------------------------------------------------------------

--- Notes that content came from the store into a block, and gives the request's policies
-- what the store has of it beside K and V. Returns whether the request can use the block.
function EngineExecutor:arrived(r, i, block)
  for _, seen in pairs(self.seen) do seen[block] = nil end
  if not r.shares_seen then return true end
  local attention, key = r.attention, r.block_hashes[i]
  local ok, has_all = pcall(attention.recall, attention, key, block, self.store)
  if not ok then self.problems, self.problem = self.problems + 1, has_all end
  if not (ok and has_all) then return false end
  seen_by(self, attention)[block] = key
  return true
end

--- Lets the policies begin to serve a request. The policies are shown those of its full
-- blocks whose computation they did not see, before any step reads them: blocks that came
-- from the store, or that a request with another attention computed.
-- If this raises, it may be tried again.
function EngineExecutor:begin(r)
  local attention, blocks, tokens, keys = r.attention, {}, {}, {}
  if r.continues then return end -- its policies serve its sequence already
  if self.memory.tables ~= "one" then return attention:request_begin(r.seq) end
  local seen = seen_by(self, attention)
  local ids = r:block_ids()
  for i = 1, math.floor(r.seq:length() / self.memory.block_size) do
    local block, key = ids[i], r.block_hashes[i]
    if key and seen[block] ~= key then
      blocks[#blocks + 1], keys[#keys + 1] = block, key
      tokens[#tokens + 1] = self.memory.block_size
    end
  end
  attention:request_begin(r.seq)
  if #blocks > 0 then
    local ok, why = pcall(attention.show, attention, blocks, tokens, keys)
    if not ok then
      attention:request_finished(r.seq)
      error(why, 0)
    end
  end
  for i, block in ipairs(blocks) do seen[block] = keys[i] end
end

function EngineExecutor.finished(_, r) r.attention:request_finished(r.seq) end

local function clear(list, n)
  for i = #list, n + 1, -1 do list[i] = nil end
end

--- The sequences, counts and tokens of one batch of the step.
local function gather(self, list)
  local n = 0
  for i, r in ipairs(list) do
    self.seqs[i], self.counts[i], r.next_tokens = r.seq, r.num_scheduled_tokens, nil
    local left = r.num_tokens - r.num_computed_tokens
    for t = 1, r.num_scheduled_tokens do
      self.tokens[n + t] = t <= left and r.tokens[r.num_computed_tokens + t]
        or r.draft.ids[t - left]
    end
    n = n + r.num_scheduled_tokens
  end
  clear(self.seqs, #list)
  clear(self.counts, #list)
  clear(self.tokens, n)
  return self.seqs, self.counts, self.tokens
end

--- The token that a request's own function draws. If the function raises, or returns no
-- token, the request will end with this error; an interrupt is an error of the step. A
-- step that is tried again does not draw a second time.
local function sample(r, logits, vocab)
  if r.sampled_at == r.num_tokens then return end
  local ok, id = pcall(r.sample, logits, r)
  if not ok and C.kvl_interrupted() ~= 0 then error(id, 0) end
  if ok and not (type(id) == "number" and id >= 0 and id < vocab and id % 1 == 0) then
    ok, id = false, ("sample returned %s, expected a token id, 0 ... %d"):format(
      options.shown(id), vocab - 1)
  end
  if ok then r.next_token = id else r.error = id or "sample raised nil" end
  r.sampled_at = r.num_tokens
end

--- A request ends with an error, because its logits give no token.
---@param of string     what the token is of: output, prompt
---@param at integer    which of its tokens, from 1
---@param words string  what is wrong with them
local function refuse_logits(r, of, at, words)
  r.error = r.error or ("request %d: the model's logits for token %d of its %s %s")
    :format(r.request_id, at, of, words)
end

--- Chooses the next token of every request whose tokens have all been computed.
local function choose(self, list, logits)
  local ids, logprobs, wrong
  for i, r in ipairs(list) do
    if r.num_computed_tokens + r.num_scheduled_tokens == r.num_tokens then
      if r.sample then
        sample(r, logits:index(i - 1), self.engine.model.config.vocab)
      else
        if not ids then ids, logprobs, wrong = sampler.choose(logits, list) end
        r.next_token, r.next_logprobs = ids[i], logprobs and { logprobs[i] }
        if wrong and wrong[i] then
          refuse_logits(r, "output", r:output_length() + 1, wrong[i])
        end
      end
    end
  end
end

-- The journal's entry that the requests of a list are computed.
local Computed = {}
Computed.__index = Computed

function Computed.forget() end
function Computed:undo()
  for _, r in ipairs(self.list) do r.is_computed = false end
end

local function mark_computed(self, list)
  self.memory.journal:note(setmetatable({ list = list }, Computed))
  for _, r in ipairs(list) do r.is_computed = true end
end

--- Which requests decode from the next step on; nil if none does.
local function ends_prompts(self, list)
  local ends, any = self.ends, false
  clear(ends, #list)
  for i, r in ipairs(list) do
    ends[i] = r.num_computed_tokens + r.num_scheduled_tokens == r.num_tokens
    any = any or ends[i]
  end
  return any and ends or nil
end

--- Processes what the model says after each token of a step: accepts the right tokens of
-- drafts, and takes back the others.
---@param says integer[]  of each row; -1: its logits give no token
---@param logprobs table<integer, table>|nil  of rows
---@param problems table<integer, string>|nil  of rows whose logits give no token
local function judge(self, list, says, logprobs, problems)
  local first, wrong = 1, self.wrong
  clear(wrong, #list)
  for i, r in ipairs(list) do
    local n, accepted = r.num_scheduled_tokens, 0
    if r.draft then
      accepted = draft.accepted(r.draft.ids, says, first)
      r.next_tokens = {}
      for t = 0, accepted do r.next_tokens[t + 1] = says[first + t] end
    elseif not r.sample then
      r.next_token = says[first]
    end
    local problem = not r.sample and problems and problems[first + accepted]
    if problem then -- -1 is in no draft
      refuse_logits(r, "output", r:output_length() + accepted + 1, problem)
    end
    r.next_logprobs = {}
    for t = 0, logprobs and accepted or -1 do
      r.next_logprobs[t + 1] = logprobs[first + t]
    end
    wrong[i] = n - 1 - accepted
    first = first + n
  end
  self.engine:take_back(wrong)
  for i, r in ipairs(list) do
    r.num_scheduled_tokens = r.num_scheduled_tokens - wrong[i]
  end
end

--- Lets the policies make the drafts of a step, which stay on the device. Returns how
-- many tokens they make for each request; nil if there is no draft.
local function make_drafts(self, list)
  local seqs, counts, tokens, drafted, drafting = {}, {}, {}, {}, {}
  for i, r in ipairs(list) do
    local n = r.num_scheduled_tokens - 1
    drafted[i] = n > 0 and r.draft.policy and n or 0
    if drafted[i] > 0 then
      local at = #seqs + 1
      seqs[at], counts[at], tokens[at] = r.seq, n, r.tokens[r.num_tokens]
      drafting[at] = r
    end
  end
  if #seqs == 0 then return nil end
  local function guess(logits, step, ids)
    local there = {}
    for at, r in ipairs(drafting) do
      if counts[at] >= step then there[#there + 1] = r end
    end
    sampler.guess(logits, there, step, ids)
  end
  self.engine:draft(seqs, counts, tokens, sampler.draws(drafting) and guess or nil)
  return drafted
end

--- Reads the tokens of a step whose drafts policies made.
local function read_drafts(self, list)
  local ids, row = self.engine.batch.tokens:list(), 0
  for _, r in ipairs(list) do
    for t = 1, r.draft and #r.draft.ids or 0 do r.draft.ids[t] = ids[row + t + 1] end
    row = row + r.num_scheduled_tokens
  end
end

--- Marks the end of a part of a step for its times; a number from 1.
local function mark(self, part)
  local device = self.engine.model.device
  self.marks[part] = self.marks[part] or device:open_event()
  self.marks[part]:record(device:stream())
end

--- Gives the requests of a step the times of its parts, which the device has finished.
local function note_times(self, list)
  local marks = self.marks
  local us = { draft = marks[1]:elapsed_us(marks[2]),
               check = marks[2]:elapsed_us(marks[3]),
               choose = marks[3]:elapsed_us(marks[4]) }
  for _, r in ipairs(list) do
    if r.draft then r.draft.us = us end
  end
end

--- A decode step in which some requests have drafts.
local function verify(self, list)
  local seqs, counts, tokens = gather(self, list)
  mark(self, 1)
  local drafted = make_drafts(self, list)
  mark(self, 2)
  local logits = self.engine:verify(seqs, counts, tokens, nil, drafted)
  mark(self, 3)
  if drafted then read_drafts(self, list) end
  local row = 0
  for _, r in ipairs(list) do
    if r.sample then sample(r, logits:index(row), self.engine.model.config.vocab) end
    row = row + r.num_scheduled_tokens
  end
  local says, logprobs, problems = sampler.choose(logits, sampler.rows(list))
  mark(self, 4)
  judge(self, list, says, logprobs, problems)
  self.marks[4]:sync()
  note_times(self, list)
end

local function has_draft(list)
  for i = 1, #list do
    if list[i].num_scheduled_tokens > 1 then return true end
  end
  return false
end

--- Forgets what was seen in the blocks that a step begins to fill, because their content
-- changes.
local function forget_seen(self, list)
  local size = self.memory.block_size
  if self.memory.tables ~= "one" then return end -- nothing is shared
  for _, r in ipairs(list) do
    local first = math.ceil(r.num_computed_tokens / size)
    local last = math.ceil((r.num_computed_tokens + r.num_scheduled_tokens) / size)
    if last > first then
      local ids = r:block_ids()
      for _, seen in pairs(self.seen) do
        for i = first + 1, last do if ids[i] then seen[ids[i]] = nil end end
      end
    end
  end
end

local ROWS = 64 -- of logits of a prompt that are computed at a time

--- Log-probabilities of `n` tokens of a prompt, each from the state of the token before
-- it.
local function add_prompt_logprobs(self, r, states, n)
  local engine, first = self.engine, r.num_computed_tokens
  local top = math.min(r.top_of_prompt, engine.model.config.vocab)
  self.rows = self.rows or tensor.lasting(tensor.tensor, engine.model.device, "f32",
    { ROWS, engine.model.config.vocab })
  for at = 0, n - 1, ROWS do
    local count, ids = math.min(ROWS, n - at), {}
    local logits = self.rows:narrow(0, count)
    engine.model:logits(states:narrow(at, count), logits)
    for i = 1, count do ids[i] = r.tokens[first + at + i + 1] end
    for i, one in ipairs(sampler.logprobs(logits, ids, top)) do
      r.prompt_logprobs[first + at + i + 1] = one
      if one.problem then refuse_logits(r, "prompt", first + at + i + 1, one.problem) end
    end
  end
end

--- A function that sees the states of a chunk, for requests that want log-probabilities
-- of their prompts; nil if none does.
local function reader_of_prompts(self, list)
  local any = false
  for _, r in ipairs(list) do any = any or r.prompt_logprobs end
  return any and function(states)
    local row = 0
    for _, r in ipairs(list) do
      local n = math.min(r.num_scheduled_tokens,
        r.prompt_length - r.num_computed_tokens - 1)
      if r.prompt_logprobs and n > 0 then
        tensor.scope(add_prompt_logprobs, self, r, states:narrow(row, n), n)
      end
      row = row + r.num_scheduled_tokens
    end
  end or nil
end

local function decode(self, list)
  if has_draft(list) then
    verify(self, list)
  else
    local seqs, _, tokens = gather(self, list)
    choose(self, list, self.engine:decode(seqs, tokens))
  end
  mark_computed(self, list)
end

local function prefill(self, list)
  local seqs, counts, tokens = gather(self, list)
  choose(self, list, self.engine:prefill_batch(seqs, counts, tokens,
    ends_prompts(self, list), reader_of_prompts(self, list)))
  mark_computed(self, list)
end

--- Computes requests of one attention. `group` are those whose computation failed.
local function run_group(self, compute, list, attention)
  local engine, own, probe = self.engine, self.engine.attention, attention.probe
  C.kvl_interrupt_hold(1)
  self.group = list
  if attention ~= own then engine:use_attention(attention) end
  attention.probe = watch.over(list, probe)
  local ok, why = protected.pcall(self.memory.transaction, self.memory, compute, self,
    list)
  attention.probe = probe
  if attention ~= own then engine:use_attention(own) end
  C.kvl_interrupt_hold(-1)
  if not ok then
    self.seen[attention] = nil -- the step may have changed what the policies keep
    error(why, 0)
  end
  forget_seen(self, list)
  self.group = nil
end

--- Computes requests in groups of one attention, in the order in which these come.
local function run_groups(self, compute, list)
  local is_one = true
  for i = 2, #list do is_one = is_one and list[i].attention == list[1].attention end
  if is_one then
    if list[1] then run_group(self, compute, list, list[1].attention) end
    return
  end
  local groups, of = {}, {}
  for _, r in ipairs(list) do
    local group = of[r.attention]
    if not group then
      group = {}
      groups[#groups + 1], of[r.attention] = group, group
    end
    group[#group + 1] = r
  end
  for _, group in ipairs(groups) do
    run_group(self, compute, group, group[1].attention)
  end
end

--- Computes a step and returns its microseconds. Decoding requests and prompts are
-- separate batches, since policies may treat them differently, and so are requests with
-- different attentions. If one of them raises, its requests are as they were before;
-- is_computed tells which requests were computed.
function EngineExecutor:run(plan)
  local start = self:now()
  self.group = nil
  run_groups(self, decode, plan.decode)
  run_groups(self, prefill, plan.prefill)
  return self:now() - start
end

--- Counters of the prefetcher and the store; problems: how often one of them failed.
function EngineExecutor:stats()
  if not self.store then return nil end
  local out = self.prefetch:stats()
  for name, value in pairs(self.store:stats()) do out["store_" .. name] = value end
  out.problems = self.problems
  return out
end

function EngineExecutor:close()
  self.engine.attention.hooks = nil
  for _, event in ipairs(self.marks) do event:close() end
  self.marks = {}
  if self.prefetch then self.prefetch:close() end
end

return M
