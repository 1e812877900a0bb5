--- Text tables with aligned columns and short numbers, and pivots of result rows.
--
--   local t = text_table.pivot(rows, { rows = "policy", columns = "budget",
--                                      value = "accuracy", where = { context = 4096 } })
--   print(text_table.text(t))
--
-- A result row is { config = {...}, metrics = {...} }. A table is { caption =, header =
-- {...}, rows = {{...}, ...}, notes = {...} }. A cell holds text, a number, a boolean or
-- { mean =, low =, high =, beside =, mark = }. low and high end an interval, which is
-- written 0.93 ± 0.02, or 0.97 [0.91, 1] if it is longer on one side. beside is a second
-- number, which is written in brackets. A cell with a mark is written with a star, and
-- the notes below the table say what the star means.
--
-- A row is marked if its metrics have a `note`, a text that says why it cannot be
-- compared with the others, or if it is stale (kvlab.experiment).
local arguments = require "kvlab.arguments"
local fronts = require "kvlab.report.front"
local number = require "kvlab.number"
local options = require "kvlab.options"

local M = {}

local EMPTY = "-"

--- Writes a number with about four significant digits, a whole number with all digits.
---@param x number
---@return string
function M.format_number(x)
  if not number.is_number(x) then return "nan" end
  if x == math.floor(x) and math.abs(x) < 1e15 then return ("%d"):format(x) end
  local magnitude = math.abs(x)
  if magnitude >= 1000 and magnitude < 1e15 then return ("%.0f"):format(x) end
  return ("%.4g"):format(x)
end

--- Whether a cell holds a number, or nan in the place of one, with or without an
-- interval. Columns of such cells are aligned to the right.
function M.is_numeric(value)
  return type(value) == "number" or type(value) == "table" and value.mean ~= nil
end

--- " ± 0.02", " [0.91, 1]" or nothing.
local function interval_text(cell, format)
  if not cell.low then return "" end
  local below, above = cell.mean - cell.low, cell.high - cell.mean
  if math.abs(below - above) > 1e-9 * math.max(below, above) then
    return (" [%s, %s]"):format(M.format_cell(cell.low, format),
      M.format_cell(cell.high, format))
  end
  return " ± " .. (format and format:format(below) or ("%.2g"):format(below))
end

--- A cell's text; nil is "-". `format` (string.format's) is used for numbers.
---@param value any
---@param format? string
---@return string
function M.format_cell(value, format)
  if value == nil then return EMPTY end
  if type(value) == "table" then
    return M.format_cell(value.mean, format) .. interval_text(value, format)
      .. (value.beside and (" (%.2g)"):format(value.beside) or "")
      .. (value.mark and "*" or "")
  end
  if type(value) ~= "number" then return tostring(value) end
  return format and value == value and format:format(value) or M.format_number(value)
end

--- How many characters of a terminal a UTF-8 text takes (one per code point).
local function width(text)
  local _, continued = text:gsub("[\128-\191]", "")
  return #text - continued
end

local function pad(text, wanted, to_right)
  local spaces = (" "):rep(wanted - width(text))
  return to_right and spaces .. text or text .. spaces
end

local STRINGS = options.list_of(options.string)
local FORMAT = { "a format of one number, such as %.3g", function(x)
  return type(x) == "string" and pcall(string.format, x, 0.5)
end }
local TABLE = { caption = options.string, header = options.required(STRINGS),
                rows = options.required(options.list_of(options.table)), format = FORMAT,
                notes = STRINGS }

--- The text of a table: a caption, a header, a rule, and the rows. Columns of numbers are
-- aligned to the right.
---@param t {caption?: string, header: string[], rows: any[][], format?: string,
---  notes?: string[]}
---@return string  # ends with a newline
function M.text(t)
  options.check("table.text", t, TABLE)
  local widths, is_number, cells = {}, {}, {}
  for c, name in ipairs(t.header) do
    widths[c], is_number[c] = width(tostring(name)), #t.rows > 0
  end
  for r, row in ipairs(t.rows) do
    cells[r] = {}
    for c = 1, #t.header do
      local text = M.format_cell(row[c], t.format):gsub("%c", " ")
      cells[r][c] = text
      widths[c] = math.max(widths[c], width(text))
      if row[c] ~= nil and not M.is_numeric(row[c]) then is_number[c] = false end
    end
  end
  local lines = { t.caption }
  local function add(texts)
    local padded = {}
    for c, text in ipairs(texts) do
      padded[c] = pad(tostring(text), widths[c], is_number[c])
    end
    lines[#lines + 1] = (table.concat(padded, "  "):gsub(" +$", ""))
  end
  add(t.header)
  local total = -2
  for _, w in ipairs(widths) do total = total + w + 2 end
  lines[#lines + 1] = ("-"):rep(total)
  for _, row in ipairs(cells) do add(row) end
  for _, note in ipairs(t.notes or {}) do lines[#lines + 1] = "* " .. note end
  return table.concat(lines, "\n") .. "\n"
end

--- A cell of comma-separated values. Numbers keep all of their digits. A spreadsheet runs
-- text that begins like a formula, so such text gets a ' in front, unless it is a number.
local function csv_cell(value)
  if value == nil then return "" end
  if type(value) == "number" then
    return not number.is_number(value) and "nan" or ("%.17g"):format(value)
  end
  local text = tostring(value)
  if text:find "^[=+@\t\r-]" and not tonumber(text) then text = "'" .. text end
  return text:find "[,\"\r\n]" and '"' .. text:gsub('"', '""') .. '"' or text
end

--- Writes a table as comma-separated values (RFC 4180, with \n at the end of lines). nil
-- becomes an empty cell, and text that a spreadsheet would run begins with a '.
---@param t {header: string[], rows: any[][], caption?: string, format?: string}  only the
---  first two are written
---@return string
function M.csv(t)
  options.check("table.csv", t, TABLE)
  local lines = {}
  for r = 0, #t.rows do
    local row, cells = t.rows[r] or t.header, {}
    for c = 1, #t.header do cells[c] = csv_cell(row[c]) end
    lines[r + 1] = table.concat(cells, ",") .. "\n"
  end
  return table.concat(lines)
end

--- Returns the rows whose configuration has every value of `where`. A grid may have
-- conditional axes, so a row may lack an axis. Such a row holds for all values of that
-- axis, here and in tables and plots.
---@param rows table[]
---@param where? table<string, any>
---@return table[]
function M.where(rows, where)
  local kept = {}
  for _, row in ipairs(rows) do
    local fits = true
    for key, value in pairs(where or {}) do
      local own = row.config[key]
      fits = fits and (own == nil or own == value)
    end
    if fits then kept[#kept + 1] = row end
  end
  return kept
end

--- The different values of a configuration's key. If all are numbers they are in
-- ascending order, otherwise in the order of the rows.
---@param rows table[]
---@param key string
---@return any[]
function M.distinct(rows, key)
  local values, seen, all_numbers = {}, {}, true
  for _, row in ipairs(rows) do
    local value = row.config[key]
    if value ~= nil and not seen[value] then
      seen[value] = true
      values[#values + 1] = value
      all_numbers = all_numbers and type(value) == "number"
    end
  end
  if all_numbers then table.sort(values) end
  return values
end

--- Why a row is marked, or nil.
---@return string|nil
function M.note_of(row)
  if row.stale then return "stale: changed since, " .. table.concat(row.stale, ", ") end
  return row.metrics.note
end

--- The interval of a row's metric: both ends, or nothing. It comes from repeats; without
-- them, an experiment gives the interval of `score` as the metrics score_low and
-- score_high.
---@return number|nil low, number|nil high
function M.interval_of(row, name)
  local m = row.metrics
  local low, high = m[name .. "_low"], m[name .. "_high"]
  if row.low then low, high = row.low[name], row.high and row.high[name] end
  if number.is_finite(low) and number.is_finite(high) then return low, high end
end

--- A row's metric, with its interval if it has one, the metric beside it, and its mark.
-- An interval as small as rounding errors is left out, because all repeats gave the same
-- value.
local function metric_cell(row, name, beside_name)
  local mean, low, high = row.metrics[name], M.interval_of(row, name)
  local mark = M.note_of(row)
  local is_wide = low and high - low > 2e-12 * math.abs(mean)
  if not is_wide then low, high = nil, nil end
  local beside = beside_name and row.metrics[beside_name]
  if mean == nil or not (low or mark or beside) then return mean end
  return { mean = mean, low = low, high = high, beside = beside, mark = mark }
end

--- The different notes of the marked cells of a table, in their order.
local function notes_of(rows)
  local notes, has = {}, {}
  for _, cells in ipairs(rows) do
    for _, cell in pairs(cells) do
      local mark = type(cell) == "table" and cell.mark
      if mark and not has[mark] then notes[#notes + 1], has[mark] = mark, true end
    end
  end
  table.sort(notes)
  return notes
end

--- The first and last position of a value. nil stands for all n positions.
local function span(place_of, value, n)
  if value == nil then return 1, n end
  return place_of[value], place_of[value]
end

--- The options of table.pivot.
M.PIVOT = {
  rows = options.required(options.string), columns = options.string,
  value = options.required(options.string), beside = options.string,
  where = options.table, format = FORMAT, caption = options.string,
}

--- Makes a table of one metric of many rows: one line per value of opts.rows and one
-- column per value of opts.columns (a single column without it). Cells have the metric's
-- interval where the rows have one (results.summarise), and in brackets the metric
-- `beside`, with two digits. It is an error if two rows fall on one cell: name the axis
-- that tells them apart in `where`.
---@param rows table[]
---@param opts {rows: string, columns?: string, value: string, beside?: string,
---  where?: table, format?: string, caption?: string}
---@return {caption: string, header: string[], rows: any[][], format: string|nil,
---  notes: string[]}
function M.pivot(rows, opts)
  options.check("table.pivot", opts, M.PIVOT)
  rows = M.where(rows, opts.where)
  local lines = M.distinct(rows, opts.rows)
  local columns = opts.columns and M.distinct(rows, opts.columns) or { opts.value }
  local line_of, column_of = {}, {}
  for i, value in ipairs(lines) do line_of[value] = i end
  for i, value in ipairs(columns) do column_of[value] = i end

  local t = { caption = opts.caption, format = opts.format, rows = {} }
  local corner = opts.columns and opts.rows .. " \\ " .. opts.columns or opts.rows
  t.header = { corner }
  for i, value in ipairs(columns) do t.header[i + 1] = M.format_cell(value) end
  -- a label is text, since the format is only for values
  for i, value in ipairs(lines) do t.rows[i] = { M.format_cell(value) } end
  local taken = {}
  local function put(line, column, row)
    local cell = line .. "," .. column
    if taken[cell] then
      error(("table.pivot: two rows fall on %s = %s in column %s; `where` must tell"
        .. " them apart"):format(opts.rows, tostring(lines[line]), t.header[column + 1]),
        3)
    end
    taken[cell] = true
    t.rows[line][column + 1] = metric_cell(row, opts.value, opts.beside)
  end
  for _, row in ipairs(rows) do
    local top, bottom = span(line_of, row.config[opts.rows], #lines)
    local left, right = span(column_of, row.config[opts.columns], #columns)
    for line = top, bottom do
      for column = left, right do put(line, column, row) end
    end
  end
  t.notes = notes_of(t.rows)
  return t
end

--- The options of table.front.
M.FRONT = { front = options.required(options.string), axes = STRINGS,
            over = options.required(options.string), where = options.table,
            caption = options.string, format = FORMAT }

--- Makes a table of the rows on a Pareto front: those that no other row beats. A row
-- beats another if it has no more of the metric `over` and no less of the metric `front`,
-- and is better in one of the two. Marked rows take no part, nor do rows where one of the
-- two is not a finite number.
---@param rows table[]
---@param opts {front: string, over: string, axes?: string[], where?: table,
---  caption?: string, format?: string}  axes: the parts of a configuration to show
---@return {caption: string, header: string[], rows: any[][], format: string|nil}
function M.front(rows, opts)
  options.check("table.front", opts, M.FRONT)
  local points = {}
  for i, row in ipairs(M.where(rows, opts.where)) do
    points[i] = { x = row.metrics[opts.over], y = row.metrics[opts.front], row = row,
                  note = M.note_of(row) }
  end
  local t = { caption = opts.caption, format = opts.format, rows = {},
              header = { unpack(opts.axes or {}) } }
  t.header[#t.header + 1], t.header[#t.header + 2] = opts.over, opts.front
  for n, point in ipairs(fronts.of(points)) do
    local cells = {}
    for i, axis in ipairs(opts.axes or {}) do
      cells[i] = M.format_cell(point.row.config[axis])
    end
    cells[#t.header - 1] = point.x
    cells[#t.header] = metric_cell(point.row, opts.front)
    t.rows[n] = cells
  end
  return t
end

--- Makes a table of all rows. Its columns are the axes, then the metrics, beginning with
-- those in `order`, and `stale` if a row is.
---@param rows table[]
---@param axes {name: string}[]
---@param order string[]
---@return {header: string[], rows: any[][]}
function M.of_rows(rows, axes, order)
  local has, ranks, names = {}, {}, {}
  for i, name in ipairs(order) do ranks[name] = ranks[name] or i end
  for _, row in ipairs(rows) do
    for name in pairs(row.metrics) do
      if not has[name] then has[name], names[#names + 1] = true, name end
    end
  end
  table.sort(names, function(a, b)
    local rank_a, rank_b = ranks[a] or math.huge, ranks[b] or math.huge
    if rank_a ~= rank_b then return rank_a < rank_b end
    return a < b
  end)
  local t = { header = {}, rows = {} }
  for i, axis in ipairs(axes) do t.header[i] = axis.name end
  for r, row in ipairs(rows) do
    local cells = {}
    for i, axis in ipairs(axes) do cells[i] = row.config[axis.name] end
    for i, name in ipairs(names) do cells[#axes + i] = row.metrics[name] end
    t.rows[r] = cells
  end
  for i, name in ipairs(names) do t.header[#axes + i] = name end
  local last, any = #t.header + 1, false
  for r, row in ipairs(rows) do
    if row.stale then any, t.rows[r][last] = true, table.concat(row.stale, ", ") end
  end
  if any then t.header[last] = "stale" end
  return t
end

local function is_row(x)
  if type(x) ~= "table" or type(x.config) ~= "table" or type(x.metrics) ~= "table" then
    return false
  end
  for _, value in pairs(x.config) do
    if value ~= value then return false end -- NaN is no value of an axis
  end
  return x.stale == nil or STRINGS[2](x.stale)
end
local ROW = { "a result row { config =, metrics = }", is_row }
--- The kind of a list of result rows.
M.ROWS = options.list_of(ROW)
local AXES = options.list_of(options.like("an axis { name = }", "name"))
arguments.functions(M, "table", {
  format_number = { x = { "a number", function(x) return type(x) == "number" end } },
  format_cell = { format = options.optional(FORMAT) },
  where = { rows = M.ROWS, where = options.optional(options.table) },
  distinct = { rows = M.ROWS, key = options.string }, note_of = { row = ROW },
  interval_of = { row = ROW }, pivot = { rows = M.ROWS }, front = { rows = M.ROWS },
  of_rows = { rows = M.ROWS, axes = AXES, order = STRINGS },
})

return M
