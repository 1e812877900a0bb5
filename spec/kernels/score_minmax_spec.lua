--- Tolerance: a sum of head_dim products in fp32 in another order than the reference. The
-- terms are near 1 and there are at most 576: 1e-4.
local kv = require "kvlab"
local support = require "spec.support"
local reference = require "spec.reference.attention"
local cases = require "spec.kernels.score_cases"

--- Summaries of every block, of the valid tokens. Returns scores, and the reference's.
local function run(dev, c)
  local paged, heads, q = cases.prepare(c)
  local l = paged.layout
  local blocks, tokens = support.named_blocks(paged, true)
  local summary = {}
  for i = 1, l.blocks * 2 * l.kv_heads * l.head_dim do summary[i] = 0 / 0 end
  reference.block_minmax(paged.cache, l, blocks, tokens, summary)
  local shape = { l.blocks, 2, l.kv_heads, l.head_dim }
  local _, tables, lens = paged.on(dev)
  local scores = support.poisoned(dev, "f32", { #c.lens, l.kv_heads, paged.max_blocks })
  kv.check(kv.C.kvl_score_minmax(q:to(dev),
    kv.from(dev, c.dtype or "f32", shape, summary),
    tables, lens, l.block_size, cases.group_number(c), scores))
  return scores, function()
    return reference.score_minmax { layout = l, q = q:list(), summary = summary,
      tables = paged.tables, lens = c.lens, max_blocks = paged.max_blocks, heads = heads,
      group = c.join }
  end
end

cases.describe("scoring blocks by min and max", run, 1e-4, true)

describe("scoring blocks by min and max", function()
  support.it_on_cpu("is never below the largest q . k", function(dev)
    for i, c in ipairs(cases.list) do
      local paged, _, q = cases.prepare(c)
      local cache, tables, lens = paged.on(dev)
      local exact = support.poisoned(dev, "f32",
        { #c.lens, paged.layout.kv_heads, paged.max_blocks })
      kv.check(kv.C.kvl_score_max_qk(q:to(dev), cache, nil, tables, lens,
        cases.group_number(c), exact))
      local bound, best = run(dev, c):list(), exact:list()
      for j = 1, #best do
        if bound[j] < best[j] - 1e-4 then
          error(("case %d: bound %g of element %d is below %g"):format(i, bound[j], j - 1,
            best[j]))
        end
      end
    end
  end)
end)
