--- Answers to prompts: `kv.generate`. A server runs the prompts together, the tokenizer
-- turns tokens into text as they come.
--
--   local answer = kv.generate(engine, "The capital of France is",
--     { tokenizer = tokenizer, max_tokens = 20, temperature = 0.7, seed = 3 })
--   print(answer.text, answer.finish_reason)
local arguments = require "kvlab.arguments"
local draft = require "kvlab.serve.draft"
local evictor = require "kvlab.policy.evictor"
local options = require "kvlab.options"
local pages = require "kvlab.serve.pages"
local sampler = require "kvlab.serve.sampler"
local serve = require "kvlab.serve.serve"
local stream = require "kvlab.text.stream"

local M = {}

local MAX_TOKENS = 128 -- unless max_tokens says otherwise

---@class kvlab.Answer
---@field index integer         of its prompt, from 1
---@field ids integer[]         the tokens, also those of a stop string
---@field text string|nil       without special tokens and ids that the tokenizer does
--                              not have, up to a stop string; nil without a tokenizer
---@field finish_reason string  "length": max_tokens; "stop": a stop string or stop token;
--                              "cancelled": on_text returned false; "error": it raised,
--                              or the logits give no token
---@field stop string|nil       the stop string that ended it
---@field error any             what on_text raised, or what is wrong with the logits
---@field draft kvlab.serve.Drafts|nil  what drafts did, where they are asked for
---@field logprobs table[]|nil  of each token { id =, logprob =, top = { { id =,
--                              logprob = }, … } }, where they are asked for

local OF_PROMPT = {
  max_tokens = options.whole, stop = stream.STOPS, ignore_eos = options.boolean,
  stop_tokens = options.list_of(options.whole), on_text = options.callable,
  draft = draft.KIND,
}
for name, kind in pairs(sampler.KNOWN) do OF_PROMPT[name] = kind end
local OPTIONS = {
  tokenizer = options.like("a tokenizer, as kv.tokenizer opens it", "encode", "stream"),
}
for name, kind in pairs(OF_PROMPT) do OPTIONS[name] = kind end

--- The options of kv.generate.
M.KNOWN = OPTIONS

-- ---- prompts --------------------------------------------------------------------------

local function fail(i, words, ...)
  options.fail(("generate: prompt %d %s"):format(i, words:format(...)))
end

--- The prompts as a list, and whether it was only one.
local function listed(prompts)
  local is_one = type(prompts) == "string" or type(prompts[1]) == "number"
    or prompts.prompt ~= nil
  if is_one then return { prompts }, true end
  if #prompts == 0 then
    options.fail "generate: prompts is empty, expected a prompt or a list of them"
  end
  return prompts, false
end

--- The options of one prompt: its own over those of all.
local function options_of(given, o, i)
  if type(given) ~= "table" or given.prompt == nil then return o, given end
  local own, all = {}, {}
  for name, value in pairs(given) do own[name] = value end
  own.prompt = nil
  options.check(("generate: prompt %d"):format(i), own, OF_PROMPT)
  for name, value in pairs(o) do all[name] = value end
  for name, value in pairs(own) do all[name] = value end
  return all, given.prompt
end

--- The tokens of a prompt, checked.
local function tokens_of(given, o, i, vocab)
  if type(given) == "string" then
    if not o.tokenizer then
      fail(i, "is a text, expected ids, as there is no tokenizer")
    end
    given = o.tokenizer:encode(given)
  elseif type(given) ~= "table" then
    fail(i, "is %s, expected a text or a list of ids", options.shown(given))
  end
  if #given == 0 then fail(i, "is empty, expected a token or more") end
  for at = 1, #given do
    local id = given[at]
    if type(id) ~= "number" or id < 0 or id >= vocab or id % 1 ~= 0 then
      fail(i, "has token %d = %s, expected 0 ... %d", at - 1, tostring(id), vocab - 1)
    end
  end
  return given
end

--- The same under a policy that evicts: the text may be longer than the cache.
local function room_evicting(engine, attention, seq, count)
  local context, name = engine.model.config.context, attention.decode_policy.name
  local most = math.min(context or math.huge, evictor.LONGEST) - count
  local room = pages.room(engine, attention, seq, count - (seq and seq:length() or 0),
    most)
  if most < 0 or room == most then
    return most + 1, (context == count + most and "the model's context is %d"
      or "tokens are evicted from texts of at most %d"):format(count + most)
  elseif room < 0 then
    return 0, ("the engine's cache of %d pages has no room for it and for what policy %s "
      .. "keeps of it"):format(engine.cache.pages, name)
  end
  return room + 1, ("the engine's cache has room for %d under policy %s"):format(
    count + room, name)
end

--- How many tokens may follow a prompt of `count` tokens; less than 1 if it is too long.
---@param engine table
---@param count integer
---@param attention? kvlab.Attention  whose policies serve it (the engine's)
---@param seq? kvlab.Sequence  that holds the first of these tokens
---@return integer most
---@return string why  what the limit is
function M.room(engine, count, attention, seq)
  attention = attention or engine.attention
  if attention.evictor then return room_evicting(engine, attention, seq, count) end
  local cache = engine.cache
  local blocks = math.min(engine.max_blocks or cache.blocks, cache.blocks)
  local limit, what = blocks * cache.block_size,
    ("the engine's cache has room for %d"):format(blocks * cache.block_size)
  local context = engine.model.config.context
  if context and context < limit then
    limit, what = context, ("the model's context is %d"):format(context)
  end
  return limit - count + 1, what -- the last token is never read
end

--- How many tokens may follow a prompt; raises if it asks for more than there is room
-- for.
local function room(engine, count, asked, i, attention, seq)
  local most, what = M.room(engine, count, attention, seq)
  if most < 1 then fail(i, "has %d tokens, but %s", count, what) end
  if asked and asked > most then
    fail(i, "has %d tokens and max_tokens is %d, but %s", count, asked, what)
  end
  return math.min(asked or MAX_TOKENS, most)
end

--- The tokens that end a text, as a tokenizer and a model's config name them.
---@param engine table
---@param tokenizer kvlab.text.Tokenizer
---@return integer[]
function M.ends(engine, tokenizer)
  local config = engine.model and engine.model.config
  local list = { unpack(config and config.ends or {}) }
  list[#list + 1] = tokenizer.eos
  list[#list + 1] = tokenizer.eot
  return list
end

--- The tokens that end an answer.
local function stop_tokens(engine, o)
  local list = { unpack(o.stop_tokens or {}) }
  local ends = o.tokenizer and not o.ignore_eos and M.ends(engine, o.tokenizer)
  for _, id in ipairs(ends or {}) do list[#list + 1] = id end
  return list
end

--- The tokens after the first n.
local function rest_of(tokens, n)
  local rest = {}
  for i = n + 1, #tokens do rest[i - n] = tokens[i] end
  return rest
end

--- A prompt, checked, with all that its request needs: job.request are the options that
-- server:submit will get, job.answer becomes the answer.
---@param engine table
---@param given string|table  see M.generate
---@param o table             options of M.generate, checked
---@param i integer           which prompt it is, for errors
---@param attention? kvlab.Attention  whose policies serve it (the engine's)
---@param from? kvlab.Request  that holds the first tokens of the prompt, see
--                            server:continue
---@return table job
function M.job(engine, given, o, i, attention, from)
  local own, prompt = options_of(given, o, i)
  for _, name in ipairs { "stop", "on_text" } do
    if own[name] and not own.tokenizer then
      options.fail(("generate: %s is %s, expected none, as there is no tokenizer"):format(
        name, options.shown(own[name])))
    end
  end
  local tokens = tokens_of(prompt, own, i, engine.model.config.vocab)
  local job = { tokens = tokens, on_text = own.on_text, parts = {}, answer = {
    index = i, ids = {} } }
  job.stream = own.tokenizer and own.tokenizer:stream { stop = own.stop }
  job.from = from
  job.request = { tokens = from and rest_of(tokens, from.seq:length()) or tokens,
                  stop_tokens = stop_tokens(engine, own), draft = own.draft,
                  attention = attention,
                  max_tokens = room(engine, #tokens, own.max_tokens, i, attention,
                    from and from.seq) }
  for name in pairs(sampler.KNOWN) do job.request[name] = own[name] end
  return job
end

-- ---- answers --------------------------------------------------------------------------

--- Adds text to an answer. Returns false when on_text wants no more.
local function emit(job, text)
  if text == "" then return true end
  job.parts[#job.parts + 1] = text
  return not job.on_text or job.on_text(text, job.answer) ~= false
end

--- A token of a request has come.
local function add(server, job, r, id)
  local answer = job.answer
  answer.ids[#answer.ids + 1] = id
  if not job.stream then return end
  local is_known = job.stream.tokenizer:token_of(id) -- vocabularies may be padded
  job.is_cancelled = not emit(job, is_known and job.stream:push(id) or "")
  if job.is_cancelled or job.stream.stopped then server:cancel(r) end
end

--- Completes the answer of a job whose request has finished.
---@param job table
function M.finish(job)
  local r, answer = job.running, job.answer
  job.is_done = true
  answer.finish_reason, answer.error = r.finish_reason, r.error
  if job.stream then
    if r.finish_reason ~= "error" and not job.is_cancelled then
      local ok, why = pcall(emit, job, job.stream:finish())
      if not ok then answer.finish_reason, answer.error = "error", why end
    end
    answer.text, answer.stop = table.concat(job.parts), job.stream.stopped
    if answer.stop and not job.is_cancelled then answer.finish_reason = "stop" end
  end
  for i, one in ipairs(r.logprobs or {}) do one.id = answer.ids[i] end
  answer.logprobs = r.logprobs
  answer.draft = r.draft and draft.summary(r.draft)
end

--- Submits a job to a server with the engine that the job was made for.
---@param server kvlab.Server
---@param job table
function M.start(server, job)
  local o = job.request
  if o.max_tokens == 0 then
    job.is_done, job.answer.finish_reason = true, "length"
    job.answer.text = job.stream and ""
    return
  end
  o.on_token = function(r, id) add(server, job, r, id) end
  if job.from then job.running = assert(server:continue(job.from, o))
  else job.running = assert(server:submit(o)) end
end

local function answer(server, jobs)
  for _, job in ipairs(jobs) do M.start(server, job) end
  local left
  repeat
    left = false
    for _, job in ipairs(jobs) do
      if not job.is_done and job.running.state == "finished" then M.finish(job) end
      left = left or not job.is_done
    end
    if left then server:step() end
  until not left
end

--- Answers jobs. However this ends, none of their requests runs afterwards.
---@param server kvlab.Server  with the engine that the jobs were made for
---@param jobs table[]
function M.run(server, jobs)
  local ok, why = pcall(answer, server, jobs)
  for _, job in ipairs(jobs) do
    local r = job.running
    if r and r.state ~= "finished" then pcall(server.cancel, server, r) end
  end
  if not ok then error(why, 0) end
end

local ENGINE = options.like("a model's engine", "cache", "attention", "decode")
local SERVER = { "a server with one", function(x)
  return type(x) == "table" and type(x.executor) == "table" and x.executor.engine ~= nil
end }

--- Answers prompts, all of them together. The same request gets the same answer whatever
-- else is in the batch, except where the rounding of logits changes it.
---@param to table  a model's engine, or a server with one; a server keeps the prompts'
--                  blocks for the next call
---@param prompts string|table  a prompt or a list of them; each is a text, a list of
--                  token ids, or { prompt = text or ids, … } with options of its own
---@param o? table  tokenizer (needed for text); max_tokens (128, or what there is room
--                  for); temperature (0: the likeliest token), top_k (0: all), top_p (1),
--                  min_p (0), repetition_penalty (1), seed (0); stop: strings that end an
--                  answer; stop_tokens: ids that end an answer, besides those of the
--                  tokenizer (eos, eot) and of the model's config (eos_token_id);
--                  ignore_eos: these do not end it (false); logprobs: keeps the
--                  log-probability of each token and of that many of the likeliest;
--                  draft: { ngram = 3, tokens = 8 } drafts up to 8 tokens by looking up
--                  the last 3 in the text so far, { policy = "quest", ratio = 0.05,
--                  tokens = 4 } drafts 4 by a policy, tokens = "auto" as many as have
--                  paid so far (draft.lua); on_text(text, answer): is given the text as
--                  it comes, and ends its answer by returning false
---@return kvlab.Answer|kvlab.Answer[]  one, or a list where prompts is a list
function M.generate(to, prompts, o)
  o = options.check("generate", o, OPTIONS)
  local engine = to.executor and to.executor.engine or to
  local list, is_one = listed(prompts)
  local jobs, answers = {}, {}
  for i, given in ipairs(list) do jobs[i] = M.job(engine, given, o, i) end
  local server = to.executor and to or serve.serve { engine = engine }
  local ok, why = pcall(M.run, server, jobs)
  for i, job in ipairs(jobs) do answers[i] = job.answer end
  local is_closed, problem = true, nil
  if server ~= to then is_closed, problem = pcall(server.close, server) end
  if not ok then error(why, 0) end
  if not is_closed then error(problem, 0) end
  return is_one and answers[1] or answers
end

M.generate = arguments.of("generate", M.generate, {
  to = options.either(ENGINE, SERVER),
  prompts = options.either({ "a text", options.string[2] }, options.table),
})

return M
