--- What a record says beside the probe's counts and selections computed here from
-- the recorded scores.
local kv = require "kvlab"
local plot = require "kvlab.report.plot"
local synthetic = require "kvlab.experiment.synthetic"
local support = require "spec.support"

local LAYERS, HEADS, BLOCK = 4, 2, 16 -- of the shape "small"

--- Two sequences of 150 and 70 random tokens, `steps` decoded.
local function play(dev, policy, steps, watch)
  local s = synthetic { device = dev, shape = "small", context = 400, max_seqs = 2,
                            chunk = 64, block_size = BLOCK, decode_policy = policy }
  local seqs = { s:sequence(150), s:sequence(70) }
  local watched = { watch(s.attention) }
  for _ = 1, steps do s:decode(seqs) end
  s:close()
  return unpack(watched)
end

local function policy_of(name)
  return kv.policy(name, name ~= "full" and
    { blocks = 4, sink = 1, recent = 1, min_blocks = 0 } or nil)
end

--- Sink, recent and the best scores of n blocks, ties to the lower, ascending.
local function choose(scores, n, budget)
  local order, is_chosen, list = {}, { [0] = true, [n - 1] = true }, {}
  for j = 1, n - 2 do order[j] = j end
  table.sort(order, function(a, b)
    local x, y = scores[a + 1], scores[b + 1]
    return x > y or x == y and a < b
  end)
  for i = 1, budget - 2 do is_chosen[order[i]] = true end
  for block = 0, n - 1 do
    if is_chosen[block] then list[#list + 1] = block end
  end
  return list
end

local function check(dev)
  describe("record on " .. dev:name(), function()
    it("has the selection that the scores that it has ask for", function()
      for _, name in ipairs { "oracle", "quest", "block_mean", "topk" } do
        for seq, tokens in ipairs { 150, 70 } do
          local record = play(dev, policy_of(name), 12, function(attention)
            return kv.record(attention, { seq = seq })
          end)
          assert.equal(12, #record.steps)
          for i = 1, 12 do
            local n = math.ceil((tokens + i) / BLOCK)
            for layer = 0, LAYERS - 1 do
              for head = 0, HEADS - 1 do
                local scores = record:scores(i, layer, head)
                assert.equal(n, #scores)
                assert.same(choose(scores, n, 4), record:selection(i, layer, head))
              end
            end
          end
        end
      end
    end)

    it("tells layers, KV heads and sequences apart", function()
      local policy = kv.policy.define {
        name = "counting", decode = true,
        score = function(_, ctx)
          local scores = ctx:new_scores():arange_()
          return scores:add(1000 * ctx.layer, scores)
        end,
      }
      local width
      local record = play(dev, policy { blocks = 2 }, 1, function(attention)
        attention.hooks = { attention_begin = function(ctx) width = ctx.width end }
        return kv.record(attention, { seq = 2 })
      end)
      for layer = 0, LAYERS - 1 do
        for head = 0, HEADS - 1 do
          local first = 1000 * layer + (HEADS + head) * width
          assert.same({ first, first + 1, first + 2, first + 3, first + 4 },
            record:scores(1, layer, head))
          assert.same({ 3, 4 }, record:selection(1, layer, head))
        end
      end
    end)

    it("has no scores of a layer that has none", function()
      local policy = kv.policy.define {
        name = "half", decode = true,
        select_blocks = function(self, ctx)
          if ctx.layer % 2 == 1 then return nil end
          return ctx:select(ctx:new_scores():fill_(1), self.budget)
        end,
      }
      local record
      play(dev, policy { blocks = 2 }, 2, function(a) record = kv.record(a) end)
      assert.equal(10, #record:scores(2, 2, 1))
      assert.is_nil(record:scores(2, 1, 1))
      assert.is_nil(record:selection(2, 1, 1))
    end)

    it("counts the blocks that a probe counts, which goes on observing", function()
      for _, name in ipairs { "full", "quest", "gsa_on_device", "streaming_blocks",
                              "twilight", "union", "layers", "magicpig" } do
        local first, second, probe
        play(dev, policy_of(name), 3, function(attention)
          probe = kv.probe(attention)
          first = kv.record(attention)
          second = kv.record(attention, { seq = 2 })
        end)
        local mean = (first:metrics().blocks_read + second:metrics().blocks_read) / 2
        assert.near(probe:metrics().blocks_read, mean, 1e-9, name)
      end
    end)

    it("says nil where a policy reads everything or has no scores", function()
      local full, hashed
      play(dev, policy_of "full", 2, function(a) full = kv.record(a) end)
      play(dev, policy_of "gsa_on_device", 2, function(a)
        hashed = kv.record(a)
      end)
      assert.is_nil(full:selection(1, 0, 0))
      assert.is_nil(full:scores(1, 0, 0))
      assert.is_nil(hashed:scores(2, 3, 1))
      assert.equal(4, #hashed:selection(2, 3, 1))
      assert.equal(1, full:metrics().kept)
    end)
  end)
end

support.each_device(check)

describe("record", function()
  --- A record of one layer with one KV head, without an attention.
  local function make(steps)
    local attention = { shape = { layers = 1, kv_heads = 1 }, context = {},
                        forward = function() end,
                        decode_policy = { name = "spec" } }
    local record = kv.record(attention)
    for i, step in ipairs(steps) do
      local function rows(list)
        if not list then return nil end
        local values = {}
        for j, x in ipairs(list) do values[j - 1] = x end
        return { heads = 1, width = #list, values = values }
      end
      record.steps[i] = { blocks = step.blocks, chosen = { [0] = rows(step.chosen) },
                          scored = { [0] = rows(step.scores) } }
    end
    return record
  end

  it("maps what each step chose; nothing where there was no block yet", function()
    local map = make { { blocks = 3, chosen = { 0, 2, -1 } }, { blocks = 4 } }
      :selection_map()
    assert.same({ 2, 4 }, { map.rows, map.columns })
    local values = map.panels[1].values
    assert.is_true(values[4] ~= values[4])
    values[4] = "none"
    assert.same({ 1, 0, 1, "none", 1, 1, 1, 1 }, values)
    assert.equal("layer 0, KV head 0", map.panels[1].title)
    assert.equal("Blocks that spec chose", map.title)
  end)

  it("maps ranks of scores, equal ones in the middle", function()
    local map = make { { blocks = 5, scores = { 7, -1, 7, 100, -math.huge } },
                       { blocks = 5, scores = { 2, 2, 2, 2, 2 } },
                       { blocks = 5 } }:score_map()
    local values = map.panels[1].values
    assert.same({ 0.625, 0.25, 0.625, 1, 0, 0.5, 0.5, 0.5, 0.5, 0.5 },
      { unpack(values, 1, 10) })
    for i = 11, 15 do assert.is_true(values[i] ~= values[i]) end
  end)

  it("counts the blocks that the step before read, too", function()
    local record = make { { blocks = 4, chosen = { 0, 1 } },
                          { blocks = 4, chosen = { 1, 3, -1 } }, { blocks = 4 } }
    assert.same({ blocks_read = 8 / 3, kept = 3 / 6 }, record:metrics())
    assert.is_true(make { { blocks = 2 } }:metrics().kept ~= 1)
  end)

  it("draws some layers of many", function()
    local record = make { { blocks = 2 } }
    record.layers, record.heads = 32, 8
    local map = record:selection_map()
    assert.equal(16, #map.panels)
    assert.equal("layer 31, KV head 0", map.panels[9].title)
    assert.equal(2, #record:selection_map { layers = { 5 }, heads = { 0, 7 } }.panels)
    assert.truthy(plot.text(map, 40))
  end)

  it("gives the attention back as it was", function()
    local attention = { shape = { layers = 1, kv_heads = 1 }, context = {},
                        forward = function() end,
                        decode_policy = { name = "spec" }, probe = "a probe" }
    local record = kv.record(attention)
    assert.equal(record, attention.probe)
    record:detach()
    assert.equal("a probe", attention.probe)
    assert.is_nil(attention.context.select)
  end)

  it("says what is wrong", function()
    local record = make { { blocks = 2 } }
    for words, misuse in pairs {
      ["step is 2, expected 1 ... 1"] = function() record:scores(2, 0, 0) end,
      ["layer is 1, expected 0 ... 0"] = function() record:selection(1, 1, 0) end,
      ["KV head is 4, expected 0 ... 0"] = function()
        record:score_map { heads = { 4 } }
      end,
      ["no step has been decoded"] = function() make({}):selection_map() end,
      ["seq is 0, expected a whole number >= 1"] = function()
        kv.record(record.attention, { seq = 0 })
      end,
    } do
      local ok, problem = pcall(misuse)
      assert.is_false(ok)
      assert.truthy(problem:find(words, 1, true), problem)
      assert.truthy(problem:find "record_spec", problem)
    end
  end)
end)
