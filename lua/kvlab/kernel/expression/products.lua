--- Finds the sums over dim in a score that are matrix products. One factor is made only
-- of queries and constants, and the other is rows of the blocks as they are stored.
--
--   sum_dim(q * k)                  q times the rows of k
--   sum_dim(q * table * lo - q * hi)  (q * table) times lo, and -q times hi
--   sum_dim(max(q * lo, q * hi))    where lo <= hi is known of the summary: the negative
--                                   numbers of q times lo, and the others times hi
--
-- The last is exact: the larger product of a term is the one with hi where q >= 0, and
-- else the one with lo. The rest of the score is computed from these sums as if they were
-- leaves.
local expression = require "kvlab.kernel.expression.expression"

local M = {}

---@class kvlab.Product       a sum over dim
---@field factors table[]     row: the index of a row; x: what it is multiplied with
---@field body kvlab.Expression  what is summed, for numbers that are not finite
---@field is_exact boolean    every factor has no more digits than a query

---@class kvlab.Products
---@field rows kvlab.Expression[]  what is read: fields [dim], or K and V [token, dim]
---@field dtype string        of all rows
---@field of_tokens boolean   a row for each token, else for each block
---@field sums kvlab.Product[]
---@field rest kvlab.Expression  the score, with leaves "product" in place of the sums

local function make(op, args, kind)
  return setmetatable({ op = op, args = args, type = kind or "f32",
    dims = expression.join(args), line = rawget(args[1], "line") }, expression.Expression)
end

--- Whether two expressions are the same. compared: pairs of nodes that were already
-- compared; they are equal, because the first difference ends the comparison.
local function same(a, b, compared)
  if a == b then return true end
  for _, key in ipairs { "op", "name", "value", "type", "over", "dtype", "to", "unit" } do
    if a[key] ~= b[key] then return false end
  end
  if #a.args ~= #b.args then return false end
  compared = compared or {}
  compared[a] = compared[a] or {}
  if compared[a][b] then return true end
  compared[a][b] = true
  for i, arg in ipairs(a.args) do
    if not same(arg, b.args[i], compared) then return false end
  end
  return table.concat(a.stored or {}, " ") == table.concat(b.stored or {}, " ")
end

--- The result of fn for a node; fn is called once for each node.
local function remembered(fn)
  local known = setmetatable({}, { __mode = "k" })
  return function(x)
    if known[x] == nil then known[x] = fn(x) end
    return known[x]
  end
end

-- ---- factors --------------------------------------------------------------------------

local PURE_LEAVES = { q = true, layer = true, kv_head = true }

--- Whether a value is made only of queries and constants, element by element.
local is_pure
is_pure = remembered(function(x)
  if x.op == "leaf" then return PURE_LEAVES[x.name] or false end
  if x.op == "field" or x.op == "input" or x.over then return false end
  for _, dim in ipairs(x.dims) do
    if dim ~= "head" and dim ~= "dim" then return false end
  end
  for _, arg in ipairs(x.args) do if not is_pure(arg) then return false end end
  return true
end)

local function is_zero(x) return x.op == "number" and x.value == 0 end

local function is_power_of_two(x)
  return x.op == "number" and x.value ~= 0 and math.frexp(math.abs(x.value)) == 0.5
end

--- Whether a factor has no more digits than a query.
local is_exact
is_exact = remembered(function(x)
  local a, b = x.args[1], x.args[2]
  if x.op == "leaf" then return x.name == "q" end
  if x.op == "neg" or x.op == "abs" or x.op == "relu" then return is_exact(a) end
  if x.op == "mul" then
    return is_exact(a) and is_power_of_two(b) or is_exact(b) and is_power_of_two(a)
  elseif x.op == "min" or x.op == "max" then
    return (is_exact(a) or is_zero(a)) and (is_exact(b) or is_zero(b))
  elseif x.op == "where" then
    b, a = x.args[3], b
    return (is_exact(a) or is_zero(a)) and (is_exact(b) or is_zero(b))
  end
  return false
end)

-- ---- sums of products -----------------------------------------------------------------

local ROW_DTYPES = { f32 = true, f16 = true, bf16 = true, f8e4m3 = true }

local function is_row(x)
  if x.op == "field" then
    return #x.dims == 1 and x.dims[1] == "dim" and x.type == "f32"
      and ROW_DTYPES[x.dtype] or false
  end
  return x.op == "leaf" and (x.name == "k" or x.name == "v")
end

--- A sum of products as a list: leaf, unit, factor (nil for 1); nil if it is no such sum.
-- There is one entry for each leaf and unit. known: the lists of the nodes so far.
local linear

local function key_of(leaf) return leaf.op .. " " .. leaf.name end

--- Adds a product to a list.
local function add_product(list, leaf, unit, factor)
  for _, one in ipairs(list) do
    if key_of(one.leaf) == key_of(leaf) and one.unit == unit then
      local unity = expression.number(1, "f32")
      one.factor = make("add", { one.factor or unity, factor or unity })
      return
    end
  end
  list[#list + 1] = { leaf = leaf, unit = unit, factor = factor }
end

local function merged(a, b, sign)
  local list = {}
  for _, one in ipairs(a) do add_product(list, one.leaf, one.unit, one.factor) end
  for _, one in ipairs(b) do
    local factor = one.factor
    if sign < 0 then factor = make("neg", { factor or expression.number(1, "f32") }) end
    add_product(list, one.leaf, one.unit, factor)
  end
  return list
end

local function scaled(list, by, op)
  local new = {}
  for i, one in ipairs(list) do
    local factor = one.factor and make(op, { one.factor, by })
      or op == "mul" and by or make(op, { expression.number(1, "f32"), by })
    new[i] = { leaf = one.leaf, unit = one.unit, factor = factor }
  end
  return new
end

--- Whether no number of field `a` is above that of field `b`, by their definitions.
local function is_below(a, b, definitions)
  if a.op ~= "field" or b.op ~= "field" or a.dtype ~= b.dtype then return false end
  local x, y = definitions[a.name], definitions[b.name]
  while x and x.op == "store" do x = x.args[1] end
  while y and y.op == "store" do y = y.args[1] end
  return x ~= nil and y ~= nil and x.op == "min" and y.op == "max" and x.over ~= nil
    and x.over == y.over and same(x.args[1], y.args[1])
end

--- The larger, or the smaller, of a factor times one row and times another.
local function bound(x, definitions, known)
  local a, b = linear(x.args[1], definitions, known),
    linear(x.args[2], definitions, known)
  if not (a and b and #a == 1 and #b == 1) then return nil end
  local low, high = a[1], b[1]
  if is_below(high.leaf, low.leaf, definitions) then low, high = high, low end
  local factor, zero = low.factor, expression.number(0, "f32")
  if not is_below(low.leaf, high.leaf, definitions) or low.unit ~= high.unit
     or not factor or not high.factor or not same(factor, high.factor) then
    return nil
  end
  local negative = make("lt", { factor, zero }, "bool")
  local below = make("where", { negative, factor, zero })
  local above = make("where", { negative, zero, factor }) -- NaN is here
  if x.op == "min" then below, above = above, below end
  return { { leaf = low.leaf, unit = low.unit, factor = below },
           { leaf = high.leaf, unit = high.unit, factor = above } }
end

local function list_of(x, definitions, known)
  if is_row(x) then return { { leaf = x } } end
  local a, b = x.args[1], x.args[2]
  if x.type ~= "f32" or x.over then return nil end
  if x.op == "unit" then
    return is_row(a) and { { leaf = a, unit = x.unit } } or nil
  elseif x.op == "neg" then
    local list = linear(a, definitions, known)
    return list and merged({}, list, -1)
  elseif x.op == "add" or x.op == "sub" then
    local left = linear(a, definitions, known)
    local right = left and linear(b, definitions, known)
    return right and merged(left, right, x.op == "sub" and -1 or 1)
  elseif x.op == "mul" then
    if is_pure(b) then a, b = b, a end
    local list = is_pure(a) and linear(b, definitions, known)
    return list and scaled(list, a, "mul") or nil
  elseif x.op == "div" then
    local list = is_pure(b) and linear(a, definitions, known)
    return list and scaled(list, b, "div") or nil
  elseif x.op == "max" or x.op == "min" then
    return bound(x, definitions, known)
  end
  return nil
end

function linear(x, definitions, known)
  if known[x] == nil then known[x] = list_of(x, definitions, known) or false end
  return known[x] or nil
end

-- ---- a score --------------------------------------------------------------------------

--- The index of a row among all that are read; nil if it cannot be combined with them.
local function row_index(found, leaf, plan)
  local dtype = leaf.op == "field" and leaf.dtype or plan.codec
  local of_tokens = leaf.op == "leaf"
  if not ROW_DTYPES[dtype] then return nil end
  if found.dtype == nil then found.dtype, found.of_tokens = dtype, of_tokens end
  if found.dtype ~= dtype or found.of_tokens ~= of_tokens then return nil end
  local key = key_of(leaf)
  if not found.index[key] then
    found.rows[#found.rows + 1] = leaf
    found.index[key] = #found.rows
  end
  return found.index[key]
end

--- Records the product that a sum over dim is, with its rows; returns it and the rows'
-- unit, or nil if the sum is no product.
local function product_of(x, found, plan)
  local tokens = #x.dims == 2 and x.dims[2] == "token"
  if x.op ~= "sum" or x.over ~= "dim" or x.dims[1] ~= "head"
     or #x.dims ~= (tokens and 2 or 1) then
    return nil
  end
  local list = linear(x.args[1], plan.definitions, found.known)
  if not list then return nil end
  local factors, exact = {}, true
  for i, one in ipairs(list) do
    local row = row_index(found, one.leaf, plan)
    if not row or one.unit ~= list[1].unit then return nil end
    factors[i] = { row = row, x = one.factor or expression.number(1, "f32") }
  end
  if tokens ~= found.of_tokens then return nil end
  table.sort(factors, function(a, b) return a.row < b.row end)
  for _, one in ipairs(factors) do exact = exact and is_exact(one.x) end
  return { factors = factors, body = x.args[1], is_exact = exact }, list[1].unit
end

--- The score with its products taken out; nil if it has none, or needs rows elsewhere.
---@param plan kvlab.Plan  of a score
---@return kvlab.Products|nil
function M.find(plan)
  local found, new = { rows = {}, index = {}, sums = {}, known = {} }, {}
  expression.each(plan.roots[1].node, function(x)
    local product, unit = product_of(x, found, plan)
    if product then
      found.sums[#found.sums + 1] = product
      local one = setmetatable({ op = "leaf", name = "product", at = #found.sums,
        args = {}, dims = x.dims, type = "f32", line = x.line }, expression.Expression)
      new[x] = unit and setmetatable({ op = "unit", unit = unit, args = { one },
        dims = x.dims, type = "f32", line = x.line }, expression.Expression) or one
      return
    end
    local copy = {}
    for key, value in pairs(x) do copy[key] = value end
    copy.args = {}
    for i, arg in ipairs(x.args) do copy.args[i] = new[arg] end
    new[x] = setmetatable(copy, expression.Expression)
  end)
  found.rest = new[plan.roots[1].node]
  if #found.sums == 0 then return nil end
  local needs_rows = false
  expression.each(found.rest, function(x)
    needs_rows = needs_rows or expression.has_dim(x.dims, "dim")
  end)
  return not needs_rows and found or nil
end

return M
