local bars = require "kvlab.report.bars"
local markup = require "spec.markup"
local plot = require "kvlab.report.plot"
local styles = require "kvlab.report.styles"

local function is_installed()
  local ok = os.execute "command -v gnuplot >/dev/null 2>&1"
  return ok == 0 or ok == true
end

local function row(prompts, policy, budget, tokens_s, limit)
  return { config = { prompts = prompts, policy = policy, budget = budget },
           metrics = { tokens_s = tokens_s, limit = limit } }
end

local ROWS = {
  row("1x32K", "full", nil, 210, 240), row("1x32K", "quest", 0.05, 233, 300),
  row("1x32K", "transformers", nil, 19, 240), row("8x32K", "quest", 0.05, 1516, 1950),
  row("8x32K", "full", nil, 0 / 0, 900),
}
local VIEW = { value = "tokens_s", bar = "policy", split = "budget", panel = "prompts",
               limit = "limit", format = "%.0f", xlabel = "tokens a second" }

describe("bars", function()
  it("are one for each row with a number, in a panel for each value", function()
    local p = plot.bars(ROWS, VIEW)
    assert.equal("tokens a second by policy", p.title)
    assert.same({ "1x32K", "8x32K" }, { p.panels[1].title, p.panels[2].title })
    assert.equal(3, #p.panels[1].bars)
    assert.same({ { name = "quest, budget = 0.05", series = "quest", value = 1516,
                    limit = 1950 } }, p.panels[2].bars)
  end)

  it("begin at 0, have their policy's colour, and a line at their limit", function()
    local script = bars.script(plot.bars(ROWS, VIEW))
    local quest = styles.of({ "quest" }, true).quest.colour
    assert.truthy(script:find("0 -2 0 233 -2.36 -1.64", 1, true))
    assert.truthy(script:find(('boxxyerror lc rgb "%s" fs solid 1 '):format(quest), 1,
      true))
    assert.truthy(script:find("\n300 -2.45 0 0.9\n", 1, true))
    assert.truthy(script:find("title 'limit'", 1, true))
    for low, high in script:gmatch "set xrange %[(%d+):([%d.]+)%]\nset yrange %[%-" do
      assert.equal(0, tonumber(low))
      assert.is_true(tonumber(high) > 300)
    end
  end)

  it("have no line and no key without limits, and intervals where rows have them",
    function()
      local rows = { row("a", "quest", 0.1, 5) }
      rows[1].low, rows[1].high = { tokens_s = 4 }, { tokens_s = 6 }
      local script = bars.script(plot.bars(rows, VIEW))
      assert.falsy(script:find("nohead", 1, true))
      assert.truthy(script:find("\n5 -1 4 6\n", 1, true))
    end)

  it("are drawn with their names and numbers, and without any, too", function()
    if not is_installed() then return pending "gnuplot is not installed" end
    local svg = assert(plot.svg(plot.bars(ROWS, VIEW)))
    markup.read(svg)
    for _, word in ipairs { "full", "quest, budget = 0%.05", "transformers", "8x32K",
                            "210", "1516", "tokens a second", "limit" } do
      assert.truthy(svg:find(">%s*" .. word .. "%s*</text>"), word)
    end
    markup.read(assert(plot.svg(plot.bars({}, VIEW))))
    assert.error_matches(function() plot.text(plot.bars(ROWS, VIEW)) end, "draws no bars")
  end)
end)
