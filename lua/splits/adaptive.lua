--- Adaptive: the blocks with the best scores of all KV heads of a layer are selected,
-- so a head whose attention is spread out has more of them than one that looks at few.
-- Source  AdaKV, Feng et al. 2024, arXiv:2407.11550, with its safeguard as kvpress has
--         it: each head always gets its best `floor` of an even share, and the rest goes
--         to the best scores of all heads. The authors' code adds the two instead: floor
--         * even + (1 - floor) * what the head has among the best scores, rounded. The
--         paper divides tokens by attention weights, once after the prompt; this divides
--         blocks by the policy's score, whenever it selects. It needs scores that are
--         comparable among heads: with `softmax`, each head's scores become weights,
--         softmax(scale * score). Use it where a score is a q.k (quest, block_mean,
--         oracle, infllm, nsa), not where it is a share already (h2o_blocks,
--         snapkv_blocks, mass_oracle, twilight) or no logit
-- Cost    two selections and about 20 small launches more in a layer. Lists are as wide
--         as all heads' budgets together, and a hot cache needs slots for that many
-- Fails   scores of different scales: the head with the largest numbers gets all but
--         floors
local kv = require "kvlab"

local BEFORE, MOST = math.huge, 1e30 -- more than any score; larger scores count as this

--- The logarithms of softmax(scale * scores): -inf stays, and nothing else becomes it.
local function log_weights(ctx, scores)
  local unit = ctx.format:scales(ctx.layer)
  if unit then scores = scores * unit:reshape { 1, ctx.kv_heads, 1 } end
  scores = scores * ctx.scale
  return scores - scores:logsumexp(2):reshape { ctx.seqs, ctx.kv_heads, 1 }
end

--- How many of each head's entries are among the best of all heads: i32 [seqs, kv_heads].
---@param best kvlab.Tensor   f32 [seqs, kv_heads, width]
---@param total kvlab.Tensor  i32 [seqs, 1]: how many are taken
local function count_best(ctx, best, total)
  local dev, seqs, heads, width = ctx.device, ctx.seqs, ctx.kv_heads, ctx.width
  local all = heads * width
  local taken = kv.ops.select(best:reshape { seqs, 1, all },
    kv.full(dev, "i32", { seqs }, all), 1, kv.policy.recent(0),
    kv.tensor(dev, "i32", { seqs, 1, all }), nil, total):reshape { seqs, all }
  return kv.zeros(dev, "f32", { seqs, all })
    :scatter_(taken, kv.ones(dev, "f32", { seqs, all }))
    :reshape { seqs, heads, width }:sum(2):cast "i32"
end

return kv.split.define {
  name = "adaptive", defaults = { floor = 0.2, softmax = false },
  takes = { floor = kv.policy.share },

  heads = function(self, ctx, scores, even, budget)
    local dev, seqs, width = ctx.device, ctx.seqs, ctx.width
    local floor = even:cast "f32":mul(self.floor):cast "i32"
    local sure = ctx:mark((ctx:select(scores, budget, floor)))
    local blocks = (ctx.lens + (ctx.block_size - 1)) / ctx.block_size
    local past = kv.arange(dev, "i32", width):ge(blocks:reshape { seqs, 1 })
    local own = scores + past:where(-math.huge, 0):reshape { seqs, 1, width }
    local best = (self.softmax and log_weights(ctx, own) or own):minimum(MOST)
    best = sure:gt(0):where(BEFORE, best)
    return count_best(ctx, best, even:sum(1):reshape { seqs, 1 })
  end,
}
