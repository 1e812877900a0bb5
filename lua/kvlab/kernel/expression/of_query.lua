--- Finds the parts of emitted expressions that depend only on the query, and not on a
-- block or a key. It serves prefill.
--
-- A value of this kind is computed once for each query: keep ^ (length - query_index).
-- A condition of this kind may say which queries are needed. The other queries add
-- nothing, whatever their weights are (0 to a sum, -inf to a maximum), so their scores
-- need not be computed:
--
--   e.where(e.query_index:ge(e.length - 32), e.weight, 0):sum "token":mean "head"
--
-- needs a query if its index is at least length - 32.
local expression = require "kvlab.kernel.expression.expression"
local rules = require "kvlab.kernel.expression.rules"

local M = {}

local OF_QUERY = { query_index = true, length = true, blocks = true, layer = true,
                   kv_head = true }

local known = setmetatable({}, { __mode = "k" }) -- what is_of_query found, by node

--- Whether a value depends on nothing but the query's index, options and numbers.
local function is_of_query(x)
  if x.op == "leaf" then return OF_QUERY[x.name] or false end
  if known[x] ~= nil then return known[x] end
  local is = not (x.op == "field" or x.op == "input" or x.over or #x.dims > 0)
  for _, arg in ipairs(x.args) do is = is and is_of_query(arg) end
  known[x] = is
  return is
end

local function is_finite(x) return x.op == "number" and math.abs(x.value) < math.huge end

local function make(op, args)
  return setmetatable({ op = op, args = args, type = "bool",
    dims = expression.join(args), line = rawget(args[1], "line") }, expression.Expression)
end

-- The value that adds nothing: to a sum, and to a maximum.
local NOTHING = { sum = 0, max = -math.huge }
M.NOTHING = NOTHING

-- f of NOTHING is NOTHING. A block has at least one token where these are computed.
local KEEPS = {
  sum = { sum = true, mean = true, max = true, min = true, neg = true, abs = true,
          relu = true },
  max = { sum = true, mean = true, max = true, min = true },
}
for name, of in pairs(rules.FUNCTIONS) do KEEPS.sum[name] = of.keeps_zero end

--- A condition; where it is false, a value adds nothing. nil: none is known.
---@param join string  sum or max
local function condition_of(x, join)
  local a, b, c = x.args[1], x.args[2], x.args[3]
  local function is_nothing(y) return y.op == "number" and y.value == NOTHING[join] end
  if x.op == "cast" and join == "sum" then
    if a.type == "bool" then return is_of_query(a) and a or nil end
    return condition_of(a, join)
  elseif x.op == "mul" and join == "sum" then
    if is_finite(b) then return condition_of(a, join) end
    return is_finite(a) and condition_of(b, join) or nil
  elseif x.op == "where" then
    if is_nothing(c) then return is_of_query(a) and a or condition_of(b, join) end
    if not is_nothing(b) then return nil end
    return is_of_query(a) and make("bnot", { a }) or condition_of(c, join)
  elseif #x.args == 1 and KEEPS[join][x.op] then
    return condition_of(a, join)
  end
  return nil
end

--- The condition that a query has to meet, or nil: all are needed.
---@param roots table[]  all that is emitted: node, join
---@return kvlab.Expression|nil  bool, without dimensions
function M.needed(roots)
  local any
  for _, root in ipairs(roots) do
    local condition = condition_of(root.node, root.join)
    if not condition then return nil end
    any = any and make("bor", { any, condition }) or condition
  end
  return any
end

--- Moves values that depend only on the query out of an expression.
---@param root kvlab.Expression
---@param values table[]  name, node: more of them are added
---@return kvlab.Expression  with leaves of these names in their place
function M.take_out(root, values)
  local new = {}
  expression.each(root, function(x)
    local copy, changed = {}, false
    for key, value in pairs(x) do copy[key] = value end
    copy.args = {}
    for i, arg in ipairs(x.args) do
      local by = new[arg]
      if #arg.args > 0 and is_of_query(arg) and not is_of_query(x) then
        by = values[arg]
        if not by then
          by = setmetatable({ op = "leaf", name = "of_query_" .. #values + 1, args = {},
            dims = {}, type = arg.type, line = arg.line }, expression.Expression)
          values[#values + 1] = { name = by.name, node = arg }
          values[arg] = by
        end
      end
      copy.args[i], changed = by, changed or by ~= arg
    end
    new[x] = changed and setmetatable(copy, expression.Expression) or x
  end)
  return new[root]
end

return M
