local kv = require "kvlab"
local lines = require "kvlab.report.lines"
local plot = require "kvlab.report.plot"
local styles = require "kvlab.report.styles"

local function look(s) return ("%s %d %d"):format(s.colour, s.marker, s.dash) end

--- What the script of a picture says of each policy: the legend's name -> its style.
local function drawn(policies)
  local rows, found, style_of = {}, {}, {}
  for _, policy in ipairs(policies) do
    for budget = 1, 3 do
      rows[#rows + 1] = { config = { policy = policy, budget = budget },
                          metrics = { accuracy = budget } }
    end
  end
  local script = lines.script(plot.lines(rows, { x = "budget", y = "accuracy",
    series = "policy" }))
  for i, style in script:gmatch "set style line (%d+) (lc[^\n]+)" do
    style_of[i] = style
  end
  for i, name in script:gmatch "ls (%d+) title '([^']+)'" do found[name] = style_of[i] end
  return found
end

describe("style", function()
  it("of a policy is the same in two pictures with different policies", function()
    local one = drawn { "full", "quest", "mine", "random" }
    local other = drawn { "h2o_blocks", "mine", "yours", "gsa_on_device", "quest" }
    assert.truthy(one.quest and one.mine)
    assert.equal(one.quest, other.quest)
    assert.equal(one.mine, other.mine)
  end)

  it("is in the table only for policies that there are", function()
    local known = {}
    for _, name in ipairs(kv.policy.names()) do known[name] = true end
    for _, name in ipairs(styles.policies()) do assert.is_true(known[name], name) end
  end)

  it("differs in colour or marker for each of them, and for those of a user", function()
    local names, seen = styles.policies(), {}
    for i = 1, 28 do names[#names + 1] = "own_" .. i end
    for name, style in pairs(styles.of(names, true)) do
      local key = style.colour .. " " .. style.marker
      if name:find "^own" then key = look(style) end
      assert.is_nil(seen[key], name)
      seen[key] = name
    end
  end)

  it("of a user's policy has a colour that nothing else has while there is one",
    function()
      local own, shown = {}, { "full", "quest", "block_mean", "gsa_on_device" }
      for letter in ("abcdefghijklmnopqrstuvwxyz"):gmatch "." do
        local names, seen = { letter, letter .. "_2", unpack(shown) }, {}
        local of = styles.of(names, true)
        for name, style in pairs(of) do
          assert.is_nil(seen[style.colour], name)
          seen[style.colour] = name
        end
        own[of[letter].colour] = true
      end
      assert.is_truthy(next(own, next(own))) -- its name decides among the free ones
    end)

  it("of other series follows their order", function()
    local of = styles.of { "256", "quest" }
    assert.equal(styles.COLOURS[1], of["256"].colour)
    assert.equal(styles.COLOURS[2], of.quest.colour)
  end)
end)
