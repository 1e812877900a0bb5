--- Tasks: what a language model is asked, and how good its answers are. A task is a file
-- in a folder called tasks (kvlab.named): the project's lua/tasks, or one of your own.
--
--   local task = kv.task("needle", { length = 4096, keys = 4 })
--   local examples = task:draw(tokenizer, 16, seed)     16 prompts of at most 4096 tokens
--   local share = task:score("The number is 4831275.", examples[1])
--
-- A definition draws one example from a writer (lua/kvlab/task/writer.lua). `size` says
-- how much unimportant text it has, in sentences, words or whatever the task is made of;
-- kvlab looks for the largest size that fits the length:
--
--   return kv.task.define {
--     name = "sum", metric = "all",             -- of kv.scores, or a function
--     defaults = { digits = 3 },                -- options; each has a default or a kind
--     takes = { digits = kv.task.count },       -- which values they may have
--     build = function(self, writer, size)
--       local a = writer:number(self.digits)
--       return { context = writer:noise_with(size, { "The number is " .. a .. "." },
--                                            { writer:share() }),
--                question = "\nWhat is the number?", lead = " The number is",
--                answers = { a } }
--     end,
--   }
--
-- `least` is the smallest size (1). `open(self)` may check options and read files. A task
-- that is not made to a length has `examples(self, tokenizer, n, seed)` in place of
-- `build`, which returns the list itself.
--
-- Every task takes `length`, in tokens, with the answer (1024); `text`: a file, or kjv,
-- whose sentences stand in place of made-up ones; `chat`: the prompt is a message, in the
-- words of the tokenizer's chat template (false); `answer_tokens`: most tokens of an
-- answer (as many as the right answers have, and 8).
--
-- An example is a table: ids, the tokens of the prompt; read: how many of them come
-- before the question; text, the prompt; answers, the right ones; answer_tokens. An
-- example without a question has `target`, the tokens that follow ids in a text.
local arguments = require "kvlab.arguments"
local constructor = require "kvlab.constructor"
local named = require "kvlab.named"
local options = require "kvlab.options"
local scores = require "kvlab.task.scores"
local seeds = require "kvlab.seeds"
local sorted = require "kvlab.sorted"
local sources = require "kvlab.sources"
local texts = require "kvlab.task.texts"
local writers = require "kvlab.task.writer"

local M = {}

-- What `takes` may say of an option: kinds of kvlab.options.
M.count, M.whole, M.share = options.count, options.whole, options.share
M.string, M.boolean = options.string, options.boolean
--- One of these values.
function M.one_of(...) return options.one_of(...) end

local KINDS = { number = options.number, string = options.string,
                boolean = options.boolean } -- of defaults
local COMMON = { length = options.within(1, 2 ^ 24), text = options.string,
                 chat = options.boolean, answer_tokens = options.count }
local LENGTH, MORE_TOKENS = 1024, 8

---@class kvlab.task.Parts
---@field context string    comes before the question
---@field question string
---@field lead? string      the words with which the answer begins
---@field answers string[]  the right ones

---@class kvlab.task.Example
---@field ids integer[]            the tokens of the prompt
---@field read integer             how many of them come before the question
---@field text? string             the prompt
---@field answers? string[]        the right ones
---@field answer_tokens? integer   most tokens of an answer
---@field target? integer[]        the tokens that follow in a text

---@class kvlab.Task
---@field name string
---@field metric string|function
---@field length integer          tokens, with the answer
---@field sentences string[]|nil  of the text that was given
local Task = {}
Task.__index = Task

-- ---- prompts --------------------------------------------------------------------------

--- How many ids come before the last `bytes` bytes of their text.
local function cut(tokenizer, ids, bytes)
  local at = #ids
  while bytes > 0 and at > 1 do
    bytes = bytes - #tokenizer:bytes_of(ids[at])
    at = at - 1
  end
  return at
end

--- Where the last occurrence of a part begins.
local function last_of(text, part)
  local at, from = nil, 1
  repeat
    local found = text:find(part, from, true)
    at, from = found or at, (found or 0) + 1
  until not found
  return at or #text + 1
end

--- An example with the tokens of its prompt: the context, then the question, then the
-- words with which the answer begins. With `chat`, the first two are the message of a
-- user, and the answer is the assistant's.
---@param tokenizer kvlab.text.Tokenizer
---@param parts kvlab.task.Parts
---@return kvlab.task.Example
function Task:prompt(tokenizer, parts)
  local text, lead = parts.context .. parts.question, parts.lead or ""
  local ids
  if self.chat then
    text, ids = tokenizer:chat({ { role = "user", content = text } },
      { add_generation_prompt = true })
    for _, id in ipairs(tokenizer:encode(lead:match "^%s*(.*)$",
      { bos = false, eos = false })) do ids[#ids + 1] = id end
  else
    ids = tokenizer:encode(text .. lead, { eos = false })
  end
  local after = #text - last_of(text, parts.question) + 1 + #lead
  local answer_tokens = self.answer_tokens or MORE_TOKENS
    + #tokenizer:encode(table.concat(parts.answers, ", "), { bos = false, eos = false })
  return { ids = ids, read = cut(tokenizer, ids, after), text = text .. lead,
           answers = parts.answers, answer_tokens = answer_tokens }
end

--- The largest size for which fits(size); the smallest one is known to fit.
local function largest(least, fits)
  local low, step = least, 8
  while fits(low + step) do low, step = low + step, 2 * step end
  local high = low + step -- does not fit
  while high - low > 1 do
    local middle = math.floor((low + high) / 2)
    if fits(middle) then low = middle else high = middle end
  end
  return low
end

--- One example, as long as the length allows.
local function fitted(self, tokenizer, seed)
  local function build(size)
    return self:prompt(tokenizer, self:build(writers.new(seed, self.sentences), size))
  end
  local function tokens(example) return #example.ids + example.answer_tokens end
  local least = type(self.least) == "function" and self:least() or self.least or 1
  local smallest = tokens(build(least))
  if smallest > self.length then
    error(("task %s: length is %d, expected at least %d, the tokens of its smallest "
      .. "prompt and the answer"):format(self.name, self.length, smallest), 0)
  end
  return build(largest(least, function(size)
    return tokens(build(size)) <= self.length
  end))
end

--- Draws examples. The same seed draws the same examples, and drawing more examples adds
-- to them.
---@param tokenizer kvlab.text.Tokenizer
---@param n integer
---@param seed? integer  (--seed, or that of the row)
---@return kvlab.task.Example[]
function Task:draw(tokenizer, n, seed)
  seed = seed or seeds.current()
  if self.examples then return self:examples(tokenizer, n, seed) end
  local list = {}
  for i = 1, n do list[i] = fitted(self, tokenizer, seeds.derive(seed, i)) end
  return list
end

--- How good an answer is, from 0 to 1. A task with first_line = true looks at the first
-- line only.
---@param given string
---@param example kvlab.task.Example
---@return number
function Task:score(given, example)
  if self.first_line then given = given:match "^%s*([^\n]*)" end
  local score = type(self.metric) == "function" and self.metric or scores[self.metric]
  return score(given, example.answers, example)
end

--- Whether the score of an example can only be 0 or 1: its one answer is right or wrong.
---@param example kvlab.task.Example
---@return boolean
function Task:is_zero_one(example)
  if example.target then return false end
  return self.metric == "exact" or self.metric == "part"
    or self.metric == "all" and type(example.answers) == "table"
      and #example.answers == 1
end

--- n of the numbers 1 to `count` that a seed chooses, in ascending order; all of them if
-- there are fewer.
---@param n integer
---@param count integer
---@param seed integer
---@return integer[]
function M.choose(n, count, seed)
  local all, chosen = {}, {}
  for i = 1, count do all[i] = i end
  writers.new(seed):shuffled(all)
  for i = 1, math.min(n, count) do chosen[i] = all[i] end
  table.sort(chosen)
  return chosen
end

-- ---- define and open ------------------------------------------------------------------

local FIELDS = {
  name = options.required(options.string), defaults = options.table,
  takes = options.table, build = options.fn, examples = options.fn, open = options.fn,
  least = options.either(options.count, options.fn),
  metric = options.either(options.one_of(unpack(sorted.keys(scores))), options.fn),
}

--- The kinds of a definition's options.
local function kinds_of(def)
  local kinds = {}
  for key, kind in pairs(COMMON) do kinds[key] = kind end
  for key, kind in pairs(def.takes or {}) do kinds[key] = kind end
  for key, value in pairs(def.defaults or {}) do
    if not kinds[key] then
      local kind = type(value)
      kinds[key] = KINDS[kind] or options.fail(("task.define: default %s is a %s, "
        .. "expected a number, a string or true or false"):format(key, kind))
    end
  end
  return kinds
end

local definitions = setmetatable({}, { __mode = "k" }) -- what define returned -> def
local bases = setmetatable({}, { __mode = "k" }) -- what vary returned -> files of others

local function make(def, kinds, given)
  local what = "task " .. def.name
  given = options.check(what, given, kinds)
  local self = setmetatable({ length = LENGTH }, Task)
  for _, source in ipairs { def.defaults or {}, given } do
    for key, value in pairs(source) do self[key] = value end
  end
  for _, key in ipairs { "name", "build", "examples", "least" } do
    self[key] = def[key]
  end
  self.metric = self.metric or def.metric
  if def.build and self.text then
    self.sentences = texts.sentences(texts.read(self.text))
  end
  if def.open then def.open(self) end
  return self
end

--- Defines a task; a file of a folder called tasks returns the result.
---@param def table  see the head of this file
---@return fun(given?: table): kvlab.Task  makes one with these options
function M.define(def)
  options.check("task.define", def, FIELDS)
  if (def.build == nil) == (def.examples == nil) then
    options.fail(("task.define: %s has %s, expected build or examples"):format(def.name,
      def.build and "both" or "neither"))
  end
  local kinds = kinds_of(def)
  local function new(given) return make(def, kinds, given) end
  definitions[new] = def
  return new
end

--- What the file of a name returned, and its path.
local function find(name)
  local new, path = named.open("tasks", "task", name, 3)
  if definitions[new] then return new, path end
  return options.fail(named.wrong(path, new, "what kv.task.define returns"))
end

local VARY = { name = options.required(options.string), defaults = options.table }

--- Defines a task as a copy of another task with other defaults.
---@param base string    the name of the other one
---@param changes table  name, and defaults that differ
function M.vary(base, changes)
  changes = options.check("task.vary", changes, VARY)
  local other, path = find(base)
  local def, defaults = {}, {}
  for key, value in pairs(definitions[other]) do def[key] = value end
  for _, source in ipairs { def.defaults or {}, changes.defaults or {} } do
    for key, value in pairs(source) do defaults[key] = value end
  end
  def.name, def.defaults = changes.name, defaults
  local new = M.define(def)
  bases[new] = { path, unpack(bases[other] or {}) }
  return new
end

--- The names of all tasks.
---@return string[]
function M.names() return named.list "tasks" end

--- Makes a task by name, with options. Raises for an unknown name or option; the error
-- lists the known ones.
---@param name string
---@param given? table  its options
---@return kvlab.Task
local function open(name, given)
  local new, path = find(name)
  sources.use(path)
  for _, base in ipairs(bases[new] or {}) do sources.use(base) end
  return new(given)
end

--- The text of a file, or of kjv.
M.read_text = texts.read
--- The examples of a JSONL file; an error names the line.
M.read_examples = texts.examples
M.has_kjv = texts.has_kjv
--- The object of a JSON file, such as LongBench's table of prompts.
M.read_json = texts.json

local TOKENIZER = options.like("a tokenizer", "encode", "bytes_of")
local LIST = options.list_of(options.string, 1)
local PARTS = { "a table of texts with context, question and answers", function(x)
  return type(x) == "table" and type(x.context) == "string" and LIST[2](x.answers)
    and type(x.question) == "string" and type(x.lead or "") == "string"
end }
local EXAMPLE = options.like("an example with answers", "answers")
arguments.methods(Task, "a task", {
  prompt = { tokenizer = TOKENIZER, parts = PARTS },
  draw = { tokenizer = TOKENIZER, n = options.within(1, 100000),
           seed = options.optional(options.any_integer) },
  score = { given = options.string, example = EXAMPLE },
  is_zero_one = { example = options.table },
})
arguments.functions(M, "task", {
  vary = { base = options.string },
  choose = { n = options.count, count = options.within(0, 1e7),
             seed = options.any_integer },
})

return constructor(M, open)
