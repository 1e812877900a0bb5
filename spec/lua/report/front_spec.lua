--- Pareto fronts, in tables and in pictures, against their definition.
local plot = require "kvlab.report.plot"
local text_table = require "kvlab.report.table"
local uniform = require "kvlab.tensor.uniform"

local NAN, INF = 0 / 0, math.huge
local STRANGE = { NAN, INF, -INF, "a word" }

local function is_there(row)
  local x, y = row.metrics.share, row.metrics.score
  return type(x) == "number" and x - x == 0 and type(y) == "number" and y - y == 0
    and not row.metrics.note
end

local function beats(a, b)
  local ax, ay, bx, by = a.metrics.share, a.metrics.score, b.metrics.share,
    b.metrics.score
  return ax <= bx and ay >= by and (ax < bx or ay > by)
end

--- The definition: the rows that no other row beats.
local function front_of(rows)
  local on = {}
  for _, row in ipairs(rows) do
    local is_beaten = not is_there(row)
    for _, other in ipairs(rows) do
      is_beaten = is_beaten or is_there(other) and beats(other, row)
    end
    if not is_beaten then on[#on + 1] = row end
  end
  return on
end

--- Up to twelve rows; `steps` different values make ties and equal points.
local function draw_rows(draw, steps)
  local function value()
    if draw() < 0.15 then return STRANGE[1 + math.floor(draw() * #STRANGE)] end
    return steps and math.floor(draw() * steps) / steps or draw()
  end
  local rows = {}
  for i = 1, 1 + math.floor(draw() * 12) do
    rows[i] = { config = { id = i },
                metrics = { share = value(), score = value(),
                            note = draw() < 0.1 and "is marked" or nil } }
  end
  return rows
end

local function ids(rows)
  local list = {}
  for i, row in ipairs(rows) do list[i] = row.config.id end
  table.sort(list)
  return table.concat(list, " ")
end

local function shown(rows)
  local t = text_table.front(rows, { front = "score", over = "share", axes = { "id" } })
  local list = {}
  for i, cells in ipairs(t.rows) do list[i] = tonumber(cells[1]) end
  table.sort(list)
  return table.concat(list, " ")
end

--- The corners of the front's line: the best score so far at each share.
local function corners_of(rows)
  local points, line = {}, {}
  for i, row in ipairs(rows) do points[i] = { row.metrics.share, row.metrics.score } end
  table.sort(points, function(a, b) return a[1] < b[1] end)
  for _, point in ipairs(points) do
    local last = line[#line]
    if not last then
      line[1] = point
    elseif point[1] ~= last[1] then
      line[#line + 1] = { point[1], last[2] }
      line[#line + 1] = point
    end
  end
  return line
end

describe("a Pareto front", function()
  for words, steps in pairs { ["random rows"] = false, ["rows with ties"] = 4 } do
    it("has the rows that no other row beats, of " .. words, function()
      local draw = uniform.generator(3)
      for _ = 1, 1000 do
        local rows = draw_rows(draw, steps)
        local expected = front_of(rows)
        assert.equal(ids(expected), shown(rows))
        local p = plot.lines(rows, { x = "share", y = "score", front = true })
        assert.same(corners_of(expected), p.panels[1].series["Pareto front"])
      end
    end)
  end

  local function row(id, share, score)
    return { config = { id = id }, metrics = { share = share, score = score } }
  end

  it("has both of two equal rows, and neither a dearer nor a worse one", function()
    local rows = { row(1, 0.1, 0.5), row(2, 0.1, 0.5), row(3, 0.2, 0.5), row(4, 0.1, 0.4),
                   row(5, 0.3, 0.6) }
    assert.equal("1 2 5", shown(rows))
  end)

  it("is empty where nothing is a number", function()
    local rows = { row(1, NAN, 0.5), row(2, 0.1, NAN), row(3, INF, 1), row(4, 0, INF) }
    assert.equal("", shown(rows))
    local p = plot.lines(rows, { x = "share", y = "score", front = true })
    assert.same({}, p.panels[1].series["Pareto front"])
  end)
end)
