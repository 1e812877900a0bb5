--- Drafts that a policy makes on the sequences themselves, and dense attention verifies:
-- the tokens are those of greedy decoding, and what was taken back of a draft leaves
-- nothing behind in the policy. For every policy, on every memory tier, launched and
-- replayed. Now and then a token of a draft is replaced by a random one, so that drafts
-- of every length are accepted.
-- Tolerance: the same kernels on the same numbers, 1e-5; equal tokens.
local emitting = require "spec.models.emitting"
local kv = require "kvlab"
local reuse = require "kvlab.policy.reuse"
local support = require "spec.support"
local tiny = require "spec.models.tiny"
local tried = require "spec.tried_policies"

local VOCAB, TOKENS = 97, support.is_full and 60 or 24

local TIERS = { resident = {}, ring = { offload = { slots = 2, slot_blocks = 2 } },
                ["hot cache"] = { offload = { hot_slots = 400 } } }

-- A policy whose selection depends on how many steps its sequence had.
local counting = kv.policy.define {
  name = "counting", decode = true, eager = true,
  defaults = { ratio = 0.3, recent = 1 },
  step_begin = function(self, ctx)
    for _, seq in ipairs(ctx.sequences) do
      local kept = seq.state[self] or { steps = 0 }
      kept.steps = kept.steps + 1
      seq.state[self] = kept
    end
  end,
  score = function(self, ctx)
    return ctx:score_on_host(function(row, blocks, i)
      local steps = ctx.sequences[i + 1].state[self].steps
      for block = 0, blocks - 1 do row[block] = (7 * block + 5 * steps) % 11 end
    end)
  end,
}
local OWN = { emitting = emitting, counting = counting }

local names = tried.names "decode"
if not tried.own then
  for _, name in ipairs { "emitting", "counting" } do names[#names + 1] = name end
end

local function new_policy(name)
  return OWN[name] and OWN[name] {}
    or kv.policy(name, name == "h2o_blocks" and { ratio = 0.3 } or nil)
end

local function may_reuse(name) return (pcall(reuse.expect_policy, new_policy(name))) end

local PROMPTS = { {}, {} }
for t = 1, 30 do
  PROMPTS[1][t] = t * 31 % VOCAB
  if t < 18 then PROMPTS[2][t] = t * 17 % VOCAB end
end

--- An engine with two sequences, and the token that follows each.
local function open(model, o)
  local all = { blocks = 200, block_size = 4, chunk = 48, max_seqs = 2, max_blocks = 96 }
  for key, value in pairs(o) do all[key] = value end
  local s = { engine = model:engine(all), seqs = {}, newest = {}, said = {} }
  for i, prompt in ipairs(PROMPTS) do
    s.seqs[i], s.said[i] = s.engine:sequence(), {}
    s.newest[i] = s.engine:prefill(s.seqs[i], prompt):argmax():list()[1]
  end
  return s
end

--- One draft of counts[i] tokens for each sequence, verified. choose: see engine:draft.
-- Adds what was accepted to s.said. Returns how many tokens of each draft were.
local function round(s, counts, choose)
  s.engine:draft(s.seqs, counts, s.newest, choose)
  local own, tokens = {}, {}
  for i, count in ipairs(counts) do
    own[i] = count + 1
    tokens[#tokens + 1] = s.newest[i]
    for _ = 1, count do tokens[#tokens + 1] = 0 end
  end
  local says = s.engine:verify(s.seqs, own, tokens, nil, counts):argmax():list()
  local ids, row, accepted, taken = s.engine.batch.tokens:list(), 0, {}, {}
  for i, count in ipairs(counts) do
    local n = 0
    while n < count and ids[row + n + 2] == says[row + n + 1] do n = n + 1 end
    for t = 1, n + 1 do table.insert(s.said[i], ids[row + t]) end
    s.newest[i], accepted[i], taken[i] = says[row + n + 1], n, count - n
    row = row + count + 1
  end
  s.engine:take_back(taken)
  return accepted
end

--- Writes the likeliest tokens, but random ones where is_wrong(step) says so.
local function choosing(rng, is_wrong)
  return function(logits, step, ids)
    logits:argmax(ids)
    if is_wrong(step) then
      local list = {}
      for i = 1, ids:size(0) do list[i] = rng(VOCAB) end
      ids:copy_(kv.from("cpu", "i32", list))
    end
  end
end

local function recorded(engine)
  local n = 0
  for _, one in pairs(engine.graphs) do n = n + (one and 1 or 0) end
  return n
end

support.each_device(function(dev)
  local model = tiny.attentive(dev)
  local want
  lazy_setup(function()
    local s = open(model, {})
    want = { {}, {} }
    for _ = 1, TOKENS do
      for i = 1, 2 do table.insert(want[i], s.newest[i]) end
      s.newest = s.engine:decode(s.seqs, s.newest):argmax():list()
    end
    s.engine.cache:close()
  end)

  local function check(name, tier, graph, reuses)
    local s = open(model, { draft_policy = new_policy(name), graph = graph,
                            draft_reuse = reuses, offload = TIERS[tier].offload })
    local rng, lengths = support.rng(7), {}
    while #s.said[1] < TOKENS or #s.said[2] < TOKENS do
      local most = 1 + rng(5)
      local counts = { most, rng(2) == 0 and most or 1 + rng(5) }
      for i = 1, 2 do -- one of them may be ahead of the other
        counts[i] = math.max(1, math.min(counts[i], TOKENS + 6 - #s.said[i]))
      end
      local accepted = round(s, counts,
        choosing(rng, function() return rng(4) == 0 end))
      for i = 1, 2 do
        lengths[tostring(accepted[i])] = true
        assert.equal(#PROMPTS[i] + #s.said[i], s.seqs[i]:length())
      end
    end
    for i = 1, 2 do
      assert.same(want[i], { unpack(s.said[i], 1, TOKENS) }, name)
    end
    assert.is_true(#support.names(lengths) >= 2, name) -- different numbers were right
    s.engine.cache:close()
  end

  --- One engine makes longer drafts than the other, of which the rest is taken back.
  local function check_left(name, graph)
    -- b makes no step of a draft but those that a keeps
    local a = open(model, { draft_policy = new_policy(name), graph = graph })
    local b = open(model, { draft_policy = new_policy(name), graph = graph })
    local rng = support.rng(3)
    for number = 1, 14 do
      local right, logits = rng(4), { {}, {} }
      local function draft(s, count, list)
        local wrong = support.rng(number)
        local choose = choosing(wrong, function(step) return step > right end)
        return round(s, { count, count }, function(rows, step, ids)
          if step <= right + 1 then list[step] = rows:list() end
          choose(rows, step, ids)
        end)
      end
      local kept = draft(a, 5, logits[1])
      -- a random token may be the right one, or a likely one wrong
      local most = math.max(kept[1], kept[2])
      if kept[1] ~= kept[2] or most > right then break end
      draft(b, most + 1, logits[2])
      for step = 1, math.min(#logits[1], #logits[2]) do
        support.close(logits[1][step], logits[2][step], 1e-5, 1e-5,
          ("%s, draft %d, step %d"):format(name, number, step))
      end
      assert.same(a.said, b.said)
    end
    a.engine.cache:close()
    b.engine.cache:close()
  end

  --- Of the ways to run a case, the i-th one; --full and the specs of one policy run all.
  local function some(ways, i)
    return tried.own and ways or support.one_each(ways, i, 1)
  end

  --- The ways in which a policy drafts through a tier: launched, replayed, and with the
  -- selection of the first step.
  local function ways_of(name, tier)
    local can_replay = tier ~= "ring"
    local ways = { { false }, can_replay and { true } or nil }
    if may_reuse(name) then ways[#ways + 1] = { can_replay, true } end
    return ways
  end

  for i, name in ipairs(names) do
    local tiers = support.names(TIERS)
    for k, tier in ipairs(tried.own and tiers or support.one_each(tiers, i, 2)) do
      it(("by %s, through %s, changes no token on %s #policy"):format(name, tier,
        dev:name()), function()
        for _, way in ipairs(some(ways_of(name, tier), i + k)) do
          check(name, tier, unpack(way))
        end
      end)
    end

    it(("by %s leaves nothing of the tokens that were wrong on %s #policy"):format(name,
      dev:name()), function()
      for _, graph in ipairs(some({ false, true }, i)) do check_left(name, graph) end
    end)
  end

  it("that no step verifies leaves nothing on " .. dev:name(), function()
    local a = open(model, { draft_policy = kv.policy("h2o_blocks", { ratio = 0.3 }) })
    local b = open(model, { draft_policy = kv.policy("h2o_blocks", { ratio = 0.3 }) })
    for _ = 1, 6 do
      a.engine:draft(a.seqs, { 4, 2 }, a.newest)
      for _, s in ipairs { a, b } do
        for i = 1, 2 do table.insert(s.said[i], s.newest[i]) end
        s.newest = s.engine:decode(s.seqs, s.newest):argmax():list()
      end
      local first, second = {}, {}
      round(a, { 3, 3 }, function(logits, step, ids)
        first[step] = logits:list()
        logits:argmax(ids)
      end)
      round(b, { 3, 3 }, function(logits, step, ids)
        second[step] = logits:list()
        logits:argmax(ids)
      end)
      for step = 1, 3 do support.close(first[step], second[step], 1e-5, 1e-5) end
      assert.same(a.said, b.said)
    end
    a.engine.cache:close()
    b.engine.cache:close()
  end)

  it("turns a token only where two are as good as equal on " .. dev:name(), function()
    -- the second half of the vocabulary are the doubles of the first half: their logits
    -- differ by about one in 2^20, which the order of a sum may turn
    local twins = tiny.attentive(dev)
    local half = math.floor(VOCAB / 2)
    twins.embedding:narrow(half, half)
      :copy_(twins.embedding:narrow(0, half):mul(1 + 2 ^ -20))
    local s = open(twins, { draft_policy = kv.policy "quest" })
    local plain = open(twins, {})
    local turned, tokens = 0, 0
    for _ = 1, 30 do
      local first = s.seqs[1]:length()
      s.engine:draft(s.seqs, { 4, 4 }, s.newest)
      local rows = { s.newest[1], 0, 0, 0, 0, s.newest[2], 0, 0, 0, 0 }
      local logits = s.engine:verify(s.seqs, { 5, 5 }, rows, nil, { 4, 4 }):clone()
      local ids, says = s.engine.batch.tokens:list(), logits:argmax():list()
      for t = 0, 4 do -- the same tokens, one by one
        local own = plain.engine:decode(plain.seqs, { ids[1 + t], ids[6 + t] })
        local best = own:argmax():list()
        for i = 1, 2 do
          tokens = tokens + 1
          local said, list = says[5 * (i - 1) + t + 1], own:index(i - 1):list()
          if said ~= best[i] then
            turned = turned + 1
            local gap = list[best[i] + 1] - list[said + 1]
            assert.is_true(gap <= 1e-5 * math.abs(list[best[i] + 1]), gap)
          end
        end
      end
      s.newest = { says[5], says[10] }
      s.engine:take_back { 0, 0 }
      assert.equal(first + 5, s.seqs[1]:length())
    end
    -- of all tokens, which each have a double, some may turn; without doubles none does
    assert.equal(300, tokens)
    assert.is_true(turned < tokens / 4, turned)
    s.engine.cache:close()
    plain.engine.cache:close()
  end)

  it("selects once if it reuses its selection, on " .. dev:name(), function()
    local calls, selections = 0, 0
    local p = kv.policy("quest", { blocks = 3 })
    local select = p.select_blocks
    function p.select_blocks(...)
      calls = calls + 1
      return select(...)
    end
    local s = open(model, { draft_policy = p, draft_reuse = true, block_size = 4 })
    local attention, first, ends = s.engine.attention, {}, 0
    local over, over_list = attention.over, attention.over_list
    function attention.over(self, selection, ctx, ...)
      if ctx.is_draft then
        first[ctx.layer] = { lists = selection:list(), n = selection:size(2),
                             blocks = {} }
        for _, seq in ipairs(ctx.sequences) do
          table.insert(first[ctx.layer].blocks, seq:blocks())
        end
      end
      return over(self, selection, ctx, ...)
    end
    --- The blocks of the first step, and those that were begun since.
    function attention.over_list(self, list, ctx, ...)
      local got, wanted = over_list(self, list, ctx, ...), {}
      local before, n = first[ctx.layer], first[ctx.layer].n
      for row = 0, 2 * #ctx.sequences - 1 do
        local seq, blocks = math.floor(row / 2) + 1, {}
        for at = n * row + 1, n * row + n do blocks[#blocks + 1] = before.lists[at] end
        while blocks[#blocks] == -1 do blocks[#blocks] = nil end
        for block = before.blocks[seq], ctx.sequences[seq]:blocks() - 1 do
          blocks[#blocks + 1], ends = block, ends + 1
        end
        for at = 1, n + 3 do wanted[(n + 3) * row + at] = blocks[at] or -1 end
      end
      local lists = kv.from(dev, "i32", { #ctx.sequences, 2, n + 3 }, wanted)
      assert.same(self:direct(lists, ctx):list(), got:list())
      selections = selections + 1
      return got
    end
    for number = 1, 5 do
      calls, selections = 0, 0
      round(s, { 5, 5 })
      assert.equal(model.config.layers, calls, number)
      assert.equal(4 * calls, selections)
    end
    assert.is_true(ends > 0)
    s.engine.cache:close()
  end)

  it("selects by its own tokens where it goes on alone, reusing, on " .. dev:name(),
    function()
      local logits = {}
      for _, is_dirty in ipairs { false, true } do
        local e = model:engine { blocks = 200, block_size = 1, max_seqs = 2,
          draft_policy = kv.policy("quest", { blocks = 5, recent = 1, sink = 0 }),
          draft_reuse = true }
        if is_dirty then -- blocks whose summaries are those of other tokens
          local other, tokens = e:sequence(), {}
          for t = 1, 150 do tokens[t] = t * 53 % VOCAB end
          e:prefill(other, tokens)
          e:finish(other)
        end
        local seqs, all = { e:sequence(), e:sequence() }, {}
        for i = 1, 2 do e:prefill(seqs[i], PROMPTS[i]) end
        e:draft(seqs, { 9, 5 }, { 3, 4 }, function(rows, step, ids)
          all[step] = rows:list()
          ids:fill_(7 * step)
        end)
        logits[is_dirty] = all
        e.cache:close()
      end
      for step = 1, 9 do support.close(logits[true][step], logits[false][step], 1e-5) end
    end)

  it("finds the likeliest tokens in a graph as without one on " .. dev:name(), function()
    local function quest() return kv.policy("quest", { ratio = 0.3 }) end
    local a = open(model, { draft_policy = quest(), graph = true })
    local b = open(model, { draft_policy = quest() })
    local rng = support.rng(9)
    for number = 1, 14 do
      local counts, ids = { 1 + rng(5), 1 + rng(5) }, {}
      if number == 8 then counts = { 130, 2 } end -- more steps than there was room for
      b.engine:draft(b.seqs, counts, b.newest, function(logits, step, into)
        logits:argmax(into)
        ids[step] = into:list()
      end)
      local got = a.engine:draft(a.seqs, counts, a.newest)
      assert.same({ math.max(unpack(counts)), 2 }, got:dims())
      for step, list in ipairs(ids) do
        assert.same(list, got:index(step - 1):narrow(0, #list):list(),
          ("draft %d, step %d"):format(number, step))
      end
      if number ~= 8 then assert.same(round(b, counts), round(a, counts)) end
    end
    assert.same(b.said, a.said)
    local taken = 0
    for key, one in pairs(a.engine.graphs) do
      if one and tostring(key):find "likeliest" then taken = taken + 1 end
    end
    assert.is_true(taken > 0)
    a.engine.cache:close()
    b.engine.cache:close()
  end)

  it("takes one graph for its steps and one for each check on " .. dev:name(), function()
    for _, tier in ipairs { "resident", "hot cache" } do
      local s = open(model, { draft_policy = kv.policy("h2o_blocks", { ratio = 0.2 }),
                              graph = true, offload = TIERS[tier].offload })
      local rng, keys = support.rng(5), {}
      for _ = 1, 12 do -- tokens begin at every place of a block
        round(s, { 4, 4 }, choosing(rng, function() return rng(3) == 0 end))
      end
      for key in pairs(s.engine.graphs) do keys[#keys + 1] = tostring(key) end
      assert.equal(2, #keys, table.concat(keys, "; "))
      assert.equal(2, recorded(s.engine))
      s.engine.cache:close()
      for _, reuses in ipairs { false, true } do -- the choice is in the graph of a step
        s = open(model, { draft_policy = kv.policy "quest", draft_reuse = reuses,
                          graph = true, offload = TIERS[tier].offload })
        for _ = 1, 12 do round(s, { 4, 4 }) end
        assert.equal(reuses and 3 or 2, recorded(s.engine))
        s.engine.cache:close()
      end
    end
  end)
end)

describe("a draft policy", function()
  local model = tiny.tiny(kv.device "cpu")

  it("is refused with the words of what is wrong", function()
    support.refuses(function()
      model:engine { draft_policy = kv.policy "xattention" }
    end, "policy xattention does not select in decode", "a draft")
    support.refuses(function()
      model:engine { draft_policy = kv.policy "magicpig", draft_reuse = true }
    end, "policy magicpig has a bias, a mask, a log_weight or emit", "reuses")
    support.refuses(function()
      model:engine { draft_policy = kv.policy "nsa_branches", draft_reuse = true }
    end, "policy nsa_branches has a dataflow of its own")
    support.refuses(function() model:engine { draft_reuse = true } end,
      "draft_reuse is true, expected false without a draft_policy")
    local e = model:engine { blocks = 20 }
    local seq = e:sequence()
    e:prefill(seq, { 1, 2, 3 })
    support.refuses(function() e:draft({ seq }, { 2 }, { 4 }) end,
      "the attention has no draft_policy")
    e.cache:close()
    e = model:engine { blocks = 20, draft_policy = kv.policy "quest" }
    seq = e:sequence()
    e:prefill(seq, { 1, 2, 3 })
    support.refuses(function() e:draft({ seq }, { 0 }, { 4 }) end,
      "count 1 is 0, expected a whole number >= 1")
    support.refuses(function() e:draft({ seq }, { 1, 1 }, { 4 }) end,
      "2 counts and 1 tokens")
    support.refuses(function() e:draft({ seq }, { 1 }, { 97 }) end, "token 0 is 97")
    e:draft({ seq }, { 2 }, { 4 })
    assert.equal(3, seq:length())
    support.refuses(function() e:take_back { 1 } end, "the last step was none")
    e.cache:close()
  end)
end)
