-- Tolerance: f32 functions are polynomials good to 4e-7 relative; f16 and bf16 add half a
-- step of their own. exp below 2^-126 flushes to 0 (absolute 1.2e-38).
local kv = require "kvlab"
local S = require "spec.support"
local reference = require "spec.reference.math"

local OPS = { "NEG", "ABS", "EXP", "LOG", "SQRT", "RSQRT", "SIGMOID", "SILU", "TANH",
              "RELU", "FLOOR" }
local EDGES = { 0, 1, -1, 1e-30, -1e-30, 1e-40, 88.5, 89, -87, -88, -104, 300, -300, 1e-4,
                -1e-4, 0.624, 0.626, -0.626, 9, -9, 20, 1e30, 1 / 0, 0 / 0 }

local function input(dev, dtype, n, seed)
  local cpu = kv.device "cpu"
  local values = S.randn(cpu, dtype, { n }, seed):list()
  for i = 1, math.min(n, #EDGES) do values[i] = EDGES[i] end
  for i = #EDGES + 1, n do values[i] = values[i] * 4 end
  return kv.from(cpu, dtype, { n }, values):to(dev)
end

describe("unary", function()
  for number, op in ipairs(OPS) do
    for _, dtype in ipairs { "f32", "f16", "bf16" } do
      for _, n in ipairs { 1, 31, 40003 } do
        local function run(dev)
          local a = input(dev, dtype, n, number)
          local out = S.poisoned(dev, dtype, { n })
          kv.check(kv.C.kvl_unary(kv.C["KVL_UNARY_" .. op], a, out))
          return out
        end
        local function want()
          local out = reference.map(reference.unary[op],
            input(kv.device "cpu", dtype, n, number):list())
          for i, x in ipairs(out) do out[i] = reference.round(dtype, x) end
          return out
        end
        S.agrees(("computes %s of %d %s"):format(op, n, dtype), run, want, 1.2e-38,
          dtype == "f32" and 4e-7 or 2 * S.eps[dtype])
      end
    end
  end

  S.it_on_cpu("works in place and on nothing", function(dev)
    local a = kv.from(dev, "f32", { 3 }, { -1, 2, -3 })
    kv.check(kv.C.kvl_unary(kv.C.KVL_UNARY_ABS, a, a))
    assert.are.same({ 1, 2, 3 }, a:list())
    local empty = kv.tensor(dev, "f32", { 0 })
    kv.check(kv.C.kvl_unary(kv.C.KVL_UNARY_EXP, empty, empty))
  end)

  it("refuses whole numbers, another dtype for out and unknown ops", function()
    local cpu = kv.device "cpu"
    local i, f, h = kv.zeros(cpu, "i32", { 2 }), kv.zeros(cpu, "f32", { 2 }),
      kv.zeros(cpu, "f16", { 2 })
    S.fails(kv.C.kvl_unary(0, i, i), "unary", "a is i32 [2]", "f32")
    S.fails(kv.C.kvl_unary(0, f, h), "out is f16 [2]", "f32")
    S.fails(kv.C.kvl_unary(99, f, f), "op is 99")
  end)
end)
