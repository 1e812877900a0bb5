--- Tolerance: a sum of head_dim products in fp32 in another order than the reference. The
-- terms are near 1 and there are at most 256: 1e-4.
local kv = require "kvlab"
local support = require "spec.support"
local reference = require "spec.reference.attention"
local cases = require "spec.kernels.score_cases"

local function run(dev, c)
  local paged, heads, q = cases.prepare(c)
  local l = paged.layout
  local cache, tables, lens = paged.on(dev)
  local scores = support.poisoned(dev, "f32", { #c.lens, l.kv_heads, paged.max_blocks })
  kv.check(kv.C.kvl_score_max_qk(q:to(dev), cache, nil, tables, lens,
    cases.group_number(c), scores))
  return scores, function()
    return reference.score_max_qk { layout = l, q = q:list(), cache = paged.cache,
      tables = paged.tables, lens = c.lens, max_blocks = paged.max_blocks, heads = heads,
      group = c.join }
  end
end

cases.describe("scoring blocks by the largest q . k", run, 1e-4)
