--- Exams in long-context recall. The small trained model of this folder, or the one with
-- latent attention (lua/models/recall_latent), reads contexts with hidden needles once,
-- then decodes questions about them under one policy after the other. Every question is
-- asked on its own fork of its context, or all on one fork.
--
--   local exam = require "models.recall.exam"
--   local sitting = exam.open { context = 4096, prompts = 8, needles = 32,
--                               block_size = 16, seed = 1 }
--   local result = sitting:ask(kv.policy("quest", { ratio = 0.05 }))
local arguments = require "kvlab.arguments"
local families = require "models.families"
local formats = require "kvlab.memory.formats"
local kv = require "kvlab"
local objects = require "kvlab.memory.objects"
local options = require "kvlab.options"
local prompts = require "models.recall.prompts"
local seeds = require "kvlab.seeds"
local OFFLOAD = require("kvlab.memory.host_tier").OFFLOAD

local M = {}

-- Questions for each context, asked as one batch of forks; of a context with fewer
-- needles, one for each needle.
M.QUERIES = 16

local models = {} -- loaded at their first use

---@class models.recall.Exam
---@field engine models.Engine
---@field questions integer  that are asked about each context, each about other needles
local Exam = {}
Exam.__index = Exam

local function read_contexts(self)
  for i, prompt in ipairs(self.prompts) do
    self.seqs[i] = self.engine:sequence()
    self.engine:prefill(self.seqs[i], prompt.tokens, nil, self.question == "prompt")
  end
end

--- The lookups of each question, which follow each other in the queries of a prompt.
local function in_groups(queries, hops)
  local groups = {}
  for i = 1, #queries, hops do
    groups[#groups + 1] = { unpack(queries, i, i + hops - 1) }
    groups[#groups].needle = queries[i].needle
  end
  return groups
end

--- The options of an exam.
M.OPTIONS = {
  context = options.required(options.count), prompts = options.required(options.count),
  needles = options.required(options.count),
  block_size = options.required(options.count), seed = options.any_integer,
  question = options.one_of("decode", "prompt", "row", "chain", "sum"),
  hops = options.count, even = options.boolean, offload = OFFLOAD,
  tables = options.one_of("one", "layer", "head"),
  format = options.one_of(unpack(formats.NAMES)),
  model = options.one_of("recall", "recall_latent"),
}

local function model_of(o)
  local name = o.model or "recall"
  models[name] = models[name]
    or families.load(("%s/lua/models/%s"):format(kv.paths.root, name))
  return models[name]
end

--- Raises unless an exam can be opened with these options, and its questions asked with
-- `policy`.
---@param o table  see open
---@param policy? table
function M.check(o, policy)
  o = options.check("exam.check", o, M.OPTIONS)
  prompts.check(o.context, o.needles)
  local engine = model_of(o):engine { policy = policy, blocks = 8, chunk = 1,
    max_seqs = 1, max_blocks = 8, block_size = o.block_size, format = o.format,
    tables = o.tables, offload = o.offload }
  engine.cache:close()
end

--- Reads contexts densely.
---@param o table  context (tokens), prompts (contexts), needles, block_size; seed (0);
--                 question: "decode" decodes it under the policy, as the answer; "prompt"
--                 reads it densely; "row" decodes it after the earlier questions and
--                 their right answers, as in training; "chain" and "sum" take `hops`
--                 lookups (4) for a question, each decoded after the earlier lookups and
--                 the answers given to them. In a chain the answer to one names the key
--                 of the next, and the last answer counts; in a sum all answers are
--                 added, and the sum counts. The exam does the naming and adding
--                 ("decode"); model: "recall_latent", whose attention is over latents,
--                 with an indexer of its own ("recall"); even: spreads
--                 the needles evenly (false); offload: keeps KV in host memory, with
--                 these options of kv.cache's offload; tables, format: of the cache
--                 ("one", bf16)
---@return models.recall.Exam
function M.open(o)
  o = options.check("exam.open", o, M.OPTIONS)
  local in_turn = o.question == "chain" or o.question == "sum"
  local hops = in_turn and (o.hops or 4) or 1
  if o.hops and not in_turn then
    error("exam.open: hops is given, but question is neither chain nor sum", 2)
  elseif o.needles < hops then
    error(("exam.open: needles is %d, expected at least hops = %d"):format(o.needles,
      hops), 2)
  end
  local tail = o.question == "row" and 6 * M.QUERIES or 6 * hops + 2
  local blocks = math.ceil((o.context + tail) / o.block_size)
  local self = setmetatable({ prompts = {}, seqs = {}, question = o.question,
    hops = hops, questions = math.min(M.QUERIES, math.floor(o.needles / hops)) }, Exam)
  self.engine = model_of(o):engine {
    blocks = o.prompts * blocks + ((o.tables or "one") == "one"
      and M.QUERIES * (2 + math.ceil(6 * hops / o.block_size))
      or (M.QUERIES + 1) * blocks), -- where tokens are evicted, forks copy all blocks
    block_size = o.block_size,
    max_seqs = M.QUERIES, max_blocks = blocks, offload = o.offload,
    format = o.format, tables = o.tables,
  }
  local seed = o.seed or 0
  for i = 1, o.prompts do
    local prompt = prompts.draw(o.context, o.needles, self.questions * hops,
      seeds.derive(seed, i), o.even, o.question == "chain" and hops or nil)
    if in_turn then prompt.queries = in_groups(prompt.queries, hops) end
    self.prompts[i] = prompt
  end
  read_contexts(self)
  return self
end

--- The i-th token of every question.
local function column(queries, i)
  local tokens = {}
  for n, query in ipairs(queries) do tokens[n] = query.ask[i] end
  return tokens
end

--- Reads the first three tokens of every question, on its fork. Decode steps are timed.
local function read_questions(engine, forks, queries, question, times)
  if question == "prompt" then
    for i, fork in ipairs(forks) do
      engine:prefill(fork, { unpack(queries[i].ask, 1, 3) })
    end
    return
  end
  for i = 1, 3 do
    local start = kv.C.kvl_clock_ns()
    engine:decode(forks, column(queries, i))
    kv.device():sync()
    times[#times + 1] = tonumber(kv.C.kvl_clock_ns() - start) * 1e-3
  end
end

--- Asks all questions of one context and returns which were answered right. The probe
-- observes while the answers are given.
local function ask(self, seq, queries, probe, times)
  local engine, question, forks = self.engine, self.question, {}
  for i = 1, #queries do forks[i] = seq:fork() end
  engine.attention.probe = nil
  read_questions(engine, forks, queries, question, times)
  engine.attention.probe = probe
  local first = engine:decode(forks, column(queries, 4)):argmax():list()
  local second = engine:decode(forks, first):argmax():list()
  local right = {}
  for i, query in ipairs(queries) do
    right[i] = first[i] == query.answer[1] and second[i] == query.answer[2]
    forks[i]:close()
  end
  return right
end

--- The sum of the numbers that values stand for.
local function sum_of(answers)
  local sum, first = 0, prompts.ids().value_first
  for _, answer in ipairs(answers) do sum = sum + answer[1] + answer[2] - 2 * first end
  return sum
end

--- Asks questions of several lookups, all on forks of one context: `groups` are the
-- lookups of each. In a chain, the answer that was given names the next key.
local function ask_in_turn(self, seq, groups, probe, times)
  local engine, hops, is_chain = self.engine, self.hops, self.question == "chain"
  local forks, asks, given = {}, {}, {}
  for i, group in ipairs(groups) do
    forks[i], asks[i], given[i] = seq:fork(), group[1], {}
  end
  for hop = 1, hops do
    engine.attention.probe = nil
    read_questions(engine, forks, asks, "decode", times)
    engine.attention.probe = probe
    local first = engine:decode(forks, column(asks, 4)):argmax():list()
    local second = engine:decode(forks, first):argmax():list()
    engine.attention.probe = nil
    engine:decode(forks, second)
    for i, group in ipairs(groups) do
      given[i][hop] = { first[i], second[i] }
      local k1, k2 = prompts.key_of(first[i], second[i])
      asks[i] = is_chain and { ask = { group[1].ask[1], k1, k2, group[1].ask[4] } }
        or group[hop + 1]
    end
  end
  local right = {}
  for i, group in ipairs(groups) do
    local answers = {}
    for hop, query in ipairs(group) do answers[hop] = query.answer end
    local last, want = given[i][hops], answers[hops]
    if is_chain then
      right[i] = last[1] == want[1] and last[2] == want[2]
    else
      right[i] = sum_of(given[i]) == sum_of(answers)
    end
    forks[i]:close()
  end
  return right
end

--- Asks the questions one after the other on one fork.
local function ask_in_row(self, seq, queries, probe, times)
  local engine, fork, right = self.engine, seq:fork(), {}
  local function decode(token)
    local start = kv.C.kvl_clock_ns()
    local likeliest = engine:decode({ fork }, { token }):argmax():item()
    times[#times + 1] = tonumber(kv.C.kvl_clock_ns() - start) * 1e-3
    return likeliest
  end
  for i, query in ipairs(queries) do
    engine.attention.probe = nil
    for t = 1, 3 do decode(query.ask[t]) end
    engine.attention.probe = probe
    local first = decode(query.ask[4])
    right[i] = decode(query.answer[1]) == query.answer[2] and first == query.answer[1]
    engine.attention.probe = nil
    decode(query.answer[2])
  end
  fork:close()
  return right
end

--- Decodes with a policy from now on. If this policy or the previous one watches the
-- prompt or evicts tokens of it, the prompt is read again.
local function use_policy(self, policy)
  local evicted = self.evicted
  self.evicted = policy.evict ~= nil
  if not (policy.watches_prompt or policy.evict or evicted) then
    self.engine:use_policy(policy, self.seqs)
    return
  end
  self.engine:use_policy(policy)
  for _, seq in ipairs(self.seqs) do seq:close() end
  read_contexts(self)
end

local OBSERVER = options.optional(options.like("an observer", "observe"))

--- Asks every question with `policy` selecting.
---@param policy table
---@param probe? fun(attention: kvlab.Attention): table  makes what observes the answers,
--                                                       see probe.lua
---@param each? fun(query: table, is_right: boolean)  sees every question
---@return number accuracy   share of the answers that are right
---@return number step_us    a decode step, median; NaN where only answers are decoded
---@return table|nil probe
function Exam:ask(policy, probe, each)
  self.engine.cache:reset_peak()
  self.before = self.engine.cache:stats()
  use_policy(self, policy)
  local engine, right, times = self.engine, 0, {}
  local observer = probe and probe(engine.attention)
  options.argument("ask", "what probe returns", observer, OBSERVER)
  local kind = self.question
  for i, prompt in ipairs(self.prompts) do
    local seq, queries = self.seqs[i], prompt.queries
    local answers
    if kind == "row" then
      answers = ask_in_row(self, seq, queries, observer, times)
    elseif kind == "chain" or kind == "sum" then
      answers = ask_in_turn(self, seq, queries, observer, times)
    else
      answers = ask(self, seq, queries, observer, times)
    end
    for n, query in ipairs(prompt.queries) do
      if answers[n] then right = right + 1 end
      if each then each(query, answers[n]) end
    end
  end
  table.sort(times)
  return right / (self.questions * #self.prompts), times[math.ceil(#times / 2)] or 0 / 0,
    observer
end

--- The cache's stats since the last `ask` began: what was held and moved for all
-- questions, and for the contexts if the policy read them.
function Exam:stats() return self.engine.cache:stats(self.before) end

--- Gives the KV memory back.
function Exam:close() self.engine.cache:close() end

local WATCHES = options.optional(options.callable)
arguments.methods(Exam, "an exam", {
  ask = { policy = objects.policy, probe = WATCHES, each = WATCHES },
})

return M
