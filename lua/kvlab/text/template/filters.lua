--- The filters of Jinja, as transformers' templates have them: what may stand after |.
local arguments = require "kvlab.text.template.arguments"
local fail = require "kvlab.text.template.problem"
local json = require "kvlab.text.template.json"
local lists = require "kvlab.text.template.lists"
local meter = require "kvlab.text.template.meter"
local operators = require "kvlab.text.template.operators"
local show = require "kvlab.text.template.show"
local strings = require "kvlab.text.template.strings"
local text = require "kvlab.text.template.text"
local value = require "kvlab.text.template.value"

local M = {}

--- Each filter: least, the names of its parameters, and call(x, …); or any and
-- call(x, given, named).
M.FILTERS = {}

local function filter(names, least, parameters, call)
  parameters.least, parameters.call = least, call
  for name in names:gmatch "%S+" do M.FILTERS[name] = parameters end
end

for name, spec in pairs(lists.FILTERS) do M.FILTERS[name] = spec end

-- ---- any value ------------------------------------------------------------------------

filter("default d", 0, { "default_value", "boolean" }, function(x, default, is_boolean)
  if value.is_undefined(x) or arguments.flag(is_boolean) and not value.truth(x) then
    return default == nil and "" or default
  end
  return x
end)

filter("string", 0, {}, function(x) return text.is(x) and x or show.str(x) end)
filter("safe", 0, {}, function(x) return text.markup(show.str(x)) end)
filter("escape e", 0, {}, function(x) return operators.escape(show.str(x)) end)

local function separator(x, i, default)
  if x == nil or x == value.NONE then return default end
  local kind = value.kind(x)
  if (kind ~= "list" and kind ~= "tuple") or #x.items ~= 2 then
    fail "gives tojson separators that are no pair"
  end
  return arguments.text("tojson", x.items[i])
end

filter("tojson", 0, { "ensure_ascii", "indent", "separators", "sort_keys" },
  function(x, ensure_ascii, indent, separators, sort_keys)
  if indent == value.NONE then indent = nil end
  if indent and not text.is(indent) then
    local width = math.max(0, arguments.whole("tojson", indent))
    meter.write(width)
    indent = (" "):rep(width)
  end
  return json.write(x, { ensure_ascii = arguments.flag(ensure_ascii),
    sort_keys = arguments.flag(sort_keys), indent = indent and text.bytes(indent),
    comma = separator(separators, 1, indent and "," or ", "),
    colon = separator(separators, 2, ": ") })
end)

-- ---- numbers --------------------------------------------------------------------------

--- The float that a string of Python is, or nil.
local function float_of(bytes)
  local x = text.bytes(text.strip(bytes, nil, true, true))
  local word = x:lower():match "^[+-]?(%a+)$"
  if word == "inf" or word == "infinity" or word == "nan" then
    if word == "nan" then return 0 / 0 end
    return x:find "^-" and -math.huge or math.huge
  end
  x = x:gsub("(%d)_%f[%d]", "%1")
  if not x:find "^[+-]?%.?%d[%d.]*[eE]?[+-]?%d*$" then return nil end
  return tonumber((x:gsub("^%+", "")))
end

--- int(float(x)), or the default if x is not a number.
local function truncated(x, default)
  if not x or x ~= x or x == math.huge or x == -math.huge then return default end
  return value.int(x < 0 and math.ceil(x) or math.floor(x))
end

filter("int", 0, { "default", "base" }, function(x, default, base)
  default = default == nil and 0 or default
  if value.is_undefined(x) then fail("%s", x.why) end
  if base ~= nil and value.whole(base) ~= 10 then
    fail "calls the filter int with a base, which kvlab does not do"
  end
  if text.is(x) then return truncated(float_of(text.bytes(x)), default) end
  return truncated(value.number(x), default)
end)

filter("float", 0, { "default" }, function(x, default)
  if value.is_undefined(x) then fail("%s", x.why) end
  local number = value.number(x)
  if text.is(x) then number = float_of(text.bytes(x)) end
  if number then return value.float(number) end
  return default == nil and value.float(0) or default
end)

filter("abs", 0, {}, function(x)
  return value.less(x, 0) and operators.sign(x, true) or operators.sign(x)
end)

--- The number with so many decimals; halves go to the even neighbour.
local function rounded(x, places)
  local scaled = x * 10 ^ places
  if scaled % 1 == 0.5 and scaled / 10 ^ places == x then
    return (math.floor(scaled) + math.floor(scaled) % 2) / 10 ^ places
  end
  return tonumber(("%." .. places .. "f"):format(x))
end

filter("round", 0, { "precision", "method" }, function(x, precision, method)
  local number, places = value.number(x), arguments.whole("round", precision, 0)
  local how = text.bytes(arguments.text("round", method, "common"))
  if not number then fail("rounds a %s", value.kind(x)) end
  local is_known = how == "common" or how == "ceil" or how == "floor"
  if places < 0 or places > 20 or not is_known then
    fail "rounds in a way that kvlab does not know"
  end
  if how ~= "common" then
    return value.float(math[how](number * 10 ^ places) / 10 ^ places)
  elseif value.whole(x) then
    return value.whole(x)
  end
  return value.float(rounded(number, places))
end)

-- ---- strings --------------------------------------------------------------------------

--- A filter that is a method of the string of any value.
local function of_method(name, method)
  local spec = strings.METHODS[method or name]
  filter(name, spec.least, { unpack(spec) }, function(x, ...)
    return spec.call(arguments.shown(x), ...)
  end)
end

of_method "upper"
of_method "lower"
of_method "capitalize"
of_method("trim", "strip")
M.FILTERS.trim[1] = "chars"

filter("title", 0, {}, function(x)
  local shown = arguments.shown(x)
  local bytes = text.bytes(shown)
  local parts, at = {}, 1
  while at <= #bytes do -- a word ends at white space, - ( { [ and <
    local stop = at
    while stop <= #bytes do
      local letter = bytes:match("^[^\128-\191][\128-\191]*", stop)
      if text.WHITE[letter] or letter:find "[-({%[<]" then break end
      stop = stop + #letter
    end
    local first, rest = bytes:sub(at, stop - 1):match "^([^\128-\191][\128-\191]*)(.*)$"
    if first then
      parts[#parts + 1] = text.bytes(strings.METHODS.upper.call(first))
      parts[#parts + 1] = text.bytes(strings.METHODS.lower.call(rest))
    end
    local letter = bytes:match("^[^\128-\191][\128-\191]*", stop)
    parts[#parts + 1] = letter
    at = stop + #(letter or "")
  end
  return text.computed(table.concat(parts), shown)
end)

filter("center", 0, { "width" }, function(x, width)
  return strings.METHODS.center.call(arguments.shown(x), width or 80)
end)

filter("replace", 2, { "old", "new", "count" }, function(x, old, new, count)
  return strings.replace(arguments.shown(x), arguments.shown(old),
    arguments.shown(new),
    count ~= value.NONE and arguments.whole("replace", count, -1) or -1)
end)

filter("indent", 0, { "width", "first", "blank" }, function(x, width, first, blank)
  local by = width == nil and "    " or width
  if not text.is(by) then
    by = arguments.whole("indent", by)
    meter.write(by)
    by = (" "):rep(by)
  end
  if not text.is(x) then fail("indents a %s", value.kind(x)) end
  local lines = strings.lines(text.join { arguments.shown(x), "\n" })
  local parts = { arguments.flag(first) and by or "", lines[1] }
  for i = 2, #lines do
    parts[#parts + 1] = "\n"
    if arguments.flag(blank) or lines[i] ~= "" then parts[#parts + 1] = by end
    parts[#parts + 1] = lines[i]
  end
  return text.join(parts)
end)

filter("truncate", 0, { "length", "killwords", "end", "leeway" },
  function(x, length, kills, last, leeway)
  x = arguments.shown(arguments.text("truncate", x))
  last = arguments.text("truncate", last, "...")
  length = arguments.whole("truncate", length, 255)
  if text.count(x) <= length + arguments.whole("truncate", leeway, 5) then return x end
  local rest = text.range(x, 0, length - text.count(last))
  if not arguments.flag(kills) then
    rest = strings.METHODS.rsplit.call(rest, " ", 1).items[1]
  end
  return text.join { rest, last }
end)

filter("wordcount", 0, {}, function(x)
  local bytes = text.bytes(arguments.shown(x))
  if bytes:find "[\128-\255]" then
    fail "counts words of letters outside ASCII, which kvlab does not do"
  end
  return select(2, bytes:gsub("[%w_]+", ""))
end)

filter("format", 0, {}, nil)
M.FILTERS.format = { any = true, call = function(x, given, named)
  if next(named or {}) then fail "calls the filter format with named arguments" end
  return operators.apply("%", arguments.shown(x),
    value.sequence(given, "tuple"))
end }

-- ---- calling them ---------------------------------------------------------------------

--- What a filter makes of a value.
---@param name string
---@param x any
---@param given any[]
---@param named? table<string, any>
function M.apply(name, x, given, named)
  local spec = M.FILTERS[name]
  if not spec then fail("has the filter %q, which kvlab does not have", name) end
  meter.spend(1)
  if spec.any then return spec.call(x, given, named, M.apply) end
  local bound = arguments.bind("the filter " .. name, spec, given, named)
  return spec.call(x, unpack(bound, 1, #spec))
end

return M
