--- Selections that are read again in other layers and steps: the same ones, with what was
-- begun since, however steps are cut, batched, forked, taken back or made through tiers.
-- What a rig computes depends on the sequence and the position alone, so the selections
-- of a policy by itself say what one with reuse_steps has to read.
local kv = require "kvlab"
local rig = require "spec.rig"
local support = require "spec.support"
local tiny = require "spec.models.tiny"

local cpu = kv.device "cpu"
local SIZE, LAYERS = rig.SHAPE.block_size, rig.SHAPE.layers

local PROMPTS = { { "prefill", 1, 250 }, { "prefill", 2, 61 } }

local function with(o, more)
  local all = {}
  for name, value in pairs(o) do all[name] = value end
  for name, value in pairs(more or {}) do all[name] = value end
  return all
end

-- Policies that select in different ways, and tokens of an entry of their lists.
local CASES = {
  { "quest", { ratio = 0.2 }, SIZE },
  { "topk", { blocks = 3, sink = 0, recent = 0, min_blocks = 0 }, SIZE },
  { "twilight", { ratio = 0.4, sink = 0, recent = 0, min_blocks = 0 }, SIZE },
  { "h2o_blocks", { ratio = 0.2 }, SIZE },
  { "gsa_on_device", { tokens = 64 }, SIZE },
  { "layers", { dense = 1, ratio = 0.2 }, SIZE },
  { "quest", { ratio = 0.3, split = "adaptive", recent = 0, sink = 0 }, SIZE },
  { "nsa", { ratio = 0.2 }, SIZE },
  { "nsa", { granularity = "token", index_topk = 20, sink = 0, recent = 0,
             min_blocks = 0 }, 1 },
  { "nsa", { granularity = "token", ratio = 0.1, sink = 0, recent = 1,
             min_blocks = 0 }, 1 },
  { "nsa", { granularity = "token", index_topk = 24, index_pool = 4, sink = 0,
             recent = 0, min_blocks = 0 }, 1 },
}

--- Plays a script. Returns the outputs, what each layer selected in decode steps of one
-- sequence, sorted lists by "length layer", and how often the policy was asked.
local function play(dev, case, more, script, o)
  local policy = kv.policy(case[1], with(case[2], more))
  local its = rig.new(dev, with({ policy = policy }, o))
  local lists, asked = {}, 0
  local name = policy.by_token and "select_tokens" or "select_blocks"
  local select, ask = policy[name], policy.kept and policy.kept.ask
  if ask then
    policy.kept.ask = function(...)
      asked = asked + 1
      return ask(...)
    end
  end
  policy[name] = function(self, ctx)
    local list, counts = select(self, ctx)
    local heads = {}
    for head = 1, list and list:size(1) or 0 do
      heads[head] = {}
      for _, entry in ipairs(list:index(0):index(head - 1):list()) do
        if entry >= 0 then table.insert(heads[head], entry) end
      end
      table.sort(heads[head])
    end
    lists[("%d %d"):format(ctx.sequences[1]:length(), ctx.layer)] = heads
    return list, counts
  end
  local outs = rig.play(dev, { rig = its }, script)
  its.cache:close()
  return outs, lists, asked
end

--- The entries of lists that were made at a length, and those that were begun since.
local function later(heads, made, length, size)
  local all = {}
  for i, list in ipairs(heads) do
    all[i] = { unpack(list) }
    for entry = math.ceil(made / size), math.ceil(length / size) - 1 do
      table.insert(all[i], entry)
    end
  end
  return all
end

--- Both prompts, then other lines.
local function script(...) return { PROMPTS[1], PROMPTS[2], ... } end

local function times(n, line)
  local lines = {}
  for i = 1, n do lines[i] = line end
  return unpack(lines)
end

--- The last n outputs of a sequence are the same to the bit.
local function same(outs, want, s, n, what)
  for i = 0, n - 1 do
    assert.same(want[s][#want[s] - i], outs[s][#outs[s] - i], what)
  end
end

support.each_device(function(dev)
  for number, case in ipairs(CASES) do
    describe(("a selection that is read again, by %s, case %d, on %s"):format(case[1],
      number, dev:name()), function()
      local AGAIN = { reuse_steps = 3, reuse_layers = number % 2 + 1 }

      it("is the one that was made, and what was begun since", function()
        local alone = script(times(18, { "decode", 1 }))
        local _, own = play(dev, case, nil, alone)
        for _, steps in ipairs { 2, 5 } do
          local _, got, asked = play(dev, case, { reuse_steps = steps }, alone)
          for length = 251, 268 do
            local made = length - (length - 251) % steps
            for layer = 0, LAYERS - 1 do
              local key = "%d " .. layer
              assert.same(later(own[key:format(made)], made, length, case[3]),
                got[key:format(length)], key:format(length))
            end
          end
          local dense = case[1] == "layers" and 1 or 0 -- of which nothing is kept
          assert.equal(dense * 18 + (LAYERS - dense) * math.ceil(18 / steps), asked)
        end
      end)

      it("serves the next layers", function()
        local _, got, asked = play(dev, case, { reuse_layers = 2 },
          script(times(4, { "decode", 1 })))
        for length = 251, 254 do
          assert.same(got[length .. " 0"], got[length .. " 1"])
        end
        assert.equal(4, asked)
      end)

      it("is that of a sequence by itself in any batch", function()
        local alone = play(dev, case, AGAIN, script(times(7, { "decode", 1 })))
        for _, lines in ipairs {
          script(times(7, { "decode", 1, 2 })),
          script({ "decode", 1 }, { "decode", 2 }, times(6, { "decode", 2, 1 })),
          script({ "decode", 1 }, { "decode", 2 }, { "decode", 1, 2 },
            { "prefill", 3, 40 }, times(5, { "decode", 1, 3 })),
        } do
          local outs = play(dev, case, AGAIN, lines)
          for i = 0, 6 do
            support.close(outs[1][#outs[1] - i], alone[1][#alone[1] - i], 2e-6, 2e-6)
          end
        end
      end)

      it("is there again when tokens are taken back", function()
        local first = script({ "decode", 1, 2 }, { "verify", { 2, 1 }, 1, 2 })
        for _, back in ipairs { { 3, 2 }, { 0, 4 }, { 9, 6 } } do
          local taken = with(first)
          table.insert(taken, { "verify", { 9, 6 }, 1, 2 })
          table.insert(taken, { "take_back", back })
          local never = with(first)
          if back[1] < 9 then
            table.insert(never, { "verify", { 9 - back[1], 6 - back[2] }, 1, 2 })
          end
          for _, line in ipairs { { "decode", 1, 2 }, { "verify", { 5, 2 }, 1, 2 },
                                  { "decode", 2 }, { "decode", 1, 2 } } do
            table.insert(taken, line)
            table.insert(never, line)
          end
          local outs, want = play(dev, case, AGAIN, taken), play(dev, case, AGAIN, never)
          same(outs, want, 1, 3)
          same(outs, want, 2, 4)
        end
      end)
    end)
  end

  it("is read by the rows of a step as by steps of one token on " .. dev:name(),
    function()
      for _, i in ipairs { 1, 8, 9, 11 } do -- policies that score blocks by their keys
        local one = play(dev, CASES[i], { reuse_steps = 3 },
          script(times(8, { "decode", 1, 2 })))
        local rows = play(dev, CASES[i], { reuse_steps = 3 }, script({ "decode", 1, 2 },
          { "verify", { 5, 3 }, 1, 2 }, { "verify", { 2, 4 }, 1, 2 }))
        for s = 1, 2 do
          local want = {}
          for step = 2, 9 do
            for _, x in ipairs(one[s][step]) do want[#want + 1] = x end
          end
          local got = {}
          for step = 2, 4 do
            for _, x in ipairs(rows[s][step]) do got[#got + 1] = x end
          end
          support.close(got, want, 3e-6, 3e-6)
        end
      end
    end)

  it("is that of its parent in a fork, on " .. dev:name(), function()
    for _, case in ipairs(CASES) do
      local o = { policy = case[1], options = with(case[2], { reuse_steps = 4 }),
                  lengths = { 195, 33 }, steps = 6 }
      local plain = rig.decode(dev, o)
      o.before = { 90 }
      o.chunk = 16
      local cut = rig.decode(dev, o)
      for i, step in ipairs(plain.steps) do
        support.close(cut.steps[i].out, step.out, 2e-6, 2e-6, case[1])
      end
      local its = rig.new(dev, o)
      local seq = its.cache:sequence()
      local function run(s, n, is_prefill)
        its.batch:append({ s }, { n })
        its.attention:begin(its.batch, is_prefill)
        local q = kv.randn(dev, "f32", { n, 8, 32 }, { seed = s:length() })
        local k = kv.randn(dev, "f32", { n, 2, 32 }, { seed = s:length() + 1 })
        local out
        for layer = 0, LAYERS - 1 do
          out = its.attention:forward(layer, q, k, k, nil)
        end
        return out:list()
      end
      run(seq, 100, true)
      run(seq, 1)
      run(seq, 1)
      local fork = seq:fork()
      for _ = 1, 4 do assert.same(run(seq, 1), run(fork, 1)) end
      its.cache:close()
    end
  end)

  it("takes a graph for the steps that select and one for those that do not, on "
    .. dev:name(), function()
    local model, logits = tiny.attentive(dev), {}
    for _, graph in ipairs { false, true } do
      local engine = model:engine { blocks = 64, block_size = 4, max_seqs = 2,
        graph = graph, policy = kv.policy("quest", { ratio = 0.2, reuse_steps = 3 }) }
      local seqs, all = { engine:sequence(), engine:sequence() }, {}
      engine:prefill(seqs[1], { 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17 })
      engine:prefill(seqs[2], { 9, 8 })
      for step = 1, 12 do all[step] = engine:decode(seqs, { step, 2 * step }):list() end
      engine:decode({ seqs[1] }, { 5 })
      for step = 13, 21 do all[step] = engine:decode(seqs, { step, 7 }):list() end
      logits[graph] = all
      if graph then
        local keys = {}
        for key in pairs(engine.graphs) do keys[tostring(key)] = true end
        assert.same({ "1", "2", "2, reads again", "2, some select" },
          support.names(keys))
        assert.is_true((engine.graphs["2, reads again"] or 0) ~= 0)
      end
      engine.cache:close()
    end
    for step = 1, 21 do support.close(logits[true][step], logits[false][step], 1e-5) end
  end)

  it("goes through host memory on " .. dev:name(), function()
    local lines = script({ "decode", 1 }, times(5, { "decode", 1, 2 }),
      { "verify", { 4, 5 }, 1, 2 }, { "decode", 2, 1 })
    for i, case in ipairs(CASES) do
      local want = play(dev, case, { reuse_steps = 3 }, lines)
      for _, offload in ipairs { { slots = 2, slot_blocks = 1 },
                                 { hot_slots = 256 }, { hot_tokens = 450 } } do
        if (case[3] == 1) == (offload.hot_tokens ~= nil) then
          local outs = play(dev, case, { reuse_steps = 3 }, lines, { offload = offload })
          for s = 1, 2 do
            for step, out in ipairs(want[s]) do
              support.close(outs[s][step], out, 3e-6, 3e-6, ("case %d"):format(i))
            end
          end
        end
      end
    end
  end)
end)

describe("a policy whose selections are read again", function()
  it("selects anew after anything else that changes a sequence", function()
    for length, lines in pairs { [254] = { { "prefill", 1, 1 } },
                                 [241] = { { "truncate", 1, 240 } },
                                 [251] = { { "truncate", 1, 250 } },
                                 [253] = { { "truncate", 1, 200 },
                                           { "prefill", 1, 52 } } } do
      local all = script({ "decode", 1 }, { "decode", 1 }, unpack(lines))
      table.insert(all, { "decode", 1 })
      local _, own = play(cpu, CASES[1], nil, all)
      local _, got = play(cpu, CASES[1], { reuse_steps = 9 }, all)
      assert.same(own[length .. " 1"], got[length .. " 1"])
    end
  end)

  it("is the policy itself if it selects in each layer and step", function()
    local its = rig.new(cpu, { policy = "quest",
      options = { reuse_steps = 1, reuse_layers = 1 } })
    assert.is_nil(its.policy.kept)
    its.cache:close()
  end)

  it("forgets them at a reset", function()
    local its = rig.new(cpu, { policy = "quest",
      options = { ratio = 0.2, reuse_steps = 9 } })
    local asked, ask = 0, its.policy.kept.ask
    its.policy.kept.ask = function(...)
      asked = asked + 1
      return ask(...)
    end
    local seq = its.cache:sequence()
    local q, k = kv.rand(cpu, "f32", { 1, 8, 32 }), kv.rand(cpu, "f32", { 1, 2, 32 })
    for step = 1, 4 do
      if step == 3 then its.attention:reset() end
      its.batch:append({ seq }, { 1 })
      its.attention:begin(its.batch, false)
      for layer = 0, LAYERS - 1 do its.attention:forward(layer, q, k, k) end
      assert.equal(step < 3 and LAYERS or 2 * LAYERS, asked)
    end
    its.cache:close()
  end)

  it("reads for scores what those sequences have that select", function()
    local function bytes(more, ...)
      local its = rig.new(cpu, { policy = kv.policy("quest",
        with({ ratio = 0.2 }, more)) })
      local probe = kv.probe(its.attention)
      rig.play(cpu, { rig = its }, { { "prefill", 1, 255 }, { "prefill", 2, 63 },
        { "prefill", 3, 31 }, ... })
      its.cache:close()
      local reads = its.attention.reads
      assert.is_true(probe:metrics().bytes_share > 0)
      return reads.scored
    end
    local block = 2 * 32 * 4 * 2 * LAYERS -- bounds in f32 of two KV heads
    local list = 4 * 2 * LAYERS * (math.ceil(0.2 * 128) + 1)
    local both = { "decode", 1, 2 }
    assert.equal(20 * block, bytes(nil, both))
    assert.equal((20 + 22 + 22) * block, bytes(nil, both, both, both))
    assert.equal(20 * block, bytes({ reuse_steps = 3 }, both))
    assert.equal(20 * block + 2 * 2 * list, bytes({ reuse_steps = 3 }, both, both, both))
    -- the third sequence selects by itself, the others read again
    assert.equal(22 * block + 3 * list, bytes({ reuse_steps = 3 }, both,
      { "decode", 1, 2, 3 }))
    assert.equal(20 * block / 2, bytes({ reuse_layers = 2 }, both))
  end)

  it("shows the policy no tokens of sequences that do not select", function()
    local lens = {}
    local make = kv.policy.define { name = "looker", decode = true, own_bytes = 0,
      defaults = { ratio = 0.2 }, score = function(_, ctx)
        lens[#lens + 1] = ctx.lens:list()
        return ctx:new_scores(1):arange_()
      end }
    local _, its = rig.play(cpu, { policy = make { reuse_steps = 4, reuse_layers = 2 } },
      script({ "decode", 1 }, { "decode", 1, 2 }, { "verify", { 4, 1 }, 1, 2 }))
    assert.same({ { 251 }, { 0, 62 }, { 0, 0, 255, 0, 0 } }, lens)
    its.cache:close()
  end)

  it("reads in one layer what a layer without a window selected", function()
    local policy, asked = kv.policy("quest", { ratio = 0.2, reuse_layers = 2 }), {}
    local its = rig.new(cpu, { policy = policy, window = { 30, 0 } })
    local ask = policy.kept.ask
    policy.kept.ask = function(p, ctx)
      asked[#asked + 1] = ctx.layer
      return ask(p, ctx)
    end
    rig.play(cpu, { rig = its }, script({ "decode", 1 }, { "decode", 1, 2 }))
    assert.same({ 1, 1 }, asked)
    its.cache:close()
  end)

  it("is refused where it cannot be, in words", function()
    local raises = support.raises
    for _, name in ipairs { "reuse_steps", "reuse_layers" } do
      raises(name .. " is 0, expected a whole number >= 1", kv.policy, "quest",
        { [name] = 0 })
      raises(name .. " is 1.5, expected a whole number >= 1", kv.policy, "quest",
        { [name] = 1.5 })
      raises(("policy magicpig: %s is 2, expected 1: the policy has a bias"):format(name),
        kv.policy, "magicpig", { [name] = 2 })
      raises(("policy rocketkv: %s is 2, expected 1: the policy has evict, after which "
        .. "tokens have other numbers"):format(name), kv.policy, "rocketkv",
        { [name] = 2 })
      raises("the policy has a dataflow of its own", kv.policy, "nsa_branches",
        { [name] = 2 })
    end
    raises("reuse_steps is 2, expected 1: the policy has no decode = true", kv.policy,
      "xattention", { reuse_steps = 2 })
    local outer = kv.policy.define { name = "outer", decode = true, own_bytes = 0,
      init = function(self)
        self.inner = kv.policy.nest(self, "quest", { reuse_steps = 2 })
      end, score = function(self, ctx) return self.inner:score(ctx) end }
    raises("policy outer: quest has reuse_layers or reuse_steps, expected these of outer",
      rig.new, cpu, { policy = outer {} })
    local cache = kv.cache { device = "cpu", format = "f32", layers = 1, blocks = 8,
                             block_size = 16, kv_heads = 1, head_dim = 32 }
    raises("policy quest has reuse_steps = 2, expected a policy that selects blocks "
      .. "where a draft reuses its selection", kv.attention, { cache = cache, heads = 1,
      draft_policy = kv.policy("quest", { reuse_steps = 2 }), draft_reuse = true })
    local attention = kv.attention { cache = cache, heads = 1,
      decode_policy = kv.policy("quest", { reuse_steps = 2 }) }
    local batch = cache:batch { max_seqs = 1, max_tokens = 4 }
    batch:append({ cache:sequence() }, { 3 }, nil, { 0, 1, 1 })
    raises("begin: the batch has a draft tree, which a policy with reuse_steps does not "
      .. "go with", attention.begin, attention, batch, false)
    cache:close()
  end)
end)
