--- `local` at the prompt. A local of a chunk ends with the chunk, so the locals of an
-- input would be gone at the next prompt. An input is therefore rewritten before it is
-- compiled: what `local` declares outside of every block becomes an entry of the
-- session's scope. Lines and blocks stay as they are, and so do the locals inside of a
-- block or function.
--
--   local a, b = f()      NAME.a, NAME.b = f()
--   local c               NAME.c = nil
--   local function g()    NAME.g = nil function g()
--
-- An assignment to a field of NAME declares a variable (Scope:declare). Every declaration
-- makes a new environment, which the rest of the input runs in. A function keeps the
-- environment in which it was made, and the environments share the variables. So, as in a
-- chunk, a function sees later assignments to variables that existed before it, but not a
-- variable that is declared later under the same name. The entries are no locals of Lua,
-- so there may be more than 200 of them.
local M = {}

-- Bytes above 127 are letters for LuaJIT, but no byte 255 is part of any UTF-8 text.
local NAME = "\255declared"
M.NAME = NAME

-- ---- tokens ---------------------------------------------------------------------------

--- The last byte of the long bracket, with its text, that begins at `at`; nil: none does.
local function long_end(text, at)
  local level = text:match("^%[(=*)%[", at)
  if not level then return nil end
  local _, last = text:find("]" .. level .. "]", at, true)
  return last or #text
end

--- The last byte of a string in quotes that begins at `at`.
local function quoted_end(text, at)
  local quote = text:sub(at, at)
  repeat
    at = text:find("[\\" .. quote .. "]", at + 1)
    if at and text:sub(at, at) == "\\" then at = at + 1
    elseif at then return at end
  until not at
  return #text
end

--- The last byte of a number that begins at `at`: 0x1p-4, 1e+9, .5
local function number_end(text, at)
  local _, last = text:find("^[%w.]+", at)
  while text:find("^[eEpP][+-]%d", last) do
    _, last = text:find("^[%w.]+", last + 2)
  end
  return last
end

local LETTER = "[%a_\128-\255]"

--- The kind and the last byte of the token at `at`, where no space is.
local function token_at(text, at)
  if text:find("^%-%-", at) then
    local line_break = text:find("\n", at, true) or #text + 1
    return "comment", long_end(text, at + 2) or line_break - 1
  end
  local last = long_end(text, at)
  if last then return "string", last end
  if text:find("^[\"']", at) then return "string", quoted_end(text, at) end
  if text:find("^" .. LETTER, at) then
    return "word", select(2, text:find("^[%w_\128-\255]+", at))
  end
  if text:find("^%.?%d", at) then return "number", number_end(text, at) end
  for _, sign in ipairs { "^%.%.%.", "^%.%.", "^[=~<>]=", "^::" } do
    _, last = text:find(sign, at)
    if last then return "sign", last end
  end
  return "sign", at
end

---@class kvlab.Token
---@field kind "word"|"string"|"number"|"sign"
---@field text string
---@field first integer  of its bytes
---@field last integer

--- The tokens of a text without its comments. A text that is not finished ends inside of
-- its last token.
---@param text string
---@param most? integer  no more than so many
---@return kvlab.Token[]
function M.tokens(text, most)
  local list, at = {}, text:find "%S"
  while at and #list < (most or math.huge) do
    local kind, last = token_at(text, at)
    if kind ~= "comment" then
      list[#list + 1] = { kind = kind, text = text:sub(at, last), first = at,
                          last = last }
    end
    at = text:find("%S", last + 1)
  end
  return list
end

-- ---- rewriting ------------------------------------------------------------------------

local KEYWORDS = {}
for word in ([[and break do else elseif end false for function goto if in local nil not or
    repeat return then true until while]]):gmatch "%l+" do
  KEYWORDS[word] = true
end

-- How much deeper the text is nested after a word. A loop's block begins at its `do`.
local DEPTH = { ["function"] = 1, ["do"] = 1, ["if"] = 1, ["repeat"] = 1, ["end"] = -1,
                ["until"] = -1 }

local function is_name(token)
  return token ~= nil and token.kind == "word" and not KEYWORDS[token.text]
end

local function is_sign(token, sign)
  return token ~= nil and token.kind == "sign" and token.text == sign
end

--- Rewrites the declaration at tokens[i], which is `local`: calls put(first, last, text)
-- for each part that changes, in order. Text that is not a declaration stays.
local function rewrite_one(tokens, i, put)
  local start = tokens[i]
  if tokens[i + 1] and tokens[i + 1].text == "function" then
    if not is_name(tokens[i + 2]) then return end
    return put(start.first, start.last, ("%s.%s = nil"):format(NAME, tokens[i + 2].text))
  end
  if not is_name(tokens[i + 1]) then return end
  put(start.first, start.last, "")
  repeat
    i = i + 1
    local name = tokens[i]
    local goes_on = is_sign(tokens[i + 1], ",") and is_name(tokens[i + 2])
    local ends = not goes_on and not is_sign(tokens[i + 1], "=")
    put(name.first, name.last, NAME .. "." .. name.text .. (ends and " = nil" or ""))
    i = i + 1
  until not goes_on
end

--- The text with the locals outside of its blocks rewritten; nil where it has none.
---@param text string
---@return string|nil
function M.rewrite(text)
  if not text:find("local", 1, true) then return nil end
  local tokens, depth, pieces, at = M.tokens(text), 0, {}, 1
  local function put(first, last, by)
    pieces[#pieces + 1] = text:sub(at, first - 1) .. by
    at = last + 1
  end
  for i, token in ipairs(tokens) do
    local word = token.kind == "word" and token.text
    if word == "local" and depth == 0 then rewrite_one(tokens, i, put) end
    depth = depth + (word and DEPTH[word] or 0)
  end
  if at == 1 then return nil end
  return table.concat(pieces) .. text:sub(at)
end

-- ---- the scope ------------------------------------------------------------------------

---@class kvlab.Scope
---@field globals table       the session's global variables
---@field environment table   in which the next input runs
---@field cells table<string, table>  the locals: each a table whose `value` is the value
---@field chunk function|nil  the input that runs
local Scope = {}
Scope.__index = Scope

--- A scope without locals.
---@param globals table
---@return kvlab.Scope
function M.scope(globals)
  return setmetatable({ globals = globals, environment = globals, cells = {} }, Scope)
end

--- An environment with these locals in front of the globals.
local function environment_of(cells, globals)
  return setmetatable({}, {
    __index = function(_, name)
      local cell = cells[name]
      if cell then return cell.value end
      return globals[name]
    end,
    __newindex = function(_, name, value)
      local cell = cells[name]
      if cell then cell.value = value else globals[name] = value end
    end,
  })
end

--- Makes a new local, which hides others of its name. `_` stays the last result.
---@param name string
---@param value any
function Scope:declare(name, value)
  if name == "_" then
    self.globals._ = value
    return
  end
  local cells = {}
  for key, cell in pairs(self.cells) do cells[key] = cell end
  cells[name] = { value = value }
  self.cells = cells
  self.environment = environment_of(cells, self.globals)
  if self.chunk then setfenv(self.chunk, self.environment) end
end

--- What a rewritten input assigns to.
function Scope:declared()
  return setmetatable({}, { __newindex = function(_, name, value)
    self:declare(name, value)
  end })
end

--- Runs a compiled input.
---@param chunk function
---@return any ...
function Scope:run(chunk)
  self.chunk = chunk
  return setfenv(chunk, self.environment)()
end

--- The variables by name, as a table of its own: the locals, and the globals that they do
-- not hide.
---@return table<string, any>
function Scope:variables()
  local all = {}
  for name, value in pairs(self.globals) do all[name] = value end
  for name, cell in pairs(self.cells) do all[name] = cell.value end
  return all
end

return M
