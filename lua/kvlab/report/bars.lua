--- Writes the gnuplot script of bars; plot.lua describes them. A bar lies beside its
-- name, with its number at its end, so a reader needs no legend. Panels have their own
-- scales, which all begin at 0. Bars of anything but the policies of lua/policies are
-- pale.
local gnuplot = require "kvlab.report.gnuplot"
local styles = require "kvlab.report.styles"
local table_text = require "kvlab.report.table"
local tics = require "kvlab.report.tics"

local M = {}

-- Pixels of a picture.
local WIDTH, ROW = 330, 26
local ROOM = { right = 30, top = 34, bottom = 66 } -- around each panel
local COLUMNS_MAX = 2
local THICK = 0.36 -- half of a bar, in rows
local INSIDE = 0.17 -- a bar longer than this share of the axis has its number inside
local PALE = 0.5
local LIMIT = "lc rgb \"#000000\" lw 3"

---@class kvlab.bars
---@field kind "bars"
---@field title string
---@field file? string    the picture's name in an experiment's folder
---@field xlabel string
---@field limit? string   what the lines across the bars are
---@field format? string
---@field are_policies boolean  each series is a policy's, with the policy's own colour
---@field panels {title?: string, bars: kvlab.bar[]}[]

---@class kvlab.bar
---@field name string
---@field series string   bars of one series have one colour
---@field value number
---@field limit? number
---@field low? number     the ends of an interval
---@field high? number

local function longest_name(p)
  local names = { "" }
  for _, panel in ipairs(p.panels) do
    for _, bar in ipairs(panel.bars) do names[#names + 1] = bar.name end
  end
  return gnuplot.longest(names)
end

local function make_layout(p)
  local columns, most = math.min(#p.panels, COLUMNS_MAX), 1
  for _, panel in ipairs(p.panels) do most = math.max(most, #panel.bars) end
  local l = { columns = columns, left = 30 + gnuplot.LETTER * longest_name(p),
              height_panel = most * ROW, rows = most }
  l.across = l.left + WIDTH + ROOM.right
  l.down = ROOM.top + l.height_panel + ROOM.bottom
  l.width = math.ceil(columns * l.across)
  l.plots = gnuplot.TITLE + math.ceil(#p.panels / columns) * l.down
  l.height = l.plots + (p.limit and gnuplot.LEGEND_LINE or 0)
  return l
end

--- The styles of all series, by their names.
local function styles_of(p)
  local names, seen = {}, {}
  for _, panel in ipairs(p.panels) do
    for _, bar in ipairs(panel.bars) do
      if not seen[bar.series] then names[#names + 1] = bar.series end
      seen[bar.series] = true
    end
  end
  return styles.of(names, p.are_policies)
end

--- The end of a panel's axis: there is room for the numbers.
local function end_of(panel)
  local most = 0
  for _, bar in ipairs(panel.bars) do
    most = math.max(most, bar.value, bar.limit or 0, bar.high or 0)
  end
  return most > 0 and most * 1.05 or 1
end

--- Adds the data of a panel, and the command that draws it.
local function add_panel(out, p, panel, index, of)
  local parts, most = { "NaN notitle" }, end_of(panel)
  local function add(line, form)
    local block = ("bars%d_%d"):format(index, #parts)
    out[#out + 1] = ("$%s << EOD\n%s\nEOD"):format(block, line)
    parts[#parts + 1] = ("$%s with %s notitle"):format(block, form)
  end
  for i, bar in ipairs(panel.bars) do
    local style, is_inside = of[bar.series], bar.value > INSIDE * most
    add(("0 %d 0 %.9g %g %g"):format(-i, bar.value, -i - THICK, -i + THICK),
      ("boxxyerror lc rgb \"%s\" fs solid %g"):format(style.colour,
        style.is_stranger and PALE or 1))
    if bar.low then
      add(("%.9g %d %.9g %.9g"):format(bar.value, -i, bar.low, bar.high),
        "xerrorbars pt 0 lw 1 lc rgb \"#404040\"")
    end
    if bar.limit then
      add(("%.9g %g 0 %g"):format(bar.limit, -i - 0.45, 0.9),
        "vectors nohead " .. LIMIT)
    end
    add(("%.9g %d %s"):format(bar.value, -i, table_text.format_cell(bar.value, p.format)),
      is_inside and "labels right offset -0.7,0 tc rgb "
          .. (style.is_stranger and "\"#1c1e21\"" or "\"#ffffff\"")
        or "labels left offset 0.7,0")
  end
  out[#out + 1] = "plot " .. table.concat(parts, ", \\\n  ")
end

local function add_axes(out, panel, l)
  local names, high = {}, end_of(panel)
  for i, bar in ipairs(panel.bars) do names[i] = { -i, bar.name } end
  if #names == 0 then names[1] = { -1, "" } end -- without tics, gnuplot adds its own
  out[#out + 1] = ("set xrange [0:%.9g]\nset yrange [%g:-0.4]"):format(high,
    -l.rows - 0.6)
  out[#out + 1] = "set xtics " .. gnuplot.write_tics(tics.round(0, high))
  out[#out + 1] = "set ytics scale 0 " .. gnuplot.write_tics(names)
end

--- A script that writes a picture to its standard output.
---@param p kvlab.bars
---@param format? "svg"|"pdf"|"png"
---@return string
function M.script(p, format)
  local quote, l, of = gnuplot.quote, make_layout(p), styles_of(p)
  local out = gnuplot.begin(format or "svg", l.width, l.height, p.title)
  out[#out + 1] = "unset grid\nset grid x\nset style fill solid noborder"
  for index, panel in ipairs(p.panels) do
    local column, row = (index - 1) % l.columns, math.floor((index - 1) / l.columns)
    out[#out + 1] = gnuplot.place(l, { width = WIDTH, height = l.height_panel },
      column * l.across + l.left, gnuplot.TITLE + row * l.down + ROOM.top)
    out[#out + 1] = ("set title %s\nset xlabel %s"):format(quote(panel.title or ""),
      quote(index + l.columns > #p.panels and p.xlabel or ""))
    add_axes(out, panel, l)
    add_panel(out, p, panel, index, of)
    if index == 1 then out[#out + 1] = "unset label 1" end
  end
  gnuplot.finish(out, l, { left = 20, top = l.plots - 8, length = 2, items = { p.limit
    and ("2 with lines %s title %s"):format(LIMIT, quote(p.limit)) or "NaN notitle" } })
  return table.concat(out, "\n")
end

return M
