--- Filters of lists and dicts. Those that Python computes step by step give generators,
-- which can be gone through once.
local arguments = require "kvlab.text.template.arguments"
local case = require "kvlab.text.case"
local fail = require "kvlab.text.template.problem"
local meter = require "kvlab.text.template.meter"
local operators = require "kvlab.text.template.operators"
local show = require "kvlab.text.template.show"
local tests = require "kvlab.text.template.tests"
local text = require "kvlab.text.template.text"
local value = require "kvlab.text.template.value"

local M = {}

M.FILTERS = {}

local function filter(names, least, parameters, call)
  parameters.least, parameters.call = least, call
  for name in names:gmatch "%S+" do M.FILTERS[name] = parameters end
end

local function generator(items) return value.sequence(items, "generator") end

--- The items of a value as a new list of Lua.
local function items_of(x)
  local out = {}
  for i, item in ipairs(value.items_of(x)) do out[i] = item end
  meter.spend(#out)
  return out
end

-- ---- all items ------------------------------------------------------------------------

filter("list", 0, {}, function(x) return value.sequence(items_of(x)) end)

filter("length count", 0, {}, function(x)
  return value.count(x) or fail("takes the length of a %s", value.kind(x))
end)

filter("first", 0, {}, function(x)
  if value.kind(x) == "generator" then
    local item = table.remove(x.items, 1)
    return item == nil and value.undefined "the first item of nothing" or item
  end
  local item = value.items_of(x)[1]
  return item == nil and value.undefined "the first item of nothing" or item
end)

filter("last", 0, {}, function(x)
  if value.kind(x) == "generator" then fail "takes the last item of a generator" end
  local items = value.items_of(x)
  local item = items[#items]
  return item == nil and value.undefined "the last item of nothing" or item
end)

filter("reverse", 0, {}, function(x)
  local items, out = items_of(text.is(x) and arguments.shown(x) or x), {}
  for i = #items, 1, -1 do out[#out + 1] = items[i] end
  return text.is(x) and text.join(out) or generator(out)
end)

filter("items", 0, {}, function(x)
  if value.is_undefined(x) then return generator {} end
  if not value.is_dict(x) then
    fail("takes the items of a %s", value.kind(x))
  end
  return generator(value.items(x))
end)

filter("join", 0, { "d", "attribute" }, function(x, between, attribute)
  local items = items_of(x)
  local get = attribute ~= nil and attribute ~= value.NONE and tests.getter(attribute)
  for i, item in ipairs(items) do
    if get then item = get(item) end
    items[i] = show.str(item)
  end
  return text.join(items, show.str(between == nil and "" or between))
end)

filter("batch", 1, { "linecount", "fill_with" }, function(x, size, fill)
  local out, one = {}, {}
  size = arguments.whole("batch", size)
  for _, item in ipairs(items_of(x)) do
    if #one == size then out[#out + 1], one = value.sequence(one), {} end
    one[#one + 1] = item
  end
  if #one > 0 then
    for _ = #one + 1, fill ~= nil and fill ~= value.NONE and size or 0 do
      one[#one + 1] = fill
      meter.spend(1)
    end
    out[#out + 1] = value.sequence(one)
  end
  return generator(out)
end)

-- ---- some items -----------------------------------------------------------------------

--- select and reject take a test; selectattr and rejectattr an attribute before it.
local function chooser(name, has_attribute, wanted)
  M.FILTERS[name] = { any = true, call = function(x, given, named)
    if not value.truth(x) then return generator {} end -- None, too
    if next(named or {}) then fail("calls %s with named arguments", name) end
    local rest = { unpack(given) }
    local attribute = has_attribute and table.remove(rest, 1)
    if attribute == nil then fail("calls %s without an attribute", name) end
    local test = table.remove(rest, 1)
    local get, out = attribute and tests.getter(attribute), {}
    for _, item in ipairs(items_of(x)) do
      local one, passes = item
      if get then one = get(item) end
      if test == nil then passes = value.truth(one)
      else passes = tests.passes(text.bytes(arguments.text(name, test)), one, rest)
      end
      if passes == wanted then out[#out + 1] = item end
    end
    return generator(out)
  end }
end

chooser("select", false, true)
chooser("reject", false, false)
chooser("selectattr", true, true)
chooser("rejectattr", true, false)

M.FILTERS.map = { any = true, call = function(x, given, named, apply)
  if not value.truth(x) then return generator {} end
  named = named or {}
  local out, rest = {}, { unpack(given, 2) }
  local get = named.attribute and #given == 0 and tests.getter(named.attribute)
  local name = not get and text.bytes(arguments.text("the filter map", given[1]))
  for i, item in ipairs(items_of(x)) do
    if get then
      out[i] = get(item)
      if named.default ~= nil and value.is_undefined(out[i]) then
        out[i] = named.default
      end
    else
      out[i] = apply(name, item, rest, named)
    end
  end
  return generator(out)
end }

-- ---- in order -------------------------------------------------------------------------

local function folded(x, is_sensitive)
  if is_sensitive or not text.is(x) then return x end
  return text.computed(case.lower(text.bytes(x)), x)
end

--- Puts items in the order of key(item); equal ones stay as they were.
local function sorted(items, key, is_reversed)
  local keyed = {}
  for i, item in ipairs(items) do keyed[i] = { item, key(item), i } end
  meter.spend(#items * 16)
  table.sort(keyed, function(a, b)
    if a[3] == b[3] then return false end
    local x, y = a[2], b[2]
    if is_reversed then x, y = y, x end
    if value.less(x, y) then return true end
    if value.less(y, x) then return false end
    return a[3] < b[3]
  end)
  local out = {}
  for i, one in ipairs(keyed) do out[i] = one[1] end
  return value.sequence(out)
end

--- The key of an item by one attribute, several with commas between, or none.
local function key_by(attribute, is_sensitive)
  if attribute == nil or attribute == value.NONE then
    return function(x) return folded(x, is_sensitive) end
  end
  local getters = {}
  if text.is(attribute) then
    for path in (text.bytes(attribute) .. ","):gmatch "([^,]*)," do
      getters[#getters + 1] = tests.getter(path)
    end
  else
    getters[1] = tests.getter(attribute)
  end
  return function(x)
    local keys = {}
    for i, get in ipairs(getters) do keys[i] = folded(get(x), is_sensitive) end
    return value.sequence(keys)
  end
end

filter("sort", 0, { "reverse", "case_sensitive", "attribute" },
  function(x, is_reversed, is_sensitive, attribute)
  return sorted(value.items_of(x), key_by(attribute, arguments.flag(is_sensitive)),
    arguments.flag(is_reversed))
end)

filter("dictsort", 0, { "case_sensitive", "by", "reverse" },
  function(x, is_sensitive, by, is_reversed)
  by = text.bytes(arguments.text("dictsort", by, "key"))
  if not value.is_dict(x) or by ~= "key" and by ~= "value" then
    fail("sorts a %s as a dict, by %s", value.kind(x), by)
  end
  local pairs_of = {}
  for i, key in ipairs(x.order) do -- whose order does not matter here
    pairs_of[i] = value.sequence({ key, value.get(x, key) }, "tuple")
  end
  local which = by == "key" and 1 or 2
  return sorted(pairs_of, function(pair)
    return folded(pair.items[which], arguments.flag(is_sensitive))
  end, arguments.flag(is_reversed))
end)

filter("unique", 0, { "case_sensitive", "attribute" },
  function(x, is_sensitive, attribute)
  local key, seen, out = key_by(attribute, arguments.flag(is_sensitive)), {}, {}
  for _, item in ipairs(items_of(x)) do
    local one, is_new = key(item), true
    value.check_key(one)
    meter.spend(#seen)
    for _, other in ipairs(seen) do is_new = is_new and not value.equal(one, other) end
    if is_new then seen[#seen + 1], out[#out + 1] = one, item end
  end
  return generator(out)
end)

local function extreme(name, is_better)
  filter(name, 0, { "case_sensitive", "attribute" }, function(x, is_sensitive, attribute)
    local key, best, best_key = key_by(attribute, arguments.flag(is_sensitive)), nil, nil
    for _, item in ipairs(items_of(x)) do
      local one = key(item)
      if best == nil or is_better(one, best_key) then best, best_key = item, one end
    end
    return best == nil and value.undefined "the least or greatest of nothing" or best
  end)
end

extreme("min", value.less)
extreme("max", function(a, b) return value.less(b, a) end)

filter("sum", 0, { "attribute", "start" }, function(x, attribute, start)
  local total = start == nil and 0 or start
  local get = attribute ~= nil and attribute ~= value.NONE and tests.getter(attribute)
  for _, item in ipairs(items_of(x)) do
    if get then item = get(item) end
    total = operators.apply("+", total, item)
  end
  return total
end)

return M
