--- Texts and examples that a task reads from files. Every file counts as a source of the
-- rows that are computed from it (kvlab.sources).
local arguments = require "kvlab.arguments"
local files = require "kvlab.files"
local json = require "kvlab.json"
local options = require "kvlab.options"
local sources = require "kvlab.sources"
local unicode = require "kvlab.text.unicode"

local M = {}

local KJV_DATA = "/usr/lib/bible.data"
local kjv -- its text

--- The King James Bible of Debian's package bible-kjv-text, without numbers of verses.
local function read_kjv()
  if kjv then return kjv end
  local pipe, verses = io.popen "bible -f Gen1:1-Rev22:21 2>/dev/null", {}
  for line in pipe:lines() do verses[#verses + 1] = line:match "^%S+ (.*)$" end
  pipe:close()
  if #verses == 0 then
    error("the text kjv is the Debian package bible-kjv-text, which the program of the "
      .. "package bible-kjv reads, and it is not here: apt install bible-kjv; or give "
      .. "the path of a text file", 0)
  end
  kjv = table.concat(verses, " ")
  return kjv
end

--- Whether the text "kjv" is on this machine.
---@return boolean
function M.has_kjv() return files.real "kjv" ~= nil or (pcall(read_kjv)) end

--- The text of a file; "kjv", unless there is such a file, is the King James Bible of
-- Debian's package bible-kjv-text.
---@param name string
---@return string
function M.read(name)
  local text = sources.read(name)
  if not text and name == "kjv" then
    sources.keep(KJV_DATA)
    text = read_kjv()
  end
  if not text then error(("the text %s cannot be read"):format(name), 0) end
  text = unicode.repaired(text)
  if not text:find "%S" then error(("the text %s is empty"):format(name), 0) end
  return text
end

--- The sentences of a text: what ends with a full stop, a question or exclamation mark
-- before white space.
---@param text string
---@return string[]
function M.sentences(text)
  local list = {}
  text = text:gsub("%s+", " ") .. " "
  for sentence in text:gmatch "%s*(.-[.!?]+[\"')]*)%f[%s]" do
    list[#list + 1] = sentence
  end
  if #list == 0 then list[1] = text:match "^%s*(.-)%s*$" end
  return list
end

--- The answers of an example: a list, or one text for itself. Returns nil for others.
local function answers_of(row)
  local answers = row.answers or row.answer
  if type(answers) == "string" then answers = { answers } end
  if type(answers) ~= "table" or #answers == 0 then return nil end
  for _, answer in ipairs(answers) do
    if type(answer) ~= "string" then return nil end
  end
  return answers
end

local CLASSES = options.list_of(options.string)

--- The object of one line, checked.
local function row_of(line)
  local ok, row = pcall(json.decode, line)
  if not ok then
    error(row:gsub("^.-json%.decode: ", ""):gsub("^line %d+, ", ""), 0)
  elseif type(row) ~= "table" then
    error("expected an object", 0)
  end
  for _, name in ipairs { "input", "context" } do
    if type(row[name] or "") ~= "string" then
      error(("%s is a %s, expected a string"):format(name, type(row[name])), 0)
    end
  end
  if not row.input and not row.context then
    error("there is no input and no context", 0)
  end
  local answers = answers_of(row)
  if not answers then
    error("answers is missing or no list of strings, with one at least", 0)
  end
  local classes = row.all_classes ~= json.null and row.all_classes or nil
  if classes and not CLASSES[2](classes) then
    error("all_classes is no list of strings", 0)
  end
  return { input = row.input or "", context = row.context or "", answers = answers,
           all_classes = classes }
end

--- The examples of a JSONL file, one object a line: input (the question), context, and
-- answers, and all_classes where the answer is one of them, as LongBench has them; other
-- fields are ignored. Empty lines are skipped.
---@param path string
---@return {input: string, context: string, answers: string[],
---  all_classes: string[]|nil}[]
function M.examples(path)
  local text = sources.read(path)
  if not text then error(("the file %s cannot be read"):format(path), 0) end
  local rows, number = {}, 0
  for line in (text .. "\n"):gmatch "(.-)\r?\n" do
    number = number + 1
    if line:find "%S" then
      local ok, row = pcall(row_of, line)
      if not ok then error(("%s, line %d: %s"):format(path, number, row), 0) end
      rows[#rows + 1] = row
    end
  end
  if #rows == 0 then error(("the file %s has no examples"):format(path), 0) end
  return rows
end

--- The object of a JSON file.
---@param path string
---@return table
function M.json(path)
  local text = sources.read(path)
  if not text then error(("the file %s cannot be read"):format(path), 0) end
  local ok, object = pcall(json.decode, text)
  if ok and type(object) == "table" then return object end
  return error(("%s: %s"):format(path, ok and "expected an object" or object), 0)
end

arguments.functions(M, "texts", {
  json = { path = options.string },
  read = { name = options.string }, sentences = { text = options.string },
  examples = { path = options.string },
})

return M
