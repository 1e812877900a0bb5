--- Writes the gnuplot script of a line plot (plot.lua describes the plot), and the parts
-- that all pictures share: the head, the place of a panel, and the legend.
local styles = require "kvlab.report.styles"
local tics = require "kvlab.report.tics"

local M = {}

local LIMIT = "#707070" -- a limit is dashed, without markers; no series has this grey
local GRID = "\"#b0808080\"" -- alpha first; suits a light and a dark page

-- Pixels of an SVG picture.
local PANEL = { width = 330, height = 240 }
local ONLY_PANEL = { width = 560, height = 360 }
local ROOM = { left = 86, right = 14, top = 34, bottom = 66 } -- around each panel
local COLUMNS_MAX = 3
M.TITLE, M.LEGEND_LINE, M.LETTER = 44, 29, 7.6

--- Quotes text for gnuplot in single quotes, where '' is the only escape.
---@param text any
---@return string
function M.quote(text)
  return "'" .. tostring(text):gsub("%c", " "):gsub("'", "''") .. "'"
end
local quote = M.quote

--- Returns both ends of a point's interval, or y twice if it has none. `lowest` replaces
-- a low end of 0 or less, which a logarithmic axis cannot show: the bar then leaves the
-- picture.
local function ends_of(p, point, lowest)
  local y, low, high = point[2], point[3] or point[2], point[4] or point[2]
  return p.logy and low <= 0 and y > 0 and lowest or low, high
end

--- The least and greatest x and y of all panels. The panels share their axes, so that
-- they can be compared.
local function find_ranges(p)
  local x0, x1, y0, y1 = math.huge, -math.huge, math.huge, -math.huge
  for _, panel in ipairs(p.panels) do
    for _, points in pairs(panel.series) do
      for _, point in ipairs(points) do
        local low, high = ends_of(p, point, point[2])
        x0, x1 = math.min(x0, point[1]), math.max(x1, point[1])
        y0, y1 = math.min(y0, low), math.max(y1, high)
      end
    end
  end
  if x0 > x1 then return 0, 1, 0, 1 end
  return x0, x1, y0, y1
end

--- Widens a range a little at both ends. The third result: can the axis be logarithmic?
local function widen(low, high, wants_log)
  if wants_log and low > 0 then
    local factor = low < high and (high / low) ^ 0.06 or 1.5
    return low / factor, high * factor, true
  end
  local room = low < high and (high - low) * 0.05 or math.max(math.abs(low) * 0.1, 0.5)
  return low - room, high + room, false
end

--- Writes tics {position, text} as gnuplot reads them.
---@param list kvlab.tic[]
---@return string
function M.write_tics(list)
  local words = {}
  for i, tic in ipairs(list) do words[i] = ("%s %.17g"):format(quote(tic[2]), tic[1]) end
  return "(" .. table.concat(words, ", ") .. ")"
end

--- Adds the ranges, scales and tics, which are the same for every panel. Returns both
-- ends of the x axis, and the number of letters in the longest tic of the y axis.
local function add_axes(out, p, letters)
  local x0, x1, y0, y1 = find_ranges(p)
  local is_logx, is_logy
  x0, x1, is_logx = widen(x0, x1, p.logx)
  y0, y1, is_logy = widen(y0, y1, p.logy)
  if p.ymin and (p.ymin > 0 or not is_logy) then y0 = p.ymin end
  y1 = p.ymax or y1
  if is_logx then out[#out + 1] = "set logscale x" end
  if is_logy then out[#out + 1] = "set logscale y" end
  out[#out + 1] = ("set xrange [%.17g:%.17g]"):format(x0, x1)
  out[#out + 1] = ("set yrange [%.17g:%.17g]"):format(y0, y1)
  local function share(x)
    return is_logx and math.log(x / x0) / math.log(x1 / x0) or (x - x0) / (x1 - x0)
  end
  local xtics = #p.xtics > 0 and tics.fit(p.xtics, share, letters, p.xpow2)
    or tics.round(x0, x1, is_logx)
  local ytics, letters_y = tics.round(y0, y1, is_logy), 0
  for _, tic in ipairs(ytics) do letters_y = math.max(letters_y, #tic[2]) end
  out[#out + 1] = "set xtics " .. M.write_tics(xtics)
  out[#out + 1] = "set ytics " .. M.write_tics(ytics)
  return x0, x1, letters_y
end

local function add_block(out, name, points)
  out[#out + 1] = "$" .. name .. " << EOD"
  for _, point in ipairs(points) do
    out[#out + 1] = ("%.17g %.17g"):format(point[1], point[2])
  end
  out[#out + 1] = "EOD"
end

--- Adds the intervals of a series as a data block with the columns x, y, low, high.
-- Returns whether the series has any.
local function add_intervals(out, p, name, points)
  local is_any = false
  for _, point in ipairs(points) do
    if point[3] then
      if not is_any then out[#out + 1] = "$" .. name .. " << EOD" end
      is_any = true
      local low, high = ends_of(p, point, point[2] * 1e-9)
      out[#out + 1] = ("%.17g %.17g %.17g %.17g"):format(point[1], point[2], low, high)
    end
  end
  if is_any then out[#out + 1] = "EOD" end
  return is_any
end

--- Whether a series has a single point while another, which is no limit, has more. It is
-- then drawn as a level line.
local function is_level(p, panel, points)
  local longest = 0
  for name, others in pairs(panel.series) do
    if p.style[name] ~= "limit" then longest = math.max(longest, #others) end
  end
  return points and #points == 1 and longest > 1
end

--- How gnuplot draws a series: a limit has no markers.
local function find_form(p, name)
  return p.style[name] == "limit" and "lines" or "linespoints"
end

--- Adds the points of marked rows. Returns whether there are any.
local function add_marked(out, name, points)
  local marked = {}
  for _, point in ipairs(points) do
    if point.note then marked[#marked + 1] = point end
  end
  if #marked > 0 then add_block(out, name, marked) end
  return #marked > 0
end

local CIRCLE = ("with points pt 6 ps 1.9 lw 1.5 lc rgb \"%s\""):format(LIMIT)

--- Adds one data block for each series of a panel, then the command that draws them all.
local function add_panel(out, p, index, x0, x1, has_titles)
  local panel, items = p.panels[index], {}
  for i, name in ipairs(p.names) do
    local points = panel.series[name]
    local block = ("panel%d_%d"):format(index, i)
    if points then
      if is_level(p, panel, points) then
        local y = points[1][2]
        add_block(out, block .. "_level", { { x0, y }, { x1, y } })
        items[#items + 1] = ("$%s_level with lines ls %d dt 2 notitle"):format(block, i)
      end
      if add_intervals(out, p, block .. "_interval", points) then
        items[#items + 1] = ("$%s_interval with yerrorbars ls %d pt 0 dt 1 lw 1 notitle")
          :format(block, i)
      end
      add_block(out, block, points)
      items[#items + 1] = ("$%s with %s ls %d %s"):format(block, find_form(p, name), i,
        has_titles and "title " .. quote(name) or "notitle")
      if add_marked(out, block .. "_marked", points) then
        items[#items + 1] = ("$%s_marked %s notitle"):format(block, CIRCLE)
      end
    end
  end
  if #items == 0 then
    out[#out + 1] = "set label 2 'no values' at graph 0.5, graph 0.5 center"
    items[1] = "NaN notitle"
  end
  out[#out + 1] = "plot " .. table.concat(items, ", \\\n  ") .. "\nunset label 2"
end

local function add_styles(out, p)
  local coloured = {} -- a limit takes no colour
  for _, name in ipairs(p.names) do
    if p.style[name] ~= "limit" then coloured[#coloured + 1] = name end
  end
  local of = styles.of(coloured, p.are_policies)
  for i, name in ipairs(p.names) do
    local own = of[name]
    out[#out + 1] = own and ("set style line %d lc rgb \"%s\" lw 2 pt %d ps 0.8 dt %d")
        :format(i, own.colour, own.marker, own.dash)
      or ("set style line %d lc rgb \"%s\" lw 2 dt 2"):format(i, LIMIT)
  end
end

--- The head of every SVG script: the terminal, frame, tics, grid, and the title.
---@param width integer   pixels
---@param height integer
---@param title? string
---@return string[]  # the lines
function M.begin_svg(width, height, title)
  title = title or ""
  local size = math.max(10, math.min(17, width / (0.56 * math.max(#title, 1))))
  return {
    "set encoding utf8",
    ("set terminal svg size %d,%d dynamic noenhanced background \"white\""
      .. " font \"sans-serif,14\""):format(width, height),
    "set multiplot",
    "set border 3 lc rgb \"#808080\"",
    "set tics nomirror out scale 0.6 textcolor rgb \"black\"",
    "set grid x y lt 1 lw 1 dt 1 lc rgb " .. GRID,
    "set xtics offset 0,0.3",
    "set title offset 0,-0.4", "set xlabel offset 0,0.2", "unset key",
    ("set label 1 %s at screen %.5f, screen %.5f font \"sans-serif,%.1f\""):format(
      quote(title), 14 / width, 1 - 24 / height, size),
  }
end

--- The commands that place the next plot, in pixels from the picture's top left corner.
---@param picture {width: integer, height: integer}
---@param panel {width: number, height: number}
---@param left number
---@param top number
---@return string
function M.place(picture, panel, left, top)
  return ("set lmargin at screen %.5f\nset rmargin at screen %.5f\n"
    .. "set tmargin at screen %.5f\nset bmargin at screen %.5f"):format(
    left / picture.width, (left + panel.width) / picture.width,
    1 - top / picture.height, 1 - (top + panel.height) / picture.height)
end

--- The length of the longest text, in bytes.
---@param texts string[]
---@return integer
function M.longest(texts)
  local longest = 0
  for _, text in ipairs(texts) do longest = math.max(longest, #text) end
  return longest
end

--- Computes the layout, in pixels. ROOM.left has room for tics of four letters. With
-- every further letter, gnuplot moves the axis label by 12 pixels.
local function make_layout(p, panel, letters_y)
  local count, notes = #p.panels, p.notes or {}
  local columns = count == 4 and 2 or math.min(count, COLUMNS_MAX)
  local left = ROOM.left + 12 * math.max(letters_y - 4, 0)
  local across = left + panel.width + ROOM.right
  local down = ROOM.top + panel.height + ROOM.bottom
  return {
    columns = columns, left = left, across = across, down = down,
    plots = columns * across,
    width = math.ceil(columns * across + 70 + M.LETTER * math.max(M.longest(p.names),
      M.longest(notes), #(p.legend or "") - 4)),
    height = math.max(M.TITLE + math.ceil(count / columns) * down,
      M.TITLE + ROOM.top + (#p.names + #notes + (p.legend and 2 or 1))
        * M.LEGEND_LINE),
  }
end

--- Adds the end of every SVG script: the legend, right of the panels. The legend is an
-- empty plot with all keys. It is as high as the picture, because gnuplot drops the keys
-- for which a plot has no room.
---@param out string[]
---@param picture {width: integer, height: integer}
---@param legend {left: number, top: number, length: number, items: string[],
---  title?: string} left and top in pixels; length of a key's line or box in letters;
---  items: what `plot` draws, with titles
function M.end_svg(out, picture, legend)
  out[#out + 1] = table.concat({
    M.place(picture, picture, 0, 0),
    "unset label", "unset title", "unset xlabel", "unset ylabel", "unset border",
    "unset tics", "unset logscale", "unset grid", "set xrange [0:1]", "set yrange [0:1]",
    ("set key at screen %.5f, screen %.5f left top Left reverse"):format(
      legend.left / picture.width, 1 - legend.top / picture.height),
    ("set key samplen %g spacing 1.35 title %s left"):format(legend.length,
      M.quote(legend.title or "")),
    "plot " .. table.concat(legend.items, ", \\\n  "),
    "unset multiplot\n",
  }, "\n")
end

local function add_legend(out, p, layout)
  local items = {}
  for i, name in ipairs(p.names) do
    local dash = is_level(p, p.panels[1], p.panels[1].series[name]) and " dt 2" or ""
    items[i] = ("2 with %s ls %d%s title %s"):format(find_form(p, name), i, dash,
      quote(name))
  end
  for _, note in ipairs(p.notes or {}) do
    items[#items + 1] = ("2 %s title %s"):format(CIRCLE, quote(note))
  end
  M.end_svg(out, layout, { left = layout.plots + 4, top = M.TITLE + ROOM.top - 8,
                           length = 2.5, items = items, title = p.legend })
end

--- A script that writes an SVG picture to its standard output.
---@param p kvlab.plot
---@return string
function M.svg_script(p)
  local size, axes = #p.panels == 1 and ONLY_PANEL or PANEL, {}
  local x0, x1, letters_y = add_axes(axes, p, size.width / M.LETTER)
  local layout = make_layout(p, size, letters_y)
  local out = M.begin_svg(layout.width, layout.height, p.title)
  add_styles(out, p)
  out[#out + 1] = table.concat(axes, "\n")
  for index, panel in ipairs(p.panels) do
    local column = (index - 1) % layout.columns
    local row = math.floor((index - 1) / layout.columns)
    local is_lowest = index + layout.columns > #p.panels
    out[#out + 1] = M.place(layout, size, column * layout.across + layout.left,
      M.TITLE + row * layout.down + ROOM.top)
    out[#out + 1] = "set title " .. quote(panel.title or "")
    out[#out + 1] = "set xlabel " .. quote(is_lowest and p.xlabel or "")
    out[#out + 1] = "set ylabel " .. quote(column == 0 and p.ylabel or "")
    add_panel(out, p, index, x0, x1, false)
    if index == 1 then out[#out + 1] = "unset label 1" end
  end
  add_legend(out, p, layout)
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
