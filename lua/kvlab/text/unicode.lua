--- UTF-8: repairs what is invalid, finds where a text may be cut, and puts text into the
-- normal forms of Unicode, by the library utf8proc.
local ffi = require "ffi"
local additions = require "kvlab.text.unicode_additions"
local regex = require "kvlab.text.regex"
local rest = require("kvlab.slices").rest
local scan = require "kvlab.text.scan"

local M = {}

--- The replacement for bytes that are not UTF-8: U+FFFD.
M.REPLACEMENT = "\239\191\189"

ffi.cdef [[
ptrdiff_t utf8proc_map(const uint8_t *text, ptrdiff_t length, uint8_t **result,
                       int options);
const char *utf8proc_errmsg(ptrdiff_t problem);
const int16_t *utf8proc_get_property(int32_t code); // category, combining class, …
void free(void *memory);
]]

-- ORDER utf8proc.h
local STABLE, COMPAT, COMPOSE, DECOMPOSE = 2, 4, 8, 16
local FORMS = {
  NFC = STABLE + COMPOSE, NFD = STABLE + DECOMPOSE,
  NFKC = STABLE + COMPOSE + COMPAT, NFKD = STABLE + DECOMPOSE + COMPAT,
}
local NAMES = { "libutf8proc.so.3", "libutf8proc.so.2", "utf8proc" }
local opened

--- The library; nil and why if there is none.
function M.open()
  if opened then return opened end
  for _, name in ipairs(NAMES) do
    local ok, lib = pcall(ffi.load, name)
    if ok then
      opened = lib
      return lib
    end
  end
  return nil, "utf8proc is not here: libutf8proc.so.2 or .3, which puts text into the "
    .. "normal forms of Unicode; it is the Debian package libutf8proc2 or libutf8proc3"
end

-- ---- characters -----------------------------------------------------------------------

-- First bytes of characters: how many bytes follow, and the range of the first of those.
local FOLLOW, LOW, HIGH = {}, {}, {}
for byte = 0, 255 do
  local n = byte < 0x80 and 0 or byte < 0xC2 and -1 or byte < 0xE0 and 1 or byte < 0xF0
    and 2 or byte < 0xF5 and 3 or -1
  FOLLOW[byte], LOW[byte], HIGH[byte] = n, 0x80, 0xBF
end
LOW[0xE0], HIGH[0xED], LOW[0xF0], HIGH[0xF4] = 0xA0, 0x9F, 0x90, 0x8F

--- The bytes of the character at `at` (from 1), or of the mistake there. The beginning of
-- a character, if the next byte cannot continue it, is one mistake, as Unicode advises
-- and Python and Rust do.
---@param text string
---@param at integer
---@return integer bytes
---@return "whole"|"wrong"|"cut" state  "cut": the text ends inside of the character
function M.character(text, at)
  local first = text:byte(at)
  local n = FOLLOW[first]
  if n < 0 then return 1, "wrong" end
  for i = 1, n do
    local byte = text:byte(at + i)
    if not byte then return i, "cut" end
    local low, high = i == 1 and LOW[first] or 0x80, i == 1 and HIGH[first] or 0xBF
    if byte < low or byte > high then return i, "wrong" end
  end
  return n + 1, "whole"
end

--- The text with U+FFFD in place of each mistake, and the bytes of an incomplete
-- character at its end.
---@param text string
---@return string valid
---@return string rest  at most 3 bytes, which begin a character
function M.split_valid(text)
  local parts, from, at = {}, 1, text:find "[\128-\255]"
  while at do
    local n, state = M.character(text, at)
    if state ~= "whole" then
      parts[#parts + 1] = text:sub(from, at - 1)
      if state == "cut" then return table.concat(parts), text:sub(at) end
      parts[#parts + 1], from = M.REPLACEMENT, at + n
    end
    at = text:find("[\128-\255]", at + n)
    rest()
  end
  if from == 1 then return text, "" end
  parts[#parts + 1] = text:sub(from)
  return table.concat(parts), ""
end

--- The text with U+FFFD in place of each mistake.
---@param text string
---@return string
function M.repaired(text)
  if not regex.invalid_at(text) then return text end
  local valid, left = M.split_valid(text)
  return left == "" and valid or valid .. M.REPLACEMENT
end

--- The UTF-8 characters of a valid text, one by one.
---@param text string
---@return fun(): string|nil
function M.characters(text) return text:gmatch "[%z\1-\127\194-\244][\128-\191]*" end

--- The code point of a valid character.
---@param text string
---@return integer
function M.code(text)
  local a, b, c, d = text:byte(1, 4)
  if a < 0x80 then return a end
  if a < 0xE0 then return (a - 0xC0) * 64 + b - 0x80 end
  if a < 0xF0 then return ((a - 0xE0) * 64 + b - 0x80) * 64 + c - 0x80 end
  return (((a - 0xF0) * 64 + b - 0x80) * 64 + c - 0x80) * 64 + d - 0x80
end

--- The UTF-8 bytes of a code point.
---@param code integer
---@return string
function M.encode(code)
  local function tail(n) return 0x80 + math.floor(code / n) % 64 end
  if code < 0x80 then return string.char(code) end
  if code < 0x800 then return string.char(0xC0 + math.floor(code / 64), tail(1)) end
  if code < 0x10000 then
    return string.char(0xE0 + math.floor(code / 4096), tail(64), tail(1))
  end
  return string.char(0xF0 + math.floor(code / 262144), tail(4096), tail(64), tail(1))
end

-- ---- normal forms ---------------------------------------------------------------------

local newer, starts, runs

--- The normal form of a text, by utf8proc.
local function mapped(lib, text, form)
  local result = ffi.new "uint8_t *[1]"
  local length = lib.utf8proc_map(text, #text, result, FORMS[form])
  if length < 0 then
    error(form .. " of a text: " .. ffi.string(lib.utf8proc_errmsg(length)), 0)
  end
  local normal = ffi.string(result[0], length)
  ffi.C.free(result[0])
  return normal
end

-- A text may be cut before these characters, and each part be put into a normal form
-- separately: they begin with no mark, and do not compose with the character before them.
-- Marks do compose, and so do the letters of Hangul and, in NFKC, the narrow forms of
-- Hangul and Katakana marks.
M.STARTS = "(?![\\x{1100}-\\x{11FF}\\x{3131}-\\x{318E}\\x{A960}-\\x{A97F}"
  .. "\\x{D7B0}-\\x{D7FF}\\x{FF9E}-\\x{FFDC}])[\\p{L}\\p{N}\\p{P}\\p{S}\\x{0}-\\x{7F}]"
local BYTES_PART = 2 ^ 16 -- of a text, between two cuts

-- utf8proc sorts the marks after a letter by their class in a time that grows with the
-- square of their number, so long runs are sorted here first.
local RUNS = "[\\p{M}\\x{FF9E}\\x{FF9F}]{33,}"

--- Appends the marks that have come since the last letter, by their classes.
local function put_marks(parts, marks)
  local classes = {}
  for class in pairs(marks) do classes[#classes + 1] = class end
  table.sort(classes)
  for _, class in ipairs(classes) do parts[#parts + 1] = table.concat(marks[class]) end
end

--- A run of marks, decomposed and in the order of normal forms.
local function sorted_run(lib, run, form)
  local parts, marks, known = {}, {}, {}
  local whole = form:find "K" and "NFKD" or "NFD"
  for character in M.characters(run) do
    known[character] = known[character] or mapped(lib, character, whole)
    for mark in M.characters(known[character]) do
      local class = lib.utf8proc_get_property(M.code(mark))[1]
      if class == 0 then
        put_marks(parts, marks)
        parts[#parts + 1], marks = mark, {}
      else
        marks[class] = marks[class] or {}
        table.insert(marks[class], mark)
      end
    end
    rest()
  end
  put_marks(parts, marks)
  return table.concat(parts)
end

--- The text with its long runs of marks in the order of normal forms.
local function with_sorted_runs(lib, text, form)
  local first, last = runs:find(text, #text, 0)
  if first < 0 then return text end
  local parts, from = {}, 0
  while first >= 0 do
    parts[#parts + 1] = text:sub(from + 1, first)
    parts[#parts + 1] = sorted_run(lib, text:sub(first + 1, last), form)
    from = last
    first, last = runs:find(text, #text, from)
  end
  parts[#parts + 1] = text:sub(from + 1)
  return table.concat(parts)
end

--- Appends the normal form of a text, part by part.
local function put_mapped(parts, lib, text, form)
  text = with_sorted_runs(lib, text, form)
  local from = 0
  while #text - from > BYTES_PART do
    local at = from + BYTES_PART
    while text:find("^[\128-\191]", at + 1) do at = at + 1 end
    local cut = starts:find(text, #text, at)
    if cut < 0 then break end
    parts[#parts + 1] = mapped(lib, text:sub(from + 1, cut), form)
    from = cut
    rest()
  end
  parts[#parts + 1] = mapped(lib, text:sub(from + 1), form)
  rest()
end

--- A function that puts valid text into a normal form, as `tokenizers` does: a character
-- that is newer than its tables stays as it is, and nothing is composed across it.
---@param form "NFC"|"NFD"|"NFKC"|"NFKD"
---@return (fun(text: string): string)|nil
---@return string|nil why
function M.normal_form(form)
  local lib, why = M.open()
  if not lib then return nil, why end
  local a = additions
  newer = newer or assert(regex.compile(("[%s%s%s%s%s]+"):format(a.unnormalized, a.L, a.M,
    a.N, a.S)))
  starts = starts or assert(regex.compile(M.STARTS))
  runs = runs or assert(regex.compile(RUNS))
  -- Below U+0300, NFC changes nothing; below U+0080, no form does.
  local changes = scan.set(form == "NFC" and "[\204-\255]" or "[\128-\255]")
  return function(text)
    if not scan.find(changes, text, 1) then return text end
    local parts, from = {}, 0
    while true do
      local first, last = newer:find(text, #text, from)
      if first < 0 then break end
      put_mapped(parts, lib, text:sub(from + 1, first), form)
      parts[#parts + 1] = text:sub(first + 1, last)
      from = last
    end
    put_mapped(parts, lib, text:sub(from + 1), form)
    return table.concat(parts)
  end
end

return M
