--- What the Lua kernels of expressions call: a function for each operation, and readers
-- and writers of stored numbers. The names and meanings are those of
-- kernels/cpu/expression.h. Whole numbers of 32 bits are Lua's numbers, those of 64 bits
-- are uint64_t.
local bit = require "bit"
local ffi = require "ffi"

local M = { ffi = ffi, INF = math.huge, NAN = 0 / 0, min = math.min, max = math.max,
            ceil = math.ceil, floor = math.floor, log = math.log, tobit = bit.tobit }

local tobit, band, lshift, rshift = bit.tobit, bit.band, bit.lshift, bit.rshift
local floor = math.floor
local one = ffi.new "union { float f; uint32_t u; int32_t i; }"
local int32_t, int64_t = ffi.typeof "int32_t", ffi.typeof "int64_t"
local uint32_t, uint64_t = ffi.typeof "uint32_t", ffi.typeof "uint64_t"

-- ---- stored numbers -------------------------------------------------------------------

local function table_of(count, from)
  local list = ffi.new("float[?]", count)
  for i = 0, count - 1 do list[i] = from(i) end
  return list
end

local function from_bf16(x)
  one.u = lshift(x, 16)
  return one.f
end
local function from_f16(x)
  local sign, e, m = lshift(band(x, 0x8000), 16), band(rshift(x, 10), 31), band(x, 0x3FF)
  if e == 31 then return m ~= 0 and 0 / 0 or sign < 0 and -math.huge or math.huge end
  if e == 0 then return (sign < 0 and -1 or 1) * m * 2 ^ -24 end
  one.i = sign + lshift(e + 112, 23) + lshift(m, 13)
  return one.f
end
local function from_f8(x)
  local sign, e, m = band(x, 0x80) ~= 0 and -1 or 1, band(rshift(x, 3), 15), band(x, 7)
  if band(x, 0x7F) == 0x7F then return 0 / 0 end
  if e == 0 then return sign * m * 2 ^ -9 end
  return sign * (1 + m / 8) * 2 ^ (e - 7)
end
M.BF16, M.F16 = table_of(65536, from_bf16), table_of(65536, from_f16)
M.F8 = table_of(256, from_f8)
M.POWER = ffi.new("double[33]")
for i = 0, 32 do M.POWER[i] = 2 ^ i end

--- The nearest multiple of 2^step, ties to even.
local function rounded(x, step)
  local scaled = x * 2 ^ -step
  local low = floor(scaled)
  local rest = scaled - low
  if rest > 0.5 or rest == 0.5 and low % 2 == 1 then low = low + 1 end
  return low * 2 ^ step
end

--- x in a float with `bits` of mantissa, the smallest exponent `least`.
local function in_float(x, bits, least)
  one.f = x
  x = one.f
  if x ~= x or x == 0 or math.abs(x) == math.huge then return x end
  local _, e = math.frexp(math.abs(x)) -- x = m * 2^e, 0.5 <= m < 1
  local r = rounded(math.abs(x), math.max(e - 1, least) - bits)
  return x < 0 and -r or r
end

function M.to_f32(x) return x end
function M.to_bf16(x)
  one.f = x
  local i = one.u
  if band(i, 0x7FFFFFFF) > 0x7F800000 then return band(rshift(i, 16) + 0x40, 0xFFFF) end
  return band(rshift(tobit(i + 0x7FFF + band(rshift(i, 16), 1)), 16), 0xFFFF)
end
function M.to_f16(x)
  local r, sign = in_float(x, 10, -14), (x < 0 or 1 / x < 0) and 0x8000 or 0
  if x ~= x then return 0x7E00 end
  r = math.abs(r)
  if r > 65504 then return sign + 0x7C00 end
  if r < 2 ^ -14 then return sign + r * 2 ^ 24 end
  local m, e = math.frexp(r)
  return sign + (e + 14) * 1024 + (m * 2 - 1) * 1024
end
function M.to_f8e4m3(x)
  local sign = (x < 0 or 1 / x < 0) and 0x80 or 0
  if x ~= x then return 0x7F end
  local r = math.min(math.abs(in_float(math.max(-448, math.min(448, x)), 3, -6)), 448)
  if r < 2 ^ -6 then return sign + r * 2 ^ 9 end
  local m, e = math.frexp(r)
  return sign + (e + 6) * 8 + (m * 2 - 1) * 8
end
function M.to_i32(x) return tobit(x) end
function M.to_u64(x) return x end
function M.to_u8(x) return x and 1 or 0 end

-- ---- operations -----------------------------------------------------------------------

function M.where_any(c, a, b) if c then return a end return b end
M.where_bool = M.where_any

local function min_of(a, b) if a < b or b ~= b then return a end return b end
local function max_of(a, b) if a > b or b ~= b then return a end return b end
for _, kind in ipairs { "f32", "i32", "u32", "u64" } do
  M["min_" .. kind], M["max_" .. kind] = min_of, max_of
end

local function as_i32(x) return tonumber(ffi.cast(int32_t, x)) end
local function as_u32(x) return tonumber(ffi.cast(uint32_t, x)) end
function M.add_i32(a, b) return tobit(a + b) end
function M.sub_i32(a, b) return tobit(a - b) end
function M.mul_i32(a, b) return as_i32(ffi.cast(int64_t, a) * ffi.cast(int64_t, b)) end
function M.add_u32(a, b) return (a + b) % 2 ^ 32 end
function M.sub_u32(a, b) return (a - b) % 2 ^ 32 end
function M.mul_u32(a, b) return as_u32(ffi.cast(uint64_t, a) * ffi.cast(uint64_t, b)) end
function M.mod_f32(a, b) return a - floor(a / b) * b end
function M.mod_i32(a, b) return b == 0 and 0 or a % b end
function M.mod_u32(a, b) return b == 0 and 0 or a % b end
function M.mod_u64(a, b) return b == 0 and 0ULL or a % b end

M.abs_f32, M.exp_f32, M.log_f32, M.sqrt_f32 = math.abs, math.exp, math.log, math.sqrt
M.tanh_f32, M.floor_f32 = math.tanh, math.floor
function M.abs_i32(a) return tobit(math.abs(a)) end
function M.relu_f32(a) return max_of(a, 0) end
M.relu_i32 = M.relu_f32
function M.sigmoid_f32(a) return 1 / (1 + math.exp(-a)) end

local function unsigned(x) return x % 2 ^ 32 end
for _, name in ipairs { "band", "bor", "bxor" } do
  local op = bit[name]
  M[name .. "_i32"], M[name .. "_u64"] = op, op
  M[name .. "_u32"] = function(a, b) return unsigned(op(a, b)) end
end
M.bnot_i32, M.bnot_u64 = bit.bnot, bit.bnot
function M.bnot_u32(a) return unsigned(bit.bnot(a)) end
function M.lshift_u32(a, by) return unsigned(lshift(a, band(by, 31))) end
function M.rshift_u32(a, by) return unsigned(rshift(a, band(by, 31))) end
function M.lshift_u64(a, by) return lshift(a, band(by, 63)) end
function M.rshift_u64(a, by) return rshift(a, band(by, 63)) end

local COUNTS = {}
for i = 0, 255 do
  local n, x = 0, i
  while x > 0 do
    n, x = n + x % 2, floor(x / 2)
  end
  COUNTS[i] = n
end
function M.popcount_u32(x)
  return COUNTS[band(x, 255)] + COUNTS[band(rshift(x, 8), 255)]
    + COUNTS[band(rshift(x, 16), 255)] + COUNTS[band(rshift(x, 24), 255)]
end
function M.popcount_u64(x)
  return M.popcount_u32(tonumber(x % 2 ^ 32)) + M.popcount_u32(tonumber(rshift(x, 32)))
end

-- ---- casts ----------------------------------------------------------------------------

local function whole(x, low, high)
  if x ~= x then return 0 end
  x = x < 0 and math.ceil(x) or floor(x)
  return x < low and low or x > high and high or x
end
function M.i32_from_f32(x) return whole(x, -2 ^ 31, 2 ^ 31 - 1) end
function M.u32_from_f32(x) return whole(x, 0, 2 ^ 32 - 1) end
function M.f32_from_i32(x) return x end
M.f32_from_u32 = M.f32_from_i32
function M.f32_from_u64(x) return tonumber(x) end
function M.u32_from_i32(x) return x % 2 ^ 32 end
function M.i32_from_u32(x) return tobit(x) end
function M.u32_from_u64(x) return tonumber(x % 2 ^ 32) end
function M.u64_from_u32(x) return ffi.cast(uint64_t, x) end
local function from_bool(x) return x and 1 or 0 end
M.f32_from_bool, M.i32_from_bool, M.u32_from_bool = from_bool, from_bool, from_bool

-- ---- reductions -----------------------------------------------------------------------

function M.lse_add(most, sum, x)
  if x ~= x then return most, x end
  local d = x == most and 0 or x - most
  if d > 0 then return x, sum * math.exp(-d) + 1 end
  return most, sum + math.exp(d)
end
function M.arg_add(best, at, x, i)
  if x > best or at < 0 and x == x then return x, i end
  return best, at
end

return M
