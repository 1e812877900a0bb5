--- The tests of Jinja: what may stand after `is`.
local arguments = require "kvlab.text.template.arguments"
local attributes = require "kvlab.text.template.attributes"
local fail = require "kvlab.text.template.problem"
local operators = require "kvlab.text.template.operators"
local show = require "kvlab.text.template.show"
local strings = require "kvlab.text.template.strings"
local text = require "kvlab.text.template.text"
local value = require "kvlab.text.template.value"

local M = {}

--- Each test: least, the names of its parameters, and call(x, …).
M.TESTS = {}

local function test(name, call, ...)
  M.TESTS[name] = { least = select("#", ...), call = call, ... }
end

local function rest(x, by, what)
  local remainder = operators.apply("%", x, by)
  return value.number(remainder) or fail("is no number to be %s", what)
end

test("defined", function(x) return not value.is_undefined(x) end)
test("undefined", value.is_undefined)
test("none", function(x) return x == value.NONE end)
test("boolean", function(x) return type(x) == "boolean" end)
test("true", function(x) return x == true end)
test("false", function(x) return x == false end)
test("string", text.is)
test("mapping", value.is_dict)
test("number", function(x) return value.number(x) ~= nil end)
test("integer", function(x) return value.kind(x) == "int" end)
test("float", function(x) return value.kind(x) == "float" end)
test("callable", function(x)
  return value.kind(x) == "function" or value.is_undefined(x) or value.is_object(x)
end)
test("odd", function(x) return rest(x, 2, "odd") == 1 end)
test("even", function(x) return rest(x, 2, "even") == 0 end)
test("divisibleby", function(x, by) return rest(x, by, "divisible") == 0 end, "num")
test("in", function(x, container) return value.contains(container, x) end, "seq")
test("escaped", text.is_markup)

test("iterable", function(x)
  return text.is(x) or value.is_sequence(x) or value.is_dict(x) or value.is_undefined(x)
    or value.is_object(x)
end)

local VIEWS = { generator = true, dict_keys = true, dict_values = true,
                dict_items = true }

test("sequence", function(x)
  return value.count(x) ~= nil and not VIEWS[value.kind(x)]
end)

for name, method in pairs { upper = "isupper", lower = "islower" } do
  test(name, function(x) return strings.METHODS[method].call(show.str(x)) end)
end

test("sameas", function(x, other)
  local kind = value.kind(x)
  if kind == "bool" or kind == "NoneType" or kind ~= value.kind(other) then
    return x == other
  end
  return fail("asks whether a %s is the same object as another", kind)
end, "other")

for operator, names in pairs {
  ["=="] = { "eq", "equalto", "==" }, ["!="] = { "ne", "!=" },
  ["<"] = { "lt", "lessthan", "<" }, ["<="] = { "le", "<=" },
  [">"] = { "gt", "greaterthan", ">" }, [">="] = { "ge", ">=" } } do
  for _, name in ipairs(names) do
    test(name, function(x, other)
      return operators.compare(operator, x, other)
    end, "other")
  end
end

--- Whether a value passes a test.
---@param name string
---@param x any
---@param given any[]
---@param named? table<string, any>
---@return boolean
function M.passes(name, x, given, named)
  local spec = M.TESTS[name]
  if not spec then fail("has the test %q, which kvlab does not have", name) end
  local bound = arguments.bind("the test " .. name, spec, given, named)
  return spec.call(x, unpack(bound, 1, #spec))
end

--- A function that reads an attribute such as "function.name" of a value.
---@param path any  a string or an int
function M.getter(path)
  if not text.is(path) then
    return function(x) return attributes.item(x, path) end
  end
  local keys = {}
  for key in (text.bytes(path) .. "."):gmatch "([^.]*)%." do
    keys[#keys + 1] = key:find "^%d+$" and tonumber(key) or key
  end
  return function(x)
    for _, key in ipairs(keys) do x = attributes.item(x, key) end
    return x
  end
end

return M
