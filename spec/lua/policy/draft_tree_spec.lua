--- A decode step over a draft tree: every token sees the text and its ancestors only, so
-- it gets what it gets in a step that has only its own branch.
local kv = require "kvlab"
local support = require "spec.support"

local HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 4

local TIERS = {
  resident = {},
  ring = { offload = { slots = 2, slot_blocks = 1, max_seqs = 4 } },
  hot = { offload = { hot_slots = 128, max_seqs = 4 } },
  overlap = { offload = { hot_slots = 128, hot_overlap = true, max_seqs = 4 } },
}

local function random(dev, n, heads, seed)
  return kv.randn(dev, "f32", { n, heads, DIM }, { seed = seed })
end

--- An attention after a prompt of `length` tokens for each of two sequences.
local function open(dev, tier, policy, length)
  local function draw(...) return random(dev, ...) end
  local cache = kv.cache { device = dev, layers = 1, blocks = 64, block_size = BLOCK,
    kv_heads = KV_HEADS, head_dim = DIM, format = "f32", offload = tier.offload }
  local inv_freq = kv.rand(dev, "f32", { DIM / 2 }, { seed = 5 })
  local run = { cache = cache, seqs = { cache:sequence(), cache:sequence() },
    batch = cache:batch { max_seqs = 4, max_tokens = 400 },
    attention = kv.attention { cache = cache, heads = HEADS, decode_policy = policy,
                               inv_freq = inv_freq, max_seqs = 4 } }
  run.batch:append(run.seqs, { length, length + 3 })
  run.attention:begin(run.batch, true)
  local n = 2 * length + 3
  run.attention:forward(0, draw(n, HEADS, 1), draw(n, KV_HEADS, 2), draw(n, KV_HEADS, 3))
  return run
end

--- A step of the nodes that `rows` names, one list for each sequence, by the numbers that
-- are drawn for `count` nodes. Returns the outputs of the rows, one after the other.
local function step(run, rows, count, parents)
  local dev = run.cache.device
  local members, counts, index = {}, {}, {}
  for s, list in ipairs(rows) do
    if #list > 0 then members[#members + 1], counts[#counts + 1] = run.seqs[s], #list end
    for _, node in ipairs(list) do index[#index + 1] = (s - 1) * count + node - 1 end
  end
  local ids = kv.from(dev, "i32", index)
  local function rows_of(heads, seed)
    return random(dev, 2 * count, heads, seed):reshape { 2 * count, heads * DIM }
      :gather_rows(ids):reshape { #index, heads, DIM }
  end
  run.batch:append(members, counts, nil, parents)
  run.attention:begin(run.batch, false)
  return run.attention:forward(0, rows_of(HEADS, 7), rows_of(KV_HEADS, 8),
    rows_of(KV_HEADS, 9))
end

local function all_of(count)
  local list = {}
  for i = 1, count do list[i] = i end
  return list
end

local function random_parents(count, seed)
  local rng, parents = support.rng(seed), {}
  for i = 1, count do parents[i] = rng(i) end
  return parents
end

--- The node and its ancestors, the oldest first.
local function branch_of(parents, node)
  local list = {}
  while node > 0 do
    table.insert(list, 1, node)
    node = parents[node]
  end
  return list
end

local function specs(dev, within)
  local function check(tier, name, o, count, length)
    local parents, both = { random_parents(count, 3), random_parents(count, 4) }, {}
    for s = 1, 2 do
      for i = 1, count do both[#both + 1] = parents[s][i] end
    end
    local run = open(dev, tier, kv.policy(name, o), length)
    local out = step(run, { all_of(count), all_of(count) }, count, both)
    for s = 1, 2 do
      for node = 1, count, math.ceil(count / 6) do
        local branch, rows = branch_of(parents[s], node), { {}, {} }
        rows[s] = branch
        local alone = open(dev, tier, kv.policy(name, o), length)
        local want = step(alone, rows, count)
        support.close(out:narrow((s - 1) * count + node - 1, 1),
          want:narrow(#branch - 1, 1), within, within,
          ("%s, sequence %d, token %d"):format(name, s, node))
        alone.cache:close()
      end
    end
    run.attention:take_back { count, count }
    assert.equal(length, run.seqs[1]:length())
    run.cache:close()
  end

  for tier_name, tier in pairs(TIERS) do
    it("shows a token its ancestors and the text, through " .. tier_name, function()
      check(tier, "full", {}, 7, 30)
      check(tier, "full", {}, 70, 30)
      check(tier, "quest", { ratio = 1 }, 9, 29)
    end)
  end

  it("is a chain when each token follows the one before", function()
    local a = open(dev, {}, kv.policy "quest", 40)
    local b = open(dev, {}, kv.policy "quest", 40)
    local chain = { 0, 1, 2, 3, 0, 1, 2, 3 }
    support.equal(step(a, { all_of(4), all_of(4) }, 4, chain):narrow(3, 1),
      step(b, { all_of(4), all_of(4) }, 4):narrow(3, 1))
  end)

  it("has parents of the same sequence that come before their children", function()
    local run = open(dev, {}, kv.policy "full", 5)
    local function refuses(counts, parents, words)
      support.refuses(function() run.batch:append(run.seqs, counts, nil, parents) end,
        words)
    end
    refuses({ 2, 1 }, { 0, 1 }, "append: parents has 2 entries, expected 3")
    refuses({ 2, 1 }, { 0, 2, 0 },
      "append: the parent of token 2 of sequence 1 is 2, expected 0 ... 1")
    refuses({ 2, 1 }, { 0, 1, 1 },
      "append: the parent of token 1 of sequence 2 is 1, expected 0 ... 0")
    refuses({ 2, 1 }, { 0, 1, 0.5 }, "append: the parent of token 1 of sequence 2 is 0.5")
    refuses({ 1, 129 }, random_parents(130, 1),
      "append: the tree of sequence 2 has 129 tokens, expected at most 128")
    refuses({ 1, 1 }, "chain", "append: parents is")
    assert.equal(5, run.seqs[1]:length())
  end)
end

describe("a draft tree", function() specs(kv.device "cpu", 3e-6) end)
describe("a draft tree on cuda #gpu", function()
  if kv.cuda_available() then specs(kv.device "cuda", 1e-5) end
end)
