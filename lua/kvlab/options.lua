--- The checker for every table of options: unknown names, missing ones and wrong values
-- are refused with the same words, the nearest known name, and the line of the caller.
--
--   local OPTIONS = {
--     blocks = options.required(options.count), dtype = options.one_of("f32", "bf16"),
--   }
--   function M.cache(o)
--     o = options.check("cache", o, OPTIONS)
--
-- It walks the table, so it belongs where something is made, not where a step runs.
-- Single arguments are checked by the same kinds, at the cost of one comparison:
-- options.argument("narrow", "start", start, options.integer).
local house = require "kvlab.house"
local is_number = require("kvlab.number").is_number
local hint = require("kvlab.words").hint
local sorted = require "kvlab.sorted"

local M = {}

---@class kvlab.OptionKind
---@field [1] string                what is expected, in words
---@field [2] fun(x: any): boolean  whether a value is that
---@field required? boolean
---@field fields? table|fun(value: table): table  of a nested table: names and kinds
---@field below? string             whole numbers: below which power of two they are

-- ---- kinds ----------------------------------------------------------------------------

local function is_whole(x) return is_number(x) and x % 1 == 0 and math.abs(x) < 2 ^ 53 end
local function is_narrow(x) return is_whole(x) and x >= -2 ^ 31 and x < 2 ^ 31 end
local function of_type(words, name)
  return { words, function(x) return type(x) == name end }
end

M.boolean = of_type("true or false", "boolean")
M.string = of_type("a string", "string")
M.table = of_type("a table", "table")
M.fn = of_type("a function", "function")
M.any = { "a value", function(x) return x ~= nil end }
M.number = { "a number", is_number }
M.share = { "0 ... 1", function(x) return is_number(x) and x >= 0 and x <= 1 end }
-- These count things, and C takes them as int32_t.
M.integer = { "a whole number", is_narrow, below = "2^31" }
M.whole = { "a whole number >= 0", function(x) return is_narrow(x) and x >= 0 end,
            below = "2^31" }
M.count = { "a whole number >= 1", function(x) return is_narrow(x) and x >= 1 end,
            below = "2^31" }
-- These are bytes, seeds, sizes of tensors: what a number of Lua can hold.
M.any_integer = { "a whole number", is_whole, below = "2^53" }
M.any_whole = { "a whole number >= 0", function(x) return is_whole(x) and x >= 0 end,
                below = "2^53" }
M.any_count = { "a whole number >= 1", function(x) return is_whole(x) and x >= 1 end,
                below = "2^53" }
M.not_negative = { "a number >= 0", function(x)
  return is_number(x) and x >= 0 and x < math.huge
end }
M.positive = { "a number > 0", function(x)
  return is_number(x) and x > 0 and x < math.huge
end }
M.callable = { "a function", function(x)
  local mt = type(x) == "table" and getmetatable(x)
  return type(x) == "function" or mt and mt.__call ~= nil or false
end }

--- A whole number within limits.
function M.within(low, high)
  M.argument("within", "low", low, M.any_integer)
  M.argument("within", "high", high, M.any_integer)
  return { ("a whole number from %d to %d"):format(low, high),
           function(x) return is_whole(x) and x >= low and x <= high end }
end

--- One of these strings, numbers or booleans.
function M.one_of(...)
  local values, words = { ... }, {}
  for i, value in ipairs(values) do words[i] = tostring(value) end
  return { "one of " .. table.concat(words, ", "), function(x)
    for _, value in ipairs(values) do if x == value then return true end end
    return false
  end }
end

--- A list of values of one kind; `least` of them or more (0).
function M.list_of(kind, least)
  return { ("a list, each %s"):format(kind[1]), below = kind.below, function(x)
    if type(x) ~= "table" or #x < (least or 0) then return false end
    local count = 0
    for key, value in pairs(x) do
      if type(key) ~= "number" or not kind[2](value) then return false end
      count = count + 1
    end
    return count == #x -- no holes
  end }
end

--- A value that is of one of two kinds.
function M.either(a, b)
  return { a[1] .. " or " .. b[1], function(x) return a[2](x) or b[2](x) end,
           below = a.below or b.below }
end

--- A table with these fields, named in `words`: "a kv.cache".
function M.like(words, ...)
  local fields = { ... }
  return { words, function(x)
    if type(x) ~= "table" then return false end
    for _, field in ipairs(fields) do if x[field] == nil then return false end end
    return true
  end }
end

--- A table of options itself, checked with the one that it is in; false or nil: none.
---@param known table<string, kvlab.OptionKind>|fun(value: table): table  the function
--              says which options this table may have
function M.nested(known)
  return { "a table", function(x) return x == false or type(x) == "table" end,
           fields = known }
end

--- A kind that must be given.
---@param kind kvlab.OptionKind
---@return kvlab.OptionKind
function M.required(kind)
  return { kind[1], kind[2], below = kind.below, required = true }
end

--- A value of a kind, or nil.
---@param kind kvlab.OptionKind
function M.optional(kind)
  return { kind[1] .. ", or nil", function(x) return x == nil or kind[2](x) end,
           below = kind.below }
end

-- ---- the check ------------------------------------------------------------------------

--- A value as an error writes it: numbers, strings and booleans as they are, others by
-- their type.
function M.shown(value)
  local kind = type(value)
  if kind == "string" then return ('"%s"'):format(value) end
  if kind == "number" or kind == "boolean" or kind == "nil" then
    return tostring(value)
  end
  local is_tensor, dtype, dims = pcall(function() return value:type(), value:dims() end)
  if kind == "cdata" and is_tensor then
    return ("%s [%s]"):format(dtype, table.concat(dims, ", "))
  end
  return "a " .. kind
end

--- What is wrong with a value: "is 0, expected a whole number >= 1".
---@param kind kvlab.OptionKind
function M.problem(value, kind)
  local is_large = false
  for _, x in ipairs(kind.below and (type(value) == "table" and value or { value }) or {})
  do
    is_large = is_large or is_number(x) and math.abs(x) >= 2 ^ 31
  end
  return ("is %s, expected %s%s"):format(M.shown(value), kind[1],
    is_large and ", and below " .. kind.below or "")
end

--- The level of the next outer caller; 0, which means no position, stays 0.
local function outer(level) return level == 0 and 0 or (level or 2) + 1 end

--- Raises `message`, and blames the innermost line that is not kvlab's.
---@param level? integer  where to begin to look for it: 2 is the function that calls fail
function M.fail(message, level)
  level = level or 2
  repeat
    local where = debug.getinfo(level, "S")
    if where and where.what ~= "C" and not house.has(where.source) then
      error(message, level)
    end
    level = level + 1
  until not where
  error(message, 0)
end

--- Checks one argument of a function.
---@param what string   the function, as the error begins: "narrow"
---@param name string   the argument
---@param kind kvlab.OptionKind
---@return any value
function M.argument(what, name, value, kind)
  if not kind[2](value) then
    M.fail(("%s: %s %s"):format(what, name, M.problem(value, kind)))
  end
  return value
end

--- Entry i of a list that counts from 0, such as the one of a layer.
---@param what string   the function, as the error begins: "put"
---@param name string   what i is: "layer"
---@return any
function M.entry(what, name, list, i)
  local value = list[i]
  if value ~= nil then return value end
  return M.fail(("%s: %s is %s, expected 0 ... %d"):format(what, name, M.shown(i),
    list[0] == nil and -1 or #list))
end

--- Raises. Level 0: without a position; else on the line of that caller, or of the next
-- outer one that is not part of kvlab.
local function raise(message, level)
  if level == 0 then error(message, 0) end
  return M.fail(message, level + 1)
end

--- Raises for a name that is none of `names`.
function M.refuse(what, name, names, level)
  raise(("%s: %s is no option%s; %s"):format(what, M.shown(name),
    hint(name, names, ", did you mean %s?"), #names == 0 and "there are none"
    or "the options are " .. table.concat(names, ", ")), outer(level))
end

--- Raises for the first option, in the order of names, that is needed and not there.
local function refuse_missing(what, given, known, level)
  for _, name in ipairs(sorted.keys(known)) do
    if known[name].required and given[name] == nil then
      raise(("%s: %s is missing, expected %s"):format(what, name, known[name][1]),
        outer(level))
    end
  end
end

--- Checks a table of options. Every option is optional unless its kind says otherwise.
---@param what string    whose options they are, as errors begin: "cache"
---@param given table|nil
---@param known table<string, kvlab.OptionKind>
---@param level? integer which caller to blame: 2 (that of the function that checks);
--                        0: the error has no position
---@return table         # what was given; an empty table in place of nil
function M.check(what, given, known, level)
  level = outer(level)
  if given == nil then given = {} end
  if type(given) ~= "table" then
    raise(("%s: options are %s, expected a table"):format(what, M.shown(given)), level)
  end
  for name, value in pairs(given) do
    local kind = known[name]
    if not kind and getmetatable(given) then
      raise(("%s: an object came, expected a table of options"):format(what), level)
    elseif not kind then
      M.refuse(what, name, sorted.keys(known), level)
    end
    if not kind[2](value) then
      raise(("%s: %s %s"):format(what, name, M.problem(value, kind)), level)
    end
    local fields = value and kind.fields
    if fields then
      M.check(name, value, type(fields) == "function" and fields(value) or fields, level)
    end
  end
  for name, kind in pairs(known) do
    if kind.required and given[name] == nil then
      refuse_missing(what, given, known, level)
    end
  end
  return given
end

return M
