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

  -- What a row of a page of KV memory would be found by: "(block * 2 + half) * kv_heads",
  -- "2 * kv_heads * block_size", "kv_heads * block_size * head_dim".
  local ARITHMETIC = { "%* 2 %+.*kv_heads", "2 %*.*kv_heads.*size",
    "kv_heads%)? %*.*size.*dim", "size %* [%w_.>-]*dim.*kv_heads" }
  -- Files with a layout of their own: vLLM's, the reference's of vLLM, and harnesses.
  local function has_other_layout(file)
    return file:find "vllm" or file:find "^kernels/dev/" or file == "kernels/page.h"
  end

  it("finds the rows of a page in kernels/page.h alone", function()
    local found = {}
    for name in pairs { lua = true, c = true } do
      for _, file in ipairs(house[name](root).files) do
        local number = 0
        for line in io.lines(root .. "/" .. file) do
          number = number + 1
          local code = line:gsub("%-%-.*", ""):gsub("/%*.*", ""):gsub("^ %*.*", "")
          for _, pattern in ipairs(has_other_layout(file) and {} or ARITHMETIC) do
            if code:find(pattern) then
              found[#found + 1] = ("%s:%d: %s"):format(file, number, line)
            end
          end
        end
      end
    end
    assert.equal("", table.concat(found, "\n"))
  end)

  it("has comments that name only files that there are", function()
    local files = require "kvlab.files"
    local missing = {}
    for _, file in ipairs(house.c(root).files) do
      local text = files.read(root .. "/" .. file)
      for _, room in ipairs { "kernels", "notes", "bench", "spec", "tools" } do
        for path in text:gmatch(room .. "/[%w_/.-]+%.%l+") do
          local there = path:find "NAME" or files.real(root .. "/" .. path)
          if not there then missing[#missing + 1] = file .. ": " .. path end
        end
      end
    end
    assert.equal("", table.concat(missing, "\n"))
  end)

  describe("as docs/architecture.md shows it", function()
    local files = require "kvlab.files"
    local docs = root .. "/docs/"

    local function rooms()
      local all = house.rooms(house.lua(root), house.LUA_ROOMS)
      for name, room in pairs(house.rooms(house.c(root), house.C_ROOMS)) do
        all[name] = room
      end
      return all
    end

    it("has the rooms that there are, and about as many lines", function()
      local page, seen = files.read(docs .. "architecture.md"), {}
      for name, count, lines in page:gmatch "\n| `([^`]+)` | (%d+) | (%d+) |" do
        seen[name] = { files = tonumber(count), lines = tonumber(lines) }
      end
      for name, room in pairs(rooms()) do
        local shown = assert(seen[name], name .. " is missing")
        local allowed = math.max(100, 0.15 * room.lines)
        assert.is_true(math.abs(shown.lines - room.lines) <= allowed
          and math.abs(shown.files - room.files) <= math.max(2, 0.15 * room.files),
          ("%s has %d files and %d lines: ./kvlab run tools/house.lua table"):format(name,
          room.files, room.lines))
        seen[name] = nil
      end
      assert.is_nil(next(seen))
    end)

    it("is drawn with the arrows that there are", function()
      local drawn, needed = {}, {}
      local picture = files.read(docs .. "house.svg")
      for from, to in picture:gmatch "<title>([^<]+)&#45;&gt;([^<]+)</title>" do
        drawn[#drawn + 1] = from .. " -> " .. to
      end
      for _, arrow in ipairs(house.arrows(rooms())) do
        needed[#needed + 1] = table.concat(arrow, " -> ")
      end
      table.sort(drawn)
      table.sort(needed)
      assert.same(needed, drawn, "tools/house.lua draws it anew")
    end)
  end)

  it("has the arrows that do not follow from others", function()
    local needs = { a = { b = 1, c = 1, d = 1 }, b = { c = 1 }, c = {}, d = { e = 1 } }
    local plan = {}
    for name, needed in pairs(needs) do plan[name] = { needs = needed } end
    assert.same({ { "a", "b" }, { "a", "d" }, { "b", "c" }, { "d", "e" } },
      house.arrows(plan))
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
