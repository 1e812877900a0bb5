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

  for tier, o in pairs(TIERS) do
    it("has the tokens of one without, through " .. tier, function()
      for _, d in ipairs { {}, { ngram = 1, tokens = 4 }, { ngram = 2, tokens = 20 } } do
        local got = generate(engine(o), PROMPTS, { max_tokens = 40, draft = d })
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
    for _, name in ipairs { "quest", "block_mean", "oracle", "streaming", "union" } do
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
      local raised = 0
      while not pcall(server.run, server) do
        raised = raised + 1
        assert.is_true(raised < 400)
      end
      assert.is_true(raised > 3)
      for i, r in ipairs(requests) do assert.same(want[i].ids, r:output()) end
      server:close()
      e.cache:close()
    end
  end)

  it("is for the likeliest tokens alone", function()
    local e = engine()
    local function refuses(o, ...)
      o.max_tokens, o.draft = 4, o.draft or {}
      support.refuses(function() kv.generate(e, PROMPTS[1], o) end, ...)
    end
    refuses({ temperature = 0.5 }, "prompt 1 has a draft and temperature")
    refuses({ logprobs = 1 }, "prompt 1 has a draft and logprobs")
    refuses({ draft = { ngram = 0 } }, "ngram is 0, expected a whole number from 1 to 64")
    refuses({ draft = { tokens = 128 } }, "tokens is 128", "from 1 to 127")
    refuses({ draft = { words = 2 } }, '"words" is no option')
    assert.is_nil(kv.generate(e, PROMPTS[1], { max_tokens = 2, draft = false }).draft)
    e.cache:close()
  end)
end)
