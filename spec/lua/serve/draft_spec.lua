--- Drafts from the text itself: greedy answers are those without drafts, token for token,
-- whatever is in the batch, wherever KV lies, and whenever an answer ends.
local kv = require "kvlab"
local draft = require "kvlab.serve.draft"
local support = require "spec.support"
local tried = require "spec.tried_policies"
local tiny = require("spec.models.tiny").tiny

local cpu = kv.device "cpu"
local model = tiny(cpu)

local function engine(o)
  local all = { blocks = 80, block_size = 4, chunk = 48, max_seqs = 6, max_blocks = 40 }
  for key, value in pairs(o or {}) do all[key] = value end
  return model:engine(all)
end

--- Texts in which runs of tokens come again.
local PROMPTS = {}
for i, period in ipairs { 7, 5, 11, 3, 40 } do
  PROMPTS[i] = {}
  for t = 1, 18 + 5 * i do PROMPTS[i][t] = ((t % period) * 31 + 7 * i) % 97 end
end

local function generate(e, prompts, o)
  local answers = kv.generate(e, prompts, o)
  e.cache:close()
  return answers
end

local function ids_of(answers)
  local list = {}
  for i, answer in ipairs(answers) do list[i] = answer.ids end
  return list
end

--- Runs a server whose steps fail now and then; in the end its requests have what `want`
-- has.
local function ends_right(server, its_engine, requests, want)
  local raised = 0
  while not pcall(server.run, server) do
    raised = raised + 1
    assert.is_true(raised < 400)
  end
  assert.is_true(raised > 3)
  for i, r in ipairs(requests) do assert.same(want[i].ids, r:output()) end
  server:close()
  its_engine.cache:close()
end

describe("a draft", function()
  local function propose(o, tokens, most)
    local d = draft.take(o)
    local n = draft.propose(d, tokens, #tokens, most or 100)
    assert.equal(n, #d.ids)
    return d.ids
  end

  it("is what followed the last tokens where they came last before", function()
    local text = { 1, 2, 3, 4, 5, 6, 1, 2, 3, 7, 8, 9, 1, 2, 3 }
    assert.same({ 7, 8, 9 }, propose({ tokens = 3 }, text))
    assert.same({ 7, 8 }, propose({ tokens = 3 }, text, 2))
    assert.same({}, propose({ tokens = 3 }, text, 0))
    assert.same({ 7 }, propose({ ngram = 1, tokens = 1 }, text))
    assert.same({}, propose({ ngram = 4 }, text))
  end)

  it("goes on with its own tokens at the end of the text", function()
    assert.same({ 5, 6, 5, 6, 5 }, propose({ ngram = 2, tokens = 5 }, { 9, 5, 6, 5, 6 }))
    assert.same({ 4, 4, 4 }, propose({ ngram = 3, tokens = 3 }, { 4, 4, 4, 4 }))
  end)

  it("is empty while the text is short or new", function()
    assert.same({}, propose({}, { 1, 2, 3 }))
    assert.same({}, propose({}, { 1, 1 }))
    assert.same({}, propose({}, { 1, 2, 3, 4, 5, 6 }))
  end)

  it("is accepted up to the first token that the model does not say", function()
    local says = { 9, 1, 2, 3, 4 }
    assert.equal(3, draft.accepted({ 1, 2, 3 }, says, 2))
    assert.equal(1, draft.accepted({ 1, 5, 3 }, says, 2))
    assert.equal(0, draft.accepted({ 5, 2, 3 }, says, 2))
    assert.equal(0, draft.accepted({}, says, 2))
  end)
end)

describe("an answer with drafts", function()
  local TIERS = {
    resident = {}, graph = { graph = true },
    ring = { offload = { slots = 2, slot_blocks = 2 } },
    ["hot cache"] = { offload = { hot_slots = 240 } },
    graph_hot = { graph = true, offload = { hot_slots = 240 } },
  }
  local want
  lazy_setup(function()
    want = generate(engine(), PROMPTS, { max_tokens = 40 })
  end)

  for nth, tier in ipairs(support.names(TIERS)) do
    it("has the tokens of one without, through " .. tier, function()
      local drafts = { {}, { ngram = 1, tokens = 4 }, { ngram = 2, tokens = 20 } }
      for _, d in ipairs(support.one_each(drafts, nth, 2)) do
        local got = generate(engine(TIERS[tier]), PROMPTS, { max_tokens = 40, draft = d })
        assert.same(ids_of(want), ids_of(got))
        local accepted, steps = 0, 0
        for i, answer in ipairs(got) do
          local its = answer.draft
          assert.equal("length", answer.finish_reason)
          assert.is_true(its.accepted <= its.proposed)
          -- the prompt's step gives the first token, every later one its own and a draft
          assert.equal(40, 1 + its.steps + its.accepted, "answer " .. i)
          accepted, steps = accepted + its.accepted, steps + its.steps
        end
        assert.is_true(accepted > 10, "some drafts are right")
        assert.is_true(steps < 5 * 39, "and save steps")
      end
    end)
  end

  it("has them under a policy, whose selections do not depend on drafts", function()
    for _, name in ipairs { "quest", "block_mean", "oracle", "streaming_blocks",
                             "union" } do
      local function run(d)
        local e = engine { policy = kv.policy(name, { ratio = 0.4, recent = 2 }) }
        return ids_of(generate(e, PROMPTS, { max_tokens = 40, draft = d }))
      end
      assert.same(run(), run {})
    end
  end)

  it("runs with every policy #policy", function()
    for _, name in ipairs(tried.names "decode") do
      local got = generate(engine { policy = kv.policy(name) }, PROMPTS,
        { max_tokens = 24, draft = { ngram = 1 } })
      for _, answer in ipairs(got) do assert.equal(24, #answer.ids, name) end
    end
  end)

  it("changes nothing for requests without drafts in its batch", function()
    local function prompts(d)
      return { { prompt = PROMPTS[1], draft = d }, PROMPTS[2],
               { prompt = PROMPTS[3], temperature = 0.9, seed = 4 },
               { prompt = PROMPTS[4], draft = d },
               { prompt = PROMPTS[5], logprobs = 2 } }
    end
    local plain = generate(engine(), prompts(), { max_tokens = 30 })
    local got = generate(engine(), prompts { ngram = 1 }, { max_tokens = 30 })
    assert.same(ids_of(plain), ids_of(got))
    assert.is_nil(got[2].draft)
    for i, one in ipairs(got[5].logprobs) do
      local other = plain[5].logprobs[i]
      assert.equal(other.id, one.id)
      assert.is_true(math.abs(other.logprob - one.logprob) < 1e-4)
    end
  end)

  it("ends with its stop token, though the draft goes on", function()
    for at = 2, 30, 3 do
      local stop = want[2].ids[at]
      local function run(d)
        return generate(engine(), { PROMPTS[2] }, { max_tokens = 40, draft = d,
          stop_tokens = { stop } })[1]
      end
      local plain, got = run(), run { ngram = 1 }
      assert.same(plain.ids, got.ids)
      assert.equal("stop", got.finish_reason)
    end
  end)

  it("has exactly max_tokens tokens", function()
    for n = 1, 12 do
      local got = generate(engine(), PROMPTS, { max_tokens = n, draft = { ngram = 1 } })
      for i, answer in ipairs(got) do
        assert.same({ unpack(want[i].ids, 1, n) }, answer.ids)
      end
    end
  end)

  it("leaves no block behind, and shares what it computed", function()
    local e = engine()
    local server = kv.serve { engine = e }
    local before = e.cache:blocks_free()
    for _ = 1, 2 do
      local got = kv.generate(server, PROMPTS, { max_tokens = 40, draft = { ngram = 1 } })
      assert.same(ids_of(want), ids_of(got))
    end
    local stats = server:stats()
    assert.is_true(stats.blocks_shared > 0)
    server:close()
    assert.equal(before, e.cache:blocks_free())
    e.cache:close()
  end)

  it("is told token by token, and ends where on_token cancels it", function()
    local e = engine()
    local server, told = kv.serve { engine = e }, {}
    local r
    r = server:submit { tokens = PROMPTS[2], max_tokens = 40, draft = { ngram = 1 },
      on_token = function(_, id)
        told[#told + 1] = id
        if #told == 17 then server:cancel(r) end
      end }
    server:run()
    assert.same({ unpack(want[2].ids, 1, 17) }, told)
    assert.same(told, r:output())
    server:close()
    e.cache:close()
  end)

  it("can be forked in the middle of a draft", function()
    for at = 3, 12 do
      local e = engine()
      local server, fork, count = kv.serve { engine = e }, nil, 0
      local r
      r = server:submit { tokens = PROMPTS[2], max_tokens = 30, draft = { ngram = 1 },
        on_token = function()
          count = count + 1
          if count == at then fork = server:fork(r, { max_tokens = 30 - at }) end
        end }
      server:run()
      assert.same({ unpack(want[2].ids, 1, 30) }, r:output())
      assert.same({ unpack(want[2].ids, at + 1, 30) }, fork:output())
      server:close()
      e.cache:close()
    end
  end)

  it("makes way for a request that needs its blocks", function()
    local got = generate(engine { blocks = 34, max_blocks = 30 }, PROMPTS,
      { max_tokens = 40, draft = { ngram = 1 } })
    assert.same(ids_of(want), ids_of(got))
  end)

  it("goes on after steps that failed", function()
    for _, tier in ipairs { "resident", "hot cache" } do
      local o = {}
      for key, value in pairs(TIERS[tier]) do o[key] = value end
      o.policy = kv.policy("quest", { ratio = 1 })
      local e = engine(o)
      local server, requests, calls = kv.serve { engine = e }, {}, 0
      for i, prompt in ipairs(PROMPTS) do
        requests[i] = server:submit { tokens = prompt, max_tokens = 40,
                                      draft = { ngram = 1 } }
      end
      local take_back, verify = e.take_back, e.verify
      function e.verify(...)
        calls = calls + 1
        local logits = verify(...)
        if calls % 3 == 0 then error("it fails", 0) end
        return logits
      end
      function e.take_back(...)
        take_back(...)
        if calls % 5 == 0 then error("it fails", 0) end
      end
      ends_right(server, e, requests, want)
    end
  end)

  it("draws the tokens that it draws without them, and keeps their chances", function()
    local function run(d)
      return generate(engine(), PROMPTS, { max_tokens = 30, draft = d, temperature = 0.6,
        top_k = 20, repetition_penalty = 1.1, seed = 5, logprobs = 2 })
    end
    local plain, accepted = run(), 0
    local got = run { ngram = 1, tokens = 3 }
    assert.same(ids_of(plain), ids_of(got))
    for i, answer in ipairs(got) do
      accepted = accepted + answer.draft.accepted
      assert.equal(30, #answer.logprobs)
      for t, one in ipairs(answer.logprobs) do
        assert.equal(answer.ids[t], one.id)
        assert.is_true(math.abs(one.logprob - plain[i].logprobs[t].logprob) < 1e-4)
      end
    end
    assert.is_true(accepted > 5, accepted)
  end)

  it("refuses what makes no draft", function()
    local e = engine()
    local function refuses(o, ...)
      o.max_tokens, o.draft = 4, o.draft or {}
      support.refuses(function() kv.generate(e, PROMPTS[1], o) end, ...)
    end
    refuses({ draft = { ngram = 0 } }, "ngram is 0, expected a whole number from 1 to 64")
    refuses({ draft = { tokens = 128 } }, "tokens is 128", "from 1 to 127", "auto")
    refuses({ draft = { words = 2 } }, '"words" is no option')
    refuses({ draft = { policy = "quest", tokens = 0 } }, "tokens is 0, expected")
    refuses({ draft = { policy = "quest", words = 0 } }, "policy quest", '"words" is no')
    refuses({ draft = { policy = "quets" } }, "quets", "quest")
    refuses({ draft = { policy = "xattention" } },
      "policy xattention does not select in decode")
    refuses({ draft = { policy = "quest", ngram = 2 } }, "both ngram and policy")
    refuses({ draft = { policy = "quest", draft = {} } }, "none inside of a draft")
    refuses({ draft = { policy = kv.policy "quest", ratio = 0.1 } },
      '"ratio" is no option')
    refuses({ draft = { policy = "quest", tokens = 48 } },
      "draft.tokens is 48, expected at most 47")
    assert.is_nil(kv.generate(e, PROMPTS[1], { max_tokens = 2, draft = false }).draft)
    e.cache:close()
  end)
end)

describe("an answer with drafts by a policy", function()
  local attentive = require("spec.models.tiny").attentive(cpu)
  local PROMPTS = {} -- luacheck: ignore 431
  for i = 1, 5 do
    PROMPTS[i] = {}
    for t = 1, 18 + 5 * i do PROMPTS[i][t] = (7 * t * t + 31 * t * i + i) % 97 end
  end

  local function open(o)
    local all = { blocks = 120, block_size = 4, chunk = 48, max_seqs = 6,
                  max_blocks = 40 }
    for key, value in pairs(o or {}) do all[key] = value end
    return attentive:engine(all)
  end

  local TIERS = {
    resident = {}, graph = { graph = true },
    ring = { offload = { slots = 2, slot_blocks = 2 } },
    ["hot cache"] = { offload = { hot_slots = 400 } },
    graph_hot = { graph = true, offload = { hot_slots = 400 } },
  }
  local QUEST = { policy = "quest", ratio = 0.1, min_blocks = 0, tokens = 4 }
  local want
  lazy_setup(function() want = generate(open(), PROMPTS, { max_tokens = 40 }) end)

  local function with(o)
    local all = {}
    for key, value in pairs(QUEST) do all[key] = value end
    for key, value in pairs(o) do all[key] = value end
    return all
  end

  for nth, tier in ipairs(support.names(TIERS)) do
    it("has the tokens of one without, through " .. tier, function()
      local accepted, proposed = 0, 0
      local drafts = support.one_each({ QUEST, with { tokens = "auto" },
        with { tokens = 1 }, with { reuse = true, tokens = 5 },
        { policy = kv.policy("h2o_blocks", { ratio = 0.2 }) },
        with { ratio = { 0.1, 0.4 } },
        with { ratio = { 0.1, 0.4 }, split = "adaptive", reuse = true },
        { policy = "streaming_blocks", blocks = 1, tokens = 3 } }, 3 * nth, 2)
      for _, d in ipairs(drafts) do
        local got = generate(open(TIERS[tier]), PROMPTS, { max_tokens = 40, draft = d })
        assert.same(ids_of(want), ids_of(got))
        for _, answer in ipairs(got) do
          local its, sum = answer.draft, 0
          for at, n in ipairs(its.accepted_at) do
            assert.is_true(n <= its.proposed_at[at])
            sum = sum + n
          end
          assert.equal(its.accepted, sum)
          assert.is_true(40 <= 1 + its.steps + its.accepted)
          accepted, proposed = accepted + its.accepted, proposed + its.proposed
        end
      end
      assert.is_true(accepted > 25 * #drafts, "some drafts are right")
      assert.is_true(accepted < proposed, "and some are wrong")
    end)
  end

  it("has them by every policy, and when every policy decodes #policy", function()
    local most = support.is_full and 24 or 12
    for _, name in ipairs(tried.names "decode") do
      local got = generate(open(), PROMPTS,
        { max_tokens = most, draft = { policy = name } })
      for i, answer in ipairs(got) do
        assert.same({ unpack(want[i].ids, 1, most) }, answer.ids, name)
      end
      got = generate(open { policy = kv.policy(name) }, PROMPTS,
        { max_tokens = most, draft = QUEST })
      for _, answer in ipairs(got) do assert.equal(most, #answer.ids, name) end
    end
    for _, name in ipairs { "quest", "block_mean", "oracle", "streaming_blocks",
                             "union" } do
      local function run(d)
        local e = open { policy = kv.policy(name, { ratio = 0.4, recent = 2 }) }
        return ids_of(generate(e, PROMPTS, { max_tokens = 40, draft = d }))
      end
      assert.same(run(), run { policy = "streaming_blocks", ratio = 0.1 }, name)
    end
  end)

  it("changes nothing for the other requests of its batch", function()
    local function prompts(by_policy, by_text)
      return { { prompt = PROMPTS[1], draft = by_policy }, PROMPTS[2],
               { prompt = PROMPTS[3], draft = by_text },
               { prompt = PROMPTS[4], temperature = 0.9, seed = 4 },
               { prompt = PROMPTS[5], draft = by_policy, logprobs = 2 } }
    end
    for _, o in ipairs { {}, { graph = true } } do
      local plain = generate(open(o), prompts(), { max_tokens = 30 })
      local got = generate(open(o), prompts(QUEST, { ngram = 1 }), { max_tokens = 30 })
      assert.same(ids_of(plain), ids_of(got))
      assert.is_nil(got[2].draft)
      assert.equal(30, #got[5].logprobs)
      for i, one in ipairs(got[5].logprobs) do
        assert.equal(plain[5].logprobs[i].id, one.id)
        assert.is_true(math.abs(plain[5].logprobs[i].logprob - one.logprob) < 1e-4)
      end
    end
  end)

  it("draws the tokens that it draws without them", function()
    local SAMPLINGS = {
      { temperature = 0.5 }, { temperature = 1, top_p = 0.9 },
      { temperature = 1.5, top_k = 9, min_p = 0.01 },
      { temperature = 0.8, repetition_penalty = 1.3, logprobs = 1 },
    }
    for i, sampling in ipairs(SAMPLINGS) do
      for _, o in ipairs(support.one_each({ {}, { graph = true } }, i, 1)) do
        local function run(d)
          local all = { max_tokens = 30, draft = d, seed = 11 }
          for key, value in pairs(sampling) do all[key] = value end
          return generate(open(o), PROMPTS, all)
        end
        local plain, got, accepted = run(), run(with { ratio = 0.5 }), 0
        assert.same(ids_of(plain), ids_of(got))
        for _, answer in ipairs(got) do accepted = accepted + answer.draft.accepted end
        assert.is_true(accepted > 20, accepted)
      end
    end
  end)

  it("draws by the model's chances, whatever the draft's are", function()
    local e, seeds, prompt = open { max_seqs = 16, chunk = 128 },
      support.is_full and 3000 or 1500, PROMPTS[3]
    local prompts, firsts, vocab = {}, {}, 97
    for seed = 1, seeds do prompts[seed] = { prompt = prompt, seed = seed } end
    local sampling = { temperature = 12, top_k = 30, max_tokens = 3,
                       draft = { policy = "streaming_blocks", blocks = 1, tokens = 1 } }
    local accepted = 0
    for _, answer in ipairs(kv.generate(e, prompts, sampling)) do
      local first = answer.ids[1]
      firsts[first] = firsts[first] or { count = 0 }
      firsts[first].count = firsts[first].count + 1
      firsts[first][answer.ids[2]] = (firsts[first][answer.ids[2]] or 0) + 1
      accepted = accepted + answer.draft.accepted
    end
    local most
    for first, one in pairs(firsts) do
      if not most or one.count > firsts[most].count then most = first end
    end
    local seq = e:sequence()
    e:prefill(seq, prompt)
    local chances = require("kvlab.serve.sampler").chances(e:decode({ seq }, { most }),
      { { choice = require("kvlab.serve.sampler").take(
        { temperature = 12, top_k = 30 }), num_tokens = 0,
        output_length = function() return 0 end } }):list()
    local seen, square, classes, rest, rest_seen = firsts[most], 0, 0, 0, 0
    for id = 0, vocab - 1 do
      local expected = chances[id + 1] * seen.count
      if chances[id + 1] == 0 then assert.is_nil(seen[id]) end
      if expected >= 5 then
        square = square + ((seen[id] or 0) - expected) ^ 2 / expected
        classes = classes + 1
      else
        rest, rest_seen = rest + expected, rest_seen + (seen[id] or 0)
      end
    end
    if rest >= 5 then
      square, classes = square + (rest_seen - rest) ^ 2 / rest, classes + 1
    end
    local freedom = classes - 1
    assert.is_true(freedom >= 3 and accepted > 0 and accepted < seeds, freedom)
    -- Wilson and Hilferty: chi-square's 0.9999 point
    local limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ^ 0.5) ^ 3
    assert.is_true(square < limit, ("%g of %g"):format(square, limit))
    e.cache:close()
  end)

  it("ends with its stop token, and has exactly max_tokens tokens", function()
    for at = 2, 30, 5 do
      local function run(d)
        return generate(open(), { PROMPTS[2] }, { max_tokens = 40, draft = d,
          stop_tokens = { want[2].ids[at] } })[1]
      end
      local plain, got = run(), run(QUEST)
      assert.same(plain.ids, got.ids)
      assert.equal("stop", got.finish_reason)
    end
    for n = 1, 9 do
      local got = generate(open(), PROMPTS, { max_tokens = n, draft = QUEST })
      for i, answer in ipairs(got) do
        assert.same({ unpack(want[i].ids, 1, n) }, answer.ids)
      end
    end
  end)

  it("leaves no block behind, and shares what it computed", function()
    local e = open()
    local server = kv.serve { engine = e }
    local before = e.cache:blocks_free()
    for _ = 1, 2 do
      local got = kv.generate(server, PROMPTS, { max_tokens = 40, draft = QUEST })
      assert.same(ids_of(want), ids_of(got))
    end
    assert.is_true(server:stats().blocks_shared > 0)
    server:close()
    assert.equal(before, e.cache:blocks_free())
    e.cache:close()
  end)

  it("says what each of its requests read, if it is watched", function()
    local e = open { policy = kv.policy("streaming_blocks",
      { blocks = 3, sink = 1, recent = 2, min_blocks = 0 }) }
    local server, requests = kv.serve { engine = e }, {}
    for i = 1, 3 do
      requests[i] = server:submit { tokens = PROMPTS[i], max_tokens = 20, watch = true,
        draft = i ~= 2 and QUEST or nil }
    end
    while requests[1].state ~= "finished" do
      server:step()
      for _, r in ipairs(requests) do
        local reads = r.reads
        if r.state == "running" and reads then -- a sink, and the newest two of its own
          assert.equal(1, reads[1])
          assert.equal(1, reads[reads.blocks])
          assert.equal(1, reads[reads.blocks - 1])
          assert.equal(0, reads[reads.blocks - 2])
        end
      end
    end
    server:close()
    e.cache:close()
  end)

  it("has them with blocks of a store", function()
    local store = kv.store("memory:", { model = "attentive", block_size = 4 })
    for _ = 1, 2 do
      local e = open()
      local server = kv.serve { engine = e, store = store, draft = QUEST }
      assert.same(ids_of(want), ids_of(kv.generate(server, PROMPTS, { max_tokens = 40 })))
      local stats = server:stats()
      assert.is_true(stats.drafts.accepted > 0)
      server:close()
      e.cache:close()
    end
    store:close()
  end)

  it("can be forked and cancelled in the middle of a draft", function()
    for at = 3, 12 do
      local e = open()
      local server, fork, count, r = kv.serve { engine = e }, nil, 0, nil
      r = server:submit { tokens = PROMPTS[2], max_tokens = 30, draft = QUEST,
        on_token = function()
          count = count + 1
          if count == at then
            fork = server:fork(r, { max_tokens = 30 - at, draft = at % 2 == 0 and QUEST })
          elseif count == at + 9 then
            server:cancel(r)
          end
        end }
      server:run()
      assert.same({ unpack(want[2].ids, 1, at + 9) }, r:output())
      assert.same({ unpack(want[2].ids, at + 1, 30) }, fork:output())
      server:close()
      e.cache:close()
    end
  end)

  it("makes way for a request that needs its blocks", function()
    for _, d in ipairs { QUEST, { policy = "snapkv_blocks", ratio = 0.2 } } do
      local e = open { blocks = 34, max_blocks = 30 }
      local server = kv.serve { engine = e }
      local got = kv.generate(server, PROMPTS, { max_tokens = 40, draft = d })
      assert.same(ids_of(want), ids_of(got))
      assert.is_true(server:stats().preemptions > 0)
      server:close()
      e.cache:close()
    end
  end)

  it("is the same for the same numbers by layer", function()
    local function key(list) return draft.take(with { ratio = list }).key end
    assert.equal(key { 0.1, 0.4 }, key { 0.1, 0.4 })
    assert.is_true(key { 0.1, 0.4 } ~= key { 0.4, 0.1 })
    assert.is_true(key { 0.1, 0.4 } ~= key { 0.1, 0.4 + 1e-15 })
  end)

  it("goes on after steps that failed", function()
    for _, tier in ipairs { "resident", "hot cache", "graph" } do
      local e = open(TIERS[tier])
      local server, requests, calls = kv.serve { engine = e }, {}, 0
      for i, prompt in ipairs(PROMPTS) do
        requests[i] = server:submit { tokens = prompt, max_tokens = 40,
          draft = { policy = "h2o_blocks", ratio = 0.2 } }
      end
      local fails = { draft = 3, verify = 4, take_back = 5 }
      for name, nth in pairs(fails) do
        local call = e[name]
        e[name] = function(...)
          calls = calls + 1
          local result = call(...)
          if calls % nth == 0 then error("it fails", 0) end
          return result
        end
      end
      ends_right(server, e, requests, want)
    end
  end)
end)
