--- models.router: the choice of experts, against sums and sorts in plain Lua. Tolerance:
-- f32 products of 8 numbers against sums in double.
local kv = require "kvlab"
local router = require "models.router"
local support = require "spec.support"

local HIDDEN, N, TOLERANCE = 8, 5, 1e-5

--- The experts of the best groups, as a set; all without groups.
local function open_experts(x, choice)
  local open, groups, each = {}, {}, x.count / (x.groups or 1)
  for g = 1, x.groups or 1 do
    local best = {}
    for e = 1, each do best[e] = choice[(g - 1) * each + e] end
    table.sort(best, function(a, b) return a > b end)
    groups[g] = { g = g, worth = best[1] + (x.is_sigmoid and best[2] or 0) }
  end
  table.sort(groups, function(a, b) return a.worth > b.worth end)
  for k = 1, x.open_groups or 1 do
    for e = 1, each do open[(groups[k].g - 1) * each + e] = true end
  end
  return open
end

--- The weight of every expert for a token with these logits.
local function by_hand(x, logits, bias)
  local scores, choice, sum, order, weights = {}, {}, 0, {}, {}
  for e, logit in ipairs(logits) do
    scores[e] = x.is_sigmoid and 1 / (1 + math.exp(-logit)) or math.exp(logit)
    sum = sum + scores[e]
  end
  for e = 1, x.count do
    if not x.is_sigmoid then scores[e] = scores[e] / sum end
    choice[e] = scores[e] + (bias and bias[e] or 0)
  end
  local open, chosen = open_experts(x, choice), 0
  for e = 1, x.count do
    weights[e] = 0
    if open[e] then order[#order + 1] = e end
  end
  table.sort(order, function(a, b) return choice[a] > choice[b] end)
  for k = 1, x.active do chosen = chosen + scores[order[k]] end
  for k = 1, x.active do
    weights[order[k]] = scores[order[k]] * (x.factor or 1)
      / (x.is_normed and chosen or 1)
  end
  return weights
end

local CASES = {
  { name = "softmax", count = 7, active = 3 },
  { name = "softmax, normed", count = 7, active = 3, is_normed = true },
  { name = "softmax of two groups of four", count = 12, active = 4, groups = 4,
    open_groups = 2, factor = 16 },
  { name = "sigmoid", count = 7, active = 2, is_sigmoid = true },
  { name = "sigmoid of one group of three, normed", count = 12, active = 4, groups = 3,
    open_groups = 1, is_sigmoid = true, is_normed = true, factor = 2.5 },
  { name = "sigmoid of three groups of six", count = 12, active = 6, groups = 6,
    open_groups = 3, is_sigmoid = true },
}

support.each_device(function(dev)
  describe("a router on " .. dev:name(), function()
    for i, x in ipairs(CASES) do
      it("by " .. x.name .. " weighs the chosen experts", function()
        x.is_exact = true
        local h = kv.randn(dev, "f32", { N, HIDDEN }, { seed = i })
        local w = { router = kv.randn(dev, "f32", { x.count, HIDDEN },
          { seed = 50 + i }) }
        local bias = x.is_sigmoid
          and kv.randn(dev, "f32", { x.count }, { seed = 90 + i, std = 0.5 })
        w.bias = bias or nil
        local s = router.views(x, dev, kv.tensor(dev, "f32", { N, x.count }), N, 0)
        local graph = kv.graph(function() router.route(w, h, s) end, dev)
        local logits = h:matmul_t(w.router)
        for _, launch in ipairs { function() router.route(w, h, s) end,
                                  function() graph:replay() end } do
          s.weights:fill_(0 / 0)
          s.chosen:fill_(-1)
          launch()
          for row = 0, N - 1 do
            local got, which = {}, s.chosen:index(row):list()
            for e = 1, x.count do got[e] = 0 end
            for k, weight in ipairs(s.weights:index(row):list()) do
              got[which[k] + 1] = got[which[k] + 1] + weight
            end
            local wanted = by_hand(x, logits:index(row):list(), bias and bias:list())
            for e = 1, x.count do
              assert.near(wanted[e], got[e], TOLERANCE * (x.factor or 1))
            end
          end
        end
        graph:close()
      end)
    end
  end)
end)

describe("the groups of a router", function()
  local function refused(words, values, least)
    support.raises(words, router.check_groups, "config", values, { count = 12 }, least)
  end

  it("are of equal size, and large enough", function()
    refused("config: n_group is 5, expected a number of groups of equal size, each of 1 "
      .. "or more of the 12 n_routed_experts",
      { n_group = 5, topk_group = 1, num_experts_per_tok = 1 }, 1)
    refused("n_group is 12, expected a number of groups of equal size, each of 2 or",
      { n_group = 12, topk_group = 1, num_experts_per_tok = 1 }, 2)
    refused("topk_group is 5, expected at most n_group, 4",
      { n_group = 4, topk_group = 5, num_experts_per_tok = 1 }, 2)
    refused("num_experts_per_tok is 7, expected at most 6, those in topk_group",
      { n_group = 4, topk_group = 2, num_experts_per_tok = 7 }, 2)
  end)

  it("are left out if all of them can be chosen", function()
    local x = { count = 12 }
    router.check_groups("config", { n_group = 4, topk_group = 4,
      num_experts_per_tok = 12 }, x, 2)
    assert.is_nil(x.groups)
  end)
end)
