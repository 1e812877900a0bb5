--- Operators of templates between two values, as Python has them.
local fail = require "kvlab.text.template.problem"
local format = require "kvlab.text.template.format"
local meter = require "kvlab.text.template.meter"
local text = require "kvlab.text.template.text"
local value = require "kvlab.text.template.value"

local M = {}

local function refuse(operator, a, b)
  for _, x in ipairs { a, b } do
    if value.is_undefined(x) then fail("%s", x.why) end
  end
  fail("computes a %s %s a %s", value.kind(a), operator, value.kind(b))
end

--- The result is an int if both operands are, else a float.
local function number(a, b, x)
  if value.whole(a) and value.whole(b) then return value.int(x) end
  return value.float(x)
end

local ESCAPES = { ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ["'"] = "&#39;",
                  ['"'] = "&#34;" }

--- A string as markup: characters with a meaning in HTML are escaped, unless it is
-- already markup.
function M.escape(x)
  if text.is_markup(x) then return x end
  local bytes = text.bytes(x):gsub("[&<>'\"]", ESCAPES)
  return text.markup(text.computed(bytes, x))
end

local function add(a, b)
  if text.is(a) and text.is(b) then
    if not text.is_markup(a) and not text.is_markup(b) then return text.join { a, b } end
    return text.markup(text.join { M.escape(a), M.escape(b) })
  end
  local kind = value.kind(a)
  local is_list = kind == "list" or kind == "tuple"
  if not is_list or kind ~= value.kind(b) then refuse("+", a, b) end
  local items = {}
  meter.spend(#a.items + #b.items)
  for _, x in ipairs(a.items) do items[#items + 1] = x end
  for _, x in ipairs(b.items) do items[#items + 1] = x end
  return value.sequence(items, kind)
end

--- A string or a list, several times.
local function times(a, b)
  if value.whole(a) then a, b = b, a end
  local count = value.whole(b) and math.max(0, value.whole(b))
  local kind = value.kind(a)
  if not count or not text.is(a) and kind ~= "list" and kind ~= "tuple" then
    refuse("*", a, b)
  elseif text.is(a) then
    meter.write(count * #text.bytes(a))
    return text.computed(text.bytes(a):rep(count), a)
  end
  local items = {}
  meter.spend(count * #a.items)
  for _ = 1, count do
    for _, x in ipairs(a.items) do items[#items + 1] = x end
  end
  return value.sequence(items, kind)
end

local function checked(operator, b)
  if b == 0 then fail("computes %s 0", operator) end
  return b
end

--- x // y and x % y, as Python has them of floats; they are exact for ints.
local function divided(x, y)
  checked("a number // or %", y)
  local rest = math.fmod(x, y)
  local whole = (x - rest) / y
  if rest ~= 0 and (y < 0) ~= (rest < 0) then rest, whole = rest + y, whole - 1 end
  if rest == 0 then rest = y < 0 and -0.0 or 0 end
  local floor = math.floor(whole)
  if whole - floor > 0.5 then floor = floor + 1 end
  return floor, rest
end

local function power(a, b)
  local x, y = value.number(a), value.number(b)
  if x == 0 and y < 0 then checked("a power below 0 of", 0) end
  if x < 0 and y % 1 ~= 0 then fail "computes a power that is a complex number" end
  if y < 0 then return value.float(x ^ y) end
  return number(a, b, x ^ y)
end

-- operator -> { of two numbers, of other values }
local OPERATORS = {
  ["+"] = { function(a, b) return number(a, b, value.number(a) + value.number(b)) end,
            add },
  ["-"] = { function(a, b) return number(a, b, value.number(a) - value.number(b)) end },
  ["*"] = { function(a, b) return number(a, b, value.number(a) * value.number(b)) end,
            times },
  ["/"] = { function(a, b)
    return value.float(value.number(a) / checked("a number /", value.number(b)))
  end },
  ["//"] = { function(a, b)
    return number(a, b, (divided(value.number(a), value.number(b))))
  end },
  ["%"] = { function(a, b)
    return number(a, b, select(2, divided(value.number(a), value.number(b))))
  end, function(a, b)
    return text.is(a) and format.percent(a, b) or refuse("%", a, b)
  end },
  ["**"] = { power },
}

--- a operator b
function M.apply(operator, a, b)
  local of_numbers, of_others = unpack(OPERATORS[operator])
  if value.number(a) and value.number(b) then return of_numbers(a, b) end
  return (of_others or function() refuse(operator, a, b) end)(a, b)
end

--- -a, or +a
function M.sign(a, is_minus)
  local x = value.number(a)
  if not x then refuse(is_minus and "-" or "+", 0, a) end
  return number(a, 0, is_minus and -x or x)
end

local COMPARE = {
  ["=="] = value.equal,
  ["!="] = function(a, b) return not value.equal(a, b) end,
  ["<"] = value.less,
  [">"] = function(a, b) return value.less(b, a) end,
  ["<="] = function(a, b) return value.less(a, b) or value.equal(a, b) end,
  [">="] = function(a, b) return value.less(b, a) or value.equal(a, b) end,
  ["in"] = function(a, b) return value.contains(b, a) end,
  ["not in"] = function(a, b) return not value.contains(b, a) end,
}

--- Whether a comparison holds.
function M.compare(operator, a, b) return COMPARE[operator](a, b) end

return M
