--- Nodes of expressions (kernel/expression.lua): what one is, the line that built it, its
-- dimensions, and how it reads as text.
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

local HOUSE = debug.getinfo(1, "S").source:match "^(@.*)kernel/node%.lua$"

M.files_of = {} -- by such a line, whose path may be cut: its files, as keys

--- The innermost line outside of lua/kvlab.
function M.user_line()
  local level = 3
  while true do
    local info = debug.getinfo(level, "Sl")
    if not info then return "?" end
    if info.what ~= "C" and info.currentline > 0
       and info.source:sub(1, #HOUSE) ~= HOUSE then
      local line = ("%s:%d"):format(info.short_src, info.currentline)
      M.files_of[line] = M.files_of[line] or {}
      M.files_of[line][info.source:match "^@(.*)$" or ""] = true
      return line
    end
    level = level + 1
  end
end

--- The line that built a node. Leaves are everyone's: for one it is the line that is
-- running now.
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

local function dims_text(dims)
  return #dims == 0 and "no dimensions" or "[" .. table.concat(dims, ", ") .. "]"
end

--- "lo, i32 [dim]": an operand, in the words of an error.
function M.side(x)
  if x.op == "number" then return tostring(x) end
  return ("%s (%s %s)"):format(M.text(x, 60), x.type, dims_text(x.dims))
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
