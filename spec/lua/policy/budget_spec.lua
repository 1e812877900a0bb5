--- Budgets that differ among layers and heads: what is taken, what is refused, and that
-- every tier of memory, every kind of step and every count follows them.
local kv = require "kvlab"
local rig = require "spec.rig"
local support = require "spec.support"

local cpu, raises = kv.device "cpu", support.raises
local NAN = 0 / 0

--- A policy that is attached to 2 layers of 2 KV heads, blocks of 16 tokens.
local function attached(o, name)
  local its_rig = rig.new(cpu, { policy = kv.policy(name or "quest", o) })
  its_rig.cache:close()
  return its_rig.policy
end

local function by_head(dtype, ...) return kv.from(cpu, dtype, { 2, 2 }, { ... }) end

local function merged(a, b)
  for key, value in pairs(b) do a[key] = value end
  return a
end

describe("a budget", function()
  it("of a number is the same in all layers", function()
    local budget = attached({ ratio = 0.3, sink = 1, recent = 2 }).budget
    assert.equal(30, kv.policy.budget_blocks(budget, 100))
    assert.equal(30, kv.policy.budget_blocks(budget, 100, 1))
  end)

  it("of a list has a number for each layer", function()
    for option, list in pairs { ratio = { 0.3, 0.07 }, blocks = { 30, 7 },
                                tokens = { 479, 100 } } do
      local budget = attached({ [option] = list, min_blocks = 0 }).budget
      assert.equal(30, kv.policy.budget_blocks(budget, 100, 0), option)
      assert.equal(7, kv.policy.budget_blocks(budget, 100, 1), option)
    end
  end)

  it("of a tensor is known by the head that has most", function()
    local budget = attached({ ratio = by_head("f32", 0.3, 0.1, 0.1, 0.5) }).budget
    assert.equal(30, kv.policy.budget_blocks(budget, 100, 0))
    assert.equal(50, kv.policy.budget_blocks(budget, 100, 1))
  end)

  it("is refused when it is no budget, by the layer and head that are wrong", function()
    local function quest(o) return function() kv.policy("quest", o) end end
    raises("policy quest: ratio of layer 1 is 1.5, expected 0 ... 1",
      quest { ratio = { 0.1, 1.5 } })
    raises("ratio of layer 0 is nan, expected 0 ... 1", quest { ratio = { NAN, 0.1 } })
    raises("ratio of layer 1, KV head 0 is -0.5, expected 0 ... 1",
      quest { ratio = by_head("f32", 0, 1, -0.5, 1) })
    raises("ratio of layer 1, KV head 1 is nan, expected 0 ... 1",
      quest { ratio = by_head("f32", 0, 1, 0.5, NAN) })
    raises("blocks of layer 0, KV head 1 is -4, expected a whole number >= 0",
      quest { blocks = by_head("i32", 4, -4, 4, 4) })
    raises("policy gsa: sparse_ratio of layer 1 is 2, expected 0 ... 1", kv.policy, "gsa",
      { sparse_ratio = { 0.1, 2 } })
    raises("tokens of layer 1 is 2.5, expected a whole number >= 0",
      quest { tokens = { 32, 2.5 } })
    for _, wrong in ipairs { { ratio = {} }, { ratio = { "0.1" } }, { ratio = "0.1" },
        { ratio = by_head("i32", 1, 1, 1, 1) }, { ratio = kv.ones(cpu, "f32", { 4 }) },
        { blocks = by_head("f32", 4, 4, 4, 4) }, { blocks = { first = 4 } },
        { blocks = { 4, 4, first = 4 } }, { blocks = { 4, [3] = 4 } } } do
      raises("a list with one for each layer, or", quest(wrong))
    end
    raises("both blocks and ratio are given", quest { blocks = { 4, 4 }, ratio = 0.1 })
  end)

  it("is refused when it does not fit the model", function()
    raises("policy quest: ratio is a list of 3, expected a number for each of 2 layers",
      attached, { ratio = { 0.1, 0.1, 0.1 } })
    raises("blocks is i32 [2, 3], expected [2, 2]: layers, KV heads", attached,
      { blocks = kv.full(cpu, "i32", { 2, 3 }, 8) })
    raises("ratio is f32 [3, 2], expected [2, 2]: layers, KV heads", attached,
      { ratio = kv.full(cpu, "f32", { 3, 2 }, 0.1) })
  end)

  it("is checked again when it is attached", function()
    local list = { 0.5, 0.5 }
    local policy = kv.policy("quest", { ratio = list })
    list[2] = NAN
    raises("ratio of layer 1 is nan", rig.new, cpu, { policy = policy })
  end)

  it("is refused below sink + recent", function()
    local ends = { sink = 1, recent = 2 }
    raises("blocks of layer 1 is 2 blocks, expected at least sink + recent = 3", attached,
      merged({ blocks = { 3, 2 } }, ends))
    raises("blocks of layer 0, KV head 1 is 1 block, expected at least", attached,
      merged({ blocks = by_head("i32", 3, 1, 3, 3) }, ends))
    raises("tokens of layer 0 is 2 blocks, expected at least sink + recent = 3", attached,
      merged({ tokens = { 32, 48 } }, ends))
    attached(merged({ blocks = { 3, 3 } }, ends))
  end)

  it("differs among the layers of a step", function()
    local seen = {}
    local policy = kv.policy("quest", { blocks = { 4, 9 }, min_blocks = 0 })
    local select_blocks = policy.select_blocks
    policy.select_blocks = function(self, ctx)
      local selection, counts = select_blocks(self, ctx)
      if not ctx.is_prefill then seen[ctx.layer] = counts:list() end
      return selection, counts
    end
    rig.decode(cpu, { policy = policy, lengths = { 250 }, steps = 1 })
    assert.same({ [0] = { 4, 4 }, { 9, 9 } }, seen)
  end)

  local OPTIONS = {
    list = { ratio = { 0.2, 0.5 } },
    tensor = { ratio = by_head("f32", 0.2, 0.5, 0.6, 0.1) },
    blocks = { blocks = by_head("i32", 4, 9, 12, 3) },
    adaptive = { ratio = 0.3, split = "adaptive" },
  }

  for _, name in ipairs(support.names(OPTIONS)) do
    it("gives the same on every tier of memory: " .. name, function()
      for _, policy in ipairs { "quest", "topk", "gsa", "gsa_on_device", "union" } do
        local o = { policy = policy, options = OPTIONS[name], lengths = { 250, 90, 17 },
                    steps = 4 }
        local resident = rig.decode(cpu, o)
        for _, offload in ipairs { { slots = 4 }, { hot_slots = 128 },
                                   { hot_slots = 128, hot_overlap = true } } do
          o.offload = offload
          for i, step in ipairs(rig.decode(cpu, o).steps) do
            support.close(step.out, resident.steps[i].out, 3e-6, 3e-6, policy)
            if step.selection then
              support.equal(step.selection, resident.steps[i].selection, policy)
            end
          end
        end
        o.offload = nil
      end
    end)
  end

  it("gives each row of a step of several tokens what it gives it alone", function()
    local script = { { "prefill", 1, 195 }, { "prefill", 2, 90 } }
    local function play(o, last)
      local outs, its_rig = rig.play(cpu, { policy = "quest", options = o },
        { script[1], script[2], unpack(last) })
      its_rig.cache:close()
      return outs
    end
    for _, name in ipairs { "list", "tensor", "blocks" } do
      -- recent 1: a row of several always gets its own block
      local o = merged({ recent = 1, min_blocks = 0 }, OPTIONS[name])
      local together = play(o, { { "verify", { 1, 1 }, 1, 2 } })
      local alone = play(o, { { "decode", 1, 2 } })
      for s = 1, 2 do support.close(together[s][2], alone[s][2], 2e-6, 2e-6, name) end
    end
  end)

  it("is what the reads of a step follow", function()
    for _, case in ipairs { { { blocks = by_head("i32", 4, 9, 12, 3) }, { 4, 9, 12, 3 } },
                            { { blocks = { 4, 9 } }, { 4, 4, 9, 9 } },
                            { { blocks = 7, split = "adaptive" }, { 7, 7, 7, 7 } } } do
      local its_rig = rig.new(cpu, { policy = "oracle",
        options = merged({ sink = 1, recent = 2, min_blocks = 0 }, case[1]) })
      local probe = kv.probe(its_rig.attention)
      rig.play(cpu, { rig = its_rig }, { { "prefill", 1, 400 }, { "decode", 1 } })
      local metrics, sum = probe:metrics(), 0
      for _, blocks in ipairs(case[2]) do sum = sum + blocks end
      assert.near(sum / 4, metrics.blocks_read, 1e-9)
      assert.near(sum / 4 / 26, metrics.blocks_share, 1e-9)
      -- oracle reads all keys, and attention the values of what is selected
      assert.near(0.5 + 0.5 * sum / 4 / 26, metrics.bytes_share, 1e-9)
      its_rig.cache:close()
    end
  end)

  it("is passed on to nested policies, in parts", function()
    for _, case in ipairs {
      { { ratio = { 0.4, 0.8 } }, { ratio = { 0.2, 0.4 } } },
      { { blocks = { 9, 4 } }, { blocks = { 4, 3 } } },
      { { tokens = { 200, 90 } }, { tokens = { 100, 48 } } },
      { { ratio = 0.4 }, { ratio = 0.2 } }, { { blocks = 9 }, { blocks = 4 } } } do
      local p = attached(merged({ sink = 1, recent = 2 }, case[1]), "union")
      assert.same(case[2], kv.policy.part(p, 0.5))
    end
    local p = attached({ blocks = by_head("i32", 9, 4, 40, 21) }, "union")
    assert.same({ 4, 3, 20, 10 }, kv.policy.part(p, 0.5).blocks:list())
    p = attached({ ratio = by_head("f32", 0.5, 1, 0, 0.25) }, "union")
    assert.same({ 0.25, 0.5, 0, 0.125 }, kv.policy.part(p, 0.5).ratio:list())
  end)

  it("has a note where sink and recent decide in some or all of it", function()
    local ends = { sink = 1, recent = 2, min_blocks = 0 }
    local function note(o) return kv.policy.note(attached(merged(o, ends)), 100, 16) end
    assert.is_nil(note { blocks = { 3, 9 } })
    assert.is_nil(note { ratio = by_head("f32", 0.1, 0.2, 0.03, 0.4) })
    local function has(words, o) assert.is_truthy(note(o):find(words, 1, true)) end
    has("more than the budget", { ratio = { 0.5, 0.02 } })
    has("the whole budget", { blocks = { 3, 3 } })
    has("more than the budget", { ratio = 0.1, split = "pyramid" })
    assert.is_nil(note { ratio = 0.9, split = "pyramid" })
  end)

  it("of one number is what nsa lists tokens by", function()
    for _, o in ipairs { { tokens = { 32, 48 } }, { ratio = by_head("f32", 1, 1, 1, 1) },
                         { ratio = 0.1, split = "adaptive" } } do
      raises("expected a number as its budget and no split", attached,
        merged({ granularity = "token", sink = 0, recent = 0 }, o), "nsa")
    end
  end)
end)
