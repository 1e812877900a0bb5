--- The tokens of a template, one after the other, as the parsers read them.
local lexer = require "kvlab.text.template.lexer"
local meter = require "kvlab.text.template.meter"

local M = {}

---@class kvlab.text.template.Stream
---@field names table<string, boolean>  every variable that the template reads
---@field frame table    variables of the block that is parsed: own (what it reads or
--                       sets), inner (what blocks in it read before), up
---@field late table<string, boolean>  variables that a block sets after one in it has
--                       read them: in Jinja it hides a variable of this name from then on
local Stream = {}
Stream.__index = Stream

---@param source string
function M.new(source)
  return setmetatable({ tokens = lexer.tokens(source), at = 1, depth = 0, names = {},
                        late = {}, frame = { own = {}, inner = {} } }, Stream)
end

--- The next token, or one further ahead.
function Stream:token(ahead)
  return self.tokens[self.at + (ahead or 0)] or self.tokens[#self.tokens]
end

function Stream:line() return self:token().line end

--- Takes the next token.
function Stream:next()
  local token = self:token()
  self.at = self.at + 1
  return token
end

--- Whether the next token is of a kind; with `name`, whether it is that name.
function Stream:is(kind, name)
  local token = self:token()
  return token.kind == kind and (name == nil or token.value == name)
end

function Stream:is_name(name) return self:is("name", name) end

--- Takes the next token if it is of a kind.
function Stream:take(kind, name)
  if self:is(kind, name) then return self:next() end
end

local function shown(token)
  if token.kind == "name" then return token.value end
  if token.kind == "string" then return ("the string %q"):format(token.value) end
  if token.kind == "number" then return "a number" end
  if token.kind == "data" then return "text" end
  return token.kind == "end" and "the end of the template" or token.kind
end

--- Takes the next token, which has to be of a kind.
function Stream:expect(kind, name)
  local token = self:take(kind, name)
  if token then return token end
  return self:fail("%s stands where %s was expected", shown(self:token()),
    name or kind == "name" and "a name" or kind)
end

function Stream:fail(why, ...) return lexer.fail(self:line(), why, ...) end

--- A node of the tree. Its line is that of the next token.
function Stream:node(kind, fields)
  fields = fields or {}
  fields.kind, fields.line = kind, fields.line or self:line()
  return fields
end

--- Calls parse(self, …), one level deeper.
function Stream:deeper(parse, ...)
  self.depth = self.depth + 1
  if self.depth > meter.DEPTH then self:fail "it is nested too deeply" end
  local node = parse(self, ...)
  self.depth = self.depth - 1
  return node
end

-- ---- variables ------------------------------------------------------------------------

--- Notes that an expression reads a variable.
function Stream:read(name)
  self.names[name] = true
  local frame = self.frame
  frame.own[name] = true
  while frame.up do
    frame = frame.up
    if not frame.own[name] then frame.inner[name] = true end
  end
end

--- Notes that a statement sets a variable.
function Stream:set(name)
  local frame = self.frame
  if frame.inner[name] and not frame.own[name] then self.late[name] = true end
  frame.own[name] = true
end

--- Calls parse(self, …) for a block with variables of its own.
function Stream:within(parse, ...)
  self.frame = { own = {}, inner = {}, up = self.frame }
  local node = parse(self, ...)
  self.frame = self.frame.up
  return node
end

return M
