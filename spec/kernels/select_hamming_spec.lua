--- Exact, and the same as hashing, scoring and selecting by the three ops.
local ffi = require "ffi"
local kv = require "kvlab"
local cases = require "spec.kernels.hamming_cases"
local reference = require "spec.reference.hash"
local selection_cases = require "spec.kernels.selection_cases"
local support = require "spec.support"

local GROUP, DIM = 4, 24

local budgets = {
  { blocks = 0 }, { blocks = 1 }, { blocks = 5 }, { blocks = 1000 }, { ratio = 0 },
  { ratio = 0.3, sink = 1, recent = 2 }, { ratio = 1 },
  { blocks = 2, sink = 3, recent = 4 },
  { blocks = 6, recent = 1 }, { ratio = 0.5, min_blocks = 4, sink = 2 },
  { limits = 3, sink = 1, recent = 2 }, { limits = 4, min_blocks = 3 },
  { limits = 6, recent = 1 },
}

local LAST = -1e30

local function budget(b)
  return ffi.new("kvl_budget", { ratio = b.ratio or -1, blocks = b.blocks or 0,
    min_blocks = b.min_blocks or 0, sink = b.sink or 0, recent = b.recent or 0 })
end

local function lists(c) return c.is_shared and 1 or c.kv_heads end

--- The case of selecting with limits whose seed is b.limits; nil where a budget has none.
local function ragged(c, b)
  return b.limits and selection_cases.ragged(b.limits, { lens = c.lens, budget = b,
    heads = lists(c), max_blocks = c.max_blocks })
end

local function limits_of(dev, c, b)
  local r = ragged(c, b)
  return r and kv.from(dev, r.dtype, { #r.limits / r.heads, r.heads }, r.limits)
end

local queries = support.latest(function(c)
  local cpu = kv.device "cpu"
  return { planes = support.randn(cpu, "f32", { c.bits, DIM }, 5),
    q = support.randn(cpu, c.q or "f32", { #c.lens, c.kv_heads * GROUP, DIM }, 6) }
end)

local function fused(dev, c, b, max_selected)
  local p, given = cases.prepare(c), queries(c)
  local hashes, tables, lens = p.on(dev)
  local selection = support.poisoned(dev, "i32", { #c.lens, lists(c), max_selected })
  local counts = support.poisoned(dev, "i32", { #c.lens, lists(c) })
  local call, q, planes = ffi.new "kvl_hamming", given.q:to(dev), given.planes:to(dev)
  local limits = limits_of(dev, c, b)
  call.q, call.planes, call.hashes, call.limits = q, planes, hashes, limits
  call.tables, call.lens, call.budget = tables, lens, budget(b)
  call.selection, call.counts = selection, counts
  call.block_size = c.block_size
  kv.check(kv.C.kvl_select_hamming(call))
  return selection, counts
end

--- The same by hash_rows, score_hamming and select. The mean of four heads is computed in
-- the order that hashes fix; a mean and its sum have the same signs.
local function in_three_steps(dev, c, b, max_selected)
  local p, given = cases.prepare(c), queries(c)
  local hashes, tables, lens = p.on(dev)
  local selection = support.poisoned(dev, "i32", { #c.lens, lists(c), max_selected })
  local counts = support.poisoned(dev, "i32", { #c.lens, lists(c) })
  local scores = support.poisoned(dev, "f32", { #c.lens, lists(c), c.max_blocks })
  local rows = #c.lens * c.kv_heads
  local mean = kv.zeros(dev, "f32", { rows, DIM })
  local heads = given.q:to(dev):cast("f32"):reshape { rows, GROUP * DIM }
  for h = 0, GROUP - 1 do
    local columns = kv.zeros(dev, "i32", { rows, 1 })
      + kv.arange(dev, "i32", DIM, h * DIM)
    mean = mean + heads:gather(columns)
  end
  local q = kv.hash.rows(mean, given.planes:to(dev))
  kv.check(kv.C.kvl_score_hamming(q:reshape { #c.lens, c.kv_heads, p.words }, hashes,
    tables, lens, c.block_size, scores))
  scores:maximum(LAST, scores) -- a hole of the table comes last, but is eligible
  kv.check(kv.C.kvl_select(scores, lens, c.block_size, budget(b), limits_of(dev, c, b),
    selection, counts))
  return selection, counts, q
end

local function each(fn)
  for i, c in ipairs(cases.list) do
    c.q = ({ "f32", "f16", "bf16" })[1 + i % 3]
    for j, b in ipairs(budgets) do
      local most = math.max(1, c.max_blocks - (i + j) % 3 * 4) -- at times too few
      if support.is_full or (i + j) % 2 == 0 then -- a case meets every other budget
        fn(c, b, most, (" of case %d, budget %d"):format(i, j))
      end
    end
  end
end

describe("selecting blocks by their hashes", function()
  support.it_on_cpu("is hashing, scoring and selecting", function(dev)
    each(function(c, b, most, what)
      local selection, counts = fused(dev, c, b, most)
      local want, want_counts = in_three_steps(dev, c, b, most)
      support.equal(selection, want, "selection" .. what)
      support.equal(counts, want_counts, "counts" .. what)
    end)
  end)

  it("takes sinks, recent blocks and the nearest, ties to the lower index", function()
    local dev, taken = kv.device "cpu", {}
    local hash_cases = require "spec.kernels.hash_cases"
    each(function(c, b, most, what)
      local _, _, q = in_three_steps(dev, c, b, most)
      local words, per_list, want = hash_cases.words(q), cases.prepare(c).words, {}
      for s = 0, #c.lens - 1 do
        for head = 0, lists(c) - 1 do
          local scores = cases.scores(c, s, head, function(seq, g)
            return hash_cases.bits(words, (seq * c.kv_heads + g) * per_list, c.bits)
          end)
          for i, score in ipairs(scores) do scores[i] = math.max(LAST, score) end
          local r = ragged(c, b)
          local chosen = reference.select(scores, #scores,
            r and selection_cases.budget_of(r, s, head) or b, most)
          for i = 1, most do want[#want + 1] = chosen[i] or -1 end
          taken[#chosen] = true
        end
      end
      support.equal((fused(dev, c, b, most)), want, "selection" .. what)
    end)
    assert.is_true(taken[0] and taken[5] and taken[12], "budgets of many sizes")
  end)

  support.it_on_cpu("is exact for rows too long to keep distances of", function(dev)
    local c = { lens = { 70000, 33000 }, block_size = 1, kv_heads = 1, bits = 64,
                per = "block", max_blocks = 70000 }
    for _, b in ipairs { { ratio = 0.3, sink = 1, recent = 2 }, { blocks = 100 } } do
      support.equal((fused(dev, c, b, 21000)), (in_three_steps(dev, c, b, 21000)),
        "selection")
    end
  end)
end)

describe("selecting blocks by their hashes on CUDA #gpu", function()
  support.it_on_gpu("agrees with the CPU", function(cuda, cpu)
    each(function(c, b, most, what)
      local selection, counts = fused(cuda, c, b, most)
      local want, want_counts = fused(cpu, c, b, most)
      support.equal(selection, want, "selection" .. what)
      support.equal(counts, want_counts, "counts" .. what)
    end)
  end)

  support.it_on_gpu("agrees on rows that several blocks share", function(cuda, cpu)
    for _, shape in ipairs { { 1, 9000 }, { 1, 40000 }, { 3, 70000 }, { 40, 30000 },
                             { 1, 1000000 } } do
      local lens = {}
      for i = 1, shape[1] do lens[i] = i % 3 == 2 and shape[2] / 2 or shape[2] end
      local c = { lens = lens, block_size = 1, kv_heads = 1, bits = 64, per = "block",
                  max_blocks = shape[2], few = shape[1] == 3 }
      local b = { ratio = 0.3, sink = 1, recent = 2 }
      local most = math.ceil(0.3 * shape[2])
      support.equal((fused(cuda, c, b, most)), (fused(cpu, c, b, most)),
        ("selection of %d x %d"):format(shape[1], shape[2]))
    end
  end)

  support.it_on_gpu("gives the lists of a team limits of their own", function(cuda, cpu)
    for i, shape in ipairs { { 2, 300 }, { 2, 9000 }, { 1, 70000 }, { 1, 300000 } } do
      for _, bits in ipairs { 32, 64, 128 } do
        for _, per in ipairs { "block", "token" } do
          local c = { lens = {}, block_size = 1, kv_heads = 8, bits = bits, per = per,
                      max_blocks = shape[2], few = i == 1 }
          for s = 1, shape[1] do c.lens[s] = math.ceil(shape[2] / s) end
          local b = { limits = 2 * i + bits / 32 % 2, sink = 1, recent = 2 }
          local selection, counts = fused(cuda, c, b, shape[2])
          local want, want_counts = fused(cpu, c, b, shape[2])
          local what = (" of %d x %d, %d bits a %s"):format(shape[1], shape[2], bits, per)
          support.equal(selection, want, "selection" .. what)
          support.equal(counts, want_counts, "counts" .. what)
        end
      end
    end
  end)
end)
