--- Exact.
local kv = require "kvlab"
local S = require "spec.support"
local topk_cases = require "spec.kernels.topk_cases"
local reference = require "spec.reference.indexer"

local cpu = kv.device "cpu"

local cases = {}
for _, to in ipairs { "indices", "paged", "shared", "ragged" } do
  for _, size in ipairs { { 1, 1, 1 }, { 6, 90, 33 }, { 3, 700, 257 }, { 0, 5, 3 },
                          { 4, 8, 0 } } do
    cases[#cases + 1] = { kind = "few", rows = size[1], n = size[2], k = size[3],
                          to = to ~= "indices" and to or nil }
  end
end

--- Indices within and past the tables, with -1 anywhere.
local function indices_of(c)
  local rng, list = S.rng(c.rows + c.k), {}
  for i = 1, c.rows * c.k do list[i] = rng(c.n + 20) - 1 end
  return list
end

local function run(dev, c, by_lens, in_place)
  local _, _, lens, transform, keep = topk_cases.on(dev, c)
  local indices = kv.from(dev, "i32", { c.rows, c.k }, indices_of(c))
  local out = in_place and indices or S.poisoned(dev, "i32", { c.rows, c.k })
  kv.check(kv.C.kvl_transform_indices(not by_lens and indices or nil,
    by_lens and lens or nil, transform, out))
  return out, keep
end

local function expected(c, by_lens)
  local made, indices, out = topk_cases.make(c), indices_of(c), {}
  for i = 0, c.rows * c.k - 1 do
    local r = math.floor(i / c.k)
    local p = indices[i + 1]
    if by_lens then p = i % c.k < made.lens[r + 1] and i % c.k or -1 end
    out[i + 1] = reference.transform(made.transform, c.rows, r, p)
  end
  return out
end

describe("transform_indices", function()
  S.it_on_cpu("transforms indices, also in place", function(dev)
    for _, c in ipairs(cases) do
      S.equal(run(dev, c), expected(c))
      S.equal(run(dev, c, false, true), expected(c))
    end
  end)

  S.it_on_cpu("takes all tokens of a row where there are no indices", function(dev)
    for _, c in ipairs(cases) do S.equal(run(dev, c, true), expected(c, true)) end
  end)

  S.it_on_gpu("agrees with the CPU", function(cuda)
    for _, c in ipairs(cases) do
      for _, by_lens in ipairs { false, true } do
        S.equal(run(cuda, c, by_lens), run(cpu, c, by_lens))
      end
      S.equal(run(cuda, c, false, true), run(cpu, c))
    end
  end)

  it("wants indices or lens", function()
    local out, lens = kv.zeros(cpu, "i32", { 2, 2 }), kv.zeros(cpu, "i32", { 2 })
    S.fails(kv.C.kvl_transform_indices(nil, nil, nil, out), "both missing")
    S.fails(kv.C.kvl_transform_indices(out, lens, nil, out), "both given")
  end)
end)
