--- Exams in long-context recall: contexts with hidden needles, read once by the small
-- trained model of this folder, and questions about them, decoded under one policy after
-- the other. Every question is asked on its own fork of its context.
--
--   local exam = require "models.recall.exam"
--   local sitting = exam.open { context = 4096, prompts = 8, needles = 32,
--                               block_size = 16, seed = 1 }
--   local result = sitting:ask(kv.policy.open("quest", { ratio = 0.05 }))
local kv = require "kvlab"
local llama = require "models.llama"
local prompts = require "models.recall.prompts"

local M = {}

M.QUERIES = 16 -- asked of each context, as one batch of forks

local model -- loaded at its first use

---@class models.recall.Exam
---@field engine models.llama.Engine
local Exam = {}
Exam.__index = Exam

--- Read contexts densely.
---@param o table  context (tokens), prompts (contexts), needles, block_size, seed;
--                 offload: options of an offload engine
---@return models.recall.Exam
function M.open(o)
  model = model or llama.load(kv.paths.root .. "/lua/models/recall")
  local blocks = math.ceil((o.context + 8) / o.block_size)
  local self = setmetatable({ prompts = {}, seqs = {} }, Exam)
  self.engine = model:engine {
    blocks = o.prompts * blocks + 2 * M.QUERIES, block_size = o.block_size,
    max_seqs = M.QUERIES, max_blocks = blocks, offload = o.offload,
  }
  for i = 1, o.prompts do
    self.prompts[i] = prompts.draw(o.context, o.needles, M.QUERIES, o.seed + i)
    self.seqs[i] = self.engine:sequence()
    self.engine:prefill(self.seqs[i], self.prompts[i].tokens)
  end
  return self
end

--- One token of every question.
local function column(queries, i)
  local tokens = {}
  for n, query in ipairs(queries) do tokens[n] = query.ask[i] end
  return tokens
end

--- Ask all questions of one context: how many were answered right. Timed while the
-- questions are read, observed while the answers are given.
local function ask(engine, seq, queries, probe, times)
  local forks = {}
  for i = 1, #queries do forks[i] = seq:fork() end
  engine.attention.probe = nil
  for i = 1, 3 do
    local start = kv.C.kvl_clock_ns()
    engine:decode(forks, column(queries, i))
    kv.device():sync()
    times[#times + 1] = tonumber(kv.C.kvl_clock_ns() - start) * 1e-3
  end
  engine.attention.probe = probe
  local first = engine:decode(forks, column(queries, 4)):argmax():list()
  local second = engine:decode(forks, first):argmax():list()
  local right = 0
  for i, query in ipairs(queries) do
    if first[i] == query.answer[1] and second[i] == query.answer[2] then
      right = right + 1
    end
    forks[i]:close()
  end
  return right
end

--- Ask every question with `policy` selecting.
---@param policy table
---@param probe? fun(attention: kvlab.Attention): table  makes what observes the answers,
--                                                       see probe.lua
---@return number accuracy   share of the answers that are right
---@return number step_us    a decode step, median
---@return table|nil probe
function Exam:ask(policy, probe)
  local engine, right, times = self.engine, 0, {}
  engine:use_policy(policy, self.seqs)
  local observer = probe and probe(engine.attention)
  for i, prompt in ipairs(self.prompts) do
    right = right + ask(engine, self.seqs[i], prompt.queries, observer, times)
  end
  table.sort(times)
  return right / (M.QUERIES * #self.prompts), times[math.ceil(#times / 2)], observer
end

function Exam:close() self.engine.cache:close() end

return M
