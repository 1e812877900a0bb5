--- Draws of random: others for each length and layer, also in a replayed graph. Exact
-- draws; logits to 1e-5.
local kv = require "kvlab"
local support = require "spec.support"
local tiny = require("spec.models.tiny").tiny

local function check(dev)
  describe("random on " .. dev:name(), function()
    --- The logits of 20 decoded tokens of two sequences, and the engine.
    local function decode(graph)
      local engine = tiny(dev):engine { blocks = 64, block_size = 2, max_blocks = 32,
        graph = graph, policy = kv.policy("random",
          { blocks = 5, min_blocks = 0, sink = 0, recent = 1, seed = 3 }) }
      local seqs, steps = { engine:sequence(), engine:sequence() }, {}
      for i, seq in ipairs(seqs) do
        local tokens = {}
        for t = 1, 20 + i do tokens[t] = (t * 37 + i) % 97 end
        engine:prefill(seq, tokens)
      end
      for step = 1, 20 do
        steps[step] = engine:decode(seqs, { step, 50 + step }):clone()
      end
      return steps, engine
    end

    it("draws in a replayed graph what it draws eagerly", function()
      local want, replayed, engine = decode(false), decode(true)
      assert.truthy(engine.graphs[2])
      for step = 1, 20 do support.close(replayed[step], want[step], 1e-5, 1e-5) end
    end)
  end)
end

support.each_device(check)
