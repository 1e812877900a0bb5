--- Expressions: a kernel written as arithmetic over named dimensions, `kv.expr`.
--
--   local e = require("kvlab").expr
--   local bound = e.max(e.q * e.lo, e.q * e.hi):sum "dim":max "head"
--
-- An operator or a method makes a node and checks it at once: an error names the line
-- that built the node, and the dimensions of both operands. Nothing is computed here;
-- kernel/print/schedule.lua orders the loops, and kernel/print/*.lua print them.
--
-- Two operands are joined by the names of their dimensions, so q [head, dim] * k [token,
-- dim] is [head, token, dim]. Types are f32, i32, u32, u64 and bool; a storage dtype
-- (bf16, f8e4m3, ...) becomes f32 when it is read. i32 becomes f32 if the other operand
-- is f32; every other change of type is written with :cast.
--
-- What can be read, by its name in kv.expr:
--   q         f32 [head, dim]    the newest query of each head of the KV head's group
--   k, v      f32 [token, dim]   the block's K and V
--   tokens    i32                valid tokens of the block
--   index     i32 [token]        of a token among those that its sequence holds
--   position  i32 [token]        of a token in the text, from which a sequence may hold
--                                a part
--   block     i32                which of its sequence's blocks it is
--   blocks    i32                of the sequence
--   length    i32                of the sequence, in tokens
--   layer     i32
--   kv_head   i32
--   scale     f32                what attention multiplies q . k by: 1 / sqrt(head_dim)
--                                or the option of kv.attention; a constant of the kernel
-- and in attention, of a query and a key that it sees:
--   logit     f32 [head, token]  scale * q . k, capped where the attention has a soft cap
--   query_index, query_position  i32   of the query
--   weight    f32 [head, token]  of the key in the softmax (emit)
-- Any other name is a field of the policy's summary. The operators + - * / ^ % work on
-- expressions and numbers.
local hint = require("kvlab.words").hint
local nodes = require "kvlab.kernel.expression.node"
local options = require "kvlab.options"
local rules = require "kvlab.kernel.expression.rules"
local sorted = require "kvlab.sorted"

local M = {}

local before, fail, join, without = nodes.before, nodes.fail, nodes.join, nodes.without
local Expression, is_expression = nodes.Expression, nodes.is_expression
local is_name, node, user_line = nodes.is_name, nodes.node, nodes.user_line
local cast_to, lift, CASTS = rules.cast_to, rules.lift, rules.CASTS
for _, name in ipairs { "Expression", "each", "is_expression", "is_name", "line_of",
                        "has_dim", "join", "named", "number", "text" } do
  M[name] = nodes[name]
end
M.REDUCTIONS = rules.REDUCTIONS

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
    local x, kind, dims = rules.reduce(op, args[1], extra.over, where)
    return node(op, { args = { x }, over = extra.over, type = kind, dims = dims,
                      line = where })
  end
  local new, kind = rules.rules[op](args, where, extra)
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
-- "word". sum "query" and max "query" come last in an emit, and say how a prefill joins
-- the numbers of its queries.
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
for name in pairs(rules.REDUCTIONS) do methods[name] = reduction(name) end
for _, name in ipairs { "lt", "le", "gt", "ge", "eq", "ne", "band", "bor", "bxor",
                        "lshift", "rshift" } do
  methods[name] = operator(name)
end
for _, name in ipairs { "bnot", "popcount", "abs", "relu" } do
  methods[name] = unary(name)
end
for name in pairs(rules.FUNCTIONS) do methods[name] = unary(name) end

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

--- A summary's field is to be stored in this dtype: f32 f16 bf16 f8e4m3. Without it, a
-- field that is made of keys only by min and max is stored in the dtype of the cache, and
-- any other field in its own type.
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
Expression.__index = function(self, name)
  local method = methods[name]
  if method then return method end
  if type(name) == "number" then
    fail(user_line(), #self.args == 0 and "%s[%g]: %s" or "(%s)[%g]: %s",
      nodes.text(self, 60), name, ("an expression has no entries, expected the name of "
      .. "a method; it stands for all of %s at once"):format(
        self.dims and nodes.dims_text(self.dims) or "its dimensions"))
  end
  if type(name) ~= "string" then return nil end
  if FIELDS[name] then return nil end
  fail(user_line(), "%s is no method of an expression%s", name, WRITTEN[name]
    or hint(name, sorted.keys(methods), ", did you mean %s?"))
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
  index = leaf("index", "i32", { "token" }), -- of a token in its sequence
  position = leaf("position", "i32", { "token" }), -- of a token in the text
  block = leaf("block", "i32", {}),        -- which of its sequence's
  blocks = leaf("blocks", "i32", {}),      -- of the sequence
  length = leaf("length", "i32", {}),      -- of the sequence, in tokens
  layer = leaf("layer", "i32", {}), kv_head = leaf("kv_head", "i32", {}),
  scale = leaf("scale", "f32", {}),        -- of the attention
  logit = leaf("logit", "f32", { "head", "token" }), -- what attention makes of q . k
  query_index = leaf("query_index", "i32", {}),
  query_position = leaf("query_position", "i32", {}),
  weight = leaf("weight", "f32", { "head", "token" }), -- after the softmax
}

local e = {}
M.e = e
for name, one in pairs(M.leaves) do e[name] = one end

--- The smaller, or the larger, of two. Of a number and NaN it is the number.
e.min, e.max = operator "min", operator "max"
for _, name in ipairs { "abs", "relu" } do e[name] = unary(name) end
for name in pairs(rules.FUNCTIONS) do e[name] = unary(name) end

--- a where the condition is true, else b.
function e.where(condition, a, b)
  if not is_expression(condition) then
    fail(user_line(), "where: the condition is %s, expected an expression",
      options.shown(condition))
  end
  return methods.where(condition, a, b)
end

--- An option of the policy, read at each launch: a new value needs no compilation.
---@param name string
---@param kind? string  f32 (or i32)
function e.param(name, kind)
  local where = user_line()
  kind = kind or "f32"
  if not is_name(name) then
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
  if not is_name(name) then
    fail(where, "const: the name is %s, expected that of a field which init sets",
      options.shown(name))
  end
  for _, dim in ipairs(dims) do
    if not is_name(dim) or seen[dim] then
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
  if not is_name(name) then
    fail(where, "input: the name is %s, expected a name", options.shown(name))
  end
  return node("input", { name = name, type = "f32", dims = {}, line = where })
end

--- Any other name is a field of the policy's summary.
setmetatable(e, { __index = function(_, name)
  if not is_name(name) then
    fail(user_line(), "%s is no name of a field", options.shown(name))
  end
  return node("field", { name = name, line = user_line() })
end })

-- ---- resolving ------------------------------------------------------------------------

--- Adds the files that an expression's nodes were built in to a set of paths.
function M.add_files(root, paths)
  M.each(root, function(x)
    for path in pairs(nodes.files_of[x.line] or {}) do
      if path ~= "" then paths[path] = true end
    end
  end)
end

local NODES_MAX = 500

--- The expression with the dimensions and types of its fields put in, all checks done.
-- Raises for a field that does not exist.
---@param root kvlab.Expression
---@param fields table<string, kvlab.Expression>  the summary's, resolved
---@param what string    for errors: "policy quest: score"
---@param beside? table  of a field of a summary: all of its fields, by name
function M.resolve(root, fields, what, beside)
  local new, count = {}, 0
  M.each(root, function(x)
    count = count + 1
    if x.over == "query" then
      fail(x.line, "%s: %s: %s \"query\" is the last operation of an emit, and nothing "
        .. "else", what, M.text(x, 60), x.op)
    elseif x.op == "field" then
      local field = fields[x.name]
      if beside and beside[x.name] then
        fail(x.line, "%s: %s is a field of the same summary, and a field is made of k, v "
          .. "and tokens alone", what, x.name)
      elseif not field then
        local names = sorted.keys(fields)
        local there = names[1] and (", which has %s"):format(table.concat(names, ", "))
          or ", and no summary"
        fail(x.line, "%s: there is no field %s in the summary%s%s", what, x.name, there,
          hint(x.name, sorted.keys(M.leaves), "; did you mean e.%s?"))
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

--- The expression with a leaf replaced by `by`.
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

return M
