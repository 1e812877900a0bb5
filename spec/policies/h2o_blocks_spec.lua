--- Tolerance: f32 sums against double, 1e-5.
local kv = require "kvlab"
local small = require "spec.policies.small"
local support = require "spec.support"

--- Weights of the first `blocks` blocks by their mean keys, for the query of token t.
local function weights_of(run, t, head, kv_head, blocks)
  local scores = {}
  for b = 0, blocks - 1 do
    local mean = small.mean(small.keys_of(run, b, kv_head))
    scores[b + 1] = small.dot(run.q[t][head], mean) / math.sqrt(#mean)
  end
  return blocks > 0 and small.softmax(scores) or {}
end

local function mass_of(run, prompt, n)
  local s, flat = small.SHAPE, {}
  for kv_head = 1, s.kv_heads do
    local mass = {}
    for b = 1, n do mass[b] = 0 end
    for t = 1, prompt do
      for head = 2 * kv_head - 1, 2 * kv_head do
        local before = math.floor((t - 1) / s.block_size)
        for b, weight in ipairs(weights_of(run, t, head, kv_head, before)) do
          mass[b] = mass[b] + weight / 2
        end
      end
    end
    for b = 1, n do flat[#flat + 1] = mass[b] end
  end
  return flat
end

describe("h2o_blocks", function()
  for _, chunks in ipairs { { 22 }, { 5, 7, 10 }, { 1, 21 } } do
    it(("counts the attention of a prompt in %d chunks"):format(#chunks), function()
      local policy = kv.policy "h2o_blocks"
      local run = small.play(policy, chunks, 0)
      run.attention:begin(run.cache:batch():append({ run.seq }, { 1 }), false)
      support.close(small.tallied(run, policy.mass, 5), mass_of(run, 22, 5), 1e-5, 1e-5)
    end)
  end

  for _, steps in ipairs { 1, 2, 3, 9 } do
    it(("counts %d decoded queries as those of a prompt"):format(steps), function()
      for _, chunks in ipairs { { 20 }, { 1 }, { 3, 11 } } do
        local policy, prompt = kv.policy "h2o_blocks", 0
        for _, n in ipairs(chunks) do prompt = prompt + n end
        local run = small.play(policy, chunks, steps)
        local n = math.ceil((prompt + steps) / small.SHAPE.block_size)
        support.close(small.tallied(run, policy.mass, n),
          mass_of(run, prompt + steps, n), 1e-5, 1e-5)
      end
    end)
  end
end)
