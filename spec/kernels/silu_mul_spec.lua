-- Tolerance: an exponential, a division and two products in f32, 6e-7; then half a step
-- of the dtype, with room for a last bit that falls the other way.
local kv = require "kvlab"
local S = require "spec.support"
local reference = require "spec.reference.math"

local function inputs(dev, dtype, shape)
  local cpu = kv.device "cpu"
  return S.randn(cpu, dtype, shape, 1):to(dev), S.randn(cpu, dtype, shape, 2):to(dev)
end

describe("silu_mul", function()
  for _, dtype in ipairs { "f32", "f16", "bf16" } do
    for _, shape in ipairs { { 0, 8 }, { 1, 1 }, { 3, 37 }, { 64, 704 } } do
      S.agrees(("gates %dx%d %s"):format(shape[1], shape[2], dtype), function(dev)
        local gate, up = inputs(dev, dtype, shape)
        local out = S.poisoned(dev, dtype, shape)
        kv.check(kv.C.kvl_silu_mul(gate, up, out))
        return out
      end, function()
        local gate, up = inputs(kv.device "cpu", dtype, shape)
        return reference.map(function(g, u) return reference.unary.SILU(g) * u end,
          gate:list(), up:list())
      end, 1e-7, dtype == "f32" and 6e-7 or 2 * S.eps[dtype])
    end
  end

  S.it_on_cpu("has 0 where the gate is far below 0", function(dev)
    local gate, up = kv.full(dev, "f32", { 1, 3 }, -1e4), kv.ones(dev, "f32", { 1, 3 })
    kv.check(kv.C.kvl_silu_mul(gate, up, gate))
    S.equal(gate, { 0, 0, 0 })
  end)

  it("refuses inputs of different shapes", function()
    local cpu = kv.device "cpu"
    local a, b = kv.zeros(cpu, "f32", { 2, 3 }), kv.zeros(cpu, "f32", { 2, 4 })
    S.fails(kv.C.kvl_silu_mul(a, b, a), "silu_mul",
      "up is f32 [2, 4]", "dim=3")
  end)
end)
