--- Attributes and subscripts (after a dot, or in [ ]): items of lists and dicts,
-- characters, slices, and the methods of Python's values. In a template, no method may
-- change its object, so methods that would do so are missing.
local arguments = require "kvlab.text.template.arguments"
local fail = require "kvlab.text.template.problem"
local meter = require "kvlab.text.template.meter"
local strings = require "kvlab.text.template.strings"
local text = require "kvlab.text.template.text"
local value = require "kvlab.text.template.value"

local M = {}

local HERE = arguments.POSITION

-- ---- methods of lists and dicts -------------------------------------------------------

local function count(self, x)
  local n = 0
  for _, item in ipairs(self.items) do n = n + (value.equal(item, x) and 1 or 0) end
  return n
end

local function index(self, x)
  for i, item in ipairs(self.items) do if value.equal(item, x) then return i - 1 end end
  fail "looks for an item that is not there"
end

local LIST = {
  count = { HERE, least = 1, call = count }, index = { HERE, least = 1, call = index },
  copy = { call = function(self) return value.sequence(self.items) end },
}

local DICT = {
  get = { HERE, HERE, least = 1, call = function(self, key, default)
    local x = value.get(self, key)
    if x ~= nil then return x end
    return default == nil and value.NONE or default
  end },
  keys = { call = function(self)
    return value.sequence(value.keys(self), "dict_keys")
  end },
  values = { call = function(self)
    local items = {}
    for i, key in ipairs(value.keys(self)) do items[i] = value.get(self, key) end
    return value.sequence(items, "dict_values")
  end },
  items = { call = function(self)
    return value.sequence(value.items(self), "dict_items")
  end },
  copy = { call = function(self) return self end }, -- nothing can change either
}

local METHODS = { str = strings.METHODS, list = LIST, dict = DICT,
                  tuple = { count = LIST.count, index = LIST.index },
                  range = { count = LIST.count, index = LIST.index } }

-- Methods that change a value, which a template may not call.
local CHANGES = {
  list = { append = true, clear = true, extend = true, insert = true, pop = true,
           remove = true, reverse = true, sort = true },
  dict = { clear = true, pop = true, popitem = true, setdefault = true, update = true },
}

local function words(list)
  local set = {}
  for word in list:gmatch "%S+" do set[word] = true end
  return set
end

-- Attributes that Python has and kvlab has not.
local MISSING = {
  str = words [[casefold encode expandtabs format_map isprintable istitle maketrans
    translate]],
  dict = words "fromkeys",
  int = words [[as_integer_ratio bit_count bit_length conjugate denominator from_bytes
    imag is_integer numerator real to_bytes]],
  float = words "as_integer_ratio conjugate fromhex hex imag is_integer real",
  ["function"] = words "name arguments caller catch_kwargs catch_varargs explicit_caller",
  range = words "start step stop",
  dict_keys = words "isdisjoint mapping", dict_items = words "isdisjoint mapping",
  dict_values = words "mapping", generator = words "close send throw",
}
MISSING.bool = MISSING.int

--- The attribute that Python finds on a value; nil if there is none.
local function attribute_or_nil(self, name)
  local kind = value.kind(self)
  local method = METHODS[kind] and METHODS[kind][name]
  if method then
    return value.fn(name, function(given, named)
      if method.any then return method.call(self, given, named) end
      if kind == "str" then text.unmarked(self) end
      local bound = arguments.bind(name, method, given, named)
      return method.call(self, unpack(bound, 1, #method))
    end)
  elseif CHANGES[kind] and CHANGES[kind][name] then
    return value.undefined(("changes a %s by %s, which no template may do"):format(kind,
      name))
  elseif MISSING[kind] and MISSING[kind][name] or name:find "^__" then
    fail("reads the attribute %s of a %s, which kvlab does not have", name, kind)
  elseif kind == "Namespace" then
    return value.get(self.dict, name)
  elseif value.is_object(self) then
    return self.attribute(name)
  end
end

local function no_attribute(self, name)
  return value.undefined(("a %s has no %s"):format(value.kind(self), name))
end

local function checked(self)
  if value.is_undefined(self) then fail("%s", self.why) end
end

--- self.name
function M.attribute(self, name)
  checked(self)
  local x = attribute_or_nil(self, name)
  if x == nil and value.is_dict(self) then x = value.get(self, name) end
  return x == nil and no_attribute(self, name) or x
end

-- ---- items ----------------------------------------------------------------------------

local INDEXED = { list = true, tuple = true, range = true }

--- self[key]; nil if there is none.
local function item_or_nil(self, key)
  if value.is_dict(self) then return value.get(self, key) end
  local i = value.whole(key)
  if not i then return nil end
  if value.is_sequence(self) and INDEXED[self.kind] then
    return self.items[i < 0 and #self.items + i + 1 or i + 1]
  end
  if not text.is(self) then return nil end
  text.unmarked(self)
  local size = text.count(self)
  i = i < 0 and size + i or i
  if i >= 0 and i < size then return text.range(self, i, i + 1) end
end

--- self[key]; undefined if it does not exist.
function M.item(self, key)
  checked(self)
  local x = item_or_nil(self, key)
  if x ~= nil then return x end
  if not text.is(key) then
    return value.undefined(("a %s has no such item"):format(value.kind(self)))
  end
  local name = text.bytes(key)
  x = attribute_or_nil(self, name)
  return x == nil and no_attribute(self, name) or x
end

--- The first and the last index of a slice, as Python counts them.
local function bounds(first, last, step, size)
  local function place(x, default)
    if x == nil or x == value.NONE then return default end
    x = arguments.whole("a slice", x)
    x = x < 0 and x + size or x
    if step > 0 then return math.max(0, math.min(size, x)) end
    return math.max(-1, math.min(size - 1, x))
  end
  if step > 0 then return place(first, 0), place(last, size) end
  return place(first, size - 1), place(last, -1)
end

--- self[first:last:step]; nil and None mean that the bound is not given.
function M.slice(self, first, last, step)
  checked(self)
  step = step ~= value.NONE and arguments.whole("a slice", step, 1) or 1
  if step == 0 then fail "takes a slice with a step of 0" end
  local is_text = text.is(self)
  if is_text then text.unmarked(self) end
  if not is_text and not (value.is_sequence(self) and INDEXED[self.kind]) then
    fail("takes a slice of a %s", value.kind(self))
  end
  local from, to = bounds(first, last, step, value.count(self))
  if is_text and step == 1 then return text.range(self, from, to) end
  local items, out = is_text and text.characters(self) or self.items, {}
  for i = from, to + (step > 0 and -1 or 1), step do out[#out + 1] = items[i + 1] end
  meter.spend(#out)
  return is_text and text.join(out) or value.sequence(out, self.kind)
end

return M
