--- nsa: landmarks against a double-precision reference of their logits on numbers that
-- f8e4m3 rounds, so that choices are compared as quality and equalities exactly. Outputs:
-- f32 attention over the same tokens, 3e-6.
local kv = require "kvlab"
local reference = require "spec.reference.attention"
local rig = require "spec.rig"
local small = require "spec.policies.small"
local support = require "spec.support"

local cpu = kv.device "cpu"
local LENGTHS = { 1, 3, 16, 17, 33, 160, 250 }

local function options(o, more)
  local all = { granularity = "token", min_blocks = 0, sink = 0, recent = 0 }
  for key, value in pairs(o) do all[key] = value end
  for key, value in pairs(more or {}) do all[key] = value end
  return all
end

local function decode(dev, o, more)
  local run = { policy = "nsa", options = options(o), lengths = LENGTHS, steps = 3 }
  for key, value in pairs(more or {}) do run[key] = value end
  return rig.decode(dev, run).steps
end

local function same(got, want, tolerance)
  for i, step in ipairs(want) do
    support.close(got[i].out:cast "f32", step.out:cast "f32", tolerance or 3e-6,
      tolerance or 3e-6, "step " .. i)
  end
end

--- The tokens that a policy by tokens listed at the last step of `small`'s sequence.
local function listed(run)
  local tokens = {}
  for _, token in ipairs(run.policy.landmarks.listed:list()) do
    if token >= 0 then tokens[#tokens + 1] = token end
  end
  table.sort(tokens)
  return tokens
end

describe("nsa by tokens", function()
  support.each_device(function(dev)
    it("equals dense attention when the budget is everything", function()
      local dense = decode(dev, {}, { policy = "full", options = {} })
      for _, o in ipairs { { ratio = 1 }, { index_topk = 4096 },
                           { ratio = 1, index_pool = 4 },
                           { index_topk = 4096, index_pool = 8 },
                           { ratio = 1, index = "random", index_dim = 64 } } do
        same(decode(dev, o), dense)
      end
    end)

    it("asks by means of neighbouring heads where there are more than 64", function()
      for _, c in ipairs { { 128, 2 }, { 192, 1 }, { 128, 1 }, { 96, 8 } } do
        local heads, kv_heads = unpack(c)
        local each = heads == 192 and 3 or 2
        local function ask(index, n, q)
          return kv.landmarks({ device = dev, layers = 1, blocks = 2, block_size = 16,
            heads = n, kv_heads = kv_heads, head_dim = 32, seqs = 1, max_blocks = 2 },
            { index = index, dim = 64 }).asks(0, q)
        end
        local q = kv.randn(dev, "f32", { 3, heads, 32 }, { seed = heads })
        local few = q:reshape { 3 * heads / each, each, 32 }:mean(1)
          :reshape { 3, heads / each, 32 }
        for _, index in ipairs { "random", "key" } do
          local got = ask(index, heads, q)
          assert.same({ 3, heads / each }, { got:size(0), got:size(1) })
          support.close(got, ask(index, heads / each, few), 1e-5)
        end
      end
    end)

    it("selects in every n-th layer, and attends to its tokens in those after it",
      function()
        for n = 1, 3 do
          local policy, tokens, layers = kv.policy("nsa", options { tokens = 20,
            index_layers = n }), {}, {}
          for _, phase in ipairs { "compute_prefill", "compute_decode" } do
            local compute = policy[phase]
            policy[phase] = function(self, attention, ctx, out)
              local result, _, _, list = compute(self, attention, ctx, out)
              table.insert(tokens, list:list())
              return result, nil, nil, list
            end
          end
          local its = rig.new(dev, { policy = policy })
          local select = policy.landmarks.select
          policy.landmarks.select = function(self, ctx, want)
            layers[ctx.layer] = true
            return select(self, ctx, want)
          end
          rig.play(dev, { rig = its }, { { "prefill", 1, 50 }, { "prefill", 1, 30 },
            { "decode", 1 }, { "decode", 1 } })
          its.cache:close()
          assert.same({ true, n == 1 or nil }, { layers[0], layers[1] })
          assert.equal(0, #tokens % 2)
          for i = 1, #tokens, 2 do
            assert.equal(n > 1, pcall(assert.same, tokens[i], tokens[i + 1]))
          end
        end
      end)

    it("equals dense prefill when the budget is everything, in any chunks", function()
      local dense = rig.prefill(dev, { length = 200 })
      for _, chunk in ipairs { 7, 64, 200 } do
        for _, o in ipairs { { ratio = 1 }, { index_topk = 200 },
                             { index_topk = 200, index_pool = 2 },
                             { index_topk = 200, index_layers = 2 } } do
          local policy = kv.policy("nsa", options(o))
          support.close(rig.prefill(dev, { length = 200, chunk = chunk,
            prefill_policy = policy }), dense, 3e-6, 3e-6)
        end
      end
    end)

    it("selects for a token of a prompt what it selects when it is decoded", function()
      for _, pool in ipairs { 1, 4 } do
        local own = options { index_topk = 24, index_pool = pool }
        local function outs(o)
          o.prefill_policy = kv.policy("nsa", own)
          o.policy, o.options, o.length = "nsa", own, 150
          return rig.prefill(dev, o)
        end
        local whole = outs { chunk = 150 }
        support.close(outs { chunk = 13 }, whole, 3e-6, 3e-6)
        support.close(outs { chunk = 1, decode_tail = true }, whole, 3e-6, 3e-6)
      end
    end)

    it("gives a sequence in a batch what it gives it alone, and a fork, too", function()
      for _, o in ipairs { { ratio = 0.3 }, { index_topk = 20, sink = 1, recent = 1 },
                           { ratio = 0.3, index_pool = 4 },
                           { index_topk = 20, index_pool = 4 } } do
        local both = decode(dev, o, { lengths = { 250, 90 } })
        local alone = decode(dev, o, { lengths = { 250 } })
        for i, step in ipairs(alone) do
          support.close(both[i].out:index(0), step.out:index(0), 3e-6, 3e-6)
        end
        same(decode(dev, o, { lengths = { 195 }, fork = true }),
          decode(dev, o, { lengths = { 195 } }))
      end
    end)

    it("sees a prompt in any chunking, and requests before it, the same way", function()
      for _, o in ipairs { { ratio = 0.2 }, { ratio = 0.2, index_pool = 4 },
                           { ratio = 0.2, index_pool = 8, granularity = "block" } } do
        local whole = decode(dev, o, { lengths = { 200 } })
        same(decode(dev, o, { lengths = { 200 }, chunk = 7 }), whole)
        same(decode(dev, o, { lengths = { 200 }, before = { 90, 250 } }), whole)
      end
    end)

    it("works in every dtype and over an f8e4m3 cache", function()
      for _, c in ipairs { { dtype = "f16" }, { dtype = "bf16" },
                           { format = "f8e4m3" } } do
        c.lengths = { 100, 33 }
        local dense = decode(dev, {}, { policy = "full", options = {}, dtype = c.dtype,
          format = c.format, lengths = c.lengths })
        same(decode(dev, { ratio = 1 }, c), dense, c.dtype and 1e-2)
        decode(dev, { ratio = 0.3 }, c)
      end
    end)
  end)

  it("lists the tokens that the heads' logits say, sink and recent first", function()
    -- one part for each of two KV heads of 8 dims: the index keys are K itself, rounded
    -- to f8e4m3's 3 bits
    for _, windows in ipairs { 0, 1 } do
      local run = small.play(kv.policy("nsa", options { tokens = 24, sink = windows,
        recent = windows }), { 61 }, 1)
      local tokens, logits, taken = listed(run), {}, {}
      assert.equal(24, #tokens)
      for t = 1, 62 do
        logits[t] = 0
        for head = 1, 4 do
          logits[t] = logits[t]
            + math.max(0, small.dot(run.q[62][head], run.k[t][math.ceil(head / 2)]))
        end
        if windows == 1 and (t <= 4 or t > 60) then logits[t] = 1e9 end
      end
      for _, t in ipairs(tokens) do taken[t + 1] = true end
      local worst, best = math.huge, -math.huge
      for t = 1, 62 do
        if taken[t] then worst = math.min(worst, logits[t])
        else best = math.max(best, logits[t]) end
      end
      -- f8e4m3 of q and k is off by up to 2^-4 each
      assert.is_true(worst > 0.8 * best, ("%g, %g"):format(worst, best))
      local list, layout = run.policy.landmarks.listed:list(), small.SHAPE
      local q, cache = {}, run.cache:layer(0):list()
      for _, head in ipairs(run.q[62]) do
        for _, x in ipairs(head) do q[#q + 1] = x end
      end
      local blocks = run.seq:table()
      support.close(run.out, (reference.paged_attention { q = q, cache = cache,
        tables = blocks, max_blocks = #blocks, lens = { run.seq:length() }, listed = list,
        heads = 4, max_selected = #list, selection_heads = 1, scale = 1 / math.sqrt(8),
        causal = true,
        layout = { blocks = 32, kv_heads = 2, block_size = 4, head_dim = layout.head_dim }
      }), 1e-5)
    end
  end)

  it("lists the groups that logits of the means of their keys say", function()
    for _, length in ipairs { 61, 62, 63, 64 } do
      local run = small.play(kv.policy("nsa", options { tokens = 27, index_pool = 4 }),
        { length - 1 }, 1)
      local tokens, taken, logits = listed(run), {}, {}
      local last = math.floor((length - 1) / 4)
      for _, t in ipairs(tokens) do
        local group = math.floor(t / 4)
        taken[group] = (taken[group] or 0) + 1
      end
      for group = 0, last - 1 do
        assert.is_true(taken[group] == nil or taken[group] == 4)
        logits[group] = 0
        for head = 1, 4 do
          local dot = 0
          for t = 4 * group + 1, 4 * group + 4 do
            dot = dot + small.dot(run.q[length][head], run.k[t][math.ceil(head / 2)]) / 4
          end
          logits[group] = logits[group] + math.max(0, dot)
        end
      end
      assert.equal(length - 4 * last, taken[last]) -- the newest group, as far as it goes
      assert.equal(20 + taken[last], #tokens) -- 6 groups of 4 are 27 tokens at most
      local worst, best = math.huge, -math.huge
      for group = 0, last - 1 do
        if taken[group] then worst = math.min(worst, logits[group])
        else best = math.max(best, logits[group]) end
      end
      assert.is_true(worst > 0.8 * best, ("%g, %g"):format(worst, best))
    end
  end)

  it("reads a quarter of the keys for scores where four share one", function()
    local bytes = {}
    for _, pool in ipairs { 1, 4 } do
      local its = rig.new(cpu, { policy = "nsa", options = options { tokens = 32,
        index_pool = pool } })
      local probe = kv.probe(its.attention)
      rig.play(cpu, { rig = its }, { { "prefill", 1, 300 }, { "decode", 1 } })
      bytes[pool] = its.attention.reads.scored
      assert.near(32 / 16, probe:metrics().blocks_read, pool == 1 and 1e-6 or 0.2)
      its.cache:close()
    end
    assert.equal(2 * math.ceil(301 / 16) * 16 * (64 + 4), bytes[1])
    assert.equal(bytes[1] / 4, bytes[4])
  end)

  it("takes maps of q and k", function()
    local s = small.SHAPE
    local function map(seed, to)
      return kv.randn(cpu, "f32", { 1, to[1], to[2] }, { seed = seed })
    end
    local w = { k = map(1, { 16, 32 }), q = map(2, { 32, 96 }),
                heads = map(3, { 32, 3 }) }
    local run = small.play(kv.policy("nsa", options { tokens = 10, index = "given",
      index_weights = w }), { 61 }, 1)
    local function flat(heads)
      local list = {}
      for _, head in ipairs(heads) do
        for _, x in ipairs(head) do list[#list + 1] = x end
      end
      return list
    end
    local function apply(x, weights, columns)
      local all, y = weights:list(), {}
      for j = 1, columns do
        y[j] = 0
        for i = 1, #x do y[j] = y[j] + x[i] * all[(i - 1) * columns + j] end
      end
      return y
    end
    assert.equal(4, s.heads)
    local q, weights = apply(flat(run.q[62]), w.q, 96), apply(flat(run.q[62]), w.heads, 3)
    local logits, order, sizes = {}, {}, 0
    for t = 1, 62 do
      local k = apply(flat(run.k[t]), w.k, 32)
      logits[t], order[t] = 0, t
      for h = 0, 2 do
        local dot = small.dot({ unpack(q, h * 32 + 1, h * 32 + 32) }, k)
        logits[t] = logits[t] + weights[h + 1] * math.max(0, dot)
        sizes = math.max(sizes, math.abs(weights[h + 1] * dot))
      end
    end
    table.sort(order, function(a, b) return logits[a] > logits[b] end)
    local bar = logits[order[10]] - 0.15 * sizes
    for _, t in ipairs(listed(run)) do assert.is_true(logits[t + 1] >= bar) end
  end)

  it("finds more of the attention by the model's keys than by chance", function()
    local function mass(o, format)
      local its = rig.new(cpu, { policy = "nsa", options = options(o),
                                 format = format })
      local probe = kv.probe(its.attention)
      rig.play(cpu, { rig = its }, { { "prefill", 1, 300 }, { "decode", 1 },
        { "decode", 1 } })
      its.cache:close()
      return probe:metrics()
    end
    local key, random = mass { index_topk = 60 }, mass { index_topk = 60,
      index = "random", index_dim = 32 }
    assert.is_true(key.attention_mass > 1.3 * 60 / 300, tostring(key.attention_mass))
    assert.is_true(key.attention_mass > random.attention_mass)
    local f8 = mass({ index_topk = 60 }, "f8e4m3") -- its scales differ by KV head
    assert.is_true(f8.attention_mass > 1.3 * 60 / 300, tostring(f8.attention_mass))
    assert.near(60 / 16, key.blocks_read, 1e-6)
  end)

  it("does not read the tokens of an earlier step", function()
    local its = rig.new(cpu, { policy = "nsa", options = options { tokens = 20,
      index_layers = 2 } })
    rig.play(cpu, { rig = its }, { { "prefill", 1, 50 }, { "decode", 1 } })
    local q = kv.zeros(cpu, "f32", { 1, rig.SHAPE.heads, rig.SHAPE.head_dim })
    local k = kv.zeros(cpu, "f32", { 1, rig.SHAPE.kv_heads, rig.SHAPE.head_dim })
    its.batch:append({ its.cache:sequence() }, { 1 })
    its.attention:begin(its.batch, false)
    support.raises("layer 1 reads what layer 0 selects, which selected nothing in this",
      its.attention.forward, its.attention, 1, q, k, k)
    its.attention:forward(0, q, k, k)
    its.attention:forward(1, q, k, k)
    its.cache:close()
  end)

  it("refuses what it cannot do, in words", function()
    support.raises("attention over tokens does not know KV in host memory", decode, cpu,
      { ratio = 0.3 }, { offload = { slots = 2 } })
    support.raises('granularity is "both", expected one of block, token', kv.policy,
      "nsa", { granularity = "both" })
    support.raises("both index_topk and ratio are given", kv.policy, "nsa",
      { ratio = 0.1, index_topk = 64 })
    support.raises("index_layers is 0, expected", kv.policy, "nsa", { index_layers = 0 })
    support.raises("index_pool is 0, expected", kv.policy, "nsa", { index_pool = 0 })
    support.raises("pool is 3, expected a divisor of block_size = 16", decode, cpu,
      { ratio = 0.3, index_pool = 3 })
    support.raises("expected index_weights with k, q and heads", decode, cpu,
      { ratio = 0.3, index = "given" })
  end)
end)

describe("nsa by blocks", function()
  it("selects the blocks of the best tokens", function()
    local run = small.play(kv.policy("nsa", { blocks = 5, sink = 0, recent = 0,
      min_blocks = 0 }), { 61 }, 1)
    local best = {}
    for b = 0, 15 do
      best[b] = -math.huge
      for t = 4 * b + 1, math.min(4 * b + 4, 62) do
        local logit = 0
        for head = 1, 4 do
          logit = logit
            + math.max(0, small.dot(run.q[62][head], run.k[t][math.ceil(head / 2)]))
        end
        best[b] = math.max(best[b], logit)
      end
    end
    local taken, worst, left = {}, math.huge, -math.huge
    for _, b in ipairs(run.selection:list()) do
      taken[b], worst = true, math.min(worst, best[b])
    end
    for b = 0, 15 do if not taken[b] then left = math.max(left, best[b]) end end
    assert.is_true(worst > 0.8 * left)
  end)
end)
