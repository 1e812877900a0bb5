--- Nodes of expressions (expression.lua beside it): what one is, the line that built it,
-- its dimensions, and how it reads as text.
local house = require "kvlab.house"

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

M.files_of = {} -- by such a line, whose path may be cut: its files, as keys

--- The innermost line that is not kvlab's.
function M.user_line()
  local level = 3
  while true do
    local info = debug.getinfo(level, "Sl")
    if not info then return "?" end
    if info.what ~= "C" and info.currentline > 0 and not house.has(info.source) then
      local line = ("%s:%d"):format(info.short_src, info.currentline)
      M.files_of[line] = M.files_of[line] or {}
      M.files_of[line][info.source:match "^@(.*)$" or ""] = true
      return line
    end
    level = level + 1
  end
end

--- The line that built a node. All expressions share the leaves: for a leaf, it is the
-- line that is running now.
function M.line_of(x) return x.op == "leaf" and M.user_line() or x.line end

--- Raises, with the line that built a node in front.
function M.fail(where, message, ...)
  error(("%s: %s"):format(where, message:format(...)), 0)
end

-- ---- nodes ----------------------------------------------------------------------------

function M.node(op, fields)
  fields.op, fields.args = op, fields.args or {}
  return setmetatable(fields, Expression)
end

function M.number(value, kind, where)
  return M.node("number", { value = value, type = kind or "number", dims = {},
                            line = where })
end

--- Whether a name can stand in the text of a kernel.
function M.is_name(x) return type(x) == "string" and x:find "^[%a_][%w_]*$" ~= nil end

-- ---- dimensions -----------------------------------------------------------------------

-- The order in which dimensions are stored and looped over; the policy's own lie between
-- token and dim, by name.
local RANK = { layer = 1, kv_head = 2, head = 3, token = 4, dim = 6 }
local OWN = 5

function M.before(a, b)
  local x, y = RANK[a] or OWN, RANK[b] or OWN
  if x ~= y then return x < y end
  return a < b
end

function M.has_dim(dims, name)
  for i = 1, #dims do if dims[i] == name then return true end end
  return false
end

--- The dimensions of any of the args, in order.
function M.join(args)
  local dims = {}
  for _, arg in ipairs(args) do
    for _, name in ipairs(arg.dims) do
      if not M.has_dim(dims, name) then dims[#dims + 1] = name end
    end
  end
  table.sort(dims, M.before)
  return dims
end

function M.without(dims, name)
  local left = {}
  for _, other in ipairs(dims) do if other ~= name then left[#left + 1] = other end end
  return left
end

--- "[token, dim]", or "no dimensions".
function M.dims_text(dims)
  return #dims == 0 and "no dimensions" or "[" .. table.concat(dims, ", ") .. "]"
end

--- "lo, i32 [dim]": an operand, in the words of an error.
function M.side(x)
  if x.op == "number" then return tostring(x) end
  return ("%s (%s %s)"):format(M.text(x, 60), x.type, M.dims_text(x.dims))
end

-- ---- in order -------------------------------------------------------------------------

--- Calls fn(node) for each node, operands first, each once. It needs no recursion, so an
-- expression may be as deep as memory allows.
---@param seen? table  nodes that are left out; those that it calls fn for are added
function M.each(root, fn, seen)
  seen = seen or {}
  if seen[root] then return end
  local path, at, depth = { root }, { 0 }, 1
  seen[root] = true
  while depth > 0 do
    local x, i = path[depth], at[depth] + 1
    local arg = x.args[i]
    at[depth] = i
    if not arg then
      fn(x)
      depth = depth - 1
    elseif not seen[arg] then
      seen[arg], depth = true, depth + 1
      path[depth], at[depth] = arg, 0
    end
  end
end

-- How deeply operations may be nested in one line of a text.
local DEEP = 30

--- The nodes that a text has to name, so that every node is written once: nodes that are
-- used more than once, and some deeply nested nodes, because parsers and readers have
-- their limits. Leaves have names already.
---@param roots kvlab.Expression[]
---@return table<kvlab.Expression, boolean>
function M.named(roots)
  local used, deep, named, seen, seen_again = {}, {}, {}, {}, {}
  for _, root in ipairs(roots) do
    M.each(root, function(x)
      for _, arg in ipairs(x.args) do used[arg] = (used[arg] or 0) + 1 end
    end, seen)
  end
  for _, root in ipairs(roots) do
    M.each(root, function(x)
      local most = 0
      for _, arg in ipairs(x.args) do most = math.max(most, deep[arg]) end
      named[x] = #x.args > 0 and ((used[x] or 0) > 1 or most + 1 >= DEEP)
      deep[x] = (named[x] or x.over) and 0 or most + 1
    end, seen_again)
  end
  return named
end

-- ---- as text --------------------------------------------------------------------------

local INFIX = { add = { " + ", 1 }, sub = { " - ", 1 }, mul = { " * ", 2 },
                div = { " / ", 2 }, mod = { " % ", 2 }, pow = { "^", 4 },
                lt = { " < ", 0 }, le = { " <= ", 0 }, gt = { " > ", 0 },
                ge = { " >= ", 0 }, eq = { " = ", 0 }, ne = { " != ", 0 } }
local NEG_STRENGTH = 3

local function put(out, text)
  out[#out + 1] = text
  out.left = out.left - #text
end

local write

--- Writes an operation of known precedence; in brackets if it binds less tightly than
-- `outer`.
local function write_infix(out, x, outer, strength)
  local infix, is_pow = INFIX[x.op], x.op == "pow"
  if strength < outer then put(out, "(") end
  if not infix then
    put(out, "-")
    write(out, x.args[1], strength)
  else
    -- the right side of - / % and the left side of ^ bind tighter than their equals
    write(out, x.args[1], is_pow and strength + 1 or strength)
    put(out, infix[1])
    write(out, x.args[2], is_pow and strength or strength + 1)
  end
  if strength < outer then put(out, ")") end
end

--- Writes a node from left to right, until there is no room for more letters.
---@param out table     the pieces; left: how many letters there is room for; deeper: how
--                      many nodes inside of each other; names: of nodes, or empty
---@param outer number  how strong the operation around it binds
function write(out, x, outer)
  if out.left < 0 then return end
  local infix = INFIX[x.op]
  if out.names[x] then return put(out, out.names[x]) end
  if x.op == "number" then return put(out, ("%.9g"):format(x.value)) end
  if #x.args == 0 then return put(out, x.name) end
  if out.deeper == 0 then return put(out, "...") end
  out.deeper = out.deeper - 1
  if infix or x.op == "neg" then
    write_infix(out, x, outer, infix and infix[2] or NEG_STRENGTH)
  else
    put(out, (x.over and x.op .. "_" .. x.over
      or x.op == "cast" and (x.to or x.type) or x.op) .. "(")
    for i, arg in ipairs(x.args) do
      if i > 1 then put(out, ", ") end
      write(out, arg, 0)
    end
    put(out, ")")
  end
  out.deeper = out.deeper + 1
end

local function written(x, most, names)
  local out = { left = most, deeper = 4 * DEEP, names = names }
  write(out, x, 0)
  return table.concat(out), out.left >= 0
end

--- An expression with names for what it has several times: "x1 + x1 with x1 = q * k".
local function with_names(x)
  local names, list, named = {}, {}, M.named { x }
  M.each(x, function(one)
    if not named[one] or one == x then return end
    local name = "x" .. #list + 1
    list[#list + 1] = ("%s = %s"):format(name, (written(one, math.huge, names)))
    names[one] = name
  end)
  return written(x, math.huge, names)
    .. (#list > 0 and " with " .. table.concat(list, ", ") or "")
end

-- The most letters of a text that names no parts.
local LONG = 400

--- The expression as one reads mathematics: max_head(sum_dim(max(q * lo, q * hi))). Its
-- length grows with the number of nodes, however often they are used.
---@param most? integer  letters, after which it is cut
function M.text(x, most)
  local text, is_whole = written(x, most or LONG, {})
  if is_whole then return text end
  if not most then return with_names(x) end
  return text:sub(1, most - 3) .. "..."
end

Expression.__tostring = function(self) return M.text(self) end

return M
