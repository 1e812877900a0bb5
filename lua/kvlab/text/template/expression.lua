--- Parses the expressions of templates. Each function takes the stream and returns a
-- node; functions of weaker operators call those of stronger ones, in the order of
-- Jinja's parser.
local value = require "kvlab.text.template.value"

local M = {}

local CONSTANTS = { ["true"] = true, True = true, ["false"] = false, False = false,
                    none = value.NONE, None = value.NONE }

-- ---- calls ----------------------------------------------------------------------------

--- The arguments in parentheses: { positional nodes, named = { { name, node } … },
-- rest = node of *…, rest_named = node of **… }.
local function arguments(s)
  local list = { named = {} }
  s:expect "("
  while not s:is ")" do
    if s:take "*" then
      list.rest = M.any(s)
    elseif s:take "**" then
      list.rest_named = M.any(s)
    elseif s:is "name" and s:token(1).kind == "=" then
      local name = s:next().value
      s:next()
      list.named[#list.named + 1] = { name, M.any(s) }
    elseif list.rest or list.rest_named or list.named[1] then
      s:fail "an argument without a name after named ones"
    else
      list[#list + 1] = M.any(s)
    end
    if not s:take "," then break end
  end
  s:expect ")"
  return list
end

local NO_ARGUMENTS = { named = {} }

local function dotted_name(s)
  local name = s:expect("name").value
  while s:take "." do name = name .. "." .. s:expect("name").value end
  return name
end

--- A filter after its |.
function M.filter(s, node)
  local line = s:line()
  local name = dotted_name(s)
  return { kind = "filter", line = line, name = name, of = node,
           arguments = s:is "(" and arguments(s) or NO_ARGUMENTS }
end

-- ---- values ---------------------------------------------------------------------------

local function name_of(s)
  local token = s:next()
  if CONSTANTS[token.value] ~= nil then
    return { kind = "constant", line = token.line, value = CONSTANTS[token.value] }
  end
  s:read(token.value)
  return { kind = "name", line = token.line, name = token.value }
end

local function string_of(s)
  local node, parts = s:node "constant", {}
  while s:is "string" do parts[#parts + 1] = s:next().value end
  node.value = table.concat(parts)
  return node
end

local function list_of(s)
  local node = s:node "list"
  s:next()
  while not s:is "]" do
    node[#node + 1] = M.any(s)
    if not s:take "," then break end
  end
  s:expect "]"
  return node
end

local function dict_of(s)
  local node = s:node "dict"
  s:next()
  while not s:is "}" do
    local key = M.any(s)
    s:expect ":"
    node[#node + 1] = { key, M.any(s) }
    if not s:take "," then break end
  end
  s:expect "}"
  return node
end

--- Nodes between commas, each parsed by `parse`: a single node is returned as it is,
-- several are a tuple.
---@param parse function
---@param allows_none? boolean  () is an empty tuple
function M.tuple(s, parse, allows_none)
  local node, is_tuple = s:node "tuple", false
  while not (s:is ")" or s:is "%}" or s:is "}}") do
    node[#node + 1] = parse(s)
    if not s:take "," then break end
    is_tuple = true
  end
  if is_tuple or #node == 0 and allows_none then return node end
  return node[1] or s:fail "a tag without an expression"
end

local function primary(s)
  local token = s:token()
  if token.kind == "name" then return name_of(s) end
  if token.kind == "string" then return string_of(s) end
  if token.kind == "number" then return s:node("constant", { value = s:next().value }) end
  if token.kind == "[" then return s:deeper(list_of) end
  if token.kind == "{" then return s:deeper(dict_of) end
  if token.kind ~= "(" then return s:expect "a value" end
  s:next()
  local node = s:deeper(M.tuple, M.any, true)
  s:expect ")"
  return node
end
M.primary = primary

--- What stands in [ ]: an expression, or a slice.
local function subscript(s, node)
  local line = s:next().line
  local parts, count, is_slice = {}, 1, false
  while not s:is "]" do
    if s:take ":" then
      count, is_slice = count + 1, true
    elseif parts[count] or count > 3 then
      s:fail "a subscript that is no expression and no slice"
    else
      parts[count] = M.any(s)
    end
  end
  s:expect "]"
  if not is_slice then
    if not parts[1] then s:fail "a subscript without an expression" end
    return { kind = "item", line = line, of = node, key = parts[1] }
  end
  return { kind = "slice", line = line, of = node, first = parts[1], last = parts[2],
           step = parts[3] }
end

local function postfix(s, node)
  while true do
    if s:is "." then
      local line = s:next().line
      if s:is "number" then
        local key = s:node("constant", { value = s:next().value })
        node = { kind = "item", line = line, of = node, key = key }
      else
        node = { kind = "attribute", line = line, of = node,
                 name = s:expect("name").value }
      end
    elseif s:is "[" then
      node = subscript(s, node)
    elseif s:is "(" then
      node = s:node("call", { of = node })
      node.arguments = arguments(s)
    else
      return node
    end
  end
end

-- What may begin the argument of a test that stands without parentheses.
local ARGUMENT = { name = true, string = true, number = true, ["["] = true, ["{"] = true }
local AFTER = { ["else"] = true, ["or"] = true, ["and"] = true }

local function test(s, node)
  local line = s:next().line
  local is_not = s:take("name", "not")
  node = { kind = "test", line = line, name = dotted_name(s), of = node,
           arguments = NO_ARGUMENTS }
  if s:is "(" then
    node.arguments = arguments(s)
  elseif ARGUMENT[s:token().kind] and not AFTER[s:token().value] then
    if s:is_name "is" then s:fail "a test of a test" end
    node.arguments = { postfix(s, primary(s)), named = {} }
  end
  return is_not and { kind = "not", line = line, of = node } or node
end

local function filters(s, node)
  while true do
    if s:take "|" then node = M.filter(s, node)
    elseif s:is_name "is" then node = test(s, node)
    elseif s:is "(" then
      node = s:node("call", { of = node })
      node.arguments = arguments(s)
    else
      return node
    end
  end
end

-- ---- operators ------------------------------------------------------------------------

local function unary(s, is_inner)
  local node
  if s:is "-" or s:is "+" then
    node = s:node("sign", { is_minus = s:next().kind == "-" })
    node.of = s:deeper(unary, true)
  else
    node = primary(s)
  end
  node = postfix(s, node)
  return is_inner and node or filters(s, node)
end

--- A parser of left-associative operators of one precedence; `parse` parses the operands.
local function left(parse, ...)
  local operators = {}
  for _, operator in ipairs { ... } do operators[operator] = true end
  return function(s)
    local node = parse(s)
    while operators[s:token().kind] do
      local token = s:next()
      node = { kind = "operator", line = token.line, operator = token.kind, a = node,
               b = parse(s) }
    end
    return node
  end
end

local power = left(function(s) return unary(s) end, "**")
local product = left(power, "*", "/", "//", "%")

local function concatenation(s)
  local node = product(s)
  if not s:is "~" then return node end
  node = s:node("concatenation", { node })
  while s:take "~" do node[#node + 1] = product(s) end
  return node
end

local sum = left(concatenation, "+", "-")

local COMPARISONS = { ["=="] = true, ["!="] = true, ["<"] = true, ["<="] = true,
                      [">"] = true, [">="] = true }

local function comparison(s)
  local node = s:node("comparison", { sum(s) })
  while true do
    local operator
    if COMPARISONS[s:token().kind] then operator = s:next().kind
    elseif s:take("name", "in") then operator = "in"
    elseif s:is_name "not" and s:token(1).kind == "name" and s:token(1).value == "in" then
      s:next()
      s:next()
      operator = "not in"
    else
      return #node > 1 and node or node[1]
    end
    node[#node + 1] = { operator, sum(s) }
  end
end

local function negation(s)
  if not s:is_name "not" then return comparison(s) end
  local node = s:node "not"
  s:next()
  node.of = s:deeper(negation)
  return node
end

local function both(parse, word)
  return function(s)
    local node = parse(s)
    while s:is_name(word) do
      local line = s:next().line
      node = { kind = word, line = line, a = node, b = parse(s) }
    end
    return node
  end
end

--- An expression that is no `a if b else c`.
M.plain = both(both(negation, "and"), "or")

local function conditional(s)
  local node = M.plain(s)
  while s:is_name "if" do
    local line = s:next().line
    local condition = M.plain(s)
    node = { kind = "conditional", line = line, condition = condition, a = node,
             b = s:take("name", "else") and s:deeper(conditional) or nil }
  end
  return node
end

--- Any expression.
function M.any(s) return s:deeper(conditional) end

return M
