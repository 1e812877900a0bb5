local plot = require "kvlab.report.plot"
local lines = require "kvlab.report.lines"
local temporary = require "spec.temporary"
local timeline = require "kvlab.report.timeline"

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

  it("draws a series wider than one with the same points, which lies on it", function()
    local rows = {}
    for i, policy in ipairs { "quest", "topk", "gsa" } do
      for x = 1, 2 do
        rows[#rows + 1] = { config = { policy = policy, x = x },
                            metrics = { y = i < 3 and x or 2 * x } }
      end
    end
    local script = lines.script(plot.lines(rows, { x = "x", y = "y", series = "policy" }))
    assert.truthy(script:find("_1 with linespoints ls 1 lw 4 ps 1.1 notitle", 1, true))
    assert.truthy(script:find("_2 with linespoints ls 2 notitle", 1, true))
    assert.truthy(script:find("_3 with linespoints ls 3 notitle", 1, true))
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

  it("has room for every key of eight series and a note, in one column", function()
    if not is_installed() then return pending "gnuplot is not installed" end
    local names, columns = {}, {}
    for i = 1, 8 do names[i] = ("policy_%02d"):format(i) end
    local rows = make_rows(names)
    rows[1].metrics.note = "policy_09"
    local svg = assert(plot.svg(plot.lines(rows, {
      x = "budget", y = "accuracy", series = "policy", where = { context = 512 } })))
    local height = tonumber(svg:match "viewBox=\"0 0 %d+ (%d+)\"")
    local lowest, count = 0, 0
    for x, y in svg:gmatch "translate%(([%d.]+),([%d.]+)%)[^>]*>%s*<text>policy_%d%d<" do
      columns[x], lowest, count = true, math.max(lowest, y), count + 1
    end
    assert.equal(9, count)
    assert.is_nil(next(columns, next(columns)))
    assert.is_true(lowest < height)
  end)

  local function many(count, opts)
    local names = {}
    for i = 1, count do names[i] = ("policy_%02d"):format(i) end
    local view = { x = "budget", y = "accuracy", series = "policy" }
    for key, value in pairs(opts or {}) do view[key] = value end
    return plot.lines(make_rows(names), view)
  end

  it("of characters has room for the plot beside the keys of many series", function()
    if not is_installed() then return pending "gnuplot is not installed" end
    local text = assert(plot.text(many(25, { where = { context = 512 } })))
    assert.matches("\n +%+%-%-%-%-%-%-%-%-%-%-%-%-%-%-%-%-%-%-%-%-[-]+%+", text)
    for i = 1, 25 do assert.matches((" policy_%02d "):format(i), text) end
  end)

  it("has a small panel for each of nine series, and the others grey in it", function()
    local p = many(9, { where = { context = 512 }, front = true, xlabel = "share" })
    local script = lines.script(p)
    local panels = 0
    for name, drawn in script:gmatch "set title '(policy_%d+)'.-\nplot (.-)\nunset" do
      panels = panels + 1
      assert.equal(p.names[panels], name)
      assert.equal(1, select(2, drawn:gsub("_others with linespoints lw 1", "")))
      for i = 1, 9 do -- no other has its colour; 10 is full's level, 11 the front
        local own = ("_%d with linespoints ls %d "):format(i, i)
        assert.equal(i == panels, drawn:find(own, 1, true) ~= nil)
      end
      assert.truthy(drawn:find "_10_level with lines ls 10 dt 2")
      assert.truthy(drawn:find "_11 with lines ls 11")
    end
    assert.equal(9, panels)
    assert.truthy(script:find("title 'the others'", 1, true))
    assert.falsy(script:find "%d title 'policy") -- no key
    assert.falsy(lines.script(many(8, { where = { context = 512 } })):find "others")
  end)

  it("writes no text of small multiples over another or outside", function()
    if not is_installed() then return pending "gnuplot is not installed" end
    for _, opts in ipairs { { where = { context = 512 } }, { panel = "context" } } do
      local boxes = {}
      local p = many(19, opts)
      p.notes = { ("a note "):rep(9) }
      p.xlabel, p.ylabel, p.title = "share of the bytes", "accuracy", "Recall"
      local svg = assert(plot.svg(p))
      local width_all, height_all = svg:match "viewBox=\"0 0 (%d+) (%d+)\""
      assert.is_true(height_all / width_all < 2.3)
      for x, y, turn, size, anchor, text in svg:gmatch("translate%(([%d.]+),([%d.]+)%)"
        .. "([^\"]*)\" stroke[^>]-font%-size=\"([%d.]+)\"%s+text%-anchor=\"(%l+)\">%s*"
        .. "<text>([^<]*)<") do
        if not turn:find "rotate" then
          local width = #text * size * 0.5
          x = x - (anchor == "middle" and width / 2 or anchor == "end" and width or 0)
          local box = { x, y - size * 0.7, x + width, tonumber(y), text }
          assert.is_true(0 <= box[1] and box[3] <= tonumber(width_all), text)
          for _, b in ipairs(boxes) do
            assert.is_true(box[1] > b[3] or b[1] > box[3] or box[2] > b[4]
              or b[2] > box[4], text .. " is over " .. b[5])
          end
          boxes[#boxes + 1] = box
        end
      end
      assert.is_true(#boxes > 19)
    end
  end)

  --- The x of the points of a script's series with intervals.
  local function dodged(opts)
    local rows = {}
    for i, policy in ipairs { "a", "b", "c" } do
      for budget = 1, 2 do
        local y = budget == 1 and 10 or 10 * i
        rows[#rows + 1] = { config = { policy = policy, budget = budget },
          metrics = { us = y }, low = { us = y - 3 }, high = { us = y + 3 } }
      end
    end
    opts.x, opts.y, opts.series = "budget", "us", "policy"
    local p, list = plot.lines(rows, opts), {}
    for first, second in lines.script(p):gmatch(
      "_interval << EOD\n([%d.]+) [^\n]*\n([%d.]+) ") do
      list[#list + 1] = { tonumber(first), tonumber(second) }
    end
    return list, lines.text_script(p, 79, 24)
  end

  it("moves points apart whose intervals would overlap, and only those", function()
    for _, is_log in ipairs { false, true } do
      local list, text = dodged { logx = is_log }
      assert.equal(3, #list)
      assert.is_true(list[1][1] < 0.999 and list[3][1] > 1.001)
      assert.is_true(math.abs(list[2][1] - 1) < 1e-9)
      for i = 1, 3 do assert.equal(2, list[i][2]) end
      assert.falsy(text:find "\n0%.9") -- characters stay
    end
  end)

  it("draws 21 series in 21 ways", function()
    local names, ways, count = {}, {}, 0
    for i = 1, 20 do names[i] = ("policy_%02d"):format(i) end -- and full
    local script = lines.script(plot.lines(make_rows(names), {
      x = "budget", y = "accuracy", series = "policy", where = { context = 512 } }))
    for way in script:gmatch "set style line %d+ (lc[^\n]+)" do
      assert.is_nil(ways[way], way)
      ways[way], count = true, count + 1
    end
    assert.equal(21, count)
  end)

  it("leaves room for the label of y beside long tics", function()
    if not is_installed() then return pending "gnuplot is not installed" end
    for _, step in ipairs { 0.00002, 1, 1e5 } do
      local rows = {}
      for i = 1, 3 do
        rows[i] = { config = { n = i }, metrics = { us = step < 1 and i * step
          or 1e6 + i * step } }
      end
      local p = plot.lines(rows, { x = "n", y = "us", ylabel = "high" })
      local svg = assert(plot.svg(p))
      local x = svg:match "translate%(([%d.-]+),[%d.]+%) rotate%([^>]*>%s*<text>high<"
      assert.is_true(tonumber(x) > 12, x) -- a letter's height
    end
  end)

  it("draws a single point among longer series as a dashed level", function()
    local script = lines.script(plot.lines(make_rows { "quest" }, VIEW))
    assert.truthy(script:find("$panel1_2_level with lines ls 2 dt 2", 1, true))
    assert.falsy(script:find("$panel1_1_level", 1, true))
  end)

  it("draws no point where a series has no x", function()
    local rows = make_rows { "quest" }
    for _, row in ipairs(rows) do
      if row.config.policy == "full" then row.config.budget = nil end
    end
    local script = lines.script(plot.lines(rows, VIEW))
    assert.truthy(script:find("$panel1_2_level with lines ls 2 dt 2", 1, true))
    assert.falsy(script:find("$panel1_2 with", 1, true))
    assert.truthy(script:find("$panel1_1 with linespoints", 1, true))
  end)

  it("writes powers of two along a logarithmic axis as sizes", function()
    local rows = {}
    for i, bytes in ipairs { 16, 64, 256, 1024, 4096, 2 ^ 20, 2 ^ 31 } do
      rows[i] = { config = { bytes = bytes }, metrics = { us = i } }
    end
    local function texts(more, opts)
      opts.x, opts.y = "bytes", "us"
      local words = {}
      local p = plot.lines(more or rows, opts)
      for i, tic in ipairs(p.xtics) do words[i] = tic[2] end
      return table.concat(words, " ")
    end
    assert.equal("16 64 256 1K 4K 1M 2G", texts(rows, { logx = true }))
    assert.equal("16 64 256 1024 4096 1048576 2147483648", texts(rows, {}))
    assert.equal("16 64 256 1024 4096 1048576 2147483648",
      texts(rows, { logx = true, xpow2 = false }))
    rows[8] = { config = { bytes = 1536 }, metrics = { us = 8 } }
    assert.equal("16 64 256 1024 1536 4096 1048576 2147483648",
      texts(rows, { logx = true }))
    assert.equal("16 64 256 1K 1.5K 4K 1M 2G", texts(rows, { xpow2 = true }))
  end)

  it("thins powers of two in equal steps", function()
    local rows = {}
    for power = 4, 24 do
      rows[#rows + 1] = { config = { bytes = 2 ^ power }, metrics = { us = power } }
    end
    local script = lines.script(plot.lines(rows, { x = "bytes", y = "us",
                                                         logx = true, logy = true }))
    assert.truthy(script:find("('16' 16, '64' 64, '256' 256, '1K' 1024, ", 1, true))
    assert.truthy(script:find(", '4M' 4194304, '16M' 16777216)", 1, true))
    assert.truthy(script:find "set logscale x\n")
    assert.truthy(script:find "set logscale y\n")
  end)

  it("draws a limit dashed, grey, without markers, and keeps the colours of others",
    function()
      local rows = make_rows { "V1", "limit", "V2" }
      for _, row in ipairs(rows) do row.config.kernel = row.config.policy end
      local view = { x = "budget", y = "accuracy", series = "kernel",
                     where = { context = 512 }, style = { limit = "limit" } }
      local script = lines.script(plot.lines(rows, view))
      assert.truthy(script:find("set style line 1 lc rgb \"#0072b2\"", 1, true))
      assert.truthy(script:find("style line 2 lc rgb \"#707070\" lw 2 dt 2\n", 1, true))
      assert.truthy(script:find("set style line 3 lc rgb \"#d55e00\"", 1, true))
      assert.truthy(script:find("$panel1_2 with lines ls 2 notitle", 1, true))
      assert.truthy(script:find("2 with lines ls 2 title 'limit'", 1, true))
      if not is_installed() then return end
      local svg = assert(plot.svg(plot.lines(rows, view)))
      local _, dashed = svg:gsub("rgb%(112, 112, 112%)' stroke%-dasharray", "")
      assert.equal(2, dashed) -- the line and its key
    end)

  it("draws a bar where rows have intervals, and makes room for it", function()
    local rows = {}
    for i = 1, 3 do
      rows[i] = { config = { n = i, policy = "quest" }, metrics = { us = 10 * i },
                  low = { us = i > 1 and 10 * i - 15 or nil },
                  high = { us = i > 1 and 10 * i + 15 or nil } }
    end
    local function script(opts)
      opts.x, opts.y = "n", "us"
      return lines.script(plot.lines(rows, opts))
    end
    local linear = script {}
    assert.truthy(linear:find("_interval << EOD\n2 20 5 35\n3 30 15 45\nEOD", 1, true))
    assert.truthy(linear:find("$panel1_1_interval with yerrorbars ls 1", 1, true))
    assert.equal(47, math.floor(linear:match "set yrange %[[%d.]+:([%d.]+)%]"))
    rows[2].low.us = -1 -- has no end on a logarithmic axis
    local log = script { logy = true }
    assert.truthy(log:find("\n2 20 2e-08 35\n", 1, true), log)
    assert.truthy(log:find "set logscale y")
    assert.is_true(tonumber(log:match "set yrange %[([%d.]+):") > 5)
    rows[2].low, rows[3].low = nil, nil
    assert.falsy(script({}):find("yerrorbars", 1, true))
  end)

  it("names the legend where series are numbers", function()
    local rows = make_rows { "quest" }
    local by_number = plot.lines(rows, { x = "budget", y = "accuracy", series = "context",
                                         where = { policy = "quest" } })
    assert.equal("context", by_number.legend)
    assert.truthy(lines.script(by_number):find("title 'context' left", 1, true))
    assert.is_nil(plot.lines(rows, VIEW).legend)
  end)

  it("refuses a style that it does not know", function()
    assert.error_matches(function()
      plot.lines({}, { x = "x", y = "y", style = { link = "dotted" } })
    end, "style of link is dotted, expected limit")
  end)

  it("has round tics along y on every scale", function()
    local function ytics(low, high, opts)
      opts.x, opts.y = "n", "us"
      local script = lines.script(plot.lines({
        { config = { n = 1 }, metrics = { us = low } },
        { config = { n = 2 }, metrics = { us = high } },
      }, opts))
      local words = {}
      for word in script:match "set ytics (%b())":gmatch "'(.-)'" do
        words[#words + 1] = word
      end
      return table.concat(words, " ")
    end
    assert.equal("0 100 200 300 400", ytics(0, 400, {}))
    assert.equal("0 5k 10k 15k 20k 25k 30k", ytics(0, 30000, {}))
    assert.equal("120000 120001 120002 120003 120004", ytics(120000, 120004, {}))
    assert.equal("1 2 5 10 20 50 100", ytics(1, 100, { logy = true }))
    assert.equal("1 10 100 1k 10k 100k 1M", ytics(1, 1e6, { logy = true }))
    assert.equal("120 130 140 150 160 170", ytics(120, 170, { logy = true }))
    assert.equal("1 2 5 10 20 50 100", ytics(1, 100, { logy = true, ymin = 0 }))
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
      assert.equal(#rows == 0, assert(plot.svg(p)):find ">no values<" ~= nil)
      assert.truthy(plot.text(p))
    end
  end)

  it("is written in the format that a file's name asks for", function()
    if not is_installed() then return pending "gnuplot is not installed" end
    local p, path = plot.lines(make_rows { "quest" }, VIEW), temporary.path()
    local map = plot.heat_map { rows = 1, columns = 1, panels = { { values = { 1 } } } }
    local spans = { { kind = "load", begin_us = 0, end_us = 5 } }
    for _, one in ipairs { p, map, timeline.plot(spans) } do
      for ending, start in pairs { svg = "^<%?xml.*</svg>%s*$", pdf = "^%%PDF%-",
                                   png = "^\137PNG\r\n" } do
        local name = path .. "." .. ending
        assert.equal(name, plot.write(one, name))
        local file = assert(io.open(name, "rb"))
        assert.truthy(file:read("*a"):find(start), ending)
        file:close()
      end
    end
    assert.error_matches(function() plot.write(p, "picture.eps") end,
      "path is picture.eps, expected a name that ends in .svg, .pdf or .png", 1, true)
  end)

  it("says which terminal gnuplot lacks", function()
    local script = temporary.path()
    local file = assert(io.open(script, "w"))
    file:write "#!/bin/sh\necho 'unknown or ambiguous terminal type' >&2\n"
    file:close()
    os.execute("chmod +x " .. script)
    plot.gnuplot = script
    local picture, reason = plot.draw(plot.lines(make_rows { "quest" }, VIEW), "pdf")
    assert.is_nil(picture)
    assert.truthy(reason:find("was built without pdfcairo", 1, true), reason)
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

  it("takes a metric as x, draws the Pareto front, and circles points with a note",
    function()
      local rows = {}
      for i, policy in ipairs { "a", "b" } do
        for budget = 1, 3 do
          rows[#rows + 1] = { config = { policy = policy, budget = budget }, metrics = {
            share = budget / 10 + i / 100, accuracy = budget * i / 10,
            note = budget == 1 and "sink is more" or nil } }
        end
      end
      local p = plot.lines(rows, { x = "share", y = "accuracy", series = "policy",
        front = true })
      local function near(want, got)
        assert.equal(#want, #got)
        for k, point in ipairs(want) do
          assert.is_true(math.abs(point[1] - got[k][1]) < 1e-12)
          assert.is_true(math.abs(point[2] - got[k][2]) < 1e-12)
        end
      end
      near({ { 0.11, 0.1 }, { 0.21, 0.2 }, { 0.31, 0.3 } }, p.panels[1].series.a)
      near({ { 0.21, 0.2 }, { 0.22, 0.2 }, { 0.22, 0.4 }, { 0.32, 0.4 }, { 0.32, 0.6 } },
        p.panels[1].series["Pareto front"])
      assert.same({ "a", "b", "Pareto front" }, p.names)
      assert.same({ "sink is more" }, p.notes)
      local script = lines.script(p)
      assert.truthy(script:find("title 'sink is more'", 1, true))
      assert.truthy(script:find("$panel1_1_marked << EOD\n0.11", 1, true))
    end)

  it("draws single points beside a Pareto front as points, not as level lines", function()
    local rows = {}
    for i, policy in ipairs { "a", "b" } do
      rows[i] = { config = { policy = policy }, metrics = { share = i, accuracy = i } }
    end
    local p = plot.lines(rows, { x = "share", y = "accuracy", series = "policy",
      front = true })
    assert.equal(3, #p.panels[1].series["Pareto front"])
    assert.is_nil(lines.script(p):find("_level", 1, true))
  end)
end)
