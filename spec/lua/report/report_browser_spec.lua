--- Reports as a browser shows them: needs Chromium (Debian's package chromium), pending
-- without it. A script added to the page does what a reader would, and says what it saw.
local gallery = require "kvlab.experiment.gallery"
local plot = require "kvlab.report.plot"
local report = require "kvlab.report.report"
local files = require "kvlab.files"
local temporary = require "spec.temporary"

local function is_there(command)
  return os.execute("command -v " .. command .. " >/dev/null 2>&1") == 0
end

local browser
for _, name in ipairs { "chromium", "chromium-browser", "google-chrome" } do
  if not browser and is_there(name) then browser = name end
end

local it = browser and it or pending

--- What the page is after its scripts ran, and what it wrote to the console. A page that
-- lets no script run lets the spec's.
local function show(page, script, width)
  local path = temporary.folder()
  if not page:find("script-src", 1, true) then
    page = page:gsub("default%-src 'none';", "%0 script-src 'unsafe-inline';")
  end
  files.write(path .. "/page.html", (page:gsub("</body>",
    function() return "<script>" .. script .. "</script></body>" end)))
  local pipe = io.popen(("timeout 60 %s --headless=new --no-sandbox --disable-gpu"
    .. " --user-data-dir='%s/profile' --window-size=%d,900 --enable-logging=stderr --v=0"
    .. " --dump-dom 'file://%s/page.html' 2>'%s/log'"):format(browser, path, width, path,
    path))
  local dom = pipe:read "*a"
  pipe:close()
  local console = {}
  for line in files.read(path .. "/log"):gmatch "[^\n]*CONSOLE[^\n]*" do
    console[#console + 1] = line
  end
  return dom, console
end

local function make_page()
  local plots = {}
  if is_there "gnuplot" then
    local map = plot.heat_map { rows = 1, columns = 2, title = "map",
                                panels = { { values = { 1, 2 } } } }
    plots = { { svg = assert(plot.svg(map)) }, { svg = assert(plot.svg(map)) } }
  end
  local rows = { { "quest", 0.5, 9 }, { "full", 1, 10 }, { "random", 0 / 0, 1e6 } }
  for i = 1, 200 do rows[#rows + 1] = { ("x"):rep(40), 1e-3 / i, -i } end
  return report.html { title = ("A title that goes on and on "):rep(9),
    plots = plots, tables = {}, rows = { header = { "policy", "accuracy", "us" },
                                         rows = rows },
    manifest = { name = "01", device = "cpu", seed = 7, date = "2026",
                 command = ("kvlab/"):rep(80) } }
end

-- Writes the policies of the first rows after each click into the page's title.
local CLICKS = [[
const seen = []
function click(column, times) {
  const head = document.querySelectorAll("#rows th button")[column]
  for (let i = 0; i < times; i++) head.click()
  seen.push([...document.querySelectorAll("#rows tbody tr")].slice(0, 3)
    .map(row => row.cells[0].textContent[0]).join("") + head.parentElement.ariaSort)
}
click(1, 2); click(2, 1); click(0, 1)
document.title = seen.join(" ")
]]

describe("report in a browser (chromium)", function()
  it("sorts its rows by a click on a head, numbers as numbers, nan last", function()
    local dom, console = show(make_page(), CLICKS, 1200)
    assert.equal("fqxdescending xxxascending fqrascending",
      dom:match "<title>(.-)</title>")
    assert.same({}, console)
  end)

  it("fits a narrow window, as a gallery does", function()
    local width = "document.title = document.documentElement.scrollWidth <= innerWidth"
    local cards = gallery.html("/nowhere", ("x"):rep(300), "made", {
      { name = "a", is_done = true, seconds = 1, printed = ("long "):rep(200) } })
    for _, page in ipairs { make_page(), cards } do
      local dom, console = show(page, width, 520)
      assert.equal("true", dom:match "<title>(.-)</title>")
      assert.same({}, console)
    end
  end)

  it("shows every picture", function()
    if not is_there "gnuplot" then return pending "gnuplot is not installed" end
    local dom, console = show(make_page(), [[
      document.title = [...document.querySelectorAll("figure svg")]
        .map(svg => svg.getBoundingClientRect())
        .map(r => r.width > 99 && r.height > 50)
    ]], 1200)
    assert.equal("true,true", dom:match "<title>(.-)</title>")
    assert.same({}, console) -- nothing was refused
  end)
end)
