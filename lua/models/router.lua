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

local refuse = fields.refuse
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

--- What a step of n tokens needs. Scores are computed in f32; transformers rounds the
-- logits of some families to the model's dtype.
---@param x table              of the experts: count, active, groups …
---@param routed kvlab.Tensor  [n, count] in the model's dtype
---@param shared integer       experts that every token chooses besides
function M.views(x, device, routed, n, shared)
  local logits = x.is_exact and kv.tensor(device, "f32", { n, x.count }) or routed
  return { logits = logits, is_sigmoid = x.is_sigmoid, is_normed = x.is_normed,
           groups = x.groups, open_groups = x.open_groups, factor = x.factor,
           shared = shared, chosen = kv.tensor(device, "i32", { n, x.active + shared }),
           weights = kv.tensor(device, "f32", { n, x.active + shared }) }
end

--- Chooses the experts of every token.
---@param w table        router [count, hidden] and, with sigmoid, bias f32 [count]
---@param h kvlab.Tensor [n, hidden]
---@param s table        see views
---@return kvlab.Tensor  # which experts, i32 [n, active and shared]
---@return kvlab.Tensor  # their weights, f32 of the same shape
function M.route(w, h, s)
  h:matmul_t(w.router, s.logits)
  s.bias = w.bias
  return kv.ops.step.route(s)
end

return M
