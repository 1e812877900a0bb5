--- The chat of a request: its messages, tools, and what else a template reads, in the
-- form that the tokenizer's chat takes.
local fields = require "kvlab.http.fields"
local problem = require "kvlab.http.problem"
local read_json = require("kvlab.text.template.json").read
local text = require "kvlab.text.template.text"
local value = require "kvlab.text.template.value"

local M = {}

-- ---- fields ---------------------------------------------------------------------------

local TOOLS_MOST = 1024

local function tool_choice(name, x)
  if x ~= "none" then
    problem.wrong(name, ('%s is %s; this server supports only "none": the model is shown '
      .. "the tools, and its calls are text"):format(name,
      type(x) == "string" and problem.quoted(x) or "an object"), "unsupported_value")
  end
  return x
end

local function list(name, x)
  local items = fields.list(fields.object, TOOLS_MOST)(name, x)
  return #items > 0 and items or nil
end

--- The fields of a chat, beside those that completions have, too.
---@param limits table
function M.fields(limits)
  return {
    messages = fields.list(fields.object, limits.messages), tools = list,
    tool_choice = tool_choice, documents = list, chat_template_kwargs = fields.object,
  }
end

--- The value of a JSON text, or nil and why.
local function read(source)
  local ok, x = pcall(read_json, source)
  if ok then return x end
  if type(x) ~= "string" then error(x, 0) end -- what ends a task
  return nil, x
end

local function any(_, x) return x end

local MESSAGE = {
  role = fields.string, content = any, name = fields.string, refusal = fields.ignored,
  tool_calls = fields.list(fields.object, TOOLS_MOST), tool_call_id = fields.string,
  reasoning_content = fields.string, reasoning = fields.string, thinking = fields.string,
}

-- ---- messages -------------------------------------------------------------------------

--- The text of a message: a string, or parts of type text.
local function content_of(where, x)
  if text.is(x) then return x end
  if value.kind(x) ~= "list" or #x.items == 0 then
    problem.wrong(where, where .. " is no string and no array of parts")
  end
  local parts = {}
  for i, part in ipairs(x.items) do
    local at = ("%s[%d]"):format(where, i - 1)
    local kind = value.is_dict(part) and value.get(part, "type")
    if not kind or not value.equal(kind, "text") then
      problem.wrong(at, at .. ' is no part of type "text", the only one that this '
        .. "server supports", "unsupported_value")
    end
    parts[i] = value.get(part, "text")
    if not text.is(parts[i]) then problem.wrong(at, at .. ".text is no string") end
  end
  return text.join(parts)
end

--- A tool call. Clients send its arguments as JSON text; templates read them as a table,
-- so this decodes them.
local function call_of(where, call)
  local fn, out, inner = value.get(call, "function"), value.dict(), value.dict()
  if not value.is_dict(fn) then
    problem.wrong(where, where .. ".function is no object")
  end
  for _, key in ipairs(fn.order) do value.put(inner, key, value.get(fn, key)) end
  local given = value.get(fn, "arguments")
  if text.is(given) then
    local x, why = read(text.bytes(given))
    if x == nil then
      problem.wrong(where, ("%s.function.arguments is no JSON: %s"):format(where, why))
    end
    value.put(inner, "arguments", x)
  end
  for _, key in ipairs(call.order) do value.put(out, key, value.get(call, key)) end
  value.put(out, "function", inner)
  return out
end

local ROLES = { developer = "system" } -- the name that newer clients use
local IGNORED = { refusal = true }

local function message_of(where, given)
  local out, calls = value.dict(), value.get(given, "tool_calls")
  for _, key in ipairs(given.order) do
    if not IGNORED[text.bytes(key)] then value.put(out, key, value.get(given, key)) end
  end
  local role, content = value.get(given, "role"), value.get(given, "content")
  value.put(out, "role", ROLES[text.bytes(role)] or role)
  if value.is_sequence(calls) then
    local list_of = {}
    for i, call in ipairs(calls.items) do
      list_of[i] = call_of(("%s.tool_calls[%d]"):format(where, i - 1), call)
    end
    value.put(out, "tool_calls", value.sequence(list_of))
    if content == nil or content == value.NONE then return out end
  end
  value.put(out, "content", content_of(where .. ".content", content))
  return out
end

-- ---- the chat -------------------------------------------------------------------------

--- Checks the messages; returns whether one of them has a structure.
local function check(messages)
  if not messages then problem.wrong("messages", "messages is missing") end
  if #messages == 0 then problem.wrong("messages",
    "messages is empty, expected one or more") end
  local has_calls = false
  for i, given in ipairs(messages) do
    local one = fields.take(given, MESSAGE)
    if not one.role then
      local name = ("messages[%d].role"):format(i - 1)
      problem.wrong(name, name .. " is missing")
    end
    has_calls = has_calls or one.tool_calls ~= nil
  end
  return has_calls
end

--- The JSON text of a part of the request, which keeps the order of keys; if the part has
-- no structure, the value that was read.
local function ordered(o, body, has_calls)
  if not (has_calls or o.tools or o.documents or o.chat_template_kwargs) then
    return function(name) return value.of(o[name], name) end
  end
  local object, why = read(body)
  if object == nil then problem.wrong(nil, "the body, " .. why, "invalid_json") end
  return function(name) return value.get(object, name) end
end

--- The messages of a chat and the options of tokenizer:chat.
---@param o table      the fields of the request
---@param body string  its JSON text
---@return any messages
---@return table options
function M.read(o, body)
  local field, out = ordered(o, body, check(o.messages)), {}
  if o.tools and not o.tool_choice then
    problem.wrong("tool_choice", 'tool_choice is missing, expected "none": this server '
      .. "shows the tools to the model, and gives its calls as text", "unsupported_value")
  end
  for i, given in ipairs(field("messages").items) do
    out[i] = message_of(("messages[%d]"):format(i - 1), given)
  end
  local options = { add_generation_prompt = o.add_generation_prompt ~= false }
  for _, name in ipairs { "tools", "documents" } do
    if o[name] then options[name] = field(name) end
  end
  if o.chat_template_kwargs then
    local variables = field "chat_template_kwargs"
    options.variables = {}
    for _, key in ipairs(variables.order) do
      options.variables[text.bytes(key)] = value.get(variables, key)
    end
  end
  return value.sequence(out), options
end

return M
