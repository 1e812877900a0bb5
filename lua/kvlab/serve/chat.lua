--- A conversation on the terminal. Each answer continues the conversation so far. The
-- server keeps the conversation's blocks, so each turn reads only the new tokens. Where
-- the cache has tables by layer or head, the request of a turn continues from the tokens
-- that the previous request holds; under a policy that evicts, these are the tokens that
-- were not evicted.
local C = require("kvlab.library").C
local chat = require "kvlab.text.chat"
local generate = require "kvlab.serve.generate"
local options = require "kvlab.options"
local serve = require "kvlab.serve.serve"

local ffi = require "ffi"

ffi.cdef "int isatty(int fd);"

local M = {}

--- The options of model:chat: those of kv.generate, the system prompt, variables of the
-- chat template, and what reads.
M.KNOWN = { system = options.string, read = options.callable,
            variables = chat.KNOWN.variables }
for name, kind in pairs(generate.KNOWN) do M.KNOWN[name] = kind end

local MAX_TOKENS = 512 -- of an answer, unless max_tokens says otherwise

--- Calls fn. Returns whether Ctrl-C came, and what fn returned; raises other errors.
local function watched(fn, ...)
  local ok, result = pcall(fn, ...)
  if C.kvl_interrupted() ~= 0 then
    C.kvl_interrupt(0)
    debug.sethook()
    return true
  end
  if not ok then error(result, 0) end
  return false, result
end

--- The next line that is typed; nil at the end of the input.
local function read_line()
  if ffi.C.isatty(0) ~= 0 then
    io.stdout:write "> "
    io.stdout:flush()
  end
  return (io.read "*l")
end

--- How many of the first ids have the same bytes as `tokens`; nil if no number of them
-- has. The first `prompt` of both must be equal.
local function covered(tokenizer, tokens, prompt, ids)
  for i = 1, prompt do if ids[i] ~= tokens[i] then return nil end end
  local said, text = {}, ""
  for i = prompt + 1, #tokens do
    if not tokenizer:token_of(tokens[i]) then return nil end -- vocabularies may be padded
    said[#said + 1] = tokenizer:bytes_of(tokens[i])
  end
  said = table.concat(said)
  for i = prompt, #ids do
    if i > prompt then text = text .. tokenizer:bytes_of(ids[i]) end
    if #text >= #said then return text == said and i or nil end
  end
end

--- The ids of a conversation. If it continues from the tokens of the request `held`, the
-- ids begin with exactly these tokens; their text is not tokenized again, because this
-- might give other tokens. If it does not, the request that is returned is nil.
local function continued(tokenizer, held, ids)
  local tokens = held and { unpack(held.tokens, 1, held.num_tokens) }
  while tokens and #tokens >= held.seq:length() do -- without what ends an answer, too
    local n = covered(tokenizer, tokens, math.min(held.prompt_length, #tokens), ids)
    if n and n < #ids then
      for i = n + 1, #ids do tokens[#tokens + 1] = ids[i] end
      return tokens, held
    end
    tokens[#tokens] = nil
  end
  return ids, nil
end

--- Answers ids. The conversation holds what the answer has computed, even if the answer
-- was cut off.
local function generated(talk, ids, o)
  local server, last = talk.server, talk.job
  if not talk.holds then return generate.generate(server, ids, o) end
  local held = last and (last.running or last.from)
  held = held and server.holding[held] and held or nil
  local tokens, from = continued(talk.tokenizer, held, ids)
  if held and not from then server:cancel(held) end
  local job = generate.job(server.executor.engine, tokens, o, 1, nil, from)
  job.request.hold, talk.job = true, job
  generate.run(server, { job })
  return job.answer
end

--- The assistant's text after the messages, as far as it came.
local function answer(talk, messages, variables, o)
  local tokenizer = talk.tokenizer
  local parts, given = {}, {}
  for name, value in pairs(o) do given[name] = value end
  given.on_text = function(text, got)
    parts[#parts + 1] = text
    io.stdout:write(text)
    io.stdout:flush()
    return not o.on_text or o.on_text(text, got)
  end
  local _, ids = tokenizer:chat(messages, { add_generation_prompt = true,
                                            variables = variables })
  local ok, why, got = pcall(watched, generated, talk, ids, given)
  io.stdout:write "\n"
  if not ok then error(why, 0) end
  if got and got.finish_reason == "error" then error(got.error, 0) end
  return table.concat(parts)
end

local function converse(talk, messages, given, o)
  local read = given.read or read_line
  while true do
    local is_interrupted, line = watched(read)
    if is_interrupted then
      io.stdout:write "\n"
    elseif not line then
      return
    elseif line:find "%S" then
      messages[#messages + 1] = { role = "user", content = line }
      local text = answer(talk, messages, given.variables, o)
      messages[#messages + 1] = { role = "assistant", content = text }
    end
  end
end

--- Converses until the input ends.
---@param engine table
---@param tokenizer kvlab.text.Tokenizer
---@param given table  options of model:chat, checked
function M.run(engine, tokenizer, given)
  local o, messages = {}, {}
  for name, value in pairs(given) do o[name] = value end
  if o.system then messages[1] = { role = "system", content = o.system } end
  o.system, o.read, o.variables = nil, nil, nil
  o.max_tokens = o.max_tokens or MAX_TOKENS
  local server = serve.serve { engine = engine }
  local talk = { server = server, tokenizer = tokenizer,
                 holds = engine.cache.tables ~= "one" }
  local ok, why = pcall(converse, talk, messages, given, o)
  server:close()
  if not ok then error(why, 0) end
end

return M
