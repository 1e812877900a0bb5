--- Prints how often the intervals of kvlab.statistics hold the truth, and Student's t
-- beside them: the table of docs/experiments.md.
--
--   ./kvlab run tools/coverage.lua
local kv = require "kvlab"

package.path = kv.paths.root .. "/?.lua;" .. package.path
local coverage = require "spec.lua.experiment.coverage"

local SAMPLES = 10000

local function line(words, t, interval, draw, truth)
  local inside_t, flat = coverage.of(t, draw, truth, SAMPLES)
  io.write(("| %s | %.3f | %.3f | %.3f |\n"):format(words, inside_t, flat,
    (coverage.of(interval, draw, truth, SAMPLES))))
end

io.write "| samples | t | t has no width | kvlab |\n|---|---|---|---|\n"
for _, n in ipairs { 5, 8, 16, 64 } do
  for _, p in ipairs { 0.02, 0.1, 0.5, 0.9 } do
    line(("%d texts, right with %g"):format(n, p), coverage.t, coverage.share,
      coverage.texts(n, p), p)
  end
end
for _, same in ipairs { 0, 0.3 } do
  for _, p in ipairs { 0.1, 0.99 } do
    line(("5 seeds of 8 x 16 questions, right with %g%s"):format(p, same > 0
      and ", 30% of a context's alike" or ""), coverage.t, function(values)
        return coverage.share(values, 128)
      end, coverage.seeds(5, p, 8, 16, same), p)
  end
end
for _, n in ipairs { 8, 64 } do
  for _, case in ipairs { { 0.1, 0 }, { 0.1, 0.1 }, { 0.3, 0.05 } } do
    line(("%d texts, only the first policy right with %g, only the second with %g")
      :format(n, case[1], case[2]), coverage.t_difference, coverage.difference,
      coverage.pairs_of_texts(n, case[1], case[2]), case[1] - case[2])
  end
end
