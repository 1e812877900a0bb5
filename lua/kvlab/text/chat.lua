--- Writes chats as models were trained to read them. A file says how by a template, a
-- program in the language Jinja. This runs no programs: it knows the formats of some
-- families, and recognises them by what stands in the template.
--
--   family    recognised by                          roles
--   chatml    <|im_start|> and <|im_end|>            any (SmolLM2, Qwen 2 and 2.5, Yi, …)
--   qwen3     … with </think>                        system, user, assistant
--   llama-3   <|start_header_id|> and <|eot_id|>     any; not Llama 3.1's with a date
--   mistral   [INST], [/INST] and eos_token          user and assistant in turn
--   gemma     <start_of_turn> and <end_of_turn>      user and assistant in turn; system
--                                                    first, where the template has it
--   zephyr    <|user|>, <|assistant|> and eos_token  system, user, assistant
local fail = require("kvlab.options").fail
local options = require "kvlab.options"
local regex = require "kvlab.text.regex"
local unicode = require "kvlab.text.unicode"

local M = {}

local function has(template, words) return template:find(words, 1, true) ~= nil end

local white

--- The text without white space around it, as Python's str.strip does it.
local function trimmed(text)
  white = white or assert(regex.compile "[\\s\\x{1C}-\\x{1F}]")
  return regex.trimmed(white, text, true, true)
end

--- Raises for a chat that a family has no form for.
local function refuse(i, name, value, expected)
  fail(("chat: %s of message %d is %s, expected %s"):format(name, i, options.shown(value),
    expected))
end

local function check_roles(messages, roles)
  local words = {}
  for _, role in ipairs(roles) do words[role] = true end
  for i, message in ipairs(messages) do
    if not words[message.role] then
      refuse(i, "role", message.role, "one of " .. table.concat(roles, ", "))
    end
  end
end

--- Raises unless user and assistant speak in turn, beginning with message `first`.
local function check_turns(messages, first)
  for i = first, #messages do
    local role = (i - first) % 2 == 0 and "user" or "assistant"
    if messages[i].role ~= role then refuse(i, "role", messages[i].role, role) end
  end
end

--- What begins the text: the token that the template names.
local function bos_of(tokenizer, template)
  if not has(template, "bos_token") then return "" end
  return tokenizer.bos and tokenizer:token_of(tokenizer.bos) or ""
end

local function eos_of(tokenizer, family)
  if tokenizer.eos then return tokenizer:token_of(tokenizer.eos) end
  return fail(("chat: a template of the family %s needs a token eos, but %s names none")
    :format(family, tokenizer.name))
end

-- ---- families -------------------------------------------------------------------------

local FAMILIES = {}

--- Appends to a text's parts. Those in a table, { content }, come from a message: special
-- tokens in them are none.
local function put(parts, ...)
  for i = 1, select("#", ...) do parts[#parts + 1] = select(i, ...) end
end

local function put_chatml(parts, role, content)
  put(parts, "<|im_start|>", { role }, "\n", { content }, "<|im_end|>\n")
end

--- The system prompt that a template has for chats without one; nil if it has none.
local function default_system(template)
  local text = template:match "<|im_start|>system\\n([^'\"+{}]-)<|im_end|>"
    or template:match "<|im_start|>system\n([^'\"+{}]-)<|im_end|>"
  return text and text:gsub("\\n", "\n")
end

FAMILIES[1] = { name = "chatml", is = function(template)
  return has(template, "<|im_start|>") and has(template, "<|im_end|>")
    and not has(template, "</think>") and not template:find "|%s*trim"
    and (template:find "<|im_end|>\\?[n\n]"
      or template:find "<|im_end|>['\"]%s*[+~]%s*['\"]\\?[n\n]")
end, render = function(tokenizer, messages, template)
  local parts, system = { bos_of(tokenizer, template) }, default_system(template)
  if system and messages[1].role ~= "system" then
    put_chatml(parts, "system", system)
  end
  for _, message in ipairs(messages) do
    put_chatml(parts, message.role, message.content)
  end
  return parts, "<|im_start|>assistant\n"
end }

FAMILIES[2] = { name = "qwen3", is = function(template)
  return has(template, "<|im_start|>") and has(template, "<|im_end|>")
    and has(template, "</think>") and has(template, "enable_thinking")
end, render = function(_, messages)
  check_roles(messages, { "system", "user", "assistant" })
  if messages[#messages].role == "assistant" then
    refuse(#messages, "role", "assistant", "user: this family ends with a question")
  end
  local parts = {}
  for _, message in ipairs(messages) do
    local content = message.content
    if message.role == "assistant" then -- what it thought before is left out
      content = content:match ".*</think>\n*(.*)$" or content
    end
    put_chatml(parts, message.role, content)
  end
  return parts, "<|im_start|>assistant\n"
end }

FAMILIES[3] = { name = "llama-3", is = function(template)
  return has(template, "<|start_header_id|>") and has(template, "<|eot_id|>")
    and not has(template, "Cutting Knowledge Date")
end, render = function(tokenizer, messages, template)
  local parts = { bos_of(tokenizer, template) }
  for _, message in ipairs(messages) do
    put(parts, "<|start_header_id|>", { message.role }, "<|end_header_id|>\n\n",
      { trimmed(message.content) }, "<|eot_id|>")
  end
  return parts, "<|start_header_id|>assistant<|end_header_id|>\n\n"
end }

FAMILIES[4] = { name = "mistral", is = function(template)
  return has(template, "'[INST] '") and has(template, "' [/INST]'")
    and has(template, "eos_token") and not has(template, "system")
    and not has(template, "tool")
end, render = function(tokenizer, messages, template)
  check_turns(messages, 1)
  local before = template:find "' '%s*%+%s*message" and " " or ""
  local after = template:find "eos_token%s*%+%s*' '" and " " or ""
  local parts, eos = { bos_of(tokenizer, template) }, eos_of(tokenizer, "mistral")
  for _, message in ipairs(messages) do
    if message.role == "user" then put(parts, "[INST] ", { message.content }, " [/INST]")
    else put(parts, before, { message.content }, eos, after)
    end
  end
  return parts, ""
end }

FAMILIES[5] = { name = "gemma", is = function(template)
  return has(template, "<start_of_turn>") and has(template, "<end_of_turn>")
end, render = function(tokenizer, messages, template)
  local parts, first, prefix = { bos_of(tokenizer, template) }, 1, ""
  if messages[1].role == "system" and has(template, "first_user_prefix") then
    first, prefix = 2, messages[1].content .. "\n\n"
  end
  check_turns(messages, first)
  for i = first, #messages do
    local role = messages[i].role == "user" and "user" or "model"
    put(parts, "<start_of_turn>" .. role .. "\n", { i == first and prefix or "" },
      { trimmed(messages[i].content) }, "<end_of_turn>\n")
  end
  return parts, "<start_of_turn>model\n"
end }

FAMILIES[6] = { name = "zephyr", is = function(template)
  return has(template, "<|user|>") and has(template, "<|assistant|>")
    and has(template, "eos_token") and not has(template, "<|end|>")
end, render = function(tokenizer, messages)
  check_roles(messages, { "system", "user", "assistant" })
  local parts, eos = {}, eos_of(tokenizer, "zephyr")
  for _, message in ipairs(messages) do
    put(parts, "<|" .. message.role .. "|>\n", { message.content }, eos, "\n")
  end
  return parts, "<|assistant|>\n"
end }

-- ---- the chat -------------------------------------------------------------------------

M.NAMES = {}
for i, family in ipairs(FAMILIES) do M.NAMES[i] = family.name end

--- The name of the family of a template; nil if it is none that is known.
---@param template string
---@return string|nil
function M.family(template)
  for _, family in ipairs(FAMILIES) do
    if family.is(template) then return family.name, family end
  end
end

--- The text of parts, and the first and last byte of each that is of a message.
local function joined(parts)
  local texts, ranges, count = {}, {}, 0
  for i, part in ipairs(parts) do
    texts[i] = type(part) == "table" and part[1] or part
    if type(part) == "table" then
      ranges[#ranges + 1] = { count + 1, count + #texts[i] }
    end
    count = count + #texts[i]
  end
  return table.concat(texts), ranges
end

--- The text of a chat.
---@param tokenizer kvlab.text.Tokenizer
---@param messages table[]   { role, content }
---@param is_prompt boolean  ends where the assistant's answer begins
---@return string text
---@return integer[][] ranges  { first, last } byte of what is of the messages, in order
function M.render(tokenizer, messages, is_prompt)
  local template = tokenizer.template
  local known = "; the families that are known are " .. table.concat(M.NAMES, ", ")
  if not template then
    fail(("chat: %s has no chat template%s"):format(tokenizer.name, known))
  end
  local valid = {}
  for i, message in ipairs(messages) do
    for _, name in ipairs { "role", "content" } do
      if type(message[name]) ~= "string" then
        refuse(i, name, message[name], "a string")
      end
    end
    valid[i] = { role = message.role, content = unicode.repaired(message.content) }
  end
  local _, family = M.family(template)
  if not family then
    fail(("chat: the template of %s, %q, is of no family%s"):format(tokenizer.name,
      template:sub(1, 60), known))
  end
  local parts, prompt = family.render(tokenizer, valid, template)
  put(parts, is_prompt and prompt or "")
  return joined(parts)
end

return M
