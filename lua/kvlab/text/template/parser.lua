--- Parses a template into a tree. Statements that kvlab does not have are refused by
-- their name and line; expressions are in kvlab.text.template.expression.
local expression = require "kvlab.text.template.expression"
local stream = require "kvlab.text.template.stream"

local M = {}

local STATEMENTS = {}

-- The kinds of bodies of statements: a block has variables of its own, a loop can be left
-- by `break`, a function cannot.
local BLOCK, LOOP, FUNCTION = "block", "loop", "function"

--- A body up to one of the words; also returns the word that ended it.
---@param kind? string  one of the three; nil: a branch, which has no variables of its own
local function body(s, words, kind)
  s:take ":" -- as in Python
  s:expect "%}"
  local outer = s.inside
  if kind and kind ~= BLOCK then s.inside = kind end
  local nodes = s:deeper(kind and s.within or M.nodes, kind and M.nodes or words, words)
  s.inside = outer
  if s:is "end" then
    s:fail("the template ends where %s was expected", table.concat(words, " or "))
  end
  return nodes, s:next().value
end

-- ---- targets --------------------------------------------------------------------------

local function set_all(s, node)
  if node.kind == "name" then return s:set(node.name) end
  for _, one in ipairs(node) do set_all(s, one) end
end

--- A name that is assigned to, or a tuple of targets in parentheses.
local function one_target(s)
  if s:take "(" then
    local node = s:deeper(expression.tuple, one_target, true)
    s:expect ")"
    return node
  end
  local node = s:node "name"
  node.name = s:expect("name").value
  return node
end

--- What a value is assigned to: a name, or a tuple of targets.
local function target(s) return expression.tuple(s, one_target) end

local function name(s) return s:expect("name").value end

-- ---- statements -----------------------------------------------------------------------

function STATEMENTS.set(s, node)
  if s:is "name" and s:token(1).kind == "." then
    node.namespace = name(s)
    s:next()
    node.attribute = name(s)
    s:read(node.namespace)
  else
    node.target = target(s)
  end
  if s:take "=" then
    node.value = expression.tuple(s, expression.any)
  else
    node.kind = "set_block"
    while s:take "|" do node.filter = expression.filter(s, node.filter) end
    node.body = body(s, { "endset" }, FUNCTION)
  end
  if node.target then set_all(s, node.target) end
  return node
end

STATEMENTS["for"] = function(s, node)
  node.target = target(s)
  s:expect("name", "in")
  node.of = expression.tuple(s, expression.plain)
  if s:take("name", "if") then node.test = s:within(expression.any) end
  if s:is_name "recursive" then
    s:fail "a loop that is recursive, which kvlab does not have"
  end
  local word
  node.body, word = body(s, { "endfor", "else" }, LOOP)
  if word == "else" then node.otherwise = body(s, { "endfor" }, BLOCK) end
  return node
end

STATEMENTS["if"] = function(s, node)
  local word = "elif"
  while word == "elif" do
    local branch = { condition = expression.tuple(s, expression.plain) }
    branch.body, word = body(s, { "elif", "else", "endif" })
    node[#node + 1] = branch
  end
  if word == "else" then node.otherwise = body(s, { "endif" }) end
  return node
end

--- The parameters in parentheses: { { name, default node } … }.
local function parameters(s)
  local list = {}
  s:expect "("
  while not s:is ")" do
    local one = { name(s) }
    if s:take "=" then one[2] = expression.any(s)
    elseif list[1] and list[#list][2] then
      s:fail "a parameter without a default after one with a default"
    end
    list[#list + 1] = one
    if not s:take "," then break end
  end
  s:expect ")"
  return list
end

--- Parses the body of a macro, and records which special names it reads.
local function macro_body(s, node, word)
  local outer = s.names
  s.names = {}
  node.body = body(s, { word }, FUNCTION)
  node.reads = s.names
  for read in pairs(s.names) do outer[read] = true end
  s.names = outer
  return node
end

function STATEMENTS.macro(s, node)
  node.name = name(s)
  s:set(node.name)
  node.parameters = s:within(parameters)
  return macro_body(s, node, "endmacro")
end

function STATEMENTS.call(s, node)
  node.parameters = s:is "(" and s:within(parameters) or {}
  node.call = expression.any(s)
  if node.call.kind ~= "call" then s:fail "a call of something that is no call" end
  node.name = "caller"
  return macro_body(s, node, "endcall")
end

function STATEMENTS.filter(s, node)
  node.kind, node.filter = "filter_block", expression.filter(s)
  while s:take "|" do node.filter = expression.filter(s, node.filter) end
  node.body = body(s, { "endfilter" }, FUNCTION)
  return node
end

function STATEMENTS.with(s, node)
  while not s:is "%}" do
    if node[1] then s:expect "," end
    local one = target(s)
    s:expect "="
    node[#node + 1] = { one, expression.any(s) }
  end
  node.body = body(s, { "endwith" }, BLOCK)
  return node
end

--- transformers' own: marks what an assistant says, for training.
function STATEMENTS.generation(s, node)
  node.body = body(s, { "endgeneration" }, FUNCTION)
  return node
end

STATEMENTS["break"] = function(s, node)
  if s.inside ~= LOOP then s:fail("a %s outside of a loop", node.kind) end
  return node
end
STATEMENTS.continue = STATEMENTS["break"]

-- ---- all of it ------------------------------------------------------------------------

local function statement(s)
  local node = s:node(s:is "name" and s:token().value or "")
  local parse = STATEMENTS[node.kind]
  if not parse then
    s:fail("the statement {%% %s %%}, which kvlab does not have",
      node.kind ~= "" and node.kind or "without a name")
  end
  s:next()
  return s:deeper(parse, node)
end

--- The nodes up to a {% with one of the words, which is then the next token; or to the
-- end.
function M.nodes(s, words)
  local nodes = {}
  while not s:is "end" do
    local token = s:next()
    if token.kind == "data" then
      nodes[#nodes + 1] = { kind = "data", line = token.line, value = token.value }
    elseif token.kind == "{{" then
      local node = s:node "output"
      node.value = expression.tuple(s, expression.any)
      s:expect "}}"
      nodes[#nodes + 1] = node
    else
      for _, word in ipairs(words or {}) do
        if s:is_name(word) then return nodes end
      end
      nodes[#nodes + 1] = statement(s)
      s:expect "%}"
    end
  end
  return nodes
end

--- Parses a template.
---@param source string
---@return table[] nodes
---@return kvlab.text.template.Stream  names and late: of the variables
function M.parse(source)
  local s = stream.new(source)
  return M.nodes(s), s
end

return M
