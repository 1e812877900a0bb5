--- Expressions by the book: each element is computed on its own, by walking the tree. It
-- shares nothing with kvlab's schedule and printers.
--
--   eval(x, at, env) -> a number, a boolean, or a uint64_t
--
-- at: the index in each dimension; it is changed meanwhile. env: q(head, dim),
-- k(token, dim), v(token, dim), field(name, at), const(name, at), param(name),
-- input(name), logit(head, token), weight(head, token), tokens, block, blocks, length,
-- query_index, query_position, layer, kv_head, block_size, sizes; known: {} where none of
-- these changes, so that a reduction which does not depend on an outer one is computed
-- once.
local bit = require "bit"
local ffi = require "ffi"

local M = {}
local eval

local function i32(x) return bit.tobit(tonumber(ffi.cast("int32_t", x))) end
local function u32(x) return tonumber(ffi.cast("uint32_t", ffi.cast("int64_t", x))) end

--- Whole numbers wrap around in their type.
local function wrapped(kind, exact)
  if kind == "i32" then return tonumber(ffi.cast("int32_t", exact)) end
  if kind == "u32" then return tonumber(ffi.cast("uint32_t", exact)) end
  return exact
end

local function arithmetic(op, kind, a, b)
  if kind == "f32" then
    if op == "add" then return a + b elseif op == "sub" then return a - b end
    return a * b
  end
  if kind == "u64" then
    return op == "add" and a + b or op == "sub" and a - b or a * b
  end
  a, b = ffi.cast("int64_t", a), ffi.cast("int64_t", b)
  return wrapped(kind, op == "add" and a + b or op == "sub" and a - b or a * b)
end

--- The number, if one of the two is NaN.
local function extreme(a, b, takes_b)
  if a ~= a then return b end
  if b ~= b then return a end
  return takes_b and b or a
end

local function modulo(kind, a, b)
  if kind == "f32" then return a - math.floor(a / b) * b end
  if b == 0 then return kind == "u64" and 0ULL or 0 end
  return a % b
end

local OPS = {
  min = function(_, a, b) return extreme(a, b, b < a) end,
  max = function(_, a, b) return extreme(a, b, b > a) end,
  mod = function(x, a, b) return modulo(x.type, a, b) end,
  div = function(_, a, b) return a / b end,
  pow = function(_, a, b) return a ^ b end,
  neg = function(x, a) return x.type == "i32" and i32(-a) or -a end,
  abs = function(x, a) return x.type == "i32" and i32(math.abs(a)) or math.abs(a) end,
  relu = function(_, a) return a > 0 and a or 0 end,
  exp = function(_, a) return math.exp(a) end,
  log = function(_, a) return math.log(a) end,
  sqrt = function(_, a) return math.sqrt(a) end,
  tanh = function(_, a) return math.tanh(a) end,
  sigmoid = function(_, a) return 1 / (1 + math.exp(-a)) end,
  floor = function(_, a) return math.floor(a) end,
  lt = function(_, a, b) return a < b end, le = function(_, a, b) return a <= b end,
  gt = function(_, a, b) return a > b end, ge = function(_, a, b) return a >= b end,
  eq = function(_, a, b) return a == b end, ne = function(_, a, b) return a ~= b end,
  where = function(_, c, a, b) if c then return a end return b end,
  store = function(_, a) return a end,
}
for _, op in ipairs { "add", "sub", "mul" } do
  OPS[op] = function(x, a, b) return arithmetic(op, x.type, a, b) end
end

local function bits(op, kind, a, b)
  if kind == "bool" then
    if op == "band" then return a and b elseif op == "bor" then return a or b end
    return a ~= b
  end
  local r = bit[op](a, b)
  if kind == "u64" then return r end
  return kind == "u32" and u32(r) or r
end
for _, op in ipairs { "band", "bor", "bxor" } do
  OPS[op] = function(x, a, b) return bits(op, x.type, a, b) end
end
function OPS.bnot(x, a)
  if x.type == "bool" then return not a end
  if x.type == "u64" then return bit.bnot(a) end
  return x.type == "u32" and u32(bit.bnot(a)) or bit.bnot(a)
end
for _, op in ipairs { "lshift", "rshift" } do
  OPS[op] = function(x, a, by)
    if x.type == "u64" then return bit[op](a, bit.band(by, 63)) end
    return u32(bit[op](a, bit.band(by, 31)))
  end
end
function OPS.popcount(_, a)
  local count = 0
  a = ffi.cast("uint64_t", a)
  while a ~= 0 do
    count = count + tonumber(a % 2)
    a = a / 2
  end
  return count
end
function OPS.cast(x, a)
  local from, to = x.args[1].type, x.type
  if from == "bool" then return a and 1 or 0 end
  if to == "f32" then return tonumber(a) end
  if to == "u64" then return ffi.cast("uint64_t", a) end
  if from == "f32" then
    local low, high = 0, 2 ^ 32 - 1
    if to == "i32" then low, high = -2 ^ 31, 2 ^ 31 - 1 end
    if a ~= a then return 0 end
    a = a < 0 and math.ceil(a) or math.floor(a)
    return math.max(low, math.min(high, a)) + 0
  end
  return to == "i32" and i32(a) or u32(a)
end

-- ---- reductions -----------------------------------------------------------------------

local function reduce(x, at, env)
  local n = x.over == "token" and env.tokens or env.sizes[x.over]
  local values, outer, arg = {}, at[x.over], x.args[1]
  for i = 0, n - 1 do
    at[x.over] = i
    values[i + 1] = eval(arg, at, env)
  end
  at[x.over] = outer
  local op, kind = x.op, x.type
  if op == "any" or op == "all" then
    for _, v in ipairs(values) do if v == (op == "any") then return op == "any" end end
    return op == "all"
  elseif op == "argmax" then
    local best
    for i, v in ipairs(values) do
      if v == v and (not best or v > values[best]) then best = i end
    end
    return best and best - 1 or -1
  elseif op == "logsumexp" then
    local most, sum = -math.huge, 0
    for _, v in ipairs(values) do
      if v ~= v then return v end
      most = math.max(most, v)
    end
    if most == -math.huge or most == math.huge then return most end
    for _, v in ipairs(values) do sum = sum + math.exp(v - most) end
    return most + math.log(sum)
  elseif op == "max" or op == "min" then
    local whole = { i32 = { -2 ^ 31, 2 ^ 31 - 1 }, u32 = { 0, 2 ^ 32 - 1 },
                    u64 = { 0ULL, -1ULL }, f32 = { -math.huge, math.huge } }
    local r = whole[kind][op == "max" and 1 or 2]
    for _, v in ipairs(values) do r = OPS[op](x, r, v) end
    return r
  end
  local sum = kind == "u64" and 0ULL or 0
  for _, v in ipairs(values) do sum = arithmetic("add", kind, sum, v) end
  return op == "mean" and sum / math.max(n, 1) or sum
end

--- Word `at.word` of the bools of a dimension: 32 of them, the first in the lowest bit.
local function pack(x, at, env)
  local outer, number, word = at[x.over], at.word, 0
  at.word = nil
  for b = 0, 31 do
    local i = number * 32 + b
    at[x.over] = i
    if i < env.sizes[x.over] and eval(x.args[1], at, env) then word = word + 2 ^ b end
  end
  at[x.over], at.word = outer, number
  return word
end

--- What fn(x, at, env) gives, which depends on the indices of x.dims alone.
local function once(fn, x, at, env)
  if not env.known or not x.dims then return fn(x, at, env) end
  local of, index = env.known[x] or {}, 0
  for _, dim in ipairs(x.dims) do index = index * 2 ^ 12 + at[dim] end
  if of[index] == nil then of[index] = fn(x, at, env) end
  env.known[x] = of
  return of[index]
end

function eval(x, at, env)
  if x.op == "number" then
    return x.type == "u64" and ffi.cast("uint64_t", x.value) or x.value
  elseif x.op == "leaf" then
    if x.name == "q" then return env.q(at.head, at.dim) end
    if x.name == "k" or x.name == "v" then return env[x.name](at.token, at.dim) end
    if x.name == "logit" or x.name == "weight" then
      return env[x.name](at.head, at.token)
    end
    if x.name == "index" or x.name == "position" then
      return env.block * env.block_size + at.token
    end
    return env[x.name]
  elseif x.op == "param" then return env.param(x.name)
  elseif x.op == "field" then return env.field(x.name, at)
  elseif x.op == "const" then return env.const(x.name, at)
  elseif x.op == "input" then return env.input(x.name)
  elseif x.op == "pack" then return once(pack, x, at, env)
  elseif x.over then return once(reduce, x, at, env)
  end
  local a, b, c = x.args[1], x.args[2], x.args[3]
  a, b = a and eval(a, at, env), b and eval(b, at, env)
  return OPS[x.op](x, a, b, c and eval(c, at, env))
end
M.eval = eval

return M
