--- What a probe measures of the policy's own output. What it counts is in reads_spec.lua.
local kv = require "kvlab"
local rig = require "spec.rig"
local tried = require "spec.tried_policies"

local cpu = kv.device "cpu"

--- The metrics of decoding 2 tokens of a sequence of 298 tokens: 19 blocks.
local function metrics(policy, o)
  local its = rig.new(cpu, o or {})
  local attention = kv.attention { cache = its.cache, heads = its.heads,
                                   decode_policy = policy }
  its.attention = attention
  local probe = kv.probe(attention)
  rig.play(cpu, { rig = its }, { { "prefill", 1, 298 }, { "decode", 1 },
    { "decode", 1 } })
  its.cache:close()
  return probe:metrics()
end

describe("a probe", function()
  it("measures the output that the policy hands on", function()
    local twice = kv.policy.define { name = "twice", decode = true,
      select_blocks = function() return nil end,
      compute_decode = function(self, attention, ctx, out)
        local selection, counts = self:select_blocks(ctx)
        out = attention:over(selection, ctx, out)
        return out:mul(2, out), selection, counts
      end }
    local seen = metrics(twice())
    assert.near(1, seen.output_error, 1e-5)
    assert.near(1, seen.attention_mass, 1e-5)
  end)

  it("sees no error in what is dense, in any dtype", function()
    for _, dtype in ipairs { "f32", "bf16" } do
      assert.equal(0, metrics(kv.policy "full", { dtype = dtype }).output_error)
    end
  end)

  it("sees the weights of sampled blocks and the gates of branches", function()
    for _, name in ipairs { "magicpig", "nsa_branches" } do
      local o = { ratio = 0.3 }
      local policy = kv.policy(name, o)
      local dense, own, selected
      local compute = policy.compute_decode
      policy.compute_decode = function(self, attention, ctx, out)
        local selection, counts
        out, selection, counts = compute(self, attention, ctx, out)
        own = out:clone()
        dense, selected = kv.tensor(cpu, "f32", out:dims()), kv.tensor(cpu, "f32",
          out:dims())
        attention:direct(nil, ctx, dense)
        attention:direct(selection, ctx, selected)
        return out, selection, counts
      end
      local total, others, layers = 0, 0, 0
      local its = rig.new(cpu, {})
      its.attention = kv.attention { cache = its.cache, heads = its.heads,
                                     decode_policy = policy }
      local probe = kv.probe(its.attention)
      local observe = probe.observe
      probe.observe = function(self, attention, ctx, ...)
        observe(self, attention, ctx, ...)
        if ctx.is_prefill then return end
        local function far(x)
          local function norm(y) return y:mul(y):sum(2):sqrt() end
          return (norm(x - dense) / norm(dense)):mean():item()
        end
        total, others, layers = total + far(own), others + far(selected), layers + 1
      end
      rig.play(cpu, { rig = its }, { { "prefill", 1, 298 }, { "decode", 1 } })
      its.cache:close()
      assert.near(total / layers, probe:metrics().output_error, 1e-4, name)
      assert.is_true(math.abs(total - others) / layers > 1e-3, name)
    end
  end)
end)

describe("the mass oracle", function()
  it("keeps at least as much of the attention as any policy with its budget #policy",
    function()
    for _, kind in ipairs { {}, { soft_cap = 0.4 }, { format = "f8e4m3" } } do
      local function mass(name)
        local o = { blocks = 6, sink = 1, recent = 1, min_blocks = 0 }
        if name == "layers" then o.dense = 0 end
        local its = rig.new(cpu, kind)
        its.attention = kv.attention { cache = its.cache, heads = its.heads,
          decode_policy = kv.policy(name, o), soft_cap = kind.soft_cap }
        local probe = kv.probe(its.attention)
        rig.play(cpu, { rig = its }, { { "prefill", 1, 298 }, { "decode", 1 },
          { "decode", 1 } })
        its.cache:close()
        return probe:metrics().attention_mass
      end
      local best = mass "mass_oracle"
      for _, name in ipairs(tried.names "decode") do
        if name ~= "full" and not (tried.own and tried.may_read_all(name)) then
          local kept = mass(name)
          assert.is_true(kept <= best + 1e-6, name .. " " .. kept .. " " .. best)
        end
      end
      assert.is_true(best > mass "oracle" + 1e-4)
    end
  end)
end)
