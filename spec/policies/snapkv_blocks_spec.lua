--- Tolerance: f32 sums against double, 1e-6.
local kv = require "kvlab"
local small = require "spec.policies.small"
local support = require "spec.support"

--- The mean over the last `window` queries of the prompt, and a group's heads, of the
-- attention to each of the first n blocks.
local function votes_of(run, prompt, window, n)
  local s, flat = small.SHAPE, {}
  for kv_head = 1, s.kv_heads do
    local votes, voters = {}, 0
    for b = 1, n do votes[b] = 0 end
    for t = math.max(1, prompt - window + 1), prompt do
      for head = 2 * kv_head - 1, 2 * kv_head do
        local scores = {}
        for i = 1, t do
          scores[i] = small.dot(run.q[t][head], run.k[i][kv_head]) / math.sqrt(s.head_dim)
        end
        for i, weight in ipairs(small.softmax(scores)) do
          local b = math.floor((i - 1) / s.block_size) + 1
          if b <= n then votes[b] = votes[b] + weight end
        end
        voters = voters + 1
      end
    end
    for b = 1, n do flat[#flat + 1] = votes[b] / voters end
  end
  return flat
end

describe("snapkv_blocks", function()
  for _, c in ipairs { { window = 5, chunks = { 22 } },
                       { window = 5, chunks = { 3, 9, 10 } },
                       { window = 7, chunks = { 18, 1, 1, 1, 1 } },
                       { window = 64, chunks = { 12, 10 } } } do
    it(("lets the last %d queries of %d chunks vote"):format(c.window, #c.chunks),
      function()
        local policy = kv.policy("snapkv_blocks", { window = c.window })
        local run = small.play(policy, c.chunks, 1)
        support.close(small.tallied(run, policy.votes, 5), votes_of(run, 22, c.window, 5),
          1e-6, 1e-5)
      end)
  end

  it("votes once, and puts what is generated before everything else", function()
    local policy = kv.policy("snapkv_blocks", { window = 5 })
    local run = small.play(policy, { 22 }, 9)
    support.close(small.tallied(run, policy.votes, 5), votes_of(run, 22, 5, 5), 1e-6,
      1e-5)
    for _, head in ipairs { 0, 8 } do
      local votes = small.tallied(run, policy.votes, 8)
      for b = 6, 8 do assert.equal(math.huge, votes[head + b]) end
    end
  end)

  it("gives a fork the queries that have yet to vote", function()
    local policy = kv.policy("snapkv_blocks", { window = 5 })
    local run = small.play(policy, { 22 }, 0)
    local fork = run.seq:fork()
    run.seq:close()
    run.seq = fork
    local batch = run.cache:batch()
    batch:append({ fork }, { 1 })
    run.attention:begin(batch, false)
    support.close(small.tallied(run, policy.votes, 5), votes_of(run, 22, 5, 5), 1e-6,
      1e-5)
  end)

  it("cannot be attached when the prompt is gone", function()
    local run = small.play(kv.policy "full", { 22 }, 0)
    local attention = kv.attention { cache = run.cache, heads = small.SHAPE.heads,
                                     decode_policy = kv.policy "snapkv_blocks" }
    support.raises("policy snapkv_blocks watches the prompt's queries, which are gone",
      attention.adopt, attention, { run.seq })
  end)
end)
