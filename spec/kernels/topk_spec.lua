-- Tolerance: none. Values are copies, the order is total.
local kv = require "kvlab"
local S = require "spec.support"
local reference = require "spec.reference.math"

local cpu = kv.device "cpu"
local INF, NAN = 1 / 0, 0 / 0

local LARGEST, BY_INDEX = kv.C.KVL_TOPK_LARGEST, kv.C.KVL_TOPK_BY_INDEX

local function run(dev, a, k, largest, by_index)
  local rows = a:size(0)
  local values = S.poisoned(dev, a:type(), { rows, k })
  local indices = S.poisoned(dev, "i32", { rows, k })
  local which = (largest and LARGEST or 0) + (by_index and BY_INDEX or 0)
  kv.check(kv.C.kvl_topk(a:to(dev), which, values, indices))
  return indices, values
end

--- Rows of k indices, each ascending.
local function ascending(list, k)
  local sorted = {}
  for first = 1, #list, k do
    local row = {}
    for i = first, first + k - 1 do row[#row + 1] = list[i] end
    table.sort(row)
    for _, index in ipairs(row) do sorted[#sorted + 1] = index end
  end
  return sorted
end

local makers = {
  normal = function(shape) return S.randn(cpu, "f32", shape, 6) end,
  coarse = function(shape)   -- many ties, both zeros, NaN and infinities
    local rng, values = S.rng(9), {}
    local odd = { NAN, INF, -INF, 0, -0.0, -NAN }
    for i = 1, shape[1] * shape[2] do
      values[i] = rng(10) == 0 and odd[rng(#odd) + 1] or rng(7) - 3
    end
    return kv.from(cpu, "f32", shape, values)
  end,
  equal = function(shape) return kv.full(cpu, "f32", shape, 2.5) end,
  close = function(shape)   -- equal but for the last bits
    local values = {}
    for i = 1, shape[1] * shape[2] do values[i] = 1 + (i * 7919 % 1021) * 2 ^ -23 end
    return kv.from(cpu, "f32", shape, values)
  end,
  whole = function(shape)
    return kv.randint(cpu, "i32", shape, { seed = 4, low = -2 ^ 31, high = 2 ^ 31 - 1 })
  end,
  ["few whole"] = function(shape)   -- many ties, and the ends
    local rng, values = S.rng(3), {}
    local odd = { -2 ^ 31, -2 ^ 31 + 1, 2 ^ 31 - 1, 2 ^ 31 - 2, -1, 0, 2 ^ 24 + 1,
                  2 ^ 24 }
    for i = 1, shape[1] * shape[2] do values[i] = odd[rng(#odd) + 1] end
    return kv.from(cpu, "i32", shape, values)
  end,
}

describe("topk", function()
  for name, make in pairs(makers) do
    for _, case in ipairs { { 1, 1, 1 }, { 3, 17, 0 }, { 3, 17, 5 }, { 2, 100, 100 },
                            { 5, 4099, 64 }, { 2, 3000, 3000 }, { 1, 70001, 1000 },
                            { 0, 5, 2 }, { 40, 2000, 128 }, { 2, 9001, 5000 },
                            { 17, 8200, 300 } } do
      local rows, n, k = case[1], case[2], case[3]
      for _, largest in ipairs { true, false } do
        local text = ("the %d %s of %dx%d %s"):format(k, largest and "largest" or "least",
          rows, n, name)
        local a, list, want -- made once for all instruction sets
        local function check_on_cpu(dev, by_index)
          a = a or make { rows, n }
          list = list or a:list()
          want = want or reference.topk(list, n, k, largest)
          local wanted, wanted_values = by_index and ascending(want, k) or want, {}
          for i, index in ipairs(wanted) do
            wanted_values[i] = list[math.floor((i - 1) / k) * n + index + 1]
          end
          local indices, values = run(dev, a, k, largest, by_index)
          S.equal(indices, wanted)
          S.equal(values, wanted_values)
        end
        S.it_on_cpu("finds " .. text, function(dev) check_on_cpu(dev, false) end)
        S.it_on_cpu("finds " .. text .. " in index order", function(dev)
          check_on_cpu(dev, true)
        end)
        S.it_on_gpu("agrees with the CPU on " .. text, function(cuda)
          a = a or make { rows, n }
          for _, by_index in ipairs { false, true } do
            local indices, values = run(cuda, a, k, largest, by_index)
            local want_indices, want_values = run(cpu, a, k, largest, by_index)
            S.equal(indices, want_indices)
            S.equal(values, want_values)
          end
        end)
      end
    end
  end

  -- Rows that a sample of the row decides: long, of any values, of few, or in order.
  -- 40000 indices have no room beside their row's bits.
  for _, case in ipairs { { 66, 131072, 2048 }, { 3, 131072, 20000 },
                          { 2, 131072, 40000 }, { 20, 70000, 9000 }, { 1, 300000, 2048 },
                          { 17, 2 ^ 20 + 5, 2048 }, { 2, 2 ^ 21 + 77, 700 } } do
    local rows, n, k = case[1], case[2], case[3]
    local kinds = { ["1 value"] = 1, ["2 values"] = 2, ["8 values"] = 8,
                    ["64 values"] = 64, rising = true, falling = true,
                    normal = false }
    for kind, values in pairs(kinds) do
      local text = ("the %d of %dx%d, %s"):format(k, rows, n, kind)
      S.it_on_gpu("agrees with the CPU on " .. text, function(cuda)
        local a
        if not values then
          a = kv.randn(cpu, "f32", { rows, n }, { seed = 8 })
        elseif values == true then
          local row = kv.arange(cpu, "f32", n) * (kind == "rising" and 1 or -1)
          a = kv.zeros(cpu, "f32", { rows, 1 }) + row:reshape { 1, n }
        else
          a = kv.randint(cpu, "i32", { rows, n }, { seed = 8, low = 0, high = values })
            :cast "f32"
        end
        for _, by_index in ipairs { false, true } do
          local indices, got = run(cuda, a, k, true, by_index)
          local want_indices, want = run(cpu, a, k, true, by_index)
          S.equal(indices, want_indices)
          S.equal(got, want)
        end
      end)
    end
  end

  for dtype, at in pairs { f16 = "f32", bf16 = "f32", f8e4m3 = "f32", u8 = "i32" } do
    S.it_on_cpu(("takes %s as %s"):format(dtype, at), function(dev)
      local a = kv.rand(dev, "f32", { 3, 70 }, { seed = 2, high = 200 }):cast "f16"
      a = dtype == "u8" and a:cast "u8" or a:cast "f32":cast(dtype)
      local values, indices = a:topk(9)
      local want_values, want_indices = a:cast(at):topk(9)
      assert.equal(dtype, values:type())
      S.equal(values, want_values)
      S.equal(indices, want_indices)
    end)
  end

  S.it_on_cpu("sorts i32", function(dev)
    local a = kv.from(dev, "i32", { { 5, -2, 5 }, { 1, 2 ^ 31 - 1, 0 } })
    local values, indices = a:sort()
    assert.same({ -2, 5, 5, 0, 1, 2 ^ 31 - 1 }, values:list())
    assert.same({ 1, 0, 2, 2, 0, 1 }, indices:list())
    local t = kv.zeros(dev, "i64", { 3 })
    S.raises("a is i64 [1, 3], expected f32|i32", t.sort, t)
  end)

  S.it_on_cpu("works without values", function(dev)
    local a, indices = makers.normal { 2, 50 }, S.poisoned(dev, "i32", { 2, 50 })
    kv.check(kv.C.kvl_topk(a, 1, nil, indices))
    S.equal(indices, reference.topk(a:list(), 50, 50, true))
  end)

  it("refuses k above n, other dtypes and other rows", function()
    local a, h = kv.zeros(cpu, "f32", { 2, 3 }), kv.zeros(cpu, "f16", { 2, 3 })
    local wide, tall = kv.zeros(cpu, "i32", { 2, 4 }), kv.zeros(cpu, "i32", { 3, 3 })
    S.fails(kv.C.kvl_topk(a, 1, nil, wide), "topk", "k is 4 and n 3")
    S.fails(kv.C.kvl_topk(h, 1, nil, wide), "a is f16 [2, 3]",
      "f32")
    S.fails(kv.C.kvl_topk(a, 4, nil, kv.zeros(cpu, "i32", { 2, 3 })), "which is 4")
    S.fails(kv.C.kvl_topk(a, 1, nil, tall),
      "indices is i32 [3, 3]", "rows=2")
  end)
end)
