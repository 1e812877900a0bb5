--- How requests choose their next tokens: greedily, or drawn from the model's
-- distribution after filters. All of it runs on the device for all requests of a step at
-- once; only ids come to the host, and the log-probabilities that a request asks for.
--
-- The filters are applied in the order of transformers: repetition_penalty, temperature,
-- top_k, top_p, min_p. Each filter is a threshold on the scores, so tokens with the same
-- score as the last one that passes also pass.
--
-- Logits that hold NaN or inf give no token, and neither do logits that are all -inf: the
-- row's problem is returned in place of a token, and the other rows get their tokens.
--
-- A token is drawn by a race of all tokens (tensor:draw): token i of the vocabulary, as
-- the n-th token of a request, takes number n * vocab + i of the request's seed. So a
-- request draws the same whatever else is in the batch, after it was preempted, and when
-- a step is tried again; and with drafts as without them. A policy that drafts the token
-- draws with the same numbers from its own distribution (`guess`): the closer this
-- distribution is to the model's, the more often the two draw the same token.
local options = require "kvlab.options"
local tensor = require "kvlab.tensor.arithmetic"

local M = {}

local POSITIVE_SHARE = { "a number > 0 and <= 1", function(x)
  return options.share[2](x) and x > 0
end }

--- The options of a request that say how its tokens are chosen.
M.KNOWN = {
  temperature = options.not_negative, top_k = options.whole, top_p = POSITIVE_SHARE,
  min_p = options.share, repetition_penalty = options.positive, seed = options.any_whole,
  logprobs = options.within(0, 1000),
}
local HEAD = 512 -- how many of the best tokens top_p looks at first
local HALVINGS = 40 -- of an interval of scores: the last one lies between two of f32
local SMALLEST, LARGEST = 2 ^ -126, (2 - 2 ^ -23) * 2 ^ 127 -- of f32
local LEAST = -110 -- e to the power of any score below it is 0

---@class kvlab.serve.Choice  how a request chooses its tokens
---@field temperature number  0: the likeliest token
---@field top_k integer       0: all
---@field top_p number
---@field min_p number
---@field repetition_penalty number
---@field seed integer
---@field logprobs integer|nil

--- How a request chooses, from the options of serve:submit; nil: the likeliest token.
---@param o table
---@return kvlab.serve.Choice|nil
function M.take(o)
  local is_asked = false
  for name in pairs(M.KNOWN) do is_asked = is_asked or o[name] ~= nil end
  if not is_asked then return nil end
  return {
    temperature = o.temperature or 0, top_k = o.top_k or 0, top_p = o.top_p or 1,
    min_p = o.min_p or 0, repetition_penalty = o.repetition_penalty or 1,
    seed = o.seed or 0, logprobs = o.logprobs,
    seen = {}, seen_ids = {}, seen_to = 0, -- tokens of prompt and output, each once
  }
end

local GREEDY = M.take { temperature = 0 }

-- ---- what the host knows --------------------------------------------------------------

--- The different tokens of a request so far.
local function seen_so_far(r, c)
  for i = c.seen_to + 1, r.num_tokens do
    local id = r.tokens[i]
    if not c.seen[id] then
      c.seen[id] = true
      c.seen_ids[#c.seen_ids + 1] = id
    end
  end
  c.seen_to = r.num_tokens
  return c.seen_ids
end

-- A row of a step that verifies a draft: the request as it is if the first `past` tokens
-- of its draft are right.
local Row = {}
Row.__index = Row

function Row:output_length() return self.request:output_length() + self.past end

--- The rows of a step in which requests may have drafts, in place of the requests
-- themselves, for `choose`.
---@param list kvlab.Request[]
---@return table[]
function M.rows(list)
  local rows = {}
  for _, r in ipairs(list) do
    for past = 0, r.num_scheduled_tokens - 1 do
      rows[#rows + 1] = setmetatable({ request = r, past = past, choice = r.choice }, Row)
    end
  end
  return rows
end

--- The tokens of a request, or of a row, so far. Tokens of a draft may come twice; a
-- draft that the host does not know yet is left out.
local function seen_of(r, c)
  local ids = seen_so_far(r.request or r, c)
  if (r.past or 0) == 0 or r.is_guess then return ids end
  ids = { unpack(ids) }
  for i = 1, r.past do ids[#ids + 1] = r.request.draft.ids[i] end
  return ids
end

--- An option > 0, limited to what f32 can hold, because the device computes in f32: else
-- it would become 0 or inf. The probabilities stay the same.
local function in_f32(x) return math.max(SMALLEST, math.min(x, LARGEST)) end

--- Which options any of the choices uses, and a column of numbers for each parameter.
local function plan(list, vocab)
  local p = { rows = #list, top_k = 0, logprobs = -1, choices = {}, temperature = {},
              top_p_of = 0, -- how many tokens top_p chooses among, at most
              top_p = {}, low = {}, penalty = {}, last = {},
              numbers = {} } -- of each row: its seed, and its first number
  for i, r in ipairs(list) do
    local c = r.choice or GREEDY
    local is_drawn = c.temperature > 0
    p.choices[i] = c
    p.temperature[i] = is_drawn and in_f32(c.temperature) or 1
    p.numbers[2 * i - 1] = c.seed
    p.numbers[2 * i] = is_drawn and r:output_length() * vocab or 0
    p.low[i] = is_drawn and math.log(c.min_p) or -math.huge
    p.top_p[i] = is_drawn and c.top_p < 1 and in_f32(c.top_p) or 2
    p.last[i] = is_drawn and c.top_k - 1 or -1
    p.penalty[i] = in_f32(c.repetition_penalty)
    p.is_drawn, p.has_greedy = p.is_drawn or is_drawn, p.has_greedy or not is_drawn
    if p.top_p[i] < 1 then
      p.top_p_of = math.max(p.top_p_of, c.top_k > 0 and c.top_k or math.huge)
    end
    p.has_min_p = p.has_min_p or is_drawn and c.min_p > 0
    p.top_k = math.max(p.top_k, p.last[i] + 1)
    p.is_penalised = p.is_penalised or c.repetition_penalty ~= 1
    p.logprobs = math.max(p.logprobs, c.logprobs or -1)
  end
  return p
end

-- ---- on the device --------------------------------------------------------------------

--- A column [rows, 1] of numbers.
local function column(like, values, dtype)
  return tensor.from(like.device, dtype or "f32", { #values, 1 }, values)
end

--- Divides the scores of tokens that a request has, or multiplies scores below 0. Finite
-- scores stay finite.
local function penalise(scores, list, p)
  local ids, most = {}, 1
  for i, r in ipairs(list) do
    ids[i] = p.penalty[i] ~= 1 and seen_of(r, p.choices[i]) or {}
    most = math.max(most, #ids[i])
  end
  local flat = {}
  for i = 1, #list do
    for j = 1, most do flat[#flat + 1] = ids[i][j] or -1 end -- which scatter_ skips
  end
  local index = tensor.from(scores.device, "i32", { #list, most }, flat)
  local penalty = column(scores, p.penalty)
  local own = scores:gather(index)
  local new = own:lt(0):where(own:mul(penalty), own:div(penalty))
  new = own:eq(-math.huge):where(own, new:clamp(-LARGEST, LARGEST))
  return scores:scatter_(index, new)
end

--- Scores below a threshold [rows, 1] become -inf.
local function keep_from(scores, threshold)
  return scores:ge(threshold):where(scores, -math.huge, scores)
end

local function keep_top_k(scores, p)
  local values = scores:topk(math.min(p.top_k, scores:size(1)))
  for i, last in ipairs(p.last) do p.last[i] = math.min(last, values:size(1) - 1) end
  local last = column(scores, p.last, "i32")
  return keep_from(scores, last:ge(0):where(values:gather(last), -math.huge))
end

--- Finds the best tokens that together reach top_p, among the `count` best of the `most`
-- tokens of each row. Returns their lowest score, [rows, 1], and, if `waits` is set, a
-- list of the rows whose `count` best tokens do not reach top_p.
---@param top_p number[]  of each row; 2 where all tokens stay
---@param waits boolean    whether to ask the device which rows do not reach it
local function top_p_threshold(scores, top_p, count, most, waits)
  local values, short = scores:topk(count), {}
  local mass = values:sub(scores:logsumexp(-1):reshape { #top_p, 1 }):exp()
  local sums = mass:cumsum()
  if waits and count < most then
    for i, reached in ipairs(sums:narrow(count - 1, 1, 1):list()) do
      if top_p[i] < 1 and reached < top_p[i] then short[#short + 1] = i end
    end
  end
  local wanted = column(scores, top_p)
  local least = sums:sub(mass):lt(wanted):where(values, math.huge):min(-1)
  return wanted:lt(1):where(least:reshape { #top_p, 1 }, -math.huge), short
end

--- Halves intervals of scores [rows, 1]: tokens from `low` on have the mass that is
-- wanted, those from `high` on have less.
local function halve(scores, mass, wanted, low, high)
  local middle = low:add(high):mul(0.5)
  local sum = scores:ge(middle):where(mass, 0):sum(-1)
  local is_enough = sum:reshape { scores:size(0), 1 }:ge(wanted)
  return is_enough:where(middle, low), is_enough:where(high, middle)
end

--- The same threshold as top_p_threshold for rows that need many tokens; sorting so many
-- would take longer.
local function far_threshold(scores, top_p)
  local wanted, shape = column(scores, top_p), { #top_p, 1 }
  local mass = scores:sub(scores:logsumexp(-1):reshape(shape)):exp()
  local low, high = scores:min(-1):reshape(shape), scores:max(-1):reshape(shape)
  low = low:ge(LEAST):where(low, LEAST)
  local all = scores:ge(low):where(mass, 0):sum(-1):reshape(shape)
  for _ = 1, HALVINGS do
    low, high = tensor.scope(halve, scores, mass, wanted, low, high)
  end
  return all:ge(wanted):where(low, -math.huge)
end

--- The tokens that top_p needs are nearly always among the first few hundred. Rows that
-- need more are looked at again.
local function keep_top_p(scores, p)
  local most = math.min(p.top_p_of, scores:size(1))
  local threshold, short = top_p_threshold(scores, p.top_p, math.min(HEAD, most), most,
    not p.is_guess)
  if #short > 0 then
    local rows, top_p = {}, {}
    for i, row in ipairs(short) do rows[i], top_p[i] = row - 1, p.top_p[row] end
    local own = scores:gather_rows(tensor.from(scores.device, "i32", { #rows }, rows))
    local far = far_threshold(own, top_p)
    for i, row in ipairs(rows) do threshold:narrow(row, 1):copy_(far:narrow(i - 1, 1)) end
  end
  return keep_from(scores, threshold)
end

--- The scores after all filters, less the best one: -inf for tokens that are out.
---@param p table  see plan
local function filter(scores, p)
  scores:sub(scores:max(-1):reshape { p.rows, 1 }, scores) -- a low temperature: no inf
  scores:div(column(scores, p.temperature), scores)
  if p.top_k > 0 then keep_top_k(scores, p) end
  if p.top_p_of > 0 then keep_top_p(scores, p) end
  if p.has_min_p then keep_from(scores, column(scores, p.low)) end
  return scores
end

local function pick(scores, p)
  return scores:draw(tensor.from(scores.device, "i64", { p.rows, 2 }, p.numbers))
end

--- What is wrong with logits that have this log-sum-exp; nil if nothing is.
local function problem_of(lse)
  if lse - lse == 0 then return nil end
  if lse ~= lse then return "hold NaN" end
  return lse > 0 and "hold inf" or "are all -inf"
end

--- Log-probabilities by the model itself, before all filters: for each request that asks,
-- { logprob = of its token, top = { { id =, logprob = }, … } }, and `problem` where the
-- logits give none.
local function logprobs_of(logits, ids, p)
  local lse = logits:logsumexp(-1):list()
  local own = logits:gather(ids:reshape { p.rows, 1 }):list()
  local values, indices
  if p.logprobs > 0 then
    p.logprobs = math.min(p.logprobs, logits:size(1))
    values, indices = logits:topk(p.logprobs)
    values, indices = values:list(), indices:list()
  end
  local out = {}
  for i, c in ipairs(p.choices) do
    if c.logprobs then
      local top, first = {}, (i - 1) * p.logprobs
      for j = 1, math.min(c.logprobs, p.logprobs) do
        top[j] = { id = indices[first + j], logprob = values[first + j] - lse[i] }
      end
      out[i] = { logprob = own[i] - lse[i], top = top, problem = problem_of(lse[i]) }
    end
  end
  return out
end

--- Log-probabilities of given tokens, by the model itself.
---@param logits kvlab.Tensor  f32 [#ids, vocab]
---@param ids integer[]
---@param top integer          how many of the likeliest are listed, too
---@return table[]             of each { logprob =, top = { { id =, logprob = }, … } }
function M.logprobs(logits, ids, top)
  local p = { rows = #ids, logprobs = top, choices = {} }
  for i = 1, #ids do p.choices[i] = { logprobs = top } end
  return tensor.scope(function()
    return logprobs_of(logits, tensor.from(logits.device, "i32", { #ids }, ids), p)
  end)
end

--- The ids on the host, -1 for rows of logits that give none; and what is wrong with
-- these: row -> words, or nil. Only the ids come to the host when nothing is wrong.
local function read(logits, ids)
  local lse, wrong = logits:logsumexp(-1), nil
  local list = lse:sub(lse):eq(0):where(ids, -1):list() -- inf - inf is NaN
  for i = 1, #list do
    if list[i] < 0 then
      wrong = wrong or {}
      wrong[i] = problem_of(lse:index(i - 1):item())
    end
  end
  return list, wrong
end

local function choose(logits, list)
  local p = plan(list, logits:size(1))
  local scores, ids = logits, nil
  if p.is_drawn or p.is_penalised then scores = logits:clone() end
  if p.is_penalised then penalise(scores, list, p) end
  if p.has_greedy then ids = scores:argmax() end
  if p.is_drawn then
    local drawn = pick(filter(scores, p), p)
    if p.has_greedy then
      local is_drawn = {}
      for i, c in ipairs(p.choices) do is_drawn[i] = c.temperature > 0 and 1 or 0 end
      local which = tensor.from(scores.device, "u8", { p.rows }, is_drawn)
      ids = which:where(drawn, ids)
    else
      ids = drawn
    end
  end
  local chosen, wrong = read(logits, ids)
  return chosen, p.logprobs >= 0 and logprobs_of(logits, ids, p) or nil, wrong
end

local function likeliest(logits)
  return read(logits, logits:argmax())
end

--- The likeliest token of each row of logits.
---@param logits kvlab.Tensor  f32 [rows, vocab]
---@return integer[] ids       -1 for a row that gives none
---@return table<integer, string>|nil wrong  of such rows: "hold NaN", "hold inf" or
--                             "are all -inf"
function M.likeliest(logits) return tensor.scope(likeliest, logits) end

--- The likeliest token of each row of logits; raises for a row that gives none.
---@param logits kvlab.Tensor  f32 [rows, vocab]
---@return integer[] ids
function M.expect_likeliest(logits)
  local ids, wrong = M.likeliest(logits)
  for row = 1, wrong and #ids or 0 do
    if wrong[row] then
      error(("the model's logits %s, in row %d of %d"):format(wrong[row], row - 1, #ids),
        0)
    end
  end
  return ids
end

--- The next tokens of the requests of a step, or of its rows.
---@param logits kvlab.Tensor  f32 [#list, vocab]; they stay as they are
---@param list kvlab.Request[]
---@return integer[] ids       -1 for a request whose logits give none
---@return table<integer, table>|nil logprobs  of those requests that ask for them
---@return table<integer, string>|nil wrong  see likeliest
function M.choose(logits, list)
  for i = 1, #list do
    if list[i].choice then return tensor.scope(choose, logits, list) end
  end
  local ids, wrong = M.likeliest(logits)
  return ids, nil, wrong
end

local function guess(logits, list, ids)
  local p = plan(list, logits:size(1))
  p.is_guess = true
  if p.has_greedy then logits:argmax(ids) end
  if not p.is_drawn then return end
  local scores = logits:clone()
  if p.is_penalised then penalise(scores, list, p) end
  local drawn = pick(filter(scores, p), p)
  if p.has_greedy then
    local is_drawn = {}
    for i, c in ipairs(p.choices) do is_drawn[i] = c.temperature > 0 and 1 or 0 end
    drawn = tensor.from(ids.device, "u8", { p.rows }, is_drawn):where(drawn, ids)
  end
  ids:copy_(drawn)
end

--- Whether any of the requests draws its tokens. `guess` takes the likeliest ones for the
-- others.
---@param list kvlab.Request[]
---@return boolean
function M.draws(list)
  for i = 1, #list do
    if list[i].choice and list[i].choice.temperature > 0 then return true end
  end
  return false
end

--- Tokens for a step of a draft, from its logits, drawn with the same numbers that the
-- model's tokens will be drawn with. This never waits for the device, so top_p chooses
-- among the best 512 tokens, and a repetition_penalty ignores the draft's own tokens.
---@param logits kvlab.Tensor  f32 [#list, vocab]; they stay as they are
---@param list kvlab.Request[] with drafts
---@param step integer         of the draft, from 1
---@param ids kvlab.Tensor     i32 [#list]
function M.guess(logits, list, step, ids)
  local rows = {}
  for i, r in ipairs(list) do
    rows[i] = setmetatable({ request = r, past = step - 1, choice = r.choice,
                             is_guess = true }, Row)
  end
  tensor.scope(guess, logits, rows, ids)
end

--- The chances of all tokens after the filters, [rows, vocab], for specs.
---@param logits kvlab.Tensor
---@param list kvlab.Request[]
---@return kvlab.Tensor
function M.chances(logits, list)
  local p = plan(list, logits:size(1))
  local scores = logits:clone()
  if p.is_penalised then penalise(scores, list, p) end
  return filter(scores, p):softmax()
end

return M
