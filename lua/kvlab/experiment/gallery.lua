--- A gallery: one page that shows several experiments, each with its question, its first
-- picture and a link to its report. It needs no network and, but for the links, no other
-- file.
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

local function add_card(out, folder, entry, number)
  local here = folder .. "/" .. entry.name
  local manifest = manifests.read(here) or {}
  local has_report = entry.is_done and files.read(here .. "/report.html") ~= nil
  local first = manifest.pictures and manifest.pictures[1]
  local svg = has_report and first and files.read(here .. "/" .. first)
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
    out[#out + 1] = "<pre>" .. escape(tail(entry.printed)) .. "</pre>"
  end
  out[#out + 1] = "</article>"
end

--- The page of a folder that has a folder of results for each entry.
---@param folder string
---@param title string
---@param made string   how, in a line
---@param entries kvlab.gallery.entry[]
---@return string
function M.html(folder, title, made, entries)
  local out = { report.head(title, STYLE),
                "<p class=\"made\">" .. escape(made) .. "</p>\n<div class=\"cards\">" }
  for number, entry in ipairs(entries) do add_card(out, folder, entry, number) end
  out[#out + 1] = "</div>\n</body>\n</html>\n"
  return table.concat(out, "\n")
end

return M
