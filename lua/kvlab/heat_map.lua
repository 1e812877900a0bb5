--- Heat maps of plot.lua: a matrix as colours, in characters or as a gnuplot script.
local gnuplot = require "kvlab.gnuplot"
local text_table = require "kvlab.table"

local M = {}

---@class kvlab.heat_map
---@field kind "heat_map"
---@field values number[]   row-major
---@field rows integer
---@field columns integer
---@field title string

local ROWS_MAX, MARGIN = 40, 10 -- of a heat map in a terminal; columns left of it
local RAMP = " .:-=+*#%@" -- without colours
-- Twelve steps of viridis in the 256 colours of a terminal, dark to light.
local SHADES = { 53, 54, 60, 61, 67, 31, 37, 36, 35, 77, 149, 227 }

local function is_finite(x) return x == x and math.abs(x) ~= math.huge end

--- The mean of each cell, of its finite numbers, when `n` by `m` numbers go into `rows`
-- by `columns` cells; nan where there are none.
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

local function range(values)
  local low, high = math.huge, -math.huge
  for _, x in ipairs(values) do
    if is_finite(x) then low, high = math.min(low, x), math.max(high, x) end
  end
  return low, high
end

--- The map in characters, the index of a row at its left.
---@param p kvlab.heat_map
---@param room integer       columns of the terminal
---@param is_coloured boolean
---@return string
function M.text(p, room, is_coloured)
  local n, m = p.rows, p.columns
  local rows, columns = math.min(n, ROWS_MAX), math.min(m, room - MARGIN)
  local wide = math.max(1, math.min(4, math.floor((room - MARGIN) / columns)))
  local cells = shrink(p.values, n, m, rows, columns)
  local low, high = range(cells)
  local steps = is_coloured and #SHADES or #RAMP
  local function cell_text(x)
    if x ~= x then return ("?"):rep(wide) end
    local step = high > low and math.floor((x - low) / (high - low) * steps) or 0
    step = math.min(step, steps - 1) + 1
    if not is_coloured then return RAMP:sub(step, step):rep(wide) end
    return ("\27[48;5;%dm%s"):format(SHADES[step], (" "):rep(wide))
  end
  local lines = {}
  for r = 0, rows - 1 do
    local words = {}
    for c = 1, columns do words[c] = cell_text(cells[r * columns + c]) end
    lines[#lines + 1] = ("%7d  %s%s"):format(math.floor(r * n / rows),
      table.concat(words), is_coloured and "\27[0m" or "")
  end
  local number = text_table.format_number
  if low > high then
    lines[#lines + 1] = "no finite numbers"
  else
    lines[#lines + 1] = ("%7s  %s (%s) ... %s"):format("", number(low),
      is_coloured and "dark" or "blank", number(high))
  end
  if rows * columns < n * m then
    lines[#lines] = ("%s, means of %d x %d numbers"):format(lines[#lines],
      math.ceil(n / rows), math.ceil(m / columns))
  end
  return table.concat(lines, "\n") .. "\n"
end

--- A gnuplot script that writes the map as an SVG picture.
---@param p kvlab.heat_map
---@return string
function M.svg_script(p)
  local quote = gnuplot.quote
  local lines = {
    "set encoding utf8",
    "set terminal svg size 640,480 dynamic noenhanced background 'white'"
      .. " font 'sans-serif,14'",
    "set title " .. quote(p.title), "set tics out nomirror",
    "set palette defined (0 '#440154', 1 '#3b528b', 2 '#21918c', 3 '#5ec962',"
      .. " 4 '#fde725')", -- viridis
    "set autoscale xfix", "set autoscale yfix", "set yrange [*:*] reverse", "unset key",
    "$m << EOD",
  }
  for r = 0, p.rows - 1 do
    local words = {}
    for c = 1, p.columns do
      local x = p.values[r * p.columns + c]
      words[c] = is_finite(x) and ("%.9g"):format(x) or "NaN"
    end
    lines[#lines + 1] = table.concat(words, " ")
  end
  lines[#lines + 1] = "EOD\nplot $m matrix with image\n"
  return table.concat(lines, "\n")
end

return M
