--- The recall model with latent attention and an indexer of its own: its logits are those
-- of the script that trained it, and what it selects is enough.
-- Tolerance: f32 sums in another order, of logits up to 20.
local exam = require "models.recall.exam"
local families = require "models.families"
local json = require "kvlab.json"
local kv = require "kvlab"
local support = require "spec.support"

local FOLDER = kv.paths.root .. "/lua/models/recall_latent"

local function own(tokens)
  return kv.policy("nsa", { granularity = "token", index = "model", tokens = tokens,
                            sink = 0, recent = 0, min_blocks = 0 })
end

describe("the recall model with latents", function()
  support.each_device(function(dev)
    it("gives the logits of its training script on " .. dev:name(), function()
      local file = assert(io.open(FOLDER .. "/golden.json"))
      local golden = json.decode(file:read "*a")
      file:close()
      local model = families.load(FOLDER, { device = dev, dtype = "f32" })
      local engine, tokens = model:engine { blocks = 20 }, golden.tokens
      local seq, last = engine:sequence(), #tokens - 4
      engine:prefill(seq, { unpack(tokens, 1, last) })
      for i = 1, 4 do
        local logits = engine:decode({ seq }, { tokens[last + i] })
        support.close({ unpack(logits:list(), 1, 16) }, golden.first_logits[i], 1e-4)
        assert.equal(golden.argmax[i], logits:argmax():item())
      end
      seq:close()
      engine.cache:close()
    end)
  end)

  it("answers by the tokens that it selects, not by so many others #release", function()
    local sitting = exam.open { context = 512, prompts = 2, needles = 24,
                                block_size = 16, model = "recall_latent" }
    assert.equal(1, (sitting:ask(kv.policy "full")))
    assert.is_true(sitting:ask(own(16)) >= 0.98)
    local blind = kv.policy("nsa", { granularity = "token", index = "random", tokens = 16,
                                     sink = 0, recent = 0, min_blocks = 0 })
    assert.is_true(sitting:ask(blind) < 0.5)
    sitting:close()
  end)

  it("goes on after a step that failed, with its latents in host memory", function()
    local function decode(offload, fails)
      local model = families.load(FOLDER, { device = "cpu", dtype = "f32" })
      local engine = model:engine { blocks = 30, policy = own(8), offload = offload,
        expand = false } -- as prefills are whose latents are in host memory
      local seq, tokens, all, stopped = engine:sequence(), {}, {}, false
      for t = 1, 200 do tokens[t] = 16 + t * 37 % 900 end
      engine:prefill(seq, tokens)
      for step = 1, 5 do
        engine.attention.hooks = fails and step == 3 and {
          attention_finished = function(ctx)
            if ctx.layer == 2 then error("stop", 0) end
          end } or nil
        local ok, logits = pcall(engine.decode, engine, { seq }, { 20 + step })
        if not ok then
          assert.equal("stop", logits)
          stopped = true
          engine.attention.hooks = nil
          logits = engine:decode({ seq }, { 20 + step })
        end
        all[step] = logits:list()
      end
      assert.equal(fails or false, stopped)
      seq:close()
      engine.cache:close()
      return all
    end
    local want = decode()
    assert.same(want, decode({ hot_tokens = 60 }))
    assert.same(want, decode({ hot_tokens = 12 }, true))
  end)

  it("is asked before the first row what it cannot be", function()
    local o = { context = 512, prompts = 1, needles = 8, block_size = 16,
                model = "recall_latent" }
    exam.check(o, own(8))
    exam.check(o, kv.policy "magicpig")
    local of_values = kv.policy.define { name = "of_values", decode = true,
      score = kv.expr.v:sum "dim":max "token" }
    support.raises("v is read where values are the first numbers of their keys",
      exam.check, o, of_values {})
    o.model = "recall_dense"
    support.raises("model", exam.check, o)
  end)
end)
