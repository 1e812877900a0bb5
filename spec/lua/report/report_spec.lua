local markup = require "spec.markup"
local report = require "kvlab.report.report"

local EVIL = "<script>\"'&alert(1)</script>"

local function make_page(changes)
  local r = {
    title = "Recall?",
    manifest = { name = "01", device = "cpu", seed = 7, date = "2026-01-02T03:04:05Z",
      defaults = { prompts = 8 }, axes = { { name = "policy", values = { "quest" } } } },
    plots = {},
    tables = { { caption = "accuracy", header = { "policy", 0.1 }, format = "%.2f",
      rows = { { "quest", 1 / 3 }, { "full" } } } },
    rows = { header = { "policy", "accuracy" }, rows = { { "quest", 1 / 3 } } },
  }
  for key, value in pairs(changes or {}) do r[key] = value end
  return report.html(r)
end

local function count(text, word)
  local n, at = 0, 1
  while true do
    local from, to = text:find(word, at, true)
    if not from then return n end
    n, at = n + 1, to + 1
  end
end

describe("report", function()
  it("holds tables, rows and manifest", function()
    local page = make_page()
    for _, word in ipairs { "<h1>Recall?</h1>", "01 · cpu · seed 7", "All rows (1)",
      "<dt>axis policy</dt><dd>quest</dd>", "<dd>prompts = 8</dd>",
      'data-v="0.33333333333333331">0.33</td>', '<td class="n">-</td>',
      '<th class="n"><button>accuracy</button></th>' } do
      assert.truthy(page:find(word, 1, true), word)
    end
  end)

  it("escapes everything that is named", function()
    local page = make_page {
      title = EVIL,
      manifest = { name = EVIL, device = EVIL, description = EVIL, seed = 0, date = EVIL,
        command = EVIL, versions = { [EVIL] = EVIL }, defaults = { [EVIL] = EVIL },
        axes = { { name = EVIL, values = { EVIL } } },
        earlier_runs = { { date = EVIL } } },
      plots = { { reason = EVIL } },
      tables = { { caption = EVIL, header = { EVIL }, rows = { { EVIL } } } },
      rows = { header = { EVIL }, rows = { { EVIL } } },
    }
    assert.equal(1, count(page, "<script>")) -- the report's own
    assert.equal(1, count(page, "</script>"))
    assert.equal(0, count(page, EVIL))
    assert.truthy(count(page, "&lt;script&gt;&quot;&#39;&amp;alert(1)") >= 15)
  end)

  it("is well formed, and takes nothing from the network", function()
    local svg = "<svg viewBox=\"0 0 9 9\"><defs><path id='a' d='M0,0'/></defs>"
      .. "<use xlink:href='#a'/><g filter='url(#a)'/></svg>"
    local page = make_page { plots = { { svg = svg }, { svg = svg }, { reason = EVIL } },
                             title = EVIL }
    local elements, outer = markup.read(page)
    assert.same({}, outer)
    local seen = {}
    for _, e in ipairs(elements) do seen[e.name] = (seen[e.name] or 0) + 1 end
    assert.same({ 3, 2, 2, 1 }, { seen.figure, seen.svg, seen.use, seen.script })
    assert.truthy(page:find("default-src 'none'", 1, true))
  end)

  it("shows an interval, and sorts by its mean", function()
    local page = make_page { rows = { header = { "policy", "accuracy" }, rows = {
      { "quest", { mean = 0.5, low = 0.25, high = 0.75 } }, { "full", 1 } } } }
    assert.truthy(page:find('<td class="n" data-v="0.5">0.5 ± 0.25</td>', 1, true))
  end)

  it("can be made of no rows, one, and numbers that are none", function()
    for _, rows in ipairs { {}, { { "quest", 0 / 0 } }, { { "a" }, { "b", 1 / 0 } } } do
      markup.read(make_page { plots = {}, tables = {},
                              rows = { header = { "policy", "x" }, rows = rows } })
    end
  end)

  it("puts a picture into the page in the page's own ink", function()
    local svg = "<?xml version=\"1.0\"?>\n<svg \n viewBox=\"0 0 640 480\">"
      .. "<title>Gnuplot</title>\n<desc>Produced by GNUPLOT</desc>"
      .. "<rect x=\"0\" y=\"0\" width=\"640\" height=\"480\" fill=\"#ffffff\"/>"
      .. "<g color=\"black\" fill=\"black\" stroke='rgb(  0,   0, 200)'>"
      .. "<text>quest</text></g></svg>"
    local page = make_page { plots = { { svg = svg } } }
    assert.equal(0, count(page, "<?xml") + count(page:lower(), "gnuplot"))
    assert.equal(0, count(page, "#ffffff\"/>"))
    assert.truthy(page:find("--width: 640px", 1, true))
    assert.truthy(page:find("fill=\"currentColor\" stroke='rgb(  0,   0, 200)'", 1, true))
  end)
end)
