--- What the operations of expressions take and give: types, casts, and the dimensions of
-- reductions. An error names the line that built the node, and both operands.
local hint = require("kvlab.words").hint
local nodes = require "kvlab.kernel.expression.node"
local options = require "kvlab.options"
local sorted = require "kvlab.sorted"

local before, has, without = nodes.before, nodes.has_dim, nodes.without
local fail, side = nodes.fail, nodes.side
local is_expression, node, number = nodes.is_expression, nodes.node, nodes.number
local M = {}

--- An operand as a node: numbers become literals.
function M.lift(x, what, where)
  if is_expression(x) then return x end
  if type(x) == "number" then return number(x, nil, where) end
  fail(where, "%s: an operand is %s, expected an expression or a number", what,
    options.shown(x))
end

local LIMITS = { i32 = { -2 ^ 31, 2 ^ 31 - 1 }, u32 = { 0, 2 ^ 32 - 1 },
                 u64 = { 0, 2 ^ 53 } }

--- A literal in the type of the other operand.
local function literal_as(x, kind, what, where)
  local limits = LIMITS[kind]
  if kind == "bool" then
    fail(where, "%s: one side is the number %s and the other a bool; a bool is no "
      .. "number, use where(a, b) or cast \"f32\"", what, tostring(x))
  end
  if limits and (x.value % 1 ~= 0 or x.value < limits[1] or x.value > limits[2]) then
    fail(where, "%s: %s is no %s, which the other side is", what, tostring(x), kind)
  end
  return number(x.value, kind, where)
end

local function cast_to(x, kind, where)
  if x.type == kind then return x end
  if x.op == "number" then return number(x.value, kind, where) end
  return node("cast", { args = { x }, type = kind, dims = x.dims, line = where })
end

M.cast_to = cast_to

local function is_fraction(x) return x.value % 1 ~= 0 end

--- What to do with a bool where a number is expected.
local function bool_hint(x)
  return x.type == "bool" and '; :cast "i32" makes 0 and 1 of a bool, and any and all '
    .. "reduce bools" or ""
end

--- Both operands in one type, if the rules above give one.
local function unify(a, b, what, where)
  if a.type == "number" and b.type == "number" then
    return number(a.value, "f32", where), number(b.value, "f32", where)
  end
  if a.type == "number" and is_fraction(a) and b.type == "i32"
    or b.type == "number" and is_fraction(b) and a.type == "i32" then
    return cast_to(a, "f32", where), cast_to(b, "f32", where)
  end
  if a.type == "number" then return literal_as(a, b.type, what, where), b end
  if b.type == "number" then return a, literal_as(b, a.type, what, where) end
  if a.type == b.type then return a, b end
  if a.type == "f32" and b.type == "i32" or a.type == "i32" and b.type == "f32" then
    return cast_to(a, "f32", where), cast_to(b, "f32", where)
  end
  fail(where, "%s: %s and %s are of different types; cast one of them", what, side(a),
    side(b))
end

local NUMERIC = { f32 = true, i32 = true, u32 = true, u64 = true }
local BITS = { i32 = true, u32 = true, u64 = true, bool = true }

local function expect_type(x, kinds, words_, what, where)
  if not kinds[x.type] then
    fail(where, "%s: %s, expected %s%s", what, side(x), words_, bool_hint(x))
  end
end

local function to_f32(x, what, where)
  if x.type == "number" or x.type == "i32" then return cast_to(x, "f32", where) end
  if x.type ~= "f32" then
    fail(where, "%s: %s, expected f32 or i32; cast it", what, side(x))
  end
  return x
end

--- Functions of one float. scalar: the name in C and CUDA; cuda: in CUDA, where it is
-- another one; vector: in kernels/cpu. keeps_zero: of 0 it is 0.
M.FUNCTIONS = {
  exp = { scalar = "expf", vector = "vf_exp" },
  log = { scalar = "logf", vector = "vf_log" },
  sqrt = { scalar = "sqrtf", vector = "vf_sqrt", keeps_zero = true },
  tanh = { scalar = "tanhf", cuda = "tanh_f32", vector = "vf_tanh", keeps_zero = true },
  sigmoid = { scalar = "sigmoid_f32", vector = "vf_sigmoid" },
  floor = { scalar = "floorf", vector = "vf_floor", keeps_zero = true },
}

-- Each rule gets its args, with known dims and types, and returns the args after any
-- casts, and the type of the result.
local rules = {}
M.rules = rules

local function numeric(name)
  rules[name] = function(args, where)
    local a, b = unify(args[1], args[2], name, where)
    expect_type(a, NUMERIC, "numbers, not bools", name, where)
    return { a, b }, a.type
  end
end
for _, name in ipairs { "add", "sub", "mul", "min", "max", "mod" } do numeric(name) end

local function floating(name)
  rules[name] = function(args, where)
    local new = {}
    for i, arg in ipairs(args) do new[i] = to_f32(arg, name, where) end
    return new, "f32"
  end
end
for _, name in ipairs { "div", "pow" } do floating(name) end
for name in pairs(M.FUNCTIONS) do floating(name) end

for _, name in ipairs { "neg", "abs", "relu" } do
  rules[name] = function(args, where)
    local x = args[1]
    if x.type == "number" then x = cast_to(x, "f32", where) end
    expect_type(x, { f32 = true, i32 = true }, "f32 or i32", name, where)
    return { x }, x.type
  end
end

for _, name in ipairs { "lt", "le", "gt", "ge", "eq", "ne" } do
  rules[name] = function(args, where)
    local a, b = unify(args[1], args[2], name, where)
    expect_type(a, NUMERIC, "numbers; bools are joined with band, bor and bxor", name,
      where)
    return { a, b }, "bool"
  end
end

for _, name in ipairs { "band", "bor", "bxor" } do
  rules[name] = function(args, where)
    local a, b = unify(args[1], args[2], name, where)
    expect_type(a, BITS, "bits: i32, u32, u64 or bool", name, where)
    return { a, b }, a.type
  end
end
function rules.bnot(args, where)
  expect_type(args[1], BITS, "bits: i32, u32, u64 or bool", "bnot", where)
  return args, args[1].type
end
for _, name in ipairs { "lshift", "rshift" } do
  rules[name] = function(args, where)
    local x, by = args[1], args[2]
    expect_type(x, { u32 = true, u64 = true }, "u32 or u64", name, where)
    if by.type == "number" then by = literal_as(by, "i32", name, where) end
    expect_type(by, { i32 = true }, "i32 as the number of bits", name, where)
    return { x, by }, x.type
  end
end
function rules.popcount(args, where)
  expect_type(args[1], { u32 = true, u64 = true }, "u32 or u64", "popcount", where)
  return args, "i32"
end

function rules.where(args, where)
  if args[1].type ~= "bool" then
    fail(where, "where: %s, expected a bool as the condition", side(args[1]))
  end
  local a, b = args[2], args[3]
  if not (a.type == "bool" and b.type == "bool") then
    a, b = unify(a, b, "where", where)
  end
  return { args[1], a, b }, a.type
end

local CASTS = {
  f32 = { f32 = true, i32 = true, u32 = true, u64 = true, bool = true },
  i32 = { f32 = true, i32 = true, u32 = true, bool = true },
  u32 = { f32 = true, i32 = true, u32 = true, u64 = true, bool = true },
  u64 = { u32 = true, u64 = true },
}
M.CASTS = CASTS

function rules.cast(args, where, extra)
  local to, x = extra.to, args[1]
  if x.type == "number" then return { cast_to(x, to, where) }, to end
  if not CASTS[to][x.type] then
    fail(where, "cast: %s has no cast to %s", side(x), to)
  end
  return args, to
end

-- ---- reductions -----------------------------------------------------------------------

local REDUCTIONS = {
  sum = NUMERIC, max = NUMERIC, min = NUMERIC, mean = { f32 = true, i32 = true },
  any = { bool = true }, all = { bool = true }, logsumexp = { f32 = true, i32 = true },
  argmax = { f32 = true, i32 = true }, pack = { bool = true },
}
M.REDUCTIONS = REDUCTIONS

--- What a reduction takes and gives: its operand, type and dimensions.
function M.reduce(name, x, over, where)
  local what = ("%s %q"):format(name, over)
  if x.op == "number" then
    fail(where, "%s: %s has no dimensions", what, tostring(x))
  end
  if over == "query" then
    if name ~= "sum" and name ~= "max" then
      fail(where, "%s: what is emitted is joined over queries by sum or max, which do "
        .. "not depend on how a prompt is cut", what)
    end
    expect_type(x, { f32 = true, i32 = true }, "f32 or i32", what, where)
    return x, x.type, x.dims
  end
  if not has(x.dims, over) then
    fail(where, "%s: %s has no dimension %s%s", what, side(x), over,
      hint(over, x.dims, ", did you mean %s?"))
  end
  if over == "layer" or over == "kv_head" then
    fail(where, "%s: a kernel sees one %s at a time and cannot reduce over it", what,
      over)
  end
  expect_type(x, REDUCTIONS[name], table.concat(sorted.keys(REDUCTIONS[name]), ", "),
    what, where)
  if name == "mean" or name == "logsumexp" then x = cast_to(x, "f32", where) end
  local kind = name == "argmax" and "i32" or name == "pack" and "u32" or x.type
  local dims = without(x.dims, over)
  if name == "pack" then
    if has(dims, "word") then
      fail(where, "%s: %s has a dimension word already", what, side(x))
    end
    dims[#dims + 1] = "word"
    table.sort(dims, before)
  end
  return x, kind, dims
end

return M
