--- What is checked of a policy's scores, selections and lists of tokens before their use.
local kv = require "kvlab"
local support = require "spec.support"

local cpu = kv.device "cpu"
local HEADS = 2

--- Decodes a token of two sequences, of 7 and 11 blocks, with a policy.
-- Its first step is one of prefill, the second one decodes. observe: with a probe, in a
-- second decode step.
local function decode(definition, observe)
  definition.name, definition.decode = "x", true
  local policy = kv.policy.define(definition)()
  local cache = kv.cache { device = cpu, layers = 1, blocks = 64, kv_heads = HEADS,
                           block_size = 16, head_dim = 32, format = "f32" }
  local attention = kv.attention { cache = cache, heads = 8, decode_policy = policy }
  local seqs, batch = { cache:sequence(), cache:sequence() }, cache:batch()
  local function step(counts, is_prefill)
    batch:append(seqs, counts)
    attention:begin(batch, is_prefill)
    local n = counts[1] + counts[2]
    local function draw(heads, seed)
      return kv.randn(cpu, "f32", { n, heads, 32 }, { seed = seed })
    end
    return attention:forward(0, draw(8, 1), draw(HEADS, 2), draw(HEADS, 3))
  end
  step({ 99, 169 }, true)
  local out = step({ 1, 1 }, false)
  if observe then
    kv.probe(attention)
    step({ 1, 1 }, false)
  end
  cache:close()
  return out
end

--- A policy that selects these lists: one for each sequence, for all heads.
local function selecting(lists)
  return { select_blocks = function()
    local flat = {}
    for _, list in ipairs(lists) do
      for _, block in ipairs(list) do flat[#flat + 1] = block end
    end
    return kv.from(cpu, "i32", { #lists, 1, #lists[1] }, flat)
  end }
end

local function refused(words, definition, observe)
  support.raises("policy x, layer 0: " .. words, decode, definition, observe)
end

describe("a selection", function()
  it("may be any blocks in ascending order, padded with -1", function()
    decode(selecting { { 0, 3, 6 }, { 1, -1, -1 } })
    decode(selecting { { -1, -1, -1 }, { 8, 9, 10 } })
  end)

  it("is refused with a block that is out of range", function()
    refused("entry 2 of the selection of sequence 0, head 0 is 7, expected a block, "
      .. "0 ... 6, or -1 after the last", selecting { { 0, 3, 7 }, { 8, 9, 10 } })
    refused("entry 0 of the selection of sequence 1, head 0 is -2, expected a block, "
      .. "0 ... 10", selecting { { 0, 3, 6 }, { -2, 9, 10 } })
  end)

  it("is refused with duplicates, which attention would count twice", function()
    refused("entry 1 of the selection of sequence 1, head 0 is 9 behind 9, expected "
      .. "ascending blocks, each once", selecting { { 0, 3, 6 }, { 9, 9, 10 } })
  end)

  it("is refused out of order, and with blocks behind a -1", function()
    refused("entry 1 of the selection of sequence 0, head 0 is 3 behind 5",
      selecting { { 5, 3, 6 }, { 8, 9, 10 } })
    refused("entry 2 of the selection of sequence 0, head 0 is 6 behind a -1",
      selecting { { 5, -1, 6 }, { 8, 9, 10 } })
  end)

  it("is refused with another shape or dtype", function()
    refused("the selection is i32 [1, 1, 2], expected i32 [2, 2 or 1, n]",
      selecting { { 0, 1 } })
    refused("the selection is f32 [2, 1, 1], expected i32 [2, 2 or 1, n]",
      { select_blocks = function() return kv.zeros(cpu, "f32", { 2, 1, 1 }) end })
    refused("the selection is a table, expected i32", { select_blocks = function()
      return { 1, 2 }
    end })
  end)

  it("is refused on the line of a policy that calls attention itself", function()
    local line = debug.getinfo(1, "l").currentline + 3
    local ok, text = pcall(decode, { compute_decode = function(_, attention, ctx, out)
      local selection = kv.from(cpu, "i32", { 2, 1, 1 }, { 99, 0 })
      out = attention:over(selection, ctx, out)
      return out, selection
    end })
    assert.is_false(ok)
    assert.truthy(text:find("check_spec.lua:" .. line .. ": policy x", 1, true), text)
  end)
end)

describe("scores", function()
  it("are refused with another width than the tables have", function()
    refused("scores are f32 [2, 2, 3], expected f32 [2, 2 or 1, ", { score = function()
      return kv.zeros(cpu, "f32", { 2, HEADS, 3 })
    end })
    refused("scores are f32 [1, 2, ", { score = function(_, ctx)
      return kv.zeros(cpu, "f32", { 1, HEADS, ctx.width })
    end })
    refused("scores are nil, expected f32", { score = function() end })
  end)

  it("are refused with --check when one is NaN", function()
    local definition = { defaults = { ratio = 0.3 }, score = function(_, ctx)
      local scores = ctx:new_scores(1):fill_(0)
      scores:index(1):reshape { ctx.width }:narrow(1, 1):fill_(0 / 0)
      return scores
    end }
    decode(definition)
    kv.command_line.check = true
    local ok, text = pcall(refused, "the score of sequence 1, head 0, block 1 is NaN",
      definition)
    kv.command_line.check = nil
    assert.is_true(ok, text)
  end)

  it("are refused when all are NaN or -inf, in the first step and in those observed",
    function()
      local steps, first = 0, 1
      local function definition(score)
        steps = 0
        return { defaults = { ratio = 0.3 }, score = function(_, ctx)
          steps = steps + 1
          return ctx:new_scores():fill_(steps < first and 0 or score)
        end }
      end
      local words = "all scores of step %d are NaN or -inf, expected numbers: a block "
        .. "with such a score is never selected"
      for _, score in ipairs { 0 / 0, -math.huge } do
        first = 1
        refused(words:format(2), definition(score))
        first = 2
        refused(words:format(3), definition(score), true)
      end
    end)

  -- A maximum over heads leaves NaN out, and is -inf if all are NaN.
  it("are refused when an expression makes NaN of all", function()
    local e = kv.expr
    for _, score in ipairs { ((e.q * e.mean):sum "dim" * (0 / 0)):max "head",
      ((e.q * e.mean):sum "dim" * (0 / 0)):mean "head" } do
      refused("all scores of step 2 are NaN or -inf", { defaults = { ratio = 0.3 },
        summary = { mean = e.k:mean "token" }, score = score })
    end
  end)

  it("may be all NaN where there is one block, which is always selected", function()
    local policy = kv.policy.define { name = "x", decode = true, own_bytes = 0,
      score = function(_, ctx) return ctx:new_scores():fill_(0 / 0) end } {}
    local s = kv.synthetic { device = "cpu", shape = "small", layers = 1, context = 64,
                             dtype = "f32", decode_policy = policy }
    s:decode { s:sequence(10) }
    s:close()
  end)

  it("may be NaN where they decide nothing: sink, recent and a chunk's own blocks",
    function()
      local function definition(shown)
        return { prefill = true, defaults = { ratio = 0.3, sink = 2, recent = 5 },
          score = function(_, ctx)
            local scores = ctx:new_scores(1):fill_(0 / 0)
            if not ctx.is_prefill then -- blocks 2 ... 5 of the longer sequence decide
              scores:index(1):reshape { ctx.width }:narrow(5, 1):fill_(shown)
            end
            return scores
          end }
      end
      decode(definition(0))
      refused("all scores of step 2 are NaN or", definition(0 / 0))
    end)

  it("of -inf are never selected, whatever the budget", function()
    local selection
    local definition = {
      defaults = { ratio = 1, sink = 1, recent = 1 },
      score = function(_, ctx)
        local scores = ctx:new_scores(1):fill_(-math.huge)
        scores:index(1):reshape { ctx.width }:narrow(5, 1):fill_(0)
        return scores
      end,
      compute_decode = function(self, attention, ctx, out)
        local counts
        selection, counts = self:select_blocks(ctx)
        assert.same({ 2, 3 }, counts:list())
        out = attention:over(selection, ctx, out)
        selection = selection:list()
        return out
      end,
    }
    decode(definition)
    local blocks = {}
    for _, block in ipairs(selection) do
      if block >= 0 then blocks[#blocks + 1] = block end
    end
    assert.same({ 0, 6, 0, 5, 10 }, blocks)
  end)
end)

describe("listed tokens", function()
  it("are refused with --check when one is listed twice or lies outside", function()
    local function listing(...)
      local list = { ... }
      return { compute_decode = function(_, attention, ctx, out)
        local listed = kv.from(cpu, "i32", { 2, 1, 2 }, list)
        return attention:over_tokens(listed, ctx, out), nil, nil, listed
      end }
    end
    kv.command_line.check = true
    local ok, text = pcall(function()
      decode(listing(0, 1, 5, -1))
      refused("entry 1 of list 1 is 5, expected a token of its sequence, 0 ... 169, each "
        .. "once, or -1", listing(0, 1, 5, 5))
      refused("entry 0 of list 0 is 100", listing(100, 1, 5, 6))
    end)
    kv.command_line.check = nil
    assert.is_true(ok, text)
  end)

  it("are refused when there is no list for each row", function()
    refused("the list of tokens is i32 [2, 2], expected i32 [2, 2 or 1, n]: rows of q, "
      .. "KV heads, tokens", { compute_decode = function(_, attention, ctx, out)
        return attention:over_tokens(kv.zeros(cpu, "i32", { 2, 2 }), ctx, out)
      end })
  end)
end)
