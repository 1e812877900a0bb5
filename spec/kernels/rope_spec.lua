-- Tolerance: the angle is one f32 product, rounded alike everywhere; sine and cosine are
-- good to 2e-7 and multiply numbers up to 5: 2e-6 absolute. f16 and bf16 add half a step.
local kv = require "kvlab"
local S = require "spec.support"
local reference = require "spec.reference.math"

local cpu = kv.device "cpu"
local CASES = {   -- tokens, heads, head_dim, pairs, first
  { 1, 1, 2, 1 }, { 5, 3, 64, 32 }, { 7, 2, 80, 40 }, { 3, 4, 40, 10 },
  { 2, 1, 600, 300 }, { 600, 2, 32, 16 }, { 4, 2, 16, 0 }, { 0, 2, 8, 4 },
  { 5, 3, 576, 32, 512 }, { 4, 2, 24, 4, 16 }, { 3, 2, 21, 5, 7 }, { 2, 2, 16, 0, 16 },
}
local POSITIONS = { 0, 1, 2, 511, 4095, 131071, 1000003, -5 }

local function inputs(dtype, tokens, heads, dim, pairs_)
  local positions, inv_freq = {}, {}
  for t = 1, tokens do
    positions[t] = POSITIONS[(t - 1) % #POSITIONS + 1] + (t > #POSITIONS and t or 0)
  end
  for i = 1, pairs_ do inv_freq[i] = 10000 ^ (-(i - 1) / pairs_) end
  return S.randn(cpu, dtype, { tokens, heads, dim }, 4),
    kv.from(cpu, "i32", { tokens }, positions), kv.from(cpu, "f32", { pairs_ }, inv_freq)
end

describe("rope", function()
  for _, c in ipairs(CASES) do
    local first = c[5] or 0
    for _, dtype in ipairs { "f32", "f16", "bf16" } do
      S.agrees(("turns %d of the %d dims of %dx%d %s from %d on"):format(2 * c[4], c[3],
        c[1], c[2], dtype, first), function(dev)
        local x, positions, inv_freq = inputs(dtype, unpack(c))
        x = x:clone():to(dev)
        kv.check(kv.C.kvl_rope(x, positions:to(dev), inv_freq:to(dev), first))
        return x
      end, function()
        local x, positions, inv_freq = inputs(dtype, unpack(c))
        return reference.rope(x:list(), positions:list(), inv_freq:list(), c[2], c[3],
          first)
      end, 2e-6, dtype == "f32" and 0 or 2 * S.eps[dtype])
    end
  end

  it("refuses more pairs than half a head and another number of positions", function()
    local x, positions = kv.zeros(cpu, "f32", { 2, 1, 8 }), kv.zeros(cpu, "i32", { 2 })
    local five = kv.zeros(cpu, "f32", { 5 })
    S.fails(kv.C.kvl_rope(x, positions, five, 0), "rope",
      "inv_freq has 5 pairs", "head_dim / 2 = 4")
    S.fails(kv.C.kvl_rope(x, kv.zeros(cpu, "i32", { 3 }), five, 0),
      "positions is i32 [3]", "tokens=2")
    S.raises("rope: inv_freq has 5 pairs, expected at most 2: head_dim is 8, and numbers "
      .. "from 4 on turn", kv.ops.rope, x, positions, five, 4)
    for _, first in ipairs { -1, 9 } do
      S.fails(kv.C.kvl_rope(x, positions, five, first), ("first is %d"):format(first),
        "0 ... head_dim = 8")
    end
  end)
end)
