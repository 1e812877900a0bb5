--- Writes the table of config.json's fields in docs/models.md, from lua/models/config.lua.
-- spec/models/fields_spec.lua fails when it is out of date.
--
--   ./kvlab run tools/fields.lua
local config = require "models.config"
local files = require "kvlab.files"
local json = require "kvlab.json"
local kv = require "kvlab"
local sorted = require "kvlab.sorted"

local PAGE = kv.paths.root .. "/docs/models.md"
local BEGIN, END = "<!-- fields: tools/fields.lua writes this -->\n", "<!-- end of fields -->"
local M = {}

--- What a family takes for a field, in a few letters.
local function cell(field)
  if not field then return "" end
  if field.harmless then return "ignored" end
  if field.kind.only ~= nil then return ("`%s`"):format(tostring(field.kind.only)) end
  if type(field.default) == "number" then
    return field.default < 1 and ("%g"):format(field.default) or ("%.0f"):format(field.default)
  elseif field.default ~= nil then
    return json.encode(field.default)
  end
  return "yes"
end

--- The fields that some family computes with, a row each.
local function table_of_fields()
  local rows = { "| field | " .. table.concat(config.NAMES, " | ") .. " |",
                 "|---|" .. ("---|"):rep(#config.NAMES) }
  local names = {}
  for _, family in pairs(config.FAMILIES) do
    for name, field in pairs(family) do
      if not field.harmless then names[name] = true end
    end
  end
  for _, name in ipairs(sorted.keys(names)) do
    local cells = {}
    for i, family in ipairs(config.NAMES) do
      cells[i] = cell(config.FAMILIES[family][name])
    end
    rows[#rows + 1] = ("| %s | %s |"):format(name, table.concat(cells, " | "))
  end
  return table.concat(rows, "\n")
end

--- The fields that change nothing, a row for each reason.
local function table_of_harmless()
  local rows = { "| harmless in every family | fields |", "|---|---|" }
  for _, reason in ipairs(sorted.keys(config.HARMLESS)) do
    rows[#rows + 1] = ("| %s | %s |"):format(reason,
      table.concat(config.HARMLESS[reason], ", "))
  end
  return table.concat(rows, "\n")
end

--- The page with the tables as they should be.
---@return string is
---@return string wanted
function M.page()
  local is = files.read(PAGE)
  local first, last = is:find(BEGIN, 1, true), is:find(END, 1, true)
  return is, is:sub(1, first + #BEGIN - 1) .. "\n" .. table_of_fields() .. "\n\n"
    .. table_of_harmless() .. "\n\n" .. is:sub(last)
end

if ... ~= "fields" then
  local _, wanted = M.page()
  files.write(PAGE, wanted)
end

return M
