--- What the specs of select and trim_selection share: { name, cases }, for both devices.
-- run(dev, case, true) gives a selection and counts, expected(case) what they have to be.
local support = require "spec.support"

local M = {}

local NAN = 0 / 0

--- The case with limits: of each sequence and list, or of each list. Some are 0, below
-- sink + recent, above the number of blocks, negative or NaN. Ratios are hundredths.
function M.ragged(seed, c)
  local rng, n = support.rng(seed * 31 + c.max_blocks), c.max_blocks
  c.dtype, c.limits = seed % 2 == 0 and "f32" or "i32", {}
  for i = 1, (seed % 5 < 3 and #c.lens or 1) * c.heads do
    local odd = rng(8)
    if c.dtype == "i32" then
      c.limits[i] = odd == 0 and 0 or odd == 1 and -7 or odd == 2 and n + 5 or rng(n)
    else
      c.limits[i] = odd == 0 and 0 or odd == 1 and -1 or odd == 2 and NAN
        or odd == 3 and 2 or rng(101) / 100
    end
  end
  return c
end

--- The budget of list h (from 0) of sequence s, for the reference.
function M.budget_of(c, s, h)
  if not c.limits then return c.budget end
  local limit = c.limits[(#c.limits > c.heads and s or 0) * c.heads + h + 1]
  if limit ~= limit or limit < 0 then limit = 0 end
  local own = { ratio = c.dtype == "f32" and math.min(limit, 1) or nil,
                blocks = c.dtype == "i32" and limit or nil }
  return setmetatable(own, { __index = function(_, key)
    return key ~= "ratio" and key ~= "blocks" and c.budget[key] or nil
  end })
end

local function compare(case, i, selection, counts, want, want_counts)
  local what = (" of case %d (%s)"):format(i, case.kind)
  support.equal(selection, want, "selection" .. what)
  support.equal(counts, want_counts, "counts" .. what)
end

--- Exact on the CPU.
function M.on_cpu(topic, run, expected)
  expected = support.once(expected)
  support.it_on_cpu(topic[1], function(dev)
    for i, c in ipairs(support.sample_for_isa(topic[2])) do
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
