--- Tolerance: f32 sums against double, 1e-6.
local kv = require "kvlab"
local small = require "spec.policies.small"
local support = require "spec.support"

local function unit(x)
  local length, u = math.sqrt(small.dot(x, x)), {}
  for d = 1, #x do u[d] = x[d] / length end
  return u
end

describe("keydiff_blocks", function()
  for _, c in ipairs { { { 22 }, 1 }, { { 5, 17 }, 1 }, { { 22 }, 8 }, { { 3 }, 1 } } do
    local chunks, steps = c[1], c[2]
    local what = "scores blocks by their angle to all, %d chunks, %d steps"
    it(what:format(#chunks, steps),
      function()
        local policy = kv.policy "keydiff_blocks"
        local run = small.play(policy, chunks, steps)
        local want, n = {}, math.floor((#run.k - 1) / small.SHAPE.block_size)
        for kv_head = 1, 2 do
          local units = {}
          for b = 0, n - 1 do
            units[b + 1] = unit(small.mean(small.keys_of(run, b, kv_head)))
          end
          local anchor = n > 0 and unit(small.mean(units))
          for b = 1, n do want[#want + 1] = -small.dot(units[b], anchor) end
          want[#want + 1] = 1 -- the block after them
        end
        support.close(small.tallied(run, policy.scores, n + 1), want, 1e-6)
      end)
  end
end)
