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

  --- The rectangles of an SVG's panels, by the number of the panel.
  local function rectangles(svg)
    local panels = {}
    for panel, body in svg:gmatch "<title>%$m(%d+)</title>(.-)\n\t</g>" do
      local list = {}
      for colour, path in body:gmatch "<path fill='(.-)' d='(.-)'" do
        for x, y, w, h in path:gmatch "M([%d.]+) ([%d.]+)h([%d.]+)v([%d.]+)H[%d.]+z" do
          list[#list + 1] = { x = tonumber(x), y = tonumber(y), w = tonumber(w),
                              h = tonumber(h), colour = colour }
        end
      end
      panels[tonumber(panel)] = list
    end
    return panels
  end

  it("is made of rectangles, beside the names of panels, rows and columns", function()
    if not is_installed() then return pending "gnuplot is not installed" end
    local view = { format = "%.2f", title = "needle?", ylabel = "how deep" }
    for key, value in pairs(VIEW) do view[key] = value end
    local svg = assert(plot.svg(plot.heat_maps(make_rows(), view)))
    local elements, outer = markup.read(svg)
    for _, e in ipairs(elements) do assert.not_equal("image", e.name) end
    assert.same({}, outer)
    local panels = rectangles(svg)
    assert.equal(2, #panels)
    assert.equal(5, #panels[1]) -- both cells of the first row are 0
    for _, word in ipairs { "needle%?", "how deep", "quest", "full", "512", "1024", "25",
                            "accuracy", "0%.10" } do
      assert.truthy(svg:find(">" .. word .. "</text>"), word)
    end
  end)

  it("has the colour of each cell in the middle of the cell", function()
    if not is_installed() then return pending "gnuplot is not installed" end
    local values = { 0, 1, 1, 0, 1, 0, 1, 0, 1, 1, 0, 0 }
    local list = rectangles(assert(plot.svg(plot.heat_map { rows = 3, columns = 4,
      panels = { { values = values } } })))[1]
    local left, top, right, bottom = 1 / 0, 1 / 0, 0, 0
    for _, r in ipairs(list) do
      left, top = math.min(left, r.x), math.min(top, r.y)
      right, bottom = math.max(right, r.x + r.w), math.max(bottom, r.y + r.h)
    end
    for i, value in ipairs(values) do
      local x = left + ((i - 1) % 4 + 0.5) / 4 * (right - left)
      local y = top + (math.floor((i - 1) / 4) + 0.5) / 3 * (bottom - top)
      local colour
      for _, r in ipairs(list) do
        if x > r.x and x < r.x + r.w and y > r.y and y < r.y + r.h then
          colour = r.colour
        end
      end
      assert.equal(value == 1 and "rgb(253, 231,  37)" or "rgb( 68,   1,  84)", colour)
    end
  end)

  it("joins neighbours of one colour", function()
    if not is_installed() then return pending "gnuplot is not installed" end
    local values = {}
    for i = 1, 30 * 40 do values[i] = i <= 15 * 40 and 3 or 5 end
    local svg = assert(plot.svg(plot.heat_map { rows = 30, columns = 40,
      panels = { { values = values } } }))
    assert.equal(2, #rectangles(svg)[1])
  end)

  it("has means of cells that no picture can show, and its title says so", function()
    if not is_installed() then return pending "gnuplot is not installed" end
    local values = {}
    for i = 1, 600 * 900 do values[i] = i * 7919 % 1000 end
    local svg = assert(plot.svg(plot.heat_map { rows = 600, columns = 900,
      title = "noise", panels = { { values = values } } }))
    local down, across = svg:match ">noise, means of (%d+) x (%d+) numbers<"
    assert.is_true(tonumber(down) >= 3 and tonumber(across) >= 3)
    assert.is_true(#svg < 1.5e6, #svg)
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
      local drawn, p = unpack(case)
      p.title = "<&'\""
      local svg = assert(plot.svg(plot.heat_map(p)))
      markup.read(svg)
      local count = 0
      for _, list in pairs(rectangles(svg)) do count = count + (#list > 0 and 1 or 0) end
      assert.equal(drawn, count)
      assert.truthy(plot.text(p, 60))
    end
  end)
end)
