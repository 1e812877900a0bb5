--- The numbers of a table in docs are those of the result files that the page names. A
-- comment right before the table says how:
--
--   <!-- numbers: bench/results/FILE.jsonl [FILE …]
--   where: context=4096                      rows with these values alone
--   rows: policy, budget%                    what the first cell of a row names, in parts
--   row LABEL: name=transformers             or what one row names (; stands for a comma)
--   columns: budget%                         what the heads of the other columns name
--   cell: {accuracy} [{accuracy.low}, {accuracy.high}] ({bytes_share%})
--   column HEAD: task=needle: {score}        or what one column shows
--   skip: HEAD                               a column or row that is not from the files
--   renamed: snapkv=snapkv_blocks            what the files call snapkv has that name now
--   -->
--
-- A table of the bench has `id: P1 P2` instead. Then every number in the columns that
-- `column HEAD: : x` names is one of the rows that have these ids; `id:` alone stands for
-- the id in the first cell, above it if that is empty. `row LABEL: id=…` says others.
--
-- A number may be rounded to the digits that it is shown with. Text, backticks and
-- remarks in brackets in the first cell do not matter.
local json = require "kvlab.json"
local results = require "kvlab.experiment.results"
local statistics = require "kvlab.experiment.statistics"

local M = {}

local function trim(text) return (text:gsub("^%s+", ""):gsub("%s+$", "")) end

local function split(text, separator)
  local list = {}
  for part in (text .. separator):gmatch("(.-)" .. separator:gsub("%p", "%%%0")) do
    list[#list + 1] = trim(part)
  end
  return list
end

local function read_rows(root, files, renamed)
  local rows = {}
  for _, path in ipairs(files) do
    local file = io.open(root .. "/" .. path)
    if not file then error("there is no " .. path, 0) end
    for line in file:lines() do
      local ok, row = pcall(json.decode, line)
      if ok and row.id ~= "header" then
        for key, value in pairs(row.config or {}) do
          row.config[key] = renamed[value] or value
        end
        rows[#rows + 1] = row
      end
    end
    file:close()
  end
  return rows
end

-- ---- the directive --------------------------------------------------------------------

--- "level=plain, budget=5" as a table.
local function settings(text)
  local set = {}
  for _, part in ipairs(split(text, ",")) do
    local key, value = part:match "^([%w_]+)=(.*)$"
    if not key then error(("numbers: %q is not KEY=VALUE"):format(part), 0) end
    set[key] = tonumber(value) or (value:gsub(";", ","))
  end
  return set
end

local readers = {
  where = function(d, text) d.where = settings(text) end,
  rows = function(d, text) d.rows = split(text, ",") end,
  columns = function(d, text) d.columns = text end,
  cell = function(d, text) d.cell = text end,
  skip = function(d, text) d.skip[text] = true end,
  renamed = function(d, text) d.renamed = settings(text) end,
  id = function(d, text) d.ids = text ~= "" and split(text, " ") or {} end,
}

local function read_directive(lines)
  local d = { row = {}, column = {}, skip = {}, where = {}, renamed = {},
              files = split(trim(lines[1]), " ") }
  for i = 2, #lines do
    local line = trim(lines[i])
    local label, row = line:match "^row (.*): (.-)$"
    local head, where, cell = line:match "^column (.*): (.-): (.-)$"
    local key, value = line:match "^(%l+):%s*(.*)$"
    if label then d.row[label] = settings(row)
    elseif head then
      d.column[head] = { where = where == "" and {} or settings(where), cell = cell }
    elseif readers[key] then readers[key](d, value)
    elseif line ~= "" then error(("numbers: %q is not known"):format(line), 0) end
  end
  return d
end

-- ---- tables ---------------------------------------------------------------------------

local function cells_of(line)
  return split(line:match "^|(.*)|%s*$", "|")
end

--- The tables of a page that have a directive: { line =, directive =, heads =, rows = }.
---@param lines string[]
function M.tables(lines)
  local tables, directive, i = {}, nil, 1
  while i <= #lines do
    local first = lines[i]:match "^<!%-%- numbers: (.*)$"
    if first then
      local text, start = { (first:gsub("%s*%-%->$", "")) }, i
      while not lines[i]:find "%-%->$" do
        i = i + 1
        if not lines[i] then
          error(("line %d: the comment has no end"):format(start), 0)
        end
        text[#text + 1] = (lines[i]:gsub("%s*%-%->$", ""))
      end
      directive = { line = start, text = text }
    elseif directive and lines[i]:find "^|" then
      local t = { line = directive.line, directive = read_directive(directive.text),
                  heads = cells_of(lines[i]), rows = {} }
      i = i + 2
      while (lines[i] or ""):find "^|" do
        t.rows[#t.rows + 1] = cells_of(lines[i])
        i = i + 1
      end
      tables[#tables + 1], directive = t, nil
    elseif directive and lines[i] ~= "" then
      error(("line %d: no table comes after the comment"):format(directive.line), 0)
    end
    i = i + 1
  end
  if directive then
    error(("line %d: no table comes after the comment"):format(directive.line), 0)
  end
  return tables
end

-- ---- numbers --------------------------------------------------------------------------

--- The numbers of a text: { text =, value =, unit = }. unit: of the last digit shown.
local function numbers_of(text)
  local found = {}
  text = text:gsub("%(%d%d?%)", ""):gsub("(%d) (%d%d%d)%f[%D]", "%1%2")
  text = text:gsub("%a[%w_]*", "") -- f8, k256
  for whole, fraction in text:gmatch "(%d+)(%.?%d*)" do
    local shown = whole .. fraction
    local unit = fraction ~= "" and 10 ^ -(#fraction - 1) or 1
    if fraction == "" and #whole >= 4 then unit = 10 ^ #whole:match "0*$" end
    found[#found + 1] = { text = shown, value = tonumber(shown), unit = unit }
  end
  return found
end

local function agrees(number, value)
  return math.abs(number.value - value) <= 0.5000001 * number.unit
end

--- A number by its name in a template, "accuracy.low", "bytes_share%", of rows.
local function value_of(rows, name)
  local percent, field = name:find "%%$" and 100 or 1, name:gsub("%%$", "")
  local kind = field:match "%.(%l+)$"
  field = field:gsub("%.%l+$", "")
  local row = rows[1]
  if #rows > 1 and row.config then
    row = results.summarise(rows, row.trials and { accuracy = "questions" } or nil)
    if #row > 1 then error("several rows, such as other " .. next(row[1].config), 0) end
    row = row[1]
  elseif #rows > 1 then
    local values = {}
    for i, one in ipairs(rows) do values[i] = one[field] end
    table.sort(values)
    local of = { min = values[1], max = values[#values],
                 median = statistics.median(values) }
    return of[kind or "median"]
  end
  local metrics = row.metrics or row
  if kind == "half" then
    return (metrics[field .. "_high"] - metrics[field .. "_low"]) / 2
  elseif kind == "low" or kind == "high" then
    return (row[kind] and row[kind][field] or metrics[field .. "_" .. kind]) * percent
  end
  local value = metrics[field]
  if not value then error("the rows have no " .. field, 0) end
  return value * percent
end

--- The parts of a cell or of a template: outside of brackets, in [] and in ().
local function parts_of(text)
  local inner = text:match "%b[]"
  text = text:gsub("%b[]", " ")
  return { (text:gsub("%b()", " ")), inner or "", text:match "%b()" or "" }
end

local function check_cell(cell, template, rows)
  local shown, wanted = parts_of(cell), parts_of(template)
  for p = 1, 3 do
    local names, numbers = {}, numbers_of(shown[p])
    for name in wanted[p]:gmatch "{(.-)}" do names[#names + 1] = name end
    if #numbers > #names or p == 1 and #numbers == 0 then
      return ("%q has %d numbers, expected %d"):format(cell, #numbers, #names)
    end
    for i, number in ipairs(numbers) do
      local value = value_of(rows, names[i])
      if not agrees(number, value) then
        return ("%q: %s is %.6g"):format(cell, names[i], value)
      end
    end
  end
end

-- ---- a table --------------------------------------------------------------------------

--- A label without its backticks, its remarks in parentheses and the spaces around it.
local function plain(label)
  return trim((label:gsub("`", ""):gsub("%b()", ""):gsub("%*%*", "")))
end

--- What a label names: "5%" of budget% is budget = 0.05, "1 × 32K" is "1x32K".
local function named(key, label)
  local percent = key:find "%%$"
  key = key:gsub("%%$", "")
  if percent then return key, tonumber(label:match "([%d.]+)%%") / 100 end
  return key, tonumber(label) or (label:gsub(" × ", "x"))
end

--- The rows that have what `where` says. Full attention has no budget.
local function find(rows, where)
  local found = {}
  for _, row in ipairs(rows) do
    local config, fits = row.config or row, true
    for key, value in pairs(where) do
      local own = config[key]
      if type(own) == "number" and type(value) == "number" then
        fits = fits and math.abs(own - value) < 1e-9
      else
        fits = fits and (own == value or key == "budget" and config.policy == "full")
      end
    end
    if fits then found[#found + 1] = row end
  end
  return found
end

local function joined(...)
  local all = {}
  for _, t in ipairs { ... } do for key, value in pairs(t) do all[key] = value end end
  return all
end

local function row_names(d, cells)
  local label = plain(cells[1])
  if d.row[label] or d.row[cells[1]] then return d.row[label] or d.row[cells[1]], 1 end
  if not d.rows then return {}, 1 end
  local parts, used = split(label, ","), 1
  if #d.rows > 1 and #parts == 1 and cells[2]:find "%%" and not cells[2]:find "[[(]" then
    parts, used = { label, cells[2] }, 2
  end
  local where = {}
  for i, part in ipairs(parts) do
    local key, value = named(d.rows[i], part)
    where[key] = value
  end
  return where, used
end

local function check_grid(t, all)
  local d, wrong = t.directive, {}
  for _, cells in ipairs(t.rows) do
    local ok, own, used = pcall(row_names, d, cells)
    if not ok then own, used = {}, #cells end
    for c = used + 1, d.skip[plain(cells[1])] and 0 or #cells do
      local head = plain(t.heads[c])
      local column = d.column[head] or { where = {}, cell = d.cell }
      if not d.column[head] and d.columns and not d.skip[head] then
        local key, value = named(d.columns, head)
        column.where = { [key] = value }
      end
      if cells[c] ~= "" and not d.skip[head] then
        local rows = find(all, joined(d.where, own, column.where))
        local why = #rows == 0 and "no row of the files"
          or check_cell(cells[c], column.cell or "", rows)
        if why then wrong[#wrong + 1] = ("%s, %s: %s"):format(cells[1], head, why) end
      end
    end
  end
  return wrong
end

-- The numbers of a row of the bench that pages show, and the units in which they do.
local SHOWN = { us = { 1, 1e-3 }, of_limit = { 1 }, gb_s = { 1 }, tflop_s = { 1 } }

local function all_numbers(row)
  local list = {}
  for field, factors in pairs(SHOWN) do
    for _, factor in ipairs(type(row[field]) == "number" and factors or {}) do
      list[#list + 1] = row[field] * factor
    end
  end
  for _, n in ipairs(numbers_of(row.note or "")) do
    list[#list + 1], list[#list + 2] = n.value, n.value * 1e-3
  end
  return list
end

--- Whether a row of the bench has one of the ids. P1 is also P1-f8, and not P12.
local function has_id(row, ids)
  for _, id in ipairs(row.id and ids or {}) do
    local rest = row.id:sub(1, #id) == id and row.id:sub(#id + 1)
    if rest and not rest:find "^%d" then return true end
  end
end

local function check_bench(t, all)
  local d, wrong, own = t.directive, {}, nil
  for _, cells in ipairs(t.rows) do
    local label = plain(cells[1] ~= "" and cells[1] or cells[2])
    if cells[1] ~= "" then own = { label } end
    local ids = d.row[label] and split(d.row[label].id, " ") or d.ids[1] and d.ids or own
    local numbers = {}
    for _, row in ipairs(all) do
      for _, x in ipairs(has_id(row, ids) and all_numbers(row) or {}) do
        numbers[#numbers + 1] = x
      end
    end
    for c = 2, d.skip[label] and 0 or #cells do
      local is_ours = d.column[plain(t.heads[c])]
      for _, number in ipairs(is_ours and numbers_of(cells[c]) or {}) do
        local found = false
        for _, x in ipairs(numbers) do found = found or agrees(number, x) end
        if not found then
          wrong[#wrong + 1] = ("%s %s: the rows have no %s"):format(cells[1], cells[2],
            number.text)
        end
      end
    end
  end
  return wrong
end

--- What is wrong in the tables of a page, one line each; "" if nothing is.
---@param root string
---@param lines string[]
---@return string wrong, integer tables
function M.check(root, lines)
  local wrong, tables = {}, M.tables(lines)
  for _, t in ipairs(tables) do
    local rows = read_rows(root, t.directive.files, t.directive.renamed)
    local list = (t.directive.ids and check_bench or check_grid)(t, rows)
    for _, line in ipairs(list) do
      wrong[#wrong + 1] = ("line %d: %s"):format(t.line, line)
    end
  end
  return table.concat(wrong, "\n"), #tables
end

return M
