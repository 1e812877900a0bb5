--- ctx:attention_weights against attention by the book (spec/reference), for the last
-- queries of prompts in chunks of any sizes.
local kv = require "kvlab"
local policy = require "kvlab.policy.policy"
local reference = require "spec.reference.hooked_attention"
local rig = require "spec.rig"
local support = require "spec.support"

-- Of weights up to 1: f32 sums against doubles. A GPU may multiply other parts of f32
-- numbers.
local TOLERANCE = { cpu = 5e-6, cuda = 1e-4 }

local SHAPE = rig.SHAPE

--- A policy that keeps the last `window` queries of prompts and what it got of them in
-- the first decode step: found[i] with layer, length, weights, queries and keys, lists.
local function weighing(window)
  local function keep(self, ctx, seq, _, first, count)
    local kept = seq.state[self] or {}
    kept[ctx.layer] = ctx:newest_queries(kept[ctx.layer], first, count, window)
    kept.length, seq.state[self] = seq:length(), kept
  end
  local function find(self, ctx, i, layer, kept)
    local size, length, queries = ctx.block_size, kept.length, kept[layer]
    local blocks = math.ceil(length / size)
    local keys = kv.tensor(ctx.device, "f32",
      { blocks, SHAPE.kv_heads, size, SHAPE.head_dim })
    kv.ops.read_blocks(ctx.batch.cache:layer(layer),
      ctx.tables:index(i):narrow(0, blocks), keys, nil, ctx.format:of(layer))
    local unit = ctx.format:scales(layer)
    if unit then keys = keys * unit:reshape { SHAPE.kv_heads, 1, 1 } end
    local weights = ctx:attention_weights(queries, layer, i, length)
    self.found[#self.found + 1] = { layer = layer, length = length, size = size,
      dims = weights:dims(), weights = weights:list(), count = queries:size(0),
      queries = queries:cast("f32"):list(), keys = keys:list() }
  end
  local p = policy.define {
    name = "weighing", decode = true, watches_prompt = true, own_bytes = 0,
    defaults = { ratio = 1 },
    attention_finished = function(self, ctx)
      if ctx.is_prefill then ctx:each_sequence(keep, self) end
    end,
    step_begin = function(self, ctx)
      for i, seq in ipairs(ctx.sequences) do
        for layer = 0, seq.state[self] and ctx.layers - 1 or -1 do
          find(self, ctx, i - 1, layer, seq.state[self])
        end
        seq.state[self] = nil
      end
    end,
    score = function(_, ctx) return ctx:new_scores():fill_(0) end,
  } {}
  p.found = {}
  return p
end

--- What the reference makes of the same queries and keys.
local function expected(one, o, heads)
  local group, list = heads / SHAPE.kv_heads, {}
  local columns = math.ceil(one.length / one.size) * one.size
  local window = type(o.window) == "table" and o.window[one.layer + 1] or o.window or 0
  local env = { soft_cap = o.soft_cap, alibi = o.slopes, dim = SHAPE.head_dim,
    group = group, block_size = one.size, scale = 1 / math.sqrt(SHAPE.head_dim),
    window = window, layer = one.layer, expressions = {}, v = function() return 0 end,
    k = function(row, position, x)
      local block = math.floor(position / one.size)
      return one.keys[((block * SHAPE.kv_heads + row.kv_head) * one.size
        + position % one.size) * SHAPE.head_dim + x + 1]
    end }
  for kv_head = 0, SHAPE.kv_heads - 1 do
    for head = 0, group - 1 do
      for i = 0, one.count - 1 do
        local at = (i * heads + kv_head * group + head) * SHAPE.head_dim
        local _, _, weights = reference.row(env, { kv_head = kv_head, head = head,
          position = one.length - one.count + i, length = one.length,
          q = function(x) return one.queries[at + x + 1] end })
        for column = 0, columns - 1 do list[#list + 1] = weights[column] or 0 end
      end
    end
  end
  return list, { SHAPE.kv_heads, group * one.count, columns }
end

--- The weights that a policy found after a script.
local function play(dev, o, script)
  local p, all = weighing(o.keeps or 5), {}
  for key, value in pairs(o) do all[key] = value end
  all.policy = p
  if o.slopes then all.alibi = kv.from(dev, "f32", { #o.slopes }, o.slopes) end
  local _, r = rig.play(dev, all, script)
  return p.found, r
end

local SCRIPT = { { "prefill", 1, 60 }, { "prefill", 2, 33 }, { "prefill", 1, 9 },
                 { "prefill", 1, 1 }, { "decode", 1, 2 } }
local WHOLE = { { "prefill", 1, 70 }, { "prefill", 2, 33 }, { "decode", 1, 2 } }

local CASES = {
  ["the last query"] = { keeps = 1 },
  ["the last queries"] = {},
  ["more queries than the last chunks have"] = { keeps = 20 },
  ["more queries than the prompts have"] = { keeps = 80 },
  ["one head in a group"] = { heads = 2 },
  ["three heads in a group, blocks of 5"] = { heads = 6, block_size = 5 },
  ["a window, a soft cap and ALiBi"] = { window = 20, soft_cap = 2,
    slopes = { 0.5, 0.25, 0.125, 1, 0, 0.5, 2, 0.1 } },
  ["a window of one layer"] = { window = { 0, 20 } },
  ["bf16"] = { dtype = "bf16" }, ["f16"] = { dtype = "f16" },
  ["f8e4m3 with scales"] = { dtype = "bf16", format = "f8e4m3" },
  ["int8"] = { dtype = "bf16", format = "int8" },
}

local TIERS = {
  ["a ring"] = { slots = 2, slot_blocks = 1 },
  ["a hot cache"] = { slots = 2, slot_blocks = 2, hot_slots = 160 },
}

local function specs(dev_name)
  local dev, tolerance = kv.device(dev_name), TOLERANCE[dev_name]

  for _, name in ipairs(support.names(CASES)) do
    it("are those of dense attention: " .. name, function()
      local o = CASES[name]
      for _, one in ipairs(play(dev, o, SCRIPT)) do
        local want, dims = expected(one, o, o.heads or SHAPE.heads)
        assert.same(dims, one.dims)
        support.close(one.weights, want, tolerance, tolerance, name)
      end
    end)
  end

  it("do not depend on chunks, on sequences beside, or on where the keys lie", function()
    local want = play(dev, {}, WHOLE)
    assert.equal(2 * SHAPE.layers, #want)
    local function same(found, what)
      assert.equal(#want, #found)
      for i, one in ipairs(found) do
        support.close(one.weights, want[i].weights, 1e-6, 1e-6, what)
      end
    end
    same(play(dev, {}, SCRIPT), "in chunks")
    same(play(dev, {}, { { "prefill", 1, 30 }, { "chunks", 33, 1, 2 },
      { "prefill", 1, 7 }, { "decode", 1, 2 } }), "together")
    for name, tier in pairs(TIERS) do
      same(play(dev, { offload = tier }, SCRIPT), name)
    end
    local alone = play(dev, {}, { { "prefill", 1, 70 }, { "decode", 1 } })
    for layer = 1, SHAPE.layers do
      support.close(alone[layer].weights, want[layer].weights, 1e-6, 1e-6, "alone")
    end
  end)

  it("are summed over a token's queries, or their maximum is taken", function()
    local p = weighing(5)
    p.step_begin = function(self, ctx)
      local w = ctx:attention_weights(ctx.sequences[1].state[self][0], 0, 0, 70)
      self.sum, self.max, self.all = w:sum(1):list(), w:max(1):list(), w:list()
    end
    rig.play(dev, { policy = p }, { { "prefill", 1, 70 }, { "decode", 1 } })
    local rows = SHAPE.heads / SHAPE.kv_heads * 5
    assert.equal(SHAPE.kv_heads * 80, #p.max)
    for i, x in ipairs(p.max) do
      local head, column = math.floor((i - 1) / 80), (i - 1) % 80
      local sum, most = 0, 0
      for row = 0, rows - 1 do
        local weight = p.all[(head * rows + row) * 80 + column + 1]
        sum, most = sum + weight, math.max(most, weight)
      end
      assert.equal(most, x)
      assert.near(sum, p.sum[i], 1e-5)
    end
  end)

  it("cross the link, and are counted, where keys lie in host memory", function()
    local function bytes(tier, keeps)
      local p = keeps and weighing(5) or kv.policy "full"
      local _, r = rig.play(dev, { policy = p, offload = tier },
        { { "prefill", 1, 70 }, { "decode", 1 } })
      r.cache.device:sync()
      return (r.cache.tier:bytes())
    end
    local tier = TIERS["a ring"]
    local keys = 5 * SHAPE.block_size * SHAPE.kv_heads * SHAPE.head_dim * 4
    assert.equal(SHAPE.layers * keys, bytes(tier, true) - bytes(tier, false))
    assert.equal(0, bytes(nil, true))
  end)

  it("are refused for what no sequence has", function()
    local whys, p = {}, weighing(5)
    local function refused(ctx, ...)
      local ok, why = pcall(ctx.attention_weights, ctx, ...)
      whys[#whys + 1] = ok and "nothing" or why
    end
    p.step_begin = function(self, ctx)
      local q = ctx.sequences[1].state[self][0]
      refused(ctx, q, 0, 1, 20)
      refused(ctx, q, 2, 0, 20)
      refused(ctx, q, 0, 0, 4)
      refused(ctx, q, 0, 0, 22)
      refused(ctx, q:narrow(0, 0), 0, 0, 20)
      refused(ctx, q:reshape { 5, SHAPE.heads * 2, SHAPE.head_dim / 2 }, 0, 0, 20)
    end
    rig.play(dev, { policy = p }, { { "prefill", 1, 20 }, { "decode", 1 } })
    for i, why in ipairs {
      "i is 1, expected 0 ... 0", "layer is 2, expected 0 ... 1",
      "length is 4, expected 5",
      "length is 22, expected 5, the number of queries, to 21, the tokens",
      "queries is [0, 8, 32], expected [count, heads=8, head_dim=32]",
      "queries is [5, 16, 16], expected [count, heads=8, head_dim=32]" } do
      assert.matches(why, whys[i], 1, true)
    end
    for _, tier in ipairs { TIERS["a ring"], {} } do
      p = weighing(5)
      p.attention_finished = function(_, ctx)
        if ctx.is_prefill then refused(ctx, ctx.query, 0, 0, 20) end
      end
      rig.play(dev, { policy = p, offload = next(tier) and tier },
        { { "prefill", 1, 20 } })
    end
    assert.matches("keys are in host memory, expected a decode step", whys[7], 1, true)
    assert.equal("nothing", whys[9])
  end)
end

describe("attention weights of kept queries", function() specs "cpu" end)

describe("attention weights of kept queries #gpu", function()
  if kv.cuda_available() then specs "cuda" end
end)
