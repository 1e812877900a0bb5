--- A cache whose values are the first numbers of their keys, as those of latents are:
-- every policy reads from it what it reads where values lie apart.
local kv = require "kvlab"
local rig = require "spec.rig"
local support = require "spec.support"

local emitting = require "spec.models.emitting"

local cpu = kv.device "cpu"
local VALUE_DIM, DIM = 16, rig.SHAPE.head_dim

local SCRIPT = {
  { "prefill", 1, 90 }, { "prefill", 2, 70 }, { "decode", 1, 2 }, { "prefill", 3, 20 },
  { "decode", 1, 2, 3 }, { "verify", { 3, 1 }, 1, 2 }, { "take_back", { 2, 0 } },
  { "decode", 1, 2 }, { "close", 3 }, { "truncate", 2, 50 }, { "decode", 2 },
  { "prefill", 4, 33 }, { "decode", 1, 2, 4 },
}

local EVICTIONS = {
  { "prefill", 1, 90 }, { "prefill", 2, 70 }, { "decode", 1, 2 }, { "prefill", 3, 20 },
  { "decode", 1, 2, 3 }, { "close", 3 }, { "decode", 2 }, { "prefill", 4, 33 },
  { "decode", 1, 2, 4 }, { "decode", 1, 2, 4 }, { "decode", 1, 4 },
}

local e = kv.expr

-- A policy whose attention is changed, in decode and in prefill.
local hooked = kv.policy.define { name = "hooked", decode = true, prefill = true,
  complete = false, defaults = { slope = 0.1 },
  bias = e.param "slope" * (e.position - e.query_position) + (e.logit / 4):tanh(),
  mask = (e.position % 3):ne(1):bor((e.query_position - e.position):lt(4)),
  log_weight = e.kv_head * e.block / 8,
  select_blocks = function() end }

local function policy_of(name)
  if name == "hooked" then return hooked {} end
  if name == "tokens" then
    return kv.policy("nsa", { granularity = "token", index_topk = 24 })
  end
  local budget = { blocks = 4, min_blocks = 0, sink = 1, recent = 1 }
  if name == "emitting" then return emitting(budget) end
  return kv.policy(name, name ~= "full" and budget or nil)
end

--- The first numbers of every row of a result whose others are zeros.
local function firsts_of(out)
  local firsts = {}
  for i, x in ipairs(out) do
    if (i - 1) % DIM < VALUE_DIM then firsts[#firsts + 1] = x
    else assert(x == 0, "a value has numbers behind its first ones") end
  end
  return firsts
end

--- The outputs of a script, and of one whose values lie apart, without their zeros.
local function both(name, o, script)
  o, script = o or {}, script or SCRIPT
  local prefills = name == "hooked" or nil
  o.value_dim, o.policy = VALUE_DIM, policy_of(name)
  o.prefill_policy = prefills and policy_of(name)
  local got = rig.play(cpu, o, script)
  o.apart, o.policy = true, policy_of(name)
  o.prefill_policy = prefills and policy_of(name)
  local apart, want = rig.play(cpu, o, script), {}
  for s, steps in pairs(apart) do
    want[s] = {}
    for n, out in ipairs(steps) do want[s][n] = firsts_of(out) end
  end
  return got, want
end

--- Compares the results of every step of every sequence.
local function all_close(got, want, far, rel, what)
  for s, steps in pairs(want) do
    assert.equal(#steps, #got[s])
    for n, out in ipairs(steps) do
      support.close(got[s][n], out, far, rel,
        ("%s: sequence %s, step %d"):format(what or "out", s, n))
    end
  end
end

--- The same without a difference.
local function all_same(want, got)
  assert.same(support.names(want), support.names(got))
  all_close(got, want, 0, 0)
end

describe("a cache of latents", function()
  local tried = {}
  for _, name in ipairs(kv.policy.names("decode", { "full", "oracle", "mass_oracle" })) do
    if not kv.policy(name).evict then
      it("is read by " .. name, function()
        local ok, got, want = pcall(both, name)
        if not ok then
          local why = tostring(got)
          assert.truthy(why:find("first numbers of their keys", 1, true)
            or why:find("value_dim=16]", 1, true), why) -- it reads values itself
        else
          all_same(want, got)
        end
        tried[name] = ok
      end)
    end
  end

  it("serves policies that select by keys alone", function()
    for _, name in ipairs { "full", "quest", "block_mean", "topk", "streaming_blocks",
                            "gsa_on_device", "infllm", "oracle", "keydiff_blocks",
                            "magicpig" } do
      assert.is_true(tried[name], name)
    end
  end)

  it("serves policies that change attention, and learn from it", function()
    for _, name in ipairs { "hooked", "emitting" } do
      for _, tables in ipairs { "one", "layer", "head" } do
        local got, want = both(name, { tables = tables })
        all_same(want, got)
      end
    end
  end)

  it("is read by lists of tokens", function()
    local got, want = both "tokens"
    all_same(want, got)
  end)

  it("holds what its dtype and tables say", function()
    for _, dtype in ipairs { "f16", "bf16" } do
      local got, want = both("quest", { dtype = dtype })
      all_same(want, got)
    end
    for _, tables in ipairs { "layer", "head" } do
      local got, want = both("quest", { tables = tables })
      all_same(want, got)
    end
  end)

  it("is evicted from like values that lie apart", function()
    local count = 0
    for _, name in ipairs(kv.policy.names "evict") do
      if name ~= "duo" then -- which knows the heads of one model
        for _, tables in ipairs { "layer", "head" } do
          local got, want = both(name, { tables = tables }, EVICTIONS)
          all_same(want, got)
          count = count + 1
        end
      end
    end
    assert.is_true(count >= 16)
  end)

  it("is not evicted from beside the model's own selection", function()
    local nsa = kv.policy("nsa", { granularity = "token", index = "model",
      index_topk = 8, min_blocks = 0, sink = 0, recent = 0 })
    support.raises("policy keydiff evicts tokens, which does not go with a policy that "
      .. "reads the model's index keys", rig.new, cpu, { value_dim = VALUE_DIM,
      tables = "layer", policy = policy_of "keydiff", prefill_policy = nsa,
      index = { heads = 2, dim = 64 } })
  end)

  it("is evicted from in 8 bits", function()
    for _, tables in ipairs { "layer", "head" } do
      local outs = {} -- streaming evicts by position, so both hold the same tokens
      for i, format in ipairs { "f32", "f8_latent" } do
        outs[i] = rig.play(cpu, { value_dim = VALUE_DIM, tables = tables,
          policy = policy_of "streaming", format = format }, EVICTIONS)
      end
      all_close(outs[2], outs[1], 0.1, 0.05)
    end
  end)

  it("is forked, and written to by both", function()
    local outs = {}
    for i, apart in ipairs { false, true } do
      local ran = rig.decode(cpu, { lengths = { 37, 20 }, steps = 3, fork = true,
        value_dim = VALUE_DIM, apart = apart, policy = policy_of "quest" })
      outs[i] = {}
      for n, step in ipairs(ran.steps) do outs[i][n] = step.out:list() end
    end
    for n, out in ipairs(outs[2]) do assert.same(firsts_of(out), outs[1][n]) end
  end)

  it("counts keys alone as read", function()
    local its = rig.new(cpu, { value_dim = VALUE_DIM, policy = policy_of "oracle" })
    local probe = kv.probe(its.attention)
    rig.play(cpu, { rig = its }, { { "prefill", 1, 100 }, { "decode", 1 } })
    local seen = probe:metrics() -- 7 blocks of 16 keys: all are scored by
    assert.equal(2 * 2 * 7 * 16 * DIM * 4, seen.bytes_read)
    assert.equal(1, seen.bytes_share)
    its.cache:close()
  end)

  it("is read from host memory as from the device", function()
    for _, name in ipairs { "full", "quest", "topk", "infllm", "streaming_blocks",
                            "hooked", "emitting" } do
      local function play(offload)
        return rig.play(cpu, { value_dim = VALUE_DIM, policy = policy_of(name),
                               offload = offload }, SCRIPT)
      end
      local want = play()
      local selects = name ~= "full" and name ~= "hooked"
      if selects then all_same(want, play { hot_slots = 40 }) end
      for _, offload in ipairs { { slots = 2, slot_blocks = 1 }, { hot_slots = 200 },
                                 { hot_slots = 200, hot_overlap = true } } do
        all_close(play(offload), want, 3e-6, 3e-6)
      end
    end
  end)

  it("is read in 8 bits wherever it lies", function()
    for _, name in ipairs { "full", "quest", "topk", "streaming_blocks", "tokens",
                            "hooked", "emitting" } do
      local function play(offload)
        return rig.play(cpu, { value_dim = VALUE_DIM, policy = policy_of(name),
                               format = "f8_latent", offload = offload }, SCRIPT)
      end
      local want = play()
      local caches = { { slots = 2, slot_blocks = 1 }, { hot_slots = 200 } }
      if name == "tokens" then caches = { { hot_tokens = 200 } } end
      for _, offload in ipairs(caches) do
        all_close(play(offload), want, 3e-6, 3e-6)
      end
    end
  end)

  it("is near to itself in 8 bits", function()
    local outs = {}
    for i, format in ipairs { "f32", "f8_latent" } do
      outs[i] = rig.play(cpu, { value_dim = VALUE_DIM, policy = policy_of "full",
                                format = format }, SCRIPT)
    end
    all_close(outs[2], outs[1], 0.1, 0.05)
  end)

  it("has half the bytes, and a layout of its own in a store", function()
    local function open(value_dim)
      return kv.cache { layers = 1, blocks = 3, block_size = 4, kv_heads = 1,
        head_dim = 24, value_dim = value_dim, device = cpu }
    end
    local latents, plain = open(16), open()
    assert.equal(24 * 2, latents:bytes_token())
    assert.equal(2 * 24 * 2, plain:bytes_token())
    assert.same({ 1, 3, 1, 4, 24 }, latents.memory:dims())
    assert.not_equal(kv.store.model("m", latents), kv.store.model("m", plain))
    latents:close()
    plain:close()
  end)

  it("refuses what does not know it", function()
    local function open(o)
      local all = { layers = 1, blocks = 9, block_size = 4, kv_heads = 1, head_dim = 24,
                    value_dim = 16, device = cpu }
      for key, value in pairs(o or {}) do all[key] = value end
      return kv.cache(all)
    end
    support.raises("int8 with shared values", open, { format = "int8", block_size = 8,
      head_dim = 64 })
    support.raises("values of 32 numbers", open, { value_dim = 32 })
    local cache = open { tables = "head" }
    local policy = kv.policy.define { name = "mine", decode = true,
      score = kv.expr.v:sum "dim":max "token" }
    support.raises("v is read where values are the first numbers of their keys",
      kv.attention, { cache = cache, heads = 4, decode_policy = policy() })
    cache:close()
  end)

  support.it_on_gpu("is read like on a CPU", function(cuda)
    for _, format in ipairs { "f32", "bf16", "f8_latent" } do
      for _, tables in ipairs { "layer", "head" } do
        for _, name in ipairs { "streaming", "knorm", "keydiff", "snapkv" } do
          local outs = {}
          for i, dev in ipairs { cpu, cuda } do
            outs[i] = rig.play(dev, { value_dim = VALUE_DIM, format = format,
              dtype = format == "bf16" and "bf16" or "f32", policy = policy_of(name),
              tables = tables }, EVICTIONS)
          end
          all_close(outs[2], outs[1], format == "bf16" and 0.02 or 1e-4, 0,
            ("%s in %s, tables by %s"):format(name, format, tables))
        end
      end
      for _, name in ipairs { "full", "quest", "streaming_blocks", "topk", "hooked",
                              "emitting" } do
        local outs = {}
        for i, dev in ipairs { cpu, cuda } do
          outs[i] = rig.play(dev, { value_dim = VALUE_DIM, format = format,
            dtype = format == "bf16" and "bf16" or "f32", policy = policy_of(name) },
            SCRIPT)
        end
        all_close(outs[2], outs[1], format == "bf16" and 0.02 or 1e-4, 0,
          ("%s in %s"):format(name, format))
      end
    end
  end)
end)
