--- The parts of a gnuplot script that all pictures share: the head, the place of a panel,
-- and the legend.
local options = require "kvlab.options"

local M = {}

local GRID = "\"#b0808080\"" -- alpha first; suits a light and a dark page

M.TITLE, M.LEGEND_LINE, M.LETTER = 44, 29, 7.6

--- Quotes text for gnuplot in single quotes, where '' is the only escape.
---@param text any
---@return string
function M.quote(text)
  return "'" .. tostring(text):gsub("%c", " "):gsub("'", "''") .. "'"
end
local quote = M.quote

--- Writes tics {position, text} as gnuplot reads them.
---@param list kvlab.tic[]
---@return string
function M.write_tics(list)
  local words = {}
  for i, tic in ipairs(list) do words[i] = ("%s %.17g"):format(quote(tic[2]), tic[1]) end
  return "(" .. table.concat(words, ", ") .. ")"
end

-- A pixel of the layout is a point of a PDF, and 2 x 2 pixels of a PNG. The scales make
-- texts, markers, lines and dashes as large as those of the SVG.
local TERMINALS = {
  svg = "svg size %d,%d dynamic",
  pdf = "pdfcairo size %.5fin,%.5fin fontscale 0.75 linewidth 2 pointscale 1.5",
  png = "pngcairo size %d,%d fontscale 1.5 linewidth 2 pointscale 3 dashlength 0.5",
}
local SCALE = { svg = 1, pdf = 1 / 72, png = 2 }

--- A format of pictures, as an option.
M.FORMAT = options.one_of("svg", "pdf", "png")

--- The head of every script: the terminal, frame, tics, grid, and the title.
---@param format "svg"|"pdf"|"png"
---@param width integer   pixels of an SVG
---@param height integer
---@param title? string
---@return string[]  # the lines
function M.begin(format, width, height, title)
  title = title or ""
  local size = math.max(10, math.min(17, width / (0.56 * math.max(#title, 1))))
  return {
    "set encoding utf8",
    "set terminal " .. TERMINALS[format]:format(width * SCALE[format],
      height * SCALE[format])
      .. " noenhanced background \"white\" font \"sans-serif,14\"",
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

--- Adds the end of every script: the legend, right of the panels. The legend is an
-- empty plot with all keys. It is as high as the picture, because gnuplot drops the keys
-- for which a plot has no room.
---@param out string[]
---@param picture {width: integer, height: integer}
---@param legend {left: number, top: number, length: number, items: string[],
---  title?: string} left and top in pixels; length of a key's line or box in letters;
---  items: what `plot` draws, with titles
function M.finish(out, picture, legend)
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

return M
