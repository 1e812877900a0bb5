--- Expressions: a kernel written as arithmetic over named dimensions, `kv.expr`.
--
--   local e = require("kvlab").expr
--   local bound = e.max(e.q * e.lo, e.q * e.hi):sum "dim":max "head"
--
-- An operator or a method makes a node and checks it at once: an error names the line
-- that built the node and the dimensions of both sides. Nothing is computed here;
-- kernel/schedule.lua orders the loops, and kernel/print_*.lua print them.
--
-- Two operands are joined by the names of their dimensions, so q [head, dim] * k [token,
-- dim] is [head, token, dim]. Types are f32, i32, u32, u64 and bool; a storage dtype
-- (bf16, f8e4m3, ...) becomes f32 when it is read. i32 becomes f32 where the other side
-- is f32; every other change of type is written with :cast.
--
-- What can be read, by its name in kv.expr:
--   q         f32 [head, dim]    the newest query of each head of the KV head's group
--   k, v      f32 [token, dim]   the block's K and V
--   tokens    i32                valid tokens of the block
--   position  i32 [token]        of a token in its sequence
--   block     i32                which of its sequence's blocks it is
--   blocks    i32                of the sequence
--   length    i32                of the sequence, in tokens
--   layer     i32
--   kv_head   i32
-- and in attention, of a query and a key that it sees:
--   logit     f32 [head, token]  scale * q . k, capped where the attention has a soft cap
--   query_position  i32          of the query in its sequence
--   weight    f32 [head, token]  of the key in the softmax (emit)
-- Any other name is a field of the policy's summary. The operators + - * / ^ % work on
-- expressions and numbers.
local options = require "kvlab.options"
local sorted = require "kvlab.sorted"
local words = require "kvlab.words"

local M = {}

---@class kvlab.Expression
---@field op string      what the node computes
---@field args kvlab.Expression[]
---@field dims string[]|nil   in canonical order; nil while a field's are not known
---@field type string|nil     f32 i32 u32 u64 bool, or "number" of a literal
---@field line string    the line that built it, "file:line"
local Expression = {}
M.Expression = Expression

local function is_expression(x)
  return type(x) == "table" and getmetatable(x) == Expression
end
M.is_expression = is_expression

-- ---- where a node was built -----------------------------------------------------------

local HOUSE = debug.getinfo(1, "S").source:match "^(@.*)kernel/expression%.lua$"

local files_of = {} -- by such a line, whose path may be cut: its files, as keys

--- The innermost line outside of lua/kvlab.
local function user_line()
  local level = 3
  while true do
    local info = debug.getinfo(level, "Sl")
    if not info then return "?" end
    if info.what ~= "C" and info.currentline > 0
       and info.source:sub(1, #HOUSE) ~= HOUSE then
      local line = ("%s:%d"):format(info.short_src, info.currentline)
      files_of[line] = files_of[line] or {}
      files_of[line][info.source:match "^@(.*)$" or ""] = true
      return line
    end
    level = level + 1
  end
end

--- The line that built a node. Leaves are everyone's: for one it is the line that is
-- running now.
function M.line_of(x) return x.op == "leaf" and user_line() or x.line end

local function fail(where, message, ...)
  error(("%s: %s"):format(where, message:format(...)), 0)
end

-- ---- dimensions -----------------------------------------------------------------------

-- The order in which dimensions are stored and looped over; the policy's own lie between
-- token and dim, by name.
local RANK = { layer = 1, kv_head = 2, head = 3, token = 4, dim = 6 }
local OWN = 5

local function before(a, b)
  local x, y = RANK[a] or OWN, RANK[b] or OWN
  if x ~= y then return x < y end
  return a < b
end

local function has(dims, name)
  for i = 1, #dims do if dims[i] == name then return true end end
  return false
end
M.has_dim = has

--- The dimensions of any of the args, in order.
local function join(args)
  local dims = {}
  for _, arg in ipairs(args) do
    for _, name in ipairs(arg.dims) do
      if not has(dims, name) then dims[#dims + 1] = name end
    end
  end
  table.sort(dims, before)
  return dims
end

M.join = join

local function without(dims, name)
  local left = {}
  for _, other in ipairs(dims) do if other ~= name then left[#left + 1] = other end end
  return left
end

local function dims_text(dims)
  return #dims == 0 and "no dimensions" or "[" .. table.concat(dims, ", ") .. "]"
end

--- "lo, i32 [dim]": an operand, in the words of an error.
local function side(x)
  if x.op == "number" then return tostring(x) end
  return ("%s (%s %s)"):format(M.text(x, 60), x.type, dims_text(x.dims))
end

-- ---- nodes ----------------------------------------------------------------------------

local function node(op, fields)
  fields.op, fields.args = op, fields.args or {}
  return setmetatable(fields, Expression)
end

local function number(value, kind, where)
  return node("number", { value = value, type = kind or "number", dims = {},
                          line = where })
end

M.number = number

--- An operand as a node: numbers become literals.
local function lift(x, what, where)
  if is_expression(x) then return x end
  if type(x) == "number" then return number(x, nil, where) end
  fail(where, "%s: an operand is %s, expected an expression or a number", what,
    options.shown(x))
end

local LIMITS = { i32 = { -2 ^ 31, 2 ^ 31 - 1 }, u32 = { 0, 2 ^ 32 - 1 },
                 u64 = { 0, 2 ^ 53 } }

--- A literal in the type of the other side.
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

local function is_fraction(x) return x.value % 1 ~= 0 end

--- What to do with a bool where a number is expected.
local function bool_hint(x)
  return x.type == "bool" and '; :cast "i32" makes 0 and 1 of a bool, and any and all '
    .. "reduce bools" or ""
end

--- Both sides in one type, where the rules above give one.
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

-- Each rule gets its args, with known dims and types, and returns the args as they are to
-- be, and the type of the result.
local rules = {}

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
for _, name in ipairs { "div", "pow", "exp", "log", "sqrt", "tanh", "sigmoid",
                        "floor" } do
  floating(name)
end

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

local function reduction_rule(name, x, over, where)
  local what = ("%s %q"):format(name, over)
  if x.op == "number" then
    fail(where, "%s: %s has no dimensions", what, tostring(x))
  end
  if not has(x.dims, over) then
    local near, far = words.nearest(over, x.dims)
    fail(where, "%s: %s has no dimension %s%s", what, side(x), over,
      near and far <= 2 and (", did you mean %s?"):format(near) or "")
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

-- ---- building -------------------------------------------------------------------------

local function is_open(args)
  for _, arg in ipairs(args) do if not arg.dims then return true end end
  return false
end

--- A node of an op over args. While a field's dimensions are not known, the checks wait
-- for M.resolve.
local function build(op, args, where, extra)
  if is_open(args) then
    return node(op, { args = args, line = where, over = extra and extra.over,
                      to = extra and extra.to })
  end
  if extra and extra.over then
    local x, kind, dims = reduction_rule(op, args[1], extra.over, where)
    return node(op, { args = { x }, over = extra.over, type = kind, dims = dims,
                      line = where })
  end
  local new, kind = rules[op](args, where, extra)
  if op == "cast" then return cast_to(new[1], kind, where) end
  return node(op, { args = new, type = kind, dims = join(new), line = where })
end

--- Joins two values, element by element. lt, le, gt, ge, eq and ne compare two numbers
-- and make a bool. band, bor and bxor take i32, u32, u64 or bools. lshift and rshift move
-- the bits of u32 and u64. min and max are the smaller and the larger of two numbers; of
-- a number and NaN it is the number.
local function operator(op)
  return function(a, b, ...)
    local where = user_line()
    if select("#", ...) > 0 then
      fail(where, "%s takes two values, given %d", op, 2 + select("#", ...))
    end
    return build(op, { lift(a, op, where), lift(b, op, where) }, where)
  end
end
--- Of each element. abs and relu keep f32 and i32, bnot keeps i32, u32, u64 and bool.
-- popcount counts the ones of u32 and u64, as i32. The others take f32 or i32 and make
-- f32.
local function unary(op)
  return function(a, ...)
    local where = user_line()
    if select("#", ...) > 0 then
      fail(where, "%s takes one value, given %d", op, 1 + select("#", ...))
    end
    return build(op, { lift(a, op, where) }, where)
  end
end

--- Reduces over one dimension or several: x:sum "dim", x:max("head", "token"). sum, max
-- and min keep the type of numbers; mean and logsumexp make f32; argmax is the index,
-- i32; any and all take bools. pack puts 32 bools into each u32, along a new dimension
-- "word".
local function reduction(op)
  return function(x, ...)
    local where, names = user_line(), { ... }
    if #names == 0 then fail(where, "%s: the dimension is missing", op) end
    for _, name in ipairs(names) do
      if type(name) ~= "string" then
        fail(where, "%s: the dimension is %s, expected a name", op, is_expression(name)
          and ("an expression; e.%s(a, b) is the larger or smaller of two"):format(op)
          or options.shown(name))
      end
      x = build(op, { x }, where, { over = name })
    end
    return x
  end
end

local methods = {}
for name in pairs(REDUCTIONS) do methods[name] = reduction(name) end
for _, name in ipairs { "lt", "le", "gt", "ge", "eq", "ne", "band", "bor", "bxor",
                        "lshift", "rshift" } do
  methods[name] = operator(name)
end
for _, name in ipairs { "bnot", "popcount", "abs", "exp", "log", "sqrt", "tanh",
                        "sigmoid", "relu", "floor" } do
  methods[name] = unary(name)
end

--- self is a bool: a where it is true, else b.
function methods.where(self, a, b)
  local where = user_line()
  return build("where", { self, lift(a, "where", where), lift(b, "where", where) }, where)
end

--- The value in another type. f32 to a whole number drops the fraction and saturates, and
-- NaN becomes 0; i32 and u32 keep their bits; true is 1.
function methods.cast(self, to)
  local where = user_line()
  if not CASTS[to] then
    fail(where, "cast: the type is %s, expected f32, i32, u32 or u64", options.shown(to))
  end
  return build("cast", { self }, where, { to = to })
end

local STORES = { f32 = true, f16 = true, bf16 = true, f8e4m3 = true }

--- A summary's field is to be stored in this dtype: f32 f16 bf16 f8e4m3. Without it, what
-- is made of keys by min and max alone is stored as the cache stores keys, and the rest
-- as it is.
function methods.store(self, dtype)
  local where = user_line()
  if not STORES[dtype] then
    fail(where, "store: the dtype is %s, expected f32, f16, bf16 or f8e4m3",
      options.shown(dtype))
  end
  return node("store", { args = { self }, dims = self.dims, type = self.type,
                         dtype = dtype, line = where })
end

local function no_order(a, b)
  fail(user_line(), "Lua's < and <= give a boolean at once; write a:lt(b) or a:le(b) for "
    .. "%s and %s", tostring(a), tostring(b))
end

-- What a node has, or may lack.
local FIELDS = {}
for _, name in ipairs { "dims", "type", "value", "name", "over", "to", "dtype", "stored",
                        "raw", "varies", "height", "id", "unit" } do
  FIELDS[name] = true
end

Expression.__add, Expression.__sub = operator "add", operator "sub"
Expression.__mul, Expression.__div = operator "mul", operator "div"
Expression.__pow, Expression.__mod = operator "pow", operator "mod"
local negative = unary "neg"
Expression.__unm = function(a) return negative(a) end -- Lua gives the operand twice
Expression.__lt, Expression.__le = no_order, no_order

-- What has no method, and how it is written.
local DEVIATION = ': with m = x:mean "token", ((x - m) ^ 2):mean "token" is the '
  .. "variance, and its sqrt() the standard deviation"
local WRITTEN = { std = DEVIATION, var = DEVIATION, pow = ": write a ^ b",
                  square = ": write a ^ 2", add = ": write a + b", mul = ": write a * b" }
Expression.__index = function(_, name)
  local method = methods[name]
  if method or type(name) ~= "string" then return method end
  if FIELDS[name] then return nil end
  local near, far = words.nearest(name, sorted.keys(methods))
  fail(user_line(), "%s is no method of an expression%s", name, WRITTEN[name]
    or far <= #name / 3 and (", did you mean %s?"):format(near) or "")
end
Expression.__call = function(self)
  fail(user_line(), "%s is no function of expressions%s", self.name or self.op,
    self.op == "field" and ", so it was taken as a field of the policy's summary" or "")
end

M.methods = methods

-- ---- leaves ---------------------------------------------------------------------------

local function leaf(name, kind, dims)
  return node("leaf", { name = name, type = kind, dims = dims, line = name })
end

--- The leaves, and what each is. "places" says where it can be read.
M.leaves = {
  q = leaf("q", "f32", { "head", "dim" }), -- the newest query of the KV head's group
  k = leaf("k", "f32", { "token", "dim" }), v = leaf("v", "f32", { "token", "dim" }),
  tokens = leaf("tokens", "i32", {}),      -- valid tokens of the block
  position = leaf("position", "i32", { "token" }), -- of a token in its sequence
  block = leaf("block", "i32", {}),        -- which of its sequence's
  blocks = leaf("blocks", "i32", {}),      -- of the sequence
  length = leaf("length", "i32", {}),      -- of the sequence, in tokens
  layer = leaf("layer", "i32", {}), kv_head = leaf("kv_head", "i32", {}),
  logit = leaf("logit", "f32", { "head", "token" }), -- what attention makes of q . k
  query_position = leaf("query_position", "i32", {}),
  weight = leaf("weight", "f32", { "head", "token" }), -- after the softmax
}

local e = {}
M.e = e
for name, one in pairs(M.leaves) do e[name] = one end

--- The smaller, or the larger, of two. Of a number and NaN it is the number.
e.min, e.max = operator "min", operator "max"
for _, name in ipairs { "abs", "exp", "log", "sqrt", "tanh", "sigmoid", "relu",
                        "floor" } do
  e[name] = unary(name)
end

--- a where the condition is true, else b.
function e.where(condition, a, b)
  if not is_expression(condition) then
    fail(user_line(), "where: the condition is %s, expected an expression",
      options.shown(condition))
  end
  return methods.where(condition, a, b)
end

--- An option of the policy, read at each launch: a new value compiles nothing.
---@param name string
---@param kind? string  f32 (or i32)
function e.param(name, kind)
  local where = user_line()
  kind = kind or "f32"
  if type(name) ~= "string" or not name:match "^[%a_][%w_]*$" then
    fail(where, "param: the name is %s, expected the name of an option",
      options.shown(name))
  end
  if kind ~= "f32" and kind ~= "i32" then
    fail(where, "param: the type is %s, expected f32 or i32", options.shown(kind))
  end
  return node("param", { name = name, type = kind, dims = {}, line = where })
end

local CONST_TYPES = { f32 = "f32", f16 = "f32", bf16 = "f32", i32 = "i32", u64 = "u64",
                      u8 = "bool" }

--- A table of numbers, such as the planes of a hash or a slope for each head.
---@param dtype string  f32 f16 bf16 i32 u64, or u8 for bools
---@param name string   the policy's field that holds the tensor, which init sets
---@param ... string    its dimensions. layer, kv_head, head (of the KV head's group),
--                      token and dim are those of the model; others are the policy's own
function e.const(dtype, name, ...)
  local where, dims, seen = user_line(), { ... }, {}
  if not CONST_TYPES[dtype] then
    fail(where, "const: the dtype is %s, expected one of %s", options.shown(dtype),
      table.concat(sorted.keys(CONST_TYPES), " "))
  end
  if type(name) ~= "string" or not name:match "^[%a_][%w_]*$" then
    fail(where, "const: the name is %s, expected that of a field which init sets",
      options.shown(name))
  end
  for _, dim in ipairs(dims) do
    if type(dim) ~= "string" or not dim:match "^[%a_][%w_]*$" or seen[dim] then
      fail(where, "const: a dimension is %s, expected different names",
        options.shown(dim))
    end
    seen[dim] = true
  end
  local inner = without(without(dims, "layer"), "kv_head")
  table.sort(inner, before)
  return node("const", { name = name, dtype = dtype, type = CONST_TYPES[dtype],
                         dims = inner, stored = dims, line = where })
end

--- A number for each block: of a tensor f32 [seqs, kv_heads or 1, width], which a map is
-- called with. In attention it is the policy's field of this name.
function e.input(name)
  local where = user_line()
  if type(name) ~= "string" or not name:match "^[%a_][%w_]*$" then
    fail(where, "input: the name is %s, expected a name", options.shown(name))
  end
  return node("input", { name = name, type = "f32", dims = {}, line = where })
end

--- Any other name is a field of the policy's summary.
setmetatable(e, { __index = function(_, name)
  if type(name) ~= "string" or not name:match "^[%a_][%w_]*$" then
    fail(user_line(), "%s is no name of a field", options.shown(name))
  end
  return node("field", { name = name, line = user_line() })
end })

-- ---- resolving ------------------------------------------------------------------------

--- Calls fn(node) for each node, operands first, each once.
function M.each(root, fn, seen)
  seen = seen or {}
  if seen[root] then return end
  seen[root] = true
  for _, arg in ipairs(root.args) do M.each(arg, fn, seen) end
  fn(root)
end

--- Adds the files that an expression's nodes were built in to a set of paths.
function M.add_files(root, paths)
  M.each(root, function(x)
    for path in pairs(files_of[x.line] or {}) do
      if path ~= "" then paths[path] = true end
    end
  end)
end

local NODES_MAX = 500

--- The expression with the dimensions and types of its fields put in, all checks done.
-- Raises for a field that there is not.
---@param root kvlab.Expression
---@param fields table<string, kvlab.Expression>  the summary's, resolved
---@param what string    for errors: "policy quest: score"
---@param beside? table  of a field of a summary: all of its fields, by name
function M.resolve(root, fields, what, beside)
  local new, count = {}, 0
  M.each(root, function(x)
    count = count + 1
    if x.op == "field" then
      local field = fields[x.name]
      if beside and beside[x.name] then
        fail(x.line, "%s: %s is a field of the same summary, and a field is made of k, v "
          .. "and tokens alone", what, x.name)
      elseif not field then
        local names = sorted.keys(fields)
        local near = words.nearest(x.name, names)
        local known, far = words.nearest(x.name, sorted.keys(M.leaves))
        local there = near and (", which has %s"):format(table.concat(names, ", "))
          or ", and no summary"
        fail(x.line, "%s: there is no field %s in the summary%s%s", what, x.name, there,
          known and (not near or far <= 2) and ("; did you mean e.%s?"):format(known)
          or "")
      end
      new[x] = node("field", { name = x.name, dims = field.dims, type = field.type,
                               dtype = field.dtype, raw = field.raw, line = x.line })
    elseif #x.args == 0 then
      new[x] = x
    else
      local args, changed = {}, x.dims == nil
      for i, arg in ipairs(x.args) do
        args[i] = new[arg]
        changed = changed or args[i] ~= arg
      end
      if not changed then new[x] = x
      elseif x.op == "store" then
        new[x] = node("store", { args = args, dims = args[1].dims, type = args[1].type,
                                 dtype = x.dtype, line = x.line })
      else
        new[x] = build(x.op, args, x.line,
          (x.over or x.to) and { over = x.over, to = x.to })
      end
    end
  end)
  if count > NODES_MAX then
    fail(M.line_of(root), "%s: an expression of %d nodes, expected at most %d; what "
      .. "depends on keys alone can be a field of the summary", what, count, NODES_MAX)
  end
  return new[root]
end

--- The expression with `by` in place of a leaf.
function M.replace(root, old, by)
  local new = {}
  M.each(root, function(x)
    if x == old then
      new[x] = by
      return
    end
    local args, changed = {}, false
    for i, arg in ipairs(x.args) do
      args[i] = new[arg]
      changed = changed or args[i] ~= arg
    end
    if not changed then
      new[x] = x
      return
    end
    local copy = {}
    for key, value in pairs(x) do copy[key] = value end
    copy.args = args
    new[x] = setmetatable(copy, Expression)
  end)
  return new[root]
end

-- ---- as text --------------------------------------------------------------------------

local INFIX = { add = { " + ", 1 }, sub = { " - ", 1 }, mul = { " * ", 2 },
                div = { " / ", 2 }, mod = { " % ", 2 }, pow = { "^", 4 },
                lt = { " < ", 0 }, le = { " <= ", 0 }, gt = { " > ", 0 },
                ge = { " >= ", 0 }, eq = { " = ", 0 }, ne = { " != ", 0 } }

local function show(x, outer)
  local infix = INFIX[x.op]
  if x.op == "number" then
    return ("%.9g"):format(x.value)
  elseif infix then
    -- the right side of - / % and the left side of ^ bind tighter than their equals
    local strength = infix[2]
    local left = show(x.args[1], x.op == "pow" and strength + 1 or strength)
    local right = show(x.args[2], x.op == "pow" and strength or strength + 1)
    local text = left .. infix[1] .. right
    return strength < outer and "(" .. text .. ")" or text
  elseif x.op == "neg" then
    local text = "-" .. show(x.args[1], 3)
    return outer > 3 and "(" .. text .. ")" or text
  elseif #x.args == 0 then
    return x.name
  end
  local parts = {}
  for i, arg in ipairs(x.args) do parts[i] = show(arg, 0) end
  local name = x.over and x.op .. "_" .. x.over
    or x.op == "cast" and (x.to or x.type) or x.op
  return name .. "(" .. table.concat(parts, ", ") .. ")"
end

--- The expression as one reads mathematics: max_head(sum_dim(max(q * lo, q * hi))).
---@param most? integer  letters, after which it is cut
function M.text(x, most)
  local text = show(x, 0)
  if most and #text > most then text = text:sub(1, most - 3) .. "..." end
  return text
end

Expression.__tostring = function(self) return M.text(self) end

return M
