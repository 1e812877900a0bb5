--- Draws the heat maps of plot.lua, which show matrices as colours, in characters or as a
-- gnuplot script. All panels of a map have the same rows, columns and colours, so that
-- they can be compared.
--
-- In a picture, cells are rectangles and not an image, since viewers blur images when
-- they enlarge them. Neighbours of one colour become one rectangle. If a map has more
-- cells than a picture can show, the picture shows means of several cells, and its title
-- says so.
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
---@field ends? string[]    words for the least and the greatest value, where there are no
--                           others: "no", "yes"
---@field row_names? string[]     default: the rows' numbers, from 0
---@field column_names? string[]
---@field low? number       where the colours begin; default: at the least value
---@field high? number      where they end; default: at the greatest value
---@field format? string    writes the number into each cell that has room for it

-- In a terminal: how many rows a panel may have, and how many columns its margin takes.
local ROWS_MAX, MARGIN = 40, 10
local RAMP = " .:-=+*#%@" -- for a terminal without colours
-- Twelve steps of viridis in the 256 colours of a terminal, dark to light.
local SHADES = { 53, 54, 60, 61, 67, 31, 37, 36, 35, 77, 149, 227 }
local TWO = "set palette defined (0 '#440154', 1 '#440154', 1 '#fde725', 2 '#fde725')"
local VIRIDIS = "set palette defined (0 '#440154', 1 '#3b528b', 2 '#21918c', 3 '#5ec962',"
  .. " 4 '#fde725')"

-- Pixels of an SVG picture: the size of a cell, and the least and the greatest width and
-- height of a panel, if there is only one and if there are several.
local CELL = { width = 46, height = 26 }
local ONLY = { least = { 300, 100 }, most = { 720, 480 } }
local SEVERAL = { least = { 170, 60 }, most = { 330, 260 } }
local ROOM = { left = 48, right = 18, top = 30, bottom = 62 } -- around each panel
local COLUMNS_MAX, BAR, LINE = 4, 14, 17
-- The least pixels of a cell, the colours, the most rectangles of a picture, and how many
-- pixels a rectangle goes below its neighbours.
local CELL_LEAST, STEPS, BOXES_MAX, BLEED = 2, 32, 60000, 0.4
local TIC_LETTER = 12 -- gnuplot's distance from axis to label, for each letter of a tic

--- Shrinks `n` by `m` numbers: each cell gets the mean of the finite numbers among `down`
-- by `across` of them, or nan if there is none.
local function shrink(values, n, m, down, across)
  local sums, counts = {}, {}
  local rows, columns = math.ceil(n / down), math.ceil(m / across)
  for i = 0, n - 1 do
    local row = math.floor(i / down) * columns
    for j = 0, m - 1 do
      local x, cell = values[i * m + j + 1], row + math.floor(j / across) + 1
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

---@class kvlab.heat_map.cells
---@field panels number[][]  row-major
---@field rows integer
---@field columns integer
---@field down integer    rows of the map in one row of cells
---@field across integer
---@field low number      the ends of the colours; low is above high when no number is
---@field high number     finite

--- Shrinks every panel to at most this many rows and columns.
---@return kvlab.heat_map.cells
local function fit(p, rows_most, columns_most)
  local down, across = math.ceil(p.rows / rows_most), math.ceil(p.columns / columns_most)
  local panels, low, high = {}, math.huge, -math.huge
  for i, panel in ipairs(p.panels) do
    panels[i] = shrink(panel.values, p.rows, p.columns, down, across)
    for _, x in ipairs(panels[i]) do
      if is_finite(x) then low, high = math.min(low, x), math.max(high, x) end
    end
  end
  if low <= high then low, high = p.low or low, p.high or high end
  return { panels = panels, rows = math.ceil(p.rows / down),
           columns = math.ceil(p.columns / across), down = down, across = across,
           low = low, high = high }
end

--- Text that says how many numbers a cell is the mean of; empty for one.
local function mean_of(cells)
  return cells.down * cells.across > 1
    and (", means of %d x %d numbers"):format(cells.down, cells.across) or ""
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
  local fitted = fit(p, ROWS_MAX, room - MARGIN)
  local columns, low, high = fitted.columns, fitted.low, fitted.high
  local wide = math.max(1, math.min(4, math.floor((room - MARGIN) / columns)))
  local lines = {}
  for i, cells in ipairs(fitted.panels) do
    if p.panels[i].title then lines[#lines + 1] = p.panels[i].title end
    for r = 0, fitted.rows - 1 do
      local words, first = {}, r * fitted.down
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
  lines[#lines + 1] = key .. mean_of(fitted)
  return table.concat(lines, "\n") .. "\n"
end

-- ---- gnuplot --------------------------------------------------------------------------

local function clamp(x, low, high) return math.max(low, math.min(x, high)) end

--- The pixels of a panel's side: cells of whole pixels, so that all look equally wide.
local function side(cells, wanted, least, most)
  local pixels = clamp(wanted * cells, least, most) / cells
  return cells * math.max(CELL_LEAST, math.floor(pixels))
end

local function make_layout(p, rows, columns)
  local size = #p.panels == 1 and ONLY or SEVERAL
  local across = #p.panels > 4 and #p.panels <= 6 and 3
    or math.min(#p.panels, COLUMNS_MAX)
  local l = {
    columns = across,
    left = ROOM.left + TIC_LETTER * gnuplot.longest(p.row_names or { tostring(p.rows) }),
    panel = { width = side(columns, CELL.width, size.least[1], size.most[1]),
              height = side(rows, CELL.height, size.least[2], size.most[2]) },
  }
  l.across = l.left + l.panel.width + ROOM.right
  l.down = ROOM.top + l.panel.height + ROOM.bottom
  l.plots = across * l.across
  l.width = math.ceil(l.plots + 100)
  l.height = gnuplot.TITLE + math.ceil(#p.panels / across) * l.down
  return l
end

--- The tics along an axis of n cells: the names, or else round numbers; only as many as
-- have room.
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

--- The rectangles of a panel: neighbours of one colour, along a row and then down. Each
-- is { first column, first row, columns, rows, step of the colours }.
local function merge(cells, rows, columns, low, high)
  local list, open = {}, {}
  local function step_of(x)
    return is_finite(x) and high > low
      and math.floor(clamp((x - low) / (high - low), 0, 1) * STEPS + 0.5)
      or is_finite(x) and STEPS / 2 or nil
  end
  for r = 0, rows - 1 do
    local still, c = {}, 0
    while c < columns do
      local step, first = step_of(cells[r * columns + c + 1]), c
      repeat c = c + 1
      until c == columns or step_of(cells[r * columns + c + 1]) ~= step
      if step then
        local key = ("%d %d %d"):format(first, c, step)
        local box = open[key]
        if not box then
          box = { first, r, c - first, 0, step }
          list[#list + 1] = box
        end
        box[4], still[key] = box[4] + 1, box
      end
    end
    open = still
  end
  table.sort(list, function(a, b)
    if a[5] ~= b[5] then return a[5] < b[5] end
    if a[2] ~= b[2] then return a[2] < b[2] end
    return a[1] < b[1]
  end)
  return list
end

--- Adds the rectangles of a panel as a data block; they are sorted by colour, so that
-- plot.svg can join those of one colour. Each extends a little under its neighbours to
-- the right and below, because otherwise a viewer would show the page between two edges.
local function add_cells(out, name, p, panel, cells, boxes)
  out[#out + 1] = "$" .. name .. " << EOD"
  local low, high = cells.low, cells.high
  local wide, tall = cells.across / p.columns, cells.down / p.rows
  for _, box in ipairs(boxes) do
    local x0, y0 = box[1] * wide, box[2] * tall
    local x1 = math.min(x0 + box[3] * wide + BLEED / panel.width, 1)
    local y1 = math.min(y0 + box[4] * tall + BLEED / panel.height, 1)
    out[#out + 1] = ("%.6g %.6g %.6g %.6g %.6g %.6g %.9g"):format(x0, y0, x0, x1, y0, y1,
      high > low and low + (high - low) * box[5] / STEPS or low)
  end
  out[#out + 1] = "EOD"
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

--- Adds the axes and the colours. Both axes go from 0 to 1. is_mean: cells are means of
-- several values.
local function add_axes(out, p, l, low, high, is_mean)
  if low >= high then -- no numbers, or all are equal: a range around them
    local middle = low == high and low or 0
    low, high = middle - 0.5, middle + 0.5
  end
  local quote = gnuplot.quote
  out[#out + 1] = "unset grid\nset tics scale 0.4\nset style fill solid noborder\n"
    .. VIRIDIS
  out[#out + 1] = ("set xrange [0:1]\nset yrange [1:0]\nset cbrange [%.9g:%.9g]"):format(
    low, high)
  out[#out + 1] = "set xtics " .. axis_tics(p.column_names, p.columns, l.panel.width)
  out[#out + 1] = "set ytics " .. axis_tics(p.row_names, p.rows, l.panel.height, true)
  if p.ends and not is_mean then
    local step = (high - low) / 4
    out[#out + 1] = ("%s\nset cbtics (%s %.9g, %s %.9g) scale 0"):format(TWO,
      quote(p.ends[1]), low + step, quote(p.ends[2]), high - step)
  else
    out[#out + 1] = "set cbtics " .. gnuplot.write_tics(tics.round(low, high))
      .. " scale 0.4"
  end
  out[#out + 1] = ("set cblabel %s offset 1,0\n%s"):format(quote(p.zlabel or ""),
    place_bar(l))
end

--- Shrinks the panels to what a picture can show, and finds their rectangles.
local function cells_of(p)
  local most = #p.panels == 1 and ONLY.most or SEVERAL.most
  local rows, columns = most[2] / CELL_LEAST, most[1] / CELL_LEAST
  while true do
    local cells, boxes, count = fit(p, rows, columns), {}, 0
    for i, panel in ipairs(cells.panels) do
      boxes[i] = merge(panel, cells.rows, cells.columns, cells.low, cells.high)
      count = count + #boxes[i]
    end
    if count <= BOXES_MAX then return cells, boxes end
    rows, columns = rows / 1.5, columns / 1.5
  end
end

--- A gnuplot script that writes the map as a picture.
---@param p kvlab.heat_map
---@param format? "svg"|"pdf"|"png"
---@return string
function M.script(p, format)
  local quote, cells, boxes = gnuplot.quote, cells_of(p)
  local low, high, l = cells.low, cells.high, make_layout(p, cells.rows, cells.columns)
  local out = gnuplot.begin(format or "svg", l.width, l.height,
    (p.title or "") .. mean_of(cells))
  add_axes(out, p, l, low, high, cells.down * cells.across > 1)
  local has_room = p.format and l.panel.width / cells.columns >= 34
    and l.panel.height / cells.rows >= 15
  for i, panel in ipairs(p.panels) do
    local column, row = (i - 1) % l.columns, math.floor((i - 1) / l.columns)
    out[#out + 1] = gnuplot.place(l, l.panel, column * l.across + l.left,
      gnuplot.TITLE + row * l.down + ROOM.top)
    out[#out + 1] = ("set title %s\nset xlabel %s\nset ylabel %s"):format(
      quote(panel.title or ""), quote(i + l.columns > #p.panels and p.xlabel or ""),
      quote(column == 0 and p.ylabel or ""))
    local name, is_any = "m" .. i, #boxes[i] > 0
    add_cells(out, name, p, l.panel, cells, boxes[i])
    local numbers = has_room
      and add_numbers(out, name, p, cells.panels[i], low, high) or ""
    out[#out + 1] = is_any and ("plot $%s with boxxyerror lc palette%s"):format(name,
        numbers)
      or "set label 2 'no values' at graph 0.5, graph 0.5 center\nplot NaN\nunset label 2"
    if i == 1 then out[#out + 1] = "unset label 1" end
    if is_any then out[#out + 1] = "unset colorbox" end -- one is enough
  end
  out[#out + 1] = "unset multiplot\n"
  return table.concat(out, "\n")
end

--- A rectangle as a part of an SVG path, from the points of a polygon.
local function path_of(points)
  local x0, x1, y0, y1 = math.huge, -math.huge, math.huge, -math.huge
  for x, y in points:gmatch "([%d.-]+),([%d.-]+)" do
    x, y = math.floor(x * 10 + 0.5) / 10, math.floor(y * 10 + 0.5) / 10
    x0, x1, y0, y1 = math.min(x0, x), math.max(x1, x), math.min(y0, y), math.max(y1, y)
  end
  return ("M%.5g %.5gh%.3gv%.3gH%.5gz"):format(x0, y0, x1 - x0, y1 - y0, x0)
end

--- Joins the rectangles of one colour that follow each other in gnuplot's SVG into one
-- path, which takes a fifth of the bytes.
---@param svg string
---@return string
function M.join_boxes(svg)
  return (svg:gsub("(<g stroke='none' shape%-rendering='crispEdges'>)(.-)</g>",
    function(head, polygons)
      local out, now = { head }, nil
      for fill, points in polygons:gmatch "fill = '(.-)' points = '(.-)'" do
        if fill ~= now then
          out[#out + 1] = (now and "'/>\n" or "\n") .. "<path fill='" .. fill .. "' d='"
        end
        out[#out + 1], now = path_of(points), fill
      end
      return table.concat(out) .. "'/>\n</g>"
    end))
end

return M
