--- nsa over an indexer of the model's own: as far as keys and queries are the same, it
-- selects what it selects of maps of k and q that it makes itself.
local kv = require "kvlab"
local rig = require "spec.rig"
local support = require "spec.support"

local HEADS, DIM, SHAPE = 4, 32, rig.SHAPE

local SCRIPT = {
  { "prefill", 1, 90 }, { "prefill", 2, 70 }, { "decode", 1, 2 }, { "prefill", 3, 20 },
  { "decode", 1, 2, 3 }, { "verify", { 3, 1 }, 1, 2 }, { "take_back", { 2, 0 } },
  { "decode", 1, 2 }, { "close", 3 }, { "truncate", 2, 50 }, { "decode", 2 },
  { "prefill", 4, 33 }, { "decode", 1, 2, 4 },
}

--- Random maps of all of k and q, by layer.
local function new_maps(dev)
  local function of(rows, columns, seed)
    return kv.randn(dev, "f32", { SHAPE.layers, rows, columns },
      { seed = seed, std = rows ^ -0.5 })
  end
  return { k = of(SHAPE.kv_heads * SHAPE.head_dim, DIM, 1),
           q = of(SHAPE.heads * SHAPE.head_dim, HEADS * DIM, 2),
           heads = of(SHAPE.heads * SHAPE.head_dim, HEADS, 3) }
end

--- The same as an indexer of a model.
local function indexer(maps)
  local function map(x, by, layer)
    return x:cast("f32"):reshape { x:size(0), -1 }:matmul(by:index(layer))
  end
  return { heads = HEADS, dim = DIM, make = function(layer, q, k)
    return { q = map(q, maps.q, layer):reshape { q:size(0), HEADS, DIM },
             k = map(k, maps.k, layer), weights = map(q, maps.heads, layer) }
  end }
end

local function policy(index, more)
  local o = { index = index, granularity = "token", index_topk = 24, min_blocks = 0,
              sink = 0, recent = 0 }
  for name, value in pairs(more or {}) do o[name] = value end
  return kv.policy("nsa", o)
end

--- The options of a rig that makes its keys itself, and of one whose model makes them.
local function both(maps, more, o)
  local own = { index_weights = maps, rotate = true, index_scale = "ue8m0" }
  for name, value in pairs(more or {}) do own[name] = value end
  local list = { { policy = policy("given", own) },
                 { policy = policy("model", more), index = indexer(maps) } }
  for i, kind in ipairs { "given", "model" } do
    if o and o.selects_in_prefill then
      list[i].prefill_policy = policy(kind, i == 1 and own or more)
    end
    for name, value in pairs(o or {}) do
      if name ~= "selects_in_prefill" then list[i][name] = value end
    end
  end
  return list
end

support.each_device(function(dev)
  describe("nsa with an index of the model on " .. dev:name(), function()
    local maps = new_maps(dev)

    local function same_script(more, o)
      local outs = {}
      for i, options in ipairs(both(maps, more, o)) do
        outs[i] = rig.play(dev, options, SCRIPT)
      end
      assert.same(outs[1], outs[2])
    end

    it("selects tokens by it in every kind of step", function() same_script() end)

    it("selects in prefills, too", function()
      same_script(nil, { selects_in_prefill = true })
    end)

    it("selects blocks by it", function()
      same_script({ granularity = "block", index_topk = 48 })
    end)

    it("selects in every second layer", function() same_script { index_layers = 2 } end)

    it("reads means of its keys the same way however they came", function()
      local function play(script, more)
        local all = { index = indexer(maps), tables = more, policy = policy("model",
          { index_pool = 8 }), prefill_policy = policy("model", { index_pool = 8 }) }
        local outs, its = rig.play(dev, all, script)
        its.cache:close()
        return outs
      end
      local function last(outs, n, step)
        local all = {}
        for i = #outs - n + 1, #outs do
          for _, x in ipairs(outs[i]) do all[#all + 1] = x end
        end
        return { unpack(all, #all - (step or #all) + 1) }
      end
      local decodes = { { "prefill", 1, 90 } }
      for _ = 1, 12 do table.insert(decodes, { "decode", 1 }) end
      local want = play(decodes)[1]
      local one = #want[13]
      for _, tables in ipairs { "one", "layer" } do
        local whole = play({ { "prefill", 1, 95 }, { "prefill", 1, 7 } }, tables)[1]
        support.close(last(whole, 1), last(want, 7), 3e-6, 3e-6)
        local cut = { { "prefill", 2, 30 }, { "close", 2 } }
        for _ = 1, 9 do table.insert(cut, { "prefill", 1, 10 }) end
        for _, line in ipairs { { "verify", { 5 }, 1 }, { "verify", { 9 }, 1 },
                                { "take_back", { 7 } }, { "verify", { 5 }, 1 } } do
          table.insert(cut, line)
        end
        local got = play(cut, tables)[1]
        support.close(last(got, 1, 5 * one), last(want, 5), 3e-6, 3e-6)
      end
    end)

    it("selects with tables by layer", function() same_script(nil, { tables = "layer" })
    end)
  end)
end)

describe("nsa with an index of the model", function()
  local cpu = kv.device "cpu"

  it("needs a model with an indexer", function()
    support.raises("index is model, but the model has no indexer, expected key, random "
      .. "or given", rig.new, cpu, { policy = policy "model" })
    support.raises("the model's indexer has dim 48, expected 32, 64 or 128", rig.new, cpu,
      { policy = policy "model", index = { heads = 2, dim = 48 } })
    support.raises("block_size is 2, expected a multiple of 4 where the index is the "
      .. "model's", rig.new, cpu, { policy = policy "model", block_size = 2,
      index = { heads = 2, dim = 32 } })
  end)

  it("needs what the indexer makes, in every layer", function()
    local its = rig.new(cpu, { policy = policy "model",
      index = { heads = HEADS, dim = DIM } })
    support.raises("forward: index is nil, expected q, k and weights of the model's "
      .. "indexer, which a policy reads", rig.play, cpu, { rig = its },
      { { "prefill", 1, 5 } })
    its.cache:close()
  end)

  it("cannot be shown contexts whose keys nobody made", function()
    local its = rig.new(cpu, { policy = policy "model",
      index = indexer(new_maps(cpu)) })
    support.raises("watches the prompt", its.attention.adopt, its.attention, {})
    support.raises("came without the keys that the model's indexer made of them",
      its.attention.show, its.attention, { 0 }, { 16 })
    its.cache:close()
  end)

  it("is ignored by policies that read no index", function()
    local its = rig.new(cpu, { policy = "quest", index = { heads = HEADS, dim = DIM,
      make = function() return "nothing" end } })
    rig.play(cpu, { rig = its }, { { "prefill", 1, 50 }, { "decode", 1 } })
    its.cache:close()
  end)
end)
