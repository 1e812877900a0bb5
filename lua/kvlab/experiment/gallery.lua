--- A gallery: one page that shows several experiments, each with its question, its first
-- picture and a link to its report. It needs no network and, but for the links, no other
-- file. The folders may come from anywhere, so the page runs no scripts, and a picture
-- must lie in the entry's own folder and be nothing but a drawing.
local manifests = require "kvlab.experiment.manifest"
local report = require "kvlab.report.report"
local files = require "kvlab.files"

local M = {}

local escape = report.escape

local STYLE = [[
.cards { display: grid; gap: 1.4rem; margin: 2rem 0;
  grid-template-columns: repeat(auto-fill, minmax(min(32rem, 100%), 1fr)) }
article { border: 1px solid var(--line); border-radius: .4rem; padding: 1rem 1.1rem }
h2 { font-size: 1.05rem; line-height: 1.35; margin: 0 0 .2rem }
h2 a { text-decoration: none }
article svg { max-height: 26rem; margin-top: .8rem }
pre { font-size: .85rem; overflow: auto; white-space: pre-wrap; max-height: 18rem;
  margin: .8rem 0 0; padding: .6rem; background: var(--band) }
]]
local LINES_MAX = 24 -- of what a script printed

---@class kvlab.gallery.entry
---@field name string      of the script, and of its folder inside the page's
---@field is_done boolean  it ended well
---@field seconds number
---@field printed string   everything it wrote to the terminal

--- The last lines of a text.
local function tail(text)
  local lines = {}
  for line in text:gmatch "[^\n]+" do lines[#lines + 1] = line end
  return table.concat(lines, "\n", math.max(1, #lines - LINES_MAX + 1))
end

local DRAWS = {} -- the elements of pictures that gnuplot writes
for name in ([[svg title desc defs g path circle rect text tspan line polyline polygon use
  marker filter feFlood feComposite linearGradient radialGradient stop clipPath]])
  :gmatch "%a+" do
  DRAWS[name] = true
end

--- Whether an attribute only draws: it is no script, and it links to nothing outside.
local function is_drawn(name, value)
  return name:find "href$" and value:find "^#" or not name:find "href$"
    and not name:find "^[oO][nN]"
end

--- The position after a tag that begins at `at`; nil when the tag does not belong in a
-- drawing.
local function after_tag(svg, at)
  local name, from = svg:match("^</?(%a+)()", at)
  while DRAWS[name] do
    local key, quote, first = svg:match("^%s+([%a][%w:_-]*)%s*=%s*([\"'])()", from)
    if not key then return svg:match("^%s*/?>()", from) end
    local last = svg:find(quote, first, true)
    if not last or not is_drawn(key, svg:sub(first, last - 1)) then return nil end
    from = last + 1
  end
end

--- Whether a picture has nothing but text, and elements and attributes that draw.
local function is_drawing(svg)
  local at = svg:find "<svg[%s>]"
  while at do
    at = after_tag(svg, at) or svg:match("^<!%-%-[^<>-]*%-%->()", at)
    local next_tag = at and svg:find("<", at, true)
    if at and not next_tag then return svg:find "</svg>" == at - #"</svg>" end
    at = next_tag
  end
  return false
end

--- The first picture of a folder's manifest; or nil and, if there is a picture, the
-- reason why it is not shown.
local function read_picture(here, manifest)
  local pictures = manifest.pictures
  local name = type(pictures) == "table" and pictures[1]
  if not name then return nil end
  if type(name) ~= "string" or not name:find "^[^/%z]+%.svg$" then
    return nil, ("%s is no name of a picture"):format(tostring(name))
  end
  local svg = files.read(here .. "/" .. name)
  if not svg then return nil, name .. " is missing" end
  if not is_drawing(svg) then
    return nil, name .. " has something in it that kvlab does not draw"
  end
  return svg
end

local function add_card(out, folder, entry, number)
  local here = folder .. "/" .. entry.name
  local manifest = manifests.read(here) or {}
  local has_report = entry.is_done and files.read(here .. "/report.html") ~= nil
  local svg, problem
  if has_report then svg, problem = read_picture(here, manifest) end
  local title = escape(manifest.title or entry.name)
  if has_report then
    title = ("<a href=\"%s/report.html\">%s</a>"):format(escape(entry.name), title)
  end
  local made = { entry.name, ("%.1f s"):format(entry.seconds) }
  if not entry.is_done then made[#made + 1] = "failed" end
  out[#out + 1] = ("<article><h2>%s</h2>\n<p class=\"made\">%s</p>"):format(title,
    escape(table.concat(made, " · ")))
  if svg then
    out[#out + 1] = report.inline_svg(svg, number)
  else
    if problem then
      out[#out + 1] = "<p class=\"made\">no picture: " .. escape(problem) .. "</p>"
    end
    out[#out + 1] = "<pre>" .. escape(tail(entry.printed)) .. "</pre>"
  end
  out[#out + 1] = "</article>"
end

--- Returns the page for a folder that has a folder of results for each entry.
---@param folder string
---@param title string
---@param made string   how, in a line
---@param entries kvlab.gallery.entry[]
---@return string
function M.html(folder, title, made, entries)
  local out = { report.head(title, STYLE, false),
                "<p class=\"made\">" .. escape(made) .. "</p>\n<div class=\"cards\">" }
  for number, entry in ipairs(entries) do add_card(out, folder, entry, number) end
  out[#out + 1] = "</div>\n</body>\n</html>\n"
  return table.concat(out, "\n")
end

return M
