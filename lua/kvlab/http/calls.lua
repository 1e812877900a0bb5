--- Calls: requests for text that are being answered. A call has a job for each of its
-- answers. A job waits in a queue until the model's cache has room for the most that it
-- may hold, so that no job is ever preempted; then a kv.serve computes the jobs together.
local C = require("kvlab.library").C
local answers = require "kvlab.http.answers"
local asked_of = require "kvlab.http.asked"
local generate = require "kvlab.serve.generate"
local pages = require "kvlab.serve.pages"
local problem = require "kvlab.http.problem"
local rest = require("kvlab.slices").rest
local serve = require "kvlab.serve.serve"

local M = {}

---@class kvlab.http.Calls
---@field live table[]     calls that are not answered yet
---@field queue table[]    jobs that wait
---@field running table[]  jobs that are computed
local Calls = {}
Calls.__index = Calls

local function now_s() return tonumber(C.kvl_clock_ns()) * 1e-9 end

---@param o table  engine, tokenizer, policies, metrics, tasks, name, limits, draft,
--                 finished
---@return kvlab.http.Calls
function M.new(o)
  local engine = o.engine
  return setmetatable({
    engine = engine, tokenizer = o.tokenizer, policies = o.policies, metrics = o.metrics,
    tasks = o.tasks, name = o.name, limits = o.limits, live = {}, queue = {},
    running = {}, count = 0, finished = o.finished, draft = o.draft,
    server = serve.serve { engine = engine, keep = false, draft = o.draft,
                           reserve = true },
  }, Calls)
end

-- ---- an answer is written -------------------------------------------------------------

local SMALL = 2 ^ 9     -- log-probabilities of a part that is written at once: some ms
local BYTES_NUMBER = 32 -- of JSON for each of them, about

local fail

--- Writes the parts of an answer that wait.
local function write_waiting(self, call)
  local ok, why = pcall(function()
    while call.waiting[1] and not call.is_over do table.remove(call.waiting, 1)() end
  end)
  call.waiting = nil
  if ok or call.is_over then return end
  if C.kvl_interrupted() ~= 0 then error(why, 0) end
  if call.exchange:is_gone() then return end -- look_after ends the call
  if not problem.is(why) then
    why = problem.new(500, "the answer cannot be written: " .. tostring(why))
  end
  fail(self, call, why)
end

--- Calls fn, which writes a part of an answer: at once, or in a task of the call if the
-- part is large or other parts are waiting.
local function write(self, call, size, fn)
  if not call.waiting and size <= SMALL then return fn() end
  if call.waiting then
    table.insert(call.waiting, fn)
    return
  end
  call.waiting = { fn }
  self.tasks:add(call.exchange, size * BYTES_NUMBER, function()
    write_waiting(self, call)
  end)
end

-- ---- a call begins --------------------------------------------------------------------

--- A seed for a request that names none.
local function new_seed(self)
  return (tonumber(C.kvl_clock_ns() % 2 ^ 40) * 8191 + self.count) % 2 ^ 53
end

--- Names of the blocks of a prompt: their text.
local function block_names(self, ids)
  local size, names = self.engine.cache.block_size, {}
  for first = 1, #ids, size do
    names[#names + 1] = self.tokenizer:decode({ unpack(ids, first,
      math.min(first + size - 1, #ids)) }, { special = true })
    rest()
  end
  return names
end

local function put(self, call, text)
  local waiting = call.exchange:send("data: " .. text .. "\n\n")
  if waiting > self.limits.unsent then call.is_stuck = true end
end

--- Sends a chunk of a stream.
local function send(self, call, object)
  write(self, call, answers.size(object), function()
    put(self, call, answers.encode(object, self.tokenizer))
  end)
  return not call.is_stuck
end

--- The part of a chunk for clients that asked to watch: for each block, the percentage of
-- KV heads that read it in this step.
local function reads_of(job)
  local reads = job.own.running and job.own.running.reads
  if not job.call.asked.watch or not reads then return nil end
  local list = {}
  for i = 1, reads.blocks do list[i] = math.floor(100 * reads[i] + 0.5) end
  return { reads = list }
end

--- The text of a chunk: the first one of an answer begins with the prompt, if that is
-- echoed with its log-probabilities.
local function with_echo(self, job, text)
  local asked = job.call.asked
  if not asked.echo or not asked.logprobs or job.sent then return text end
  return answers.echo(self.tokenizer, job.prompt) .. (text or "")
end

--- One answer to compute.
local function new_job(self, call, prompt, k)
  local asked, o = call.asked, {}
  for name, value in pairs(asked.options) do o[name] = value end
  o.seed = ((asked.seed or new_seed(self)) + k) % 2 ^ 53
  o.logprobs, o.max_tokens = asked.logprobs, prompt.max_tokens
  local attention = call.policy.attention
  local job = { call = call, index = #call.jobs, prompt = prompt,
    pages = pages.needed(self.engine.cache, attention, nil, #prompt.ids,
      math.max(prompt.max_tokens, 1) - 1).prompt }
  local wants_prompt = asked.echo and asked.logprobs ~= nil
  job.drops = wants_prompt and prompt.max_tokens == 0
  if job.drops then o.max_tokens = 1 end
  job.own = generate.job(self.engine, prompt.ids, o, 1, attention)
  if job.drops then job.own.stream = nil end
  local request = job.own.request
  local draft = asked.draft
  request.draft = draft and draft.policy and { tokens = draft.tokens,
    policy = attention.draft_policy } or draft
  request.keep_output = self.engine.cache.tables == "one"
    and attention.decode_policy.name == "full"
  request.prompt_logprobs = wants_prompt and asked.logprobs or nil
  request.watch = asked.watch or nil
  if asked.stream then
    job.own.on_text = function(text)
      return send(self, call, answers.chunk(job, with_echo(self, job, text), false,
        reads_of(job)))
    end
  end
  return job
end

local function begin_stream(self, call)
  call.exchange:begin "text/event-stream; charset=utf-8"
  for _, job in ipairs(call.jobs) do
    local extra = call.asked.watch and { block_size = self.engine.cache.block_size,
      blocks = block_names(self, job.prompt.ids) } or nil
    if call.asked.is_chat or extra then
      send(self, call, answers.chunk(job, nil, false, extra))
    end
    if call.asked.echo and not call.asked.logprobs then
      send(self, call, answers.chunk(job, answers.echo(self.tokenizer, job.prompt),
        false))
    end
  end
end

--- Raises for drafts of a call whose policy evicts.
local function check_draft(self, call)
  local evictor, draft = call.policy.attention.evictor, call.asked.draft
  if draft == nil then draft = self.draft end
  if not evictor or not draft then return end
  problem.wrong("draft", ("policy %s evicts tokens, which does not go with drafts, "
    .. "expected draft = false"):format(evictor.policy.name))
end

--- Makes the jobs of a call.
local function begin(self, call)
  local asked, attention = call.asked, call.policy.attention
  check_draft(self, call)
  for _, prompt in ipairs(asked.prompts) do
    prompt.max_tokens = asked_of.length_of(self.engine, attention, asked, prompt)
  end
  for _, prompt in ipairs(asked.prompts) do
    for k = 0, asked.n - 1 do
      call.jobs[#call.jobs + 1] = new_job(self, call, prompt, k)
      rest()
    end
    self.metrics:add("kvlab_prompt_tokens_total", #prompt.ids)
  end
  call.left = #call.jobs
  if asked.stream then begin_stream(self, call) end
end

--- Takes a request for text. Raises a problem when the queue is full.
---@param exchange kvlab.http.Exchange
---@param asked table   see asked.lua
---@param arrived_s number
function Calls:add(exchange, asked, arrived_s)
  local jobs = #asked.prompts * asked.n
  if jobs > self.limits.queue then
    problem.wrong(asked.n > 1 and "n" or "prompt",
      ("the request asks for %d answers, expected "
      .. "%d or fewer"):format(jobs, self.limits.queue))
  elseif #self.queue + jobs > self.limits.queue then
    error(problem.new(429, (
      "%d answers are waiting, and this server lets %d wait; try again "
      .. "later"):format(#self.queue, self.limits.queue),
      { code = "queue_full", header = "Retry-After: 1" }), 0)
  end
  self.count = self.count + 1
  local call = {
    exchange = exchange, asked = asked, jobs = {}, created = os.time(), model = self.name,
    id = ("%s-%x%06x"):format(asked.is_chat and "chatcmpl" or "cmpl", os.time(),
      self.count),
    arrived_s = arrived_s, deadline_s = arrived_s + self.limits.request_s,
    policy = self.policies:take(asked.policy, asked.policy_options,
      asked.draft and asked.draft.policy and asked.draft or nil),
  }
  local ok, why = pcall(begin, self, call)
  if not ok then
    self.policies:give(call.policy)
    error(why, 0)
  end
  self.live[#self.live + 1] = call
  for _, job in ipairs(call.jobs) do self.queue[#self.queue + 1] = job end
end

-- ---- a call ends ----------------------------------------------------------------------

local function remove(list, test)
  local kept = 0
  for i = 1, #list do
    if not test(list[i]) then
      kept = kept + 1
      list[kept] = list[i]
    end
  end
  for i = #list, kept + 1, -1 do list[i] = nil end
end

--- Ends a call: its jobs end, and its policy is given back.
local function drop(self, call, status)
  if call.is_over then return end
  call.is_over = true
  remove(self.queue, function(job) return job.call == call end)
  remove(self.running, function(job)
    if job.call ~= call then return false end
    pcall(self.server.cancel, self.server, job.own.running)
    return true
  end)
  self.policies:give(call.policy)
  local generated = answers.usage(call).completion_tokens
  self.metrics:add("kvlab_generated_tokens_total", generated)
  self.metrics:observe("kvlab_request_seconds", now_s() - call.arrived_s)
  remove(self.live, function(other) return other == call end)
  self.finished(call, status, generated)
end

--- A call cannot be answered.
function fail(self, call, p)
  if call.exchange.is_begun then
    call.exchange:send("data: " .. problem.encode(p) .. "\n\ndata: [DONE]\n\n")
    call.exchange:close()
  else
    call.exchange:answer(p.status, "application/json", problem.encode(p), p.header)
  end
  drop(self, call, p.status)
end

--- All answers of a call are complete.
local function complete(self, call)
  local x = call.exchange
  if call.asked.stream then
    if call.asked.usage then send(self, call, answers.usage_chunk(call)) end
    write(self, call, 0, function()
      x:send "data: [DONE]\n\n"
      x:close()
      drop(self, call, 200)
    end)
    return
  end
  local object = answers.whole(self.tokenizer, call)
  write(self, call, answers.size(object), function()
    x:answer(200, "application/json", answers.encode(object, self.tokenizer))
    drop(self, call, 200)
  end)
end

--- An answer is complete.
local function finish_job(self, job)
  local call, why = job.call, job.own.answer.error
  if job.own.answer.finish_reason == "error" then
    return fail(self, call, problem.new(500, "the answer failed: " .. tostring(why)))
  end
  if call.asked.stream then
    send(self, call, answers.chunk(job, with_echo(self, job), true,
      reads_of(job)))
  end
  call.left = call.left - 1
  if call.left == 0 then complete(self, call) end
end

--- Ends the calls whose clients left or whose time is over.
local function look_after(self, now)
  for i = #self.live, 1, -1 do
    local call = self.live[i]
    if call.is_stuck or call.exchange:is_gone() then
      call.exchange:close()
      self.metrics:add "kvlab_disconnects_total"
      drop(self, call, 499)
    elseif now > call.deadline_s then
      self.metrics:add "kvlab_timeouts_total"
      fail(self, call, problem.new(504, ("the answer was not complete after %g s"):format(
        self.limits.request_s), { code = "timeout" }))
    end
  end
end

-- ---- steps ----------------------------------------------------------------------------

local function start(self, job, now)
  job.started = true
  generate.start(self.server, job.own)
  self.metrics:observe("kvlab_queue_seconds", now - job.call.arrived_s)
  self.running[#self.running + 1] = job
end

--- Starts the jobs at the head of the queue, as many as there is room for.
local function admit(self, now)
  while self.queue[1] and #self.running < self.engine.max_seqs
    and self.queue[1].pages <= self.server:pages_left() do
    start(self, table.remove(self.queue, 1), now)
  end
end

--- A step raised: the calls of the requests that it could not compute fail.
local function fail_step(self, why)
  if C.kvl_interrupted() ~= 0 then error(why, 0) end
  local of, failed = {}, self.server:failing()
  for _, r in ipairs(failed) do of[r] = true end
  for i = #self.running, 1, -1 do
    local job = self.running[i]
    if job and (#failed == 0 or of[job.own.running]) and not job.call.is_over then
      fail(self, job.call, problem.new(500, "a step of the model failed: "
        .. tostring(why)))
    end
  end
end

local function collect(self, now)
  for i = #self.running, 1, -1 do
    local job = self.running[i] -- a call that fails removes others
    local r = job and job.own.running
    if job and not job.has_first and r and r:output_length() > 0 then
      job.has_first = true
      self.metrics:observe("kvlab_time_to_first_token_seconds", now - job.call.arrived_s)
    end
    if job and not job.own.is_done and r.state == "finished" then generate.finish(
      job.own) end
    if job and job.own.is_done then
      table.remove(self.running, i)
      if job.call.is_stuck then job.call.left = job.call.left - 1 -- look_after ends it
      else finish_job(self, job) end
    end
  end
end

--- Whether there is something to compute.
function Calls:is_busy() return #self.live > 0 end

--- One step of the model, and what comes before and after it.
function Calls:step()
  local now = now_s()
  look_after(self, now)
  admit(self, now)
  if #self.running == 0 then return end
  local ok, why = pcall(self.server.step, self.server)
  if not ok then fail_step(self, why) end
  self.metrics:add "kvlab_steps_total"
  collect(self, now_s())
end

--- Ends all calls; clients are told why.
---@param why kvlab.http.Problem
function Calls:close(why)
  for i = #self.live, 1, -1 do pcall(fail, self, self.live[i], why) end
  self.server:close()
end

return M
