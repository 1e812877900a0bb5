--- Changes text before it is cut into pieces: the `normalizer` of a tokenizer.json.
local fields = require "kvlab.text.fields"
local options = require "kvlab.options"
local regex = require "kvlab.text.regex"
local sorted = require "kvlab.sorted"
local split = require "kvlab.text.split"
local unicode = require "kvlab.text.unicode"

local M = {}

local MAKE = {}

local function normal_form(def, where)
  fields.only(def, where, { type = true })
  local form, why = unicode.normal_form(def.type)
  if not form then fields.fail(where .. ".type", ("is %q: %s"):format(def.type, why)) end
  return form
end
MAKE.NFC, MAKE.NFD, MAKE.NFKC, MAKE.NFKD = normal_form, normal_form, normal_form,
  normal_form

function MAKE.Prepend(def, where)
  fields.only(def, where, { type = true, prepend = true })
  local prefix = fields.get(def, where, "prepend", options.string)
  return function(text) return text == "" and text or prefix .. text end
end

--- A pattern: { String = … } or { Regex = … } as a regular expression.
---@return string expression
---@return string where  of the expression
---@return string|nil literal
function M.pattern(def, where)
  local pattern = fields.object(def, where, "pattern")
  where = where .. ".pattern"
  fields.only(pattern, where, { String = true, Regex = true })
  if pattern.String ~= nil then
    local literal = fields.get(pattern, where, "String", options.string)
    return split.literal(literal), where .. ".String", literal
  end
  return fields.get(pattern, where, "Regex", options.string), where .. ".Regex"
end

function MAKE.Replace(def, where)
  fields.only(def, where, { type = true, pattern = true, content = true })
  local expression, at, literal = M.pattern(def, where)
  local content = fields.get(def, where, "content", options.string)
  if literal and literal ~= "" then
    local from, to = literal:gsub("%W", "%%%0"), content:gsub("%%", "%%%%")
    return function(text) return (text:gsub(from, to)) end
  end
  local rule = split.rule(at, expression, "Isolated")
  return function(text) return split.replaced(rule, text, content) end
end

function MAKE.Strip(def, where)
  fields.only(def, where, { type = true, strip_left = true, strip_right = true })
  local left = fields.get_or(def, where, "strip_left", options.boolean, true)
  local right = fields.get_or(def, where, "strip_right", options.boolean, true)
  local white = assert(regex.compile "\\s")
  return function(text) return regex.trimmed(white, text, left, right) end
end

function MAKE.Sequence(def, where)
  fields.only(def, where, { type = true, normalizers = true })
  local list, all = fields.list(def, where, "normalizers"), {}
  for i, one in ipairs(list) do
    all[i] = M.of(one, fields.join(where .. ".normalizers", i))
  end
  return function(text)
    for i = 1, #all do text = all[i](text) end
    return text
  end
end

--- A function that normalizes a valid text.
---@param def table|nil  as in the file; nil changes nothing
---@param where string
---@return fun(text: string): string
function M.of(def, where)
  if def == nil then return function(text) return text end end
  fields.expect(where, def, options.table)
  local kind = fields.get(def, where, "type",
    options.one_of(unpack(sorted.keys(MAKE))))
  return MAKE[kind](def, where)
end

return M
