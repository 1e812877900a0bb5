--- Answers to prompts: what a request gets does not depend on what else is in the batch,
-- on where the KV is, or on graphs, and equals the engine's own decode. The model is
-- small and random; its tokenizer has a token for each character.
local kv = require "kvlab"
local support = require "spec.support"
local text_models = require "spec.text_models"
local tiny = require("spec.models.tiny").tiny

local cpu = kv.device "cpu"
local model = tiny(cpu)
model.head = kv.randn(cpu, "f32", { 97, 32 }, { seed = 5, std = 0.5 })
function model.logits(self, states, out) states:matmul_t(self.head, out) end
local raises = support.raises

local END = 96 -- <|im_end|>
local tokenizer = text_models.tokenizer(97)

local function engine(o)
  o = o or {}
  o.blocks, o.block_size, o.chunk = o.blocks or 64, 4, o.chunk or 16
  o.max_seqs = o.max_seqs or 8
  return model:engine(o)
end

local PROMPTS = { "Hello", "A much longer prompt, of several blocks and chunks!", "x",
                  "Two prompts", "Two prompts" }

--- What the engine itself decodes after a prompt, greedily.
local function own_decode(e, text, n)
  local seq = e:sequence()
  local ids = e:generate(seq, e:prefill(seq, tokenizer:encode(text)), n)
  e:finish(seq)
  return ids
end

local function all_free(e) assert.equal(e.cache.blocks, e.cache:blocks_free()) end

local TIERS = { resident = {}, ring = { slots = 2, slot_blocks = 2 },
                hot = { slots = 2, slot_blocks = 2, hot_slots = 640 } }

describe("greedy answers", function()
  for _, name in ipairs { "full", "quest", "streaming_blocks" } do
    for tier, offload in pairs(TIERS) do
      it(("in a batch are what the engine decodes: %s, %s"):format(name, tier), function()
        local function open()
          return engine { policy = name == "full" and kv.policy(name)
            or kv.policy(name, { ratio = 0.3, min_blocks = 2 }),
            offload = next(offload) and offload or nil, chunk = 128 }
        end
        local e = open()
        local answers = kv.generate(e, PROMPTS, { tokenizer = tokenizer, max_tokens = 9,
                                                  ignore_eos = true })
        all_free(e)
        e.cache:close() -- and its streams
        for i, text in ipairs(PROMPTS) do
          local own = open()
          assert.same(own_decode(own, text, 9), answers[i].ids, text)
          own.cache:close()
        end
      end)
    end
  end

  it("with graphs are those without", function()
    local function answers(o)
      return kv.generate(engine(o), PROMPTS, { tokenizer = tokenizer, max_tokens = 20,
                                               temperature = 1.5, seed = 3 })
    end
    local with, without = answers { graph = true, max_blocks = 20 }, answers {}
    for i = 1, #PROMPTS do assert.same(without[i], with[i]) end
  end)

  it("are the same for a text and for its ids, for one prompt and for a list", function()
    local e = engine()
    local o = { tokenizer = tokenizer, max_tokens = 5 }
    local one = kv.generate(e, "Hello", o)
    assert.same(one, kv.generate(e, tokenizer:encode "Hello", o))
    assert.same({ one }, kv.generate(e, { "Hello" }, o))
    assert.same({ one }, kv.generate(e, { tokenizer:encode "Hello" }, o))
    assert.same(one.ids, kv.generate(e, tokenizer:encode "Hello", { max_tokens = 5 }).ids)
    assert.equal("length", one.finish_reason)
    assert.equal(tokenizer:decode(one.ids), one.text)
    all_free(e)
  end)
end)

describe("drawn answers", function()
  local DRAWN = { tokenizer = tokenizer, max_tokens = 24, temperature = 1.5, top_p = 0.95,
                  repetition_penalty = 1.1, ignore_eos = true }

  local function prompts()
    local list = {}
    for i, text in ipairs(PROMPTS) do list[i] = { prompt = text, seed = i } end
    return list
  end

  it("are the same alone, in any batch and after preemption", function()
    local alone = {}
    for i, one in ipairs(prompts()) do
      alone[i] = kv.generate(engine(), one, DRAWN).text
    end
    assert.are_not.equal(alone[4], alone[5]) -- one text, two seeds
    local few = engine { blocks = 32 }
    for _, e in ipairs { engine(), engine { max_seqs = 2 }, few } do
      for i, answer in ipairs(kv.generate(e, prompts(), DRAWN)) do
        assert.equal(alone[i], answer.text)
      end
      all_free(e)
    end
    local server = kv.serve { engine = few }
    kv.generate(server, prompts(), DRAWN)
    assert.is_true(server:stats().preemptions > 0) -- so the last engine had some, too
    server:close()
  end)

  it("have the model's log-probabilities", function()
    local e = engine()
    local answer = kv.generate(e, { prompt = "Hello", temperature = 1.5, logprobs = 3,
      seed = 5 }, { max_tokens = 6, tokenizer = tokenizer, ignore_eos = true })
    local seq, tokens = e:sequence(), tokenizer:encode "Hello"
    for _, id in ipairs(answer.ids) do tokens[#tokens + 1] = id end
    local want = e:prefill_all(seq, tokens):softmax():log()
    assert.equal(6, #answer.logprobs)
    for i, one in ipairs(answer.logprobs) do
      local row = want:index(4 + i - 1)
      assert.equal(answer.ids[i], one.id)
      assert.near(row:list()[one.id + 1], one.logprob, 1e-4)
      local values, indices = row:topk(3)
      values, indices = values:list(), indices:list()
      for j = 1, 3 do
        assert.equal(indices[j], one.top[j].id)
        assert.near(values[j], one.top[j].logprob, 1e-4)
      end
    end
  end)
end)

describe("the end of an answer", function()
  local LONG = { tokenizer = tokenizer, max_tokens = 40, temperature = 2, seed = 2,
                 ignore_eos = true }
  local function with(more)
    local o = {}
    for name, value in pairs(LONG) do o[name] = value end
    for name, value in pairs(more) do o[name] = value end
    return o
  end
  local whole = kv.generate(engine(), "Hello", LONG)

  it("is before a stop string, which on_text does not get", function()
    local stop = whole.text:sub(11, 14)
    local at, parts = whole.text:find(stop, 1, true), {}
    local answer = kv.generate(engine(), "Hello", with { stop = { "never", stop },
      on_text = function(text, got)
        parts[#parts + 1] = text
        assert.equal(1, got.index)
      end })
    assert.equal("stop", answer.finish_reason)
    assert.equal(stop, answer.stop)
    assert.equal(whole.text:sub(1, at - 1), answer.text)
    assert.equal(answer.text, table.concat(parts))
    assert.is_true(#parts > 3)
    assert.same({ unpack(whole.ids, 1, #answer.ids) }, answer.ids)
    assert.equal(answer.text .. stop, tokenizer:decode(answer.ids))
  end)

  it("is at max_tokens with all text, also what might have become a stop", function()
    local text = tokenizer:decode { unpack(whole.ids, 1, 7) }
    local answer = kv.generate(engine(), "Hello", with { max_tokens = 7,
      stop = { text:sub(-3) .. "?" } })
    assert.equal("length", answer.finish_reason)
    assert.equal(text, answer.text)
  end)

  it("is at a stop token, the tokenizer's eos among them", function()
    local id = whole.ids[6]
    local answer = kv.generate(engine(), "Hello", with { stop_tokens = { id } })
    assert.equal("stop", answer.finish_reason)
    assert.equal(id, answer.ids[#answer.ids])
    local eos = tokenizer.eos
    assert.equal(END, eos)
    tokenizer.eos = id
    local ended = kv.generate(engine(), "Hello", with { ignore_eos = false })
    tokenizer.eos = eos
    assert.same(answer, ended)
  end)

  it("is at a token that the model's config says", function()
    local id, e = whole.ids[6], engine()
    local before = e.model.config.ends
    e.model.config.ends = { 9999, id }
    local ended = kv.generate(e, "Hello", with { ignore_eos = false })
    local ignored = kv.generate(e, "Hello", with { ignore_eos = true })
    e.model.config.ends = before
    assert.equal("stop", ended.finish_reason)
    assert.equal(id, ended.ids[#ended.ids])
    assert.is_true(#ignored.ids > #ended.ids)
  end)

  it("is there at once with max_tokens = 0", function()
    assert.same({ index = 1, ids = {}, text = "", finish_reason = "length" },
      kv.generate(engine(), "Hello", with { max_tokens = 0 }))
  end)

  --- The answers to all prompts when on_text of the second one does something.
  local function others_of(act)
    local e, list = engine(), {}
    for i, text in ipairs(PROMPTS) do list[i] = { prompt = text } end
    list[2].on_text = act
    local answers = kv.generate(e, list, LONG)
    all_free(e)
    for i, text in ipairs(PROMPTS) do
      local alone = kv.generate(engine(), text, LONG)
      if i ~= 2 then assert.same(alone.ids, answers[i].ids) end
    end
    return answers[2]
  end

  it("is where on_text returns false, and changes nothing for the others", function()
    local answer = others_of(function(_, got) return #got.ids < 4 end)
    assert.equal("cancelled", answer.finish_reason)
    assert.equal(4, #answer.ids)
    assert.equal(4, #answer.text)
  end)

  it("is where on_text raises, and changes nothing for the others", function()
    local answer = others_of(function(_, got)
      if #got.ids == 3 then error("enough", 0) end
    end)
    assert.equal("error", answer.finish_reason)
    assert.equal("enough", answer.error)
    assert.equal(3, #answer.ids)
  end)
end)

describe("a call that fails", function()
  for tier, offload in pairs(TIERS) do
    it("leaves the engine as it was: Ctrl-C, a layer that raises; " .. tier, function()
      local e = engine { offload = next(offload) and offload or nil, chunk = 128,
                         policy = kv.policy("quest", { ratio = 0.3 }) }
      local o = { tokenizer = tokenizer, max_tokens = 8 }
      local want = kv.generate(e, PROMPTS, o)
      local ok, why = pcall(kv.generate, e, PROMPTS, { tokenizer = tokenizer,
        on_text = function() kv.C.kvl_interrupt(1) end })
      kv.C.kvl_interrupt(0)
      assert.is_false(ok)
      assert.matches("interrupted", tostring(why))
      all_free(e)
      local forward, n = model.forward_layer, 0
      model.forward_layer = function(...)
        n = n + 1
        if n == 9 then error("no such layer", 0) end
        return forward(...)
      end
      local failed, what = pcall(kv.generate, e, PROMPTS, o)
      model.forward_layer = nil
      assert.is_false(failed)
      assert.equal("no such layer", what)
      all_free(e)
      assert.same(want, kv.generate(e, PROMPTS, o))
      e.cache:close()
    end)
  end

  it("says so where other sequences hold the blocks, and then runs", function()
    local e = engine { blocks = 16 }
    local seq, o = e:sequence(), { max_tokens = 4 }
    e:prefill(seq, tokenizer:encode(("x"):rep(50)))
    local long = tokenizer:encode "sixteen tokens.."
    raises("request 2 needs 4 blocks and the cache has 3 left: other sequences hold the "
      .. "rest", kv.generate, e, { { 1, 2 }, long }, o)
    assert.equal(3, e.cache:blocks_free())
    e:finish(seq)
    assert.equal(4, #kv.generate(e, { { 1, 2 }, long }, o)[2].ids)
  end)

  it("names the prompt or the option, and blames the caller's line", function()
    local e = engine { blocks = 8 }
    local t = { tokenizer = tokenizer }
    local function refused(words, prompts, o)
      local line = debug.getinfo(1, "l").currentline + 1
      local ok, text = pcall(function() kv.generate(e, prompts, o or t) end)
      assert.is_false(ok)
      assert.truthy(text:find("generate_spec.lua:" .. line .. ": generate: ", 1, true),
        text)
      assert.truthy(text:find(words, 1, true), text)
      all_free(e)
    end
    refused("prompt 1 is empty, expected a token or more", "")
    refused("prompt 2 is empty, expected a token or more", { "x", "" })
    refused("prompts is empty, expected a prompt or a list of them", {})
    refused("prompt 1 is a text, expected ids, as there is no tokenizer", "x", {})
    refused("prompt 2 is 7, expected a text or a list of ids", { "x", 7 })
    refused("prompt 1 has token 1 = 97, expected 0 ... 96", { 3, 97 })
    refused("prompt 1 has token 0 = 1.5, expected 0 ... 96", { 1.5 })
    refused("prompt 1 has 33 tokens, but the engine's cache has room for 32",
      ("x"):rep(33))
    refused("prompt 1 has 30 tokens and max_tokens is 4, but the engine's cache has room "
      .. "for 32", ("x"):rep(30), { tokenizer = tokenizer, max_tokens = 4 })
    refused("max_tokens is -1, expected a whole number >= 0", "x", { max_tokens = -1 })
    refused("temperature is -1, expected a number >= 0", "x", { temperature = -1 })
    refused("top_p is 0, expected a number > 0 and <= 1", "x", { top_p = 0 })
    refused("top_p is 1.1, expected a number > 0 and <= 1", "x", { top_p = 1.1 })
    refused("stop is a table, expected a list, each a string of UTF-8 with a character",
      "x", { tokenizer = tokenizer, stop = { "" } })
    refused("stop is a table, expected none, as there is no tokenizer", { 1 },
      { stop = { "x" } })
    refused('prompt 1: "sede" is no option, did you mean seed?', { prompt = "x",
                                                                   sede = 1 })
    refused("prompt 1: min_p is 2, expected 0 ... 1", { { prompt = "x", min_p = 2 } })
    model.config.context = 10
    refused("prompt 1 has 11 tokens, but the model's context is 10", ("x"):rep(11))
    local longest = kv.generate(e, ("x"):rep(10), t)
    model.config.context = nil
    assert.equal(1, #longest.ids)
    assert.equal(3, #kv.generate(e, ("x"):rep(30), t).ids) -- all that there is room for
    raises("generate: to is a table, expected a model's engine or a server with one",
      function() kv.generate({}, "x", t) end)
    raises("generate: to is a table, expected a model's engine or a server with one",
      kv.generate, kv.serve { cost = kv.cost_model.llama_8b_h100(512), blocks = 20,
                              block_size = 512 }, { 1 })
  end)
end)

describe("a server that answers", function()
  it("keeps the blocks of prompts for the next call", function()
    local e = engine()
    local server = kv.serve { engine = e }
    local o = { tokenizer = tokenizer, max_tokens = 4 }
    local first = kv.generate(server, PROMPTS[2], o)
    assert.same(first, kv.generate(server, PROMPTS[2], o))
    assert.equal(12, server:stats().blocks_shared)
    server:close()
    all_free(e)
  end)
end)
