--- Layers: the first `dense` layers attend to every block; `base` selects in the others.
-- Source  Quest (Tang et al. 2024, arXiv:2406.10774) leaves two layers dense: attention
--         is spread out in the first layers, so a few blocks hold little of it
-- Score   the score of `base`, a policy that selects in decode, within the same budget
-- Cost    the dense layers read all of K and V, soon more than all other layers together
-- Fails   where `base` fails; and the budget does not limit the dense layers
local kv = require "kvlab"

return kv.policy.define {
  name = "layers", prefill = false, decode = true, own_bytes = 0,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2, dense = 2,
               base = "quest" },
  takes = { dense = kv.policy.whole, base = kv.policy.policy_name },

  init = function(self) self.inner = kv.policy.nest(self, self.base) end,
  select_blocks = function(self, ctx)
    if ctx.layer >= self.dense then return self.inner:select_blocks(ctx) end
  end,
}
