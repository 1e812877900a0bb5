--- The trained recall model: pinned to the logits that its training script wrote, its
-- recall, and the same on both devices.
-- Tolerance: f32 over four layers against PyTorch on logits up to about 35: 1e-3. Between
-- devices in bf16, activations are rounded at the same places, but a sum in another order
-- can round to the other side: 0.5.
local json = require "kvlab.json"
local kv = require "kvlab"
local llama = require "models.llama"
local prompts = require "models.recall.prompts"
local support = require "spec.support"

local FOLDER = kv.paths.root .. "/lua/models/recall"

local function golden()
  local file = assert(io.open(FOLDER .. "/golden.json"))
  local g = json.decode(file:read "*a")
  file:close()
  return g
end

--- Share of questions answered right with full attention, each on its own fork.
local function accuracy(dev, context)
  local model = llama.load(FOLDER, { device = dev })
  local engine = model:engine { blocks = 2 * context / 16 + 64 }
  local right, asked = 0, 0
  for i = 1, 2 do
    local prompt = prompts.draw(context, 32, 16, 100 + i)
    local seq, forks, columns = engine:sequence(), {}, { {}, {}, {}, {} }
    engine:prefill(seq, prompt.tokens)
    for n, query in ipairs(prompt.queries) do
      forks[n] = seq:fork()
      for c = 1, 4 do columns[c][n] = query.ask[c] end
    end
    local logits
    for c = 1, 4 do logits = engine:decode(forks, columns[c]) end
    local first = logits:argmax():list()
    local second = engine:decode(forks, first):argmax():list()
    for n, query in ipairs(prompt.queries) do
      asked = asked + 1
      if first[n] == query.answer[1] and second[n] == query.answer[2] then
        right = right + 1
      end
      forks[n]:close()
    end
    seq:close()
  end
  return right / asked
end

local function check(dev)
  describe("recall model on " .. dev:name(), function()
    it("gives the logits that its training script wrote", function()
      local g = golden()
      local model = llama.load(FOLDER, { device = dev, dtype = "f32" })
      local engine = model:engine { blocks = 32 }
      local logits = engine:prefill_all(engine:sequence(), g.tokens)
      for i, row in ipairs(g.positions) do
        local got = logits:index(row)
        support.close(got:narrow(0, #g.first_logits[i]), g.first_logits[i], 1e-3, 0,
          "token " .. row)
        assert.equal(g.argmax[i], got:argmax():item())
      end
    end)

    it("recalls what it read #release", function()
      assert.is_true(accuracy(dev, 1024) >= 0.95)
    end)
  end)
end

support.each_device(check)

describe("#gpu", function()
  if not kv.cuda_available() then return end

  it("gives on cuda the logits that it gives on the cpu", function()
    local tokens, logits = prompts.draw(4096, 32, 1, 5).tokens, {}
    for _, dev in ipairs { kv.device "cpu", kv.device "cuda" } do
      for _, dtype in ipairs { "f32", "bf16" } do
        local engine = llama.load(FOLDER, { device = dev, dtype = dtype })
          :engine { blocks = 300 }
        local got = engine:prefill(engine:sequence(), tokens):to(kv.device "cpu")
        logits[dtype] = logits[dtype] or got
        local off = (got - logits[dtype]):abs():max():item()
        if dev:name() ~= "cpu" then
          print(("largest difference of a logit between devices, %s: %g"):format(
            dtype, off))
        end
        assert.is_true(off <= (dtype == "f32" and 1e-3 or 0.5), dtype .. " " .. off)
      end
    end
  end)
end)

describe("recall prompts", function()
  it("are the same for the same seed and have what they promise", function()
    local a, b = prompts.draw(512, 20, 25, 3), prompts.draw(512, 20, 25, 3)
    assert.same(a, b)
    assert.not_same(a.tokens, prompts.draw(512, 20, 25, 4).tokens)
    assert.equal(512, #a.tokens)
    local keys, needles = {}, 0
    for i, token in ipairs(a.tokens) do
      assert.is_true(token >= 0 and token < 1024)
      if token == 1 then -- KEY
        needles = needles + 1
        keys[a.tokens[i + 1] .. "," .. a.tokens[i + 2]] =
          a.tokens[i + 4] .. "," .. a.tokens[i + 5]
        assert.equal(2, a.tokens[i + 3])
        assert.equal(3, a.tokens[i + 6])
      end
    end
    assert.equal(20, needles)
    assert.equal(25, #a.queries)
    for _, query in ipairs(a.queries) do
      assert.equal(query.answer[1] .. "," .. query.answer[2],
        keys[query.ask[2] .. "," .. query.ask[3]])
    end
  end)

  it("spread needles evenly, and tell which of them a question is about", function()
    local prompt = prompts.draw(512, 16, 16, 3, true)
    local keys, places, asked = {}, {}, {}
    for i, token in ipairs(prompt.tokens) do
      if token == 1 then -- KEY
        keys[#keys + 1] = prompt.tokens[i + 1] .. "," .. prompt.tokens[i + 2]
        places[#places + 1] = i - 2
      end
    end
    assert.equal(16, #keys)
    local room = 512 - 1 - 7 * 16 - 32 -- tokens of filler
    for i, place in ipairs(places) do
      assert.equal(i - 1, math.floor((place - 7 * (i - 1)) * 16 / (room + 1)), place)
    end
    for _, query in ipairs(prompt.queries) do
      assert.equal(keys[query.needle], query.ask[2] .. "," .. query.ask[3])
      asked[query.needle] = true
    end
    assert.equal(16, #asked)
  end)

  it("refuse more needles than fit", function()
    assert.has_error(function() prompts.draw(100, 20, 1, 1) end)
  end)
end)
