local plot = require "kvlab.report.plot"
local timeline = require "kvlab.report.timeline"

local EVIL = "<b>'&`touch kvlab_oops`; system 'touch kvlab_oops'\n!x"

local function span(kind, from, to, more)
  local s = { kind = kind, begin_us = from, end_us = to }
  for key, value in pairs(more or {}) do s[key] = value end
  return s
end

--- The spans of a ring: every layer's load, then its compute, and every other's offload.
local function make_spans(slots, layers)
  local spans = {}
  for layer = 0, layers - 1 do
    local at, slot = 1e6 + 100 * layer, layer % slots
    local more = { layer = layer, slot = slot }
    spans[#spans + 1] = span("load", at, at + 90, more)
    spans[#spans + 1] = span("compute", at + 100, at + 200, more)
    if layer % 2 == 1 then
      more = { layer = layer, slot = -1 }
      spans[#spans + 1] = span("offload", at + 200, at + 210, more)
    end
  end
  return spans
end

local function is_installed()
  local ok = os.execute "command -v gnuplot >/dev/null 2>&1"
  return ok == 0 or ok == true
end

--- Whether every element is closed in its place and text has no stray < or &.
local function is_well_formed(svg)
  local open, at = {}, 1
  svg = svg:gsub("^<%?xml.-%?>", "")
  while true do
    local from, to, is_end, name, rest = svg:find("<(/?)(%a+)([^<]-)>", at)
    local text = svg:sub(at, (from or 0) - 1):gsub("&%a+;", "")
    if text:find "[<&]" then return false end
    if not from then return #open == 0 end
    if is_end == "/" then
      if table.remove(open) ~= name then return false end
    elseif rest:sub(-1) ~= "/" then
      open[#open + 1] = name
    end
    at = to + 1
  end
end

--- How many boxes of a colour a picture has.
local function count_boxes(svg, red, green, blue)
  local colour = ("<polygon fill = 'rgb%%(%3d, %3d, %3d%%)'"):format(red, green, blue)
  local _, count = svg:gsub(colour, "")
  return count
end

describe("overlap", function()
  local function check(spans, want)
    for name, value in pairs(timeline.overlap(spans)) do
      assert.equal(want[name], value, name)
    end
  end

  it("takes unions of spans that are nested, touch, overlap or stand apart", function()
    check({
      span("load", 60, 70), -- stands apart, and first in the list
      span("load", 0, 20), span("load", 5, 10), -- nested
      span("load", 20, 30), span("load", 25, 40), -- touches, overlaps
      span("compute", 10, 35), span("compute", 10, 35), -- the same twice
      span("compute", 65, 80),
    }, { load_us = 50, compute_us = 40, both_us = 30, wall_us = 80, idle_us = 40,
         hidden = 0.6 })
  end)

  it("counts one compute span under many loads, and many under one load", function()
    check({ span("compute", 0, 100), span("load", 10, 20), span("load", 30, 40) },
      { load_us = 20, compute_us = 100, both_us = 20, wall_us = 100, idle_us = 0,
        hidden = 1 })
    check({ span("load", 0, 100), span("compute", 10, 20), span("compute", 30, 40) },
      { load_us = 100, compute_us = 20, both_us = 20, wall_us = 100, idle_us = 80,
        hidden = 0.2 })
  end)

  it("finds nothing hidden where spans only touch", function()
    check({ span("load", 0, 10), span("compute", 10, 20), span("load", 20, 30) },
      { load_us = 20, compute_us = 10, both_us = 0, wall_us = 30, idle_us = 20,
        hidden = 0 })
  end)

  it("counts offloads in the wall only", function()
    check({ span("compute", 10, 20), span("load", 10, 15), span("offload", 12, 50) },
      { load_us = 5, compute_us = 10, both_us = 5, wall_us = 40, idle_us = 30,
        hidden = 1 })
  end)

  it("hides NaN of no load time", function()
    for _, spans in ipairs { {}, { span("load", 5, 5) } } do
      local o = timeline.overlap(spans)
      assert.is_true(o.hidden ~= o.hidden)
      assert.same({ 0, 0, 0, 0, 0 },
        { o.load_us, o.compute_us, o.both_us, o.wall_us, o.idle_us })
    end
  end)

  it("leaves the spans in their order", function()
    local spans = { span("load", 9, 10), span("load", 1, 2) }
    timeline.overlap(spans)
    assert.equal(9, spans[1].begin_us)
  end)

  it("refuses kinds and times that mean nothing", function()
    for want, wrong in pairs {
      ["span 2 is of kind copy, expected one of compute, load, offload"]
        = span("copy", 0, 1),
      ["span 2 lasts from 3 to 2"] = span("load", 3, 2),
      ["span 2 lasts from nan to 2"] = span("load", 0 / 0, 2),
      ["span 2 lasts from 1 to inf"] = span("load", 1, math.huge),
      ["span 2 lasts from 1 to nil"] = span("load", 1),
    } do
      for _, name in ipairs { "overlap", "plot" } do
        assert.error_matches(function() timeline[name] { span("load", 0, 1), wrong } end,
          want)
      end
    end
  end)
end)

describe("timeline", function()
  local program = plot.gnuplot
  after_each(function() plot.gnuplot = program end)

  it("has rows for compute, loads by slot, and offloads", function()
    local p = timeline.plot(make_spans(11, 22))
    assert.equal("compute", p.rows[1])
    assert.equal("slot 2 load", p.rows[4])
    assert.equal("slot 10 load", p.rows[12])
    assert.equal("offload", p.rows[13])
    assert.equal(13, #p.rows)
    p = timeline.plot {
      span("load", 0, 1, { row = "b" }), span("load", 1, 2, { row = "a" }),
      span("compute", 2, 3, { row = "b" }),
    }
    assert.same({ "b", "a" }, p.rows)
    assert.same({ 1, 2, 1 }, { p.boxes[1].row, p.boxes[2].row, p.boxes[3].row })
  end)

  it("begins at 0 and has the unit that suits its length", function()
    local p = timeline.plot { span("load", 500, 600), span("compute", 700, 10499) }
    assert.same({ "time (us)", 9999 }, { p.xlabel, p.length })
    assert.same({ 0, 100 }, { p.boxes[1].from, p.boxes[1].to })
    p = timeline.plot { span("load", 500, 600), span("compute", 700, 20500) }
    assert.same({ "time (ms)", 20 }, { p.xlabel, p.length })
    assert.same({ 0, 0.1 }, { p.boxes[1].from, p.boxes[1].to })
  end)

  it("draws every span and one key for each kind", function()
    if not is_installed() then return pending "gnuplot is not installed" end
    local p = timeline.plot(make_spans(8, 80), { title = "80 layers" })
    local svg = assert(plot.svg(p))
    assert.is_true(is_well_formed(svg))
    assert.equal(80 + 1, count_boxes(svg, 0, 114, 178)) -- compute
    assert.equal(80 + 1, count_boxes(svg, 213, 94, 0)) -- load
    assert.equal(40 + 1, count_boxes(svg, 0, 158, 115)) -- offload
    for _, word in ipairs { "80 layers", "compute", "load", "slot 7 load", "offload",
                            "time %(us%)", "8000" } do
      assert.truthy(svg:find(">" .. word .. "</text>"), word)
    end
    svg = assert(plot.svg(timeline.plot { span("load", 0, 5) }))
    assert.equal(0, count_boxes(svg, 0, 114, 178))
  end)

  it("writes the layer where there is room for it", function()
    if not is_installed() then return pending "gnuplot is not installed" end
    local svg = assert(plot.svg(timeline.plot {
      span("load", 0, 500, { layer = 41 }), span("load", 500, 501, { layer = 42 }),
      span("load", 501, 1000),
    }))
    assert.truthy(svg:find(">41</text>", 1, true))
    assert.falsy(svg:find(">42</text>", 1, true))
    assert.truthy(svg:find(">number: layer</text>", 1, true))
    svg = assert(plot.svg(timeline.plot { span("load", 0, 500) }))
    assert.falsy(svg:find("number: layer", 1, true))
  end)

  it("has room for all keys beside a single row", function()
    if not is_installed() then return pending "gnuplot is not installed" end
    local more = { row = "all", layer = 3 }
    local svg = assert(plot.svg(timeline.plot {
      span("load", 0, 5, more), span("compute", 5, 9, more), span("offload", 9, 12, more),
    }))
    for _, word in ipairs { "compute", "load", "offload", "number: layer" } do
      assert.truthy(svg:find(">" .. word .. "</text>", 1, true), word)
    end
  end)

  it("takes no name for a command", function()
    if not is_installed() then return pending "gnuplot is not installed" end
    local svg = assert(plot.svg(timeline.plot({ span("load", 0, 1, { row = EVIL }) },
      { title = EVIL })))
    assert.is_nil(os.remove "kvlab_oops") -- it is not there
    local _, count = svg:gsub("&lt;b>'&amp;`touch", "")
    assert.equal(2, count)
    assert.is_true(is_well_formed(svg))
    assert.is_false(is_well_formed((svg:gsub("&lt;", "<"))))
  end)

  it("draws nothing but axes for no spans and for no time", function()
    if not is_installed() then return pending "gnuplot is not installed" end
    assert.truthy(plot.svg(timeline.plot {}))
    local svg = assert(plot.svg(timeline.plot { span("load", 7, 7) }))
    assert.equal(1 + 1, count_boxes(svg, 213, 94, 0))
  end)

  it("has a reason without gnuplot, and no form in characters", function()
    plot.gnuplot = "kvlab-no-such-gnuplot"
    local svg, reason = plot.svg(timeline.plot(make_spans(2, 4)))
    assert.is_nil(svg)
    assert.equal("kvlab-no-such-gnuplot is not installed: no plots are drawn", reason)
    assert.error_matches(function() plot.text(timeline.plot {}) end, "draws no timelines")
  end)
end)
