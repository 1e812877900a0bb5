--- Reads fields of a tokenizer's files. A field that is missing, wrong or not supported
-- raises a problem that names the field, what is there and what was expected;
-- `kv.tokenizer` puts the file's name in front.
local json = require "kvlab.json"
local options = require "kvlab.options"

local M = {}

local Problem = { __tostring = function(self) return self.text end }

--- Raises a problem of a field.
---@param where string  "model.merges[3]"
---@param why string    "names the token …"
function M.fail(where, why)
  error(setmetatable({ text = where .. " " .. why }, Problem), 0)
end

--- Whether an error is a problem of a field.
function M.is_problem(x) return getmetatable(x) == Problem end

local function join(where, key)
  if where == "" then return tostring(key) end
  if type(key) == "number" then return ("%s[%d]"):format(where, key - 1) end
  return where .. "." .. key
end
M.join = join

--- Raises unless a value is of a kind.
local function expect(where, value, kind)
  if not kind[2](value) then
    M.fail(where, options.problem(value, kind))
  end
  return value
end
M.expect = expect

local object = { "an object", function(x) return type(x) == "table" end }

--- A field of an object, of a kind; null counts as missing.
---@param from table
---@param where string  what `from` is: "model", or "" for the whole file
---@param key string
---@param kind kvlab.OptionKind
---@return any
function M.get(from, where, key, kind)
  local value = from[key]
  if value == json.null then value = nil end
  return expect(join(where, key), value, kind)
end

--- The same, or `default` where there is none.
function M.get_or(from, where, key, kind, default)
  local value = M.get(from, where, key, options.optional(kind))
  if value == nil then return default end
  return value
end

--- A field that is an object or a list.
function M.object(from, where, key) return M.get(from, where, key, object) end

--- The same, or nil.
function M.object_or_nil(from, where, key)
  return M.get(from, where, key, options.optional(object))
end

local list = { "a list", function(x)
  return type(x) == "table" and (next(x) == nil or #x > 0)
end }

--- A field that is a list.
function M.list(from, where, key) return M.get(from, where, key, list) end

--- The same; an empty one where there is none.
function M.list_or_none(from, where, key)
  return M.get(from, where, key, options.optional(list)) or {}
end

--- Raises for a field that is not one of `names`, because it may change what the others
-- mean.
---@param names table<string, any>
function M.only(from, where, names)
  for key in pairs(from) do
    if not names[key] then
      M.fail(join(where, tostring(key)), "is a field that is not known")
    end
  end
end

--- Raises if a field is there (and not null) with another value than `value`.
function M.must_be(from, where, key, value)
  local is = from[key]
  if is ~= nil and is ~= json.null and is ~= value then
    M.fail(join(where, key), ("is %s, expected %s; nothing else is supported"):format(
      options.shown(is), options.shown(value)))
  end
end

return M
