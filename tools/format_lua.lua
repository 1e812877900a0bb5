--- Formats Lua files: the spaces between tokens of a line, and empty lines. Nothing moves
-- to another line, and comments and columns of numbers stay as they are. luacheck finds
-- what else is wrong: lines that are too long, spaces at their ends.
--
--   ./kvlab run tools/format_lua.lua [check] [FILE…]
--
-- Without a file it takes all of lua/, spec/, bench/ and tools/. `check` changes nothing:
-- it prints the lines that differ, and fails if there are any. No formatter for Lua could
-- be installed from the package indexes (2026-11-29), so this is our own.
local files = require "kvlab.files"
local kv = require "kvlab"

-- ---- tokens ---------------------------------------------------------------------------

local WORDS = {} -- after which a `-` has one operand, and a bracket begins no call
for word in ("and break do else elseif for function goto if in local not or repeat "
  .. "return then until while"):gmatch "%a+" do WORDS[word] = true end

--- The string or comment in long brackets that begins at a byte; nil if there is none.
local function long_at(text, at)
  local level = text:match("^%[(=*)%[", at) or text:match("^%-%-%[(=*)%[", at)
  if not level then return nil end
  local _, stop = text:find("]" .. level .. "]", at, true)
  return text:sub(at, stop)
end

--- The string in quotes that begins at a byte.
local function quoted_at(text, at)
  local quote, stop = text:sub(at, at), at
  repeat
    stop = stop + 1
    local letter = text:sub(stop, stop)
    if letter == "\\" then stop = stop + 1 end
  until letter == quote
  return text:sub(at, stop)
end

local function number_at(text, at)
  return text:match("^0[xX]%x+%a*", at) or text:match("^%d*%.?%d+[eE][+-]?%d+", at)
    or text:match("^%d+%.?%d*%a*", at) or text:match("^%.%d+", at)
end

local SIGNS = { "^%.%.", "^[=~<>]=", "^::", "^%p" }

--- The token at a byte, and what it is: "comment", "value" (also a name), "word" or
-- "sign".
local function token_at(text, at)
  local long = long_at(text, at)
  if text:find("^%-%-", at) then return long or text:match("^[^\n]*", at), "comment" end
  if long then return long, "value" end
  if text:find("^[\"']", at) then return quoted_at(text, at), "value" end
  if text:find("^%.?%d", at) then return number_at(text, at), "value" end
  local name = text:match("^[%a_][%w_]*", at) or text:match("^%.%.%.", at)
  if name then return name, WORDS[name] and "word" or "value" end
  for _, pattern in ipairs(SIGNS) do
    local sign = text:match(pattern, at)
    if sign then return sign, "sign" end
  end
end

---@class Token
---@field text string
---@field kind string
---@field space string      what stands before it
---@field is_unary boolean  a sign or `not` before its one operand

--- The tokens of a file.
---@return Token[]
local function tokens_of(text)
  local list, at, is_value = {}, 1, false -- whether a `-` would have an operand before it
  while true do
    local space, from = text:match("^(%s*)()", at)
    if from > #text then return list end
    local token, kind = token_at(text, from)
    if not token then error(("byte %d begins no token"):format(from), 0) end
    list[#list + 1] = { text = token, kind = kind, space = space,
      is_unary = token == "#" or token == "not" or token == "-" and not is_value }
    if kind ~= "comment" then
      is_value = kind == "value" or token:find "^[%)%]}]$" ~= nil
    end
    at = from + #token
  end
end

-- ---- spaces ---------------------------------------------------------------------------

local BINARY = {}
for sign in ("= == ~= <= >= < > .. + - * / % ^"):gmatch "%S+" do BINARY[sign] = true end

local function is_binary(token) return BINARY[token.text] and not token.is_unary end

--- The space between two tokens of a line; nil: what is there is left alone.
local function between(a, b)
  local x, y = a.text, b.text
  if a.kind == "comment" or b.kind == "comment" then return nil end
  if y == "," or y == ";" then return "" end
  if x == "," or x == ";" then return b.space == "" and " " or nil end -- columns
  if x == "{" then return y == "}" and "" or " " end
  if y == "}" then return " " end
  if x == "(" or x == "[" or y == ")" or y == "]" then return "" end
  if a.is_unary then return x == "not" and " " or "" end
  if is_binary(a) or is_binary(b) or b.kind == "word" then return " " end
  if a.kind == "word" and b.is_unary then return " " end
  if y == "(" or y == "[" then
    if a.kind == "value" or x == "function" then return "" end
    return a.kind == "word" and " " or nil
  end
  if y == "{" or a.kind ~= "sign" and b.kind ~= "sign" then return " " end
  return nil
end

--- A text with the spaces that it should have.
local function formatted(text)
  local parts, last = {}, nil
  for _, token in ipairs(tokens_of(text)) do
    local space = token.space
    if not last then
      space = ""
    elseif space:find "\n" then
      space = space:gsub("[ \t]+\n", "\n"):gsub("\n\n\n+", "\n\n")
    else
      space = between(last, token) or space
    end
    parts[#parts + 1] = space .. token.text
    last = token
  end
  parts[#parts + 1] = "\n"
  return table.concat(parts)
end

-- ---- files ----------------------------------------------------------------------------

--- Prints the lines of a file that differ. Returns how many.
local function print_differences(path, old, new)
  local lines, count, at = {}, 0, 0
  for line in new:gmatch "([^\n]*)\n" do lines[#lines + 1] = line end
  for line in old:gmatch "([^\n]*)\n" do
    at = at + 1
    if line ~= lines[at] then
      count = count + 1
      print(("%s:%d: %s"):format(path, at, lines[at] or "no line"))
      if #lines[at] == 0 or #line == 0 then break end -- an empty line too many
    end
  end
  return math.max(count, 1)
end

local args, is_check = { unpack(kv.command_line.args) }, false
if args[1] == "check" then is_check = table.remove(args, 1) == "check" end
if #args == 0 then
  for _, folder in ipairs { "lua", "spec", "bench", "tools" } do
    for _, path in ipairs(files.find(kv.paths.root .. "/" .. folder, ".lua")) do
      args[#args + 1] = path
    end
  end
end
local count = 0
for _, path in ipairs(args) do
  local old = assert(files.read(path))
  local ok, new = pcall(formatted, old)
  if not ok then error(("%s: %s"):format(path, new), 0) end
  if new ~= old and is_check then
    count = count + print_differences(path, old, new)
  elseif new ~= old then
    files.write(path, new)
  end
end
if count > 0 then
  error(("%d lines differ; tools/format_lua.lua changes them"):format(count), 0)
end
