--- layers and union: policies made of others. Selections are compared exactly.
local kv = require "kvlab"
local rig = require "spec.rig"
local support = require "spec.support"

local cpu = kv.device "cpu"

local function decode(policy, o)
  return rig.decode(cpu, { policy = policy, options = o, lengths = { 250, 90, 1 },
                           steps = 6 })
end

local function equal_selections(a, b)
  for i, step in ipairs(a.steps) do
    support.equal(step.selection, b.steps[i].selection, "step " .. i)
  end
end

describe("layers", function()
  it("selects in the layers after the dense ones, as its base does", function()
    for _, base in ipairs { "quest", "topk", "h2o_blocks", "snapkv_blocks",
                            "keydiff_blocks" } do
      local o = { ratio = 0.2, min_blocks = 0, sink = 1, recent = 1 }
      local want = decode(base, o)
      o.base, o.dense = base, 1
      equal_selections(decode("layers", o), want)
    end
  end)

  it("attends to everything in the dense layers", function()
    local run = decode("layers", { ratio = 0, min_blocks = 0, dense = 2 })
    local dense = decode("full")
    for i, step in ipairs(run.steps) do
      assert.is_nil(step.selection)
      support.equal(step.out, dense.steps[i].out)
    end
  end)

  it("refuses a base that cannot select there", function()
    support.raises("xattention does not select blocks in decode", decode, "layers",
      { base = "xattention" })
    support.raises("nsa_branches does not select blocks in decode, or has a dataflow of "
      .. "its own", decode, "layers", { base = "nsa_branches" })
    support.raises("magicpig changes or reads the weights of attention", decode, "layers",
      { base = "magicpig" })
    support.raises('no policy "qest"', decode, "layers", { base = "qest" })
  end)
end)

describe("union", function()
  local O = { ratio = 0.4, min_blocks = 0, sink = 1, recent = 1 }
  local function union(first, second, share)
    local o = { first = first, second = second, share = share }
    for key, value in pairs(O) do o[key] = value end
    return decode("union", o)
  end

  it("is its first policy with all of the budget, its second with none", function()
    for _, pair in ipairs { { "quest", "block_mean" }, { "topk", "quest" },
                            { "quest", "topk" }, { "streaming_blocks", "topk" } } do
      local first, second = decode(pair[1], O), decode(pair[2], O)
      local function same(got, want) -- one list for all heads may have become two
        for i, step in ipairs(got.steps) do
          local heads, from = step.selection:size(1), want.steps[i].selection:size(1)
          for s = 0, 2 do
            for head = 0, heads - 1 do
              support.equal(step.selection:index(s):index(head),
                want.steps[i].selection:index(s):index(math.min(head, from - 1)))
            end
          end
        end
      end
      same(union(pair[1], pair[2], 1), first)
      same(union(pair[1], pair[2], 0), second)
    end
  end)

  it("has what its first policy selects with its share of the budget", function()
    local part = decode("quest", { ratio = 0.2, min_blocks = 0, sink = 1, recent = 1 })
    local both = union("quest", "block_mean", 0.5)
    for i, step in ipairs(part.steps) do
      for s = 0, 2 do
        for head = 0, 1 do
          local has = {}
          local row = both.steps[i].selection:index(s):index(head):list()
          for _, block in ipairs(row) do has[block] = true end
          for _, block in ipairs(step.selection:index(s):index(head):list()) do
            assert.is_true(has[block])
          end
        end
      end
    end
  end)

  it("refuses a second policy without scores", function()
    support.raises("second is h2o_blocks, which has no score", union, "quest",
      "h2o_blocks", 0.5)
  end)
end)
