--- LongBench's own scores, which its eval.py gives to the data sets: `kv.longbench`. All
-- take the answer that was given, a list of right ones, of which the best counts, and the
-- example, whose all_classes `classes` needs.
--
--   kv.longbench.retrieval("Paragraph 3 or 4", { "Paragraph 3" })   0.5
--
-- f1 is that of kv.scores, but 0 between empty texts. rouge is the package rouge (1.0.1):
-- the words of the longest common subsequences of all pairs of sentences, each word once.
-- code is fuzzywuzzy's ratio over difflib, of the first line without a mark of a comment.
-- Source  Bai et al. 2023, arXiv:2308.14508; LongBench/metrics.py (MIT); Ratcliff and
--         Metzener 1988 (difflib)
local arguments = require "kvlab.arguments"
local ffi = require "ffi"
local options = require "kvlab.options"
local regex = require "kvlab.text.regex"
local scores = require "kvlab.task.scores"

local M = {}

local function best(given, answers, score, ...)
  local most = 0
  for _, answer in ipairs(answers) do most = math.max(most, score(given, answer, ...)) end
  return most
end

-- ---- words ----------------------------------------------------------------------------

--- F1 of the words in common; 0 if nothing is left of the answer.
---@param given string
---@param answers string[]
---@return number
function M.f1(given, answers)
  return scores.f1(given, { "" }) == 1 and 0 or scores.f1(given, answers)
end

local pattern -- of a word, once it was needed

--- The words of a text that has spaces only between words.
local function words_of(text)
  pattern = pattern or assert(regex.compile "[^\\s\28-\31]+")
  local subject, list, at = ffi.cast("const uint8_t *", text), {}, 0
  while at < #text do
    local first, last = pattern:find(subject, #text, at)
    if first < 0 then break end
    list[#list + 1], at = text:sub(first + 1, last), last
  end
  return list
end

--- The sentences of a text, what lies between full stops, as lists of words.
local function sentences_of(text)
  local list = {}
  for sentence in text:gmatch "[^.]+" do
    local words = words_of(sentence)
    list[#list + 1] = #words > 0 and words or { "" }
  end
  return list
end

--- Adds the words of a longest common subsequence of a and b to a set.
local function add_common(a, b, set)
  local rows = {}
  for i = 0, #a do
    rows[i] = { [0] = 0 }
    for j = 1, #b do
      rows[i][j] = i == 0 and 0 or a[i] == b[j] and rows[i - 1][j - 1] + 1
        or math.max(rows[i - 1][j], rows[i][j - 1])
    end
  end
  local i, j = #a, #b
  while i > 0 and j > 0 do
    if a[i] == b[j] then
      set[a[i]], i, j = true, i - 1, j - 1
    elseif rows[i - 1][j] > rows[i][j - 1] then i = i - 1
    else j = j - 1 end
  end
end

local function size(set)
  local n = 0
  for _ in pairs(set) do n = n + 1 end
  return n
end

local function different(sentences)
  local set = {}
  for _, words in ipairs(sentences) do
    for _, word in ipairs(words) do set[word] = true end
  end
  return size(set)
end

local function rouge_of(given, answer)
  given, answer = sentences_of(given), sentences_of(answer)
  if #given == 0 or #answer == 0 then return 0 end
  local common = {}
  for _, wanted in ipairs(answer) do
    for _, own in ipairs(given) do add_common(wanted, own, common) end
  end
  local recall, precision = size(common) / different(answer),
    size(common) / different(given)
  return 2 * (precision * recall / (precision + recall + 1e-8))
end

--- ROUGE-L of the package rouge.
---@param given string
---@param answers string[]
---@return number
function M.rouge(given, answers) return best(given, answers, rouge_of) end

-- ---- classes and numbers --------------------------------------------------------------

--- The class that is right, among those that occur in the answer. As in LongBench, a
-- class that is a part of the right one is left out, but not the one that follows it.
local function classes_of(given, answer, classes)
  local found, at = {}, 1
  for _, class in ipairs(classes) do
    if given:find(class, 1, true) then found[#found + 1] = class end
  end
  while at <= #found do
    local term = found[at]
    if term ~= answer and answer:find(term, 1, true) then
      for i = 1, #found do
        if found[i] == term then
          table.remove(found, i)
          break
        end
      end
    end
    at = at + 1
  end
  for _, class in ipairs(found) do if class == answer then return 1 / #found end end
  return 0
end

--- Classification; the example has all_classes.
---@param given string
---@param answers string[]
---@param example kvlab.task.Example  has all_classes
---@return number
function M.classes(given, answers, example)
  if not example.all_classes then
    error("longbench: the example has no all_classes, expected a list", 0)
  end
  return best(given, answers, classes_of, example.all_classes)
end

--- The share of the numbers in a text that are this one.
local function share_of(given, number)
  local right, all = 0, 0
  for found in given:gmatch "%d+" do
    all, right = all + 1, right + (found == number and 1 or 0)
  end
  return all == 0 and 0 or right / all
end

--- The share of the numbers of the answer that are right.
---@param given string
---@param answers string[]
---@return number
function M.count(given, answers) return best(given, answers, share_of) end

local function paragraph_of(given, answer)
  local number = answer:match "Paragraph (%d+)" or answer:match "段落(%d+)"
  if not number then
    error(("longbench: the right answer is %q, expected the number of a paragraph")
      :format(answer), 0)
  end
  return share_of(given, number)
end

--- The same, where right answers are "Paragraph 3" or "段落3".
---@param given string
---@param answers string[]
---@return number
function M.retrieval(given, answers) return best(given, answers, paragraph_of) end

-- ---- code -----------------------------------------------------------------------------

local MANY = 200 -- characters from which difflib leaves out those that are frequent

local function characters(text)
  local list = {}
  for c in text:gmatch "[%z\1-\127\194-\244][\128-\191]*" do list[#list + 1] = c end
  return list
end

--- Where each character stands in b; without those that are more than 1% of a long b.
local function places_of(b)
  local places = {}
  for j, c in ipairs(b) do
    places[c] = places[c] or {}
    table.insert(places[c], j)
  end
  if #b < MANY then return places end
  for c, list in pairs(places) do
    if #list > math.floor(#b / 100) + 1 then places[c] = nil end
  end
  return places
end

--- The first longest run that a[from_a ... to_a] and b[from_b ... to_b] have in common.
local function longest_run(a, b, places, from_a, to_a, from_b, to_b)
  local best_a, best_b, most, ends = from_a, from_b, 0, {}
  for i = from_a, to_a do
    local now = {}
    for _, j in ipairs(places[a[i]] or {}) do
      if j > to_b then break end
      if j >= from_b then
        now[j] = (ends[j - 1] or 0) + 1
        if now[j] > most then
          most = now[j]
          best_a, best_b = i - most + 1, j - most + 1
        end
      end
    end
    ends = now
  end
  while best_a > from_a and best_b > from_b and a[best_a - 1] == b[best_b - 1] do
    best_a, best_b, most = best_a - 1, best_b - 1, most + 1
  end
  while best_a + most <= to_a and best_b + most <= to_b
    and a[best_a + most] == b[best_b + most] do most = most + 1 end
  return best_a, best_b, most
end

--- The number of characters in the runs that a and b have in common.
local function matched(a, b, places, from_a, to_a, from_b, to_b)
  if from_a > to_a or from_b > to_b then return 0 end
  local i, j, n = longest_run(a, b, places, from_a, to_a, from_b, to_b)
  if n == 0 then return 0 end
  return n + matched(a, b, places, from_a, i - 1, from_b, j - 1)
    + matched(a, b, places, i + n, to_a, j + n, to_b)
end

local function ratio(a, b)
  if a == b then return 1 end
  if a == "" or b == "" then return 0 end
  a, b = characters(a), characters(b)
  local hundred = 200 * matched(a, b, places_of(b), 1, #a, 1, #b) / (#a + #b)
  local whole = math.floor(hundred)
  local rest = hundred - whole -- Python rounds halves to the even one
  if rest > 0.5 or rest == 0.5 and whole % 2 == 1 then whole = whole + 1 end
  return whole / 100
end

--- How alike a line of an answer is to the right line of code. It is the answer's first
-- line without a backtick, # or //.
---@param given string
---@param answers string[]
---@return number
function M.code(given, answers)
  local line = ""
  for one in (given:match "^\n*(.*)$" .. "\n"):gmatch "(.-)\n" do
    if not one:find "[`#]" and not one:find("//", 1, true) then
      line = one
      break
    end
  end
  return best(line, answers, ratio)
end

local SCORE = { given = options.string, answers = options.list_of(options.string, 1) }
arguments.functions(M, "longbench", { f1 = SCORE, rouge = SCORE, count = SCORE,
  retrieval = SCORE, code = SCORE, classes = { given = SCORE.given,
    answers = SCORE.answers, example = options.table } })

return M
