--- kvl_route against scores and sorts in double; spec/models/router_spec.lua has routers
-- of models. Tolerance: f32 exponentials and a sum of up to 4096 of them, relative.
local S = require "spec.support"
local kv = require "kvlab"

local cpu = kv.device "cpu"
local TOLERANCE = 1e-5

local function is_better(a, b) return a > b or (b ~= b and a == a) end

--- The scores of a row of logits.
local function scores_of(x, is_sigmoid)
  local scores, most, sum = {}, -math.huge, 0
  for _, v in ipairs(x) do most = is_better(v, most) and v or most end
  for e, v in ipairs(x) do
    scores[e] = is_sigmoid and 1 / (1 + math.exp(-v)) or math.exp(v - most)
    sum = sum + scores[e]
  end
  if not is_sigmoid then for e = 1, #x do scores[e] = scores[e] / sum end end
  return scores
end

--- Which experts are in open groups.
local function open_of(choice, s)
  local each, worth, open = #choice / s.groups, {}, {}
  for g = 1, s.groups do
    local best = {}
    for e = 1, each do best[e] = choice[(g - 1) * each + e] end
    table.sort(best, function(a, b) return a > b end)
    worth[g] = best[1] + (s.is_sigmoid and best[2] or 0)
  end
  for g = 1, s.groups do
    local before = 0
    for j = 1, s.groups do
      local wins = worth[j] > worth[g] or j < g and worth[j] == worth[g]
      before = before + (wins and 1 or 0)
    end
    for e = 1, each do open[(g - 1) * each + e] = before < s.open_groups end
  end
  return open
end

local inputs = S.latest(function(s)
  return {
    logits = S.randn(cpu, "f32", { s.rows, s.experts }, s.experts):mul(3):cast(s.dtype),
    bias = s.is_sigmoid and S.randn(cpu, "f32", { s.experts }, 2) or nil,
  }
end)

local function run(dev, s)
  local i = inputs(s)
  return kv.ops.route { logits = i.logits:to(dev), bias = i.bias and i.bias:to(dev),
    is_sigmoid = s.is_sigmoid, is_normed = s.is_normed, factor = s.factor,
    groups = s.groups, open_groups = s.open_groups,
    chosen = S.poisoned(dev, "i32", { s.rows, s.active }),
    weights = S.poisoned(dev, "f32", { s.rows, s.active }) }
end

local function check(dev, s)
  local i, chosen, weights = inputs(s), run(dev, s)
  local bias, open = i.bias and i.bias:list()
  for row = 0, s.rows - 1 do
    local scores = scores_of(i.logits:index(row):list(), s.is_sigmoid)
    local choice, taken, sum = {}, {}, 0
    for e = 1, s.experts do choice[e] = scores[e] + (bias and bias[e] or 0) end
    open = open_of(choice, s)
    local which = chosen:index(row):list()
    for k = 1, s.active do
      local best = -math.huge
      for e = 1, s.experts do
        if open[e] and not taken[e] then best = math.max(best, choice[e]) end
      end
      local e = which[k] + 1
      assert.is_true(open[e] and not taken[e], "not an expert that can be chosen")
      assert.is_true(choice[e] >= best - TOLERANCE * math.abs(best), "not the best one")
      taken[e], sum = true, sum + scores[e]
    end
    for k, weight in ipairs(weights:index(row):list()) do
      local want = scores[which[k] + 1] / (s.is_normed and sum or 1) * s.factor
      assert.near(want, weight, TOLERANCE * want)
    end
  end
end

S.each_device(function(dev)
  describe("route on " .. dev:name(), function()
    for _, size in ipairs { { 1, 1, 1 }, { 5, 7, 3 }, { 33, 64, 4 }, { 9, 128, 8 },
                            { 3, 256, 8, 8, 4 }, { 2, 512, 22, 16, 5 }, { 2, 4096, 6 },
                            { 0, 8, 2 }, { 4, 12, 4, 6, 2 }, { 6, 40, 8, 40, 8 },
                            { 2, 513, 513 } } do
      for n, dtype in ipairs { "f32", "bf16", "f16" } do
        local is_sigmoid = (size[2] + n) % 2 == 0 and size[2] ~= size[4]
        local s = { rows = size[1], experts = size[2], active = size[3],
                    groups = size[4] or 1, open_groups = size[5] or 1, dtype = dtype,
                    is_sigmoid = is_sigmoid, is_normed = n ~= 2, factor = n == 3 and 2.5
                      or 1 }
        it(("%d of %d for %d rows of %s, %s, %d of %d groups"):format(s.active, s.experts,
          s.rows, dtype, is_sigmoid and "sigmoid" or "softmax", s.open_groups, s.groups),
          function() check(dev, s) end)
      end
    end

    it("takes the first of equal ones, and NaN last", function()
      local nan = 0 / 0
      local logits = kv.from(dev, "f32", { 4, 5 }, { 1, 2, 2, 1, 2, nan, 0, nan, 0, -1,
        nan, nan, nan, nan, nan, 0, 0, 0, 0, 0 })
      local chosen = kv.ops.route { logits = logits, active = 4, is_sigmoid = true }
      S.equal(chosen, { 1, 2, 4, 0, 1, 3, 4, 0, 0, 1, 2, 3, 0, 1, 2, 3 })
      chosen = kv.ops.route { logits = logits, active = 2, groups = 5, open_groups = 3 }
      S.equal(chosen:index(0), { 1, 2 })
      S.equal(chosen:index(3), { 0, 1 })
    end)

    it("adds experts that every row chooses", function()
      local logits = kv.from(dev, "f32", { 2, 3 }, { 1, 3, 2, 0, 0, 1 })
      local chosen, weights = kv.ops.route { logits = logits, active = 2, shared = 2,
        is_sigmoid = true, factor = 4 }
      S.equal(chosen, { 1, 2, 3, 4, 2, 0, 3, 4 })
      local alone = select(2, kv.ops.route { logits = logits, active = 2,
        is_sigmoid = true, factor = 4 }):list()
      S.equal(weights, { alone[1], alone[2], 1, 1, alone[3], alone[4], 1, 1 })
    end)

    it("weighs experts by 0 if all that were chosen have a score of 0", function()
      local chosen, weights = kv.ops.route { is_normed = true, active = 2,
        logits = kv.from(dev, "f32", { 1, 4 }, { 1000, 0, 0, 0 }),
        bias = kv.from(dev, "f32", { 4 }, { -10, 1, 2, 0 }) }
      S.equal(chosen, { 2, 1 })
      S.equal(weights, { 0, 0 })
    end)
  end)
end)

describe("route", function()
  it("refuses what does not fit together", function()
    local function refused(words, change)
      local a = { logits = kv.zeros(cpu, "f32", { 2, 12 }), active = 2 }
      for name, value in pairs(change) do a[name] = value end
      S.raises(words, kv.ops.route, a)
    end
    refused("groups is 5, expected a divisor of the 12 experts", { groups = 5 })
    refused("open_groups is 4, expected 1 to groups = 3", { groups = 3, open_groups = 4 })
    refused("chosen has 5 columns, expected 1 to 4: the experts of open groups",
      { groups = 3, open_groups = 1, active = 5 })
    refused("chosen has 13 columns, expected 1 to 12", { active = 13 })
    refused("chosen has 15 columns, expected 3 to 14: the experts of open groups, and 2 "
      .. "shared ones", { active = 13, shared = 2 })
    refused("shared is 4085, expected 0 to 4084: 4096 experts in all", { shared = 4085 })
    refused("shared is -1", { shared = -1 })
    refused("bias", { bias = kv.zeros(cpu, "f32", { 11 }) })
    refused("bias", { bias = kv.zeros(cpu, "f16", { 12 }) })
    refused("logits has 4097 experts, expected 1 to 4096",
      { logits = kv.zeros(cpu, "f32", { 1, 4097 }) })
    refused("logits", { logits = kv.zeros(cpu, "i32", { 1, 12 }) })
    refused("active", { active = 0 })
    refused("factor is inf, expected a finite number", { factor = math.huge })
    local logits, bias = kv.zeros(cpu, "f32", { 2, 4 }), kv.zeros(cpu, "f32", { 8 })
    local function given(words, a)
      a.logits = a.logits or logits
      S.raises(words, kv.ops.route, a)
    end
    local two = kv.zeros(cpu, "i32", { 2, 2 })
    given("active is given with chosen, expected one", { active = 2, chosen = two })
    given("logits has 0 dims, expected 2", { logits = kv.zeros(cpu, "f32", {}) })
    given("weights shares memory with bias", { bias = bias:narrow(0, 4),
      weights = bias:narrow(2, 4):reshape { 2, 2 } })
    given("weights shares memory with logits", { weights = logits })
    S.equal(kv.ops.route { logits = logits, chosen = two }, two)
    S.fails(kv.C.kvl_route(kv.zeros(cpu, "f32", { 1, 4 }), nil, nil,
      kv.zeros(cpu, "i32", { 1, 1 }), kv.zeros(cpu, "f32", { 1, 1 })), "route",
      "router is NULL")
  end)
end)
