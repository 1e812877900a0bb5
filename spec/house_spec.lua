--- The plan of the house (docs/architecture.md): dependencies point inward, without
-- circles. What needs what is read from the sources.
local house = require "spec.house"
local library = require "kvlab.library"

local root = library.paths.root
if not io.open(root .. "/premake5.lua") then return end -- a bundle has no C sources

local function made(files, needs)
  local h = { files = files, needs = {} }
  for _, file in ipairs(files) do h.needs[file] = {} end
  for from, to in pairs(needs) do h.needs[from][to] = true end
  return h
end

describe("house", function()
  for name, plan in pairs { lua = house.LUA_ROOMS, c = house.C_ROOMS } do
    local built = house[name](root)

    it("has a room for every file in " .. name, function()
      for _, file in ipairs(built.files) do
        assert.truthy(house.room(plan, file), file)
      end
      assert.is_true(#built.files > 50)
    end)

    it("has no circle in " .. name, function()
      assert.same({}, house.circle(built) or {})
    end)

    it("has no arrow outward in " .. name, function()
      assert.equal("", table.concat(house.outward(built, plan), "\n"))
    end)
  end

  it("has a core that requires no model, policy or experiment by name", function()
    local built = house.lua(root)
    for _, file in ipairs(built.files) do
      for other in pairs(file:find "^lua/kvlab/" and built.needs[file] or {}) do
        assert.truthy(other:find "^lua/kvlab/", file .. " requires " .. other)
      end
    end
  end)

  it("has kernels that know of the runtime only base.h", function()
    local built = house.c(root)
    for _, file in ipairs(built.files) do
      for other in pairs(file:find "^kernels/" and built.needs[file] or {}) do
        assert.truthy(other:find "^kernels/" or other == "runtime/base.h",
          file .. " includes " .. other)
      end
    end
  end)

  it("is told from one with a circle", function()
    assert.same({ "a", "b", "a" }, house.circle(made({ "a", "b" }, { a = "b", b = "a" })))
    assert.is_nil(house.circle(made({ "a", "b" }, { a = "b" })))
  end)

  it("is told from one with an arrow outward", function()
    local plan = { { "in" }, { "out", "beside" } }
    local files = { "in/a", "out/b", "beside/c" }
    assert.same({ "in/a needs out/b" },
      house.outward(made(files, { ["in/a"] = "out/b" }), plan))
    assert.same({}, house.outward(made(files, { ["out/b"] = "in/a" }), plan))
    assert.same({ "beside/c needs out/b" },
      house.outward(made(files, { ["beside/c"] = "out/b" }), plan))
  end)
end)
