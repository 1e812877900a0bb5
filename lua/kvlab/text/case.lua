--- Upper and lower case as Python has it, and which characters can be printed. Letters
-- outside ASCII take the tables of utf8proc, which is opened when it is first needed.
local ffi = require "ffi"
local unicode = require "kvlab.text.unicode"

local M = {}

ffi.cdef [[
int32_t utf8proc_toupper(int32_t code);
int32_t utf8proc_tolower(int32_t code);
int32_t utf8proc_totitle(int32_t code);
int utf8proc_category(int32_t code);
]]

local function library()
  local lib, why = unicode.open()
  return lib or error(why, 0)
end

-- Ranges of code points (Unicode's SpecialCasing.txt): of letters whose upper case is
-- several letters and, in LOWER, of letters whose lower case is several letters or
-- depends on other letters.
local SEVERAL = {
  0xDF, 0xDF, 0x149, 0x149, 0x1F0, 0x1F0, 0x390, 0x390, 0x3B0, 0x3B0, 0x587, 0x587,
  0x1E96, 0x1E9A, 0x1F50, 0x1F50, 0x1F52, 0x1F52, 0x1F54, 0x1F54, 0x1F56, 0x1F56,
  0x1F80, 0x1FAF, 0x1FB2, 0x1FB4, 0x1FB6, 0x1FB7, 0x1FBC, 0x1FBC, 0x1FC2, 0x1FC4,
  0x1FC6, 0x1FC7, 0x1FCC, 0x1FCC, 0x1FD2, 0x1FD3, 0x1FD6, 0x1FD7, 0x1FE2, 0x1FE4,
  0x1FE6, 0x1FE7, 0x1FF2, 0x1FF4, 0x1FF6, 0x1FF7, 0x1FFC, 0x1FFC, 0xFB00, 0xFB06,
  0xFB13, 0xFB17 }
local LOWER = { 0x130, 0x130, 0x3A3, 0x3A3 }

local function is_in(ranges, code)
  for i = 1, #ranges, 2 do
    if code >= ranges[i] and code <= ranges[i + 1] then return true end
  end
  return false
end

--- The text with each letter mapped by a function of utf8proc.
local function mapped(text, name, ranges, ascii)
  if not text:find "[\128-\255]" then return ascii(text) end
  local map, parts = library()["utf8proc_to" .. name], {}
  for letter in unicode.characters(text) do
    local code = unicode.code(letter)
    if is_in(ranges, code) then
      error(("needs the %s case of %q, which is not one letter for itself"):format(name,
        letter), 0)
    end
    parts[#parts + 1] = unicode.encode(map(code))
  end
  return table.concat(parts)
end

--- The text in upper case.
---@param text string
---@return string
function M.upper(text) return mapped(text, "upper", SEVERAL, string.upper) end

--- The text in lower case.
---@param text string
---@return string
function M.lower(text) return mapped(text, "lower", LOWER, string.lower) end

--- The text in title case, where Unicode has one ("ǆ" becomes "ǅ").
---@param text string
---@return string
function M.title(text) return mapped(text, "title", SEVERAL, string.upper) end

-- ORDER utf8proc_category_t: unassigned, then letters, marks, numbers, punctuation and
-- symbols, then separators, controls, format, surrogates, private use
local FIRST_OF_SEPARATORS = 23

--- Whether Python's repr writes a character as it is.
---@param letter string
---@return boolean
function M.is_printable(letter)
  if #letter == 1 then return letter:find "^[\32-\126]" ~= nil end
  local category = library().utf8proc_category(unicode.code(letter))
  return category > 0 and category < FIRST_OF_SEPARATORS
end

return M
