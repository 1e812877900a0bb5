--- What the shipped experiments take: a wrong value of any axis or setting is refused,
-- with its name, before the first row.
local files = require "kvlab.files"
local kv = require "kvlab"
local plan = require "kvlab.experiment.plan"
local sorted = require "kvlab.sorted"
local support = require "spec.support"

if support.is_hostile then return end

local FOLDER = kv.paths.root .. "/lua/experiments"

-- Names of files, which only reading them can refuse: the first row does.
local NAMES = { model = true, capture = true, text = true, heads = true, trace = true }

--- What a script gives to kv.experiment.run.
local function described(path)
  local run, found = kv.experiment.run, nil
  kv.experiment.run = function(spec) found = spec end
  local ok, why = pcall(assert(loadfile(path)))
  kv.experiment.run = run
  assert(ok, why)
  return found
end

--- Why the values are refused, or nil.
local function refused(spec, set)
  local ok, why = pcall(plan.new, spec, { set = set, quick = true, seed = 0 })
  return not ok and tostring(why) or nil
end

local function is_free(spec, name)
  local kind = (spec.kinds or {})[name]
  return NAMES[name] and (not kind or kind[1] == "a string")
end

describe("an experiment", function()
  for _, file in ipairs(files.list(FOLDER)) do
    local name = file:match "^(%d.*)%.lua$"
    local path = FOLDER .. "/" .. file
    local spec = name and files.read(path):find("kv.experiment.run {", 1, true)
      and described(path)
    if spec then
      it(name .. " refuses what its axes and settings cannot be, by name", function()
        assert.is_nil(refused(spec, {}))
        local all = {}
        for _, axis in ipairs(spec.grid) do all[axis[1]] = axis[2][1] end
        for setting, value in pairs(spec.defaults or {}) do all[setting] = value end
        for _, setting in ipairs(sorted.keys(all)) do
          local wrong = type(all[setting]) == "number" and { "bogus", -1 } or { "bogus" }
          for _, value in ipairs(is_free(spec, setting) and {} or wrong) do
            local why = refused(spec, { [setting] = value })
            local words = ("%s = %s"):format(setting, value)
            assert(why, words .. " is taken")
            assert(why:find(setting, 1, true) or why:find(tostring(value), 1, true),
              words .. ": " .. why)
          end
        end
      end)
    end
  end
end)
