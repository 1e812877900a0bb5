--- What the API answers: the objects of completions and chats, whole or in chunks.
local json = require "kvlab.json"
local rest = require("kvlab.slices").rest
local unicode = require "kvlab.text.unicode"
local version = require "kvlab.version"

local M = {}

local LEAST = -9999 -- stands for a log-probability of -inf, which JSON cannot hold
local ORDER = { order = { "id", "object", "created", "model", "system_fingerprint",
  "choices",
                          "usage", "index", "role", "content", "message", "delta",
                            "text" } }

-- ---- tokens ---------------------------------------------------------------------------

--- The bytes of a token; none where the vocabulary is padded.
local function bytes_of(tokenizer, id)
  return tokenizer:token_of(id) and tokenizer:bytes_of(id) or ""
end

--- The text of a token. If its bytes are not a complete character, the form in which the
-- API writes such bytes.
local function name_of(tokenizer, id)
  local bytes = bytes_of(tokenizer, id)
  if unicode.repaired(bytes) == bytes then return bytes end
  return "bytes:" .. bytes:gsub(".", function(c) return ("\\x%02x"):format(c:byte()) end)
end

local function bounded(x) return math.max(x, LEAST) end

--- Log-probabilities of tokens as completions have them.
---@param tokenizer kvlab.text.Tokenizer
---@param list table[]   { id =, logprob =, top = }; without logprob for the first
--                       of a prompt
---@param offset integer how many characters come before them
---@return table object
---@return integer offset  of what follows
function M.completion_logprobs(tokenizer, list, offset)
  local out = { tokens = json.array {}, token_logprobs = json.array {},
                top_logprobs = json.array {}, text_offset = json.array {} }
  for i, one in ipairs(list) do
    local name = name_of(tokenizer, one.id)
    out.tokens[i], out.text_offset[i] = name, offset
    out.token_logprobs[i] = one.logprob and bounded(one.logprob) or json.null
    out.top_logprobs[i] = json.null
    if one.top and one.top[1] then
      local top = { [name] = bounded(one.logprob) }
      for _, other in ipairs(one.top) do
        local key = name_of(tokenizer, other.id)
        top[key] = math.max(top[key] or LEAST, bounded(other.logprob))
      end
      out.top_logprobs[i] = top
    end
    local _, continued = bytes_of(tokenizer, one.id):gsub("[\128-\191]", "")
    offset = offset + #bytes_of(tokenizer, one.id) - continued
    rest()
  end
  return out, offset
end

local function chat_token(tokenizer, id, logprob)
  local bytes = json.array { bytes_of(tokenizer, id):byte(1, -1) }
  return { token = name_of(tokenizer, id), logprob = bounded(logprob), bytes = bytes }
end

--- Log-probabilities of tokens as chats have them.
function M.chat_logprobs(tokenizer, list)
  local content = json.array {}
  for i, one in ipairs(list) do
    content[i] = chat_token(tokenizer, one.id, one.logprob)
    content[i].top_logprobs = json.array {}
    for j, other in ipairs(one.top) do
      content[i].top_logprobs[j] = chat_token(tokenizer, other.id, other.logprob)
    end
    rest()
  end
  return { content = content, refusal = json.null }
end

-- ---- objects --------------------------------------------------------------------------

--- How many tokens a call took.
function M.usage(call)
  local prompt, generated = 0, 0
  for _, p in ipairs(call.asked.prompts) do prompt = prompt + #p.ids end
  for _, job in ipairs(call.jobs) do
    generated = generated + (job.drops and 0 or #job.own.answer.ids)
  end
  return { prompt_tokens = prompt, completion_tokens = generated,
           total_tokens = prompt + generated }
end

--- The fields that every object of a call has.
local function frame(call, choices, is_chunk)
  local kind = not call.asked.is_chat and "text_completion"
    or is_chunk and "chat.completion.chunk" or "chat.completion"
  return { id = call.id, object = kind, created = call.created, model = call.model,
           system_fingerprint = "kvlab-" .. version, choices = json.array(choices) }
end

--- The tokens of an answer with their log-probabilities, from token `first` on; those of
-- the prompt too, if it is echoed and nothing was sent yet.
local function listed(job, first)
  local list, r = {}, job.own.running
  if job.call.asked.echo and first == 1 then
    for i, id in ipairs(job.prompt.ids) do
      local one = r and r.prompt_logprobs and r.prompt_logprobs[i] or {}
      list[i] = { id = id, logprob = one.logprob, top = one.top }
    end
  end
  for i = first, job.drops and 0 or #job.own.answer.ids do
    local one = r.logprobs[i]
    list[#list + 1] = { id = job.own.answer.ids[i], logprob = one.logprob, top = one.top }
  end
  return list
end

--- The log-probabilities of tokens that were not sent yet: a list, which `encode` writes.
local function logprobs_of(job)
  local asked, first = job.call.asked, (job.sent or 0) + 1
  if not asked.logprobs then return json.null end
  local list = listed(job, first)
  list.job, job.sent = job, #job.own.answer.ids
  return list
end

local function written(tokenizer, list)
  local job = list.job
  if job.call.asked.is_chat then return M.chat_logprobs(tokenizer, list) end
  local object, offset = M.completion_logprobs(tokenizer, list, job.offset or 0)
  job.offset = offset
  return object
end

--- Why an answer ended, as the API says it.
local function reason_of(job)
  local reason = job.own.answer.finish_reason
  return reason == "stop" and "stop" or "length"
end

--- The text of a prompt that is echoed.
function M.echo(tokenizer, prompt)
  return prompt.text or tokenizer:decode(prompt.ids, { special = true })
end

--- The whole answer of a call.
function M.whole(tokenizer, call)
  local choices, asked = {}, call.asked
  for i, job in ipairs(call.jobs) do
    local text = not job.drops and job.own.answer.text or ""
    local choice = { index = job.index, finish_reason = reason_of(job),
                     logprobs = logprobs_of(job) }
    if asked.is_chat then
      choice.message = { role = "assistant", content = text, refusal = json.null }
    else
      choice.text = (asked.echo and M.echo(tokenizer, job.prompt) or "") .. text
    end
    choices[i] = choice
  end
  local object = frame(call, choices)
  object.usage = M.usage(call)
  return object
end

--- A chunk of one choice. `text` nil: the first of a chat, or the last of a choice.
---@param job table
---@param text string|nil
---@param is_last boolean
---@param extra table|nil  what kvlab adds
function M.chunk(job, text, is_last, extra)
  local choice = { index = job.index, finish_reason = is_last and reason_of(job)
    or json.null,
                   kvlab = extra, logprobs = json.null }
  if text or is_last then choice.logprobs = logprobs_of(job) end
  if job.call.asked.is_chat then
    choice.delta = {}
    if not job.has_role then
      choice.delta.role, choice.delta.content, job.has_role = "assistant", "", true
    end
    if text then choice.delta.content = text end
  else
    choice.text = text or ""
  end
  return frame(job.call, { choice }, true)
end

--- The chunk with the usage, after all others.
function M.usage_chunk(call)
  local object = frame(call, {}, true)
  object.usage = M.usage(call)
  return object
end

-- ---- their JSON -----------------------------------------------------------------------

--- How many log-probabilities an object holds; writing them is most of the work of its
-- JSON.
---@param object table  of `whole`, `chunk` or `usage_chunk`
---@return integer
function M.size(object)
  local size = 0
  for _, choice in ipairs(object.choices) do
    local list = choice.logprobs
    if list ~= json.null then
      size = size + #list * (1 + list.job.call.asked.logprobs)
    end
  end
  return size
end

--- The JSON of an answer, in slices. The chunks of a choice are encoded in their order,
-- each of them once.
---@param object table
---@param tokenizer? kvlab.text.Tokenizer  where there may be log-probabilities
---@return string
function M.encode(object, tokenizer)
  for _, choice in ipairs(object.choices or {}) do
    local list = choice.logprobs
    if list ~= json.null then choice.logprobs = written(tokenizer, list) end
  end
  return json.encode(object, ORDER)
end

return M
