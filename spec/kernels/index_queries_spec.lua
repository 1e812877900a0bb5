--- index_queries, and index_append with a rotation, against the ops one by one: the same
-- bits.
local kv = require "kvlab"
local S = require "spec.support"

local cpu = kv.device "cpu"
local DTYPES = { "f32", "bf16", "f16" }

local function inputs(dtype, rows, heads, dim)
  return S.randn(cpu, dtype, { rows, heads, dim }, dim),
    S.randn(cpu, "f32", { rows, heads }, dim + 1)
end

--- Queries of a dtype, in all dims.
local function check_queries(dev, i, rotates)
  local dtype, kind = DTYPES[i], i == 2 and "ue8m0" or "f32"
  for _, dim in ipairs { 32, 64, 128 } do
    local q, weights = inputs(dtype, 2 * i - 1, 2 * i + 1, dim)
    q, weights = q:to(dev), weights:to(dev)
    local out, scaled = kv.ops.index_queries(q, weights, 0.37, kind, rotates)
    local want, scales = kv.ops.quantise_rows(rotates and kv.ops.hadamard(q) or q, nil,
      nil, kind)
    local what = ("%s of %d"):format(dtype, dim)
    S.equal(out, want:list(), what)
    S.equal(scaled, (scales * (weights * 0.37)):list(), "weights of " .. what)
  end
end

--- A key that is rotated while it is written, and one that was rotated before.
local function check_keys(dev, i)
  local dim, kind, caches = 16 * 2 ^ i, i == 2 and "ue8m0" or "f32", {}
  local k = S.randn(cpu, DTYPES[i], { 3, dim }, i):to(dev)
  local places = kv.from(dev, "i64", { 3 }, { 5, -1, 0 })
  for n, rotates in ipairs { true, false } do
    caches[n] = kv.full(dev, "u8", { 2, 4 * (dim + 4) }, 7)
    kv.ops.index_append(rotates and k or kv.ops.hadamard(k), places, caches[n], kind,
      rotates)
  end
  S.equal(caches[1], caches[2]:list(), DTYPES[i])
end

describe("index queries", function()
  local function both(name, check)
    for i, dtype in ipairs(DTYPES) do
      S.it_on_cpu(("%s, %s"):format(name, dtype), function(dev) check(dev, i) end)
      S.it_on_gpu(("%s, %s"):format(name, dtype), function(cuda) check(cuda, i) end)
    end
  end
  both("are quantised and weighed in one pass", check_queries)
  both("are rotated, too", function(dev, i) check_queries(dev, i, true) end)
  both("have keys that are rotated while they are written", check_keys)

  it("have words for what does not fit", function()
    local q, weights = inputs("f32", 2, 3, 64)
    local function fails(a, b, factor, out, ...)
      S.fails(kv.C.kvl_index_queries(a, b, factor, 1, 0, out, weights),
        "index_queries", ...)
    end
    local out = kv.zeros(cpu, "f8e4m3", { 2, 3, 64 })
    fails(q, kv.zeros(cpu, "f32", { 2, 4 }), 1, out, "weights is f32 [2, 4]", "heads=3")
    fails(q, weights, 1, kv.zeros(cpu, "f32", { 2, 3, 64 }), "out is f32", "f8e4m3")
    S.raises("rotates", kv.ops.index_queries, q, weights, 1, "f32", 1)
    fails(q, weights, math.huge, out, "factor is inf, expected a finite number")
    fails(kv.zeros(cpu, "f32", { 2, 3, 48 }), weights, 1,
      kv.zeros(cpu, "f8e4m3", { 2, 3, 48 }), "dim is 48")
  end)
end)
