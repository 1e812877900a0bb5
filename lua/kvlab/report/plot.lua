--- Line plots, drawn by gnuplot: one line for each series, one panel for each value of
-- another axis. plot.bars makes bars of result rows. plot.heat_maps makes heat maps of
-- result rows, plot.heat_map makes them of any numbers. plot.write and plot.svg draw all
-- of these and the timelines of kvlab.timeline.
--
--   local p = plot.lines(rows, { x = "budget", y = "accuracy", series = "policy",
--                                panel = "context", logx = true })
--   plot.write(p, "recall.pdf")           -- or .svg or .png
--   local svg, why = plot.svg(p)          -- nil and a reason without gnuplot
--   print(plot.text(p))                   -- for a terminal
--
-- logx and logy ask for logarithmic axes; an axis with values of 0 or less stays linear.
-- Tics along x are the values themselves. If these are powers of two on a logarithmic
-- axis, they are written 16, 64, 256, 1K, 4K, in equal steps; xpow2 = true does the same
-- for any other numbers, xpow2 = false turns it off. Tics along y are round numbers:
-- 0.25, 1200, 250k, 1.5G.
-- A series with a single point, such as full attention, is drawn as a dashed level line
-- when another series has more points.
-- x may be a metric instead of an axis, such as the bytes that were read. front = true
-- adds the Pareto front as a reference: the largest y that any series reaches with at
-- most so much x. Points of marked rows (kvlab.table) are circled, and the legend says
-- why.
-- More than eight series are drawn in small multiples: a panel for each, where the others
-- are grey. Points whose intervals would overlap are moved apart by a few pixels.
-- style = { ["copy engine, alone"] = "limit" } draws that series as a reference, dashed
-- and grey; it takes none of the colours. If series = "policy", each policy has the
-- colour and marker that it has in every picture (styles.lua).
-- gnuplot gets names as single-quoted text, with markup turned off, and data only as
-- numbers. So it cannot mistake a name for a command.
local arguments = require "kvlab.arguments"
local bars = require "kvlab.report.bars"
local files = require "kvlab.files"
local front = require "kvlab.report.front"
local heat_map = require "kvlab.report.heat_map"
local gnuplot = require "kvlab.report.gnuplot"
local is_finite = require("kvlab.number").is_finite
local lines = require "kvlab.report.lines"
local options = require "kvlab.options"
local text_table = require "kvlab.report.table"
local timeline = require "kvlab.report.timeline"

local M = { FORMATS = { svg = true, pdf = true, png = true } } -- of pictures

--- The program that draws; specs replace it with another.
M.gnuplot = "gnuplot"

--- The position of every value on the x axis. If all values are numbers, each stands at
-- its own value; otherwise they stand at 1, 2, 3, …
local function make_scale(rows, key)
  local values, position = text_table.distinct(rows, key), {}
  local is_numeric = true
  for _, value in ipairs(values) do is_numeric = is_numeric and is_finite(value) end
  for i, value in ipairs(values) do position[value] = is_numeric and value or i end
  return values, position, is_numeric
end

--- Whether every value is a power of two.
local function are_powers_of_two(values)
  for _, value in ipairs(values) do
    if value <= 0 or math.frexp(value) ~= 0.5 then return false end
  end
  return #values > 0
end

--- 16, 256, 1K, 1.5K, 4M: in units of 1024.
local function binary_number(x)
  for _, unit in ipairs { { 2 ^ 40, "T" }, { 2 ^ 30, "G" }, { 2 ^ 20, "M" },
    { 2 ^ 10, "K" } } do
    if x >= unit[1] then return text_table.format_number(x / unit[1]) .. unit[2] end
  end
  return text_table.format_number(x)
end

---@class kvlab.plot
---@field title? string
---@field xlabel? string
---@field ylabel? string
---@field logx? boolean
---@field logy? boolean
---@field xpow2? boolean   tics along x are written 16, 1K, 4M, in equal steps
---@field ymin? number     ignored on a logarithmic axis when it is 0 or less
---@field ymax? number
---@field names string[]  the series, in the order of colours
---@field legend? string   what the names mean, if they are numbers
---@field are_policies? boolean  each name is a policy's, with the policy's own colour
---@field style table<string, "limit">  by the name of the series
---@field xtics {[1]: number, [2]: string}[]  position and text; none: round numbers
---@field notes string[]  why points are circled
---@field panels {title: string|nil, series: table<string, number[][]>}[]  points {x, y},
---  or {x, y, low, high} where an interval is known

local a_name = options.required(options.string)

local function copy(map)
  local other = {}
  for key, value in pairs(map or {}) do other[key] = value end
  return other
end

local FRONT = "Pareto front"

--- The corners of the Pareto front of some series, as a line that rises to the right.
local function front_of(series)
  local points, line = {}, {}
  for _, list in pairs(series) do
    for _, point in ipairs(list) do
      points[#points + 1] = { x = point[1], y = point[2], note = point.note }
    end
  end
  for _, point in ipairs(front.of(points)) do
    local last = line[#line]
    if not last or point.y > last[2] then
      if last then line[#line + 1] = { point.x, last[2] } end
      line[#line + 1] = { point.x, point.y }
    end
  end
  return line
end

--- The options of plot.lines.
M.LINES = {
  x = a_name, y = a_name, series = options.string, panel = options.string,
  where = options.table, logx = options.boolean, logy = options.boolean,
  xpow2 = options.boolean, front = options.boolean, style = options.table,
  title = options.string, xlabel = options.string, ylabel = options.string,
  ymin = options.number, ymax = options.number,
}

--- Makes a plot of result rows ({config =, metrics =}). Rows with intervals (low and
-- high, as results.summarise gives them) get error bars.
---@param rows table[]
---@param opts {x: string, y: string, series?: string, panel?: string, where?: table,
---  logx?: boolean, logy?: boolean, xpow2?: boolean, style?: table<string, "limit">,
---  title?: string, xlabel?: string, ylabel?: string, ymin?: number, ymax?: number}
---@return kvlab.plot
function M.lines(rows, opts)
  options.check("plot.lines", opts, M.LINES)
  for series, style in pairs(opts.style or {}) do
    if style ~= "limit" then
      error(("plot.lines: the style of %s is %s, expected limit"):format(series,
        tostring(style)), 2)
    end
  end
  rows = text_table.where(rows, opts.where)
  local p = {
    title = opts.title or (opts.ylabel or opts.y) .. " by " .. (opts.xlabel or opts.x),
    xlabel = opts.xlabel or opts.x, ylabel = opts.ylabel or opts.y,
    logx = opts.logx, logy = opts.logy, ymin = opts.ymin, ymax = opts.ymax,
    names = {}, style = copy(opts.style), xtics = {}, panels = {}, notes = {},
    are_policies = opts.series == "policy",
  }
  local values, position, is_numeric = make_scale(rows, opts.x)
  local x_is_metric = #values == 0
  if not is_numeric then p.logx = false end
  p.xpow2 = is_numeric and opts.xpow2
  if opts.xpow2 == nil then p.xpow2 = p.logx and are_powers_of_two(values) end
  for i, value in ipairs(values) do
    p.xtics[i] = { position[value],
                   p.xpow2 and binary_number(value) or text_table.format_cell(value) }
  end
  for i, value in ipairs(opts.series and text_table.distinct(rows, opts.series) or {}) do
    p.names[i] = tostring(value)
    if type(value) ~= "string" then p.legend = opts.series end
  end
  if not opts.series then p.names[1] = p.ylabel end
  local panel_of = {}
  for i, value in ipairs(opts.panel and text_table.distinct(rows, opts.panel) or {}) do
    p.panels[i] = { title = ("%s = %s"):format(opts.panel, text_table.format_cell(value)),
                    series = {} }
    panel_of[value] = p.panels[i]
  end
  if not opts.panel then p.panels[1] = { series = {} } end
  local has_note = {}
  local function add(panel, row)
    local series = opts.series and tostring(row.config[opts.series]) or p.names[1]
    -- a row without an x holds for every x: it is drawn as a level line, without a point
    local own = position[row.config[opts.x]]
    local x = own or p.xtics[1] and p.xtics[1][1]
    if x_is_metric then x, own = row.metrics[opts.x], true end
    local y, note = row.metrics[opts.y], text_table.note_of(row)
    if is_finite(x) and is_finite(y) then
      local low, high = text_table.interval_of(row, opts.y)
      panel.series[series] = panel.series[series] or {}
      table.insert(panel.series[series], { x, y, low, high, note = note,
                                           has_no_x = not own or nil })
      if note and not has_note[note] then
        p.notes[#p.notes + 1], has_note[note] = note, true
      end
    end
  end
  for _, row in ipairs(rows) do
    local own = opts.panel and panel_of[row.config[opts.panel]]
    for _, panel in ipairs(own and { own } or p.panels) do add(panel, row) end
  end
  for _, panel in ipairs(p.panels) do
    for _, points in pairs(panel.series) do
      table.sort(points, function(a, b) return a[1] < b[1] end)
    end
    if opts.front then panel.series[FRONT] = front_of(panel.series) end
  end
  if opts.front then p.names[#p.names + 1], p.style[FRONT] = FRONT, "limit" end
  return p
end

local HEAT_MAP = {
  kind = options.one_of "heat_map", rows = options.required(options.whole),
  columns = options.required(options.whole), panels = options.required(options.table),
  title = options.string, file = options.string, xlabel = options.string,
  ylabel = options.string, zlabel = options.string, row_names = options.table,
  column_names = options.table, low = options.number, high = options.number,
  ends = options.list_of(options.string, 2),
  format = options.string,
}

--- Makes a heat map of matrices: one matrix in each panel, with row 0 at the top. It
-- checks p, sets p.kind and returns p.
---@param p table  a kvlab.heat_map without its kind: rows, columns, panels; title, file,
--                 xlabel, ylabel, zlabel, ends, row_names, column_names, low, high,
--                 format
---@return kvlab.heat_map
function M.heat_map(p)
  options.check("plot.heat_map", p, HEAT_MAP)
  local expected = p.rows * p.columns
  for i, panel in ipairs(p.panels) do
    if type(panel) ~= "table" or type(panel.values) ~= "table" then
      error(("plot.heat_map: panel %d is %s, expected a table with values"):format(i,
        options.shown(panel)), 2)
    end
    if #panel.values ~= expected or expected == 0 then
      error(("plot.heat_map: panel %d has %d values, expected %d x %d"):format(i,
        #panel.values, p.rows, p.columns), 2)
    end
  end
  if #p.panels == 0 then error("plot.heat_map: there are no panels", 2) end
  p.kind = "heat_map"
  return p
end

--- The positions of an axis's values on a heat map, from 1, and their names.
local function make_places(rows, key)
  local place, names = {}, {}
  for i, value in ipairs(text_table.distinct(rows, key)) do
    place[value], names[i] = i, text_table.format_cell(value)
  end
  return place, names
end

local HEAT_MAPS = {
  x = a_name, y = a_name, value = a_name, panel = options.string, where = options.table,
  title = options.string, xlabel = options.string, ylabel = options.string,
  zlabel = options.string, low = options.number, high = options.number,
  format = options.string, file = options.string,
}

--- Makes heat maps of result rows ({config =, metrics =}): a cell for every x and y, with
-- y from the top down, and a panel for every value of opts.panel. A cell on which several
-- rows fall shows their mean.
---@param rows table[]
---@param opts {x: string, y: string, value: string, panel?: string, where?: table,
---  title?: string, xlabel?: string, ylabel?: string, zlabel?: string, low?: number,
---  high?: number, format?: string, file?: string}
---@return kvlab.heat_map
function M.heat_maps(rows, opts)
  options.check("plot.heat_maps", opts, HEAT_MAPS)
  rows = text_table.where(rows, opts.where)
  if #rows == 0 then error("plot.heat_maps: there are no rows to draw", 2) end
  local column_of, columns = make_places(rows, opts.x)
  local row_of, down = make_places(rows, opts.y)
  local panels, panel_of, counts = {}, {}, {}
  local function open_panel(title)
    local panel = { title = title, values = {} }
    for i = 1, #down * #columns do panel.values[i] = 0 / 0 end
    panels[#panels + 1], counts[panel] = panel, {}
    return panel
  end
  local only = not opts.panel and open_panel()
  for _, value in ipairs(opts.panel and text_table.distinct(rows, opts.panel) or {}) do
    panel_of[value] = open_panel(type(value) ~= "number" and tostring(value)
      or ("%s = %s"):format(opts.panel, text_table.format_cell(value)))
  end
  for _, row in ipairs(rows) do
    local x, y = column_of[row.config[opts.x]], row_of[row.config[opts.y]]
    local z = row.metrics[opts.value]
    local panel = only or panel_of[row.config[opts.panel]]
    if x and y and panel and is_finite(z) then
      local i, count = (y - 1) * #columns + x, counts[panel]
      count[i] = (count[i] or 0) + 1
      local mean = count[i] > 1 and panel.values[i] or 0
      panel.values[i] = mean + (z - mean) / count[i]
    end
  end
  return M.heat_map {
    title = opts.title or opts.value, file = opts.file or opts.value .. "_map",
    xlabel = opts.xlabel or opts.x, ylabel = opts.ylabel or opts.y,
    zlabel = opts.zlabel or opts.value, low = opts.low, high = opts.high,
    format = opts.format, rows = #down, columns = #columns, row_names = down,
    column_names = columns, panels = panels,
  }
end

local BARS = {
  value = a_name, bar = a_name, split = options.string, panel = options.string,
  limit = options.string, where = options.table, title = options.string,
  xlabel = options.string, limit_label = options.string, format = options.string,
  file = options.string,
}

--- The text of a value of an axis, in a name or a title.
local function name_of(axis, value)
  return type(value) ~= "number" and tostring(value)
    or ("%s = %s"):format(axis, text_table.format_cell(value))
end

--- Makes bars of result rows ({config =, metrics =}): a panel for every value of
-- opts.panel, and in it a bar for every row, named by its opts.bar and, if it has one,
-- its opts.split. opts.limit is a metric: what the value could be at most, which is drawn
-- as a line across the bar.
---@param rows table[]
---@param opts {value: string, bar: string, split?: string, panel?: string,
---  limit?: string, where?: table, title?: string, xlabel?: string,
---  limit_label?: string, format?: string, file?: string}
---@return kvlab.bars
function M.bars(rows, opts)
  options.check("plot.bars", opts, BARS)
  rows = text_table.where(rows, opts.where)
  local panels, panel_of, has_limit = {}, {}, false
  for _, row in ipairs(rows) do
    local key = opts.panel and row.config[opts.panel] or ""
    local value = row.metrics[opts.value]
    if is_finite(value) then
      local panel = panel_of[key]
      if not panel then
        panel = { title = opts.panel and name_of(opts.panel, key), bars = {} }
        panels[#panels + 1], panel_of[key] = panel, panel
      end
      local own = opts.split and row.config[opts.split]
      local series = tostring(row.config[opts.bar])
      local low, high = text_table.interval_of(row, opts.value)
      local limit = opts.limit and row.metrics[opts.limit]
      has_limit = has_limit or limit ~= nil
      table.insert(panel.bars, { series = series, value = value, low = low, high = high,
        limit = is_finite(limit) and limit or nil,
        name = own and series .. ", " .. name_of(opts.split, own) or series })
    end
  end
  if #panels == 0 then panels[1] = { bars = {} } end
  local xlabel = opts.xlabel or opts.value
  return { kind = "bars", title = opts.title or xlabel .. " by " .. opts.bar,
    file = opts.file or opts.value, xlabel = xlabel, format = opts.format,
    panels = panels, limit = has_limit and (opts.limit_label or opts.limit) or nil,
    are_policies = opts.bar == "policy" }
end

--- Runs gnuplot on a script. Returns what gnuplot writes, or nil and a reason.
local function run(script)
  local probe = io.popen(files.shell_line { "command", "-v", M.gnuplot }
    .. " 2>/dev/null")
  local found = probe:read "*l"
  probe:close()
  if not found then return nil, M.gnuplot .. " is not installed: no plots are drawn" end
  local path = os.tmpname()
  local is_written, why = pcall(files.write, path, script)
  if not is_written then
    os.remove(path)
    return nil, why
  end
  local problem_path = path .. ".problem"
  local pipe = io.popen(("%s 2>%s"):format(files.shell_line { M.gnuplot, path },
    files.shell_line { problem_path }))
  local output = pipe:read "*a"
  pipe:close()
  local problem = files.read(problem_path) or ""
  os.remove(path)
  os.remove(problem_path)
  if output:find "%S" then return output end
  local terminal = problem:find "ambiguous terminal" and script:match "set terminal (%l+)"
  if terminal then
    return nil, ("%s was built without %s: another one is needed, such as Debian's"
      .. " gnuplot-nox"):format(M.gnuplot, terminal)
  end
  return nil, "gnuplot drew nothing: " .. problem:gsub("%s+", " ")
end

local MAKERS = { timeline = timeline, heat_map = heat_map, bars = bars }

-- How a whole file of each format begins and ends.
local WHOLE = {
  svg = { "^<%?xml", "</svg>%s*$" }, pdf = { "^%%PDF%-", "%%%%EOF%s*$" },
  png = { "^\137PNG\r\n", "IEND....$" },
}

--- Draws a plot, heat map or timeline. Returns the contents of a file, or nil and a
-- reason when gnuplot is missing, fails, or cannot write the format.
---@param p kvlab.plot|kvlab.heat_map|kvlab.timeline
---@param format "svg"|"pdf"|"png"
---@return string|nil picture, string|nil reason
function M.draw(p, format)
  local maker = MAKERS[p.kind] or lines
  local picture, reason = run(maker.script(p, format))
  if not picture then return nil, reason end
  local whole = WHOLE[format]
  if not (picture:find(whole[1]) and picture:sub(-64):find(whole[2])) then
    return nil, "gnuplot did not finish"
  elseif format ~= "svg" then
    return picture
  end
  local svg = picture:gsub("<g [^>]*>%s*<text>%s*</text>%s*</g>", "")
    :gsub("<g [^>]*>%s*</g>", "")
  return p.kind == "heat_map" and heat_map.join_boxes(svg) or svg
end

--- Draws a plot, heat map or timeline as an SVG picture; as M.draw with "svg".
---@param p kvlab.plot|kvlab.heat_map|kvlab.timeline
---@return string|nil svg, string|nil reason
function M.svg(p) return M.draw(p, "svg") end

--- Draws a plot, heat map or timeline into a file, whose format its name tells: .svg,
-- .pdf or .png. Returns the path, or nil and a reason when gnuplot is missing, fails, or
-- cannot write the format. Raises for other names, and when the file cannot be written.
---@param p kvlab.plot|kvlab.heat_map|kvlab.timeline
---@param path string
---@return string|nil path, string|nil reason
function M.write(p, path)
  local format = path:match "%.(%l+)$"
  if not WHOLE[format] then
    error(("plot.write: path is %s, expected a name that ends in .svg, .pdf or .png")
      :format(path), 2)
  end
  local picture, reason = M.draw(p, format)
  if not picture then return nil, reason end
  files.write(path, picture)
  return path
end

--- Draws a plot or heat map in characters, one panel below the other. Returns nil and a
-- reason when gnuplot is missing or fails; heat maps do not need it. It cannot draw
-- timelines or bars.
---@param p kvlab.plot|kvlab.heat_map
---@param columns? integer  width of the terminal (79)
---@param height? integer   of one panel, in lines (24)
---@param is_coloured? boolean  draw a heat map in the terminal's colours
---@return string|nil text, string|nil reason
function M.text(p, columns, height, is_coloured)
  if p.kind == "heat_map" then return heat_map.text(p, columns or 79, is_coloured) end
  if p.kind == "timeline" or p.kind == "bars" then
    error(("plot.text draws no %s; plot.svg does"):format(
      p.kind == "bars" and "bars" or "timelines"), 2)
  end
  return run(lines.text_script(p, columns or 79, height or 24))
end

local function is_lines(x)
  return type(x) == "table" and type(x.panels) == "table" and type(x.names) == "table"
    and type(x.xtics) == "table"
end
local PICTURE = { "a plot, heat map or timeline", function(x)
  return type(x) == "table" and ((x.kind == "heat_map" or x.kind == "bars")
    and type(x.panels) == "table" or timeline.TIMELINE[2](x) or is_lines(x))
end }
local SIZE = options.optional(options.within(1, 10000))
arguments.functions(M, "plot", {
  lines = { rows = text_table.ROWS }, bars = { rows = text_table.ROWS },
  heat_maps = { rows = text_table.ROWS },
  draw = { p = PICTURE, format = gnuplot.FORMAT }, svg = { p = PICTURE },
  write = { p = PICTURE, path = options.string },
  text = { p = PICTURE, columns = SIZE, height = SIZE },
})

return M
