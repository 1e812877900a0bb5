--- Exact: only comparisons.
local kv = require "kvlab"
local ffi = require "ffi"
local support = require "spec.support"
local reference = require "spec.reference.attention"
local selection_cases = require "spec.kernels.selection_cases"

local INF, NAN = math.huge, 0 / 0
local MIXED = { NAN, -INF, INF, 1, -1, 0, 1e-40, -1e-40, 3e38 }

--- Kinds of scores: fn(rng, i) of block i.
local kinds = {
  distinct = function(rng) return rng(1000000) / 7 - 70000 end,
  few = function(rng) return rng(4) - 2 end,
  equal = function() return 0.25 end,
  ["-inf"] = function() return -INF end,
  ["+inf"] = function() return INF end,
  nan = function() return NAN end,
  zeros = function(_, i) return i % 2 == 0 and 0 or -1 / INF end,
  mixed = function(rng) return MIXED[rng(#MIXED) + 1] end,
  rising = function(_, i) return i end,
  falling = function(_, i) return -i end,
  sparse = function(rng, i) return rng(9) == 0 and i or -INF end,
  -- A search by equal parts of the range needs further turns for these.
  outlier = function(rng, i) return i == 7 and 2 ^ 100 or 1 + rng(2 ^ 16) * 2 ^ -23 end,
  huge = function(rng) return (rng(129) - 64) * 2 ^ 121 end, -- the range overflows
  tiny = function(rng) return (rng(4000) - 2000) * 2 ^ -149 end, -- a denormal range
  powers = function(rng) return (rng(2) * 2 - 1) * 2 ^ (rng(200) - 100) end,
}

local function budget(b)
  return ffi.new("kvl_budget", { ratio = b.ratio or -1, blocks = b.blocks or 0,
    min_blocks = b.min_blocks or 0, sink = b.sink or 0, recent = b.recent or 0 })
end

local scores_of = support.latest(function(c)
  local rng, fn, scores = support.rng(#c.lens + c.max_blocks), kinds[c.kind], {}
  for i = 0, #c.lens * (c.is_shared and 1 or c.heads) * c.max_blocks - 1 do
    scores[i + 1] = fn(rng, i % c.max_blocks)
  end
  return scores
end)

local function run(dev, c, counted)
  local rows, n = #c.lens, c.max_blocks
  local selection = support.poisoned(dev, "i32", { rows, c.heads, c.max_selected })
  local counts = support.poisoned(dev, "i32", { rows, c.heads })
  local limits = c.limits and kv.from(dev, c.dtype, { #c.limits / c.heads, c.heads },
    c.limits)
  kv.check(kv.C.kvl_select(
    kv.from(dev, "f32", { rows, c.is_shared and 1 or c.heads, n }, scores_of(c)),
    kv.from(dev, "i32", { rows }, c.lens), c.block_size, budget(c.budget), limits,
    selection, counted and counts or nil))
  return selection, counts
end

local function expected(c)
  local selection, counts, scores = {}, {}, scores_of(c)
  for s = 0, #c.lens - 1 do
    for h = 0, c.heads - 1 do
      local n = math.ceil(c.lens[s + 1] / c.block_size)
      local row, first = {}, (c.is_shared and s or s * c.heads + h) * c.max_blocks
      for b = 1, n do row[b] = scores[first + b] end
      local chosen = reference.select(row, n, selection_cases.budget_of(c, s, h),
        c.max_selected)
      for i = 1, c.max_selected do selection[#selection + 1] = chosen[i] or -1 end
      counts[#counts + 1] = #chosen
    end
  end
  return selection, counts
end

local budgets = {
  { blocks = 0 }, { blocks = 1 }, { blocks = 7 }, { blocks = 1000 }, { ratio = 0 },
  { ratio = 0.1 }, { ratio = 0.5, min_blocks = 4, sink = 1, recent = 2 }, { ratio = 1 },
  { blocks = 2, sink = 3, recent = 4 }, { blocks = 12, recent = 3 },
  { blocks = 12, sink = 5 },
}

local cases = {}
for _, kind in ipairs(support.names(kinds)) do
  for _, b in ipairs(budgets) do
    cases[#cases + 1] = { kind = kind, budget = b, lens = { 0, 1, 16, 17, 300, 513 },
      block_size = 16, heads = 2, max_blocks = 40, max_selected = 40 }
  end
end
local short = {}
for max_selected = 1, 9 do
  short[#short + 1] = { kind = "few", budget = { ratio = 0.5, sink = 3, recent = 4 },
    lens = { 300, 20, 90 }, block_size = 16, heads = 1, max_blocks = 19,
    max_selected = max_selected }
end
local long = {}
for _, kind in ipairs(support.names(kinds)) do
  for _, blocks in ipairs { 1, 100, 4000 } do
    long[#long + 1] = { kind = kind, budget = { blocks = blocks, sink = 1, recent = 2 },
      lens = { 5000 }, block_size = 1, heads = 1, max_blocks = 5000, max_selected = 5000 }
  end
end
-- Lengths of rows whose scores one thread block keeps in registers: one length for every
-- number of scores that a thread can have, and the first length that is too long.
local registers = {}
for _, kind in ipairs(support.names(kinds)) do
  for _, n in ipairs { 1, 2, 31, 33, 1024, 1025, 2049, 2560, 2561, 4608, 4609, 8192, 8193,
    9216, 9217 } do
    registers[#registers + 1] = { kind = kind, lens = { n, math.ceil(n / 2) }, heads = 1,
      budget = { ratio = 0.1, sink = 1, recent = 2 }, block_size = 1, max_blocks = n,
      max_selected = n }
  end
end
--- Rows that teams of one, two and eight blocks take, some shorter than the table.
---@param most integer  of them; their number chooses the teams of a GPU, and no more
local function teams(most)
  local list = {}
  for _, kind in ipairs(support.names(kinds)) do
    for _, shape in ipairs { { 1, 9300, 700 }, { 3, 20000, 2048 }, { 40, 9300, 100 } } do
      local lens = {}
      for i = 1, math.min(shape[1], most) do
        lens[i] = i % 3 == 2 and shape[2] / 2 or shape[2]
      end
      list[#list + 1] = { kind = kind, lens = lens, block_size = 1, heads = 1,
        budget = { blocks = shape[3], sink = 1, recent = 2 }, max_blocks = shape[2],
        max_selected = shape[3] }
    end
  end
  return list
end
-- Each list has its own limit. The last shapes are those of rows in registers and, on a
-- GPU, of teams.
local ragged = {}
for _, kind in ipairs { "distinct", "few", "mixed", "sparse", "equal" } do
  for _, shape in ipairs { { 40, 6, 3, 16 }, { 40, 6, 1, 16 }, { 1024, 3, 2, 1 },
                           { 9217, 2, 3, 1 } } do
    for i = 1, 16 do
      local lens = {}
      for s = 1, shape[2] do
        local part = ({ 0, 1, 16, 17, 300, 513 })[(s + i) % 6 + 1] / 640
        lens[s] = math.ceil(part * shape[1] * shape[4])
      end
      ragged[#ragged + 1] = selection_cases.ragged(i, { kind = kind, lens = lens,
        block_size = shape[4], heads = shape[3], is_shared = i % 3 == 0,
        max_blocks = shape[1], max_selected = shape[1],
        budget = { min_blocks = i % 4, sink = i % 3, recent = i % 5 } })
    end
  end
end
local empty = { { kind = "few", budget = { blocks = 3 }, lens = {}, block_size = 16,
  heads = 2, max_blocks = 4, max_selected = 4 } }

local topics = {
  { "takes sinks, recent blocks and the best scores; -inf and NaN are not eligible",
    cases },
  { "keeps the sinks and then the most recent blocks when there is little room", short },
  { "is exact for long sequences", long },
  { "is exact for rows of every number of blocks per thread", registers },
  { "gives each list its own limit", ragged },
  { "does nothing for no sequences", empty },
}

local TEAMS = "agrees on rows that several blocks of threads share"

describe("selecting blocks", function()
  for _, topic in ipairs(topics) do selection_cases.on_cpu(topic, run, expected) end
  selection_cases.on_cpu({ TEAMS, teams(support.is_full and 40 or 4) }, run, expected)

  it("takes an f32 ratio as the number that it is nearest to", function()
    local cpu = kv.device "cpu"
    local some, n = budget { sink = 0 }, 4000
    local scores = kv.zeros(cpu, "f32", { 1, 1, n })
    for _, blocks in ipairs { 10, 30, 1000, 3000, n } do
      local lens, ratios = kv.from(cpu, "i32", { 1 }, { blocks }), {}
      for i = 0, 100 do ratios[i + 1] = i / 100 end
      local selection = kv.tensor(cpu, "i32", { 1, 101, n })
      local counts = kv.tensor(cpu, "i32", { 1, 101 })
      kv.check(kv.C.kvl_select(scores, lens, 1, some, kv.from(cpu, "f32", { 1, 101 },
        ratios), selection, counts))
      for i, count in ipairs(counts:list()) do
        assert.equal(math.ceil((i - 1) * blocks / 100), count)
      end
    end
  end)

  it("refuses limits and scores of other shapes", function()
    local cpu = kv.device "cpu"
    local function select(o)
      return kv.C.kvl_select(kv.zeros(cpu, "f32", { 2, o.score_heads or 3, 4 }),
        kv.zeros(cpu, "i32", { 2 }), 16, budget { sink = 0 },
        kv.zeros(cpu, o.dtype or "i32", { o.seqs or 2, o.lists or 3 }),
        kv.zeros(cpu, "i32", { 2, 3, 4 }), nil)
    end
    assert.equal(0, select {})
    support.fails(select { score_heads = 2 }, "scores are for 2 heads, expected 3 or 1")
    support.fails(select { seqs = 3 }, "limits are for 3 sequences, expected 2 or 1")
    support.fails(select { lists = 1 }, "limits is i32 [2, 1]")
    support.fails(select { dtype = "i64" }, "limits is i64 [2, 3]")
  end)

  support.it_on_cpu("runs without counts", function(dev)
    support.equal((run(dev, cases[3])), (expected(cases[3])), "selection")
  end)
end)

describe("selecting blocks on CUDA #gpu", function()
  for _, topic in ipairs(topics) do selection_cases.on_gpu(topic, run) end
  selection_cases.on_gpu({ TEAMS, teams(40) }, run)
end)
