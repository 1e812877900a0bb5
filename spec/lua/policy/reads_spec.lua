--- What decode steps read, against counts by hand, for every policy.
local kv = require "kvlab"
local named = require "kvlab.named"
local rig = require "spec.rig"
local temporary = require "spec.temporary"
local tiny = require "spec.models.tiny"

local cpu = kv.device "cpu"
local SHAPE = rig.SHAPE
local KEY = 4 * SHAPE.head_dim -- bytes of a key, and of a value, in f32
local GROUP = SHAPE.heads / SHAPE.kv_heads
local BLOCKS, SIZE = 19, SHAPE.block_size -- of a sequence of 299 or 300 tokens
local FULL = 18 -- of these blocks

--- The metrics of decoding 2 tokens of a sequence of 298 tokens. before: called first,
-- with the attention and its probe. offload: of the cache.
local function metrics(policy, before, offload)
  local its = rig.new(cpu, { offload = offload })
  its.attention = kv.attention { cache = its.cache, heads = its.heads,
                                 decode_policy = policy }
  local probe = kv.probe(its.attention)
  if before then before(its.attention, probe) end
  rig.play(cpu, { rig = its }, { { "prefill", 1, 298 }, { "decode", 1 },
    { "decode", 1 } })
  its.cache:close()
  return probe:metrics()
end

--- A policy that scores with ctx:masses() and has `fields`.
local function by_masses(fields)
  local def = { name = "by_masses", decode = true, defaults = { blocks = 5, sink = 1 },
                score = function(_, ctx) return ctx:masses() end }
  for key, value in pairs(fields) do def[key] = value end
  return kv.policy.define(def)()
end

-- What a step reads for each layer and KV head: `attended` blocks (5), of each token
-- there `vectors` (2: its key and its value); and `keys` vectors and `bytes` to select.
local MEANS, TALLY = BLOCKS, 4 * BLOCKS
local BY_HAND = {
  { "full", attended = BLOCKS },
  { "streaming_blocks" }, { "random" },
  { "quest", keys = 2 * BLOCKS },
  { "block_mean", keys = MEANS }, { "topk", keys = MEANS }, { "infllm", keys = MEANS },
  { "twilight", { p = 1 }, keys = MEANS },
  { "oracle", keys = BLOCKS * SIZE, vectors = 1 },
  -- keys and values
  { "mass_oracle", keys = 2 * BLOCKS * SIZE, vectors = 0 },
  { "union", { first = "quest", second = "block_mean" }, keys = 2 * BLOCKS + MEANS },
  { "union", { first = "oracle", second = "mass_oracle" }, keys = 3 * BLOCKS * SIZE,
    vectors = 0 },
  { "layers", { dense = 0 }, keys = 2 * BLOCKS },
  -- one of two layers is dense
  { "layers", { dense = 1 }, keys = BLOCKS, attended = (BLOCKS + 5) / 2 },
  -- the means once for each head of a group
  { "h2o_blocks", keys = GROUP * MEANS, bytes = TALLY },
  -- one tally for all heads; the means are read at the first of two steps
  { "gsa", bytes = TALLY / SHAPE.kv_heads },
  { "gsa", { scores = "mean", refresh = 2 }, keys = MEANS / 2,
    bytes = TALLY / SHAPE.kv_heads / 2 },
  -- all keys, or the means of full blocks, at the first of two steps
  { "snapkv_blocks", keys = BLOCKS * SIZE / 2, bytes = TALLY },
  { "keydiff_blocks", keys = FULL / 2, bytes = TALLY },
  -- and a log_weight of each attended block
  { "magicpig", { code = 256 }, keys = FULL / 2, bytes = 32 * BLOCKS + 4 * 5 },
  { "gsa_on_device", { hash_bits = 64 }, bytes = 8 * BLOCKS },
  { "gsa_on_device", { hash_bits = 64, per = "token" }, bytes = 8 * SIZE * BLOCKS },
  -- 64 dims in f8 and a scale for all heads
  { "nsa", bytes = BLOCKS * SIZE * (64 + 4) / SHAPE.kv_heads },
  -- compressed keys for each head of a group, and keys and values once; a window of 4
  { "nsa_branches", { window = 64 }, keys = (GROUP + 2) * BLOCKS, attended = 5 + 4 },
}

describe("what a step reads", function()
  it("is counted as by hand, for every policy", function()
    local has = {}
    for i, case in ipairs(BY_HAND) do
      local name, o = case[1], { blocks = 5, min_blocks = 0, sink = 1, recent = 2 }
      for key, value in pairs(case[2] or {}) do o[key] = value end
      local seen = metrics(kv.policy(name, name ~= "full" and o or nil))
      local attended = case.attended or 5
      local bytes = KEY * (attended * SIZE * (case.vectors or 2) + (case.keys or 0))
        + (case.bytes or 0)
      local what = "case " .. i .. ", " .. name
      assert.near(SHAPE.layers * SHAPE.kv_heads * bytes, seen.bytes_read, 1e-6, what)
      assert.near(bytes / (2 * KEY * BLOCKS * SIZE), seen.bytes_share, 1e-12, what)
      assert.near(attended, seen.blocks_read, 1e-9, what)
      assert.is_nil(seen.note, what)
      has[name] = true
    end
    for _, name in ipairs(kv.policy.names "decode") do assert.is_true(has[name], name) end
  end)

  it("is what dense attention reads, where everything is selected", function()
    for _, name in ipairs { "streaming_blocks", "oracle", "mass_oracle" } do
      assert.near(1, metrics(kv.policy(name, { ratio = 1 })).bytes_share, 1e-12, name)
    end
  end)

  it("cannot be left out by a policy, which can add to it", function()
    local function share(fields)
      local seen = metrics(by_masses(fields))
      return seen.bytes_share, seen.note
    end
    local counted, note = share {} -- masses are made of all keys and values
    assert.near(1, counted, 1e-12)
    assert.matches("uncounted: policy by_masses does not say what its score reads", note)
    counted, note = share { own_bytes = 0 }
    assert.near(1, counted, 1e-12)
    assert.is_nil(note)
    counted = share { own_bytes = KEY }
    assert.near(1 + 1 / (2 * SIZE), counted, 1e-12)
    counted = share { own_bytes = function(_, shape, layer)
      return layer * 4 * shape.head_dim
    end }
    assert.near(1 + 1 / (2 * SIZE) / 2, counted, 1e-12)
  end)

  it("is counted where a policy attends by itself", function()
    local policy = kv.policy.define { name = "by_itself", decode = true, own_bytes = 0,
      compute_decode = function(_, attention, ctx, out)
        local two = kv.from(cpu, "i32", { 1, 1, 2 }, { 3, 7 })
        return attention:attend_slots(ctx, ctx.cache, two, nil, out), two
      end }
    local bytes = KEY * 2 * SIZE * 2
    local seen = metrics(policy())
    assert.near(SHAPE.layers * SHAPE.kv_heads * bytes, seen.bytes_read, 1e-6)
    assert.near(2, seen.blocks_read, 1e-9)
  end)

  it("contains what a policy inside of another one reads of its own", function()
    local path = temporary.file("", "own.lua")
    named.give("policies", "own", path, kv.policy.define { name = "own", decode = true,
      defaults = { blocks = 5 }, own_bytes = 128,
      score = function(_, ctx) return ctx:new_scores(1):arange_() end })
    local policy = kv.policy("layers", { base = "own", dense = 1, blocks = 5,
                                         min_blocks = 0 })
    local bytes = KEY * 2 * SIZE * (BLOCKS + 5) / 2 + 128 * BLOCKS / 2
    local seen = metrics(policy)
    named.give("policies", "own", nil, nil)
    assert.near(SHAPE.layers * SHAPE.kv_heads * bytes, seen.bytes_read, 1e-6)
  end)

  it("is counted in steps that nobody observes, too", function()
    local seen = metrics(kv.policy("snapkv_blocks", { blocks = 5, min_blocks = 0 }),
      function(attention, probe)
        local begin, steps = attention.begin, 0
        attention.begin = function(self, batch, is_prefill)
          steps = steps + 1
          self.probe = steps == 3 and probe or nil -- the second step of decode
          return begin(self, batch, is_prefill)
        end
      end)
    local bytes = KEY * (5 * SIZE * 2 + BLOCKS * SIZE / 2) + TALLY
    assert.near(SHAPE.layers * SHAPE.kv_heads * bytes, seen.bytes_read, 1e-6)
    assert.near(5, seen.blocks_read, 1e-9)
  end)
end)

describe("what a step holds and moves", function()
  local function shares(policy, offload)
    local seen = metrics(policy, nil, offload)
    return { seen.held_share, seen.moved_share }
  end

  local function near(want, got)
    for i = 1, 2 do assert.near(want[i], got[i], 1e-12) end
  end

  it("is all of the texts and nothing, where KV is on the device", function()
    near({ 1, 0 }, shares(kv.policy "full"))
    near({ 1, 0 }, shares(kv.policy("quest", { blocks = 5, min_blocks = 0 })))
  end)

  it("crosses the link from and to host memory", function()
    local token = 1 / SIZE -- of a block; each step writes one
    near({ 1, (FULL + token) / BLOCKS }, shares(kv.policy "full", { slots = 2 }))
    -- the open block is on the device already
    near({ 1, (4 + token) / BLOCKS }, shares(kv.policy("streaming_blocks",
      { blocks = 5, min_blocks = 0, sink = 1, recent = 2 }), { slots = 2 }))
    -- the first of two steps fetches what the second finds
    near({ 1, (5 / 2 + token) / BLOCKS }, shares(kv.policy("streaming_blocks",
      { blocks = 5, min_blocks = 0, sink = 1, recent = 2 }), { hot_slots = 128 }))
  end)

  it("has what scores read in host memory", function()
    local o, offload = { blocks = 5, min_blocks = 0, sink = 1, recent = 2 }, { slots = 2 }
    local token, open = 1 / SIZE, 1
    local function moved(policy) return shares(policy, offload)[2] * BLOCKS end
    -- all keys; and of the selected blocks, among which is the open one, K and V
    assert.near(BLOCKS / 2 + 5 - open + token, moved(kv.policy("oracle", o)), 1e-9)
    assert.near(BLOCKS + 5 - open + token, moved(kv.policy("mass_oracle", o)), 1e-9)
    for _, operand in ipairs { "k", "v" } do
      local policy = kv.policy.define { name = "by_expression", decode = true,
        own_bytes = 0, defaults = o, score = kv.expr[operand]:max "dim":max "token" }
      assert.near(BLOCKS / 2 + 5 - open + token, moved(policy()), 1e-9, operand)
    end
  end)

  it("is what an eviction leaves, and the token that makes way", function()
    for _, tables in ipairs { "layer", "head" } do
      local engine = tiny.attentive(cpu):engine { tables = tables, blocks = 40,
        block_size = 4, policy = kv.policy("streaming", { blocks = 5 }) }
      local seq, prompt = engine:sequence(), {}
      for i = 1, 61 do prompt[i] = i end
      engine:prefill(seq, prompt)
      local probe = kv.probe(engine.attention)
      for i = 1, 2 do engine:decode({ seq }, { i }) end -- 62 and 63 tokens: 16 blocks
      local seen = probe:metrics()
      near({ 20 / 62.5, 1 / 64 }, { seen.held_share, seen.moved_share })
      engine.cache:close()
    end
  end)
end)
