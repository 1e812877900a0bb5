--- Strings of templates. A text records which of its bytes come from a message, so that
-- names of special tokens in these bytes stay ordinary text. A text with only the
-- template's own words is a Lua string; any other is a Text, with a flag for each byte.
--
-- Strings are UTF-8, and Python counts characters: `count`, `slice` and `characters` do.
local fail = require "kvlab.text.template.problem"
local meter = require "kvlab.text.template.meter"
local unicode = require "kvlab.text.unicode"

local M = {}

---@class kvlab.text.template.Text
---@field bytes string
---@field marks string   a byte for each of `bytes`: "\1" if a message said it, else "\0"
---@field is_markup boolean|nil  made by |safe or |escape: what is added to it is escaped
local Text = {}
Text.__index = Text

--- Whether a value is a string of a template.
function M.is(x) return type(x) == "string" or getmetatable(x) == Text end

--- The bytes of a string.
function M.bytes(x) return type(x) == "string" and x or x.bytes end

local function new(bytes, marks, is_markup)
  if not is_markup and not marks:find "\1" then return bytes end
  return setmetatable({ bytes = bytes, marks = marks, is_markup = is_markup }, Text)
end

local function marks_of(x)
  return type(x) == "string" and ("\0"):rep(#x) or x.marks
end

--- A string that comes from a message.
function M.said(bytes) return new(bytes, ("\1"):rep(#bytes)) end

--- The same string, to which nothing can be added without escaping it.
function M.markup(x) return new(M.bytes(x), marks_of(x), true) end

function M.is_markup(x) return type(x) == "table" and x.is_markup or false end

--- The string; raises if it is markup. What is computed from markup would be markup, too,
-- and kvlab only writes markup and adds to it.
function M.unmarked(x)
  if M.is_markup(x) then
    fail "computes with a text that is marked as safe, which kvlab only writes and adds"
  end
  return x
end

--- Bytes that were computed from strings: they count as a message's if any byte of the
-- strings does.
---@param bytes string
---@param ... any  strings, or other values
function M.computed(bytes, ...)
  meter.write(#bytes)
  for i = 1, select("#", ...) do
    local x = select(i, ...)
    if type(x) == "table" and x.marks and x.marks:find "\1" then return M.said(bytes) end
  end
  return bytes
end

--- A part of a string, by its bytes.
function M.sub(x, first, last)
  if type(x) == "string" then return x:sub(first, last) end
  return new(x.bytes:sub(first, last), x.marks:sub(first, last))
end

--- The strings of a list as one.
---@param list table
---@param between? table|string  a string that stands between them
function M.join(list, between)
  local bytes, marks, is_plain, size = {}, {}, true, 0
  local function add(x)
    local b = M.bytes(x)
    bytes[#bytes + 1], size = b, size + #b
    is_plain = is_plain and type(x) == "string"
  end
  for i, x in ipairs(list) do
    if between and i > 1 then add(between) end
    add(x)
  end
  meter.write(size)
  if is_plain then return table.concat(bytes) end
  for i, x in ipairs(list) do
    if between and i > 1 then marks[#marks + 1] = marks_of(between) end
    marks[#marks + 1] = marks_of(x)
  end
  return new(table.concat(bytes), table.concat(marks))
end

--- The ranges { first, last } of bytes that come from messages.
function M.ranges(x)
  local ranges = {}
  for first, after in marks_of(x):gmatch "()\1+()" do
    ranges[#ranges + 1] = { first, after - 1 }
  end
  return ranges
end

-- ---- characters -----------------------------------------------------------------------

--- How many characters a string has.
function M.count(x)
  local bytes = M.bytes(x)
  if not bytes:find "[\128-\255]" then return #bytes end
  return select(2, bytes:gsub("[^\128-\191]", ""))
end

local LETTERS_PART = 2 ^ 12 -- between two rests

--- The characters of a string, as a list.
function M.characters(x)
  local list, at = {}, 1
  local bytes = M.bytes(x)
  meter.spend(#bytes)
  for letter in unicode.characters(bytes) do
    list[#list + 1] = M.sub(x, at, at + #letter - 1)
    at = at + #letter
    if #list % LETTERS_PART == 0 then meter.rest() end
  end
  return list
end

--- The byte at which character i (from 0) begins; the one after the end if there is none.
local function byte_of(bytes, i)
  if not bytes:find "[\128-\255]" then return i + 1 end
  local at = 1
  for _ = 1, i do at = bytes:find("[^\128-\191]", at + 1) or #bytes + 1 end
  return at
end

--- How many characters stand before a byte (from 1).
function M.index_of(x, byte) return M.count(M.bytes(x):sub(1, byte - 1)) end

--- Characters first ... last - 1 (from 0), both within the string.
function M.range(x, first, last)
  if last <= first then return "" end
  local bytes = M.bytes(x)
  meter.spend(1 + math.floor(#bytes / 256))
  return M.sub(x, byte_of(bytes, first), byte_of(bytes, last) - 1)
end

-- ---- white space ----------------------------------------------------------------------

-- Characters that are white space for Python's str.isspace.
M.WHITE = { [" "] = true, ["\194\133"] = true, ["\194\160"] = true,
            ["\225\154\128"] = true, ["\226\128\168"] = true, ["\226\128\169"] = true,
            ["\226\128\175"] = true, ["\226\129\159"] = true, ["\227\128\128"] = true }
for byte = 9, 13 do M.WHITE[string.char(byte)] = true end
for byte = 28, 31 do M.WHITE[string.char(byte)] = true end
for byte = 128, 138 do M.WHITE["\226\128" .. string.char(byte)] = true end

--- The characters of a text as a set.
function M.set(bytes)
  local set = {}
  for letter in unicode.characters(bytes) do set[letter] = true end
  return set
end

--- The first character at or after byte `at` that is not in a set: its first byte.
function M.past(bytes, set, at)
  while at <= #bytes do
    local letter = bytes:match("^[^\128-\191][\128-\191]*", at)
    if not set[letter] then return at end
    at = at + #letter
  end
  return at
end

--- The last character at or before byte `at` that is not in a set: its last byte.
local function before(bytes, set, at)
  while at > 0 do
    local first = at
    while bytes:find("^[\128-\191]", first) do first = first - 1 end
    if not set[bytes:sub(first, at)] then return at end
    at = first - 1
  end
  return at
end

--- The string without the characters of a set at its ends.
---@param set? table<string, boolean>  (white space)
function M.strip(x, set, at_left, at_right)
  local bytes = M.bytes(x)
  set = set or M.WHITE
  local first = at_left and M.past(bytes, set, 1) or 1
  local last = at_right and before(bytes, set, #bytes) or #bytes
  if first == 1 and last == #bytes and not M.is_markup(x) then return x end
  return M.sub(x, first, last)
end

return M
