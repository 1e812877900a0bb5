--- Layers: the first `dense` layers attend to every block, the others as `base` selects.
-- Source  Quest (Tang et al. 2024, arXiv:2406.10774) leaves two layers dense: attention
--         in the first ones is spread out, and few blocks hold little of it
-- Score   that of `base`, a policy that selects in decode, within the same budget
-- Cost    `dense` layers read all of K and V: soon more than all the others together
-- Fails   as `base` does; a budget says nothing of the dense layers
local kv = require "kvlab"

return kv.policy.define {
  name = "layers", prefill = false, decode = true,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2, dense = 2,
               base = "quest" },
  takes = { dense = kv.policy.whole },

  init = function(self) self.inner = kv.policy.nest(self, self.base) end,
  select_blocks = function(self, ctx)
    if ctx.layer >= self.dense then return self.inner:select_blocks(ctx) end
  end,
  score_bytes = function(self, shape) return self.inner:score_bytes(shape) end,
}
