local grids = require "kvlab.experiment.grid"

--- The configurations as texts, without device and seed.
local function list(grid, when)
  local texts = {}
  for i, config in ipairs(grids.configurations(grid, { seed = 0 }, when)) do
    texts[i] = grids.describe(grid, config)
  end
  return texts
end

local function problem_of(axes, defaults)
  return select(2, pcall(grids.new, axes, defaults))
end

local function assert_has(words, text)
  assert.truthy(tostring(text):find(words, 1, true), text)
end

describe("grid", function()
  it("varies zipped axes together", function()
    local slots = { { 2, 1024 }, { 4, 512 }, { 8, 512 } }
    local grid = grids.new { { { "slots", "size" }, slots }, { "policy", { "a", "b" } } }
    assert.same({ "slots=2 size=1024 policy=a", "slots=2 size=1024 policy=b",
      "slots=4 size=512 policy=a", "slots=4 size=512 policy=b",
      "slots=8 size=512 policy=a", "slots=8 size=512 policy=b" }, list(grid))
    assert.same({ 1024, 512 }, grid.axis_of.size.values)
  end)

  it("has an axis only where its `when` wants it, by the axes before it", function()
    local seen = {}
    local grid = grids.new({
      { "policy", { "full", "hash" } },
      { "bits", { 32, 64 }, when = function(c)
        seen[#seen + 1] = ("%s %s %s"):format(c.policy, c.prompts, tostring(c.seed))
        return c.policy == "hash"
      end },
      { "budget", { 1, 2 } },
    }, { prompts = 8 })
    assert.same({ "policy=full budget=1", "policy=full budget=2",
      "policy=hash bits=32 budget=1", "policy=hash bits=32 budget=2",
      "policy=hash bits=64 budget=1", "policy=hash bits=64 budget=2" }, list(grid))
    assert.same({ "full 8 0", "hash 8 0" }, seen)
    local backwards = grids.new { { "bits", { 32 } },
      { "policy", { "hash", "full" }, when = function(c) return c.bits == 32 end } }
    assert.same({ "bits=32 policy=hash", "bits=32 policy=full" }, list(backwards))
  end)

  it("is one configuration without axes", function()
    assert.same({ "" }, list(grids.new {}))
  end)

  it("keeps of zipped axes what --set names, and replaces conditional ones", function()
    local axes = { { { "slots", "size" }, { { 2, 1024 }, { 4, 512 }, { 8, 512 } } },
                   { "bits", { 32 }, when = function(c) return c.slots == 8 end } }
    local grid = grids.new(axes)
    grids.override(grid, "size", 512, "--set")
    grids.override(grid, "bits", "64,128", "--set")
    assert.same({ "slots=4 size=512", "slots=8 size=512 bits=64",
      "slots=8 size=512 bits=128" }, list(grid))
    assert.same({ 4, 8 }, grid.axis_of.slots.values)
    local ok, problem = pcall(grids.override, grid, "slots", "3", "--set")
    assert.is_false(ok)
    assert_has("--set slots: zipped axes take only values that they have: 4, 8", problem)
    assert.same(3, #axes[1][2]) -- the script's own list is as it was
  end)

  it("says what is wrong with an axis", function()
    assert_has("value 2 of axes a, b is a list of 1, expected { a, b }",
      problem_of { { { "a", "b" }, { { 1, 2 }, { 1 } } } })
    assert_has("value 1 of axes a, b is 7", problem_of { { { "a", "b" }, { 7 } } })
    assert_has("axes a, b have { 1, 2 } twice",
      problem_of { { { "a", "b" }, { { 1, 2 }, { 1, 2 } } } })
    assert_has("axes a, b have no values", problem_of { { { "a", "b" }, {} } })
    assert_has("an axis a is defined twice",
      problem_of { { { "a", "a" }, { { 1, 2 } } } })
    assert_has("when is 3, expected a function", problem_of { { "a", { 1 }, when = 3 } })
    assert_has('grid[1] has "wen"', problem_of { { "a", { 1 }, wen = 3 } })
    assert_has("an axis is named nil", problem_of { {} })
    assert_has("cannot be named repeats", problem_of({}, { repeats = 3 }))
  end)
end)
