--- Runs the statements of a template.
local evaluator = require "kvlab.text.template.evaluate"
local fail = require "kvlab.text.template.problem"
local filters = require "kvlab.text.template.filters"
local meter = require "kvlab.text.template.meter"
local show = require "kvlab.text.template.show"
local text = require "kvlab.text.template.text"
local value = require "kvlab.text.template.value"

local M = {}

local arguments_of, evaluate = evaluator.arguments, evaluator.evaluate
local read = evaluator.read

local EXECUTE = {}

--- Assigns a value to a name, or its items to a tuple of targets.
local function assign(self, target, x)
  if target.kind == "name" then
    self.scope.vars[target.name] = x
    return
  end
  local items = value.items_of(x)
  if #items ~= #target then
    fail("assigns %d values to %d names", #items, #target)
  end
  for i, one in ipairs(target) do assign(self, one, items[i]) end
end

--- Executes nodes in a scope of their own, inside of `up`. Returns what they write as one
-- text; if they write to the rendering's text itself (`is_open`), returns what ends the
-- loop.
local function within(self, up, vars, nodes, is_open)
  local scope, out = self.scope, self.out
  self.scope, self.out = { vars = vars, up = up }, is_open and out or {}
  self.depth = self.depth + 1
  if self.depth > meter.DEPTH then fail "is nested too deeply, or calls itself" end
  local signal = M.execute(self, nodes)
  local result = is_open and signal or not is_open and text.join(self.out)
  self.depth = self.depth - 1
  self.scope, self.out = scope, out
  return result
end

-- ---- statements -----------------------------------------------------------------------

local function write(self, x) self.out[#self.out + 1] = x end

function EXECUTE.data(self, node) write(self, node.value) end

function EXECUTE.output(self, node)
  local x = evaluate(self, node.value)
  self.line = node.line
  write(self, show.str(x))
end

EXECUTE["if"] = function(self, node)
  for _, branch in ipairs(node) do
    if value.truth(evaluate(self, branch.condition)) then
      return M.execute(self, branch.body)
    end
  end
  return M.execute(self, node.otherwise or {})
end

local function set_attribute(self, node, x)
  local namespace = read(self, node.namespace)
  if value.kind(namespace) ~= "Namespace" then
    fail("sets an attribute of %s, which is no namespace", node.namespace)
  elseif node.attribute:find "^_" then
    fail "sets an attribute that begins with _"
  end
  value.put(namespace.dict, node.attribute, x)
end

function EXECUTE.set(self, node)
  local x = evaluate(self, node.value)
  if not node.namespace then return assign(self, node.target, x) end
  set_attribute(self, node, x)
end

--- The text after these filters; nil: no filters.
local function filtered(self, node, x)
  if not node then return x end
  x = filtered(self, node.of, x)
  local given, named = arguments_of(self, node.arguments)
  return filters.apply(node.name, x, given, named)
end

function EXECUTE.set_block(self, node)
  local x = filtered(self, node.filter, within(self, self.scope, {}, node.body))
  if not node.namespace then return assign(self, node.target, x) end
  set_attribute(self, node, x)
end

function EXECUTE.filter_block(self, node)
  local x = within(self, self.scope, {}, node.body)
  write(self, show.str(filtered(self, node.filter, x)))
end

function EXECUTE.with(self, node)
  local vars, scope = {}, self.scope
  local values = {}
  for i, pair in ipairs(node) do values[i] = evaluate(self, pair[2]) end
  self.scope = { vars = vars, up = scope }
  for i, pair in ipairs(node) do assign(self, pair[1], values[i]) end
  self.scope = scope
  return within(self, scope, vars, node.body, true)
end

function EXECUTE.generation(self, node)
  write(self, within(self, self.scope, {}, node.body))
end

EXECUTE["break"] = function() return "break" end
EXECUTE.continue = function() return "continue" end

-- ---- loops ----------------------------------------------------------------------------

--- The variable `loop`. at.i: the number of the present item.
local function loop_of(items, at, depth)
  local ATTRIBUTES = {
    index = function() return at.i end, index0 = function() return at.i - 1 end,
    revindex = function() return #items - at.i + 1 end,
    revindex0 = function() return #items - at.i end,
    first = function() return at.i == 1 end, last = function() return at.i == #items end,
    length = function() return #items end, depth = function() return depth end,
    depth0 = function() return depth - 1 end,
    previtem = function() return items[at.i - 1] end,
    nextitem = function() return items[at.i + 1] end,
    cycle = function()
      return value.fn("cycle", function(given)
        if #given == 0 then fail "cycles through nothing" end
        return given[(at.i - 1) % #given + 1]
      end)
    end,
    changed = function()
      return value.fn("changed", function(given)
        local last = at.changed
        at.changed = value.sequence(given, "tuple")
        return not last or not value.equal(last, at.changed)
      end)
    end,
  }
  return value.object(function(name)
    local read_one = ATTRIBUTES[name]
    if read_one then return read_one() end
  end)
end

--- The value that is assigned to a target; a tuple if the target is one.
local function unpacked(target, x)
  if target.kind == "name" then return x end
  local items, out = value.items_of(x), {}
  for i, one in ipairs(target) do out[i] = unpacked(one, items[i]) end
  return value.sequence(out, "tuple")
end

--- The items of a loop that pass its test.
local function chosen(self, node, items)
  if not node.test then return items end
  local out, scope = {}, self.scope
  for _, item in ipairs(items) do
    self.scope = { vars = {}, up = scope }
    assign(self, node.target, item)
    if value.truth(evaluate(self, node.test)) then
      out[#out + 1] = unpacked(node.target, item)
    end
  end
  self.scope = scope
  return out
end

EXECUTE["for"] = function(self, node)
  local items = chosen(self, node, value.items_of(evaluate(self, node.of)))
  local scope, at = self.scope, { i = 0 }
  local loop = loop_of(items, at, 1)
  for i, item in ipairs(items) do
    meter.rest()
    at.i = i
    local vars = { loop = loop }
    self.scope = { vars = vars, up = scope }
    assign(self, node.target, item)
    self.scope = scope
    if within(self, scope, vars, node.body, true) == "break" then break end
  end
  if #items == 0 and node.otherwise then
    return within(self, scope, {}, node.otherwise, true)
  end
end

-- ---- macros ---------------------------------------------------------------------------

--- The variables of a call of a macro, without those that its defaults give.
local function bound(node, given, named)
  local vars, rest = {}, {}
  for name, x in pairs(named or {}) do rest[name] = x end
  for i, parameter in ipairs(node.parameters) do
    local name = parameter[1]
    if given[i] ~= nil and rest[name] ~= nil then
      fail("calls the macro %s with %s twice", node.name, name)
    end
    if given[i] ~= nil then vars[name] = given[i] else vars[name] = rest[name] end
    rest[name] = nil
  end
  if node.reads.caller then
    vars.caller = rest.caller or vars.caller or value.undefined "there is no caller"
    rest.caller = nil
  end
  if node.reads.varargs then
    vars.varargs = value.sequence({ unpack(given, #node.parameters + 1) }, "tuple")
  elseif #given > #node.parameters then
    fail("calls the macro %s with %d arguments, expected %d or fewer", node.name, #given,
      #node.parameters)
  end
  if node.reads.kwargs then
    fail("has the macro %s with kwargs, which kvlab does not have", node.name)
  elseif next(rest) then
    fail("calls the macro %s with %s, which it does not know", node.name, next(rest))
  end
  return vars
end

--- The function of a macro. It sees the variables of the scope in which the macro is
-- defined.
local function macro_of(self, node)
  local up = self.scope
  return value.fn(node.name, function(given, named)
    local vars, scope = bound(node, given, named), self.scope
    self.scope = { vars = vars, up = up }
    for _, parameter in ipairs(node.parameters) do
      local name, default = parameter[1], parameter[2]
      if vars[name] == nil then
        vars[name] = default and evaluate(self, default)
          or not default and value.undefined(("%s is not given"):format(name))
      end
    end
    self.scope = scope
    return within(self, up, vars, node.body)
  end)
end

function EXECUTE.macro(self, node) self.scope.vars[node.name] = macro_of(self, node) end

function EXECUTE.call(self, node)
  local fn = evaluate(self, node.call.of)
  local given, named = arguments_of(self, node.call.arguments)
  named = named or {}
  named.caller = macro_of(self, node)
  write(self, show.str(evaluator.call(self, fn, given, named)))
end

-- ---- all of it ------------------------------------------------------------------------

--- Executes nodes one after the other. Returns "break" or "continue" if one of them ends
-- an iteration of a loop.
function M.execute(self, nodes)
  for _, node in ipairs(nodes) do
    meter.spend(1)
    self.line = node.line
    local signal = EXECUTE[node.kind](self, node)
    if signal then return signal end
  end
end

--- What a template writes.
---@param nodes table[]     of kvlab.text.template.parser
---@param rendering kvlab.text.template.Rendering
---@return any text  of kvlab.text.template.text
function M.render(nodes, rendering)
  M.execute(rendering, nodes)
  return text.join(rendering.out)
end

return M
