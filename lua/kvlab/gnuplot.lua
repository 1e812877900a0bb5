--- The gnuplot script of a plot (kvlab.plot says what a plot is).
local M = {}

-- Okabe and Ito's colours without yellow and black, which vanish on white or on dark;
-- filled markers first. After one round the lines are dashed and the markers hollow.
local COLOURS = {
  "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c",
}
local FILLED, HOLLOW = { 7, 5, 9, 13, 11, 15, 7 }, { 6, 4, 8, 12, 10, 14, 6 }
local GRID = "\"#b0808080\"" -- alpha comes first: fit for a light and a dark page

-- Pixels of an SVG picture.
local PANEL = { width = 330, height = 240 }
local ONLY_PANEL = { width = 560, height = 360 }
local ROOM = { left = 86, right = 14, top = 34, bottom = 66 } -- around each panel
local TITLE, LEGEND_LINE, LETTER = 44, 24, 7.6
local COLUMNS_MAX = 3

--- Text as a gnuplot string: single quotes know no escape but ''.
local function quote(text)
  return "'" .. tostring(text):gsub("%c", " "):gsub("'", "''") .. "'"
end

--- The least and greatest x and y of all panels: panels are there to be compared.
local function find_ranges(p)
  local x0, x1, y0, y1 = math.huge, -math.huge, math.huge, -math.huge
  for _, panel in ipairs(p.panels) do
    for _, points in pairs(panel.series) do
      for _, point in ipairs(points) do
        x0, x1 = math.min(x0, point[1]), math.max(x1, point[1])
        y0, y1 = math.min(y0, point[2]), math.max(y1, point[2])
      end
    end
  end
  if x0 > x1 then return 0, 1, 0, 1 end
  return x0, x1, y0, y1
end

--- A range with some room around it, and whether it can be logarithmic.
local function widen(low, high, wants_log)
  if wants_log and low > 0 then
    local factor = low < high and (high / low) ^ 0.06 or 1.5
    return low / factor, high * factor, true
  end
  local room = low < high and (high - low) * 0.05 or math.max(math.abs(low) * 0.1, 0.5)
  return low - room, high + room, false
end

--- Tics at the x values themselves, as many as have room in a line of `letters`.
local function make_tics(p, x0, x1, is_log, letters)
  local words, taken = {}, -math.huge
  for _, tic in ipairs(p.xtics) do
    local x, label = tic[1], tic[2]
    local share = is_log and math.log(x / x0) / math.log(x1 / x0) or (x - x0) / (x1 - x0)
    local middle, half = share * letters, (#label + 1) / 2
    if middle - half >= taken then
      words[#words + 1] = ("%s %.17g"):format(quote(label), x)
      taken = middle + half
    end
  end
  return "(" .. table.concat(words, ", ") .. ")"
end

--- 0.25, 1200, 250k, 1.5G: short enough for an axis.
local function short_number(x)
  local magnitude = math.abs(x)
  for _, unit in ipairs { { 1e12, "T" }, { 1e9, "G" }, { 1e6, "M" }, { 1e3, "k" } } do
    if magnitude >= unit[1] and magnitude >= 1e4 then
      return ("%.4g%s"):format(x / unit[1], unit[2])
    end
  end
  return ("%.4g"):format(x)
end

--- Round numbers between low and high: about five on a linear axis; powers of ten on a
-- logarithmic one, with their 2 and 5 when there are few.
local function make_round_tics(low, high, is_log)
  local values = {}
  if is_log then
    local steps = high / low < 300 and { 1, 2, 5 } or { 1 }
    for power = math.floor(math.log10(low)), math.ceil(math.log10(high)) do
      for _, step in ipairs(steps) do values[#values + 1] = step * 10 ^ power end
    end
  else
    local rough = (high - low) / 5
    local base = 10 ^ math.floor(math.log10(rough))
    local step = base * (rough / base < 1.5 and 1 or rough / base < 3.5 and 2
      or rough / base < 7.5 and 5 or 10)
    for i = math.ceil(low / step), math.floor(high / step) do
      values[#values + 1] = i * step
    end
  end
  local words = {}
  for _, y in ipairs(values) do
    if y >= low and y <= high then
      y = y == 0 and 0 or y -- not -0
      words[#words + 1] = ("'%s' %.17g"):format(short_number(y), y)
    end
  end
  return "(" .. table.concat(words, ", ") .. ")"
end

--- Ranges, scales and tics, the same for every panel.
local function add_axes(out, p, letters)
  local x0, x1, y0, y1 = find_ranges(p)
  local is_logx, is_logy
  x0, x1, is_logx = widen(x0, x1, p.logx)
  y0, y1, is_logy = widen(y0, y1, p.logy)
  y0, y1 = p.ymin or y0, p.ymax or y1
  if is_logx then out[#out + 1] = "set logscale x" end
  if is_logy then out[#out + 1] = "set logscale y" end
  out[#out + 1] = ("set xrange [%.17g:%.17g]"):format(x0, x1)
  out[#out + 1] = ("set yrange [%.17g:%.17g]"):format(y0, y1)
  out[#out + 1] = "set xtics offset 0,0.3 " .. make_tics(p, x0, x1, is_logx, letters)
  out[#out + 1] = "set ytics " .. make_round_tics(y0, y1, is_logy)
  return x0, x1
end

local function add_block(out, name, points)
  out[#out + 1] = "$" .. name .. " << EOD"
  for _, point in ipairs(points) do
    out[#out + 1] = ("%.17g %.17g"):format(point[1], point[2])
  end
  out[#out + 1] = "EOD"
end

--- Whether the series is one point among longer ones: it is drawn as a level.
local function is_level(panel, points)
  local longest = 0
  for _, others in pairs(panel.series) do longest = math.max(longest, #others) end
  return points and #points == 1 and longest > 1
end

--- One data block for each series of a panel, then the command that draws them all.
local function add_panel(out, p, index, x0, x1, has_titles)
  local panel, items = p.panels[index], {}
  for i, name in ipairs(p.names) do
    local points = panel.series[name]
    local block = ("panel%d_%d"):format(index, i)
    if points then
      if is_level(panel, points) then
        local y = points[1][2]
        add_block(out, block .. "_level", { { x0, y }, { x1, y } })
        items[#items + 1] = ("$%s_level with lines ls %d dt 2 notitle"):format(block, i)
      end
      add_block(out, block, points)
      items[#items + 1] = ("$%s with linespoints ls %d %s"):format(block, i,
        has_titles and "title " .. quote(name) or "notitle")
    end
  end
  if #items == 0 then items[1] = "NaN notitle" end
  out[#out + 1] = "plot " .. table.concat(items, ", \\\n  ")
end

local function add_styles(out, p)
  for i in ipairs(p.names) do
    local at, is_first = (i - 1) % #COLOURS + 1, i <= #COLOURS
    out[#out + 1] = ("set style line %d lc rgb \"%s\" lw 2 pt %d ps 0.8 dt %d"):format(i,
      COLOURS[at], (is_first and FILLED or HOLLOW)[at], is_first and 1 or 4)
  end
end

--- Left, right, top and bottom of a panel's frame as shares of the picture.
local function margins(layout, column, row)
  local left = column * (layout.panel.width + ROOM.left + ROOM.right) + ROOM.left
  local top = TITLE + row * (layout.panel.height + ROOM.top + ROOM.bottom) + ROOM.top
  return ("set lmargin at screen %.5f\nset rmargin at screen %.5f\n"
    .. "set tmargin at screen %.5f\nset bmargin at screen %.5f"):format(
    left / layout.width, (left + layout.panel.width) / layout.width,
    1 - top / layout.height, 1 - (top + layout.panel.height) / layout.height)
end

local function make_layout(p)
  local count = #p.panels
  local columns = count == 4 and 2 or math.min(count, COLUMNS_MAX)
  local rows = math.ceil(count / columns)
  local longest = 0
  for _, name in ipairs(p.names) do longest = math.max(longest, #name) end
  local panel = count == 1 and ONLY_PANEL or PANEL
  local plots = columns * (panel.width + ROOM.left + ROOM.right)
  local layout = {
    panel = panel, columns = columns, rows = rows, plots = plots,
    width = math.ceil(plots + 70 + LETTER * longest),
    height = math.max(TITLE + rows * (panel.height + ROOM.top + ROOM.bottom),
      TITLE + ROOM.top + (#p.names + 1) * LEGEND_LINE),
  }
  return layout
end

--- The legend has a place of its own, right of the panels: an empty plot with all keys.
local function add_legend(out, p, layout)
  local items = {}
  for i, name in ipairs(p.names) do
    local dash = is_level(p.panels[1], p.panels[1].series[name]) and " dt 2" or ""
    items[i] = ("2 with linespoints ls %d%s title %s"):format(i, dash, quote(name))
  end
  local left = (layout.plots + 4) / layout.width
  local top = 1 - (TITLE + ROOM.top - 8) / layout.height
  out[#out + 1] = table.concat({
    "unset title", "unset xlabel", "unset ylabel", "unset border", "unset tics",
    "unset logscale", "unset grid", "set xrange [0:1]", "set yrange [0:1]",
    ("set key at screen %.5f, screen %.5f left top Left reverse"):format(left, top),
    "set key samplen 2.5 spacing 1.35",
    "plot " .. table.concat(items, ", \\\n  "),
  }, "\n")
end

--- A script that writes an SVG picture to its standard output.
---@param p kvlab.plot
---@return string
function M.svg_script(p)
  local layout = make_layout(p)
  local out = {
    "set encoding utf8",
    ("set terminal svg size %d,%d dynamic noenhanced background \"white\""
      .. " font \"sans-serif,14\""):format(layout.width, layout.height),
    "set multiplot",
    "set border 3 lc rgb \"#808080\"",
    "set tics nomirror out scale 0.6 textcolor rgb \"black\"",
    "set grid x y lt 1 lw 1 dt 1 lc rgb " .. GRID,
    "set title offset 0,-0.4", "set xlabel offset 0,0.2", "unset key",
  }
  add_styles(out, p)
  local letters = layout.panel.width / LETTER
  local x0, x1 = add_axes(out, p, letters)
  local title = p.title or ""
  local size = math.max(10, math.min(17, layout.width / (0.56 * math.max(#title, 1))))
  out[#out + 1] = ("set label 1 %s at screen %.5f, screen %.5f font \"sans-serif,%.1f\"")
    :format(quote(title), 14 / layout.width, 1 - 24 / layout.height, size)
  for index, panel in ipairs(p.panels) do
    local column = (index - 1) % layout.columns
    local row = math.floor((index - 1) / layout.columns)
    local is_lowest = index + layout.columns > #p.panels
    out[#out + 1] = margins(layout, column, row)
    out[#out + 1] = "set title " .. quote(panel.title or "")
    out[#out + 1] = "set xlabel " .. quote(is_lowest and p.xlabel or "")
    out[#out + 1] = "set ylabel " .. quote(column == 0 and p.ylabel or "")
    add_panel(out, p, index, x0, x1, false)
    if index == 1 then out[#out + 1] = "unset label 1" end
  end
  add_legend(out, p, layout)
  out[#out + 1] = "unset multiplot\n"
  return table.concat(out, "\n")
end

--- A script that draws with characters, one panel below the other.
---@param p kvlab.plot
---@param columns integer
---@param lines integer
---@return string
function M.text_script(p, columns, lines)
  local out = {
    "set encoding utf8",
    ("set terminal dumb size %d,%d noenhanced mono"):format(columns, lines),
    "set key outside right top", "set tics nomirror",
    "set xlabel " .. quote(p.xlabel or ""), "set ylabel " .. quote(p.ylabel or ""),
  }
  local x0, x1 = add_axes(out, p, columns - 30)
  for index, panel in ipairs(p.panels) do
    local words = { p.title, panel.title }
    out[#out + 1] = "set title " .. quote(table.concat(words, ", "))
    add_panel(out, p, index, x0, x1, true)
  end
  return table.concat(out, "\n") .. "\n"
end

return M
