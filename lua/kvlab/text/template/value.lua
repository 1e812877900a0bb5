--- Values of templates, which are those of Python. None, lists and dicts are tables of
-- this file, strings those of kvlab.text.template.text, true and false those of Lua. A
-- number of Lua is an int if it is whole; a float that is whole is a table.
local fail = require "kvlab.text.template.problem"
local json = require "kvlab.json"
local meter = require "kvlab.text.template.meter"
local text = require "kvlab.text.template.text"
local unicode = require "kvlab.text.unicode"

local M = {}

M.NONE = setmetatable({}, { __tostring = function() return "None" end })

local Float, Sequence, Dict, Undefined = {}, {}, {}, {}
local Function, Namespace, Object = {}, {}, {}
Sequence.__index = Sequence

-- ---- making them ----------------------------------------------------------------------

--- A float.
---@param x number
function M.float(x)
  if x % 1 ~= 0 then return x end -- NaN and the infinities, too
  return setmetatable({ float = x }, Float)
end

--- An int; Python's have no limit, but a double holds ints exactly only up to a limit.
function M.int(x)
  if x <= -2 ^ 53 or x >= 2 ^ 53 then
    fail("has the int %.0f, and kvlab none beyond 2^53", x)
  end
  return x + 0 -- not -0
end

--- What is iterated over: "list", "tuple", "range", "generator", or a view of a dict,
-- "dict_keys", "dict_values", "dict_items".
---@param items table  1 ... n
---@param kind? string  ("list")
function M.sequence(items, kind)
  return setmetatable({ items = items, kind = kind or "list" }, Sequence)
end

--- A dict. `order`: its keys, as they were written. A table of Lua has no order, so a
-- dict made of one has `is_unordered`, and to read its order is an error.
function M.dict() return setmetatable({ order = {}, values = {} }, Dict) end

--- What is not there. Reading it writes nothing; using it raises `why`.
function M.undefined(why) return setmetatable({ why = why }, Undefined) end

--- A function of a template: call(arguments, named) with lists of values.
function M.fn(name, call) return setmetatable({ name = name, call = call }, Function) end

function M.namespace(dict) return setmetatable({ dict = dict }, Namespace) end

--- A thing of Jinja that has attributes: attribute(name) returns one, or nil.
function M.object(attribute) return setmetatable({ attribute = attribute }, Object) end

-- ---- what they are --------------------------------------------------------------------

local KINDS = { [Float] = "float", [Dict] = "dict", [Undefined] = "Undefined",
                [Function] = "function", [Namespace] = "Namespace",
                [Object] = "loop" }

--- The name of a value's type, as Python has it: "str", "int", "NoneType", …
function M.kind(x)
  local kind = type(x)
  if kind == "string" then return "str" end
  if kind == "number" then return x % 1 == 0 and "int" or "float" end
  if kind == "boolean" then return "bool" end
  if x == M.NONE then return "NoneType" end
  local mt = getmetatable(x)
  if mt == Sequence then return x.kind end
  return KINDS[mt] or "str"
end

function M.is_undefined(x) return getmetatable(x) == Undefined end
function M.is_dict(x) return getmetatable(x) == Dict end
function M.is_object(x) return getmetatable(x) == Object end
function M.is_sequence(x) return getmetatable(x) == Sequence end

--- The number that a value is; nil if it is none. True is 1.
function M.number(x)
  if type(x) == "number" then return x end
  if type(x) == "boolean" then return x and 1 or 0 end
  return getmetatable(x) == Float and x.float or nil
end

--- The int that a value is; nil if it is none.
function M.whole(x)
  local kind = M.kind(x)
  if kind == "int" or kind == "bool" then return M.number(x) end
end

--- Whether a value counts as true.
function M.truth(x)
  if type(x) == "boolean" then return x end
  if type(x) == "string" then return x ~= "" end
  local number = M.number(x)
  if number then return number ~= 0 end
  if x == M.NONE or M.is_undefined(x) then return false end
  if text.is(x) then return x.bytes ~= "" end
  if M.is_dict(x) then return #x.order > 0 end
  if M.is_sequence(x) then return x.kind == "generator" or #x.items > 0 end
  return true
end

-- ---- dicts ----------------------------------------------------------------------------

--- The Lua key under which a key is stored; nil if it cannot be a key.
local function key_of(key)
  if text.is(key) then return text.bytes(key) end
  if key == M.NONE then return key end
  return M.number(key)
end

--- Raises for a value that no dict can have as its key.
function M.check_key(x)
  if M.is_dict(x) or M.kind(x) == "list" then fail("uses a %s as a key", M.kind(x)) end
  for _, item in ipairs(M.kind(x) == "tuple" and x.items or {}) do M.check_key(item) end
end

--- The Lua key under which a key is stored; raises for keys that kvlab does not support.
local function checked(key)
  local stored = key_of(key)
  if stored ~= nil and stored == stored then return stored end
  fail("uses a %s as a key", M.kind(key))
end

function M.put(dict, key, value)
  local stored = checked(key)
  if dict.values[stored] == nil then dict.order[#dict.order + 1] = key end
  dict.values[stored] = value
end

--- The value of a key, or nil.
function M.get(dict, key) return dict.values[key_of(key)] end

--- The keys in their order.
function M.keys(dict)
  if dict.is_unordered and #dict.order > 1 then
    fail "reads the order of keys that a table of Lua does not have; give it as JSON text"
  end
  return dict.order
end

--- The pairs of a dict as tuples.
function M.items(dict)
  local items = {}
  for i, key in ipairs(M.keys(dict)) do
    items[i] = M.sequence({ key, M.get(dict, key) }, "tuple")
  end
  return items
end

-- ---- iterating ------------------------------------------------------------------------

--- The items of a value as a list of Lua; nil if it has none. A generator gives them
-- once.
function M.items_or_nil(x)
  if M.is_sequence(x) then
    local items = x.items
    if x.kind == "generator" then x.items = {} end
    return items
  end
  if text.is(x) then return text.characters(text.unmarked(x)) end
  if M.is_dict(x) then return M.keys(x) end
  if M.is_undefined(x) then return {} end
end

--- The same; raises for what cannot be iterated.
function M.items_of(x)
  return M.items_or_nil(x) or fail("iterates over a %s", M.kind(x))
end

--- How many items a value has; nil if it has no length.
function M.count(x)
  if M.is_undefined(x) then return 0 end
  if text.is(x) then return text.count(x) end
  if M.is_dict(x) then return #x.order end
  if M.is_sequence(x) and x.kind ~= "generator" then return #x.items end
end

-- ---- comparing ------------------------------------------------------------------------

local function equal_items(a, b)
  if #a ~= #b then return false end
  meter.spend(#a)
  for i = 1, #a do if not M.equal(a[i], b[i]) then return false end end
  return true
end

--- a == b
function M.equal(a, b)
  if a == b then return a == a end
  local x, y = M.number(a), M.number(b)
  if x or y then return x == y end
  if text.is(a) or text.is(b) then
    return text.is(a) and text.is(b) and text.bytes(a) == text.bytes(b)
  end
  if M.is_undefined(a) then return M.is_undefined(b) end
  if M.is_sequence(a) then
    return M.is_sequence(b) and a.kind == b.kind and a.kind ~= "generator"
      and equal_items(a.items, b.items)
  end
  if not M.is_dict(a) or not M.is_dict(b) or #a.order ~= #b.order then return false end
  for _, key in ipairs(a.order) do
    local other = M.get(b, key)
    if other == nil or not M.equal(M.get(a, key), other) then return false end
  end
  return true
end

local function unordered(a, b)
  for _, x in ipairs { a, b } do
    if M.is_undefined(x) then fail("%s", x.why) end
  end
  fail("compares a %s with a %s", M.kind(a), M.kind(b))
end

--- a < b
function M.less(a, b)
  local x, y = M.number(a), M.number(b)
  if x and y then return x < y end
  if text.is(a) and text.is(b) then return text.bytes(a) < text.bytes(b) end
  local kind = M.kind(a)
  if kind ~= M.kind(b) or kind ~= "list" and kind ~= "tuple" then unordered(a, b) end
  for i = 1, math.min(#a.items, #b.items) do
    if not M.equal(a.items[i], b.items[i]) then return M.less(a.items[i], b.items[i]) end
  end
  return #a.items < #b.items
end

--- item in container
function M.contains(container, item)
  if text.is(container) then
    if not text.is(item) then
      fail("looks for a %s in a str", M.kind(item))
    end
    return text.bytes(container):find(text.bytes(item), 1, true) ~= nil
  end
  if M.is_dict(container) then return container.values[checked(item)] ~= nil end
  local items = M.items_of(container)
  meter.spend(#items)
  for _, x in ipairs(items) do if M.equal(x, item) then return true end end
  return false
end

-- ---- from Lua -------------------------------------------------------------------------

local function of_table(x, where, depth)
  if depth > meter.DEPTH then fail("%s is nested too deeply, or in itself", where) end
  if x[1] ~= nil or next(x) == nil and getmetatable(x) then
    local items = {}
    for i, item in ipairs(x) do
      items[i] = M.of(item, ("%s[%d]"):format(where, i), depth + 1)
    end
    for key in pairs(x) do
      if items[key] == nil then
        fail("%s has list items and the key %s", where, tostring(key))
      end
    end
    return M.sequence(items)
  end
  local dict, names = M.dict(), {}
  dict.is_unordered = true
  for name in pairs(x) do
    if type(name) ~= "string" then
      fail("%s has the key %s, expected strings, or 1 to n", where, tostring(name))
    end
    names[#names + 1] = name
  end
  table.sort(names)
  for _, name in ipairs(names) do
    M.put(dict, text.said(unicode.repaired(name)),
      M.of(x[name], where .. "." .. name, depth + 1))
  end
  return dict
end

--- A Lua value as a value of templates. Its strings count as a message's. A list has
-- [1] or a metatable (that of kv's JSON arrays); any other table is a dict.
---@param x any
---@param where string  what it is, for errors: "messages[1]"
function M.of(x, where, depth)
  if x == nil or x == json.null then return M.NONE end
  if type(x) == "string" then return text.said(unicode.repaired(x)) end
  if type(x) == "boolean" then return x end
  if type(x) == "number" then return x % 1 == 0 and M.int(x) or x end
  if type(x) ~= "table" then
    fail("%s is a %s, expected what JSON can hold", where, type(x))
  end
  local is_value = KINDS[getmetatable(x)] or M.is_sequence(x) or text.is(x)
  if x == M.NONE or is_value then return x end
  return of_table(x, where, depth or 0)
end

return M
