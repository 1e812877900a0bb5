--- The general ops in double precision, slow and obvious, over flat row-major Lua arrays.
-- Rows, columns and indices inside the values count from 0, as in the library.
local M = {}

local INF, NAN = math.huge, 0 / 0

-- ---- numbers --------------------------------------------------------------------------

local function round_half_even(x)
  local low = math.floor(x)
  local rest = x - low
  if rest > 0.5 or (rest == 0.5 and low % 2 == 1) then return low + 1 end
  return low
end

-- bits of mantissa after the point, smallest exponent of a normal number, largest number
local formats = {
  f32 = { 23, -126, (2 - 2 ^ -23) * 2 ^ 127 },
  f16 = { 10, -14, 65504 },
  bf16 = { 7, -126, (2 - 2 ^ -7) * 2 ^ 127 },
  f8e4m3 = { 3, -6, 448, saturates = true },
}
local ranges = {
  i32 = { -2 ^ 31, 2 ^ 31 - 1 }, i64 = { -2 ^ 63, 2 ^ 63 }, u8 = { 0, 255 },
  u64 = { 0, 2 ^ 64 },
}

--- x as the nearest number of a dtype: floats to nearest even, beyond the largest to
-- infinity (f8e4m3: to 448); whole numbers toward zero, saturating, NaN as 0.
function M.round(dtype, x)
  local range = ranges[dtype]
  if range then
    if x ~= x then return 0 end
    return math.min(math.max(x < 0 and math.ceil(x) or math.floor(x), range[1]), range[2])
  end
  local f = formats[dtype]
  if x ~= x or x == 0 then return x end
  if x == INF or x == -INF then return f.saturates and (x > 0 and f[3] or -f[3]) or x end
  local _, exponent = math.frexp(x) -- |x| in [2^(exponent - 1), 2^exponent)
  local step = 2 ^ (math.max(exponent - 1, f[2]) - f[1])
  local y = round_half_even(x / step) * step
  if math.abs(y) <= f[3] then return y end
  local most = f.saturates and f[3] or INF
  return y > 0 and most or -most
end

local function sigmoid(x) return 1 / (1 + math.exp(-x)) end

M.unary = {
  NEG = function(x) return -x end, ABS = math.abs, EXP = math.exp,
  LOG = function(x) return x < 0 and NAN or math.log(x) end,
  SQRT = function(x) return x < 0 and NAN or math.sqrt(x) end,
  RSQRT = function(x) return x < 0 and NAN or 1 / math.sqrt(x) end,
  SIGMOID = sigmoid, SILU = function(x) return x * sigmoid(x) end, TANH = math.tanh,
  RELU = function(x) return x <= 0 and 0 or x end, FLOOR = math.floor,
}

local function larger(x, y)
  if x ~= x or y ~= y then return NAN end
  return math.max(x, y)
end
local function smaller(x, y) return -larger(-x, -y) end
local function bit_of(condition) return condition and 1 or 0 end

M.binary = {
  ADD = function(x, y) return x + y end, SUB = function(x, y) return x - y end,
  MUL = function(x, y) return x * y end, DIV = function(x, y) return x / y end,
  MAX = larger, MIN = smaller, POW = function(x, y) return x ^ y end,
  EQ = function(x, y) return bit_of(x == y) end,
  NE = function(x, y) return bit_of(x ~= y) end,
  LT = function(x, y) return bit_of(x < y) end,
  LE = function(x, y) return bit_of(x <= y) end,
  GT = function(x, y) return bit_of(x > y) end,
  GE = function(x, y) return bit_of(x >= y) end,
}

--- fn of every element of one or two arrays.
function M.map(fn, a, b)
  local out = {}
  for i = 1, #a do out[i] = fn(a[i], b and b[i]) end
  return out
end

local function product(sizes)
  local p = 1
  for _, size in ipairs(sizes) do p = p * size end
  return p
end

--- `values` of `shape` repeated along the dims where it has 1 (or none), to shape `to`.
function M.broadcast(values, shape, to)
  local out = {}
  for i = 0, product(to) - 1 do
    local rest, at, step = i, 0, 1
    for d = #to, 1, -1 do
      local size = shape[d - #to + #shape] or 1
      if size > 1 then at = at + rest % to[d] * step end
      step = step * size
      rest = math.floor(rest / to[d])
    end
    out[i + 1] = values[at + 1]
  end
  return out
end

-- ---- along a dimension ----------------------------------------------------------------

local reducers = {
  SUM = { 0, function(x, y) return x + y end }, MAX = { -INF, larger },
  MIN = { INF, smaller },
}
reducers.MEAN = reducers.SUM

--- values [outer, n, inner] -> [outer, inner]
function M.reduce(op, values, outer, n, inner)
  local out, start, join = {}, reducers[op][1], reducers[op][2]
  for o = 0, outer - 1 do
    for i = 0, inner - 1 do
      local x = start
      for r = 0, n - 1 do x = join(x, values[(o * n + r) * inner + i + 1]) end
      out[#out + 1] = op == "MEAN" and x / n or x
    end
  end
  return out
end

--- Rows of n. A row of -inf gives zeros.
function M.softmax(values, n, scale)
  local out = {}
  for first = 0, #values - 1, n do
    local most, sum = -INF, 0
    for i = 1, n do most = math.max(most, values[first + i] * scale) end
    if most == -INF then most = 0 end
    for i = 1, n do sum = sum + math.exp(values[first + i] * scale - most) end
    for i = 1, n do
      local e = math.exp(values[first + i] * scale - most)
      out[first + i] = sum == 0 and 0 or e / sum
    end
  end
  return out
end

--- log(sum(exp(x))) over n of [outer, n, inner].
function M.logsumexp(values, outer, n, inner)
  local out = {}
  for o = 0, outer - 1 do
    for i = 0, inner - 1 do
      local most, sum, nan = -INF, 0, false
      local function each(fn)
        for j = 0, n - 1 do fn(values[(o * n + j) * inner + i + 1]) end
      end
      each(function(x) most, nan = math.max(most, x), nan or x ~= x end)
      each(function(x) sum = sum + (x == most and 1 or math.exp(x - most)) end)
      out[#out + 1] = nan and NAN or n == 0 and -INF or most + math.log(sum)
    end
  end
  return out
end

--- The running sums over n of [outer, n, inner].
function M.cumsum(values, outer, n, inner)
  local out = {}
  for o = 0, outer - 1 do
    for i = 0, inner - 1 do
      local sum = 0
      for j = 0, n - 1 do
        local at = (o * n + j) * inner + i + 1
        sum = sum + values[at]
        out[at] = sum
      end
    end
  end
  return out
end

--- The element at each place of a shape: fn(index) gets the coordinates, from 0.
function M.at_each(shape, fn)
  local out, index, count = {}, {}, 1
  for d, size in ipairs(shape) do index[d], count = 0, count * size end
  for i = 1, count do
    out[i] = fn(index)
    for d = #shape, 1, -1 do
      index[d] = index[d] + 1
      if index[d] < shape[d] then break end
      index[d] = 0
    end
  end
  return out
end

--- The element of a row-major array at these coordinates.
function M.element(values, shape, index)
  local at = 0
  for d, size in ipairs(shape) do at = at * size + index[d] end
  return values[at + 1]
end

--- NaN never wins; a row of NaN gives 0.
function M.argmax(values, n)
  local out = {}
  for first = 0, #values - 1, n do
    local best
    for i = 1, n do
      local x = values[first + i]
      if x == x and (not best or x > values[first + best]) then best = i end
    end
    out[#out + 1] = (best or 1) - 1
  end
  return out
end

--- The k first indices of each row of n: descending or ascending, ties to the lower
-- index, NaN last.
function M.topk(values, n, k, largest)
  local out = {}
  for first = 0, #values - 1, n do
    -- the different values in order, and the places of each: sorting places with a
    -- function would call it for every two of them
    local places, order, nans, count = {}, {}, {}, 0
    for i = 1, n do
      local x = values[first + i]
      local list = x ~= x and nans or places[x]
      if not list then
        list = {}
        places[x], order[#order + 1] = list, largest and -x or x
      end
      list[#list + 1] = i - 1
    end
    table.sort(order)
    for at = 1, #order + 1 do
      local x = order[at]
      for _, i in ipairs(x and places[largest and -x or x] or not x and nans or {}) do
        if count == k then break end
        out[#out + 1], count = i, count + 1
      end
      if count == k then break end
    end
  end
  return out
end

-- ---- products -------------------------------------------------------------------------

--- a [batch or 1, m, k], b [batch or 1, k, n] or [.., n, k] transposed -> [batch, m, n]
function M.matmul(a, b, s)
  local out, a_batch, b_batch = {}, s.a_shared and 0 or s.m * s.k,
    s.b_shared and 0 or s.k * s.n
  for z = 0, s.batch - 1 do
    for i = 0, s.m - 1 do
      for j = 0, s.n - 1 do
        local sum = 0
        for l = 0, s.k - 1 do
          local at = s.transposed and j * s.k + l or l * s.n + j
          sum = sum + a[z * a_batch + i * s.k + l + 1] * b[z * b_batch + at + 1]
        end
        out[#out + 1] = sum
      end
    end
  end
  return out
end

--- Rows of dim: x / sqrt(mean(x^2) + eps) * weight
function M.rmsnorm(x, weight, eps)
  local out, dim = {}, #weight
  for first = 0, #x - 1, dim do
    local sum = 0
    for i = 1, dim do sum = sum + x[first + i] ^ 2 end
    for i = 1, dim do
      out[first + i] = x[first + i] / math.sqrt(sum / dim + eps) * weight[i]
    end
  end
  return out
end

--- x [tokens, heads, dim]; the angle is rounded to f32, as the library's is.
function M.rope(x, positions, inv_freq, heads, dim, first)
  local out, pairs_ = {}, #inv_freq
  for i = 1, #x do out[i] = x[i] end
  for row = 0, #x / dim - 1 do
    for i = 1, pairs_ do
      local position = positions[math.floor(row / heads) + 1]
      local angle = M.round("f32", M.round("f32", position) * inv_freq[i])
      local s, c = math.sin(angle), math.cos(angle)
      local at = row * dim + (first or 0) + i
      local low, high = x[at], x[at + pairs_]
      out[at] = low * c - high * s
      out[at + pairs_] = high * c + low * s
    end
  end
  return out
end

return M
