--- report.html: one file that holds an experiment's pictures, tables, every row and its
-- manifest. It needs no network; a click on a column's head sorts the rows.
local text_table = require "kvlab.report.table"

local M = {}

local entities = {
  ["&"] = "&amp;", ["<"] = "&lt;", [">"] = "&gt;", ["\""] = "&quot;", ["'"] = "&#39;",
}

--- Escapes text for HTML, inside an element or a quoted attribute.
---@param text any
---@return string
function M.escape(text) return (tostring(text):gsub("[&<>\"']", entities)) end
local escape = M.escape

local HEAD = [[
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none';
  style-src 'unsafe-inline'%s">
<title>%s</title>
<style>
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #62676f; --page: #ffffff;
  --line: #d9dce1; --band: #f5f6f8; --link: #0067b0 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6ea; --soft: #9aa1ab;
  --page: #16181c; --line: #34383f; --band: #1f2227; --link: #6fb5f0 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  max-width: 1180px; margin: 2.5rem auto; padding: 0 1.25rem }
a { color: var(--link) }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .3rem; overflow-wrap: anywhere }
p.made { color: var(--soft); margin: 0 }
svg { width: 100%%; height: auto; display: block }
%s</style>
</head>
<body>
<h1>%s</h1>
]]

local STYLE = [[
h2 { font-size: 1.1rem; margin: 2.4rem 0 .6rem }
figure { margin: 1.4rem 0; overflow-x: auto }
figure svg { max-width: var(--width); min-width: min(var(--width), 40rem) }
.wide { overflow: auto; max-height: 80vh }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem }
caption { text-align: left; color: var(--soft); padding: 0 0 .4rem }
th, td { padding: .28rem .8rem; text-align: left; border-bottom: 1px solid var(--line);
  white-space: nowrap }
.n { text-align: right }
thead th { position: sticky; top: 0; background: var(--page);
  box-shadow: inset 0 -2px var(--line) }
tbody tr:hover { background: var(--band) }
th button { all: unset; cursor: pointer; color: var(--link) }
th button:focus-visible { outline: 2px solid }
th[aria-sort=ascending] button::after { content: " \2191" }
th[aria-sort=descending] button::after { content: " \2193" }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem;
  margin: 0 }
dt { color: var(--soft) } dd { margin: 0; overflow-wrap: anywhere }
]]

--- The beginning of a page: its head, colours and `style`, and its title. A page runs
-- scripts only if has_scripts.
---@param title string
---@param style string
---@param has_scripts boolean
---@return string
function M.head(title, style, has_scripts)
  return HEAD:format(has_scripts and "; script-src 'unsafe-inline'" or "", escape(title),
    style, escape(title))
end

local SORT = [[
<script>
const table = document.getElementById("rows"), body = table.tBodies[0]
function value(row, at) {
  const cell = row.cells[at], digits = cell.dataset.v
  return digits === undefined ? cell.textContent : Number(digits)
}
// numbers, then words; nan and empty cells last in both orders
const rank = x => x !== x || x === "-" ? 2 : typeof x === "string" ? 1 : 0
function compare(x, y, sign) {
  return rank(x) - rank(y)
    || sign * (typeof x === "string" ? x.localeCompare(y) : x - y)
}
for (const head of table.tHead.rows[0].cells) head.firstChild.onclick = () => {
  const sign = head.ariaSort === "ascending" ? -1 : 1, at = head.cellIndex
  for (const other of table.tHead.rows[0].cells) other.ariaSort = null
  head.ariaSort = sign > 0 ? "ascending" : "descending"
  const rows = [...body.rows].sort((a, b) => compare(value(a, at), value(b, at), sign))
  body.append(...rows)
}
</script>
]]

--- Writes a cell. A number keeps all its digits in data-v, for sorting and for copying.
local function cell(value, format, is_number)
  local class, number = is_number and " class=\"n\"" or "", value
  if type(value) == "table" then number = value.mean end
  local digits = type(number) == "number" and (" data-v=\"%.17g\""):format(number) or ""
  local text = escape(text_table.format_cell(value, format))
  return ("<td%s%s>%s</td>"):format(class, digits, text)
end

--- Adds a table. With an id, its column heads are buttons that sort it.
local function add_table(out, t, id)
  local is_number = {}
  for c = 1, #t.header do
    is_number[c] = #t.rows > 0
    for _, row in ipairs(t.rows) do
      if row[c] ~= nil and not text_table.is_numeric(row[c]) then is_number[c] = false end
    end
  end
  local attribute = id and (" id=\"%s\""):format(id) or ""
  out[#out + 1] = "<div class=\"wide\"><table" .. attribute .. ">"
  if t.caption then out[#out + 1] = "<caption>" .. escape(t.caption) .. "</caption>" end
  local heads, lines = {}, {}
  for c, name in ipairs(t.header) do
    local text = id and "<button>" .. escape(name) .. "</button>" or escape(name)
    heads[c] = (is_number[c] and "<th class=\"n\">" or "<th>") .. text .. "</th>"
  end
  for r, row in ipairs(t.rows) do
    local cells = {}
    for c = 1, #t.header do cells[c] = cell(row[c], t.format, is_number[c]) end
    lines[r] = "<tr>" .. table.concat(cells) .. "</tr>"
  end
  out[#out + 1] = "<thead><tr>" .. table.concat(heads) .. "</tr></thead>\n<tbody>"
  out[#out + 1] = table.concat(lines, "\n") .. "</tbody></table></div>"
  for _, note in ipairs(t.notes or {}) do
    out[#out + 1] = "<p class=\"made\">* " .. escape(note) .. "</p>"
  end
end

--- Makes gnuplot's picture a part of a page. It removes the prologue, gnuplot's title and
-- the white background, replaces black by the page's text colour, and gives the picture's
-- width to the page's style. `number` makes the picture's ids unique in the page.
---@param svg string
---@param number integer
---@return string
function M.inline_svg(svg, number)
  local width = svg:match "viewBox=\"0 0 (%d+)" or "900"
  local prefix = ("p%d-"):format(number)
  local head = ("<svg role=\"img\" style=\"--width: %spx\""):format(width)
  return (svg:gsub("^.-<svg", head, 1)
    :gsub("<title>Gnuplot</title>%s*<desc>.-</desc>", "", 1)
    :gsub("<rect [^>]*fill=\"#ffffff\"/>", "", 1)
    :gsub("( id=[\"'])", "%1" .. prefix):gsub("(href=[\"']#)", "%1" .. prefix)
    :gsub("url%(#", "url(#" .. prefix)
    :gsub(" color=\"black\"", ""):gsub("=[\"']black[\"']", "=\"currentColor\"")
    :gsub("([\"'])rgb%( *0, *0, *0%)[\"']", "%1currentColor%1"))
end

local function to_text(value)
  if type(value) ~= "table" then return text_table.format_cell(value) end
  local words, keys = {}, {}
  if value[1] ~= nil then
    for i, item in ipairs(value) do words[i] = to_text(item) end
    return table.concat(words, ", ")
  end
  for key in pairs(value) do keys[#keys + 1] = key end
  table.sort(keys)
  for i, key in ipairs(keys) do
    words[i] = ("%s = %s"):format(key, to_text(value[key]))
  end
  return table.concat(words, ", ")
end

local SHOWN = {
  "device", "description", "driver", "cpu", "os", "versions", "seed", "date", "version",
  "commit", "dirty", "diff", "command", "defaults", "isa",
  "made_by",
}

local function add_manifest(out, manifest)
  out[#out + 1] = "<h2>How it was made</h2>\n<dl>"
  local function add(key, value)
    if value == nil or to_text(value) == "" then return end
    out[#out + 1] = ("<dt>%s</dt><dd>%s</dd>"):format(escape(key), escape(to_text(value)))
  end
  for _, key in ipairs(SHOWN) do add(key, manifest[key]) end
  for _, axis in ipairs(manifest.axes or {}) do add("axis " .. axis.name, axis.values) end
  for _, run in ipairs(manifest.earlier_runs or {}) do add("earlier run", run) end
  out[#out + 1] = "</dl>"
end

--- Writes the page.
---@param r {title: string, manifest: table, plots: {svg?: string, reason?: string}[],
---  tables: table[], rows: table} rows and tables as in table.lua
---@return string
function M.html(r)
  local m = r.manifest
  local out = { M.head(r.title, STYLE, true) }
  local made = { m.name, m.device .. (m.description and ", " .. m.description or ""),
                 "seed " .. to_text(m.seed), m.date }
  out[#out + 1] = "<p class=\"made\">" .. escape(table.concat(made, " · ")) .. "</p>"
  for i, p in ipairs(r.plots) do
    local inner = p.svg and M.inline_svg(p.svg, i) or "<p>" .. escape(p.reason) .. "</p>"
    out[#out + 1] = "<figure>" .. inner .. "</figure>"
  end
  for _, t in ipairs(r.tables) do
    out[#out + 1] = "<h2>" .. escape(t.caption or "Table") .. "</h2>"
    add_table(out, { header = t.header, rows = t.rows, format = t.format,
                     notes = t.notes })
  end
  out[#out + 1] = ("<h2>All rows (%d)</h2>"):format(#r.rows.rows)
  add_table(out, r.rows, "rows")
  add_manifest(out, m)
  out[#out + 1] = SORT .. "</body>\n</html>\n"
  return table.concat(out, "\n")
end

return M
