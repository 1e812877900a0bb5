--- models.experts: layers of experts against sums in plain Lua. Tolerance: f32 sums of up
-- to 300 products against sums in double.
local experts = require "models.experts"
local kv = require "kvlab"
local support = require "spec.support"

local cpu = kv.device "cpu"
local TOLERANCE = 1e-4

--- What a layer of experts gives for one token, from lists of its weights.
local function by_hand(x, w, h, hidden, is_normed)
  local logits, sum = {}, 0
  for e = 1, x.count do
    logits[e] = 0
    for i = 1, hidden do
      logits[e] = logits[e] + h[i] * w.router[(e - 1) * hidden + i]
    end
    logits[e] = math.exp(logits[e])
    sum = sum + logits[e]
  end
  local order, chosen = {}, 0
  for e = 1, x.count do order[e] = e end
  table.sort(order, function(a, b) return logits[a] > logits[b] end)
  for k = 1, x.active do chosen = chosen + logits[order[k]] end
  local out = {}
  for i = 1, hidden do out[i] = 0 end
  for k = 1, x.active do
    local e = order[k]
    local weight = logits[e] / (is_normed and chosen or sum)
    for j = 1, x.inner do
      local gate, up, at = 0, 0, (j - 1) * hidden
      for i = 1, hidden do
        gate = gate + h[i] * w.gate[e][at + i]
        up = up + h[i] * w.up[e][at + i]
      end
      local act = gate / (1 + math.exp(-gate)) * up * weight
      for i = 1, hidden do
        out[i] = out[i] + act * w.down[e][(i - 1) * x.inner + j]
      end
    end
  end
  return out
end

describe("a layer of experts", function()
  it("has no more than kernels have room for", function()
    support.raises("config: num_experts is 4097, expected at most 4096", experts.config,
      "config", { model_type = "qwen3_moe", num_experts = 4097, num_experts_per_tok = 2,
                  moe_intermediate_size = 8 }, { layers = 1, hidden = 8, inner = 8 })
  end)

  for _, case in ipairs {
    { inner = 24, count = 8, active = 2 },
    { inner = 300, count = 6, active = 3 },
    { inner = 50, count = 3, active = 1 },
  } do
    it(("of %d is the sum of the %d that are chosen"):format(case.count,
      case.active), function()
      local hidden, n = 8, 3
      local c = { layers = 1, hidden = hidden, inner = case.inner }
      for _, is_normed in ipairs { true, false } do
        local x = experts.config("config", { model_type = "qwen3_moe",
          num_experts = case.count, num_experts_per_tok = case.active,
          moe_intermediate_size = case.inner, norm_topk_prob = is_normed }, c)
        c.experts = x
        local seed, lists = 0, { gate = {}, up = {}, down = {} }
        local w = experts.load(function(name, shape)
          seed = seed + 1
          local t = kv.randn(cpu, "f32", shape, { seed = seed, std = shape[2] ^ -0.5 })
          local e, part = name:match "experts%.(%d+)%.(%l+)_proj"
          if e then lists[part][e + 1] = t:list() else lists.router = t:list() end
          return t
        end, "", c)
        local expert = 4 * 3 * hidden * case.inner
        assert.near(4 * case.count * hidden + case.active * expert,
          experts.bytes_read(w, 1), 1)
        assert.near(4 * case.count * hidden + case.count * expert,
          experts.bytes_read(w, 1000), 1)
        local buffers = {}
        for name, size in pairs(experts.buffers(c)) do
          buffers[name] = kv.full(cpu, "f32", { n, size }, 0 / 0)
        end
        local h = kv.randn(cpu, "f32", { n, hidden }, { seed = 99 })
        local out = kv.randn(cpu, "f32", { n, hidden }, { seed = 98 })
        local before = out:list()
        experts.forward(w, h, experts.views(c, cpu, buffers, n), out)
        for row = 0, n - 1 do
          local got = out:index(row):list()
          for i, wanted in ipairs(by_hand(x, lists, h:index(row):list(), hidden,
            is_normed)) do
            assert.near(before[row * hidden + i] + wanted, got[i], TOLERANCE)
          end
        end
      end
    end)
  end

  it("has shared ones, which compute every token, few or many", function()
    local hidden, inner, many = 8, 16, 70
    local x = { count = 4, active = 1, inner = inner, shared = 2, is_sigmoid = true,
                is_in = {} }
    local c = { layers = 1, hidden = hidden, inner = inner, experts = x }
    local mlp, seed = {}, 0
    local w = experts.load(function(name, shape)
      seed = seed + 1
      local part = name:match "shared_experts%.(%l+)_proj"
      local t = kv.randn(cpu, "f32", shape, { seed = seed })
      if part then mlp[part] = t:clone() else t:fill_(0) end -- others give nothing
      return t
    end, "", c)
    assert.equal(4 * (x.count * hidden + x.count + (2 + 1) * 3 * hidden * inner),
      experts.bytes_read(w, 1))
    local h = kv.randn(cpu, "f32", { many, hidden }, { seed = 99 })
    local wanted = kv.ops.silu_mul(h:matmul_t(mlp.gate), h:matmul_t(mlp.up))
      :matmul_t(mlp.down):list()
    for _, n in ipairs { 3, many } do
      local buffers = {}
      for name, size in pairs(experts.buffers(c)) do
        buffers[name] = kv.full(cpu, "f32", { n, size }, 0 / 0)
      end
      local out = kv.zeros(cpu, "f32", { n, hidden })
      experts.forward(w, h:narrow(0, n), experts.views(c, cpu, buffers, n), out)
      for i, got in ipairs(out:list()) do
        assert.near(wanted[i], got, TOLERANCE * (1 + math.abs(wanted[i])))
      end
    end
  end)
end)
