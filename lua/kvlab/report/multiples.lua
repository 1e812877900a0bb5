--- Small multiples, for a line plot of more series than a reader can match with a legend:
-- one small panel for each series, where all others are thin and grey.
local gnuplot = require "kvlab.report.gnuplot"

local M = {}

local SERIES_MAX = 8 -- with a legend
M.PANEL = { width = 168, height = 110 } -- in pixels, as the room around each panel
local ROOM = { between = 18, top = 24, bottom = 26, heading = 24, left = 72, below = 52 }
local KEY = 64 -- pixels of a line in the legend

--- Whether a series has a single point while another series (not a limit) has more. The
-- series is then drawn as a level line.
---@param p kvlab.plot
---@param panel {series: table<string, number[][]>}
---@param points number[][]|nil
---@return boolean|nil
function M.is_level(p, panel, points)
  local longest = 0
  for name, others in pairs(panel.series) do
    if p.style[name] ~= "limit" then longest = math.max(longest, #others) end
  end
  return points and #points == 1 and longest > 1
end

--- The series that are not limits and that, in at least one panel, are not a level line.
local function lines_of(p)
  local list = {}
  for _, name in ipairs(p.names) do
    local is_line = false
    for _, panel in ipairs(p.style[name] ~= "limit" and p.panels or {}) do
      local points = panel.series[name]
      is_line = is_line or points and not M.is_level(p, panel, points)
    end
    if is_line then list[#list + 1] = name end
  end
  return list
end

--- Columns for n small panels: those of 3, 4 and 5 that leave the fewest places empty.
local function columns_for(n)
  local best, least = 5, math.huge
  for columns = 5, 3, -1 do
    if -n % columns < least then best, least = columns, -n % columns end
  end
  return best
end

--- Columns for n series in each of k panels: k, or as many times k as keep the picture
-- from being far taller than wide.
local function columns_beside(n, k)
  local columns = k
  while n * k / columns > 2.5 * columns and columns + k <= 8 do columns = columns + k end
  return columns
end

--- Returns the plot itself if it has at most eight series, and else one with a panel for
-- each series in each panel of p.
---@param p kvlab.plot
---@return kvlab.plot
function M.of(p)
  local focused = lines_of(p)
  if #focused <= SERIES_MAX then return p end
  local small, only = { is_small = true, panels = {} }, not p.panels[2] and p.panels[1]
  small.columns = only and columns_for(#focused)
    or columns_beside(#focused, #p.panels)
  if only and only.title then small.title = p.title .. ", " .. only.title end
  for i, name in ipairs(focused) do
    local is_first = not only and i * #p.panels <= small.columns
    for _, panel in ipairs(p.panels) do
      small.panels[#small.panels + 1] = { focus = name, series = panel.series,
        title = name,
        heading = is_first and panel.title or nil }
    end
  end
  return setmetatable(small, { __index = p })
end

--- The layout, in pixels: the panels share the labels of their axes, and the legend is
-- below.
---@param p kvlab.plot        as M.of returns it
---@param letters_y integer  of the longest number along y
---@param keys integer       of the legend
---@param letters integer    of its longest text
---@return table
function M.layout(p, letters_y, keys, letters)
  local across = M.PANEL.width + ROOM.between
  local down = ROOM.top + M.PANEL.height + ROOM.bottom
  local left = ROOM.left + gnuplot.LETTER * math.max(letters_y - 4, 0)
  local top = gnuplot.TITLE + (p.panels[1].heading and ROOM.heading or 0)
  local bottom = top + math.ceil(#p.panels / p.columns) * down + ROOM.below
  return {
    columns = p.columns, left = left, across = across, down = down,
    top = top + ROOM.top,
    legend = { left = left - 10, top = bottom - 6 },
    width = math.ceil(math.max(left + p.columns * across,
      left + KEY + gnuplot.LETTER * letters)),
    height = bottom + keys * gnuplot.LEGEND_LINE,
    middle = { x = left + (p.columns * across - ROOM.between) / 2,
               y = (top + bottom - ROOM.below) / 2, bottom = bottom - 22 },
  }
end

--- Adds the labels that all small panels share.
---@param out string[]  the script
---@param p kvlab.plot
---@param l table       the layout
function M.add_labels(out, p, l)
  local function label(number, text, x, y, more)
    out[#out + 1] = ("set label %d %s at screen %.5f, screen %.5f center%s"):format(
      number, gnuplot.quote(text or ""), x / l.width, 1 - y / l.height, more or "")
  end
  label(3, p.xlabel, l.middle.x, l.middle.bottom)
  label(4, p.ylabel, 20, l.middle.y, " rotate")
  out[#out + 1] = "set tics font \"sans-serif,11\"\nset title font \"sans-serif,12\""
    .. " offset 0,-0.8\nunset grid"
end

return M
