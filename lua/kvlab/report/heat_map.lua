--- Draws the heat maps of plot.lua, which show matrices as colours, in characters or as a
-- gnuplot script. All panels of a map have the same rows, columns and colours, so that
-- they can be compared.
local gnuplot = require "kvlab.report.gnuplot"
local is_finite = require("kvlab.number").is_finite
local text_table = require "kvlab.report.table"
local tics = require "kvlab.report.tics"

local M = {}

---@class kvlab.heat_map
---@field kind "heat_map"
---@field rows integer      of every panel; row 0 is at the top
---@field columns integer
---@field panels {title?: string, values: number[]}[]  row-major; nan: no value
---@field title? string
---@field file? string      the picture's name in an experiment's folder
---@field xlabel? string
---@field ylabel? string
---@field zlabel? string    what the colours show
---@field row_names? string[]     default: the rows' numbers, from 0
---@field column_names? string[]
---@field low? number       where the colours begin; default: at the least value
---@field high? number      where they end; default: at the greatest value
---@field format? string    writes the number into each cell that has room for it

local ROWS_MAX, MARGIN = 40, 10 -- in a terminal: most rows of a panel, columns left of it
local RAMP = " .:-=+*#%@" -- for a terminal without colours
-- Twelve steps of viridis in the 256 colours of a terminal, dark to light.
local SHADES = { 53, 54, 60, 61, 67, 31, 37, 36, 35, 77, 149, 227 }
local VIRIDIS = "set palette defined (0 '#440154', 1 '#3b528b', 2 '#21918c', 3 '#5ec962',"
  .. " 4 '#fde725')"

-- Pixels of an SVG picture: the size of a cell, and the least and the greatest width and
-- height of a panel, if there is only one and if there are several.
local CELL = { width = 46, height = 26 }
local ONLY = { least = { 300, 100 }, most = { 720, 480 } }
local SEVERAL = { least = { 170, 60 }, most = { 330, 260 } }
local ROOM = { left = 48, right = 18, top = 30, bottom = 62 } -- around each panel
local COLUMNS_MAX, BAR, LINE = 4, 14, 17
local TIC_LETTER = 12 -- gnuplot's distance from axis to label, for each letter of a tic

--- Shrinks `n` by `m` numbers to `rows` by `columns` cells. A cell gets the mean of its
-- finite numbers, or nan if it has none.
local function shrink(values, n, m, rows, columns)
  local sums, counts = {}, {}
  for i = 0, n - 1 do
    local row = math.floor(i * rows / n) * columns
    for j = 0, m - 1 do
      local x, cell = values[i * m + j + 1], row + math.floor(j * columns / m) + 1
      if is_finite(x) then
        sums[cell], counts[cell] = (sums[cell] or 0) + x, (counts[cell] or 0) + 1
      end
    end
  end
  for cell = 1, rows * columns do
    sums[cell] = counts[cell] and sums[cell] / counts[cell] or 0 / 0
  end
  return sums
end

--- Shrinks every panel to at most this many rows and columns. Returns the panels, their
-- rows and columns, and the ends of the colours, low and high; low is above high when no
-- number is finite.
local function fit(p, rows_most, columns_most)
  local rows, columns = math.min(p.rows, rows_most), math.min(p.columns, columns_most)
  local panels, low, high = {}, math.huge, -math.huge
  for i, panel in ipairs(p.panels) do
    panels[i] = shrink(panel.values, p.rows, p.columns, rows, columns)
    for _, x in ipairs(panels[i]) do
      if is_finite(x) then low, high = math.min(low, x), math.max(high, x) end
    end
  end
  if low <= high then low, high = p.low or low, p.high or high end
  return panels, rows, columns, low, high
end

-- ---- characters -----------------------------------------------------------------------

local function cell_text(x, low, high, wide, is_coloured)
  if x ~= x then return (is_coloured and "\27[0m" or "") .. ("?"):rep(wide) end
  local steps = is_coloured and #SHADES or #RAMP
  local step = high > low and math.floor((x - low) / (high - low) * steps) or 0
  step = math.max(0, math.min(step, steps - 1)) + 1
  if not is_coloured then return RAMP:sub(step, step):rep(wide) end
  return ("\27[48;5;%dm%s"):format(SHADES[step], (" "):rep(wide))
end

--- Draws the map in characters, one panel below the other. The name or number of a row is
-- at its left.
---@param p kvlab.heat_map
---@param room integer       columns of the terminal
---@param is_coloured boolean
---@return string
function M.text(p, room, is_coloured)
  local panels, rows, columns, low, high = fit(p, ROWS_MAX, room - MARGIN)
  local wide = math.max(1, math.min(4, math.floor((room - MARGIN) / columns)))
  local lines = {}
  for i, cells in ipairs(panels) do
    if p.panels[i].title then lines[#lines + 1] = p.panels[i].title end
    for r = 0, rows - 1 do
      local words, first = {}, math.floor(r * p.rows / rows)
      for c = 1, columns do
        words[c] = cell_text(cells[r * columns + c], low, high, wide, is_coloured)
      end
      lines[#lines + 1] = ("%7s  %s%s"):format(
        tostring(p.row_names and p.row_names[first + 1] or first):sub(1, 7),
        table.concat(words), is_coloured and "\27[0m" or "")
    end
  end
  local number, key = text_table.format_number, "no finite numbers"
  if low <= high then
    key = ("%7s  %s (%s) ... %s"):format("", number(low),
      is_coloured and "dark" or "blank", number(high))
  end
  if rows * columns < p.rows * p.columns then
    key = ("%s, means of %d x %d numbers"):format(key, math.ceil(p.rows / rows),
      math.ceil(p.columns / columns))
  end
  lines[#lines + 1] = key
  return table.concat(lines, "\n") .. "\n"
end

-- ---- gnuplot --------------------------------------------------------------------------

local function clamp(x, low, high) return math.max(low, math.min(x, high)) end

local function make_layout(p)
  local size = #p.panels == 1 and ONLY or SEVERAL
  local columns = #p.panels > 4 and #p.panels <= 6 and 3
    or math.min(#p.panels, COLUMNS_MAX)
  local l = {
    columns = columns,
    left = ROOM.left + TIC_LETTER * gnuplot.longest(p.row_names or { tostring(p.rows) }),
    panel = { width = clamp(CELL.width * p.columns, size.least[1], size.most[1]),
              height = clamp(CELL.height * p.rows, size.least[2], size.most[2]) },
  }
  l.across = l.left + l.panel.width + ROOM.right
  l.down = ROOM.top + l.panel.height + ROOM.bottom
  l.plots = columns * l.across
  l.width = math.ceil(l.plots + 100)
  l.height = gnuplot.TITLE + math.ceil(#p.panels / columns) * l.down
  return l
end

--- The tics along an axis of n cells: the names, or else numbers at round places; only as
-- many as have room.
local function axis_tics(names, n, pixels, is_down)
  local list, written = {}, {}
  if names then
    for i, name in ipairs(names) do list[i] = { i - 1, tostring(name) } end
  else
    for _, tic in ipairs(tics.round(0, math.max(n - 1, 1))) do
      if tic[1] % 1 == 0 and tic[1] < n then list[#list + 1] = tic end
    end
  end
  for _, tic in ipairs(list) do
    written[tic[1]] = tic[2]
    if is_down then tic[2] = "" end -- all tics are equally high
  end
  local function share(x) return (x + 0.5) / n end
  list = tics.fit(list, share, pixels / (is_down and LINE or gnuplot.LETTER), true)
  for i, tic in ipairs(list) do list[i] = { share(tic[1]), written[tic[1]] } end
  return gnuplot.write_tics(list)
end

--- Adds the cells of a panel as a data block. Returns whether any is finite. gnuplot's
-- images need at least two rows and two columns, so a single one is written twice.
local function add_matrix(out, name, cells, rows, columns)
  local is_any = false
  out[#out + 1] = "$" .. name .. " << EOD"
  for r = 0, rows - 1 do
    local words = {}
    for c = 1, columns do
      local x = cells[r * columns + c]
      is_any = is_any or is_finite(x)
      words[c] = is_finite(x) and ("%.9g"):format(x) or "NaN"
    end
    if columns == 1 then words[2] = words[1] end
    out[#out + 1] = table.concat(words, " ")
  end
  if rows == 1 then out[#out + 1] = out[#out] end
  out[#out + 1] = "EOD"
  return is_any
end

--- Adds the numbers in a panel's cells, light on dark colours and dark on light ones.
local function add_numbers(out, name, p, cells, low, high)
  local parts = {}
  for _, ink in ipairs { "#ffffff", "#1c1e21" } do
    local block = name .. (ink == "#ffffff" and "_light" or "_dark")
    local is_any = false
    out[#out + 1] = "$" .. block .. " << EOD"
    for i, x in ipairs(cells) do
      local is_light = high > low and (x - low) / (high - low) > 0.6
      if is_finite(x) and is_light == (ink ~= "#ffffff") then
        is_any = true
        out[#out + 1] = ("%.5f %.5f %s"):format(((i - 1) % p.columns + 0.5) / p.columns,
          (math.floor((i - 1) / p.columns) + 0.5) / p.rows, p.format:format(x))
      end
    end
    out[#out + 1] = "EOD"
    if is_any then
      parts[#parts + 1] = (", $%s with labels font 'sans-serif,11' tc rgb '%s'"):format(
        block, ink)
    end
  end
  return table.concat(parts)
end

--- Places the bar of colours right of the first row of panels.
local function place_bar(l)
  return ("set colorbox user origin screen %.5f, screen %.5f size screen %.5f, screen"
    .. " %.5f"):format((l.plots + 8) / l.width,
    1 - (gnuplot.TITLE + ROOM.top + l.panel.height) / l.height, BAR / l.width,
    l.panel.height / l.height)
end

--- Adds the axes and the colours. Both axes go from 0 to 1.
local function add_axes(out, p, l, low, high)
  if low >= high then -- no numbers, or all are equal: a range around them
    local middle = low == high and low or 0
    low, high = middle - 0.5, middle + 0.5
  end
  local quote = gnuplot.quote
  out[#out + 1] = "unset grid\nset tics scale 0.4\n" .. VIRIDIS
  out[#out + 1] = ("set xrange [0:1]\nset yrange [1:0]\nset cbrange [%.9g:%.9g]"):format(
    low, high)
  out[#out + 1] = "set xtics " .. axis_tics(p.column_names, p.columns, l.panel.width)
  out[#out + 1] = "set ytics " .. axis_tics(p.row_names, p.rows, l.panel.height, true)
  out[#out + 1] = "set cbtics " .. gnuplot.write_tics(tics.round(low, high))
    .. " scale 0.4"
  out[#out + 1] = ("set cblabel %s offset 1,0\n%s"):format(quote(p.zlabel or ""),
    place_bar(l))
end

--- A gnuplot script that writes the map as an SVG picture.
---@param p kvlab.heat_map
---@return string
function M.svg_script(p)
  local quote, l = gnuplot.quote, make_layout(p)
  local panels, rows, columns, low, high = fit(p, l.panel.height, l.panel.width)
  local out = gnuplot.begin_svg(l.width, l.height, p.title)
  add_axes(out, p, l, low, high)
  local has_room = p.format and l.panel.width / columns >= 34
    and l.panel.height / rows >= 15
  for i, cells in ipairs(panels) do
    local column, row = (i - 1) % l.columns, math.floor((i - 1) / l.columns)
    out[#out + 1] = gnuplot.place(l, l.panel, column * l.across + l.left,
      gnuplot.TITLE + row * l.down + ROOM.top)
    out[#out + 1] = ("set title %s\nset xlabel %s\nset ylabel %s"):format(
      quote(p.panels[i].title or ""),
      quote(i + l.columns > #panels and p.xlabel or ""),
      quote(column == 0 and p.ylabel or ""))
    local name = "m" .. i
    local is_any = add_matrix(out, name, cells, rows, columns)
    local numbers = has_room and add_numbers(out, name, p, cells, low, high) or ""
    out[#out + 1] = is_any and ("plot $%s matrix using (($1+0.5)/%d):(($2+0.5)/%d):3"
      .. " with image%s"):format(name, math.max(columns, 2), math.max(rows, 2), numbers)
      or "set label 2 'no values' at graph 0.5, graph 0.5 center\nplot NaN\nunset label 2"
    if i == 1 then out[#out + 1] = "unset label 1" end
    if is_any then out[#out + 1] = "unset colorbox" end -- one is enough
  end
  out[#out + 1] = "unset multiplot\n"
  return table.concat(out, "\n")
end

return M
