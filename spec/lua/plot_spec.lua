local plot = require "kvlab.plot"
local gnuplot = require "kvlab.gnuplot"

local EVIL = "<script>\"'&`touch kvlab_oops`; system 'touch kvlab_oops' # a_b^2 %d\n!x"

local function make_rows(policies)
  local rows = {}
  for _, context in ipairs { 512, 1024 } do
    for i, policy in ipairs(policies) do
      for _, budget in ipairs { 0.02, 0.1, 0.3 } do
        rows[#rows + 1] = {
          config = { policy = policy, budget = budget, context = context },
          metrics = { accuracy = budget * i / context },
        }
      end
    end
    rows[#rows + 1] = { config = { policy = "full", budget = 0.3, context = context },
                        metrics = { accuracy = 1 } }
  end
  return rows
end

local VIEW = { x = "budget", y = "accuracy", series = "policy", panel = "context",
               logx = true, title = "How good?", xlabel = "share", ylabel = "recall" }

local function is_installed()
  local ok = os.execute "command -v gnuplot >/dev/null 2>&1"
  return ok == 0 or ok == true
end

describe("plot", function()
  local program = plot.gnuplot
  after_each(function() plot.gnuplot = program end)

  it("groups rows into panels and series, sorted along x", function()
    local rows = make_rows { "quest" }
    rows[1], rows[3] = rows[3], rows[1]
    local p = plot.lines(rows, VIEW)
    assert.same({ "quest", "full" }, p.names)
    assert.same({ "context = 512", "context = 1024" },
      { p.panels[1].title, p.panels[2].title })
    assert.same({ { 0.02, 0.02 / 512 }, { 0.1, 0.1 / 512 }, { 0.3, 0.3 / 512 } },
      p.panels[1].series.quest)
    assert.same({ { 0.02, "0.02" }, { 0.1, "0.1" }, { 0.3, "0.3" } }, p.xtics)
  end)

  it("leaves out what is not finite and numbers words along x", function()
    local p = plot.lines({
      { config = { a = "one" }, metrics = { y = 0 / 0 } },
      { config = { a = "two" }, metrics = { y = 4 } },
      { config = { a = "three" }, metrics = {} },
    }, { x = "a", y = "y", logx = true })
    assert.same({ y = { { 2, 4 } } }, p.panels[1].series)
    assert.same({ { 1, "one" }, { 2, "two" }, { 3, "three" } }, p.xtics)
    assert.is_false(p.logx)
  end)

  it("names every series, panel and axis in the SVG", function()
    if not is_installed() then return pending "gnuplot is not installed" end
    local rows = make_rows { "oracle", "quest", "random" }
    local svg = assert(plot.svg(plot.lines(rows, VIEW)))
    for _, word in ipairs { "oracle", "quest", "random", "full", "context = 512", "share",
                            "context = 1024", "recall", "How good%?", "0%.02" } do
      assert.truthy(svg:find(">" .. word .. "</text>"), word)
    end
  end)

  it("draws a single point among longer series as a dashed level", function()
    local script = gnuplot.svg_script(plot.lines(make_rows { "quest" }, VIEW))
    assert.truthy(script:find("$panel1_2_level with lines ls 2 dt 2", 1, true))
    assert.falsy(script:find("$panel1_1_level", 1, true))
  end)

  it("takes no name for a command", function()
    if not is_installed() then return pending "gnuplot is not installed" end
    local view = {}
    for key, value in pairs(VIEW) do view[key] = value end
    view.title, view.xlabel = EVIL, EVIL
    local p = plot.lines(make_rows { EVIL, "x'y" }, view)
    p.panels[1].title = EVIL
    local svg, text = assert(plot.svg(p)), assert(plot.text(p))
    assert.is_nil(os.remove "kvlab_oops") -- it is not there
    assert.falsy(svg:find("<script", 1, true))
    local _, count = svg:gsub("&lt;script>\"'&amp;`touch", "")
    assert.equal(5, count) -- title, panel, legend and two lower axes
    assert.truthy(svg:find(">x'y</text>", 1, true))
    assert.truthy(text:find("<script>\"'&`touch kvlab_oops`", 1, true))
  end)

  it("draws nothing but axes for no rows, one row, and equal values", function()
    if not is_installed() then return pending "gnuplot is not installed" end
    local function row(x, y) return { config = { x = x }, metrics = { y = y } } end
    for _, rows in ipairs { {}, { row(0.1, 0) }, { row(0, 2), row(1, 2) } } do
      local p = plot.lines(rows, { x = "x", y = "y", logx = true, logy = true })
      assert.truthy(plot.svg(p))
      assert.truthy(plot.text(p))
    end
  end)

  it("says that gnuplot is missing and does not fail", function()
    plot.gnuplot = "kvlab-no-such-gnuplot"
    local svg, reason = plot.svg(plot.lines(make_rows { "quest" }, VIEW))
    assert.is_nil(svg)
    assert.equal("kvlab-no-such-gnuplot is not installed: no plots are drawn", reason)
  end)

  it("passes on what gnuplot complains about", function()
    plot.gnuplot = "cat /dev/null #"
    local svg, reason = plot.svg(plot.lines(make_rows { "quest" }, VIEW))
    assert.is_nil(svg)
    assert.truthy(reason:find "is not installed")
    plot.gnuplot = "false"
    svg, reason = plot.svg(plot.lines(make_rows { "quest" }, VIEW))
    assert.is_nil(svg)
    assert.truthy(reason:find "drew nothing")
  end)
end)
