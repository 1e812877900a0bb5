--- Any script of steps, for any policy, gives the same on every tier, from graphs, and
-- after steps that were interrupted (spec/scripts.lua). More of them:
-- ./kvlab run spec/random_steps.lua --set from=1 --set to=1000
local scripts = require "spec.scripts"
local support = require "spec.support"

local SCRIPTS = support.is_full and 80 or 20 -- each twice

support.each_device(function(dev)
  local name = "random scripts of steps give the same on any tier on %s #policy"
  it(name:format(dev:name()), function()
    local failed = 0
    for seed = 1, SCRIPTS do
      local why, count = scripts.differs(dev, seed)
      assert(not why, why)
      failed = failed + count
    end
    assert.is_true(failed > 5 * SCRIPTS, failed)
  end)
end)
