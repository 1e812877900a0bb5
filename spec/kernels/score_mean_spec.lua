--- Tolerance: a sum of head_dim products in fp32 in another order than the reference. The
-- terms are near 1 and there are at most 576: 1e-4.
local kv = require "kvlab"
local support = require "spec.support"
local reference = require "spec.reference.attention"
local cases = require "spec.kernels.score_cases"

local function run(dev, c)
  local paged, heads, q = cases.prepare(c)
  local l, dtype = paged.layout, c.dtype or "f32"
  if dtype == "f8e4m3" then dtype = c.q or "f32" end -- means of such a cache are not
  local shape = { l.blocks, l.kv_heads, l.head_dim }
  local means, named = support.randn(kv.device "cpu", dtype, shape, 17):list(), {}
  for _, block in ipairs(paged.tables) do named[block] = true end
  for i = 1, #means do -- what no table names is not read
    if not named[math.floor((i - 1) / l.kv_heads / l.head_dim)] then means[i] = 0 / 0 end
  end
  local summary = kv.from(kv.device "cpu", dtype, shape, means)
  local _, tables, lens = paged.on(dev)
  local scores = support.poisoned(dev, "f32", { #c.lens, l.kv_heads, paged.max_blocks })
  kv.check(kv.C.kvl_score_mean(q:to(dev), summary:to(dev), tables, lens, l.block_size,
    cases.group_number(c), scores))
  return scores, function()
    return reference.score_mean { layout = l, q = q:list(), summary = summary:list(),
      tables = paged.tables, lens = c.lens, max_blocks = paged.max_blocks, heads = heads,
      group = c.join }
  end
end

cases.describe("scoring blocks by their mean", run, 1e-4, true)
