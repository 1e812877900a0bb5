--- Writes chats as models were trained to read them, by the template of their files. A
-- template gets the same variables as from transformers' apply_chat_template.
local fail = require("kvlab.options").fail
local json = require "kvlab.text.template.json"
local hint = require("kvlab.words").hint
local options = require "kvlab.options"
local sorted = require "kvlab.sorted"
local template = require "kvlab.text.template.template"
local text = require "kvlab.text.template.text"
local value = require "kvlab.text.template.value"

local M = {}

-- ---- the template ---------------------------------------------------------------------

--- The source of the template that is asked for. With tools it is the template named
-- tool_use, as in transformers, unless tokenizer.template was set.
local function source_of(tokenizer, name, has_tools)
  local named, own = tokenizer.templates, tokenizer.template
  if not name and has_tools and own == named.default and named.tool_use then
    name = "tool_use"
  end
  local source = own
  if name and name ~= "default" then source = named[name] end
  if source then return source end
  if name or next(named) then
    fail(("chat: %s has no template %q, it has %s"):format(tokenizer.name,
      name or "default", table.concat(sorted.keys(named), ", ")))
  end
  return fail(("chat: %s has no chat template; to give it one, set its field `template` "
    .. "to the text of one"):format(tokenizer.name))
end

--- Calls fn, whose errors are about the template.
local function of_template(tokenizer, fn, ...)
  local ok, a, b = pcall(fn, ...)
  if ok then return a, b end
  if type(a) ~= "string" then error(a, 0) end -- what ends a task
  return fail(("chat: the template of %s, %s"):format(tokenizer.name, a))
end

--- The template of a source, which is parsed once.
local function parsed(tokenizer, source)
  local last = tokenizer.parsed
  if not last or last.source ~= source then
    last = { source = source, template = of_template(tokenizer, template.parse, source) }
    tokenizer.parsed = last
  end
  return last.template
end

-- ---- what it is given -----------------------------------------------------------------

--- A Lua value, given as it is or as JSON text.
local function read(name, given)
  local is_json = type(given) == "string"
  local ok, x = pcall(is_json and json.read or value.of, given, name)
  if ok then return x end
  if type(x) ~= "string" then error(x, 0) end -- what ends a task
  return fail(is_json and ("chat: %s is JSON text, %s"):format(name, x) or "chat: " .. x)
end

--- A list of dicts. An empty table of Lua is an empty list.
local function list_of(name, given)
  local is_empty = type(given) == "table" and next(given) == nil
  local list = is_empty and value.sequence {} or read(name, given)
  local is_list = value.kind(list) == "list"
  for _, item in ipairs(is_list and list.items or {}) do
    is_list = is_list and value.is_dict(item)
  end
  if not is_list then fail(("chat: %s is no list of tables"):format(name)) end
  return list
end

local REASONING = { "reasoning_content", "thinking", "reasoning" }

--- A message without the fields that are None. Its reasoning is stored under all names
-- that templates use for it, as in transformers 5.
local function message_of(given)
  local out, reasoning = value.dict(), nil
  local function put(key, x) if x ~= value.NONE then value.put(out, key, x) end end
  for _, name in ipairs(REASONING) do
    local x = value.get(given, name)
    if reasoning == nil and x ~= value.NONE then reasoning = x end
  end
  if reasoning ~= nil then value.put(out, "thinking", reasoning) end
  for _, key in ipairs(given.order) do put(key, value.get(given, key)) end
  if reasoning ~= nil then value.put(out, "reasoning_content", reasoning) end
  out.is_unordered = given.is_unordered
  return out
end

local function messages_of(given)
  local list, out = list_of("messages", given), {}
  if #list.items == 0 then fail "chat: messages is empty, expected one or more" end
  for i, message in ipairs(list.items) do
    local role = value.get(message, "role")
    if role == nil or not text.is(role) then
      fail(("chat: role of message %d is no string"):format(i))
    end
    out[i] = message_of(message)
  end
  return value.sequence(out)
end

--- Raises for variables that the template does not read, because they would silently
-- change nothing.
local function check_read(tokenizer, chosen, name)
  if chosen.names[name] then return end
  local names = sorted.keys(chosen.names)
  fail(("chat: the template of %s reads no %s%s"):format(tokenizer.name, name,
    hint(name, names, ", did you mean %s?")))
end

local OWN = { messages = true, tools = true, documents = true,
              add_generation_prompt = true }

--- The variables of the template.
local function variables_of(tokenizer, chosen, messages, o)
  local vars = { messages = messages_of(messages), tools = value.NONE,
                 documents = value.NONE,
                 add_generation_prompt = o.add_generation_prompt or false }
  for name, token in pairs(tokenizer.special_texts or {}) do vars[name] = token end
  for _, name in ipairs { "tools", "documents" } do
    if o[name] then
      check_read(tokenizer, chosen, name)
      vars[name] = list_of(name, o[name])
    end
  end
  for name, x in pairs(o.variables or {}) do
    if OWN[name] then fail(("chat: %s is an option, and no variable"):format(name)) end
    check_read(tokenizer, chosen, name)
    local ok, converted = pcall(value.of, x, "variables." .. name)
    if not ok then fail("chat: " .. converted) end
    vars[name] = converted
  end
  return vars
end

-- ---- the chat -------------------------------------------------------------------------

local TABLES = options.list_of(options.table)

--- A list of tables, of Lua or of kvlab.text.template.value, or JSON text.
M.LIST = { "a list of tables, or JSON text", function(x)
  return type(x) == "string" or value.is_sequence(x) or TABLES[2](x)
end }

--- What a chat may be given beside its messages.
M.KNOWN = {
  add_generation_prompt = options.boolean, tools = M.LIST, documents = M.LIST,
  template = options.string,
  variables = { "a table with names", function(x)
    if type(x) ~= "table" then return false end
    for name in pairs(x) do if type(name) ~= "string" then return false end end
    return true
  end },
}

--- The text of a chat.
---@param tokenizer kvlab.text.Tokenizer
---@param messages table[]|string  { role, content, … }, or JSON text
---@param o table  of M.KNOWN
---@return string text
---@return integer[][] ranges  { first, last } byte of what is not the template's own, in
--                             order
function M.render(tokenizer, messages, o)
  local chosen = parsed(tokenizer, source_of(tokenizer, o.template, o.tools ~= nil))
  local vars = variables_of(tokenizer, chosen, messages, o)
  return of_template(tokenizer, chosen.render, chosen, vars)
end

return M
