--- What a walk calls a cliff, on times that are made up; and that walks of bench/ run.
local bench = require "kvlab.shell.bench"
local host = require "bench.lib.host"
local json = require "kvlab.json"
local S = require "spec.support"
local temporary = require "spec.temporary"
local walk = require "bench.lib.walk"

--- Points along one axis; us and work are functions of its value.
local function along(axis, us, work)
  local points = {}
  for i = 2, #axis do
    points[i - 1] = { at = { [axis[1]] = axis[i] }, us = us(axis[i]),
                      work = (work or function(x) return x end)(axis[i]) }
  end
  return points
end

--- The values of the axis that stand out, in order of the axis.
local function cliffs_of(axis, us, work, floor)
  local points, found = along(axis, us, work), {}
  walk.judge({ axis }, points, floor)
  for _, p in ipairs(points) do
    if p.ratio > 1.5 then found[#found + 1] = p.at[axis[1]] end
  end
  return found, points
end

local DIMS = { "head_dim" }
for dim = 40, 256, 8 do DIMS[#DIMS + 1] = dim end

describe("a walk", function()
  it("finds no cliff where time grows with the work, a launch included", function()
    local powers = { "tokens", 1, 2, 4, 8, 16, 32, 64, 128, 256, 512 }
    for _, launch in ipairs { 0, 5, 1000 } do
      local found, points = cliffs_of(powers, function(n) return launch + 3 * n end)
      assert.same({}, found)
      for _, p in ipairs(points) do assert.is_true(p.ratio <= 1 + 1e-12) end
    end
  end)

  it("finds no cliff where bytes give way to flops", function()
    local heads = { "heads", 1, 2, 4, 8, 16, 32, 64, 128 }
    local function work(h) return 100 + 2 * h end
    assert.same({}, cliffs_of(heads, function(h) return 4 + work(h) / 0.8 end, work))
    assert.same({}, cliffs_of(heads, function(h) return math.max(100, 2 * h) end, work))
  end)

  it("finds a spike, and names the neighbour that it stands out beside", function()
    local found, points = cliffs_of(DIMS, function(d)
      return d == 104 and 206 or d == 112 and 103 or d
    end)
    assert.same({ 104 }, found)
    S.close({ points[9].ratio, points[9].trend_us }, { 2, 103 }, 0, 1e-12)
    assert.equal(112, points[9].beside.at.head_dim)
  end)

  it("finds the whole of a plateau between two fast shapes", function()
    local found, points = cliffs_of(DIMS, function(d)
      return (d > 64 and d < 128) and 3 * d or d
    end)
    assert.same({ 72, 80, 88, 96, 104, 112, 120 }, found)
    for _, p in ipairs(points) do
      if p.ratio > 1.5 then S.close({ p.ratio }, { 3 }, 0, 1e-12) end
    end
  end)

  it("finds a small shape that takes longer than larger ones", function()
    assert.same({ 40, 48, 56 }, cliffs_of(DIMS, function(d)
      return d < 64 and 4 * d or d
    end))
  end)

  it("finds the last shape of an axis", function()
    assert.same({ 256 }, cliffs_of(DIMS, function(d) return d == 256 and 2 * d or d end))
  end)

  it("finds no cliff below the floor, and raises the trend to it", function()
    local axis = { "rows", 1, 2, 3 }
    local function us(n) return n == 2 and 11 or 4 end
    local function work() return 1 end
    assert.same({ 2 }, cliffs_of(axis, us, work))
    assert.same({}, cliffs_of(axis, us, work, 8))
    assert.same({ 2 }, cliffs_of(axis, us, work, 7))
  end)

  it("compares every word of an axis with every other", function()
    local axis = { "features", "none", "cap", "ALiBi", "cap+ALiBi" }
    local us = { none = 100, cap = 140, ALiBi = 140, ["cap+ALiBi"] = 190 }
    assert.same({ "cap+ALiBi" }, cliffs_of(axis, function(f) return us[f] end,
      function() return 1 end))
  end)

  it("compares numbers up to a factor of 4", function()
    local function us(n) return n == 1 and 10 or 100 end
    local function work() return 1 end
    assert.same({ 4 }, cliffs_of({ "n", 1, 4 }, us, work))
    assert.same({}, cliffs_of({ "n", 1, 5 }, us, work))
  end)

  it("compares points that differ on one axis, unless that axis is apart", function()
    local function points()
      return { { at = { op = "a", n = 1 }, us = 100, work = 1 },
               { at = { op = "b", n = 2 }, us = 10, work = 1 } }
    end
    local axes = { { "op", "a", "b" }, { "n", 1, 2 } }
    assert.same({}, walk.judge(axes, points()))
    local list = points()
    list[3] = { at = { op = "a", n = 2 }, us = 60, work = 1 }
    local cliffs = walk.judge(axes, list)
    assert.equal(2, #cliffs)
    assert.equal(list[3], cliffs[1]) -- the highest first: 60 beside 10, 100 beside 60
    axes[1].apart = true
    assert.same({ list[1] }, walk.judge(axes, list))
  end)
end)

-- ---- the command ----------------------------------------------------------------------

--- Times come from `us`, and nothing is measured; the limits are 1.
local WALK = [[
return function(b)
  local now = 1
  b.limits["R 268435456 0"], b.limits.T = 1, 1
  function b:sample(fn)
    fn()
    return now, 0
  end
  b:case { id = "X1", name = "a case", setup = function() return { us = 1 } end }
  b:walk { id = "W1", name = "a walk", axes = { { "n", 1, 2, 3, 4, 6 }, { "f", "x" } },
    skip = function(at) return at.n == 6 end,
    make = function(c, at)
      c.quick, c.looks = false, c.looks or {}
      c.looks[at.n] = (c.looks[at.n] or 0) + 1
      return { bytes = 1000 * at.n, run = function()
        local is_slow = at.n == 4 or at.n == 3 and c.looks[3] == 1
        now = 1000 * at.n * (is_slow and 2 or 1)
      end, check = function() if at.n == 1 then error("it is wrong", 0) end end }
    end }
end
]]

local function run(o)
  local lines, said = {}, ""
  o.quick, o.device, o.set = true, "cpu", {}
  local status = bench.main(o, function(text)
    for line in text:gmatch "[^\n]+" do lines[#lines + 1] = line end
  end, function(text) said = said .. text end)
  return status, lines, said
end

local function with_file(fn) fn(temporary.file(WALK, "walk.lua")) end

describe("bench #release", function()
  it("prints a row for a walk, and one for each cliff that it measured twice", function()
    with_file(function(path)
      local status, lines, said = run { args = { path, "W1" }, json = true }
      local rows = {}
      for i, line in ipairs(lines) do rows[i] = json.decode(line) end
      assert.equal(1, status) -- one point failed
      assert.truthy(said:find("1 failed: W1", 1, true))
      assert.equal("a walk: n 1, f x", rows[2].name)
      assert.equal("it is wrong", rows[2].error)
      local all, cliff = rows[3], rows[4]
      assert.equal("a walk", all.name)
      assert.same({ 3, 1, "n 4, f x" }, { all.points, all.cliffs, all.at })
      assert.equal(3, #all.all)
      assert.same({ n = 3, f = "x" }, all.all[2].at)
      assert.equal("a walk: n 4, f x", cliff.name)
      S.close({ all.ratio, cliff.ratio, cliff.us, cliff.trend_us, all.all[2].us },
        { 2, 2, 8000, 4000, 3000 }, 0, 1e-9) -- 3 took 6000 when it was measured first
      assert.equal("n 2, f x", cliff.beside)
      assert.equal(4, #rows)
    end)
  end)

  it("prints walks as text", function()
    with_file(function(path)
      local _, lines = run { args = { path, "W1" } }
      assert.matches("^W1 +a walk +3 points, +1 above 1%.5, the highest 2%.00 at n 4, "
        .. "f x$", lines[#lines - 1])
      assert.matches("^W1 +a walk: n 4, f x +8000%.0 us +2%.00 x the 4000%.0 us that n "
        .. "2, f x allows$", lines[#lines])
    end)
  end)

  it("runs walks only when their file or their id is named", function()
    with_file(function(path)
      local lines_of = host.lines
      finally(function() host.lines = lines_of end)
      function host.lines() return { path } end
      local _, lines = run { args = {} }
      assert.falsy(table.concat(lines, "\n"):find("W1", 1, true))
      assert.truthy(lines[#lines]:find("a case", 1, true))
      for _, args in ipairs { { "W1" }, { path } } do
        _, lines = run { args = args }
        assert.truthy(lines[#lines]:find("W1", 1, true))
      end
    end)
  end)

  it("finds a file of bench/ by its name", function()
    local _, lines = run { args = { "cliffs" }, list = true }
    assert.is_true(#lines >= 15)
    for _, line in ipairs(lines) do assert.matches("^C%d+ ", line) end
    S.raises('no bench "cliff"', run, { args = { "cliff" } })
  end)

  it("has walks whose points pass their checks", function()
    local status, lines, said = run { args = { "cliffs", "C7", "C13", "C18" } }
    assert.equal(0, status, said)
    assert.truthy(table.concat(lines, "\n"):find("C18", 1, true))
  end)
end)
