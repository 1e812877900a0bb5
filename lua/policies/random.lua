--- Random: draws blocks uniformly, again for every token, layer and KV head. Every policy
-- should beat it.
-- Score   a Philox number in (0, 1] from seed, length and layer; the same on every device
-- Cost    reads no keys to score
-- Fails   always: at a ratio r it keeps a given block with probability about r
local kv = require "kvlab"

local function new_draws(ctx)
  local draws = {}
  for layer = 0, ctx.layers - 1 do
    draws[layer] = kv.tensor(ctx.device, "f32", { ctx.seqs, ctx.kv_heads, ctx.width })
  end
  return draws
end

return kv.policy.define {
  name = "random", prefill = false, decode = true,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2, seed = 0 },

  init = function(self) self.draws = {} end,
  -- here and not in score, because a graph that replays score would repeat its draws
  step_begin = function(self, ctx)
    local draws = self.draws[ctx.shape_number] or kv.lasting(new_draws, ctx)
    self.draws[ctx.shape_number] = draws
    for layer = 0, ctx.layers - 1 do
      draws[layer]:rand_(self.seed, ctx.total_kv_len * ctx.layers + layer)
    end
  end,
  score = function(self, ctx)
    return ctx:new_scores():copy_(self.draws[ctx.shape_number][ctx.layer])
  end,
}
