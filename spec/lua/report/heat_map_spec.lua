local markup = require "spec.markup"
local plot = require "kvlab.report.plot"

local NAN = 0 / 0

local function is_installed()
  local ok = os.execute "command -v gnuplot >/dev/null 2>&1"
  return ok == 0 or ok == true
end

local function make_rows()
  local rows = {}
  for _, policy in ipairs { "quest", "full" } do
    for _, context in ipairs { 1024, 512 } do
      for _, depth in ipairs { 0, 50, 25 } do
        rows[#rows + 1] = { metrics = { accuracy = depth / context },
          config = { policy = policy, context = context, depth = depth } }
      end
    end
  end
  return rows
end

local VIEW = { x = "context", y = "depth", value = "accuracy", panel = "policy" }

describe("heat map", function()
  it("has a cell for every x and y, ascending, y from the top", function()
    local p = plot.heat_maps(make_rows(), VIEW)
    assert.same({ "0", "25", "50" }, p.row_names)
    assert.same({ "512", "1024" }, p.column_names)
    assert.equal("quest", p.panels[1].title)
    assert.equal("full", p.panels[2].title)
    assert.same({ 0, 0, 25 / 512, 25 / 1024, 50 / 512, 50 / 1024 }, p.panels[2].values)
  end)

  it("has the mean of rows on one cell, and nothing where there is no row", function()
    local rows = make_rows()
    local row = table.remove(rows, 1)
    rows[#rows + 1] = { config = rows[1].config, metrics = { accuracy = 1 } }
    rows[#rows + 1] = { config = rows[1].config, metrics = { accuracy = NAN } }
    local p = plot.heat_maps(rows, VIEW)
    local values = p.panels[1].values
    assert.equal(1024, row.config.context)
    assert.is_true(values[2] ~= values[2])
    assert.near((50 / 1024 + 1) / 2, values[6], 1e-15)
  end)

  it("refuses what it cannot draw", function()
    assert.error_matches(function() plot.heat_maps({}, VIEW) end, "no rows")
    assert.error_matches(function() plot.heat_maps(make_rows(), { x = "context" }) end,
      "value is missing, expected a string")
    assert.error_matches(function()
      plot.heat_map { rows = 2, columns = 3, panels = { { values = { 1, 2 } } } }
    end, "panel 1 has 2 values, expected 2 x 3")
    assert.error_matches(function()
      plot.heat_map { rows = 0, columns = 3, panels = { { values = {} } } }
    end, "panel 1 has 0 values, expected 0 x 3")
  end)

  it("is written in characters, the same for all panels", function()
    local p = plot.heat_map { rows = 2, columns = 2, row_names = { "early", "late" },
      panels = { { title = "one", values = { 0, 10, 5, NAN } },
                 { title = "two", values = { 20, 20, 20, 20 } } } }
    assert.equal([[
one
  early      ++++
   late  ::::????
two
  early  @@@@@@@@
   late  @@@@@@@@
         0 (blank) ... 20
]], (plot.text(p, 18)))
  end)

  it("takes the colours' ends from the view", function()
    local p = plot.heat_map { rows = 1, columns = 2, low = 0, high = 100,
                              panels = { { values = { 49, 150 } } } }
    assert.equal("      0  ====@@@@\n         0 (blank) ... 100\n", (plot.text(p, 18)))
  end)

  it("is an image of its cells beside the names of panels, rows and columns", function()
    if not is_installed() then return pending "gnuplot is not installed" end
    local view = { format = "%.2f", title = "needle?", ylabel = "how deep" }
    for key, value in pairs(VIEW) do view[key] = value end
    local svg = assert(plot.svg(plot.heat_maps(make_rows(), view)))
    local elements, outer = markup.read(svg)
    local images = 0
    for _, e in ipairs(elements) do
      if e.name == "image" then
        images = images + 1
        assert.equal("image-rendering: pixelated", e.attributes.style)
      end
    end
    assert.equal(2, images)
    assert.same({}, outer)
    for _, word in ipairs { "needle%?", "how deep", "quest", "full", "512", "1024", "25",
                            "accuracy", "0%.10" } do
      assert.truthy(svg:find(">" .. word .. "</text>"), word)
    end
  end)

  it("can be drawn of one cell, equal numbers, no finite number, and many", function()
    if not is_installed() then return pending "gnuplot is not installed" end
    local many = {}
    for i = 1, 3 * 5000 do many[i] = i end
    for _, case in ipairs {
      { 1, { rows = 1, columns = 1, panels = { { values = { 1 } } } } },
      { 1, { rows = 2, columns = 1, panels = { { values = { 1, 1 / 0 } } } } },
      { 0, { rows = 1, columns = 3, panels = { { values = { NAN, NAN, NAN } } } } },
      { 1, { rows = 1, columns = 2, panels = { { values = { 2, 2 } },
                                               { values = { NAN, NAN } } } } },
      { 1, { rows = 3, columns = 5000, panels = { { values = many } } } },
    } do
      local images, p = unpack(case)
      p.title = "<&'\""
      local svg = assert(plot.svg(plot.heat_map(p)))
      markup.read(svg)
      assert.equal(images, select(2, svg:gsub("<image", "")))
      assert.truthy(plot.text(p, 60))
    end
  end)
end)
