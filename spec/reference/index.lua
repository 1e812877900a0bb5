--- index-K in double precision over flat Lua arrays.
local ffi = require "ffi"
local math_ = require "spec.reference.math"

local M = {}

--- The values of a row in f8e4m3 and its scale, in the order in which they are rounded.
---@return number[] values  as f8e4m3 has them
---@return number scale
function M.quantise(x, at, dim)
  local most = 0
  for d = 1, dim do
    local size = math.abs(x[at + d])
    if size > most then most = size end   -- no NaN
  end
  local least = math_.round("f32", 1e-4)
  local scale = math_.round("f32", math.max(most, least) / 448)
  local values = {}
  for d = 1, dim do
    values[d] = math_.round("f8e4m3", math_.round("f32", x[at + d] / scale))
  end
  return values, scale
end

--- The byte of an f8e4m3 number.
function M.byte(x)
  if x ~= x then return 0x7F end
  local sign = (x < 0 or 1 / x < 0) and 0x80 or 0
  local size = math.abs(x)
  if size < 2 ^ -6 then return sign + size * 2 ^ 9 end
  local mantissa, exponent = math.frexp(size)   -- mantissa in [0.5, 1)
  return sign + (exponent + 6) * 8 + (mantissa * 2 - 1) * 8
end

--- The four bytes of an f32, the lowest first.
function M.float_bytes(x)
  local bytes = ffi.cast("uint8_t *", ffi.new("float[1]", x))
  return { bytes[0], bytes[1], bytes[2], bytes[3] }
end

--- scale * H x of a row, H[i][j] = (-1)^(bits that i and j share).
function M.hadamard(x, at, dim, scale)
  local out = {}
  for i = 0, dim - 1 do
    local sum = 0
    for j = 0, dim - 1 do
      local shared, odd = bit.band(i, j), 0
      while shared > 0 do
        odd, shared = bit.bxor(odd, bit.band(shared, 1)), bit.rshift(shared, 1)
      end
      sum = sum + (odd == 0 and 1 or -1) * x[at + j + 1]
    end
    out[i + 1] = scale * sum
  end
  return out
end

--- One logit: q and weights of row r, the key that begins at k[k_at + 1]. Returns it, and
-- the sum of the sizes of what is added up, which rounding is relative to.
function M.logit(q, weights, r, heads, dim, k, k_at, scale)
  local sum, size = 0, 0
  for h = 0, heads - 1 do
    local dot, dot_size, at = 0, 0, (r * heads + h) * dim
    for d = 1, dim do
      local product = q[at + d] * k[k_at + d]
      dot, dot_size = dot + product, dot_size + math.abs(product)
    end
    local weight = weights[r * heads + h + 1]
    sum = sum + weight * (dot > 0 and dot or 0)
    size = size + math.abs(weight) * dot_size
  end
  return sum * scale, size * math.abs(scale)
end

--- The measure of DeepGEMM's tests: 1 - 2 x.y / (x.x + y.y), half the square of the
-- relative difference.
function M.difference(x, y)
  local both, all = 0, 0
  for i = 1, #x do
    both, all = both + 2 * x[i] * y[i], all + x[i] * x[i] + y[i] * y[i]
  end
  return all == 0 and 0 or 1 - both / all
end

return M
