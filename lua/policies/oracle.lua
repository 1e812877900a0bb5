--- Oracle: scores each block by its exact largest q.k. Policies such as quest bound or
-- estimate this number from a summary: it shows what a perfect summary would give.
-- Score   max over the block's tokens of q.k; the max over the group's query heads
-- Bounds  it considers only the largest logit: mass_oracle keeps more of the attention
--         within the same budget, and other policies can beat this one
-- Cost    reads every key, so it saves only the values: a reference, not a method. As an
--         expression it is as fast on a GPU and takes 1.4 to 1.8 times as long on a CPU
-- Fails   many medium keys together can outweigh one large key, which it does not notice
local kv = require "kvlab"

return kv.policy.define {
  name = "oracle", prefill = false, decode = true, own_bytes = 0,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2 },

  score = function(_, ctx) return kv.ops.score_max_qk(ctx.query, ctx) end,
}
