--- Exact: what tiles leave is what topk_transform finds in whole rows, and their values.
local kv = require "kvlab"
local S = require "spec.support"
local topk_cases = require "spec.kernels.topk_cases"
local reference = require "spec.reference.indexer"

local cpu = kv.device "cpu"

--- Columns [first, last) of flat rows of n.
local function columns_of(made, first, last)
  local list = {}
  for r = 0, made.rows - 1 do
    for j = first, last - 1 do list[#list + 1] = made.logits[r * made.n + j + 1] end
  end
  return list
end

--- Values and indices after all tiles of `tile` columns.
local function run(dev, c, tile)
  local made = topk_cases.make(c)
  local _, starts, lens = topk_cases.on(dev, c)
  local function state(dtype)
    return { S.poisoned(dev, dtype, { c.rows, c.k }),
             S.poisoned(dev, dtype, { c.rows, c.k }) }
  end
  local values, indices, now = state "f32", state "i32", 1
  for first = 0, math.max(c.n - 1, 0), tile do
    local last = math.min(first + tile, c.n)
    local logits = kv.from(dev, made.dtype, { c.rows, last - first },
      columns_of(made, first, last))
    kv.check(kv.C.kvl_topk_merge(logits, first, starts, lens, values[now], indices[now],
      values[3 - now], indices[3 - now]))
    now = 3 - now
  end
  return indices[now], values[now]
end

--- The values at indices, -inf past them.
local function values_at(made, indices)
  local list = {}
  for i, p in ipairs(indices) do
    local r = math.floor((i - 1) / made.k)
    local start = made.starts and math.max(made.starts[r + 1], 0) or 0
    list[i] = p < 0 and -math.huge or made.logits[r * made.n + start + p + 1]
  end
  return list
end

local cases = {}
for _, c in ipairs(topk_cases.small()) do
  if not c.to then
    local tiles = c.n < 100 and { 1, 7, c.n + 1 } or { 33, 256, c.n }
    for _, tile in ipairs(tiles) do cases[#cases + 1] = { c, tile } end
  end
end
local long = {}
for _, c in ipairs(topk_cases.long()) do long[#long + 1] = { c, 4099 } end

local topics = { { "finds the same tokens tile by tile", cases },
                 { "is exact where more than 16384 logits share a bin", long } }

describe("topk_merge", function()
  for _, topic in ipairs(topics) do
    S.it_on_cpu(topic[1], function(dev)
      for i, pair in ipairs(S.cases(topic[2])) do
        local c = pair[1]
        local what = ("case %d (%s, %dx%d k %d, tiles of %d)"):format(i, c.kind, c.rows,
          c.n, c.k, pair[2])
        local indices, values = run(dev, c, pair[2])
        local want = reference.topk_transform(topk_cases.make(c))
        S.equal(indices, want, "indices of " .. what)
        S.equal(values, values_at(topk_cases.make(c), want), "values of " .. what)
      end
    end)

    S.it_on_gpu("agrees with the CPU: " .. topic[1], function(cuda)
      for i, pair in ipairs(topic[2]) do
        local indices, values = run(cuda, pair[1], pair[2])
        local want_indices, want_values = run(cpu, pair[1], pair[2])
        S.equal(indices, want_indices, "indices of case " .. i)
        S.equal(values, want_values, "values of case " .. i)
      end
    end)
  end

  it("refuses to write over what it reads, and a first column below 0", function()
    local logits, lens = kv.zeros(cpu, "f32", { 2, 3 }), kv.zeros(cpu, "i32", { 2 })
    local v, p = kv.zeros(cpu, "f32", { 2, 2 }), kv.zeros(cpu, "i32", { 2, 2 })
    local w, o = v:clone(), p:clone()
    local merge = kv.C.kvl_topk_merge
    S.fails(merge(logits, 0, nil, lens, v, p, v, o), "values is kept_values")
    S.fails(merge(logits, 0, nil, lens, v, p, w, p), "indices is kept_indices")
    S.fails(merge(logits, -1, nil, lens, v, p, w, o), "first is -1")
    S.fails(merge(logits, 0, nil, lens, v, p, w, lens), "indices is i32 [2]", "k=2")
  end)
end)
