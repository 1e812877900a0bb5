--- Random: draws blocks uniformly, again for every token, layer and KV head. Every policy
-- should beat it.
-- Score   a Philox number in (0, 1] from seed, length and layer; the same on every device
-- Cost    reads no keys to score
-- Fails   always: at a ratio r it keeps a given block with probability about r
local kv = require "kvlab"

return kv.policy.define {
  name = "random", prefill = false, decode = true,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2, seed = 0 },

  score = function(self, ctx)
    return ctx:new_scores():rand_(self.seed, ctx.total_kv_len * ctx.layers + ctx.layer)
  end,
}
