--- Plays random scripts of steps (spec/scripts.lua) for as many seeds as asked, and
-- prints those that differ or raise. A script that differs by a near tie (see NOISE in
-- spec/scripts.lua) is printed, but is no failure.
--
--   ./kvlab run spec/random_steps.lua --set from=1 --set to=1000
package.path = require("kvlab").paths.root .. "/?.lua;" .. package.path
local kv = require "kvlab"
local options = require "kvlab.options"
local scripts = require "spec.scripts"

local set = options.check("random_steps", kv.command_line.set,
  { from = options.count, to = options.count })
local from, to = set.from or 1, set.to or 100
local device, differ, near_ties, failed = kv.device(), 0, 0, 0
for seed = from, to do
  local ok, why, count, near_tie = pcall(scripts.differs, device, seed)
  if ok then
    failed = failed + count
  else
    why = ("seed %d raises: %s"):format(seed, why)
  end
  if near_tie then
    near_ties = near_ties + 1
    print(("%s\nA near tie: with noise, the plain engine is off by %g."):format(why,
      near_tie))
  elseif why then
    differ = differ + 1
    print(why)
  end
  collectgarbage()
end
print(("%d scripts with %d interrupted steps, %d differ, %d more by a near tie"):format(
  to - from + 1, failed, differ, near_ties))
if differ > 0 then os.exit(1) end
