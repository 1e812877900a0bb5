--- Answers of a real model: SmolLM2's greedy tokens are those of transformers
-- (tools/smollm2_goldens.py), alone and in batches, on every memory tier and from graphs.
-- In f32; logits of a batch and of one prompt differ by rounding, which changes none of
-- these tokens.
local json = require "kvlab.json"
local kv = require "kvlab"
local llama = require "models.llama"
local support = require "spec.support"

local function read_json(path)
  local file = assert(io.open(kv.paths.root .. path))
  local fields = json.decode(file:read "*a")
  file:close()
  return fields
end

describe("SmolLM2 #model", function()
  local m, golden

  setup(function()
    golden = read_json "/spec/data/gguf/smollm2.json"
    m = kv.model("smollm2", { device = "cpu", dtype = "f32", engine = { blocks = 64 } })
  end)

  it("gives the greedy tokens of transformers, as text and in a batch", function()
    assert.equal(200, #golden.greedy)
    local n = support.is_full and 200 or 80
    local greedy = { unpack(golden.greedy, 1, n) }
    local text = m.tokenizer:decode(golden.tokens)
    assert.same(golden.tokens, m.tokenizer:encode(text))
    local parts = {}
    local answers = m:generate({ text, "The capital of France is" },
      { max_tokens = n, on_text = function(part, answer)
        if answer.index == 1 then parts[#parts + 1] = part end
      end })
    assert.same(greedy, answers[1].ids)
    assert.equal(m.tokenizer:decode(greedy), answers[1].text)
    assert.equal(answers[1].text, table.concat(parts))
    assert.matches("^ Paris%.", answers[2].text)
  end)

  it("answers a chat as transformers does", function()
    local _, ids = m.tokenizer:chat({ { role = "user",
      content = "What is the capital of Italy?" } }, { add_generation_prompt = true })
    local answer = m:generate(ids, { max_tokens = 20 })
    assert.equal("Il Coriobella, Italy.", answer.text) -- it is a small model
    assert.equal("stop", answer.finish_reason)
    assert.equal(m.tokenizer:id_of "<|im_end|>", answer.ids[#answer.ids])
  end)

  local TEXTS = { "Once upon a time", "The three laws of robotics are as follows: First,",
    "1, 2, 3, 4,", "In the beginning God created the heaven and the earth. And the earth "
      .. "was without form, and void; and darkness was upon the face of the deep." }

  it("draws for a seed the same, whatever else is in the batch", function()
    local list, o = {}, { max_tokens = 8, temperature = 0.8, top_k = 50, top_p = 0.95 }
    for i, text in ipairs(TEXTS) do list[i] = { prompt = text, seed = 10 + i } end
    local together = m:generate(list, o)
    for i, one in ipairs(list) do
      assert.equal(m:generate(one, o).text, together[i].text)
    end
    local again = m:generate({ list[4], list[1], TEXTS[2] }, o)
    assert.equal(together[4].text, again[1].text)
    assert.equal(together[1].text, again[2].text)
  end)

  it("decodes under a budget and on any tier what its engine decodes", function()
    local text = TEXTS[4]:rep(4)
    local ids = m.tokenizer:encode(text)
    local model = m.model
    local function engine(offload, graph)
      return model:engine { blocks = 64, chunk = 256, graph = graph, max_seqs = 2,
        max_blocks = graph and 24 or nil, offload = offload,
        policy = kv.policy("quest", { ratio = 0.25, min_blocks = 2 }) }
    end
    local own = engine()
    local seq = own:sequence()
    local want = own:generate(seq, own:prefill(seq, ids), 12)
    for tier, o in pairs { resident = {}, graphs = { nil, true },
      ring = { { slots = 2, slot_blocks = 4 } },
      hot = { { slots = 2, slot_blocks = 4, hot_slots = 256 } } } do
      local e = engine(o[1], o[2])
      local answers = kv.generate(e, { ids, ids }, { max_tokens = 12 })
      assert.same(want, answers[1].ids, tier)
      assert.same(want, answers[2].ids, tier)
      e.cache:close()
    end
  end)

  it("is loaded by kv.model as by its family", function()
    local family = llama.load("smollm2", { device = "cpu", dtype = "f32" })
    assert.equal(8192, m.model.config.context)
    assert.same(family.config.vocab, m.tokenizer.size)
  end)
end)
