--- Tables by layer, and by layer and KV head. That steps compute the same by them as with
-- one table is in spec/scripts.lua, for every policy.
local kv = require "kvlab"
local support = require "spec.support"
local tiny = require("spec.models.tiny")

local cpu = kv.device "cpu"
local model = tiny.attentive(cpu)
local LAYERS, KV_HEADS, BLOCK = 2, 2, 4

local function engine(tables, o)
  o = o or {}
  o.blocks, o.block_size, o.chunk, o.max_seqs, o.tables = 40, BLOCK, 16, 4, tables
  return model:engine(o)
end

local function tokens(n)
  local list = {}
  for i = 1, n do list[i] = (i * 37 + 11) % 97 end
  return list
end

local CUTS = { one = 1, layer = LAYERS, head = LAYERS * KV_HEADS }

for _, tables in ipairs { "layer", "head" } do
  describe("tables by " .. tables, function()
    it("take the pages that blocks have, from one pool, and give them back", function()
      local e = engine(tables)
      local cache, cuts = e.cache, CUTS[tables]
      assert.equal(40 * cuts, cache.pages)
      assert.equal(40 * cuts, cache:pages_free())
      assert.equal(40, cache:blocks_free())
      local seq = e:sequence()
      e:prefill(seq, tokens(9))
      assert.equal(37 * cuts, cache:pages_free())
      assert.equal(37, cache:blocks_free())
      local owned = {}
      for layer = 0, LAYERS - 1 do
        for head = 0, tables == "head" and KV_HEADS - 1 or 0 do
          assert.equal(9, seq:held(layer, head))
          for _, page in ipairs(seq:table(layer, head)) do
            assert.is_nil(owned[page])
            owned[page] = true
          end
        end
      end
      local fork = seq:fork()
      assert.equal(37 * cuts, cache:pages_free())
      e:decode({ fork }, { 3 })
      assert.equal(36 * cuts, cache:pages_free()) -- a copy of each open page
      e:finish(fork)
      e:finish(seq)
      assert.equal(40 * cuts, cache:pages_free())
      cache:close()
    end)

    it("are shown to a policy that comes late", function()
      local function run(which)
        local e = engine(which)
        local seq = e:sequence()
        e:prefill(seq, tokens(60))
        e:use_policy(kv.policy("quest", { ratio = 0.3, min_blocks = 2 }), { seq })
        local logits = e:decode({ seq }, { 5 }):list()
        e.cache:close()
        return logits
      end
      assert.same(run "one", run(tables))
    end)

    it("need no wider tables than the batch has", function()
      local e = engine(tables, { max_blocks = 3 })
      local seq = e:sequence()
      e:prefill(seq, tokens(12))
      support.raises("would have 4 blocks, expected at most max_blocks = 3", e.decode, e,
        { seq }, { 1 })
      assert.equal(12, seq:length())
      e.cache:close()
    end)

    it("name the layer that a sequence does not have", function()
      local e = engine(tables)
      local seq = e:sequence()
      support.raises(("layer is 2, expected 0 ... 1: the cache has tables = %q"):format(
        tables), seq.table, seq, 2, 0)
      support.raises("layer is nil, expected 0 ... 1", seq.held, seq)
      for _, head in ipairs { 2, -1, "x" } do
        support.raises("expected 0 ... 1: the cache has tables", seq.held, seq, 0, head)
      end
      e.cache:close()
    end)
  end)
end

describe("one table", function()
  it("is that of any layer and head, which may be left out", function()
    local e = engine "one"
    local seq = e:sequence()
    e:prefill(seq, tokens(5))
    assert.same({ 5, 5, 5 }, { seq:held(), seq:held(1), seq:held(1, 1) })
    support.raises("layer is 99, expected 0 ... 1", seq.held, seq, 99)
    support.raises('head is 5, expected 0 ... 1: the cache has tables = "one"', seq.held,
      seq, 0, 5)
    e.cache:close()
  end)
end)

describe("tables by head", function()
  it("let each head select for itself where a policy selects for all of them", function()
    local function run(tables)
      local e = engine(tables, { policy = kv.policy("topk", { ratio = 0.3 }) })
      local seq = e:sequence()
      e:prefill(seq, tokens(60))
      local logits = e:decode({ seq }, { 5 }):list()
      e.cache:close()
      return logits
    end
    assert.same(run "one", run "layer")
    assert.is_false(pcall(assert.same, run "one", run "head"))
  end)

  it("refuse what has another value for each head, or a draft tree", function()
    support.raises("slopes of heads (alibi) do not go with tables by head",
      function() return tiny.tiny(cpu):engine { tables = "head" } end)
    local function cache(o)
      o.layers, o.blocks, o.block_size, o.kv_heads, o.head_dim = 2, 4, 4, 2, 16
      o.device = cpu
      return function() return kv.cache(o) end
    end
    support.raises('tables by head do not go with scales of KV heads, expected tables = '
      .. '"one"', cache { tables = "head", format = "f8e4m3",
      k_scale = kv.ones(cpu, "f32", { 2, 2 }) })
    support.raises("tables by layer do not go with KV in host memory",
      cache { tables = "layer", offload = { slots = 2 } })
    support.raises('tables is "heads", expected one of', cache { tables = "heads" })
    local e = engine "head"
    local seq = e:sequence()
    e:prefill(seq, tokens(5))
    support.raises("a draft tree does not go with tables by head", e.verify, e, { seq },
      { 2 }, { 3, 4 }, { 0, 0 })
    assert.equal(5, seq:length())
    e.cache:close()
  end)
end)

describe("a probe", function()
  it("measures the same with any tables, and no loss where tokens are gone", function()
    local function metrics(tables, policy)
      local e = engine(tables, { policy = policy })
      local seq = e:sequence()
      e:prefill(seq, tokens(60))
      local probe = kv.probe(e.attention)
      for i = 1, 8 do e:decode({ seq }, { i }) end
      local m = probe:metrics()
      e.cache:close()
      return m
    end
    local want = metrics("one", kv.policy("quest", { ratio = 0.3, min_blocks = 2 }))
    assert.is_true(want.output_error > 0.1, want.output_error)
    for _, tables in ipairs { "layer", "head" } do
      local got = metrics(tables, kv.policy("quest", { ratio = 0.3, min_blocks = 2 }))
      for name, x in pairs(want) do
        assert.is_true(math.abs(x - got[name]) < 1e-6 * math.max(1, math.abs(x)), name)
      end
      local held = metrics(tables, kv.policy("streaming", { blocks = 5 }))
      assert.equal(5, held.blocks_read)
      assert.is_true(math.abs(held.blocks_share - 5 / 16.5) < 1e-9, held.blocks_share)
      for _, name in ipairs { "attention_mass", "output_error" } do
        assert.is_true(held[name] ~= held[name], name) -- NaN: dense attention is unknown
      end
    end
  end)
end)
