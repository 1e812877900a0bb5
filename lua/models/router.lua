--- The router of a layer of experts: which of them compute a token, and with which
-- weights. It gives every expert a score, and the `active` best ones are chosen:
--
--   softmax   a score is the probability of the expert among all (Mixtral, Qwen3-MoE,
--             DeepSeek-V2)
--   sigmoid   each expert's score is independent; a learned bias is added for the choice
--             only, and the weights do not include it (DeepSeek-V3, GLM-4.7)
--
-- Neighbouring experts may form groups. Then only experts of the `open_groups` best
-- groups can be chosen. The score of a group is that of its best expert, or with sigmoid
-- the sum of its best two.
-- Source  transformers 5.24, models/deepseek_v2 and deepseek_v3; DeepSeek-V3 Technical
--         Report, arXiv:2412.19437
local fields = require "models.fields"
local kv = require "kvlab"

local C, check, refuse = kv.C, kv.check, fields.refuse
local M = {}

--- Checks the groups of a router.
---@param path string   where the config stands, for errors
---@param values table  n_group, topk_group and num_experts_per_tok of a config
---@param x table       of the experts: count; gets groups and open_groups, unless every
--                      expert can be chosen
---@param least integer experts that a group has at least
function M.check_groups(path, values, x, least)
  local groups, open = values.n_group or 1, values.topk_group or 1
  if x.count % groups ~= 0 or x.count / groups < least then
    refuse(path, "n_group", groups, ("a number of groups of equal size, each of %d or "
      .. "more of the %d n_routed_experts"):format(least, x.count))
  elseif open > groups then
    refuse(path, "topk_group", open, ("at most n_group, %d"):format(groups))
  elseif values.num_experts_per_tok > open * x.count / groups then
    refuse(path, "num_experts_per_tok", values.num_experts_per_tok,
      ("at most %d, those in topk_group of n_group groups of n_routed_experts"):format(
        open * x.count / groups))
  end
  if open < groups then x.groups, x.open_groups = groups, open end
end

--- Views for the choice among groups.
local function add_groups(x, s, of, n)
  local each, best = x.count / x.groups, x.is_sigmoid and 2 or 1
  s.in_groups = s.choice:reshape { n, x.groups, each }
  s.group_rows = s.choice:reshape { n * x.groups, each }
  s.group_best = of("f32", n * x.groups, best)
  s.group_which = of("i32", n * x.groups, best)
  s.group_scores = of("f32", n * x.groups)
  s.group_table = s.group_scores:reshape { n, x.groups }
  s.open_scores = of("f32", n, x.open_groups)
  s.open_groups = of("i32", n, x.open_groups)
  s.zeros = of("f32", n, x.open_groups):fill_(0)
  s.closed = of("f32", n, x.groups)
  s.closed_column = s.closed:reshape { n, x.groups, 1 }
end

--- Views and tensors of a step of n tokens. A router computes in f32.
---@param x table               of the experts: count, active, groups …
---@param routed kvlab.Tensor   [n, count] in the model's dtype
function M.views(x, device, routed, n)
  local function of(dtype, ...) return kv.tensor(device, dtype, { ... }) end
  local s = { routed = routed, scores = of("f32", n, x.count),
              best = of("f32", n, x.active), which = of("i32", n, x.active),
              sum = of("f32", n) }
  s.sum_column = s.sum:reshape { n, 1 }
  if x.is_sigmoid or x.groups then s.choice = of("f32", n, x.count) end
  if x.groups then add_groups(x, s, of, n) end
  return s
end

--- Sets the scores of experts to -inf, except in the best groups.
local function close_groups(s)
  check(C.kvl_topk(s.group_rows, C.KVL_TOPK_LARGEST, s.group_best, s.group_which))
  s.group_best:sum(1, s.group_scores)
  check(C.kvl_topk(s.group_table, C.KVL_TOPK_LARGEST, s.open_scores, s.open_groups))
  s.closed:fill_(-math.huge)
  s.closed:scatter_(s.open_groups, s.zeros)
  s.in_groups:add(s.closed_column, s.in_groups)
end

--- The score of every expert, in s.scores.
local function score(x, w, h, s)
  if x.is_exact then
    h:matmul_t(w.router, s.scores)
  else -- transformers rounds these to the model's dtype
    h:matmul_t(w.router, s.routed)
    s.routed:cast("f32", s.scores)
  end
  if x.is_sigmoid then s.scores:sigmoid(s.scores) else s.scores:softmax(1, s.scores) end
end

--- Chooses the experts of every token.
---@param x table        of the experts
---@param w table        router [count, hidden] and, with sigmoid, bias f32 [1, count]
---@param h kvlab.Tensor [n, hidden]
---@param s table        see views
---@return kvlab.Tensor  # which experts, i32 [n, active]
---@return kvlab.Tensor  # their weights, f32 [n, active]
function M.route(x, w, h, s)
  score(x, w, h, s)
  local choice = s.choice or s.scores
  if w.bias then s.scores:add(w.bias, choice)
  elseif s.choice then choice:copy_(s.scores) end
  if x.groups then close_groups(s) end
  check(C.kvl_topk(choice, C.KVL_TOPK_LARGEST, s.best, s.which))
  if s.choice then s.scores:gather(s.which, s.best) end
  if x.is_normed then
    s.best:sum(1, s.sum)
    if x.is_sigmoid then s.sum:add(1e-20, s.sum) end
    s.best:div(s.sum_column, s.best)
  end
  if x.factor then s.best:mul(x.factor, s.best) end
  return s.which, s.best
end

return M
