--- What templates do with strings: the methods of Python's str.
local arguments = require "kvlab.text.template.arguments"
local case = require "kvlab.text.case"
local fail = require "kvlab.text.template.problem"
local format = require "kvlab.text.template.format"
local meter = require "kvlab.text.template.meter"
local text = require "kvlab.text.template.text"
local value = require "kvlab.text.template.value"

local M = {}

local HERE = arguments.POSITION

--- Every method: least (arguments that have to be given), the names of its parameters,
-- and call(self, …).
M.METHODS = {}

local function method(name, least, parameters, call)
  parameters.least, parameters.call = least, call
  M.METHODS[name] = parameters
end

--- A list of strings, as a value.
local function list(parts) return value.sequence(parts) end

-- ---- ends -----------------------------------------------------------------------------

local function stripper(name, at_left, at_right)
  method(name, 0, { HERE }, function(self, chars)
    chars = arguments.text(name, chars, false)
    return text.strip(self, chars and text.set(text.bytes(chars)), at_left, at_right)
  end)
end

stripper("strip", true, true)
stripper("lstrip", true, false)
stripper("rstrip", false, true)

local function begins(bytes, x) return bytes:sub(1, #x) == x end
local function ends(bytes, x) return x == "" or bytes:sub(-#x) == x end

--- startswith and endswith take a string, or a tuple of them.
local function tester(name, fits)
  method(name, 1, { HERE }, function(self, x)
    local bytes = text.bytes(self)
    if value.kind(x) ~= "tuple" then x = value.sequence({ x }, "tuple") end
    for _, one in ipairs(x.items) do
      if fits(bytes, text.bytes(arguments.text(name, one))) then return true end
    end
    return false
  end)
end

tester("startswith", begins)
tester("endswith", ends)

method("removeprefix", 1, { HERE }, function(self, prefix)
  local x = text.bytes(arguments.text("removeprefix", prefix))
  return begins(text.bytes(self), x) and text.sub(self, #x + 1, -1) or self
end)

method("removesuffix", 1, { HERE }, function(self, suffix)
  local x, bytes = text.bytes(arguments.text("removesuffix", suffix)), text.bytes(self)
  return ends(bytes, x) and text.sub(self, 1, #bytes - #x) or self
end)

-- ---- parts ----------------------------------------------------------------------------

--- The words between white space; after `most` cuts, the rest.
local function words(self, most)
  local bytes, parts = text.bytes(self), {}
  local at = text.past(bytes, text.WHITE, 1)
  while at <= #bytes do
    local stop = at
    if #parts == most then
      parts[#parts + 1] = text.sub(self, at, -1)
      break
    end
    while stop <= #bytes do
      local letter = bytes:match("^[^\128-\191][\128-\191]*", stop)
      if text.WHITE[letter] then break end
      stop = stop + #letter
    end
    parts[#parts + 1] = text.sub(self, at, stop - 1)
    at = text.past(bytes, text.WHITE, stop)
  end
  return parts
end

--- The bytes at which a string is found, in order.
local function places(bytes, x, most)
  if x == "" then fail "splits or partitions at an empty str" end
  local found, from = {}, 1
  while #found ~= most do
    local first = bytes:find(x, from, true)
    if not first then break end
    found[#found + 1], from = first, first + #x
  end
  meter.spend(#found)
  return found
end

--- The last `most` occurrences, searched from the end.
local function places_from_end(bytes, x, most)
  local found = places(bytes:reverse(), x:reverse(), most)
  local out = {}
  for i = #found, 1, -1 do out[#out + 1] = #bytes - found[i] - #x + 2 end
  return out
end

local function cut(self, found, size)
  local parts, from = {}, 1
  for _, first in ipairs(found) do
    parts[#parts + 1] = text.sub(self, from, first - 1)
    from = first + size
  end
  parts[#parts + 1] = text.sub(self, from, -1)
  return parts
end

local function splitter(name, find)
  method(name, 0, { "sep", "maxsplit" }, function(self, between, most)
    between = arguments.text(name, between, false)
    most = arguments.whole(name, most, -1)
    if between then
      local x = text.bytes(between)
      return list(cut(self, find(text.bytes(self), x, most), #x))
    elseif name == "rsplit" and most >= 0 then
      fail "calls rsplit with a maxsplit and no sep, which kvlab does not do"
    end
    return list(words(self, most))
  end)
end

splitter("split", places)
splitter("rsplit", places_from_end)

local function partition(name, find, side)
  method(name, 1, { HERE }, function(self, between)
    local x = text.bytes(arguments.text(name, between))
    local found = find(text.bytes(self), x, 1)
    local parts = cut(self, found, #x)
    if #found == 1 then
      return value.sequence({ parts[1], between, parts[2] }, "tuple")
    end
    return value.sequence(side == 1 and { self, "", "" } or { "", "", self }, "tuple")
  end)
end

partition("partition", places, 1)
partition("rpartition", places_from_end, 3)

-- What ends a line: \n \v \f \r, \x1c … \x1e, U+0085, U+2028 and U+2029.
local ENDS = { "\n", "\v", "\f", "\r", "\28", "\29", "\30", "\194\133", "\226\128\168",
               "\226\128\169" }
local IS_END = {}
for _, letter in ipairs(ENDS) do IS_END[letter] = true end

--- The lines of a string.
function M.lines(self, keeps_ends)
  local bytes, parts, from, at = text.bytes(self), {}, 1, 1
  while at <= #bytes do
    at = bytes:find("[\n-\r\28-\30\194\226]", at)
    if not at then break end
    local letter = bytes:match("^[^\128-\191][\128-\191]*", at)
    local after = at + (bytes:sub(at, at + 1) == "\r\n" and 2 or #letter)
    if IS_END[letter] then
      parts[#parts + 1] = text.sub(self, from, keeps_ends and after - 1 or at - 1)
      from = after
    end
    at = after
  end
  if from <= #bytes then parts[#parts + 1] = text.sub(self, from, -1) end
  meter.spend(#parts)
  return parts
end

method("splitlines", 0, { "keepends" }, function(self, keeps_ends)
  return list(M.lines(self, arguments.flag(keeps_ends)))
end)

-- ---- finding and replacing ------------------------------------------------------------

--- The string with `new` in place of `old`.
function M.replace(self, old, new, most)
  local x = text.bytes(old)
  if x == "" then
    local parts = { "", unpack(text.characters(self)) }
    parts[#parts + 1] = ""
    if most >= 0 and most < #parts - 1 then
      fail "replaces an empty str a few times, which kvlab does not do"
    end
    return text.join(parts, new)
  end
  return text.join(cut(self, places(text.bytes(self), x, most), #x), new)
end

method("replace", 2, { HERE, HERE, "count" }, function(self, old, new, most)
  return M.replace(self, arguments.text("replace", old), arguments.text("replace", new),
    arguments.whole("replace", most, -1))
end)

--- Where a string is found, in characters; -1: nowhere.
local function finder(name, find)
  method(name, 1, { HERE }, function(self, x)
    local bytes = text.bytes(arguments.text(name, x))
    if bytes == "" then return name:find "^r" and text.count(self) or 0 end
    local found = find(text.bytes(self), bytes, 1)[1]
    if found then return text.index_of(self, found) end
    return name:find "find" and -1 or fail "looks for a str that is not there"
  end)
end

finder("find", places)
finder("index", places)
finder("rfind", places_from_end)
finder("rindex", places_from_end)

method("count", 1, { HERE }, function(self, x)
  local bytes = text.bytes(arguments.text("count", x))
  if bytes == "" then return text.count(self) + 1 end
  return #places(text.bytes(self), bytes, -1)
end)

-- ---- letters --------------------------------------------------------------------------

local function cased(name, change)
  method(name, 0, {}, function(self)
    return text.computed(change(text.bytes(self)), self)
  end)
end

--- The first letter in title case, the others in lower case.
function M.capitalized(bytes)
  local first, rest = bytes:match "^([^\128-\191][\128-\191]*)(.*)$"
  return first and case.title(first) .. case.lower(rest) or ""
end

local function in_ascii(name, change)
  return function(bytes)
    if bytes:find "[\128-\255]" then
      fail("calls %s on letters outside ASCII, which kvlab does not do", name)
    end
    return change(bytes)
  end
end

cased("upper", case.upper)
cased("lower", case.lower)
cased("capitalize", M.capitalized)
cased("title", in_ascii("title", function(bytes)
  return (bytes:lower():gsub("%a+", function(word)
    return word:sub(1, 1):upper() .. word:sub(2)
  end))
end))
cased("swapcase", in_ascii("swapcase", function(bytes)
  return (bytes:gsub("%a", function(x)
    return x == x:lower() and x:upper() or x:lower()
  end))
end))

--- isdigit, isspace, …: whether there are characters, and all fit a pattern of Lua.
for name, pattern in pairs { isdigit = "^%d+$", isdecimal = "^%d+$", isnumeric = "^%d+$",
  isalpha = "^%a+$", isalnum = "^%w+$", isidentifier = "^[%a_][%w_]*$" } do
  local fits = in_ascii(name, function(bytes) return bytes:find(pattern) ~= nil end)
  method(name, 0, {}, function(self) return fits(text.bytes(self)) end)
end
for name, other in pairs { isupper = "%l", islower = "%u" } do
  local fits = in_ascii(name, function(bytes)
    return bytes:find "%a" ~= nil and not bytes:find(other)
  end)
  method(name, 0, {}, function(self) return fits(text.bytes(self)) end)
end
method("isascii", 0, {}, function(self)
  return not text.bytes(self):find "[\128-\255]"
end)
method("isspace", 0, {}, function(self)
  local bytes = text.bytes(self)
  return bytes ~= "" and text.past(bytes, text.WHITE, 1) > #bytes
end)

-- ---- width ----------------------------------------------------------------------------

--- Spaces to the left and to the right of a string of `width` characters.
local function padder(name, share)
  method(name, 1, { HERE, HERE }, function(self, width, fill)
    fill = arguments.text(name, fill, " ")
    width = arguments.whole(name, width)
    if text.count(fill) ~= 1 then fail("fills %s with more than a letter", name) end
    local missing = math.max(0, width - text.count(self))
    local left = share(missing, width)
    meter.write(missing * #text.bytes(fill))
    return text.join { text.bytes(fill):rep(left), self,
                       text.bytes(fill):rep(missing - left) }
  end)
end

padder("ljust", function() return 0 end)
padder("rjust", function(missing) return missing end)
padder("center", function(missing, width)
  return math.floor(missing / 2) + (missing % 2 == 1 and width % 2 == 1 and 1 or 0)
end)

method("zfill", 1, { HERE }, function(self, width)
  local sign = text.bytes(self):match "^[+-]?"
  local missing = math.max(0, arguments.whole("zfill", width) - text.count(self))
  meter.write(missing)
  return text.join { sign, ("0"):rep(missing), text.sub(self, #sign + 1, -1) }
end)

-- ---- joining and formats --------------------------------------------------------------

method("join", 1, { HERE }, function(self, parts)
  local items = value.items_of(parts)
  for _, one in ipairs(items) do arguments.text("join", one) end
  return text.join(items, self)
end)

--- str.format takes any arguments, so it reads them itself.
M.METHODS.format = { any = true, call = format.braces }

return M
