--- The configurations of an experiment: axes in the order they are written, defaults, and
-- what --quick and --set put in their place.
--
--   grid = { {"context", {512, 1024}}, {"policy", {"quest", "random"}} }
--
-- The last axis varies fastest. Messages are raised without a position: kvlab.experiment
-- adds the line of the script.
local nearest = require "kvlab.nearest"

local M = {}

local FORM = "{ {\"policy\", {\"quest\", \"random\"}}, {\"budget\", {0.05, 0.1}} }"

--- Names that a configuration or the settings already use, and where their value is from.
local reserved = {
  seed = "use --seed=N", device = "use --device=NAME", out = "use --out=DIR",
  quick = "use --quick", fresh = "it starts the results afresh",
  configs = "it is the list of configurations",
}

local function fail(fmt, ...) error(fmt:format(...), 0) end

local function show(value)
  return type(value) == "string" and ("%q"):format(value) or tostring(value)
end

local function check_scalar(value, what)
  local kind = type(value)
  if kind == "number" and (value ~= value or math.abs(value) == math.huge) then
    fail("%s is %s, expected a finite number", what, tostring(value))
  elseif kind ~= "number" and kind ~= "string" and kind ~= "boolean" then
    fail("%s is a %s, expected a number, a string or a boolean", what, kind)
  end
end

local function check_name(name, what, taken)
  if type(name) ~= "string" or not name:match "^[%a_][%w_]*$" then
    fail("%s is named %s, expected a name of letters, digits and _", what, show(name))
  elseif reserved[name] then
    fail("%s cannot be named %s: %s", what, name, reserved[name])
  elseif taken[name] then
    fail("%s %s is there twice", what, name)
  end
end

local function check_values(name, values)
  if type(values) ~= "table" or #values == 0 then
    fail("axis %s is %s, expected a list of at least one value", name,
      type(values) == "table" and "an empty list" or show(values))
  end
  local seen = {}
  for _, value in ipairs(values) do
    check_scalar(value, "a value of axis " .. name)
    if seen[value] then fail("axis %s has %s twice", name, show(value)) end
    seen[value] = true
  end
end

---@class kvlab.grid
---@field axes {name: string, values: any[]}[]  in their order
---@field axis_of table<string, table>           the same by name
---@field defaults table<string, any>
---@field names string[]                         axes, then defaults sorted

--- A grid from what the script wrote.
---@param axes table     list of {name, values}
---@param defaults? table<string, any>
---@return kvlab.grid
function M.new(axes, defaults)
  if type(axes) ~= "table" or (#axes == 0 and next(axes) ~= nil) then
    fail("grid is a %s without an order, expected a list of axes: %s", type(axes), FORM)
  end
  local grid = { axes = {}, axis_of = {}, defaults = {}, names = {} }
  for i, entry in ipairs(axes) do
    if type(entry) ~= "table" then
      fail("grid[%d] is %s, expected {name, values} as in %s", i, show(entry), FORM)
    end
    local name, values = entry[1], entry[2]
    check_name(name, "an axis", grid.axis_of)
    check_values(name, values)
    local axis = { name = name, values = { unpack(values) } }
    grid.axes[i], grid.axis_of[name], grid.names[i] = axis, axis, name
  end
  local sorted = {}
  for name, value in pairs(defaults or {}) do
    check_name(name, "a default", grid.axis_of)
    check_scalar(value, "default " .. name)
    grid.defaults[name] = value
    sorted[#sorted + 1] = name
  end
  table.sort(sorted)
  for _, name in ipairs(sorted) do grid.names[#grid.names + 1] = name end
  return grid
end

--- The one type of a list's values; nil when they are mixed.
local function kind_of(values)
  local kind = type(values[1])
  for _, value in ipairs(values) do
    if type(value) ~= kind then return nil end
  end
  return kind
end

local function convert(value, kind, what)
  local result = value
  if kind == "number" and type(value) == "string" then result = tonumber(value)
  elseif kind == "string" then result = type(value) ~= "table" and tostring(value) or nil
  elseif kind == "boolean" and type(value) == "string" then
    result = ({ ["true"] = true, ["false"] = false })[value]
  end
  if result == nil or (kind and type(result) ~= kind) then
    fail("%s is %s, expected a %s", what, show(value), kind)
  end
  check_scalar(result, what)
  return result
end

local function split(text)
  local words = {}
  for word in (text .. ","):gmatch "([^,]*)," do words[#words + 1] = word end
  return words
end

--- Puts a value in the place of an axis's values or of a default. An axis takes one
-- value, a list, or a text with commas between values, each of the type that was there.
---@param grid kvlab.grid
---@param key string
---@param value any
---@param source string  "--set" or "quick", for messages
function M.override(grid, key, value, source)
  local axis, default = grid.axis_of[key], grid.defaults[key]
  if axis then
    local kind, values = kind_of(axis.values), value
    if type(value) == "string" then values = split(value) end
    if type(values) ~= "table" then values = { values } end
    local converted = {}
    for i, item in ipairs(values) do
      converted[i] = convert(item, kind, ("%s %s"):format(source, key))
    end
    check_values(key, converted)
    axis.values = converted
  elseif default ~= nil then
    if type(default) == "number" and type(value) == "string" and value:find "," then
      fail("%s %s is %s: a list is for an axis, %s is a default", source, key, value, key)
    end
    grid.defaults[key] = convert(value, type(default), ("%s %s"):format(source, key))
  elseif reserved[key] then
    fail("%s %s: %s", source, key, reserved[key])
  else
    local near = nearest.find(key, grid.names)
    if not near then fail("%s %s: there is nothing to set", source, key) end
    fail("%s: nothing is called %s; did you mean %s? There is %s", source, key, near,
      table.concat(grid.names, ", "))
  end
end

--- Every configuration in order: axes, defaults and `fixed` in one flat table each.
---@param grid kvlab.grid
---@param fixed table<string, any>  what every configuration has: device and seed
---@param when? fun(config: table): boolean  keeps a configuration
---@return table[]
function M.configurations(grid, fixed, when)
  local list, chosen = {}, {}
  local function visit(depth)
    local axis = grid.axes[depth]
    if axis then
      for _, value in ipairs(axis.values) do
        chosen[axis.name] = value
        visit(depth + 1)
      end
      return
    end
    local config = {}
    for _, source in ipairs { grid.defaults, fixed, chosen } do
      for key, value in pairs(source) do config[key] = value end
    end
    if not when or when(config) then list[#list + 1] = config end
  end
  visit(1)
  return list
end

--- "context=512 policy=quest budget=0.1": a configuration's place on the axes.
---@param grid kvlab.grid
---@param config table
---@return string
function M.describe(grid, config)
  local words = {}
  for i, axis in ipairs(grid.axes) do
    words[i] = ("%s=%s"):format(axis.name, tostring(config[axis.name]))
  end
  return table.concat(words, " ")
end

return M
