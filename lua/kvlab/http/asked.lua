--- What a request asks for: reads the JSON of /v1/completions and /v1/chat/completions
-- into what both need: prompts as token ids, options of kv.generate, and how to answer.
local chats = require "kvlab.http.chats"
local draft = require "kvlab.serve.draft"
local fields = require "kvlab.http.fields"
local generate = require "kvlab.serve.generate"
local json = require "kvlab.json"
local problem = require "kvlab.http.problem"
local rest = require("kvlab.slices").rest

local M = {}

local COUNTS = 2 ^ 31 - 1 -- the largest number of a count
local SEEDS = 2 ^ 53 -- a seed is below this; others are taken modulo it

local function is_none(x)
  return x == json.null or x == false or x == 0 or x == "" or type(x) == "table"
    and next(x) == nil
end

local PROMPTS_MOST = 256
local STOP_BYTES = 1024 -- each token of an answer is compared with all of a stop string
local IDS_PART = 2 ^ 14 -- between two rests
local IDS_MOST = 2 ^ 17 -- that are made text again at once, or the context
local STREAM_OPTIONS = { include_usage = fields.boolean }

local function stream_options(name, x)
  return fields.take(fields.object(name, x), STREAM_OPTIONS)
end

local function seed(name, x)
  return fields.whole(-2 ^ 53, 2 ^ 63)(name, x) % SEEDS
end

local draft_tokens = fields.whole(1, draft.MOST)
local DRAFT = {
  policy = fields.string, policy_options = fields.object, ngram = fields.whole(1, 64),
  reuse = fields.boolean,
  tokens = function(name, x) return x == "auto" and x or draft_tokens(name, x) end,
}

--- A draft: an object of these fields, or false for none.
local function draft_of(name, x)
  if x == false then return false end
  if type(x) ~= "table" or json.is_array(x) then
    fields.refuse(name, x, "an object or false")
  end
  local known = {}
  for field, kind in pairs(DRAFT) do
    known[field] = function(_, value) return kind("draft." .. field, value) end
  end
  local o = fields.take(x, known)
  if o.policy and o.ngram then
    problem.wrong(name, "both draft.ngram and draft.policy are given, expected one of "
      .. "them")
  end
  local of_policy = o.policy_options and "policy_options" or o.reuse ~= nil and "reuse"
  if of_policy and not o.policy then
    problem.wrong(name, ("draft.%s is given without draft.policy"):format(of_policy))
  end
  return o
end

--- The fields of both kinds.
local function shared(limits)
  return {
    model = fields.string, max_tokens = fields.whole(0, COUNTS),
    temperature = fields.number(0, 100), top_p = fields.number(0, 1),
    top_k = fields.whole(-1, COUNTS), min_p = fields.number(0, 1),
    repetition_penalty = fields.number(0.01, 100), seed = seed,
    n = fields.whole(1, limits.n), stop = fields.strings(limits.stops),
    stop_token_ids = fields.list(fields.whole(0, COUNTS), 64),
    ignore_eos = fields.boolean, stream = fields.boolean, stream_options = stream_options,
    policy = fields.string, policy_options = fields.object, watch_blocks = fields.boolean,
    draft = draft_of,
    presence_penalty = fields.only("0", is_none),
    frequency_penalty = fields.only("0", is_none),
    logit_bias = fields.only("none", is_none),
    user = fields.ignored, metadata = fields.ignored, store = fields.ignored,
    service_tier = fields.ignored, safety_identifier = fields.ignored,
    prompt_cache_key = fields.ignored,
  }
end

local function of_completions(limits)
  local all = shared(limits)
  all.prompt = function(_, x) return x end
  all.echo, all.logprobs = fields.boolean, fields.whole(0, limits.logprobs)
  all.suffix = fields.only("none", is_none)
  all.best_of = fields.only("1", function(x) return x == 1 end)
  return all
end

local function is_text_format(x) return type(x) == "table" and x.type == "text" end

local function of_chat(limits)
  local all = shared(limits)
  for name, kind in pairs(chats.fields(limits)) do all[name] = kind end
  all.logprobs, all.top_logprobs = fields.boolean, fields.whole(0, limits.logprobs)
  all.max_completion_tokens = all.max_tokens
  all.response_format = fields.only("text", is_text_format)
  all.functions = fields.only("none", is_none)
  all.function_call = fields.only("none", function(x) return x == "none" end)
  all.modalities = fields.only("text", function(x)
    return type(x) == "table" and #x == 1 and x[1] == "text"
  end)
  all.parallel_tool_calls = fields.ignored
  return all
end

-- ---- prompts --------------------------------------------------------------------------

--- Ids, checked.
local function ids_of(name, x, vocab)
  for i, id in ipairs(x) do
    if type(id) ~= "number" or id % 1 ~= 0 or id < 0 or id >= vocab then
      fields.refuse(("%s[%d]"):format(name, i - 1), id,
        ("a token id, 0 ... %d"):format(vocab - 1))
    end
    if i % IDS_PART == 0 then rest() end
  end
  return x
end

--- Raises the error that a prompt is too long. It does not say how long, because counting
-- would take as long as reading the whole prompt.
local function refuse_length(self, name)
  local most, why = generate.room(self.engine, 0)
  problem.wrong(name, ("the prompt has more than %d tokens, but %s"):format(most - 1,
    why), "context_length_exceeded")
end

--- How many tokens a prompt may have.
local function tokens_most(self) return (generate.room(self.engine, 0)) - 1 end

--- One prompt: its ids, and its text where there was one.
local function prompt_of(self, name, x)
  if type(x) == "string" then
    local ids = self.tokenizer:encode(x, { special = true, most = tokens_most(self) })
    if not ids then refuse_length(self, name) end
    if #ids == 0 then problem.wrong(name, name
      .. " is empty, expected a token or more") end
    return { ids = ids, text = x }
  end
  if type(x) ~= "table" or not json.is_array(x) then
    fields.refuse(name, x, "a string or an array of token ids")
  end
  if #x == 0 then problem.wrong(name, name .. " is empty, expected a token or more") end
  if #x > tokens_most(self) then refuse_length(self, name) end
  return { ids = ids_of(name, x, self.vocab) }
end

--- All prompts of a completion.
local function prompts_of(self, x)
  if x == nil then problem.wrong("prompt", "prompt is missing") end
  local is_list = type(x) == "table" and (type(x[1]) == "string" or type(x[1]) == "table")
  if not is_list then return { prompt_of(self, "prompt", x) } end
  if #x > PROMPTS_MOST then
    problem.wrong("prompt", ("prompt has %d items, expected %d or fewer"):format(#x,
      PROMPTS_MOST))
  end
  local out = {}
  for i, one in ipairs(x) do out[i] = prompt_of(self, ("prompt[%d]"):format(i - 1),
    one) end
  return out
end

--- The prompt that a chat is.
local function chat_of(self, o, body, most)
  local messages, options = chats.read(o, body)
  options.most = most
  local ok, text, ids = pcall(self.tokenizer.chat, self.tokenizer, messages, options)
  if not ok and problem.is(text) then error(text, 0) end -- the request was given up
  if not ok then
    problem.wrong("messages", (tostring(text):gsub("^[^\n]-:%d+: ", "")), "invalid_chat")
  end
  if not ids then refuse_length(self, "messages") end
  return { ids = ids, text = text }
end

-- ---- both -----------------------------------------------------------------------------

--- How many tokens the answer to a prompt has, at most.
---@param engine table
---@param attention kvlab.Attention  whose policies serve the request
---@param o table  that asked_of returned
---@param prompt table  of them
---@return integer
function M.length_of(engine, attention, o, prompt)
  local count, asked = #prompt.ids, o.max_tokens
  local most, why = generate.room(engine, count, attention)
  if most < 1 or asked and asked > most then
    problem.wrong(most < 1 and o.prompt_field or "max_tokens",
      ("the prompt has %d tokens%s, but %s"):format(count,
        asked and most >= 1 and (" and max_tokens is %d"):format(asked) or "", why),
      "context_length_exceeded")
  end
  return asked or math.min(o.default_tokens, most)
end

local function check_model(self, name)
  if name and name ~= self.name then
    error(problem.new(404, ("the model %s does not exist; this server has %q"):format(
      problem.quoted(name), self.name), { param = "model", code = "model_not_found" }), 0)
  end
end

--- What to generate, and how to answer.
local function asked_of(self, o, prompts, default)
  local top_k, n = o.top_k or 0, o.n or 1
  local out = {
    prompts = prompts, n = n, stream = o.stream or false, echo = o.echo or false,
    usage = o.stream_options and o.stream_options.include_usage or false,
    policy = o.policy, policy_options = o.policy_options, draft = o.draft,
    watch = o.watch_blocks or false, seed = o.seed,
    max_tokens = o.max_tokens or o.max_completion_tokens, default_tokens = default,
    prompt_field = o.messages and "messages" or "prompt",
    options = {
      tokenizer = self.tokenizer, temperature = o.temperature or 1,
      top_k = top_k > 0 and top_k or 0, top_p = o.top_p and math.max(o.top_p, 1e-9) or 1,
      min_p = o.min_p or 0, repetition_penalty = o.repetition_penalty or 1,
      stop_tokens = o.stop_token_ids, ignore_eos = o.ignore_eos,
    },
  }
  if o.stream_options and not o.stream then
    problem.wrong("stream_options",
      "stream_options is an object, expected none without stream")
  end
  local drafted, most = o.draft and o.draft.tokens, self.engine.chunk - 1
  if type(drafted) == "number" and drafted > most then
    problem.wrong("draft.tokens", ("draft.tokens is %d, expected at most %d"):format(
      drafted, most))
  end
  if out.watch and not out.stream then
    problem.wrong("watch_blocks", "watch_blocks is true, expected false without stream")
  end
  if out.watch and self.engine.uses_graphs then
    problem.wrong("watch_blocks",
      "watch_blocks is true, expected false, since this server "
      .. "replays its steps from graphs")
  end
  local tables = self.engine.cache.tables
  if out.watch and tables ~= "one" then
    problem.wrong("watch_blocks", ("watch_blocks is true, expected false, since this "
      .. "server's cache has tables by %s, whose pages are no blocks of all layers and "
      .. "heads"):format(tables))
  end
  for i, stop in ipairs(o.stop or {}) do
    if stop == "" then problem.wrong("stop", ("stop[%d] is empty"):format(i - 1)) end
    if #stop > STOP_BYTES then
      problem.wrong("stop", ("stop[%d] has %d bytes, expected %d or fewer"):format(i - 1,
        #stop, STOP_BYTES))
    end
  end
  if o.stop and o.stop[1] then out.options.stop = o.stop end
  return out
end

--- Makes the two readers for a server.
---@param self table  engine, tokenizer, vocab, name, limits
function M.new(self)
  local completions, chat = of_completions(self.limits), of_chat(self.limits)
  local readers = {}

  --- A request for /v1/completions.
  function readers.completion(object)
    local o = fields.take(object, completions)
    check_model(self, o.model)
    local asked = asked_of(self, o, prompts_of(self, o.prompt),
      self.limits.completion_tokens)
    asked.logprobs = o.logprobs
    return asked
  end

  --- A request for /v1/chat/completions; `body` is its JSON text.
  function readers.chat(object, body)
    local o = fields.take(object, chat)
    check_model(self, o.model)
    if o.max_tokens and o.max_completion_tokens then
      problem.wrong("max_tokens",
        "both max_tokens and max_completion_tokens are given, which "
        .. "are the same")
    end
    if o.top_logprobs and not o.logprobs then
      problem.wrong("top_logprobs", "top_logprobs needs logprobs to be true")
    end
    local asked = asked_of(self, o, { chat_of(self, o, body, tokens_most(self)) },
      self.limits.chat_tokens)
    asked.logprobs = o.logprobs and (o.top_logprobs or 0) or nil
    asked.is_chat = true
    return asked
  end

  local TOKENIZE = chats.fields(self.limits)
  TOKENIZE.model, TOKENIZE.prompt = fields.string, fields.string
  for _, name in ipairs { "add_special_tokens", "return_token_strs",
                          "add_generation_prompt" } do
    TOKENIZE[name] = fields.boolean
  end

  --- A request for /tokenize; `body` is its JSON text.
  function readers.tokenize(object, body)
    local o = fields.take(object, TOKENIZE)
    check_model(self, o.model)
    if o.messages then return chat_of(self, o, body).ids, o.return_token_strs end
    if not o.prompt then problem.wrong("prompt", "prompt is missing") end
    local is_bare = o.add_special_tokens == false or nil
    return self.tokenizer:encode(o.prompt, { special = true, bos = is_bare and false,
      eos = is_bare and false }), o.return_token_strs
  end

  local DETOKENIZE = { model = fields.string, tokens = fields.list(
    fields.whole(0, self.tokenizer.size - 1),
    math.max(IDS_MOST, self.engine.model.config.context or 0)) }

  --- A request for /detokenize.
  function readers.detokenize(object)
    local o = fields.take(object, DETOKENIZE)
    check_model(self, o.model)
    if not o.tokens then problem.wrong("tokens", "tokens is missing") end
    return o.tokens
  end

  return readers
end

return M
