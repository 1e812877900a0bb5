--- Formats of Python: "%s: %d" % (name, count) and "{}: {name}".format(…).
local fail = require "kvlab.text.template.problem"
local meter = require "kvlab.text.template.meter"
local show = require "kvlab.text.template.show"
local text = require "kvlab.text.template.text"
local value = require "kvlab.text.template.value"

local M = {}

local function number_of(x, letter)
  local number = value.number(x)
  if not number then
    fail("formats a %s with %%%s", value.kind(x), letter)
  end
  return number
end

--- One value by a conversion such as %-5.2f.
local function converted(flags, letter, x)
  if letter == "s" or letter == "r" then
    local shown = letter == "s" and show.str(x) or show.repr(x)
    if flags == "" then return shown end
    if flags:find "[^%d-]" then
      fail("has the format %%%s%s, which kvlab does not know", flags, letter)
    end
    local width = tonumber(flags:match "%d+" or 0)
    meter.write(width)
    local pad = (" "):rep(width - text.count(shown))
    return text.join(flags:find "^-" and { shown, pad } or { pad, shown })
  elseif (letter == "d" or letter == "i") and not flags:find(".", 1, true) then
    local number = number_of(x, letter)
    number = number < 0 and math.ceil(number) or math.floor(number)
    return text.computed(("%" .. flags .. ".0f"):format(number), x)
  elseif letter:find "[xXodi]" then
    if not value.whole(x) or value.whole(x) < 0 or letter:find "[di]" then
      fail("formats a %s with %%%s%s, which kvlab does not do", value.kind(x), flags,
        letter)
    end
    return text.computed(("%" .. flags .. letter):format(value.whole(x)), x)
  end
  return text.computed(("%" .. flags .. letter):format(number_of(x, letter)), x)
end

-- Flags, width and precision, and a letter.
local CONVERSION = "([-+ 0#]*%d?%d?%.?%d?%d?)([%a%%])()"

--- format % x
---@param self any  a string
---@param x any     a tuple of values, a dict of named ones, or one value
function M.percent(self, x)
  local bytes, parts, at, used = text.bytes(self), {}, 1, 0
  local values = value.kind(x) == "tuple" and x.items or { x }
  while true do
    local first = bytes:find("%", at, true)
    if not first then break end
    parts[#parts + 1] = text.sub(self, at, first - 1)
    local name, flags, letter, after = bytes:match("^%%%(([^()]*)%)" .. CONVERSION, first)
    if not name then flags, letter, after = bytes:match("^%%" .. CONVERSION, first) end
    if not letter or not letter:find "[sridxXofFeEgG%%]" then
      fail("has the format %q, which kvlab does not know", bytes:sub(first, first + 5))
    end
    if letter == "%" then
      parts[#parts + 1] = "%"
    else
      local one
      if name then one = value.is_dict(x) and value.get(x, name)
      else
        used = used + 1
        one = values[used]
      end
      if one == nil then fail "formats fewer values than its format has" end
      parts[#parts + 1] = converted(flags, letter, one)
    end
    at = after
  end
  if used < #values and not value.is_dict(x) then
    fail "formats more values than its format has"
  end
  parts[#parts + 1] = text.sub(self, at, -1)
  return text.join(parts)
end

--- self.format(…)
---@param given any[]
---@param named? table<string, any>
function M.braces(self, given, named)
  local bytes, parts, at, used = text.bytes(self), {}, 1, 0
  while true do
    local first = bytes:find("[{}]", at)
    if not first then break end
    parts[#parts + 1] = text.sub(self, at, first - 1)
    local twice = bytes:match("^{{", first) or bytes:match("^}}", first)
    local name, after = bytes:match("^{([%w_]*)}()", first)
    if twice then
      parts[#parts + 1], at = twice:sub(1, 1), first + 2
    elseif name then
      used = used + (name == "" and 1 or 0)
      local place = name == "" and used or name:find "^%d+$" and tonumber(name) + 1
      local x
      if place then x = given[place] else x = (named or {})[name] end
      if x == nil then fail("formats {%s}, which is not given", name) end
      parts[#parts + 1], at = show.str(x), after
    else
      fail("has the format %q, which kvlab does not know", bytes:sub(first, first + 9))
    end
  end
  parts[#parts + 1] = text.sub(self, at, -1)
  return text.join(parts)
end

return M
