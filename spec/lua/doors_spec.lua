--- What comes in is refused at the door, by name and on the caller's line: numbers that C
-- has no room for, lists that do not fit each other, and tables that only look right.
local ffi = require "ffi"
local kv = require "kvlab"
local support = require "spec.support"
local tiny = require "spec.models.tiny"

local raises = support.raises
local dev = kv.device "cpu"

describe("a count", function()
  it("is below 2^31, which C has room for", function()
    local words = "expected a whole number >= 1, and below 2^31"
    local o = { device = "cpu", layers = 1, blocks = 4, block_size = 4, kv_heads = 1,
                head_dim = 8 }
    for _, name in ipairs { "layers", "blocks", "block_size", "kv_heads", "head_dim" } do
      local given = {}
      for key, value in pairs(o) do given[key] = value end
      for _, value in ipairs { 2 ^ 31, 2 ^ 32 + 1, 2 ^ 40, 2 ^ 53 } do
        given[name] = value
        raises(("cache: %s is %s, %s"):format(name, tostring(value), words), kv.cache,
          given)
      end
      for _, value in ipairs { 0 / 0, 1 / 0, 0.5, -1, 5LL } do
        given[name] = value
        raises(("cache: %s is "):format(name), kv.cache, given)
      end
    end
    raises(words, tiny.tiny(dev).engine, tiny.tiny(dev), { chunk = 2 ^ 31 })
  end)

  it("in a list is, too", function()
    raises("expected a list, each a whole number >= 0, and below 2^31", kv.prefix_chunks,
      { tables = kv.zeros(dev, "i32", { 1, 1 }), lens = { 2 ^ 31 }, block_size = 4 })
  end)

  it("of layers ends a search as soon as nothing is left", function()
    local store = kv.store("memory:", { block_size = 4, model = "m" })
    local keys, n = store:keys { 1, 2, 3, 4 }
    raises("layers is 2147483648, expected a whole number >= 0, and below 2^31",
      store.find, store, keys, n, 2 ^ 31)
    assert.equal(0, store:find(keys, n, 2 ^ 31 - 1))
    raises("tokens is a table, expected a list, each a whole number, and below 2^31",
      store.keys, store, { 1, 2 ^ 32 })
    store:close()
  end)

  it("may be larger where it counts bytes or is a seed", function()
    assert.same(kv.rand(dev, "f32", { 3 }, { seed = 2 ^ 40 }):list(),
      kv.rand(dev, "f32", { 3 }, { seed = 2 ^ 40 }):list())
    dev:limit_cache(2 ^ 33)
    raises("seed is 9.007199254741e+15, expected a whole number >= 0, and below 2^53",
      kv.rand, dev, "f32", { 3 }, { seed = 2 ^ 53 })
  end)
end)

describe("a step", function()
  local model = tiny.tiny(dev)

  it("takes as many counts as sequences, and as many tokens as counts add up to",
    function()
      local engine = model:engine { blocks = 8, max_seqs = 2 }
      local seqs = { engine:sequence() }
      raises("append: 2 counts, expected one for each of 1 sequences", engine.verify,
        engine, seqs, { 1, {} }, { 1, 2 }, { 0, 0 })
      raises("append: 3 tokens, expected 2, as many as counts add up to", engine.verify,
        engine, seqs, { 2 }, { 1, 2, 3 })
      raises("append: 2 tokens, expected 1", engine.decode, engine, seqs, { 1, 2 })
      assert.equal(0, seqs[1]:length())
      local two = { seqs[1], engine:sequence() }
      engine:decode(two, { 1, 2 })
      engine:decode(seqs, { 3 }) -- after a larger step
      assert.same({ 2, 1 }, { two[1]:length(), two[2]:length() })
    end)

  it("takes sequences and functions, and nothing that looks like one", function()
    local engine = model:engine { blocks = 8 }
    raises("finish: seq is a table, expected a sequence", engine.finish, engine,
      { state = {} })
    raises("prefill_batch: each is 7, expected a function, or nil",
      engine.prefill_batch, engine, { engine:sequence() }, { 1 }, { 1 }, nil, 7)
    raises("use_attention: attention is a table, expected an attention",
      engine.use_attention, engine, { context = {}, shape = {} })
  end)
end)

describe("an op", function()
  local x = kv.zeros(dev, "f32", { 2, 4 })

  it("takes contexts, and nothing that looks like one", function()
    local q = kv.zeros(dev, "f32", { 1, 2, 4 })
    for _, ctx in ipairs { { tables = 1, lens = 2 }, { tables = x, lens = x } } do
      raises("score_max_qk: ctx is a table, expected a context of an attention",
        kv.ops.score_max_qk, q, ctx)
    end
  end)

  it("checks an eps that it needs no more", function()
    raises('linear: eps is "x", expected a number', kv.ops.linear, x, x,
      kv.zeros(dev, "f32", { 2, 2 }), "plain", nil, "x")
  end)

  it("names the sizes that do not fit, also those of 64 bits", function()
    raises("1 values for shape [2, 3]", kv.from, dev, "f32", { 2, 3LL }, { 1 })
    raises("within: low is a cdata, expected a whole number", kv.policy.within,
      ffi.new "int[2]", 1)
  end)
end)
