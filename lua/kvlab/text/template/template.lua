--- Chat templates: programs in the language Jinja, which the files of models hold. This
-- runs the part of Jinja that they use, and refuses the rest by name; what it writes is
-- what transformers' apply_chat_template writes.
local execute = require "kvlab.text.template.execute"
local fail = require "kvlab.text.template.problem"
local meter = require "kvlab.text.template.meter"
local parser = require "kvlab.text.template.parser"
local show = require "kvlab.text.template.show"
local text = require "kvlab.text.template.text"
local value = require "kvlab.text.template.value"

local M = {}

---@class kvlab.text.Template
---@field names table<string, boolean>  the variables that it reads
local Template = {}
Template.__index = Template

-- ---- functions of every template ------------------------------------------------------

local RANGE_MOST = 100000 -- as Jinja's sandbox has it

local function range(given)
  local places = {}
  for i, x in ipairs(given) do
    places[i] = value.whole(x) or fail "calls range with something that is no int"
  end
  local first, last, step = places[1], places[2], places[3] or 1
  if not last then first, last = 0, first end
  if not last or step == 0 then fail "calls range without an end, or with a step of 0" end
  local items = {}
  if math.ceil((last - first) / step) > RANGE_MOST then
    fail("has a range of more than %d", RANGE_MOST)
  end
  for i = first, last + (step > 0 and -1 or 1), step do items[#items + 1] = i end
  meter.spend(#items)
  return value.sequence(items, "range")
end

--- dict(…) of named arguments, and of a dict or a list of pairs before them.
local function dict(given, named)
  local out = value.dict()
  if given[1] ~= nil then
    if value.is_undefined(given[1]) then fail("%s", given[1].why) end
    local is_dict = value.is_dict(given[1])
    local items = is_dict and value.items(given[1]) or value.items_of(given[1])
    for _, item in ipairs(items) do
      local pair = value.items_of(item)
      if #pair ~= 2 then fail "calls dict with an item that is no pair" end
      value.put(out, pair[1], pair[2])
    end
  end
  for name, x in pairs(named or {}) do value.put(out, name, x) end
  out.is_unordered = next(named or {}) ~= nil -- named ones have lost their order
  return out
end

local function namespace(given, named)
  local values = dict(given, named)
  for _, key in ipairs(values.order) do
    if text.is(key) and text.bytes(key):find "^_" then
      fail "makes a namespace with a name that begins with _"
    end
  end
  return value.namespace(values)
end

local function raise_exception(given)
  fail("refuses this chat: %s", text.bytes(show.str(given[1])))
end

local function strftime_now(given)
  local form = text.bytes(show.str(given[1]))
  if form:gsub("%%%-?[aAbBcdDeFhHIjmMnpRStTuUwWxXyYZ%%]", ""):find "%%" then
    fail("writes the time as %q, which kvlab does not know", form)
  end
  return (os.date(" " .. form):sub(2)) -- the space: "*t" and "!…" mean something to Lua
end

local function refused(name)
  return value.fn(name, function()
    fail("calls %s, which kvlab does not have", name)
  end)
end

local GLOBALS = {
  range = value.fn("range", range), dict = value.fn("dict", dict),
  namespace = value.fn("namespace", namespace),
  raise_exception = value.fn("raise_exception", raise_exception),
  strftime_now = value.fn("strftime_now", strftime_now),
  cycler = refused "cycler", joiner = refused "joiner", lipsum = refused "lipsum",
}

-- ---- templates ------------------------------------------------------------------------

--- Calls fn. Errors get the line of the template; an error that ends a task from outside
-- is passed on unchanged.
local function guarded(rendering, fn, ...)
  meter.start()
  local ok, why = pcall(fn, ...)
  if ok then return why end
  if type(why) == "string" then why = { line = rendering.line, why = why } end
  if type(why) ~= "table" or not why.line then error(why, 0) end
  error(("line %d: %s"):format(why.line, why.why), 0)
end

--- Parses a template; raises with the line and the construct that is wrong, or that kvlab
-- does not have.
---@param source string
---@return kvlab.text.Template
function M.parse(source)
  local self = setmetatable({}, Template)
  guarded({ line = 1 }, function()
    local nodes, variables = parser.parse(source)
    self.nodes, self.names, self.late = nodes, variables.names, variables.late
  end)
  return self
end

--- The text that the template writes.
---@param vars table<string, any>  of kvlab.text.template.value
---@return string text
---@return integer[][] ranges  { first, last } byte of what the variables said
function Template:render(vars)
  local rendering = { given = vars, globals = GLOBALS, late = self.late,
    scope = { vars = {} }, out = {}, line = 1, depth = 0 }
  local out = guarded(rendering, execute.render, self.nodes, rendering)
  return text.bytes(out), text.ranges(out)
end

return M
