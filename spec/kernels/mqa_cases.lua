--- What the specs of an indexer's logits share: queries, keys and weights, ranges of
-- columns, and what the double-precision reference says of them.
--
-- The CPU sums in f32: its results are within 2e-6 of the sum of all magnitudes. Hopper's
-- tensor cores keep about 14 bits of a sum of products of f8e4m3 (2^-13 of its largest
-- term, cut off, for each of up to 4 steps): 2e-4. bf16 logits are rounded once more.
local kv = require "kvlab"
local reference = require "spec.reference.index"
local support = require "spec.support"

local M = { CPU = 2e-6, CUDA = 2e-4, POISON = 12345 }

--- Random q [rows, heads, dim] and k [tokens, dim] in f8e4m3, weights and scales; whole:
-- small whole numbers, of which every sum is exact.
function M.inputs(rows, heads, dim, tokens, seed, whole)
  local cpu = kv.device "cpu"
  local function numbers(shape, s)
    if not whole then return support.randn(cpu, "f32", shape, seed + s) end
    local o = { seed = seed + s, low = -3, high = 4 }
    return kv.randint(cpu, "i32", shape, o):cast "f32"
  end
  local scales = numbers({ tokens }, 3)
  return { rows = rows, heads = heads, dim = dim, tokens = tokens,
           q = (numbers({ rows, heads, dim }, 0) * (whole and 1 or 40)):cast "f8e4m3",
           k = (numbers({ tokens, dim }, 1) * (whole and 1 or 40)):cast "f8e4m3",
           weights = numbers({ rows, heads }, 2),
           scales = whole and scales or scales:abs() * 0.01 }
end

--- Every device's logits begin with a number that no op may touch.
function M.poisoned(dev, dtype, rows, columns)
  return kv.full(dev, dtype, { rows, columns }, M.POISON)
end

--- The number that POISON becomes in a dtype.
function M.poison(dtype) return kv.full("cpu", dtype, { 1 }, M.POISON):item() end

--- Raise unless got has logits in columns [from(r), to(r)) of every row, within `share`
-- of the sum of sizes, and POISON in the others. key(r, j) gives where key j of row r
-- begins in k and its scale, or nil where the logit is -inf.
function M.check(i, got, dtype, share, from, to, key, what)
  local q, weights, k = i.q:list(), i.weights:list(), i.k:list()
  local list, columns, poison = got:list(), got:size(1), M.poison(dtype)
  local rounding = dtype == "bf16" and support.eps.bf16 or 0
  for r = 0, i.rows - 1 do
    for j = 0, columns - 1 do
      local value, want, slack = list[r * columns + j + 1], poison, 0
      if j >= from(r) and j < to(r) then
        local at, scale = key(r, j)
        want = -math.huge
        if at then
          local size
          want, size = reference.logit(q, weights, r, i.heads, i.dim, k, at, scale)
          slack = share * size + rounding * math.abs(want)
        end
      end
      if not (value == want or math.abs(value - want) <= slack) then
        error(("%s: row %d, column %d is %.9g, expected %.9g (%.3g off, at most %.3g)")
          :format(what, r, j, value, want, math.abs(value - want), slack), 2)
      end
    end
  end
end

return M
