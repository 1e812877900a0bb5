--- Exact: comparisons, and whole numbers.
local kv = require "kvlab"
local S = require "spec.support"
local topk_cases = require "spec.kernels.topk_cases"
local reference = require "spec.reference.indexer"

local cpu = kv.device "cpu"

local function run(dev, c)
  local out = S.poisoned(dev, "i32", { c.rows, c.k })
  local logits, starts, lens, transform, keep = topk_cases.on(dev, c)
  kv.check(kv.C.kvl_topk_transform(logits, starts, lens, transform, out))
  return out, keep
end

local function words(i, c)
  return ("case %d (%s %s, %dx%d k %d to %s)"):format(i, c.dtype or "f32", c.kind,
    c.rows, c.n, c.k, tostring(c.to))
end

local topics = {
  { "takes the best tokens of every row, transformed or not", topk_cases.small() },
  { "is exact where more than 16384 logits share a bin", topk_cases.long() },
}

describe("topk_transform", function()
  for _, topic in ipairs(topics) do
    S.it_on_cpu(topic[1], function(dev)
      for i, c in ipairs(S.cases(topic[2])) do
        S.equal(run(dev, c), reference.topk_transform(topk_cases.make(c)), words(i, c))
      end
    end)
  end

  S.it_on_cpu("takes no token whose logit is -inf or NaN, and reads none of other rows",
    function(dev)
      local INF, NAN = math.huge, 0 / 0
      local logits = kv.full(dev, "f32", { 3, 6 }, NAN)
      logits:index(0):copy_(kv.from(dev, "f32", { 6 }, { 9, -INF, 4, NAN, 9, 9 }))
      logits:index(1):narrow(2, 3):copy_(kv.from(dev, "f32", { 3 }, { 1, 3, 2 }))
      logits:index(2):copy_(kv.from(dev, "f32", { 6 }, { -INF, 5, NAN, -INF, 7, NAN }))
      local starts = kv.from(dev, "i32", { 3 }, { 1, 2, 0 })
      local lens = kv.from(dev, "i32", { 3 }, { 3, 3, 6 })
      local function best(k)
        local out = S.poisoned(dev, "i32", { 3, k })
        kv.check(kv.C.kvl_topk_transform(logits, starts, lens, nil, out))
        return out
      end
      S.equal(best(2), { 1, -1, 1, 2, 1, 4 })
      S.equal(best(3), { 1, -1, -1, 0, 1, 2, 1, 4, -1 })
      S.equal(best(6), { 1, -1, -1, -1, -1, -1, 0, 1, 2, -1, -1, -1,
                         1, 4, -1, -1, -1, -1 })
      S.equal(best(1), { 1, 1, 4 })
    end)

  it("refuses what does not fit", function()
    local logits, lens = kv.zeros(cpu, "f32", { 4, 9 }), kv.zeros(cpu, "i32", { 4 })
    local out = kv.zeros(cpu, "i32", { 4, 2 })
    local t = require("ffi").new "kvl_transform"
    local function try()
      return kv.C.kvl_topk_transform(logits, nil, lens, t, out)
    end
    local tables, five = kv.zeros(cpu, "i32", { 3, 2 }), kv.zeros(cpu, "i32", { 5 })
    S.fails(kv.C.kvl_topk_transform(logits, five, lens, nil, out), "starts is i32 [5]",
      "rows=4")
    S.fails(kv.C.kvl_topk_transform(kv.zeros(cpu, "f16", { 4, 9 }), nil, lens, nil, out),
      "logits is f16 [4, 9]", "f32|bf16")
    t.tables, t.block_size = tables, 0
    S.fails(try(), "block_size is 0", "1 ... 4096")
    t.block_size = 16
    S.fails(try(), "4 rows for 3 sequences", "row_sequence")
    t.row_sequence = five
    S.fails(try(), "row_sequence is i32 [5]")
    t.row_sequence, t.offsets = nil, lens
    S.fails(try(), "offsets are given beside tables")
    t.tables, t.row_sequence = nil, lens
    S.fails(try(), "row_sequence is given without tables")
  end)
end)

describe("topk_transform on CUDA #gpu", function()
  for _, topic in ipairs(topics) do
    S.it_on_gpu("agrees with the CPU: " .. topic[1], function(cuda)
      for i, c in ipairs(topic[2]) do S.equal(run(cuda, c), run(cpu, c), words(i, c)) end
    end)
  end

  S.it_on_gpu("selects what the CPU selects in 1000 random cases", function(cuda)
    local rng, kinds = S.rng(77), {}
    for kind in pairs(topk_cases.kinds) do kinds[#kinds + 1] = kind end
    table.sort(kinds)
    for i = 1, 1000 do
      local long = rng(25) == 0
      local c = { kind = kinds[rng(#kinds) + 1], rows = 1 + rng(long and 3 or 40),
        n = long and 9000 + rng(30000) or rng(2500), windows = rng(2) == 0, seed = i,
        k = rng(4) == 0 and rng(3000) or rng(300),
        dtype = rng(3) == 0 and "bf16" or "f32",
        to = ({ "paged", "shared", "ragged" })[rng(4) + 1], full = rng(4) == 0 }
      S.equal(run(cuda, c), run(cpu, c), words(i, c))
    end
  end)
end)
