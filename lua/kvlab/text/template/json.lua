--- JSON of templates: reads texts into values that keep the order of keys and know ints
-- from floats, and writes values as Python's json.dumps does.
local fail = require "kvlab.text.template.problem"
local meter = require "kvlab.text.template.meter"
local pause = require("kvlab.slices").rest
local show = require "kvlab.text.template.show"
local text = require "kvlab.text.template.text"
local unicode = require "kvlab.text.unicode"
local value = require "kvlab.text.template.value"

local M = {}

-- ---- reading --------------------------------------------------------------------------

local ESCAPES = { ['"'] = '"', ["\\"] = "\\", ["/"] = "/", b = "\b", f = "\f", n = "\n",
                  r = "\r", t = "\t" }

local function refuse(source, at, why)
  local line = 1 + select(2, source:sub(1, at - 1):gsub("\n", ""))
  fail("line %d: %s", line, why)
end

local function skip(source, at) return source:match("^[ \n\r\t]*()", at) end

--- The escape at a backslash: its text, and the byte after it.
local function read_escape(source, at)
  local letter = source:sub(at + 1, at + 1)
  if ESCAPES[letter] then return ESCAPES[letter], at + 2 end
  local high = tonumber(source:match("^u(%x%x%x%x)", at + 1) or "", 16)
  if not high then refuse(source, at, "is no escape of JSON") end
  if high < 0xD800 or high > 0xDFFF then return unicode.encode(high), at + 6 end
  local low = tonumber(source:match("^\\u(%x%x%x%x)", at + 6) or "", 16)
  if high > 0xDBFF or not low or low < 0xDC00 or low > 0xDFFF then
    refuse(source, at, "is a half of a surrogate pair")
  end
  return unicode.encode(0x10000 + (high - 0xD800) * 0x400 + low - 0xDC00), at + 12
end

--- The string whose quote is at `at`.
local function read_string(source, at)
  local parts, from = {}, at + 1
  while true do
    local stop = source:find('[%c"\\]', from)
    local letter = stop and source:sub(stop, stop)
    if letter == '"' then
      parts[#parts + 1] = source:sub(from, stop - 1)
      return text.said(table.concat(parts)), stop + 1
    elseif letter == "\\" then
      parts[#parts + 1] = source:sub(from, stop - 1)
      parts[#parts + 1], from = read_escape(source, stop)
      pause()
    elseif letter == "\127" then
      parts[#parts + 1], from = source:sub(from, stop), stop + 1
    else
      refuse(source, at, "a string does not end on its line")
    end
  end
end

local function read_number(source, at)
  local whole, rest, after = source:match("^(%-?%d+)([%d.eE+-]*)()", at)
  local is_int = rest == ""
  local is_valid = whole and not whole:find "^%-?0%d"
    and (is_int or rest:find "^%.%d+$" or rest:find "^%.?%d*[eE][+-]?%d+$"
      and not rest:find "^%.[eE]")
  if not is_valid then refuse(source, at, "is no value of JSON") end
  local number = tonumber(whole .. rest)
  if is_int then return value.int(number), after end
  return value.float(number), after
end

local WORDS = { ["true"] = true, ["false"] = false, null = value.NONE }
local read

--- Reads what stands between brackets: calls item(at), which returns the byte after it.
local function read_items(source, at, close, item)
  at = skip(source, at + 1)
  if source:sub(at, at) == close then return at + 1 end
  while true do
    at = skip(source, item(at))
    local letter = source:sub(at, at)
    if letter == close then return at + 1 end
    pause()
    if letter ~= "," then refuse(source, at, ("has no , or %s"):format(close)) end
    at = skip(source, at + 1)
  end
end

local function read_dict(source, at, depth)
  local dict = value.dict()
  return dict, read_items(source, at, "}", function(i)
    if source:sub(i, i) ~= '"' then refuse(source, i, "has a key that is no string") end
    local key, after = read_string(source, i)
    after = skip(source, after)
    if source:sub(after, after) ~= ":" then
      refuse(source, after, "has a key without :")
    end
    local item, last = read(source, skip(source, after + 1), depth)
    value.put(dict, key, item)
    return last
  end)
end

local function read_list(source, at, depth)
  local items = {}
  local after = read_items(source, at, "]", function(i)
    items[#items + 1], i = read(source, i, depth)
    return i
  end)
  return value.sequence(items), after
end

function read(source, at, depth)
  if depth > meter.DEPTH then refuse(source, at, "is nested too deeply") end
  local letter = source:sub(at, at)
  if letter == "{" then return read_dict(source, at, depth + 1) end
  if letter == "[" then return read_list(source, at, depth + 1) end
  if letter == '"' then return read_string(source, at) end
  local word = source:match("^%l+", at)
  if WORDS[word] ~= nil then return WORDS[word], at + #word end
  return read_number(source, at)
end

--- The value of a JSON text. Its strings count as text of messages, not of the template.
-- Raises with the line.
---@param source string
function M.read(source)
  source = unicode.repaired(source)
  local x, after = read(source, skip(source, 1), 0)
  after = skip(source, after)
  if after <= #source then refuse(source, after, "has something after its value") end
  return x
end

-- ---- writing --------------------------------------------------------------------------

local WRITTEN = { ['"'] = '\\"', ["\\"] = "\\\\", ["\n"] = "\\n", ["\r"] = "\\r",
                  ["\t"] = "\\t", ["\b"] = "\\b", ["\f"] = "\\f" }

local function control(letter)
  return WRITTEN[letter] or ("\\u%04x"):format(letter:byte())
end

local function in_ascii(letter)
  local code = unicode.code(letter)
  if code < 0x10000 then return ("\\u%04x"):format(code) end
  code = code - 0x10000
  return ("\\u%04x\\u%04x"):format(0xD800 + math.floor(code / 0x400),
    0xDC00 + code % 0x400)
end

local function write_string(x, o)
  local bytes = text.bytes(x):gsub('[%z\1-\31"\\]', control)
  if o.ensure_ascii then
    bytes = bytes:gsub("[\194-\244][\128-\191]+", in_ascii):gsub("\127", "\\u007f")
  end
  return text.computed('"' .. bytes .. '"', x)
end

local SPECIAL = { nan = "NaN", inf = "Infinity", ["-inf"] = "-Infinity" }

--- A number, true, false or None; nil for anything else.
local function write_scalar(x)
  if x == value.NONE then return "null" end
  if type(x) == "boolean" then return tostring(x) end
  if not value.number(x) then return nil end
  local shown = show.str(x)
  return SPECIAL[shown] or shown
end

local write

local function write_items(parts, open, close, o, depth)
  if #parts == 0 then return open .. close end
  if not o.indent then return text.join { open, text.join(parts, o.comma), close } end
  local last = "\n" .. o.indent:rep(depth)
  local gap = last .. o.indent
  return text.join { open, gap, text.join(parts, o.comma .. gap), last, close }
end

local function write_dict(dict, o, depth)
  local parts, keys = {}, o.sort_keys and {} or value.keys(dict)
  if o.sort_keys then
    for i, key in ipairs(dict.order) do keys[i] = key end
    table.sort(keys, value.less)
  end
  for i, key in ipairs(keys) do
    local name = text.is(key) and write_string(key, o) or '"' .. write_scalar(key) .. '"'
    parts[i] = text.join { name, o.colon, write(value.get(dict, key), o, depth + 1) }
  end
  return write_items(parts, "{", "}", o, depth)
end

function write(x, o, depth)
  if depth > meter.DEPTH then fail "writes JSON that is nested too deeply" end
  meter.spend(1)
  if text.is(x) then return write_string(x, o) end
  local scalar = write_scalar(x)
  if scalar then return scalar end
  if value.is_dict(x) then return write_dict(x, o, depth) end
  local kind = value.kind(x)
  if kind ~= "list" and kind ~= "tuple" then
    fail("writes a %s as JSON", kind)
  end
  local parts = {}
  for i, item in ipairs(x.items) do parts[i] = write(item, o, depth + 1) end
  return write_items(parts, "[", "]", o, depth)
end

--- A value as json.dumps writes it.
---@param o table  ensure_ascii, sort_keys (booleans), indent (a string, or nil), comma
--                 (the text after an item), colon (the text after a key)
---@return any text  of kvlab.text.template.text
function M.write(x, o) return write(x, o, 0) end

return M
