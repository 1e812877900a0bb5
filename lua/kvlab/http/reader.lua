--- Reads the JSON of a request. kvlab.json reads a text in one go, which takes most of a
-- second for 4 MB of small values; this reads it in slices. It also refuses a field that
-- is given twice, which other readers accept silently.
local json = require "kvlab.json"
local rest = require("kvlab.slices").rest
local scan = require "kvlab.text.scan"

local M = {}

local DEPTH_MAX = 64      -- of nested values; what the API needs is 5
local FIELDS_MOST = 1024  -- of an object
local VALUES_PART = 1024  -- between two rests

local ESCAPES = { b = "\b", f = "\f", n = "\n", r = "\r", t = "\t", ["\""] = "\"",
                  ["\\"] = "\\", ["/"] = "/" }
local WORDS = { t = { "true", true }, f = { "false", false }, n = { "null", json.null } }

local STOPS = scan.set '["\\%z\1-\31]' -- what ends a part of a string
local VALUE = scan.set "[^ \t\r\n]"

--- Raises with the line and the column of a byte.
local function fail(text, at, words, ...)
  local line, from = 1, 1
  while true do
    local newline = text:find("\n", from, true)
    if not newline or newline >= at then break end
    line, from = line + 1, newline + 1
    if line % VALUES_PART == 0 then rest() end
  end
  error(("line %d, column %d: %s"):format(line, at - from + 1, words:format(...)), 0)
end

--- The first byte that is no white space, from `at` on.
local function skip(text, at) return scan.find(VALUE, text, at) or #text + 1 end

local function encoded(code)
  if code < 0x80 then return string.char(code) end
  local function tail(n) return 0x80 + math.floor(code / n) % 64 end
  if code < 0x800 then return string.char(0xC0 + math.floor(code / 64), tail(1)) end
  if code < 0x10000 then
    return string.char(0xE0 + math.floor(code / 4096), tail(64), tail(1))
  end
  return string.char(0xF0 + math.floor(code / 262144), tail(4096), tail(64), tail(1))
end

--- The character of the escape \u at `at`, and the byte after it.
local function read_unicode(text, at)
  local code = tonumber(text:match("^%x%x%x%x", at + 2) or "", 16)
  if not code then fail(text, at, "expected four hexadecimal digits after \\u") end
  if code < 0xD800 or code > 0xDFFF then return encoded(code), at + 6 end
  local low = tonumber(text:match("^\\u([dD][c-fC-F]%x%x)", at + 6) or "", 16)
  if code > 0xDBFF or not low then fail(text, at, "half of a character, a surrogate") end
  return encoded(0x10000 + (code - 0xD800) * 1024 + low - 0xDC00), at + 12
end

--- The string whose quote is at `at`, and the byte after it.
local function read_string(text, at)
  local from, parts = at + 1, nil
  while true do
    local stop = scan.find(STOPS, text, from)
    local c = stop and text:sub(stop, stop)
    if c == '"' then
      local last = text:sub(from, stop - 1)
      if not parts then return last, stop + 1 end
      parts[#parts + 1] = last
      return table.concat(parts), stop + 1
    elseif c ~= "\\" then
      fail(text, stop or at, stop and "a control character in a string"
        or "a string without its end")
    end
    parts = parts or {}
    parts[#parts + 1] = text:sub(from, stop - 1)
    local escape = text:sub(stop + 1, stop + 1)
    if escape == "u" then parts[#parts + 1], from = read_unicode(text, stop)
    else
      parts[#parts + 1], from = ESCAPES[escape] or fail(text, stop, "no such escape"),
        stop + 2
    end
    if #parts % VALUES_PART < 2 then rest() end
  end
end

local function read_number(text, at)
  local digits, after = text:match("^%-?(%d+)()", at)
  if not digits or digits:find "^0%d" then fail(text, at, "expected a value") end
  after = text:match("^%.%d+()", after) or after
  after = text:match("^[eE][+-]?%d+()", after) or after
  return tonumber(text:sub(at, after - 1)), after
end

local read_value

local function read_array(text, at, depth)
  local list, n = {}, 0
  at = skip(text, at + 1)
  if text:byte(at) == 93 then return json.array(list), at + 1 end
  while true do
    n = n + 1
    list[n], at = read_value(text, at, depth)
    at = skip(text, at)
    local c = text:byte(at)
    if c == 93 then return list, at + 1 end
    if c ~= 44 then fail(text, at, "expected , or ]") end
    at = skip(text, at + 1)
    if n % VALUES_PART == 0 then rest() end
  end
end

local function read_object(text, at, depth)
  local object, n = {}, 0
  at = skip(text, at + 1)
  if text:byte(at) == 125 then return object, at + 1 end
  while true do
    if text:byte(at) ~= 34 then fail(text, at, "expected the name of a field") end
    local name, after = read_string(text, at)
    n = n + 1
    if object[name] ~= nil then fail(text, at, "this field is given twice") end
    if n > FIELDS_MOST then
      fail(text, at, "an object with more than %d fields", FIELDS_MOST)
    end
    at = skip(text, after)
    if text:byte(at) ~= 58 then fail(text, at, "expected :") end
    object[name], at = read_value(text, skip(text, at + 1), depth)
    at = skip(text, at)
    local c = text:byte(at)
    if c == 125 then return object, at + 1 end
    if c ~= 44 then fail(text, at, "expected , or }") end
    at = skip(text, at + 1)
  end
end

function read_value(text, at, depth)
  local c = text:sub(at, at)
  if c == '"' then return read_string(text, at) end
  if c == "[" or c == "{" then
    if depth >= DEPTH_MAX then
      fail(text, at, "the values are nested more than %d deep", DEPTH_MAX)
    end
    return (c == "[" and read_array or read_object)(text, at, depth + 1)
  end
  local word = WORDS[c]
  if word and text:sub(at, at + #word[1] - 1) == word[1] then
    return word[2], at + #word[1]
  end
  return read_number(text, at)
end

--- The value of a JSON text that is UTF-8. Raises with the line and column.
---@param text string
---@return any
function M.decode(text)
  local value, at = read_value(text, skip(text, 1), 0)
  at = skip(text, at)
  if at <= #text then fail(text, at, "expected the end") end
  return value
end

return M
