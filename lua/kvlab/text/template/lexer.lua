--- Cuts a template into tokens, as Jinja does with trim_blocks and lstrip_blocks: the
-- newline after a block is removed, and so is the white space before a block that begins
-- a line.
--
-- A token is { kind, value, line }. Its kind is "data", "name", "string", "number",
-- "end", an operator such as "==", or one of {{ }} {% %}.
local text = require "kvlab.text.template.text"
local unicode = require "kvlab.text.unicode"
local value = require "kvlab.text.template.value"

local M = {}

local WHITE = text.WHITE

--- Raises a problem of a line of the template.
function M.fail(line, why, ...)
  error({ line = line, why = select("#", ...) > 0 and why:format(...) or why }, 0)
end

-- ---- strings and numbers --------------------------------------------------------------

local ESCAPES = { a = "\a", b = "\b", f = "\f", n = "\n", r = "\r", t = "\t", v = "\v",
                  ["\\"] = "\\", ["'"] = "'", ['"'] = '"', ["\n"] = "" }
local HEX = { x = 2, u = 4, U = 8 }

--- The character that an escape of Python stands for, and the byte after it.
local function read_escape(source, at, line)
  local letter = source:sub(at + 1, at + 1)
  if ESCAPES[letter] then return ESCAPES[letter], at + 2 end
  local octal = source:match("^[0-7][0-7]?[0-7]?", at + 1)
  if octal then return unicode.encode(tonumber(octal, 8)), at + 1 + #octal end
  if HEX[letter] then
    local digits = source:match("^%x+", at + 2) or ""
    digits = digits:sub(1, HEX[letter])
    local code = tonumber(digits, 16)
    if #digits < HEX[letter] or code >= 0xD800 and code <= 0xDFFF or code > 0x10FFFF then
      M.fail(line, "the escape \\%s is no character", letter .. digits)
    end
    return unicode.encode(code), at + 2 + HEX[letter]
  end
  if letter == "N" or letter:find "[\128-\255]" then
    M.fail(line, "the escape \\%s, which kvlab does not know", letter)
  end
  return "\\" .. letter, at + 2
end

--- The string whose quote is at `at`, and the byte after it.
local function read_string(source, at, line)
  local quote, parts, from = source:sub(at, at), {}, at + 1
  while true do
    local stop = source:find("[\\" .. quote .. "]", from)
    if not stop then M.fail(line, "a string that does not end") end
    parts[#parts + 1] = source:sub(from, stop - 1)
    if source:sub(stop, stop) == quote then return table.concat(parts), stop + 1 end
    parts[#parts + 1], from = read_escape(source, stop, line)
  end
end

local function digits_of(x) return (x:gsub("_", "")) end

--- The number at `at`, and the byte after it.
local function read_number(source, at, line)
  local whole, after = source:match("^(%d[%d_]*)()", at)
  local is_place = source:sub(at - 1, at - 1) == "." -- of items.0.name
  local fraction, after_fraction = source:match("^(%.%d[%d_]*)()", after)
  local exponent, after_exponent = source:match("^([eE][+-]?%d[%d_]*)()",
    after_fraction or after)
  if not is_place and (fraction or exponent) then
    local x = tonumber(digits_of(whole .. (fraction or "") .. (exponent or "")))
    return value.float(x), after_exponent or after_fraction
  end
  if source:find("^[%a_]", after) or whole:find "^0[%d_]*[1-9]" or whole:find "_$" then
    M.fail(line, "the number %s", source:match("^%w+", at))
  end
  return value.int(tonumber(digits_of(whole))), after
end

-- ---- inside of tags -------------------------------------------------------------------

local OPERATORS = { "//", "**", "==", "!=", ">=", "<=" }
for letter in ("+-/*%~[](){}><=.:|,;"):gmatch "." do
  OPERATORS[#OPERATORS + 1] = letter
end
local OPENED = { ["("] = ")", ["["] = "]", ["{"] = "}" }

local function read_operator(source, at, line)
  for _, operator in ipairs(OPERATORS) do
    if source:sub(at, at + #operator - 1) == operator then return operator end
  end
  M.fail(line, "the character %q", source:match("^[^\128-\191][\128-\191]*", at))
end

--- Whether white space is cut off after a tag: "-" all, "" the newline, "+" nothing.
local function after_tag(source, at, sign, is_block)
  if sign == "-" then return text.past(source, WHITE, at) end
  if is_block and sign == "" and source:sub(at, at) == "\n" then return at + 1 end
  return at
end

local function lines_in(source, first, last)
  return select(2, source:sub(first, last):gsub("\n", ""))
end

--- Appends the tokens of a tag up to its end; returns the byte after it, and the line.
local function read_tag(source, at, line, close, tokens)
  local open, is_block = {}, close == "%}"
  local function add(kind, x)
    tokens[#tokens + 1] = { kind = kind, value = x, line = line }
  end
  while true do
    local start = at
    at = text.past(source, WHITE, at)
    line = line + lines_in(source, start, at - 1)
    if at > #source then M.fail(line, "a tag that does not end with %s", close) end
    local sign = source:match(is_block and "^[+-]?" or "^%-?", at)
    if #open == 0 and source:sub(at + #sign, at + #sign + 1) == close then
      add(close)
      local after = after_tag(source, at + #sign + 2, sign, is_block)
      return after, line + lines_in(source, at, after - 1)
    end
    start = at
    local name, after = source:match("^([%a_][%w_]*)()", at)
    if name then
      add("name", name)
    elseif source:find("^%d", at) then
      local x
      x, after = read_number(source, at, line)
      add("number", x)
    elseif source:find("^[\"']", at) then
      local x
      x, after = read_string(source, at, line)
      add("string", x)
    else
      local operator = read_operator(source, at, line)
      after = at + #operator
      if OPENED[operator] then open[#open + 1] = OPENED[operator] end
      if operator:find "^[])}]$" and table.remove(open) ~= operator then
        M.fail(line, "a %s that closes nothing", operator)
      end
      add(operator)
    end
    at = after
    line = line + lines_in(source, start, at - 1)
  end
end

-- ---- between tags ---------------------------------------------------------------------

--- The text before a tag without what the tag cuts off.
local function trimmed(data, sign, is_variable, is_line_start)
  if sign == "-" then return (text.strip(data, nil, false, true)) end
  if sign == "+" or is_variable then return data end
  local line = data:match "[^\n]*$"
  if #line == #data and not is_line_start then return data end
  if text.past(line, WHITE, 1) <= #line then return data end
  return data:sub(1, #data - #line)
end

--- The byte after a comment whose {# ends before `at`.
local function after_comment(source, at, line)
  local stop = source:find("#}", at, true)
  if not stop then M.fail(line, "a comment that does not end") end
  local sign = stop > at and source:sub(stop - 1, stop - 1):match "[+-]" or ""
  return after_tag(source, stop + 2, sign, true)
end

--- What stands in {% raw %}: its text, and the byte after {% endraw %}.
local function read_raw(source, at, line, is_line_start)
  local from = at
  while true do
    local first, last = source:find("{%%[+-]?", from)
    if not first then M.fail(line, "a raw that does not end") end
    local name = text.past(source, WHITE, last + 1)
    local after = source:match("^endraw()", name)
    after = after and text.past(source, WHITE, after)
    local sign, stop = source:match("^([+-]?)%%}()", after or #source + 1)
    if stop then
      local data = trimmed(source:sub(at, first - 1), source:sub(first + 2, last), false,
        is_line_start)
      return data, after_tag(source, stop, sign, true)
    end
    from = last + 1
  end
end

--- If a {% raw %} begins, the byte after its tag; nil if it is another tag. `at` is the
-- byte after {% and its sign.
local function after_raw(source, at)
  local after = source:match("^raw()", text.past(source, WHITE, at))
  after = after and text.past(source, WHITE, after)
  local sign, stop = source:match("^(%-?)%%}()", after or #source + 1)
  return stop and after_tag(source, stop, sign, false)
end

--- The tokens of a template.
---@param source string
---@return table[]
function M.tokens(source)
  source = unicode.repaired(source):gsub("\r\n?", "\n"):gsub("\n$", "")
  local tokens, at, line, is_line_start = {}, 1, 1, true
  local function data(x)
    if x ~= "" then tokens[#tokens + 1] = { kind = "data", value = x, line = line } end
  end
  while true do
    local first, last, kind, sign = source:find("{([%%{#])([+-]?)", at)
    if not first then break end
    data(trimmed(source:sub(at, first - 1), sign, kind == "{", is_line_start))
    line = line + lines_in(source, at, first - 1)
    local after = kind == "%" and after_raw(source, last + 1)
    if kind == "#" then
      after = after_comment(source, last + 1, line)
      line = line + lines_in(source, first, after - 1)
    elseif after then
      local raw
      raw, after = read_raw(source, after, line, source:sub(after - 1, after - 1) == "\n")
      data(raw)
      line = line + lines_in(source, first, after - 1)
    else
      local close = kind == "%" and "%}" or "}}"
      tokens[#tokens + 1] = { kind = "{" .. kind, line = line }
      after, line = read_tag(source, last + 1, line, close, tokens)
    end
    at, is_line_start = after, source:sub(after - 1, after - 1) == "\n"
  end
  data(source:sub(at))
  tokens[#tokens + 1] = { kind = "end", line = line }
  return tokens
end

return M
