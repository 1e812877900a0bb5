--- The policies' scores and summaries as expressions, held to the ops that the shipped
-- policies call and to tensor ops (bench/lib/shipped.lua). Stated tolerance: 1e-4 of the
-- larger number, because the order of sums differs.
local compiler = require "kvlab.kernel.run.compiler"
local expressions = require "spec.expressions"
local kv = require "kvlab"
local support = require "spec.support"

if not io.open(kv.paths.root .. "/bench/lib/shipped.lua") then return end -- a bundle
local shipped = require "bench.lib.shipped"

local TOLERANCE = 1e-4

local SHAPES = {
  { dtype = "f32", group = 1, kv_heads = 2, block_size = 4, head_dim = 16,
    lens = { 2, 23, 16 } },
  { dtype = "bf16", group = 4, kv_heads = 2, block_size = 16, head_dim = 64,
    lens = { 17, 160 }, query_dtype = "bf16" },
  { dtype = "f16", group = 3, kv_heads = 1, block_size = 8, head_dim = 128,
    lens = { 64, 65, 63 } },
  { dtype = "f8e4m3", group = 2, kv_heads = 2, block_size = 16, head_dim = 32,
    lens = { 2, 130 } },
}

--- The scores of the blocks that exist; nothing reads the scores behind them. ranks: take
-- the score of the sequence's first block away from each, for scores that only rank.
local function scores_of(rig, way, ranks)
  shipped.begin(rig)
  local scores = way.score(rig.ctx)
  local list, heads, width, found = scores:list(), scores:size(1), rig.ctx.width, {}
  for s, length in ipairs(rig.o.lens) do
    for head = 0, rig.o.kv_heads - 1 do
      local row = ((s - 1) * heads + (heads == 1 and 0 or head)) * width
      for b = 1, math.ceil(length / rig.o.block_size) do
        found[#found + 1] = list[row + b] - (ranks and list[row + 1] or 0)
      end
    end
  end
  return found
end

local function same(what, got, want)
  local why = expressions.difference(got, want, TOLERANCE)
  assert.is_nil(why, ("%s: %s"):format(what, why or ""))
end

local function compare(dev, case, o)
  local rig = shipped.rig(dev, o)
  local x = case.expression(rig)
  for _, kind in ipairs { "hand", "tensors" } do
    local other = case[kind] and case[kind](rig)
    if other and other.update then
      x.update(rig.ev)
      other.update(rig.ev)
      local fields = x.fields()
      for name, values in pairs(other.fields and other.fields() or {}) do
        same(kind .. ", " .. name, fields[name]:list(), values:list())
      end
    end
    if other and other.score and x.score then
      same(kind .. ", score", scores_of(rig, x, case.ranks),
        scores_of(rig, other, case.ranks))
    end
  end
end

--- The shapes that suit a case.
local function shapes_of(case)
  local list = {}
  for _, o in ipairs(SHAPES) do
    if not case.group or case.group == o.group then list[#list + 1] = o end
  end
  return list
end

--- most: of the shapes that one case meets, unless --full.
local function cases_on(dev, most)
  for i, case in ipairs(shipped.cases) do
    for _, o in ipairs(support.one_each(shapes_of(case), i, most)) do
      it(("%s: %s, group %d, block %d, head_dim %d"):format(case.name, o.dtype, o.group,
        o.block_size, o.head_dim), function()
        kv.scope(compare, dev, case, o)
      end)
    end
  end

  it("gsa_on_device selects the same blocks", function()
    local case
    for _, one in ipairs(shipped.cases) do
      if one.name == "gsa_on_device" then case = one end
    end
    for _, o in ipairs(SHAPES) do
      local rig = shipped.rig(dev, o)
      local x, hand = case.expression(rig), case.hand(rig)
      x.update(rig.ev)
      hand.update(rig.ev)
      shipped.begin(rig)
      local budget = kv.policy.recent(1)
      budget.blocks = 4
      local want = rig.ctx:select_nearest(hand.policy.hashes, budget):list()
      shipped.begin(rig)
      assert.same(want, rig.ctx:select(x.score(rig.ctx), budget):list())
    end
  end)
end

describe("what policies compute, as expressions", function()
  local usual = compiler.level
  setup(function() compiler.level = "-O3" end) -- as they ship
  teardown(function() compiler.level = usual end)

  if not compiler.find() then
    pending "there is no C compiler"
    return
  end
  cases_on("cpu", 1) -- a compiler takes longer than all else
end)

describe("what policies compute, as expressions in CUDA #gpu", function()
  if not kv.cuda_available() then return end
  cases_on "cuda"
end)
