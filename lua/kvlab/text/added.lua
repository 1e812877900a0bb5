--- Finds tokens in a text by their spelling, before the text is normalized and cut into
-- pieces: the `added_tokens` of a tokenizer.json, such as <|im_start|>. If several begin
-- at the same byte, the longest is taken.
local ffi = require "ffi"
local regex = require "kvlab.text.regex"
local rest = require("kvlab.slices").rest
local scan = require "kvlab.text.scan"

local M = {}

---@class kvlab.text.AddedToken
---@field id integer
---@field content string   as it is found in a text
---@field special boolean  found only when asked for
---@field single_word boolean  not found beside a letter or a digit
---@field lstrip boolean   takes the white space before it, too
---@field rstrip boolean   … and after it

---@class kvlab.text.Finder
---@field roots table<integer, table>  first byte -> node; a node has bytes -> nodes and
--                                     `token`
---@field candidates ffi.cdata*|nil  the set of the first bytes (kvlab.text.scan)
local Finder = {}
Finder.__index = Finder

---@param tokens kvlab.text.AddedToken[]
---@return kvlab.text.Finder
function M.finder(tokens)
  local roots = {}
  for _, token in ipairs(tokens) do
    if token.content ~= "" then
      local node = roots
      for i = 1, #token.content do
        local byte = token.content:byte(i)
        node[byte] = node[byte] or {}
        node = node[byte]
      end
      node.token = node.token or token
    end
  end
  local self = { roots = roots }
  if next(roots) then
    self.candidates = ffi.new "uint8_t[256]"
    for byte in pairs(roots) do self.candidates[byte] = 1 end
    self.white, self.word = assert(regex.compile "\\s"), assert(regex.compile "\\w")
  end
  return setmetatable(self, Finder)
end

--- The longest token that begins at `at`, from 1.
local function token_at(roots, text, at)
  local node, found, i = roots, nil, at
  while true do
    node = node[text:byte(i)]
    if not node then return found end
    found, i = node.token or found, i + 1
  end
end

--- The first byte of the white space before `at`, but not before `from`; `at` if there
-- is none.
local function first_white(white, text, at, from)
  local previous = regex.before(text, at)
  while previous >= from and regex.is_of(white, text, previous) do
    at, previous = previous, regex.before(text, previous)
  end
  return at
end

--- The last byte of the white space after `last`.
local function last_white(white, text, last)
  while regex.is_of(white, text, last + 1) do last = regex.after(text, last + 1) - 1 end
  return last
end

--- Whether a byte is in one of the ranges, if there are any.
local function is_within(ranges, at)
  if type(ranges) ~= "table" then return false end
  local low, high = 1, #ranges -- the first range that does not end before it
  while low <= high do
    local middle = math.floor((low + high) / 2)
    if ranges[middle][2] < at then low = middle + 1 else high = middle - 1 end
  end
  return ranges[low] ~= nil and ranges[low][1] <= at
end

local function is_within_word(self, text, first, last)
  local previous = regex.before(text, first)
  return previous > 0 and regex.is_of(self.word, text, previous)
    or regex.is_of(self.word, text, last + 1)
end

--- The next token in a text: nil, or the token and its first and last byte with the white
-- space that it takes.
---@param text string
---@param from integer   where to begin, from 1
---@param special boolean|integer[][]  whether special tokens count; or the ranges of
--                         bytes in which they do not, in order
---@return kvlab.text.AddedToken|nil
---@return integer|nil first
---@return integer|nil last
function Finder:next(text, from, special)
  local at = self.candidates and scan.find(self.candidates, text, from)
  while at do
    local token = token_at(self.roots, text, at)
    local last = token and at + #token.content - 1
    if token and token.special and is_within(special, at) then
      last = at -- only one byte: a token may begin after the range, inside of this one
    elseif token and (special or not token.special)
      and not (token.single_word and is_within_word(self, text, at, last)) then
      return token, token.lstrip and first_white(self.white, text, at, from) or at,
        token.rstrip and last_white(self.white, text, last) or last
    end
    at = scan.find(self.candidates, text, (last or at) + 1)
    rest()
  end
end

return M
