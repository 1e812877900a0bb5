--- Steps that a graph replays are those that the engine computes: for every policy, in a
-- random script of decode steps, drafts of which tokens are taken back, and prompts. The
-- tokens of drafts are spread over the sequences in another way at each step.
-- Tolerance: the same kernels in the same order, 1e-5.
local emitting = require "spec.models.emitting"
local kv = require "kvlab"
local support = require "spec.support"
local tiny = require "spec.models.tiny"
local tried = require "spec.tried_policies"

local STEPS, VOCAB = support.is_full and 90 or 45, 97

-- Policies that no graph can record.
local EAGER = { infllm = true, nsa_branches = true }
local function is_eager(name) return EAGER[name] or tried.own and tried.is_eager(name) end

local TIERS = { resident = {}, ["hot cache"] = { offload = { hot_slots = 400 } } }

-- So that what a policy counts decides about enough blocks.
local OPTIONS = { h2o_blocks = { ratio = 0.3 } }

-- Policies with a budget that differs among layers and heads and is divided besides.
local RAGGED = { "quest", "h2o_blocks", "gsa", "gsa_on_device", "magicpig", "twilight" }

local function ragged_options()
  return { ratio = kv.from("cpu", "f32", { 2, 2 }, { 0.4, 0.1, 0.2, 0.5 }),
           split = kv.split("adaptive", { floor = 0.3 }), min_blocks = 0 }
end

local function open(model, name, tier, graph, is_ragged)
  local policy = name == "emitting" and emitting {}
    or kv.policy(name, is_ragged and ragged_options() or OPTIONS[name])
  local e = model:engine { blocks = 200, chunk = 64, block_size = 4, max_seqs = 2,
    max_blocks = 96, graph = graph, policy = policy, offload = TIERS[tier].offload }
  local seqs = { e:sequence(), e:sequence() }
  e:prefill(seqs[1], { 5, 6, 7 })
  e:prefill(seqs[2], { 9 })
  return { engine = e, seqs = seqs }
end

--- A step of the script: its name, and run(s), which returns the logits.
local function random_step(rng)
  local tokens = {}
  for i = 1, 9 do tokens[i] = rng(VOCAB) end
  local kind, first = rng(10), 1 + rng(2)
  if kind == 0 then
    return "prompt", function(s)
      return s.engine:prefill(s.seqs[first], { unpack(tokens, 1, 6) }):list()
    end
  elseif kind < 5 then
    local counts = { 1 + rng(8) }
    counts[2] = 9 - counts[1]
    local taken = { rng(counts[1] + 1), rng(counts[2] + 1) }
    return ("drafts of %d and %d tokens"):format(counts[1], counts[2]), function(s)
      local logits = s.engine:verify(s.seqs, counts, tokens):list()
      s.engine:take_back(taken)
      return logits
    end
  end
  local count = rng(4) == 0 and 1 or 2
  return "decode of " .. count, function(s)
    local seqs = { s.seqs[first], count > 1 and s.seqs[3 - first] or nil }
    return s.engine:decode(seqs, { unpack(tokens, 1, count) }):list()
  end
end

local names = tried.names "decode"
if not tried.own then names[#names + 1] = "emitting" end

support.each_device(function(dev)
  local model = tiny.tiny(dev)
  local function replays(name, tier, is_ragged)
    if is_eager(name) then return end
    it(("%s%s, %s, replays steps on %s #policy"):format(name,
      is_ragged and " by ragged budgets" or "", tier, dev:name()), function()
      local rng, graphs = support.rng(11), 0
      local eager = open(model, name, tier, false, is_ragged)
      local graph = open(model, name, tier, true, is_ragged)
      for step = 1, STEPS do
        local kind, run = random_step(rng)
        local want = run(eager)
        local words = ("step %d: %s"):format(step, kind)
        support.close(run(graph), want, 1e-5, 1e-5, words)
      end
      for _, is_recorded in pairs(graph.engine.graphs) do
        graphs = graphs + (is_recorded and 1 or 0)
      end
      assert.is_true(graphs > 3, graphs)
      eager.engine.cache:close()
      graph.engine.cache:close()
    end)
  end

  -- Policies meet the two tiers in turn; --full and the specs of one policy run both.
  local function replay_all(list, is_ragged)
    local tiers = support.names(TIERS)
    for i, name in ipairs(list) do
      for _, tier in ipairs(tried.own and tiers or support.one_each(tiers, i, 1)) do
        replays(name, tier, is_ragged)
      end
    end
  end
  replay_all(names)
  replay_all(tried.own and names or RAGGED, true)

  it("count what they wrote, and load no block again, on " .. dev:name(), function()
    local s = open(model, "full", "hot cache", true)
    local e, tier = s.engine, s.engine.cache.tier
    for _ = 1, 3 do e:decode({ s.seqs[1] }, { 1 }) end -- the third one is replayed
    e:prefill(s.seqs[2], { 1, 2, 3 }) -- launched
    e:decode({ s.seqs[1] }, { 1 })
    local loaded, _, written = tier.moved:item(), tier:bytes()
    for _ = 1, 4 do e:decode({ s.seqs[1] }, { 1 }) end
    assert.equal(loaded, tier.moved:item())
    local _, now = tier:bytes()
    local c = model.config -- K and V of 4 tokens, in f32
    assert.equal(4 * c.layers * 2 * c.kv_heads * c.head_dim * 4, now - written)
    e.cache:close()
  end)

  it("do not keep the memory of a cache that is closed, on " .. dev:name(), function()
    local e = open(tiny.tiny(dev), "quest", "resident", true).engine
    local seq = e:sequence()
    e:prefill(seq, { 5, 6, 7 })
    for id = 1, 4 do e:decode({ seq }, { id }) end
    local bytes, live = e.cache.memory:bytes(), dev:stats().bytes_live
    e.cache:close()
    assert.is_true(live - dev:stats().bytes_live >= bytes)
  end)

  it("are launched while a probe looks, on " .. dev:name(), function()
    local function shares(graph)
      local s, means = open(model, "quest", "resident", graph), {}
      local e = s.engine
      for _ = 1, 3 do e:decode({ s.seqs[1] }, { 1 }) end
      local probe = kv.probe(e.attention)
      for step = 1, 6 do
        e:decode({ s.seqs[1] }, { step })
        means[step] = probe:metrics().bytes_share
        probe:reset()
      end
      probe:detach()
      e:decode({ s.seqs[1] }, { 1 })
      e.cache:close()
      return means
    end
    local seen = shares(true)
    assert.same(shares(false), seen)
    assert.is_true(seen[6] > 0 and seen[6] <= 2, seen[6])
  end)
end)
