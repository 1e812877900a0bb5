--- Tolerance: f32 means against double, 1e-6.
local kv = require "kvlab"
local small = require "spec.policies.small"
local support = require "spec.support"

--- The mean of the `count` keys farthest from the mean of them all.
local function representative(keys, count)
  local mean, order = small.mean(keys), {}
  for i, key in ipairs(keys) do
    local distance = 0
    for d = 1, #key do distance = distance + (key[d] - mean[d]) ^ 2 end
    order[i] = { distance = distance, key = key }
  end
  table.sort(order, function(a, b) return a.distance > b.distance end)
  local chosen = {}
  for i = 1, math.min(count, #order) do chosen[i] = order[i].key end
  return small.mean(chosen)
end

describe("infllm", function()
  for _, c in ipairs { { { 22 }, 0, 2 }, { { 5, 17 }, 2, 2 }, { { 3, 6 }, 11, 3 },
                       { { 22 }, 0, 9 } } do
    local chunks, steps, count = c[1], c[2], c[3]
    local what = "keeps the mean of %d far keys, %d chunks, %d steps"
    it(what:format(count, #chunks, steps),
      function()
        local policy = kv.policy("infllm", { representatives = count })
        local run = small.play(policy, chunks, steps)
        local all, want, got = policy.summary.mean:layer(0):list(), {}, {}
        for b, block in ipairs(run.seq:table()) do
          local keys = small.keys_of(run, b - 1, 1)
          if #keys == small.SHAPE.block_size or steps == 0 then
            for kv_head = 1, 2 do
              local mean = representative(small.keys_of(run, b - 1, kv_head), count)
              for d = 1, 8 do
                want[#want + 1] = mean[d]
                got[#got + 1] = all[(block * 2 + kv_head - 1) * 8 + d]
              end
            end
          end
        end
        support.close(got, want, 1e-6)
      end)
  end
end)
