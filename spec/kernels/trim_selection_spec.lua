--- Exact: the weights of these cases are whole numbers, whose sums are exact.
local kv = require "kvlab"
local support = require "spec.support"
local reference = require "spec.reference.attention"
local selection_cases = require "spec.kernels.selection_cases"

local NAN = 0 / 0

local kinds = {
  distinct = function(rng) return 1 + rng(100000) end,
  few = function(rng) return rng(4) end,
  equal = function() return 3 end,
  zeros = function() return 0 end,
  one = function(_, i) return i == 5 and 1e6 or 0 end,
  mixed = function(rng, i) return i % 7 == 3 and NAN or i % 5 == 1 and -4 or rng(50) end,
}

--- Selections of `most` blocks of each row, and the weights.
local prepare = support.latest(function(c)
  local rng, weights, selection = support.rng(#c.lens * 7 + c.max_blocks), {}, {}
  for s = 1, #c.lens do
    local row
    for head = 1, c.heads do
      local n = math.ceil(c.lens[s] / c.block_size)
      if not c.is_shared or head == 1 then
        row = {}
        for b = 0, c.max_blocks - 1 do
          row[b + 1] = kinds[c.kind](rng, b)
          weights[#weights + 1] = row[b + 1]
        end
      end
      local chosen = reference.select(row, n, { blocks = math.ceil(c.most / head),
        sink = c.sink, recent = c.recent }, c.max_selected)
      for i = 1, c.max_selected do selection[#selection + 1] = chosen[i] or -1 end
    end
  end
  return { weights = weights, selection = selection }
end)

local function run(dev, c, counted)
  local case, rows = prepare(c), #c.lens
  local selection = kv.from(dev, "i32", { rows, c.heads, c.max_selected }, case.selection)
  local counts = support.poisoned(dev, "i32", { rows, c.heads })
  kv.check(kv.C.kvl_trim_selection(
    kv.from(dev, "f32", { rows, c.is_shared and 1 or c.heads, c.max_blocks },
      case.weights),
    kv.from(dev, "i32", { rows }, c.lens), c.block_size, c.mass, c.sink, c.recent,
    selection, counted and counts or nil))
  return selection, counts
end

local function expected(c)
  local case, selection, counts = prepare(c), {}, {}
  for row = 0, #c.lens * c.heads - 1 do
    local n = math.ceil(c.lens[math.floor(row / c.heads) + 1] / c.block_size)
    local weights, chosen = {}, {}
    local of = c.is_shared and math.floor(row / c.heads) or row
    for b = 1, n do weights[b] = case.weights[of * c.max_blocks + b] end
    for i = 1, c.max_selected do
      local block = case.selection[row * c.max_selected + i]
      if block >= 0 then chosen[#chosen + 1] = block end
    end
    local kept = reference.trim_selection(weights, chosen, c.mass, c.sink, c.recent)
    for i = 1, c.max_selected do selection[#selection + 1] = kept[i] or -1 end
    counts[#counts + 1] = #kept
  end
  return selection, counts
end

local cases = {}
for _, kind in ipairs(support.names(kinds)) do
  for _, mass in ipairs { 0, 0.25, 0.5, 0.875, 1 } do
    for _, ends in ipairs { { 0, 0 }, { 1, 2 }, { 3, 0 }, { 30, 30 } } do
      for _, most in ipairs { 0, 1, 8, 1000 } do
        cases[#cases + 1] = { kind = kind, mass = mass, sink = ends[1], recent = ends[2],
          most = most, is_shared = #cases % 3 == 1,
          lens = { 0, 1, 16, 17, 300, 513 }, block_size = 16, heads = 2,
          max_blocks = 40, max_selected = 40 }
      end
    end
  end
end
local long = {}
for _, kind in ipairs(support.names(kinds)) do
  for _, mass in ipairs { 0.5, 0.75 } do
    long[#long + 1] = { kind = kind, mass = mass, sink = 1, recent = 2, most = 4000,
      lens = { 5000, 4999, 0 }, block_size = 1, heads = 1, max_blocks = 5000,
      max_selected = 4500 }
  end
end

local topics = { { "keeps the fewest blocks that reach the mass", cases },
                 { "is exact for long sequences", long } }

describe("trimming selections", function()
  for _, topic in ipairs(topics) do
    selection_cases.on_cpu(topic, run, expected)
    selection_cases.on_gpu(topic, run)
  end

  support.it_on_cpu("runs without counts", function(dev)
    support.equal((run(dev, cases[7])), (expected(cases[7])), "selection")
  end)

  it("refuses a mass that is no share", function()
    local cpu = kv.device "cpu"
    local weights = kv.zeros(cpu, "f32", { 1, 1, 4 })
    local selection, lens = kv.zeros(cpu, "i32", { 1, 1, 2 }), kv.zeros(cpu, "i32", { 1 })
    support.fails(kv.C.kvl_trim_selection(weights, lens, 16, 1.5, 0, 0, selection, nil),
      "trim_selection", "mass is 1.5, expected 0 ... 1")
    support.fails(kv.C.kvl_trim_selection(weights, lens, 16, 0.5, -1, 0, selection, nil),
      "trim_selection", "sink is -1")
  end)
end)
