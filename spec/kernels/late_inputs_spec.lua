--- On a GPU, kernels guess before the kernels ahead of them have ended: they read
-- lengths, tables and positions that may still change (kernels/cuda/programmatic.cuh).
-- Here a select writes these numbers, and it waits for a matrix product that takes some
-- 60 us. By then the op after the select has long begun, with the numbers that the round
-- before left behind.
local ffi = require "ffi"
local kv = require "kvlab"
local support = require "spec.support"

local HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 8, 2, 64, 8, 640
local LENS = { 640, 400, 37 } -- among so many blocks each row selects, in turn
local ROUNDS = 4

local function randn(dev, shape, seed, dtype)
  return support.randn(kv.device "cpu", dtype or "bf16", shape, seed):to(dev)
end

--- What the ops read that nobody writes, and what they write into.
local function inputs(dev, seqs, width)
  local lens = {}
  for i = 1, seqs do lens[i] = LENS[(i - 1) % #LENS + 1] end
  local t = { device = dev, seqs = seqs, q = randn(dev, { seqs, HEADS, DIM }, 1),
    cache = randn(dev, { BLOCKS, 2, KV_HEADS, BLOCK, DIM }, 2),
    summary = randn(dev, { BLOCKS, 2, KV_HEADS, DIM }, 3),
    x = randn(dev, { 1, 4096 }, 4), weight = kv.full(dev, "bf16", { 32768, 4096 }, 0.5),
    y = kv.full(dev, "bf16", { 1, 32768 }, 0),
    k = randn(dev, { seqs * width, KV_HEADS, DIM }, 5),
    rows = randn(dev, { seqs * width, HEADS, DIM }, 6),
    inv_freq = support.randn(dev, "f32", { DIM / 2 }, 7),
    scores = support.randn(dev, "f32", { seqs, 1, LENS[1] }, 8),
    lens = kv.from(dev, "i32", { seqs }, lens),
    tokens = kv.full(dev, "i32", { seqs * width }, BLOCK) }
  local picked, places = {}, {}
  for i = 1, seqs * KV_HEADS * 5 do picked[i] = (i - 1) % 5 * 2 end
  for i = 1, seqs * width do places[i] = (i * 7) % (BLOCKS * BLOCK) end
  t.picked = kv.from(dev, "i32", { seqs, KV_HEADS, 5 }, picked)
  t.places = kv.from(dev, "i64", { seqs * width }, places)
  return t
end

local function attend(t, at, out, selection)
  local call = ffi.new("kvl_attention", { q = t.q, cache = t.cache, tables = at.tables,
    lens = at.lens, out = out, selection = selection, scale = DIM ^ -0.5, causal = 1 })
  kv.check(kv.C.kvl_paged_attention(call))
end
local function attended(t)
  return support.poisoned(t.device, "bf16", { t.seqs, HEADS, DIM })
end

--- `out` makes what the op writes into, since a launch between select and the op would
-- hold the op up. `run` gets the late inputs: tables [seqs, width], lens [seqs], limits
-- [seqs, 1], list [seqs * width].
local OPS = {
  attention = { out = attended, run = attend },
  ["attention over a selection"] = { out = attended,
    run = function(t, at, out) attend(t, at, out, t.picked) end },
  score_minmax = {
    out = function(t, width)
      return support.poisoned(t.device, "f32", { t.seqs, KV_HEADS, width })
    end,
    run = function(t, at, out)
      kv.check(kv.C.kvl_score_minmax(t.q, t.summary, at.tables, at.lens, BLOCK,
        kv.C.KVL_GROUP_MAX, out))
    end },
  block_minmax = {
    out = function(t)
      return kv.full(t.device, "bf16", { BLOCKS, 2, KV_HEADS, DIM }, -3)
    end,
    run = function(t, at, out)
      kv.check(kv.C.kvl_block_minmax(t.cache, nil, at.list, t.tokens, nil, out))
    end },
  ["select by limits"] = {
    out = function(t)
      return support.poisoned(t.device, "i32", { t.seqs, 1, LENS[1] })
    end,
    run = function(t, at, out)
      kv.check(kv.C.kvl_select(t.scores, t.lens, 1, kv.policy.recent(2), at.limits, out,
        nil))
    end },
  rope_append = {
    out = function(t) return t.rows:clone() end,
    run = function(t, at, out)
      kv.check(kv.C.kvl_rope_append(out, t.k, t.k, at.list, t.inv_freq, t.places, t.cache,
        nil))
    end },
}

local function check(dev, seqs, width, name)
  local t, op, late = inputs(dev, seqs, width), OPS[name], {}
  local function views(selection, counts)
    return { tables = selection:reshape { seqs, width }, lens = counts:reshape { seqs },
             limits = counts, list = selection:reshape { seqs * width } }
  end
  local selection = kv.full(dev, "i32", { seqs, 1, width }, 0)
  local counts = kv.full(dev, "i32", { seqs, 1 }, 0)
  local at, got, scores = views(selection, counts), {}, {}
  for i = 1, ROUNDS do
    scores[i] = support.randn(dev, "f32", { seqs, 1, LENS[1] }, 10 + i)
    got[i] = op.out(t, width)
  end
  dev:sync()
  for i = 1, ROUNDS do
    local budget = ffi.new("kvl_budget", { ratio = -1, blocks = math.ceil(width / i) })
    kv.ops.linear(t.x, t.weight, t.y, "plain")
    kv.check(kv.C.kvl_select(scores[i], t.lens, 1, budget, nil, selection, counts))
    op.run(t, at, got[i])
    late[i] = { selection:clone(), counts:clone() }
  end
  for i = 1, ROUNDS do
    local want = op.out(t, width)
    dev:sync()
    op.run(t, views(late[i][1], late[i][2]), want)
    support.equal(got[i], want, ("%s of round %d, %d x %d"):format(name, i, seqs, width))
  end
end

describe("inputs that come late #gpu", function()
  for _, name in ipairs(support.names(OPS)) do
    support.it_on_gpu(("are awaited by %s"):format(name), function(dev)
      for _, width in ipairs { 12, 600 } do check(dev, 3, width, name) end
    end)
  end
  support.it_on_gpu("are awaited by attention of many sequences", function(dev)
    for _, seqs in ipairs { 33, 70, 300, 1024 } do check(dev, seqs, 12, "attention") end
    check(dev, 70, 600, "attention")
  end)
end)
