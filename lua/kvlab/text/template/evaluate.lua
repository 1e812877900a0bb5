--- Computes the expressions of a template, in a rendering: a table that has the scope of
-- its variables, the texts that it has written, and the line that it is at.
local attributes = require "kvlab.text.template.attributes"
local fail = require "kvlab.text.template.problem"
local filters = require "kvlab.text.template.filters"
local meter = require "kvlab.text.template.meter"
local operators = require "kvlab.text.template.operators"
local show = require "kvlab.text.template.show"
local tests = require "kvlab.text.template.tests"
local text = require "kvlab.text.template.text"
local value = require "kvlab.text.template.value"

local M = {}

---@class kvlab.text.template.Rendering
---@field scope table    vars, up: those of the blocks around it
---@field given table    name -> value: what the template is given
---@field globals table  … and the functions that every template has
---@field late table<string, boolean>  see kvlab.text.template.stream
---@field out table      the texts that were written
---@field line integer
---@field depth integer

local EVALUATE = {}

--- The value of a variable; undefined where there is none.
function M.read(self, name)
  local scope = self.scope
  while scope do
    local x = scope.vars[name]
    if x ~= nil then return x end
    scope = scope.up
  end
  local x = self.given[name]
  if x == nil then x = self.globals[name]
  elseif self.late[name] and self.scope.up then
    fail("reads %s in a block after which it is set, which kvlab does not do", name)
  end
  if x == nil then return value.undefined(("%s is not defined"):format(name)) end
  return x
end

--- The value of a node.
local function evaluate(self, node)
  meter.spend(1)
  self.line = node.line
  return EVALUATE[node.kind](self, node)
end
M.evaluate = evaluate

function EVALUATE.constant(_, node) return node.value end
EVALUATE["name"] = function(self, node) return M.read(self, node.name) end

local function all(self, nodes)
  local items = {}
  for i, node in ipairs(nodes) do items[i] = evaluate(self, node) end
  return items
end

function EVALUATE.list(self, node) return value.sequence(all(self, node)) end
function EVALUATE.tuple(self, node) return value.sequence(all(self, node), "tuple") end

function EVALUATE.dict(self, node)
  local dict = value.dict()
  for _, pair in ipairs(node) do
    local key = evaluate(self, pair[1])
    value.put(dict, key, evaluate(self, pair[2]))
  end
  return dict
end

function EVALUATE.attribute(self, node)
  return attributes.attribute(evaluate(self, node.of), node.name)
end

function EVALUATE.item(self, node)
  local x = evaluate(self, node.of)
  return attributes.item(x, evaluate(self, node.key))
end

function EVALUATE.slice(self, node)
  local x, parts = evaluate(self, node.of), {}
  for i, name in ipairs { "first", "last", "step" } do
    if node[name] then parts[i] = evaluate(self, node[name]) end
  end
  return attributes.slice(x, parts[1], parts[2], parts[3])
end

--- The values of arguments: a list, and those with names.
function M.arguments(self, nodes)
  local given, named = all(self, nodes), nil
  for _, pair in ipairs(nodes.named) do
    named = named or {}
    named[pair[1]] = evaluate(self, pair[2])
  end
  if nodes.rest then
    for _, x in ipairs(value.items_of(evaluate(self, nodes.rest))) do
      given[#given + 1] = x
    end
  end
  if nodes.rest_named then
    local dict = evaluate(self, nodes.rest_named)
    if not value.is_dict(dict) then fail "calls with ** of something that is no dict" end
    named = named or {}
    for _, key in ipairs(dict.order) do named[text.bytes(key)] = value.get(dict, key) end
  end
  return given, named
end

--- Calls a function of the template.
function M.call(self, fn, given, named)
  if value.kind(fn) ~= "function" then
    fail("%s", fn.why or ("calls a %s, which is no function"):format(value.kind(fn)))
  end
  local line = self.line
  local x = fn.call(given, named)
  self.line = line
  return x
end

function EVALUATE.call(self, node)
  local fn = evaluate(self, node.of)
  return M.call(self, fn, M.arguments(self, node.arguments))
end

function EVALUATE.filter(self, node)
  local x = evaluate(self, node.of)
  local given, named = M.arguments(self, node.arguments)
  self.line = node.line
  return filters.apply(node.name, x, given, named)
end

function EVALUATE.test(self, node)
  local x = evaluate(self, node.of)
  local given, named = M.arguments(self, node.arguments)
  return tests.passes(node.name, x, given, named)
end

function EVALUATE.sign(self, node)
  return operators.sign(evaluate(self, node.of), node.is_minus)
end

function EVALUATE.operator(self, node)
  local a = evaluate(self, node.a)
  local b = evaluate(self, node.b)
  self.line = node.line
  return operators.apply(node.operator, a, b)
end

function EVALUATE.concatenation(self, node)
  local parts = all(self, node)
  for i, x in ipairs(parts) do parts[i] = show.str(x) end
  return text.join(parts)
end

function EVALUATE.comparison(self, node)
  local a = evaluate(self, node[1])
  for i = 2, #node do
    local b = evaluate(self, node[i][2])
    if not operators.compare(node[i][1], a, b) then return false end
    a = b
  end
  return true
end

EVALUATE["not"] = function(self, node) return not value.truth(evaluate(self, node.of)) end

EVALUATE["and"] = function(self, node)
  local a = evaluate(self, node.a)
  if not value.truth(a) then return a end
  return evaluate(self, node.b)
end

EVALUATE["or"] = function(self, node)
  local a = evaluate(self, node.a)
  if value.truth(a) then return a end
  return evaluate(self, node.b)
end

function EVALUATE.conditional(self, node)
  if value.truth(evaluate(self, node.condition)) then return evaluate(self, node.a) end
  if node.b then return evaluate(self, node.b) end
  return value.undefined "an `a if b` without an else has no value"
end

return M
