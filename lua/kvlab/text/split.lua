--- Cuts text into pieces before tokens are made of it: the `pre_tokenizer` of a
-- tokenizer.json. A rule is a regular expression, and says what is done with its matches.
local ffi = require "ffi"
local fields = require "kvlab.text.fields"
local numbers = require "kvlab.text.numbers"
local regex = require "kvlab.text.regex"
local rest = require("kvlab.slices").rest

local M = {}

local MATCHES_PART = 2 ^ 10 -- between two rests

-- ---- one rule -------------------------------------------------------------------------

---@class kvlab.text.Rule
---@field regex kvlab.text.Regex
---@field behavior string  "Isolated", "Removed", …
---@field invert boolean   what is between matches counts as the matches

local function push(to, first, last)
  if last > first then
    to:push(first)
    to:push(last)
  end
end

--- The byte after the character at `at`.
local function next_character(subject, at)
  local byte = subject[at]
  return at + (byte < 0x80 and 1 or byte < 0xE0 and 2 or byte < 0xF0 and 3 or 4)
end

--- Each match, and each text between matches, is a piece. Finds at most so many matches,
-- from `done` and `at` on, and returns the new values of these two.
local function isolate_some(rule, base, first, last, to, done, at)
  local subject, length, expression = base + first, last - first, rule.regex
  for _ = 1, MATCHES_PART do
    if at >= length then break end
    local start, stop = expression:find(subject, length, at)
    if start < 0 then return done, length end
    if start > done then
      to:push(first + done)
      to:push(first + start)
    end
    if stop > start then
      to:push(first + start)
      to:push(first + stop)
      at = stop
    elseif start < length then
      at = next_character(subject, start)
    else
      at = length
    end
    done = stop
  end
  return done, at
end

local function isolated(rule, base, first, last, to)
  local done, at = 0, 0
  while at < last - first do
    done, at = isolate_some(rule, base, first, last, to, done, at)
    rest()
  end
  push(to, first + done, last)
end

local function add(list, first, last, kind)
  list:push(first)
  list:push(last)
  list:push(kind)
end

--- All parts of base[first … last) in order, matches or not: first, last and whether it
-- counts as a match (1 or 0) of each, in `list`.
local function parts_of(rule, base, first, last, list)
  local subject, length, expression = base + first, last - first, rule.regex
  local of_match, of_rest = rule.invert and 0 or 1, rule.invert and 1 or 0
  local done, at, matched = 0, 0, -1
  list:clear()
  while at <= length do
    local start, stop = expression:find(subject, length, at)
    if start < 0 then break end
    if stop > start or start ~= matched then -- an empty match right after a match does
                                             -- not count
      if start > done then add(list, first + done, first + start, of_rest) end
      add(list, first + start, first + stop, of_match)
      done, matched = stop, stop
    end
    at = stop > start and stop or start < length and next_character(subject, start)
      or length + 1
    if list.count % MATCHES_PART < 6 then rest() end
  end
  if done < length then add(list, first + done, last, of_rest) end
  return list.at, list.count
end

--- The text with `content` in place of each match of an expression.
---@param rule kvlab.text.Rule
---@param text string
---@param content string
---@return string
function M.replaced(rule, text, content)
  local parts, count = parts_of(rule, ffi.cast("const uint8_t *", text), 0, #text,
    numbers.new())
  local list = {}
  for i = 0, count - 1, 3 do
    list[#list + 1] = parts[i + 2] == 1 and content
      or text:sub(parts[i] + 1, parts[i + 1])
  end
  return table.concat(list)
end

local BEHAVIORS = {}

function BEHAVIORS.Removed(parts, count, to)
  for i = 0, count - 1, 3 do
    if parts[i + 2] == 0 then push(to, parts[i], parts[i + 1]) end
  end
end

function BEHAVIORS.Contiguous(parts, count, to)
  local i = 0
  while i < count do
    local first, kind = parts[i], parts[i + 2]
    while i + 3 < count and parts[i + 5] == kind do i = i + 3 end
    push(to, first, parts[i + 1])
    i = i + 3
  end
end

--- Joins each part of kind `a` with the part after it if that is of the other kind.
local function join(parts, count, to, a)
  local i = 0
  while i < count do
    local first = parts[i]
    if parts[i + 2] == a and i + 3 < count and parts[i + 5] ~= a then i = i + 3 end
    push(to, first, parts[i + 1])
    i = i + 3
  end
end

function BEHAVIORS.MergedWithPrevious(parts, count, to) join(parts, count, to, 0) end
function BEHAVIORS.MergedWithNext(parts, count, to) join(parts, count, to, 1) end

--- Cuts pieces into smaller ones.
---@param rule kvlab.text.Rule
---@param base ffi.cdata*  const uint8_t *, the text
---@param from kvlab.text.Numbers  first and last byte of each piece, in turn
---@param to kvlab.text.Numbers    gets the smaller pieces
---@param list kvlab.text.Numbers  is written over
function M.cut(rule, base, from, to, list)
  local combine = BEHAVIORS[rule.behavior]
  for i = 0, from.count - 2, 2 do
    local first, last = from.at[i], from.at[i + 1]
    if combine then
      local parts, count = parts_of(rule, base, first, last, list)
      combine(parts, count, to)
    else
      isolated(rule, base, first, last, to)
    end
  end
end

-- ---- rules of a file ------------------------------------------------------------------

-- What GPT-2 splits by, as ByteLevel does with use_regex.
M.GPT2 = [['s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+]]

--- A literal text as a regular expression.
function M.literal(text) return (text:gsub("[^%w\128-\255 ]", "\\%0")) end

--- A rule; raises with the name of the field when the expression cannot be used.
---@param where string  "pre_tokenizer.pattern.Regex"
---@return kvlab.text.Rule
function M.rule(where, expression, behavior, invert)
  local compiled, why = regex.compile(expression)
  if not compiled then fields.fail(where, why) end
  return { regex = compiled, behavior = behavior, invert = invert or false }
end

return M
