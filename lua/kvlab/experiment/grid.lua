--- Lists the configurations of an experiment. They come from its axes and defaults, whose
-- values --quick and --set may replace.
--
--   grid = {
--     { "context", { 512, 1024 } },
--     { "policy", { "full", "quest", "hash" } },
--     -- an axis for some configurations only: the others have no bits
--     { "bits", { 32, 64 }, when = function(c) return c.policy == "hash" end },
--     -- zipped axes vary together: slots = 2 with block_size = 1024, then 4 with 512
--     { { "slots", "block_size" }, { { 2, 1024 }, { 4, 512 } } },
--   }
--
-- The last axis varies fastest. Errors are raised without a position: kvlab.experiment
-- adds the line of the script.
local hint = require("kvlab.words").hint
local number = require "kvlab.number"
local secrets = require "kvlab.secrets"
local sorted = require "kvlab.sorted"

local M = {}

local FORM = "{ {\"policy\", {\"quest\", \"random\"}}, {\"budget\", {0.05, 0.1}} }"

--- Names that a configuration or the settings already use. The text ends an error message
-- about the name.
local reserved = {
  seed = "use --seed=N", device = "use --device=NAME", isa = "use --isa=NAME",
  out = "use --out=DIR",
  quick = "use --quick", fresh = "--set fresh=true starts the results over",
  stale = "--set stale=keep keeps stale rows",
  configs = "it is the list of configurations",
  repeats = "it says how many seeds an experiment runs",
}

local function fail(fmt, ...) error(fmt:format(...), 0) end

local function show(value)
  return type(value) == "string" and ("%q"):format(value) or tostring(value)
end

local function check_scalar(value, what)
  local kind = type(value)
  if kind == "number" and not number.is_finite(value) then
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
    fail("%s %s is defined twice", what, name)
  end
end

--- Raises unless `values` is a list of at least one value, all of them different.
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

--- Returns the different values at one index of the tuples, in order.
local function distinct(tuples, place)
  local values, seen = {}, {}
  for _, tuple in ipairs(tuples) do
    local value = tuple[place]
    if value ~= nil and not seen[value] then
      values[#values + 1], seen[value] = value, true
    end
  end
  return values
end

--- Returns { {1}, {2} } for the values {1, 2} of a plain axis. Zipped axes have tuples
-- already.
local function as_tuples(values)
  local tuples = {}
  for i, value in ipairs(values) do tuples[i] = { value } end
  return tuples
end

local function check_tuples(names, tuples)
  local all = table.concat(names, ", ")
  if type(tuples) ~= "table" or #tuples == 0 then
    fail("axes %s have no values, expected a list of { %s }", all, all)
  end
  local seen = {}
  for i, tuple in ipairs(tuples) do
    if type(tuple) ~= "table" or #tuple ~= #names then
      fail("value %d of axes %s is %s, expected { %s }", i, all, type(tuple) == "table"
        and ("a list of %d"):format(#tuple) or show(tuple), all)
    end
    local words = {}
    for k, value in ipairs(tuple) do
      check_scalar(value, "a value of axis " .. names[k])
      words[k] = show(value)
    end
    local text = table.concat(words, ", ")
    if seen[text] then fail("axes %s have { %s } twice", all, text) end
    seen[text] = true
  end
end

---@class kvlab.axis
---@field name string
---@field values any[]     the different values, in order
---@field rank table       the loop over its values, one of kvlab.grid's ranks
---@field place integer    where the axis's value is in a tuple of the rank

---@class kvlab.grid
---@field axes kvlab.axis[]                      in their order
---@field axis_of table<string, kvlab.axis>      the same by name
---@field ranks {axes: kvlab.axis[], tuples: any[][], when: function|nil}[]  one per loop
---@field defaults table<string, any>
---@field names string[]                         axes, then defaults sorted

local function add_rank(grid, entry, position)
  if type(entry) ~= "table" then
    fail("grid[%d] is %s, expected {name, values} as in %s", position, show(entry), FORM)
  end
  for key in pairs(entry) do
    if key ~= 1 and key ~= 2 and key ~= "when" then
      fail("grid[%d] has %s, expected {name, values} or {name, values, when = function}",
        position, show(key))
    end
  end
  if entry.when ~= nil and type(entry.when) ~= "function" then
    fail("grid[%d]: when is %s, expected a function of the configuration", position,
      show(entry.when))
  end
  local is_zipped = type(entry[1]) == "table"
  local names = is_zipped and entry[1] or { entry[1] }
  if #names == 0 then check_name(nil, "an axis", grid.axis_of) end
  local rank = { axes = {}, when = entry.when }
  for place, name in ipairs(names) do
    check_name(name, "an axis", grid.axis_of)
    local axis = { name = name, rank = rank, place = place }
    rank.axes[place], grid.axis_of[name] = axis, axis
    grid.axes[#grid.axes + 1], grid.names[#grid.names + 1] = axis, name
  end
  if is_zipped then
    check_tuples(names, entry[2])
    rank.tuples = entry[2]
  else
    check_values(names[1], entry[2])
    rank.tuples = as_tuples(entry[2])
  end
  for place, axis in ipairs(rank.axes) do axis.values = distinct(rank.tuples, place) end
  grid.ranks[position] = rank
end

--- Makes a grid from the axes and defaults of a script.
---@param axes table     see the head of this file
---@param defaults? table<string, any>
---@return kvlab.grid
function M.new(axes, defaults)
  if type(axes) ~= "table" or (#axes == 0 and next(axes) ~= nil) then
    fail("grid is a %s without an order, expected a list of axes: %s", type(axes), FORM)
  end
  local grid = { axes = {}, axis_of = {}, ranks = {}, defaults = {}, names = {} }
  for i, entry in ipairs(axes) do add_rank(grid, entry, i) end
  for _, name in ipairs(sorted.keys(defaults or {})) do
    check_name(name, "a default", grid.axis_of)
    check_scalar(defaults[name], "default " .. name)
    grid.defaults[name] = defaults[name]
    grid.names[#grid.names + 1] = name
  end
  return grid
end

--- Returns the type of a list's values; nil if they have several types.
local function kind_of(values)
  local kind = type(values[1])
  for _, value in ipairs(values) do
    if type(value) ~= kind then return nil end
  end
  return kind
end

local function convert(value, kind, what)
  local result = value
  if kind == "number" and type(value) == "string" then
    result = number.of_text(value)
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
  for word in (text .. ","):gmatch "%s*([^,]-)%s*," do words[#words + 1] = word end
  return words
end

--- Gives an axis other values. Zipped axes keep the tuples that have one of `values`.
local function replace_values(axis, values, source)
  local rank = axis.rank
  if #rank.axes == 1 then
    rank.tuples = as_tuples(values)
  else
    local wanted, kept = {}, {}
    for _, value in ipairs(values) do wanted[value] = true end
    for _, tuple in ipairs(rank.tuples) do
      if wanted[tuple[axis.place]] then kept[#kept + 1] = tuple end
    end
    if #kept == 0 then
      local words = {}
      for i, value in ipairs(axis.values) do words[i] = tostring(value) end
      fail("%s %s: zipped axes take only values that they have: %s", source, axis.name,
        table.concat(words, ", "))
    end
    rank.tuples = kept
  end
  for place, other in ipairs(rank.axes) do other.values = distinct(rank.tuples, place) end
end

--- Replaces the values of an axis, or a default. For an axis, `value` is one value, a
-- list, or a text with commas between values. The new values must have the type of the
-- old ones.
---@param grid kvlab.grid
---@param key string
---@param value any
---@param source string  "--set" or "quick", for error messages
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
    replace_values(axis, converted, source)
  elseif default ~= nil then
    if type(default) == "number" and type(value) == "string" and value:find "," then
      fail("%s %s is %s: a list is for an axis, %s is a default", source, key, value, key)
    end
    grid.defaults[key] = convert(value, type(default), ("%s %s"):format(source, key))
  elseif reserved[key] then
    fail("%s %s: %s", source, key, reserved[key])
  else
    if not grid.names[1] then fail("%s %s: there is nothing to set", source, key) end
    local names = { unpack(grid.names) }
    names[#names + 1] = grid.takes_repeats and "repeats" or nil
    fail("%s: nothing is called %s%s There is %s", source, key,
      hint(key, names):gsub("^$", "."), table.concat(names, ", "))
  end
end

--- Lists all configurations in order. Each is one flat table with a value of every axis,
-- the defaults and `fixed`.
---@param grid kvlab.grid
---@param fixed table<string, any>  the same in every configuration: device and seed
---@param when? fun(config: table): boolean  whether to keep a configuration
---@return table[]
function M.configurations(grid, fixed, when)
  local list, chosen = {}, {}
  local function merged()
    local config = {}
    for _, source in ipairs { grid.defaults, fixed, chosen } do
      for key, value in pairs(source) do config[key] = value end
    end
    return config
  end
  local function visit(depth)
    local rank = grid.ranks[depth]
    if not rank then
      local config = merged()
      if not when or when(config) then list[#list + 1] = config end
    elseif rank.when and not rank.when(merged()) then
      visit(depth + 1)
    else
      for _, tuple in ipairs(rank.tuples) do
        for place, axis in ipairs(rank.axes) do chosen[axis.name] = tuple[place] end
        visit(depth + 1)
      end
      for _, axis in ipairs(rank.axes) do chosen[axis.name] = nil end
    end
  end
  visit(1)
  return list
end

--- Whether the axes in `placed` tell the values of an axis apart. They do if the axis is
-- one of them, or is zipped with one of them that has a different value in every tuple.
---@param axis kvlab.axis
---@param placed table<string, boolean>
---@return boolean
function M.is_told(axis, placed)
  for _, other in ipairs(axis.rank.axes) do
    local is_key = other == axis or #other.values == #axis.rank.tuples
    if placed[other.name] and is_key then return true end
  end
  return false
end

--- Returns a configuration's values on the axes: "context=512 policy=quest budget=0.1".
---@param grid kvlab.grid
---@param config table
---@return string
function M.describe(grid, config)
  local words = {}
  for _, axis in ipairs(grid.axes) do
    if config[axis.name] ~= nil then
      words[#words + 1] = ("%s=%s"):format(axis.name, tostring(config[axis.name]))
    end
  end
  return secrets.mask(table.concat(words, " "))
end

return M
