--- Checks the fields of a request's JSON. Each kind is a function of the field's name and
-- value that returns the value to use, or raises the API's error.
local is_finite = require("kvlab.number").is_finite
local json = require "kvlab.json"
local hint = require("kvlab.words").hint
local problem = require "kvlab.http.problem"
local reader = require "kvlab.http.reader"
local regex = require "kvlab.text.regex"
local rest = require("kvlab.slices").rest
local sorted = require "kvlab.sorted"

local M = {}

local ITEMS_PART = 2 ^ 10 -- of an array, between two rests

--- A value in the words of an error.
local function shown(value)
  if value == json.null or value == nil then return "null" end
  if type(value) == "table" then
    return json.is_array(value) and "an array" or "an object"
  end
  if type(value) == "string" then return problem.quoted(value) end
  return tostring(value)
end

--- Raises an error for a field with a wrong value.
function M.refuse(name, value, expected)
  problem.wrong(name, ("%s is %s, expected %s"):format(name, shown(value), expected))
end
local refuse = M.refuse

-- ---- kinds ----------------------------------------------------------------------------

--- A number within limits.
function M.number(low, high)
  return function(name, x)
    if not is_finite(x) or x < low or x > high then
      refuse(name, x, ("a number from %g to %g"):format(low, high))
    end
    return x
  end
end

--- A whole number within limits.
function M.whole(low, high)
  return function(name, x)
    if not is_finite(x) or x % 1 ~= 0 or x < low or x > high then
      refuse(name, x, ("a whole number from %.0f to %.0f"):format(low, high))
    end
    return x
  end
end

function M.boolean(name, x)
  if type(x) ~= "boolean" then refuse(name, x, "true or false") end
  return x
end

function M.string(name, x)
  if type(x) ~= "string" then refuse(name, x, "a string") end
  return x
end

function M.object(name, x)
  if type(x) ~= "table" or json.is_array(x) then refuse(name, x, "an object") end
  return x
end

--- An array, each of whose items is of a kind.
function M.list(kind, most)
  return function(name, x)
    if type(x) ~= "table" or not json.is_array(x) then refuse(name, x, "an array") end
    if #x > most then
      problem.wrong(name, ("%s has %d items, expected %d or fewer"):format(name, #x,
        most))
    end
    local out = {}
    for i, item in ipairs(x) do
      out[i] = kind(("%s[%d]"):format(name, i - 1), item)
      if i % ITEMS_PART == 0 then rest() end
    end
    return out
  end
end

--- A string, or an array of them.
function M.strings(most)
  local list = M.list(M.string, most)
  return function(name, x)
    if type(x) == "string" then return { x } end
    return list(name, x)
  end
end

--- A field of the API that this server does not support. A request may have it only with
-- a value that asks for nothing.
function M.only(words, is_nothing)
  return function(name, x)
    if not is_nothing(x) then
      problem.wrong(name, ("%s is %s; this server supports only %s"):format(name,
        shown(x),
        words), "unsupported_value")
    end
  end
end

--- A field that changes nothing here.
function M.ignored() return nil end

-- ---- requests -------------------------------------------------------------------------

--- The fields of an object. Null is as if the field were not there.
---@param object table
---@param known table<string, function>
---@return table
function M.take(object, known)
  local out = {}
  for _, name in ipairs(sorted.keys(object)) do
    local kind, value = known[name], object[name]
    if not kind then
      local names = sorted.keys(known)
      problem.wrong(name, ("%s is no field of this request%s"):format(shown(name),
        hint(name, names, ", did you mean %s?")), "unknown_field")
    end
    if value ~= json.null then out[name] = kind(name, value) end
  end
  return out
end

--- The object that the body of a request is.
---@param body string
---@return table
function M.decode(body)
  local at = regex.invalid_at(body)
  if at then
    problem.wrong(nil, ("the body is not UTF-8, at byte %d"):format(at), "invalid_utf8")
  end
  local ok, object = pcall(reader.decode, body)
  if not ok then
    if type(object) ~= "string" then error(object, 0) end -- the request was given up
    problem.wrong(nil, "the body is not JSON: " .. object, "invalid_json")
  end
  if type(object) ~= "table" or object[1] ~= nil then
    problem.wrong(nil, "the body is JSON, but not an object", "invalid_json")
  end
  return object
end

return M
