--- How good an answer is, from 0 to 1: `kv.scores`. Every score takes the answer that was
-- given and a list of right ones.
--
--   kv.scores.exact("The Nile.", { "nile" })       1: equal after normalising
--   kv.scores.f1("the river Nile", { "Nile" })     tokens in common, F1
--   kv.scores.rouge_l(summary, { reference })      longest common subsequence, F1
--   kv.scores.all("41, 7", { "7", "41", "12" })    share of the answers that are in it
--   kv.scores.part("in 1912", { "1912", "1913" })  1 if one of the answers is in it
--
-- exact and f1 are those of SQuAD's evaluation: lower case, without punctuation and the
-- words a, an and the. rouge_l is that of the package rouge-score, without a stemmer:
-- only a ... z and 0 ... 9 count. Of several right answers, the best one counts. all and
-- part are RULER's string_match_all and string_match_part; they ignore case alone.
-- Source  Rajpurkar et al. 2016, evaluate-v1.1.py and v2.0; Lin 2004; Hsieh et al. 2024
local arguments = require "kvlab.arguments"
local bit = require "bit"
local ffi = require "ffi"
local options = require "kvlab.options"
local regex = require "kvlab.text.regex"
local unicode = require "kvlab.text.unicode"

local M = {}

ffi.cdef "int32_t utf8proc_tolower(int32_t character);"

-- ---- text -----------------------------------------------------------------------------

--- The code point of a character of UTF-8.
local function code_of(character)
  local first = character:byte()
  if first < 0x80 then return first end
  local code = bit.band(first, bit.rshift(0x7F, #character))
  for i = 2, #character do code = code * 64 + character:byte(i) % 64 end
  return code
end

local function utf8_of(code)
  if code < 0x80 then return string.char(code) end
  local bytes, first = "", 0x40
  repeat
    bytes = string.char(0x80 + code % 64) .. bytes
    code, first = math.floor(code / 64), first / 2
  until code < first
  return string.char(0x100 - 2 * first + code) .. bytes
end

--- A text in lower case; each character by itself.
local function lower(text)
  if not text:find "[\128-\255]" then return text:lower() end
  local lib = unicode.open() or options.fail(select(2, unicode.open()))
  return (unicode.repaired(text):gsub("[%z\1-\127\194-\244][\128-\191]*", function(c)
    if c == "\196\176" then return "i\204\135" end -- U+0130 becomes two
    return utf8_of(lib.utf8proc_tolower(code_of(c)))
  end))
end

local compiled = {}

--- The text with `with` in place of each match of a pattern for which is_replaced(match)
-- is true.
local function replaced(text, pattern, is_replaced, with)
  compiled[pattern] = compiled[pattern] or assert(regex.compile(pattern))
  local subject, parts, at = ffi.cast("const uint8_t *", text), {}, 0
  while at < #text do
    local first, last = compiled[pattern]:find(subject, #text, at)
    if first < 0 then break end
    local match = text:sub(first + 1, last)
    parts[#parts + 1] = text:sub(at + 1, first) .. (is_replaced(match) and with or match)
    at = last
  end
  return table.concat(parts) .. text:sub(at + 1)
end

local ARTICLES = { a = true, an = true, the = true }
local function is_article(word) return ARTICLES[word] ~= nil end
local function always() return true end

--- As SQuAD compares answers: lower case, no punctuation of ASCII, no articles, and one
-- space between words.
local function normalised(text)
  text = lower(text):gsub("%p", "")
  text = replaced(text, [[\w+]], is_article, " ")
  return (replaced(text, "[\\s\28-\31]+", always, " "):match "^ ?(.-) ?$")
end

local function words_of(text, pattern)
  local words = {}
  for word in text:gmatch(pattern) do words[#words + 1] = word end
  return words
end

--- 2 / (1/precision + 1/recall).
local function harmonic(common, given, wanted)
  if common == 0 then return 0 end
  local precision, recall = common / given, common / wanted
  return 2 * precision * recall / (precision + recall)
end

-- ---- one answer -----------------------------------------------------------------------

local function f1_of(given, wanted)
  given, wanted = words_of(given, "[^ ]+"), words_of(wanted, "[^ ]+")
  if #given == 0 or #wanted == 0 then return #given == #wanted and 1 or 0 end
  local left, common = {}, 0
  for _, word in ipairs(wanted) do left[word] = (left[word] or 0) + 1 end
  for _, word in ipairs(given) do
    if (left[word] or 0) > 0 then
      left[word], common = left[word] - 1, common + 1
    end
  end
  return harmonic(common, #given, #wanted)
end

--- The length of the longest common subsequence of two lists.
local function longest_common(a, b)
  local row = {}
  for j = 0, #b do row[j] = 0 end
  for i = 1, #a do
    local diagonal = 0 -- of the row before, one to the left
    for j = 1, #b do
      local above = row[j]
      row[j] = a[i] == b[j] and diagonal + 1 or math.max(above, row[j - 1])
      diagonal = above
    end
  end
  return row[#b]
end

local function rouge_of(given, wanted)
  given, wanted = words_of(given, "[a-z0-9]+"), words_of(wanted, "[a-z0-9]+")
  if #given == 0 or #wanted == 0 then return 0 end
  return harmonic(longest_common(given, wanted), #given, #wanted)
end

local function best(given, answers, prepare, score)
  given = prepare(given)
  local most = 0
  for _, answer in ipairs(answers) do
    most = math.max(most, score(given, prepare(answer)))
  end
  return most
end

-- ---- scores ---------------------------------------------------------------------------

--- 1 if the answer equals one of the right ones after normalising, else 0.
---@param given string
---@param answers string[]
---@return number
function M.exact(given, answers)
  return best(given, answers, normalised, function(a, b) return a == b and 1 or 0 end)
end

--- F1 of the words that the answer has in common with a right one, after normalising.
---@param given string
---@param answers string[]
---@return number
function M.f1(given, answers) return best(given, answers, normalised, f1_of) end

--- F1 of the longest common subsequence of words: ROUGE-L.
---@param given string
---@param answers string[]
---@return number
function M.rouge_l(given, answers) return best(given, answers, lower, rouge_of) end

--- The share of the right answers that occur in the answer.
---@param given string
---@param answers string[]
---@return number
function M.all(given, answers)
  given = lower(given)
  local found = 0
  for _, answer in ipairs(answers) do
    if given:find(lower(answer), 1, true) then found = found + 1 end
  end
  return found / #answers
end

--- 1 if a right answer occurs in the answer, else 0.
---@param given string
---@param answers string[]
---@return number
function M.part(given, answers) return M.all(given, answers) > 0 and 1 or 0 end

local SCORE = { given = options.string, answers = options.list_of(options.string, 1) }
arguments.functions(M, "scores", { exact = SCORE, f1 = SCORE, rouge_l = SCORE,
                                   all = SCORE, part = SCORE })

return M
