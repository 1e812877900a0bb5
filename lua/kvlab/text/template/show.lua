--- Values of templates as Python's str and repr write them.
local case = require "kvlab.text.case"
local fail = require "kvlab.text.template.problem"
local meter = require "kvlab.text.template.meter"
local text = require "kvlab.text.template.text"
local unicode = require "kvlab.text.unicode"
local value = require "kvlab.text.template.value"

local M = {}

--- The shortest decimal that reads back as the float, as Python's repr has it.
---@param x number
---@return string
function M.float(x)
  if x ~= x then return "nan" end
  if x == math.huge then return "inf" end
  if x == -math.huge then return "-inf" end
  for digits = 0, 16 do
    local sign, whole, rest, exponent = ("%." .. digits .. "e"):format(x)
      :match "^(%-?)(%d)%.?(%d*)e([+-]%d+)$"
    if tonumber(("%s%s.%se%s"):format(sign, whole, rest, exponent)) == x then
      local power = tonumber(exponent)
      if power >= 16 or power < -4 then
        local point = rest ~= "" and "." or ""
        return ("%s%s%s%se%s"):format(sign, whole, point, rest, exponent)
      end
      return (("%." .. math.max(1, digits - power) .. "f"):format(x))
    end
  end
end

local ESCAPES = { ["\\"] = "\\\\", ["\n"] = "\\n", ["\r"] = "\\r", ["\t"] = "\\t" }

local function escaped(letter)
  if ESCAPES[letter] then return ESCAPES[letter] end
  if case.is_printable(letter) then return letter end
  local code = unicode.code(letter)
  return (code < 0x100 and "\\x%02x" or code < 0x10000 and "\\u%04x" or "\\U%08x"):format(
    code)
end

local function quoted(bytes)
  local quote = bytes:find("'", 1, true) and not bytes:find('"', 1, true) and '"' or "'"
  local parts = {}
  for letter in unicode.characters(bytes) do
    parts[#parts + 1] = letter == quote and "\\" .. quote or escaped(letter)
  end
  return quote .. table.concat(parts) .. quote
end

local repr

local function list_of(items, depth)
  local parts = {}
  for i, item in ipairs(items) do parts[i] = repr(item, depth + 1) end
  return text.join(parts, ", ")
end

local SEQUENCES = {
  list = function(items, depth) return text.join { "[", list_of(items, depth), "]" } end,
  tuple = function(items, depth)
    return text.join { "(", list_of(items, depth), #items == 1 and ",)" or ")" }
  end,
}
for _, name in ipairs { "dict_keys", "dict_values", "dict_items" } do
  SEQUENCES[name] = function(items, depth)
    return text.join { name, "([", list_of(items, depth), "])" }
  end
end

local function dict_of(dict, depth)
  local parts = {}
  for i, key in ipairs(value.keys(dict)) do
    local item = repr(value.get(dict, key), depth + 1)
    parts[i] = text.join { repr(key, depth + 1), ": ", item }
  end
  return text.join { "{", text.join(parts, ", "), "}" }
end

--- Python's repr of a value.
function repr(x, depth)
  if (depth or 0) > meter.DEPTH then fail "writes a list that is nested too deeply" end
  meter.spend(1)
  if text.is(x) then
    local shown = text.computed(quoted(text.bytes(x)), x)
    return text.is_markup(x) and text.join { "Markup(", shown, ")" } or shown
  end
  if value.is_dict(x) then return dict_of(x, depth or 0) end
  if value.is_sequence(x) and SEQUENCES[x.kind] then
    return SEQUENCES[x.kind](x.items, depth or 0)
  end
  if value.is_undefined(x) then return "Undefined" end
  return M.str(x)
end
M.repr = repr

--- Python's str of a value: what {{ }} writes.
function M.str(x)
  if text.is(x) then return x end
  if type(x) == "boolean" then return x and "True" or "False" end
  if x == value.NONE then return "None" end
  if value.is_undefined(x) then return "" end
  local kind, number = value.kind(x), value.number(x)
  if kind == "int" then return ("%.0f"):format(number) end
  if kind == "float" then return M.float(number) end
  if value.is_dict(x) or SEQUENCES[kind] then return repr(x) end
  return fail("writes a %s", kind)
end

return M
