--- That the fewest blocks are kept is spec/kernels/trim_selection_spec.lua's to prove.
local kv = require "kvlab"
local rig = require "spec.rig"
local small = require "spec.policies.small"

local function counts(p)
  local run = rig.decode(kv.device "cpu", { policy = "twilight", lengths = { 250, 400 },
    steps = 2, options = { ratio = 0.5, sink = 1, recent = 2, p = p } })
  return run.steps[2].counts:list()
end

describe("twilight", function()
  it("takes sink and recent for 0, the budget for 1, and more for more", function()
    assert.same({ 3, 3, 3, 3 }, counts(0))
    assert.same({ 8, 8, 13, 13 }, counts(1))
    local some, more = counts(0.3), counts(0.4)
    for i = 1, 4 do assert.is_true(some[i] >= 3 and some[i] <= more[i]) end
    assert.is_true(more[1] + more[2] + more[3] + more[4] < 42)
  end)

  it("keeps the blocks that hold the share by their mean keys, and no more", function()
    local run = small.play(kv.policy("twilight", { ratio = 1, sink = 0, recent = 0,
                                                        p = 0.8 }), { 61 }, 1)
    local row_of = run.selection:index(0)
    for kv_head = 1, 2 do
      local scores = {}
      for b = 0, 15 do -- the larger of the group's two
        local mean = small.mean(small.keys_of(run, b, kv_head))
        scores[b + 1] = math.max(small.dot(run.q[62][2 * kv_head - 1], mean),
          small.dot(run.q[62][2 * kv_head], mean)) / math.sqrt(8)
      end
      local weights, held, least = small.softmax(scores), 0, 1
      for _, block in ipairs(row_of:index(kv_head - 1):list()) do
        if block >= 0 then
          held, least = held + weights[block + 1], math.min(least, weights[block + 1])
        end
      end
      assert.is_true(held >= 0.8 and held - least < 0.8)
    end
  end)
end)
