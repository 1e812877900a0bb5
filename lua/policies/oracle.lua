--- Oracle: scores each block by its exact largest q.k. A policy that sees blocks only
-- through a summary cannot rank them better by their largest logit.
-- Score   max over the block's tokens of q.k; the max over the group's query heads
-- Cost    reads every key, so it saves only the values: a bound on quality, not a method
-- Fails   many middling keys together can outweigh one large key; it does not see that
local kv = require "kvlab"

return kv.policy.define {
  name = "oracle", prefill = false, decode = true,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2 },

  score = function(_, ctx) return kv.ops.score_max_qk(ctx.query, ctx) end,
  score_bytes = function(_, shape)
    return shape.block_size * shape.head_dim * kv.dtype_bytes(shape.dtype)
  end,
}
