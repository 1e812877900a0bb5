--- Examples of tasks (kv.task) that a model has read, and is asked about under one policy
-- after the other.
--
--   local reading = require("models.reading").open {
--     engine = engine, tokenizer = tokenizer, task = task, examples = 8, seed = 1 }
--   local result = reading:ask(kv.policy("quest", { ratio = 0.1 }), kv.probe)
--   print(result.score, result.bytes_share)
--
-- Contexts are read densely, once. The question is decoded token by token under the
-- policy, as the answer is; with question = "prompt" it is read densely, all but its last
-- token. So every token of an answer is computed under the policy. Each policy works on
-- forks of the contexts; one that watches the prompt reads the contexts again, and so
-- does one that evicts tokens of them. Eviction needs an engine with tables by layer or
-- head.
--
-- Answers are greedy. The examples of a batch are decoded together.
local arguments = require "kvlab.arguments"
local closed = require "kvlab.closed"
local generate = require "kvlab.serve.generate"
local kv = require "kvlab"
local objects = require "kvlab.memory.objects"
local options = require "kvlab.options"
local sampler = require "kvlab.serve.sampler"

local M = {}

---@class models.Reading
---@field engine models.Engine
---@field task kvlab.Task
---@field examples table[]
local Reading = {}
Reading.__index = Reading

-- ---- reading --------------------------------------------------------------------------

--- Copies ids[first] ... ids[last].
local function part(ids, first, last)
  local list = {}
  for i = first, last do list[#list + 1] = ids[i] end
  return list
end

local function read_contexts(self)
  for i, example in ipairs(self.examples) do
    self.seqs[i] = self.engine:sequence()
    self.engine:prefill(self.seqs[i], part(example.ids, 1, example.read))
  end
end

local OPTIONS = {
  engine = options.required(options.like("an engine", "prefill", "decode", "cache")),
  tokenizer = options.required(options.like("a tokenizer", "encode", "token_of")),
  task = options.required(options.like("a task", "draw", "score", "is_zero_one")),
  examples = options.required(options.count), seed = options.any_integer,
  question = options.one_of("decode", "prompt"),
}

--- Draws examples and reads their contexts.
---@param o table  engine: has blocks for all examples; tokenizer; task; examples: how
--                 many; seed (--seed, or that of the row); question: "decode" or "prompt"
---@return models.Reading
function M.open(o)
  o = options.check("reading.open", o, OPTIONS)
  local context = o.engine.model and o.engine.model.config.context
  if context and o.task.length > context then
    options.fail(("reading.open: the task's length is %d, but the model's context is %d")
      :format(o.task.length, context), 3)
  end
  local self = setmetatable({ engine = o.engine, tokenizer = o.tokenizer, task = o.task,
                              seqs = {}, ends = {} }, Reading)
  for _, id in ipairs(generate.ends(o.engine, o.tokenizer)) do self.ends[id] = true end
  self.examples = o.task:draw(o.tokenizer, o.examples, o.seed)
  for _, example in ipairs(self.examples) do
    if o.question == "prompt" then example.read = #example.ids - 1 end
  end
  read_contexts(self)
  return self
end

--- How many blocks a reading needs of its engine's cache, at most.
---@param task kvlab.Task
---@param examples integer
---@param block_size integer
---@param evicts? boolean  policies evict tokens: forks have blocks of their own (false)
---@return integer blocks
function M.blocks(task, examples, block_size, evicts)
  local each = math.ceil(task.length / block_size) + 2
  return (evicts and 2 * examples + 1 or examples) * each
end

-- ---- asking ---------------------------------------------------------------------------

--- -log p of a token for each row of logits.
local function surprise(logits, tokens)
  local n, device = #tokens, logits.device
  local index = kv.from(device, "i32", { n, 1 }, tokens)
  return (logits:logsumexp(-1):reshape { n } - logits:gather(index):reshape { n }):list()
end

--- The state of an example while it is decoded. `at`: the index of the next token to
-- decode, in its prompt and what follows.
local function begin(example, seq)
  return { example = example, seq = seq:fork(), at = example.read + 1, given = {},
           nll = 0, right = 0 }
end

local function is_done(self, work)
  local example, count = work.example, #work.given
  if example.target then return count == #example.target end
  local last = work.given[count]
  return count == example.answer_tokens or last ~= nil and self.ends[last] ~= nil
end

--- The next token to decode.
local function next_token(work)
  local ids = work.example.ids
  return ids[work.at] or work.given[work.at - #ids]
end

--- Takes the logits of a step: row i is that of all[i].
local function take(all, logits)
  local likeliest = sampler.expect_likeliest(logits)
  local targets, has_target = {}, false
  for i, work in ipairs(all) do
    local target = work.at >= #work.example.ids and work.example.target
    targets[i] = target and target[#work.given + 1] or 0
    has_target = has_target or target ~= nil and target ~= false
  end
  local nll = has_target and surprise(logits, targets)
  for i, work in ipairs(all) do
    if work.at >= #work.example.ids then
      local token = likeliest[i]
      if work.example.target then
        work.nll = work.nll + nll[i]
        work.right = work.right + (token == targets[i] and 1 or 0)
        token = targets[i]
      end
      work.given[#work.given + 1] = token
    end
    work.at = work.at + 1
  end
end

--- Decodes one batch until every example is done.
local function decode(self, batch)
  local left = batch
  while #left > 0 do
    local seqs, tokens, still = {}, {}, {}
    for i, work in ipairs(left) do seqs[i], tokens[i] = work.seq, next_token(work) end
    kv.scope(take, left, self.engine:decode(seqs, tokens))
    for _, work in ipairs(left) do
      if is_done(self, work) then work.seq:close() else still[#still + 1] = work end
    end
    left = still
  end
end

--- Decodes with a policy from now on. If this policy or the previous one watches the
-- prompt or evicts tokens of it, the contexts are read again.
local function use_policy(self, policy)
  local evicted = self.evicted
  self.evicted = policy.evict ~= nil
  if not (policy.watches_prompt or policy.evict or evicted) then
    return self.engine:use_policy(policy, self.seqs)
  end
  self.engine:use_policy(policy)
  for _, seq in ipairs(self.seqs) do seq:close() end
  read_contexts(self)
end

--- The ids that a tokenizer has: a model may have more, which stand for nothing.
local function known(tokenizer, ids)
  local list = {}
  for _, id in ipairs(ids) do
    if tokenizer:token_of(id) then list[#list + 1] = id end
  end
  return list
end

--- An example's outcome: its score, and -log p of a token where it has a target.
local function outcome(self, work)
  local example = work.example
  if example.target then
    return { score = work.right / #work.given, nll = work.nll / #work.given,
             tokens = work.given }
  end
  local answer = self.tokenizer:decode(known(self.tokenizer, work.given))
  return { score = self.task:score(answer, example), answer = answer,
           tokens = work.given }
end

local function column(list, name)
  local values = {}
  for i, entry in ipairs(list) do values[i] = entry[name] end
  return values
end

--- Asks all examples under a policy. The texts are the sample: intervals are those of the
-- mean over texts (95 %; kv.statistics.share of scores, Student's t of nll), nil for a
-- single text.
---@param policy table
---@param probe? fun(attention: kvlab.Attention): table  makes what observes every decoded
--                                                       token, see kv.probe
---@return { score: number, low: number|nil, high: number|nil, nll: number|nil,
---  nll_low: number|nil, nll_high: number|nil, zero_one: integer, each: table[],
---  tokens: integer } result   zero_one: how many of the scores can only be 0 or 1; each:
--                              score, nll, answer, tokens
---@return table|nil observer
function Reading:ask(policy, probe)
  self.engine.cache:reset_peak()
  self.before = self.engine.cache:stats()
  use_policy(self, policy)
  local observer = probe and probe(self.engine.attention)
  local all, tokens, most = {}, 0, self.engine.max_seqs
  for first = 1, #self.examples, most do
    local batch = {}
    for i = first, math.min(first + most - 1, #self.examples) do
      batch[#batch + 1] = begin(self.examples[i], self.seqs[i])
      all[i] = batch[#batch]
    end
    decode(self, batch)
  end
  local each = {}
  for i, work in ipairs(all) do
    each[i] = outcome(self, work)
    tokens = tokens + #work.given
  end
  local result = { each = each, tokens = tokens, zero_one = 0 }
  for _, example in ipairs(self.examples) do
    result.zero_one = result.zero_one + (self.task:is_zero_one(example) and 1 or 0)
  end
  result.score, result.low, result.high = kv.statistics.share(column(each, "score"))
  if each[1].nll then
    result.nll, result.nll_low, result.nll_high =
      kv.statistics.interval(column(each, "nll"))
  end
  return result, observer
end

--- The cache's stats since the last `ask` began: what was held and moved for all
-- examples, and for the contexts if the policy read them.
function Reading:stats() return self.engine.cache:stats(self.before) end

--- Gives the KV memory back.
function Reading:close()
  for _, seq in ipairs(self.seqs) do seq:close() end
  closed(self, "reading")
end

arguments.functions(M, "reading", {
  blocks = { task = options.like("a task", "draw", "length"), examples = options.count,
             block_size = options.count, evicts = options.optional(options.boolean) },
})
arguments.methods(Reading, "a reading", {
  ask = { policy = objects.policy, probe = options.optional(options.callable) },
})

return M
