--- Requests of a server with policies of their own: each gets what it gets alone, with KV
-- on the device or in host memory, with graphs, and after others with other policies
-- computed the blocks that it shares.
local interrupted = require "spec.interrupted"
local kv = require "kvlab"
local support = require "spec.support"
local tiny = require("spec.models.tiny").tiny

local C = kv.C
local cpu = kv.device "cpu"
local model = tiny(cpu)
model.head = kv.randn(cpu, "f32", { 97, 32 }, { seed = 5, std = 0.5 })
function model.logits(self, states, out) states:matmul_t(self.head, out) end
local raises = support.raises

local TIERS = { resident = {}, ring = { slots = 2, slot_blocks = 2 },
                hot = { slots = 2, slot_blocks = 2, hot_slots = 640 } }
local POLICIES = { { "full" }, { "quest", { ratio = 0.3, min_blocks = 2 } },
                   { "streaming_blocks",
                     { blocks = 3, min_blocks = 1, sink = 1, recent = 1 } },
                   { "quest", { ratio = 0.6, min_blocks = 1 } } }

local function engine(o)
  o = o or {}
  o.blocks, o.block_size, o.chunk, o.max_seqs = 96, 4, 16, 8
  return model:engine(o)
end

--- Prompts that begin alike, so that they share blocks.
local function prompt(i)
  local tokens = {}
  for t = 1, 25 + i do tokens[t] = (t * 31 + (t > 16 and i or 0) * 7) % 97 end
  return tokens
end

local function policy(i) return kv.policy(unpack(POLICIES[i % #POLICIES + 1])) end

local function submit(server, i, o)
  local given = { tokens = prompt(i), max_tokens = 12, keep_output = false }
  for name, value in pairs(o or {}) do given[name] = value end
  return assert(server:submit(given))
end

--- What request i gets on an engine of its own, whose policy is its own.
local function alone(i, o)
  local own = policy(i)
  local options = { policy = own }
  for name, value in pairs(o or {}) do options[name] = value end
  local e = engine(options)
  local server = kv.serve { engine = e }
  local r = submit(server, i)
  server:run()
  local output = r:output()
  server:close()
  e.cache:close()
  return output
end

describe("requests with attentions of their own", function()
  for name, offload in pairs(TIERS) do
    it("get what they get alone: " .. name, function()
      local o = { offload = next(offload) and offload or nil }
      local e = engine { offload = o.offload }
      local server, attentions = kv.serve { engine = e, keep = false }, {}
      for i = 1, #POLICIES do attentions[i] = e:attention_of(policy(i)) end
      local list = {}
      for round = 1, 2 do -- in the second, all blocks of prompts are there
        for i = 1, 8 do
          list[i] = submit(server, i, { attention = attentions[(i - 1) % #POLICIES + 1] })
        end
        server:run()
        for i = 1, 8 do
          assert.same(alone(i, o), list[i]:output(), ("round %d, %d"):format(round, i))
        end
      end
      assert.same({}, server.requests)
      server:close()
      assert.equal(96, e.cache:blocks_free())
      e.cache:close()
    end)
  end

  it("get what they get alone where steps are replayed from graphs", function()
    local e = engine { graph = true, max_blocks = 24 }
    local server, attentions, list = kv.serve { engine = e }, {}, {}
    for i = 1, 2 do attentions[i] = e:attention_of(policy(i)) end
    for i = 1, 2 do list[i] = submit(server, i, { attention = attentions[i] }) end
    server:run()
    for i = 1, 2 do assert.same(alone(i), list[i]:output()) end
    server:close()
    e.cache:close()
  end)

  it("leave the engine its own attention, whenever Ctrl-C comes", function()
    local e = engine()
    local server, own, came = kv.serve { engine = e }, e.attention, 0
    local r = submit(server, 1, { attention = e:attention_of(policy(1)) })
    local ok, why
    for nth = 20, math.huge, 23 do
      jit.flush() -- compiled code calls no hook
      ok, why = interrupted.at_calls(function() return server:step() end, function(n)
        if n < nth or C.kvl_interrupt_hold(0) > 0 then return end
        debug.sethook()
        error("interrupted", 0)
      end)
      assert(ok or tostring(why):find("interrupted", 1, true), why)
      assert.equal(own, e.attention)
      assert.is_nil(own.probe)
      assert.equal(0, C.kvl_interrupt_hold(0))
      if not ok then came = came + 1 end
      if ok and not why then break end -- nothing is left to do
    end
    assert.is_true(came > 20, came)
    assert.same(alone(1), r:output())
    server:close()
    e.cache:close()
  end)

  it("have to be over the engine's cache", function()
    local e, other = engine(), engine()
    local server = kv.serve { engine = e }
    raises("request: attention is over another cache, expected one over the engine's",
      submit, server, 1, { attention = other.attention })
    server:close()
  end)
end)

describe("a server", function()
  it("names the requests of a step that failed, and goes on with the others", function()
    local left = 2
    local breaks = kv.policy.define { name = "breaks", decode = true,
      defaults = { ratio = 0.5 }, score = function(_, ctx)
        left = left - 1
        if left < 0 then error "it broke" end
        return ctx:new_scores():fill_(0)
      end }
    local e = engine()
    local server = kv.serve { engine = e }
    local good = submit(server, 4)
    local bad = submit(server, 1, { attention = e:attention_of(breaks {}) })
    local ok, why
    repeat ok, why = pcall(server.step, server) until not ok
    assert.truthy(tostring(why):find "it broke")
    assert.same({ bad }, server:failing())
    server:cancel(bad)
    server:run()
    assert.same({}, server:failing())
    assert.same(alone(0), (function()
      local r = submit(server, 0)
      server:run()
      return r:output()
    end)())
    assert.equal(12, #good:output())
    server:close()
    assert.equal(96, e.cache:blocks_free())
  end)

  it("keeps outputs to their requests where they say so", function()
    local e = engine()
    local server = kv.serve { engine = e }
    for _, keep in ipairs { false, true } do
      local first = submit(server, keep and 6 or 3, { keep_output = keep })
      server:run()
      local longer = { unpack(first.tokens) }
      longer[#longer + 1] = 1
      local r = server:submit { tokens = longer, max_tokens = 1 }
      server:run()
      local blocks = keep and first.num_computed_tokens or first.prompt_length
      assert.equal(math.floor(blocks / 4), r.blocks_shared)
    end
    server:close()
  end)

  it("says which blocks the steps of a request read", function()
    local e = engine { policy = kv.policy("streaming_blocks", POLICIES[3][2]) }
    local server, seen = kv.serve { engine = e }, 0
    submit(server, 1, { watch = true, on_token = function(r)
      if not r.reads then return end
      seen = seen + 1
      assert.equal(math.ceil((r.num_tokens - 1) / 4), r.reads.blocks)
      local sum = 0
      for _, share in ipairs(r.reads) do sum = sum + share end
      assert.near(3, sum, 1e-9)
      assert.near(1, r.reads[1], 1e-9)
      assert.near(1, r.reads[r.reads.blocks], 1e-9)
    end })
    submit(server, 2, { on_token = function(r) assert.is_nil(r.reads) end })
    server:run()
    assert.equal(11, seen)
    assert.is_nil(e.attention.probe)
    server:close()
  end)
end)
