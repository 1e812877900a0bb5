--- What the specs of select and trim_selection share: { name, cases }, for both devices.
-- run(dev, case, true) gives a selection and counts, expected(case) what they have to be.
local support = require "spec.support"

local M = {}

local function compare(case, i, selection, counts, want, want_counts)
  local what = (" of case %d (%s)"):format(i, case.kind)
  support.equal(selection, want, "selection" .. what)
  support.equal(counts, want_counts, "counts" .. what)
end

--- Exact on the CPU.
function M.on_cpu(topic, run, expected)
  expected = support.once(expected)
  support.it_on_cpu(topic[1], function(dev)
    for i, c in ipairs(support.sample(topic[2])) do
      local selection, counts = run(dev, c, true)
      compare(c, i, selection, counts, expected(c))
    end
  end)
end

--- The same on the GPU as on the CPU.
function M.on_gpu(topic, run)
  support.it_on_gpu(topic[1], function(cuda, cpu)
    for i, c in ipairs(topic[2]) do
      local selection, counts = run(cuda, c, true)
      compare(c, i, selection, counts, run(cpu, c, true))
    end
  end)
end

return M
