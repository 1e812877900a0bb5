--- Writes the gnuplot script of a line plot; plot.lua describes the plot.
--
-- A picture of more than eight series has small multiples in place of a legend. Points
-- whose intervals would overlap are moved apart by a few pixels.
local dodge = require "kvlab.report.dodge"
local gnuplot = require "kvlab.report.gnuplot"
local multiples = require "kvlab.report.multiples"
local styles = require "kvlab.report.styles"
local tics = require "kvlab.report.tics"

local M = {}

local quote, LETTER = gnuplot.quote, gnuplot.LETTER
local LIMIT = "#707070" -- a limit is dashed, without markers, in a grey that no series
                        -- has

local OTHERS = 'linespoints lw 1 pt 7 ps 0.3 lc rgb "#c8c8c8"'

-- Pixels of a picture.
local PANEL = { width = 330, height = 240 }
local ONLY_PANEL = { width = 560, height = 360 }
local ROOM = { left = 86, right = 14, top = 34, bottom = 66 } -- around each panel
local COLUMNS_MAX = 3
local DODGE = 7 -- between two intervals

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

--- Adds the ranges, scales and tics, which are the same for every panel. Returns the
-- x axis (both ends, and whether it is logarithmic), the tics, and the number of letters
-- in the longest tic of the y axis.
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
  local ytics, letters_y = tics.round(y0, y1, is_logy, p.is_small and 2), 0
  for _, tic in ipairs(ytics) do letters_y = math.max(letters_y, #tic[2]) end
  out[#out + 1] = "set xtics " .. gnuplot.write_tics(xtics)
  out[#out + 1] = "set ytics " .. gnuplot.write_tics(ytics)
  return { from = x0, to = x1, is_log = is_logx, xtics = xtics, ytics = ytics,
           letters_y = letters_y }
end

--- Returns the series of a panel with points moved apart whose intervals would overlap.
local function dodge_series(p, panel, axis, width)
  local bars, moved = {}, {}
  local function share(x)
    return axis.is_log and math.log(x / axis.from) / math.log(axis.to / axis.from)
      or (x - axis.from) / (axis.to - axis.from)
  end
  local function value(at)
    local part = at / width
    return axis.is_log and axis.from * (axis.to / axis.from) ^ part
      or axis.from + part * (axis.to - axis.from)
  end
  for _, name in ipairs(p.names) do
    moved[name] = panel.series[name] and {}
    for i, point in ipairs(panel.series[name] or {}) do
      moved[name][i] = point
      if point[3] then
        bars[#bars + 1] = { at = share(point[1]) * width, low = point[3],
                            high = point[4], name = name, i = i, point = point }
      end
    end
  end
  for _, bar in ipairs(bars) do bar.was = bar.at end
  dodge.bars(bars, DODGE)
  for _, bar in ipairs(bars) do
    local was = bar.point
    if bar.at ~= bar.was then
      moved[bar.name][bar.i] = { value(bar.at), was[2], was[3], was[4], note = was.note }
    end
  end
  return moved
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

--- How gnuplot draws a series: a limit has no markers.
local function find_form(p, name)
  return p.style[name] == "limit" and "lines" or "linespoints"
end

--- How many later series of a panel have exactly the points of series number i.
local function count_above(p, series, i)
  local points, count = series[p.names[i]], 0
  for j = i + 1, #p.names do
    local other = series[p.names[j]] or {}
    local is_same = #other == #points
    for k = 1, is_same and #points or 0 do
      is_same = is_same and other[k][1] == points[k][1] and other[k][2] == points[k][2]
    end
    count = count + (is_same and 1 or 0)
  end
  return count
end

--- What makes a series wider than those that are drawn over it.
local function wider(p, series, i)
  local count = count_above(p, series, i)
  return count > 0 and (" lw %d ps %.1f"):format(2 + 2 * count, 0.8 + 0.3 * count) or ""
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

local CIRCLE = ("with points pt 6 ps 1.6 lw 1.5 lc rgb \"%s\""):format(LIMIT)

--- Adds the data of all series but the one in focus as one block, with a gap between two.
local function add_others(out, p, panel, name)
  out[#out + 1] = "$" .. name .. " << EOD"
  for _, other in ipairs(p.names) do
    if panel.series[other] and other ~= panel.focus and p.style[other] ~= "limit" then
      for _, point in ipairs(panel.series[other]) do
        out[#out + 1] = ("%.17g %.17g"):format(point[1], point[2])
      end
      out[#out + 1] = ""
    end
  end
  out[#out + 1] = "EOD"
end

--- Adds one data block for each series of a panel, then the command that draws them all.
-- If the panel has a series in focus, the others are grey, except levels and limits.
local function add_panel(out, p, index, axis, series, has_titles)
  local panel, items = p.panels[index], {}
  if panel.focus then
    local block = ("panel%d_others"):format(index)
    add_others(out, p, panel, block)
    -- a series of one point has no line
    items[1] = ("$%s with %s notitle"):format(block, OTHERS)
  end
  for i, name in ipairs(p.names) do
    local points = series[name]
    local block = ("panel%d_%d"):format(index, i)
    local has_level = multiples.is_level(p, panel, points)
    if points and (not panel.focus or name == panel.focus or has_level
      or p.style[name] == "limit") then
      local title = has_titles and "title " .. quote(name) or "notitle"
      local is_point = not (has_level and points[1].has_no_x)
      if has_level then
        local y = points[1][2]
        add_block(out, block .. "_level", { { axis.from, y }, { axis.to, y } })
        items[#items + 1] = ("$%s_level with lines ls %d dt 2 %s"):format(block, i,
          is_point and "notitle" or title)
      end
      if is_point and add_intervals(out, p, block .. "_interval", points) then
        items[#items + 1] = ("$%s_interval with yerrorbars ls %d pt 0 dt 1 lw 1 notitle")
          :format(block, i)
      end
      if is_point then
        add_block(out, block, points)
        items[#items + 1] = ("$%s with %s ls %d%s %s"):format(block,
          find_form(p, name), i, wider(p, series, i), title)
      end
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

--- Computes the layout, in pixels. ROOM.left has room for tics of four letters. With
-- every further letter, gnuplot moves the axis label by 12 pixels.
local function make_layout(p, panel, letters_y)
  local count, notes = #p.panels, p.notes or {}
  local columns = p.columns or count == 4 and 2 or math.min(count, COLUMNS_MAX)
  local left = ROOM.left + 12 * math.max(letters_y - 4, 0)
  local across = left + panel.width + ROOM.right
  local down = ROOM.top + panel.height + ROOM.bottom
  local rows = math.ceil(count / columns)
  local widest = math.max(gnuplot.longest(p.names), gnuplot.longest(notes),
    #(p.legend or "") - 4)
  return {
    columns = columns, left = left, across = across, down = down,
    top = gnuplot.TITLE + ROOM.top,
    legend = { left = columns * across + 4, top = gnuplot.TITLE + ROOM.top - 8 },
    width = math.ceil(columns * across + 70 + LETTER * widest),
    height = math.max(gnuplot.TITLE + rows * down,
      gnuplot.TITLE + ROOM.top + (#p.names + #notes + (p.legend and 2 or 1))
        * gnuplot.LEGEND_LINE),
  }
end

--- The keys of the legend, and the letters of the longest one. Small multiples name their
-- series in their titles.
local function legend_items(p)
  local items, texts = {}, {}
  local function add(form, text)
    items[#items + 1] = ("2 %s title %s"):format(form, quote(text))
    texts[#texts + 1] = text
  end
  if p.is_small then
    add("with " .. OTHERS, "the others")
  end
  for i, name in ipairs(p.names) do
    local points = p.panels[1].series[name]
    local has_level = multiples.is_level(p, p.panels[1], points)
    if not p.is_small or has_level or p.style[name] == "limit" then
      local form = has_level and points[1].has_no_x and "lines" or find_form(p, name)
      add(("with %s ls %d%s"):format(form, i, has_level and " dt 2" or ""), name)
    end
  end
  for _, note in ipairs(p.notes or {}) do add(CIRCLE, note) end
  return items, gnuplot.longest(texts)
end

--- Writes tics, without their texts unless is_written.
local function write_tics(list, is_written)
  local other = {}
  for i, tic in ipairs(list) do other[i] = { tic[1], is_written and tic[2] or "" } end
  return gnuplot.write_tics(other)
end

--- Adds the title and the labels of a panel. A small one has texts along its axes only
-- where no other panel has them.
local function add_texts(out, p, panel, axis, is_first, is_lowest)
  out[#out + 1] = "set title " .. quote(panel.title or "")
  if p.is_small then
    out[#out + 1] = panel.heading and ("set label 5 %s at graph 0.5, graph %.3f center")
      :format(quote(panel.heading), 1 + 34 / multiples.PANEL.height) or "unset label 5"
    out[#out + 1] = ("set xtics %s\nset ytics %s"):format(
      write_tics(axis.xtics, is_lowest), write_tics(axis.ytics, is_first))
  else
    out[#out + 1] = "set xlabel " .. quote(is_lowest and p.xlabel or "")
    out[#out + 1] = "set ylabel " .. quote(is_first and p.ylabel or "")
  end
end

--- A script that writes a picture to its standard output.
---@param p kvlab.plot
---@param format? "svg"|"pdf"|"png"
---@return string
function M.script(p, format)
  p = multiples.of(p)
  local size = p.is_small and multiples.PANEL or #p.panels == 1 and ONLY_PANEL or PANEL
  local axes, keys, letters = {}, legend_items(p)
  local axis = add_axes(axes, p, size.width / LETTER)
  local layout = p.is_small and multiples.layout(p, axis.letters_y, #keys, letters)
    or make_layout(p, size, axis.letters_y)
  local out = gnuplot.begin(format or "svg", layout.width, layout.height, p.title)
  add_styles(out, p)
  out[#out + 1] = table.concat(axes, "\n")
  if p.is_small then multiples.add_labels(out, p, layout) end
  for index, panel in ipairs(p.panels) do
    local column = (index - 1) % layout.columns
    local row = math.floor((index - 1) / layout.columns)
    out[#out + 1] = gnuplot.place(layout, size, column * layout.across + layout.left,
      row * layout.down + layout.top)
    add_texts(out, p, panel, axis, column == 0, index + layout.columns > #p.panels)
    local series = p.is_small and panel.series or dodge_series(p, panel, axis, size.width)
    add_panel(out, p, index, axis, series, false)
    for label = 1, index == 1 and 4 or 0 do out[#out + 1] = "unset label " .. label end
  end
  layout.legend.length, layout.legend.items, layout.legend.title = 2.5, keys, p.legend
  gnuplot.finish(out, layout, layout.legend)
  return table.concat(out, "\n")
end

--- A script that draws with characters, one panel below the other. A panel has more lines
-- if its legend needs them: a second column of keys would leave the plot no room.
---@param p kvlab.plot
---@param columns integer
---@param lines integer
---@return string
function M.text_script(p, columns, lines)
  local out = {
    "set encoding utf8",
    ("set terminal dumb size %d,%d noenhanced mono"):format(columns,
      math.max(lines, #p.names + 7)),
    "set key outside right top maxcols 1", "set tics nomirror",
    "set xlabel " .. quote(p.xlabel or ""), "set ylabel " .. quote(p.ylabel or ""),
  }
  local axis = add_axes(out, p, columns - 30)
  for index, panel in ipairs(p.panels) do
    local words = { p.title, panel.title }
    out[#out + 1] = "set title " .. quote(table.concat(words, ", "))
    add_panel(out, p, index, axis, panel.series, true)
  end
  return table.concat(out, "\n") .. "\n"
end

return M
