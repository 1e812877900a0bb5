--- Reads a config.json, and the tables in it, against a declaration of the fields that it
-- may have. A field is known and has a value of its kind, or is known to change nothing
-- here, or is an error that names it.
--
--   local known = { eps = fields.known(fields.positive(1), 1e-6),
--                   use_cache = fields.harmless "generation" }
--   local values = fields.read("config.json", "llama", { eps = 1e-5 }, known)
--
-- JSON's null is a value of its own: a known field may be null only where that has a
-- meaning. An unknown field may be null, since it then asks for nothing.
local hint = require("kvlab.words").hint
local json = require "kvlab.json"
local options = require "kvlab.options"
local sorted = require "kvlab.sorted"

local M = {}

local SIZE_MAX = 2 ^ 24 -- of anything that a config counts

-- ---- kinds ----------------------------------------------------------------------------

M.COUNT = options.within(1, SIZE_MAX)
M.BOOLEAN, M.TABLE = options.boolean, options.table

--- A number > 0 and at most `most`.
---@param most number
---@return kvlab.OptionKind
function M.positive(most)
  return { ("a number > 0, at most %g"):format(most), function(x)
    return type(x) == "number" and x > 0 and x <= most
  end }
end

--- A field that may have only one value, the one that kvlab can compute.
---@param value string|number|boolean
---@return kvlab.OptionKind
function M.only(value)
  return { tostring(value), function(x) return x == value end, only = value }
end

--- A field that may only be an empty table.
---@param why string  for the error: what a value would ask for
---@return kvlab.OptionKind
function M.nothing(why)
  return { "null: " .. why, function(x)
    return type(x) == "table" and next(x) == nil
  end, only = "null" }
end

--- Names in the words of an error: "a, b or c".
---@param names string[]
---@return string
function M.one_of(names)
  return (table.concat(names, ", "):gsub("^(.*), ", "%1 or "))
end

-- ---- declarations ---------------------------------------------------------------------

---@class models.Field
---@field kind? kvlab.OptionKind  what a value has to be
---@field default any             what stands for a field that is left out
---@field null? boolean           whether null is a value, and means none
---@field required? boolean
---@field harmless? string        why it changes nothing here, in place of a kind

--- A field that a model's computation uses, or that must have one certain value.
---@param kind kvlab.OptionKind
---@param default? any
---@return models.Field
function M.known(kind, default) return { kind = kind, default = default } end

--- A known field that may be null, which means none.
---@param kind kvlab.OptionKind
---@param default? any
---@return models.Field
function M.nullable(kind, default)
  return { kind = kind, default = default, null = true }
end

--- A known field that must not be left out.
---@param kind kvlab.OptionKind
---@return models.Field
function M.required(kind) return { kind = kind, required = true } end

--- A field whose value changes nothing that is computed here.
---@param why string  what it is about
---@return models.Field
function M.harmless(why) return { harmless = why } end

-- ---- reading --------------------------------------------------------------------------

--- A value in the words of an error.
local function shown(value)
  if value == json.null then return "null" end
  return type(value) == "table" and "a table" or tostring(value)
end

--- Raises for a field. path: where it stands.
---@param path string
---@param field string
---@param got any
---@param expected string
function M.refuse(path, field, got, expected)
  error(("%s: %s is %s, expected %s"):format(path, field, shown(got), expected), 0)
end

--- Raises for a field that is not declared. of: what else has such a field, in words. The
-- error names the nearest known name if it is near.
local function refuse_unknown(path, what, name, value, known, of)
  local more = of and ("; it is a field of %s"):format(of)
    or hint(name, sorted.keys(known), ", did you mean %s?")
  error(("%s: %s is %s, but %s has no such field%s"):format(path, tostring(name),
    shown(value), what, more), 0)
end

--- The values of a table, with the defaults of fields that are left out. Harmless fields
-- are not included, and a null is nil.
---@param path string   where the table stands, for errors
---@param what string   whose fields they are, for errors: "llama"
---@param given table   as JSON has it, with json.null
---@param known table<string, models.Field>
---@param others? fun(name: string): string|nil  what else has a field, for errors
---@return table values
function M.read(path, what, given, known, others)
  local values = {}
  for _, name in ipairs(sorted.keys(given)) do
    local field, value = known[name], given[name]
    if not field then
      if value ~= json.null then
        refuse_unknown(path, what, name, value, known, others and others(name))
      end
    elseif value == json.null and field.null then
      values[name] = nil
    elseif not field.harmless then
      if not field.kind[2](value) then M.refuse(path, name, value, field.kind[1]) end
      values[name] = value
    end
  end
  for _, name in ipairs(sorted.keys(known)) do
    if given[name] == nil then
      if known[name].required then M.refuse(path, name, nil, known[name].kind[1]) end
      values[name] = known[name].default
    end
  end
  return values
end

return M
