--- JSON that keeps every digit. `encode` writes doubles with %.17g, so that they read
-- back bit for bit. `decode` is that of lua-cjson; its errors give the line and column.
--
-- A table with [1] is an array and a table with string keys is an object; an empty table
-- is an object unless `json.array` made it. Keys are sorted, but those in `order` come
-- first. NaN and the infinities have no JSON form, so they are written as null. Strings
-- are written as they are, which is JSON as long as they are UTF-8.
local ffi = require "ffi"
local options = require "kvlab.options"
local rest = require("kvlab.slices").rest
local cjson = require "cjson".new()
cjson.decode_invalid_numbers(false)

local M = {}

--- What null decodes to; encodes as null.
M.null = require("cjson").null

local array_mt = {}
local DEPTH_MAX = 100
local ITEMS_PART = 2 ^ 10 -- between two rests
local int64, uint64 = ffi.typeof "int64_t", ffi.typeof "uint64_t"

--- Marks a list as an array, so that it stays one when it is empty.
---@param list table
---@return table  # the same table
function M.array(list) return setmetatable(list, array_mt) end

--- Is a table an array, as encode sees it?
function M.is_array(t) return t[1] ~= nil or getmetatable(t) == array_mt end

local escapes = {
  ["\""] = "\\\"", ["\\"] = "\\\\", ["\b"] = "\\b", ["\f"] = "\\f", ["\n"] = "\\n",
  ["\r"] = "\\r", ["\t"] = "\\t",
}

local function escape(c) return escapes[c] or ("\\u%04x"):format(c:byte()) end

local function encode_string(text)
  return "\"" .. text:gsub("[%z\1-\31\127\"\\]", escape) .. "\""
end

local function encode_number(x)
  if x ~= x or x == math.huge or x == -math.huge then return "null" end
  return ("%.17g"):format(x)
end

--- The keys of an object, those in `ranks` first; raises on a key that is no string.
local function sorted_keys(object, ranks, path)
  local keys = {}
  for key in pairs(object) do
    if type(key) ~= "string" then
      error(("%s has the key %s: an object's keys are strings, an array's 1 to n"):format(
        path, tostring(key)), 0)
    end
    keys[#keys + 1] = key
  end
  table.sort(keys, function(a, b)
    local rank_a, rank_b = ranks[a] or math.huge, ranks[b] or math.huge
    if rank_a ~= rank_b then return rank_a < rank_b end
    return a < b
  end)
  return keys
end

local function count(list)
  local n = 0
  for _ in pairs(list) do n = n + 1 end
  return n
end

local encode_value

--- The items with a separator, in slices.
local function joined(items, separator)
  if #items <= ITEMS_PART then return table.concat(items, separator) end
  local parts = {}
  for from = 1, #items, ITEMS_PART do
    parts[#parts + 1] = table.concat(items, separator, from,
      math.min(from + ITEMS_PART - 1, #items))
    rest()
  end
  return table.concat(parts, separator)
end

--- `open item, item close`; one item a line when there is an indent.
local function encode_items(items, open, close, indent, level)
  if #items == 0 then return open .. close end
  local gap = indent and "\n" .. indent:rep(level + 1) or ""
  local last = indent and "\n" .. indent:rep(level) or ""
  local comma = indent and "," .. gap or ", "
  return open .. gap .. joined(items, comma) .. last .. close
end

local function encode_table(value, state, path, level)
  if level > DEPTH_MAX then error(path .. " is nested too deeply, or in itself", 0) end
  rest()
  local items = {}
  if M.is_array(value) then
    if count(value) ~= #value then error(path .. " has list items and other keys", 0) end
    local is_flat = true
    for i, item in ipairs(value) do
      is_flat = is_flat and type(item) ~= "table"
      items[i] = type(item) == "number" and encode_number(item)
        or encode_value(item, state, ("%s[%d]"):format(path, i), level + 1)
      if i % ITEMS_PART == 0 then rest() end
    end
    return encode_items(items, "[", "]", not is_flat and state.indent, level)
  end
  for i, key in ipairs(sorted_keys(value, state.ranks, path)) do
    local item = encode_value(value[key], state, path .. "." .. key, level + 1)
    items[i] = encode_string(key) .. ": " .. item
  end
  return encode_items(items, "{", "}", state.indent, level)
end

function encode_value(value, state, path, level)
  local kind = type(value)
  if kind == "string" then return encode_string(value) end
  if kind == "number" then return encode_number(value) end
  if kind == "boolean" then return tostring(value) end
  if kind == "nil" or value == M.null then return "null" end
  if kind == "table" then return encode_table(value, state, path, level) end
  if kind == "cdata" and (ffi.istype(int64, value) or ffi.istype(uint64, value)) then
    return (tostring(value):gsub("U?LL$", ""))
  end
  error(("%s is a %s, which JSON cannot hold"):format(path, kind), 0)
end

local ENCODE = { order = options.table, indent = options.string }

--- The JSON text of a value, on one line unless `indent` is given.
---@param value any  nil, boolean, number, string, 64-bit integer or a table of them
---@param opts? {order?: string[], indent?: string}
---@return string
function M.encode(value, opts)
  opts = options.check("json.encode", opts, ENCODE)
  local ranks = {}
  for i, key in ipairs(opts.order or {}) do ranks[key] = i end
  local state = { ranks = ranks, indent = opts.indent }
  local ok, text = pcall(encode_value, value, state, "value", 0)
  if ok then return text end
  if type(text) ~= "string" then error(text, 0) end -- what ends a task
  error("json.encode: " .. text, 2)
end

--- The value of a JSON text; null becomes json.null. Raises with the line and column.
---@param text string
---@return any
function M.decode(text)
  local ok, value = pcall(cjson.decode, text)
  if ok then return value end
  local words, at = value:match "^(.*) at character (%d+)$"
  if not at then error("json.decode: " .. value, 2) end
  local before = text:sub(1, at - 1)
  local _, newlines = before:gsub("\n", "")
  local column = #before:match "[^\n]*$" + 1
  error(("json.decode: line %d, column %d: %s"):format(newlines + 1, column, words), 2)
end

return M
