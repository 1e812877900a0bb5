--- Regular expressions of tokenizer files, matched by PCRE2, which is opened when it is
-- first needed.
--
-- A tokenizer.json is written for Oniguruma in its Ruby syntax. `compile` writes such an
-- expression as PCRE2 reads it, so that both match the same text: the classes \s, \w, \d
-- and \p{…} are spelled out, and the characters that Unicode has had since version 14
-- (that of PCRE2 10.42) are added to them. Constructs that PCRE2 does not have are
-- refused.
local ffi = require "ffi"
local additions = require "kvlab.text.unicode_additions"
local fail = require("kvlab.options").fail
local rest = require("kvlab.slices").rest
local scan = require "kvlab.text.scan"

local M = {}

ffi.cdef [[
typedef struct kvl_pcre2_code kvl_pcre2_code;
typedef struct kvl_pcre2_match_data kvl_pcre2_match_data;
typedef struct kvl_pcre2_match_context kvl_pcre2_match_context;
typedef struct kvl_pcre2_jit_stack kvl_pcre2_jit_stack;
int pcre2_config_8(uint32_t what, void *where);
kvl_pcre2_code *pcre2_compile_8(const char *pattern, size_t length, uint32_t options,
                                int *problem, size_t *offset, void *context);
void pcre2_code_free_8(kvl_pcre2_code *code);
int pcre2_jit_compile_8(kvl_pcre2_code *code, uint32_t options);
kvl_pcre2_match_data *pcre2_match_data_create_8(uint32_t pairs, void *context);
void pcre2_match_data_free_8(kvl_pcre2_match_data *found);
size_t *pcre2_get_ovector_pointer_8(kvl_pcre2_match_data *found);
size_t pcre2_get_startchar_8(kvl_pcre2_match_data *found);
kvl_pcre2_match_context *pcre2_match_context_create_8(void *context);
void pcre2_match_context_free_8(kvl_pcre2_match_context *context);
kvl_pcre2_jit_stack *pcre2_jit_stack_create_8(size_t first, size_t most, void *context);
void pcre2_jit_stack_free_8(kvl_pcre2_jit_stack *stack);
void pcre2_jit_stack_assign_8(kvl_pcre2_match_context *context, void *callback,
                              void *stack);
int pcre2_match_8(const kvl_pcre2_code *code, const uint8_t *subject, size_t length,
                  size_t start, uint32_t options, kvl_pcre2_match_data *found,
                  kvl_pcre2_match_context *context);
int pcre2_get_error_message_8(int problem, char *buffer, size_t length);
]]

-- ORDER pcre2.h
local MULTILINE, UCP, UTF = 0x400, 0x20000, 0x80000
local NEVER_BACKSLASH_C, NO_UTF_CHECK = 0x100000, 0x40000000
local JIT_COMPLETE, CONFIG_UNICODE, CONFIG_VERSION = 1, 9, 11
local NOMATCH, UTF8_FIRST, UTF8_LAST = -1, -3, -23

-- Memory that a match may need besides the machine's stack.
local BYTES_STACK_FIRST, BYTES_STACK_MOST = 2 ^ 16, 2 ^ 26

-- ---- the library ----------------------------------------------------------------------

local NAMES = { "libpcre2-8.so.0", "pcre2-8" }
local opened

--- The library; nil and why if there is none.
function M.open()
  if opened then return opened end
  for _, name in ipairs(NAMES) do
    local ok, lib = pcall(ffi.load, name)
    if ok then
      local has_unicode = ffi.new "uint32_t[1]"
      lib.pcre2_config_8(CONFIG_UNICODE, has_unicode)
      if has_unicode[0] == 0 then return nil, name .. " was built without Unicode" end
      opened = lib
      return lib
    end
  end
  return nil, "PCRE2 is not here: libpcre2-8.so.0, which splits text into words; it is "
    .. "the Debian package libpcre2-8-0"
end

--- "10.42 2022-12-11", or nil and why.
function M.version()
  local lib, why = M.open()
  if not lib then return nil, why end
  local text = ffi.new "char[64]"
  lib.pcre2_config_8(CONFIG_VERSION, text)
  return ffi.string(text)
end

-- ---- from Ruby's syntax to PCRE2's ----------------------------------------------------

local WHITE = [[\t-\r \x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}]]
  .. [[\x{205F}\x{3000}]]

--- The items of a class for \p{name}, or nil if it is not known.
local function property(name)
  local more = additions[name]
  if not more then return nil end
  if name == "Han" or name == "Hiragana" or name == "Katakana" then
    return ([[\p{sc:%s}%s]]):format(name, more)
  end
  return ([[\p{%s}%s]]):format(name, more)
end

-- Letters after a backslash that stand for characters: letter -> items of a class.
local CLASSES = {
  s = WHITE, d = property "Nd",
  w = [[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}]] .. additions.word,
}
local CHARACTERS = { n = [[\n]], r = [[\r]], t = [[\t]], f = [[\f]], v = [[\x{0B}]],
                     a = [[\x{07}]], e = [[\x{1B}]] }
local GROUPS = { "?:", "?i:", "?=", "?!", "?<=", "?<!", "?>" }

local function unsupported(what) error({ what = what }, 0) end

--- The escape at `at` of a pattern: its items in a class, whether it is negated, and the
-- position after it.
local function read_escape(pattern, at)
  local letter = pattern:sub(at + 1, at + 1)
  local lower = letter:lower()
  if CLASSES[lower] then return CLASSES[lower], letter ~= lower, at + 2 end
  if CHARACTERS[letter] then return CHARACTERS[letter], false, at + 2 end
  if lower == "p" then
    local name, after = pattern:match("^{([%a]+)}()", at + 2)
    local items = name and property(name)
    if not items then unsupported(pattern:match("^\\.%b{}", at) or "\\" .. letter) end
    return items, letter == "P", after
  end
  local hex, after = pattern:match("^x{(%x+)}()", at + 1)
  if not hex then hex, after = pattern:match("^x(%x%x)()", at + 1) end
  if not hex then hex, after = pattern:match("^u(%x%x%x%x)()", at + 1) end
  if hex then return ([[\x{%s}]]):format(hex), false, after end
  if letter == "" or letter:find "[%w\128-\255]" then unsupported("\\" .. letter) end
  return "\\" .. letter, false, at + 2
end

--- A class [...] that begins at `at`: its text for PCRE2 and the position after it.
local function read_class(pattern, at)
  local parts, i = { "[" }, at + 1
  if pattern:sub(i, i) == "^" then parts[2], i = "^", i + 1 end
  local first = i
  while true do
    local c = pattern:sub(i, i)
    if c == "" then unsupported "a class without its ]" end
    if c == "]" and i > first then break end
    if c == "[" or c == "]" or pattern:find("^&&", i) then
      unsupported(("%s inside of a class"):format(c == "&" and "&&" or c))
    end
    local items, is_other, after = c, false, i + 1
    if c == "\\" then items, is_other, after = read_escape(pattern, i) end
    if is_other then unsupported(pattern:sub(i, after - 1) .. " inside of a class") end
    parts[#parts + 1], i = items, after
  end
  return table.concat(parts) .. "]", i + 1
end

local function read_group(pattern, at)
  if pattern:sub(at + 1, at + 1) ~= "?" then return "(", at + 1 end
  for _, group in ipairs(GROUPS) do
    if pattern:sub(at + 1, at + #group) == group then
      return "(" .. group, at + 1 + #group
    end
  end
  return unsupported("the group " .. pattern:sub(at, at + 3))
end

--- {n}, {n,}, {,m} or {n,m}; other braces stand for themselves.
local function read_braces(pattern, at)
  local low, comma, high, after = pattern:match("^{(%d*)(,?)(%d*)}()", at)
  if not low or low == "" and high == "" then return "\\{", at + 1 end
  if pattern:sub(after, after) == "+" then unsupported "a + after braces" end
  return ("{%s%s%s}"):format(low == "" and "0" or low, comma, high), after
end

--- An expression in PCRE2's syntax; raises { what } for a construct without a
-- counterpart.
local function translate(pattern)
  local parts, at = { "(*LF)" }, 1
  while at <= #pattern do
    local c = pattern:sub(at, at)
    local part, after = c, at + 1
    if c == "\\" then
      local items, is_other
      items, is_other, after = read_escape(pattern, at)
      part = (is_other and "[^" or "[") .. items .. "]"
    elseif c == "[" then part, after = read_class(pattern, at)
    elseif c == "(" then part, after = read_group(pattern, at)
    elseif c == "{" then part, after = read_braces(pattern, at)
    end
    parts[#parts + 1], at = part, after
  end
  return table.concat(parts)
end

-- ---- compiled expressions -------------------------------------------------------------

---@class kvlab.text.Regex
---@field text string  as it was in the file
local Regex = {}
Regex.__index = Regex

local function message(lib, problem)
  local text = ffi.new "char[256]"
  lib.pcre2_get_error_message_8(problem, text, 256)
  return ffi.string(text)
end

--- Compiles an expression in Ruby's syntax.
---@param pattern string
---@return kvlab.text.Regex|nil
---@return string|nil why
function M.compile(pattern)
  local lib, why = M.open()
  if not lib then return nil, why end
  local ok, text = pcall(translate, pattern)
  if not ok then
    if type(text) ~= "table" then error(text, 0) end
    return nil, ("the regular expression %q has %s, which is not supported"):format(
      pattern, text.what)
  end
  local problem, offset = ffi.new "int[1]", ffi.new "size_t[1]"
  local code = lib.pcre2_compile_8(text, #text, MULTILINE + UCP + UTF + NEVER_BACKSLASH_C,
    problem, offset, nil)
  if code == nil then
    return nil, ("the regular expression %q is wrong: %s"):format(pattern,
      message(lib, problem[0]))
  end
  lib.pcre2_jit_compile_8(code, JIT_COMPLETE) -- where it cannot, matches are slower
  local self = setmetatable({ text = pattern }, Regex)
  self.code = ffi.gc(code, lib.pcre2_code_free_8)
  self.found = ffi.gc(lib.pcre2_match_data_create_8(1, nil), lib.pcre2_match_data_free_8)
  self.range = lib.pcre2_get_ovector_pointer_8(self.found)
  self.stack = ffi.gc(lib.pcre2_jit_stack_create_8(BYTES_STACK_FIRST, BYTES_STACK_MOST,
    nil), lib.pcre2_jit_stack_free_8)
  self.context = ffi.gc(lib.pcre2_match_context_create_8(nil),
    lib.pcre2_match_context_free_8)
  lib.pcre2_jit_stack_assign_8(self.context, nil, self.stack)
  return self
end

--- Looks for the next match in a text that is known to be UTF-8.
---@param subject ffi.cdata*  const uint8_t *
---@param length integer      bytes
---@param from integer        where to begin, from 0
---@return integer first      from 0; -1 if there is none
---@return integer last       the byte after it
function Regex:find(subject, length, from)
  local count = opened.pcre2_match_8(self.code, subject, length, from, NO_UTF_CHECK,
    self.found, self.context)
  if count < 0 then
    if count == NOMATCH then return -1, -1 end
    fail(("encode: the regular expression %q cannot be matched: %s"):format(self.text,
      message(opened, count)))
  end
  return tonumber(self.range[0]), tonumber(self.range[1])
end

--- Whether a class has the character that begins at byte `at` (from 1) of a valid text.
---@param class kvlab.text.Regex  that matches one character
function M.is_of(class, text, at)
  if at > #text then return false end
  local character = text:match("^[%z\1-\127\194-\244][\128-\191]*", at)
  return class:find(character, #character, 0) == 0
end

--- The byte where the character before byte `at` begins, in a valid text; 0 if there is
-- none.
function M.before(text, at)
  repeat at = at - 1 until at < 1 or text:byte(at) < 0x80 or text:byte(at) >= 0xC0
  return at
end

--- The byte after the character that begins at `at`, in a valid text.
function M.after(text, at)
  local _, last = text:find("^.[\128-\191]*", at)
  return last + 1
end

--- A valid text without the characters of a class at its ends.
---@param class kvlab.text.Regex  that matches one character
function M.trimmed(class, text, left, right)
  local first, last = 1, #text
  while left and M.is_of(class, text, first) do
    first = M.after(text, first)
    rest()
  end
  while right and last >= first do
    local at = M.before(text, last + 1)
    if not M.is_of(class, text, at) then break end
    last = at - 1
    rest()
  end
  return text:sub(first, last)
end

local empty
local HIGH = scan.set "[\128-\255]"

--- The offset (from 0) of the first byte that makes a text invalid UTF-8; nil if the text
-- is valid. Needs PCRE2.
---@param text string
---@return integer|nil
function M.invalid_at(text)
  if not scan.find(HIGH, text, 1) then return nil end
  empty = empty or assert(M.compile "")
  local count = opened.pcre2_match_8(empty.code, text, #text, 0, 0, empty.found,
    empty.context)
  if count <= UTF8_FIRST and count >= UTF8_LAST then
    return tonumber(opened.pcre2_get_startchar_8(empty.found))
  end
  return nil
end

return M
