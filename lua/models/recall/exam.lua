--- Exams in long-context recall. The small trained model of this folder reads contexts
-- with hidden needles once, then decodes questions about them under one policy after the
-- other. Every question is asked on its own fork of its context, or all on one fork.
--
--   local exam = require "models.recall.exam"
--   local sitting = exam.open { context = 4096, prompts = 8, needles = 32,
--                               block_size = 16, seed = 1 }
--   local result = sitting:ask(kv.policy("quest", { ratio = 0.05 }))
local kv = require "kvlab"
local llama = require "models.llama"
local options = require "kvlab.options"
local prompts = require "models.recall.prompts"
local seeds = require "kvlab.seeds"
local OFFLOAD = require("kvlab.memory.host_tier").OFFLOAD

local M = {}

-- Questions for each context, asked as one batch of forks; of a context with fewer
-- needles, one for each needle.
M.QUERIES = 16

local model -- loaded at its first use

---@class models.recall.Exam
---@field engine models.Engine
---@field questions integer  that are asked about each context, each about another needle
local Exam = {}
Exam.__index = Exam

local function read_contexts(self)
  for i, prompt in ipairs(self.prompts) do
    self.seqs[i] = self.engine:sequence()
    self.engine:prefill(self.seqs[i], prompt.tokens)
  end
end

local OPTIONS = {
  context = options.required(options.count), prompts = options.required(options.count),
  needles = options.required(options.count),
  block_size = options.required(options.count), seed = options.integer,
  question = options.one_of("decode", "prompt", "row"), even = options.boolean,
  offload = OFFLOAD,
}

--- Reads contexts densely.
---@param o table  context (tokens), prompts (contexts), needles, block_size; seed (0);
--                 question: "decode" decodes it under the policy, as the answer; "prompt"
--                 reads it densely; "row" decodes it behind those before it and their
--                 right answers, as in training ("decode"); even: spreads the needles
--                 evenly (false); offload: keeps KV in host memory, with these options of
--                 kv.cache's offload
---@return models.recall.Exam
function M.open(o)
  o = options.check("exam.open", o, OPTIONS)
  model = model or llama.load(kv.paths.root .. "/lua/models/recall")
  local tail = o.question == "row" and 6 * M.QUERIES or 8
  local blocks = math.ceil((o.context + tail) / o.block_size)
  local self = setmetatable({ prompts = {}, seqs = {}, question = o.question,
    questions = math.min(M.QUERIES, o.needles) }, Exam)
  self.engine = model:engine {
    blocks = o.prompts * blocks + 2 * M.QUERIES, block_size = o.block_size,
    max_seqs = M.QUERIES, max_blocks = blocks, offload = o.offload,
  }
  local seed = o.seed or 0
  for i = 1, o.prompts do
    self.prompts[i] = prompts.draw(o.context, o.needles, self.questions,
      seeds.derive(seed, i), o.even)
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
local function ask(engine, seq, queries, question, probe, times)
  local forks = {}
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

--- Asks the questions one after the other on one fork.
local function ask_in_row(engine, seq, queries, probe, times)
  local fork, right = seq:fork(), {}
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

--- Decodes with a policy from now on. If it watches the prompt, the prompt is read again.
local function use_policy(self, policy)
  if not policy.watches_prompt then
    self.engine:use_policy(policy, self.seqs)
    return
  end
  self.engine:use_policy(policy)
  for _, seq in ipairs(self.seqs) do seq:close() end
  read_contexts(self)
end

--- Asks every question with `policy` selecting.
---@param policy table
---@param probe? fun(attention: kvlab.Attention): table  makes what observes the answers,
--                                                       see probe.lua
---@param each? fun(query: table, is_right: boolean)  sees every question
---@return number accuracy   share of the answers that are right
---@return number step_us    a decode step, median; NaN where only answers are decoded
---@return table|nil probe
function Exam:ask(policy, probe, each)
  use_policy(self, policy)
  local engine, right, times = self.engine, 0, {}
  local observer = probe and probe(engine.attention)
  for i, prompt in ipairs(self.prompts) do
    local answers = self.question == "row"
      and ask_in_row(engine, self.seqs[i], prompt.queries, observer, times)
      or ask(engine, self.seqs[i], prompt.queries, self.question, observer, times)
    for n, query in ipairs(prompt.queries) do
      if answers[n] then right = right + 1 end
      if each then each(query, answers[n]) end
    end
  end
  table.sort(times)
  return right / (self.questions * #self.prompts), times[math.ceil(#times / 2)] or 0 / 0,
    observer
end

--- Gives the KV memory back.
function Exam:close() self.engine.cache:close() end

return M
