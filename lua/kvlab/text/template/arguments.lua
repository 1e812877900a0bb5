--- Arguments of the functions that templates call: a list of values and a table of named
-- ones become one list in the order of the parameters, as Python does it.
local fail = require "kvlab.text.template.problem"
local show = require "kvlab.text.template.show"
local text = require "kvlab.text.template.text"
local value = require "kvlab.text.template.value"

local M = {}

--- Names of parameters that are given by position only.
M.POSITION = "_"

--- The values of the parameters; nil where none is given.
---@param what string      the function, for errors: "the filter indent"
---@param spec table       least: how many have to be given; then the parameters' names
---@param given table      values by position, from `first`
---@param named? table<string, any>
---@return any[]
function M.bind(what, spec, given, named)
  local out, count = {}, #spec
  if #given > count then
    fail("calls %s with %d arguments, expected %d or fewer", what, #given, count)
  end
  for i, x in ipairs(given) do out[i] = x end
  for name, x in pairs(named or {}) do
    local at
    for i = 1, count do at = spec[i] == name and i or at end
    if not at or out[at] ~= nil then
      fail("calls %s with the argument %s, which it %s", what, name,
        at and "has already" or "does not know")
    end
    out[at] = x
  end
  for i = 1, spec.least or 0 do
    if out[i] == nil then
      fail("calls %s with too few arguments, expected %d or more", what, spec.least)
    end
  end
  return out
end

local function wrong(what, x, expected)
  if value.is_undefined(x) then fail("%s", x.why) end
  fail("gives %s a %s, expected %s", what, value.kind(x), expected)
end

--- A string, or `default` where there is none. None is none.
function M.text(what, x, default)
  if x == nil or x == value.NONE and default ~= nil then return default end
  if not text.is(x) then wrong(what, x, "a str") end
  return x
end

--- An int, or `default`.
function M.whole(what, x, default)
  if x == nil then return default end
  return value.whole(x) or wrong(what, x, "an int")
end

--- Whether an argument is true in Python; false if it is missing.
function M.flag(x) return x ~= nil and value.truth(x) end

--- A string of any value, as filters take it.
function M.shown(x) return text.unmarked(show.str(x)) end

return M
