--- An engine runs any family that keeps the contract at the head of
-- lua/models/engine.lua: here one that differs from Llama in every part. Its layers are
-- attention alone, between two norms, with ALiBi in place of rope. Tolerance: f32 against
-- f32, sums in another order: 1e-4 of logits that are O(1).
local engine = require "models.engine"
local kv = require "kvlab"
local llama = require "models.llama"
local support = require "spec.support"
local tiny_family = require "spec.models.tiny"
local traces = require "spec.traces"

local tiny, Tiny = tiny_family.tiny, tiny_family.Tiny

-- ---- specs ----------------------------------------------------------------------------

local TOKENS = {}
for i = 1, 45 do TOKENS[i] = (i * 37) % 97 end

local function first(n) return { unpack(TOKENS, 1, n) } end

--- The logits of one row, counted from 1, as a list.
local function row_of(logits, row) return logits:index(row - 1):list() end

local function check(dev)
  describe("an engine of another family on " .. dev:name(), function()
    local model = tiny(dev)
    local whole = model:engine { blocks = 16, chunk = 64 }
    local want = whole:prefill_all(whole:sequence(), TOKENS)

    it("sees every token: the first one changes the logits of the last", function()
      local other = first(#TOKENS)
      other[1] = 5
      local e = model:engine { blocks = 16, chunk = 64 }
      local got = e:prefill(e:sequence(), other)
      assert.is_true((got - want:narrow(#TOKENS - 1, 1)):abs():max():item() > 1e-3)
    end)

    it("gives the same over int8 through graphs, a ring and a hot cache", function()
      local function answer(o)
        o.blocks, o.format, o.max_blocks = 16, "int8", 16
        local path = kv.paths.root .. "/spec/data/gguf/llama.gguf"
        local e = llama.load(path, { device = dev, dtype = "f32" }):engine(o)
        local seq = e:sequence()
        local ids = e:generate(seq, e:prefill(seq, first(20)), 8)
        ids[#ids + 1] = e:decode({ seq:fork() }, { 7 }):argmax():item()
        e.cache:close()
        return ids
      end
      local want_ids = answer {}
      for _, o in ipairs { { graph = true }, { offload = { slots = 2 } },
                           { offload = { slots = 2, hot_slots = 64 } } } do
        assert.same(want_ids, answer(o))
      end
    end)

    it("verifies a draft with the logits of decode, and takes tokens back", function()
      for _, o in ipairs { {}, { graph = true, max_blocks = 16 },
          { offload = { slots = 2, slot_blocks = 1 } },
          { offload = { hot_slots = 96 } },
          { graph = true, max_blocks = 16, offload = { hot_slots = 96 } } } do
        o.blocks, o.chunk, o.block_size, o.max_seqs = 16, 64, 8, 2
        local e = model:engine(o)
        local seqs = { e:sequence(), e:sequence() }
        e:prefill(seqs[1], first(10))
        e:prefill(seqs[2], first(19))
        local wrong, at = { 3, 3, 3 }, { 10, 19 }
        for step = 1, 6 do -- the second and third of a shape are recorded and replayed
          local mine, other = first(at[1] + 2), first(at[2] + 1)
          local draft = { mine[at[1] + 1], mine[at[1] + 2], wrong[1], wrong[2],
                          other[at[2] + 1], wrong[3] }
          local got = e:verify(seqs, { 4, 2 }, draft)
          assert.same({ 6, 97 }, got:dims())
          local what = ("step %d, %s"):format(step, o.graph and "replayed" or "eager")
          for row, token in pairs { [0] = at[1], at[1] + 1, [4] = at[2] } do
            support.close(got:narrow(row, 1), want:narrow(token, 1), 1e-4, 1e-4, what)
          end
          e:take_back { 2, 1 }
          at = { at[1] + 2, at[2] + 1 }
          assert.equal(at[1], seqs[1]:length())
          assert.equal(at[2], seqs[2]:length())
        end
        local next_ids = { TOKENS[at[1] + 1], TOKENS[at[2] + 1] }
        support.close(e:decode(seqs, next_ids):narrow(0, 1),
          want:narrow(at[1], 1), 1e-4, 1e-4)
        e.cache:close()
      end
    end)

    it("gives the same logits in any chunking", function()
      for _, chunk in ipairs { 1, 7, 16, 44 } do
        local e = model:engine { blocks = 16, chunk = chunk, block_size = 8 }
        support.close(e:prefill_all(e:sequence(), TOKENS), want, 1e-4, 1e-4,
          "chunk " .. chunk)
      end
    end)

    it("decodes to what a prefill of everything gives", function()
      local e = model:engine { blocks = 16 }
      local seq = e:sequence()
      local got = e:prefill(seq, first(20))
      for at = 20, #TOKENS do
        support.close(got, row_of(want, at), 1e-4, 1e-4, "token " .. at)
        if at < #TOKENS then got = e:decode({ seq }, { TOKENS[at + 1] }) end
      end
    end)

    it("gives a batch of prompts what each gets by itself", function()
      local e = model:engine { blocks = 16 }
      local a, b = e:sequence(), e:sequence()
      local both = first(9)
      for i = 1, 4 do both[9 + i] = TOKENS[i] end
      local got = e:prefill_batch({ a, b }, { 9, 4 }, both)
      support.close(got:index(0), row_of(want, 9), 1e-4, 1e-4, "first")
      support.close(got:index(1), row_of(want, 4), 1e-4, 1e-4, "second")
    end)

    it("replays from a graph what it decodes eagerly", function()
      local e = model:engine { blocks = 16, block_size = 8, max_blocks = 8, graph = true }
      local a, b = e:sequence(), e:sequence()
      e:prefill(a, first(10))
      e:prefill(b, first(15))
      for step = 1, 20 do
        local got = e:decode({ a, b }, { TOKENS[10 + step], TOKENS[15 + step] })
        support.close(got:index(0), row_of(want, 10 + step), 1e-4, 1e-4, "a " .. step)
        support.close(got:index(1), row_of(want, 15 + step), 1e-4, 1e-4, "b " .. step)
      end
      assert.truthy(e.graphs[2])
    end)

    it("asks for the views of a size of step once", function()
      local one = tiny(dev)
      local e = one:engine { blocks = 16, chunk = 8 }
      local seq = e:sequence()
      e:prefill(seq, first(20))
      for i = 21, 25 do e:decode({ seq }, { TOKENS[i] }) end
      assert.same({ [1] = 1, [4] = 1, [8] = 1 }, one.asked)
    end)

    it("keeps its buffers when its first steps run in a kv.scope", function()
      local e = model:engine { blocks = 16 }
      local seq = e:sequence()
      kv.scope(function()
        e:prefill(seq, first(20))
        e:decode({ seq }, { TOKENS[21] })
      end)
      support.close(e:decode({ seq }, { TOKENS[22] }), row_of(want, 22), 1e-4, 1e-4)
    end)
  end)
end

support.each_device(check)

describe("a decode step of an engine", function()
  local cpu = kv.device "cpu"
  local models = {
    tiny = tiny(cpu), llama = llama.load(kv.paths.root .. "/lua/models/recall",
      { device = cpu }),
  }
  --- A function that decodes one token behind 30 others.
  local function stepper(model, o)
    o.blocks, o.max_blocks = 8, 8
    local e = model:engine(o)
    local seq, token = e:sequence(), { 7 }
    e:prefill(seq, first(30))
    local seqs = { seq }
    return function()
      e:decode(seqs, token)
      seq:truncate(30)
    end
  end

  for name, model in pairs(models) do
    for how, o in pairs { eager = {}, replayed = { graph = true } } do
      it(("of %s, %s, compiles: no line of lua/models aborts a trace"):format(name, how),
        function()
          local step = stepper(model, { graph = o.graph })
          for _ = 1, 3 do step() end
          jit.flush()
          local aborts, formed = traces.aborts_of(function()
            for _ = 1, 500 do step() end
          end)
          for _, abort in ipairs(aborts) do
            local file = abort:match "^([%w_]+)%.lua"
            assert.is_false(file == "engine" or file == name or file == "engine_spec",
              abort)
          end
          assert.is_true(formed > 0)
        end)

      it(("of %s, %s, allocates nothing on the device"):format(name, how), function()
        local step = stepper(model, { graph = o.graph })
        for _ = 1, 3 do step() end
        local before = cpu:stats().allocations
        for _ = 1, 10 do step() end
        assert.equal(before, cpu:stats().allocations)
      end)
    end
  end
end)

describe("options of an engine", function()
  local model = tiny(kv.device "cpu")
  --- The error of engine options, which blames the line that gives them.
  local function message(o)
    local line = debug.getinfo(1, "l").currentline + 1
    local ok, text = pcall(function() model:engine(o) end)
    assert.is_false(ok)
    assert.truthy(text:find("engine_spec.lua:" .. line .. ": engine: ", 1, true), text)
    return text
  end

  it("are refused by name, with the nearest one", function()
    assert.matches('"polciy" is no option, did you mean policy%?',
      message { polciy = kv.policy "full" })
    assert.matches('"offlod" is no option, did you mean offload%?',
      message { offlod = {} })
  end)

  it("are refused by type, with what was expected", function()
    assert.matches('policy is "quest", expected a policy', message { policy = "quest" })
    assert.matches("prefill_policy is a table, expected a policy",
      message { prefill_policy = { ratio = 0.1 } })
    assert.matches("blocks is 1.5, expected a whole number >= 1",
      message { blocks = 1.5 })
    assert.matches("chunk is 0, expected", message { chunk = 0 })
    assert.matches("offload is true, expected a table", message { offload = true })
    assert.matches("graph is 1, expected true or false", message { graph = 1 })
    assert.matches('format is "i32", expected one of',
      message { format = "i32" })
    assert.matches("options are 3, expected a table", message(3))
  end)
end)

describe("a model that lacks what an engine asks for", function()
  local function refused(words, change)
    local model = tiny(kv.device "cpu")
    change(model)
    local line = debug.getinfo(1, "l").currentline + 1
    local ok, text = pcall(function() engine.new(model) end)
    assert.is_false(ok)
    assert.truthy(text:find("engine_spec.lua:" .. line .. ":", 1, true), text)
    assert.truthy(text:find(words, 1, true), text)
  end

  it("is refused with the name of it", function()
    refused("states of the model is 3, expected a function",
      function(model) model.states = 3 end)
    refused("forward_layer of the model is nil, expected a function", function(model)
      setmetatable(model, { __index = function(_, name)
        return name ~= "forward_layer" and Tiny[name] or nil
      end })
    end)
    refused("config.vocab of the model is nil, expected a whole number >= 1",
      function(model) model.config.vocab = nil end)
    refused("config.layers of the model is nil", function(model) model.config = nil end)
  end)
end)
