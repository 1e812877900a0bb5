--- Mass oracle: scores each block by the share of the attention that lies in it. Within a
-- budget, no selection of blocks per KV head keeps more of the attention's mass.
-- Score   the logsumexp of the block's logits under a head, less that of all blocks, exp;
--         the mean over the group's query heads
-- Bounds  attention_mass, from above, of every policy with the same budget. It does not
--         bound output_error or accuracy: a block's values may matter more than its mass
-- Cost    reads every key and value, so it saves nothing: a bound, not a method
--         An expression sees one block, and the softmax is over all of them. For groups
--         of one head it can be a logsumexp and then a softmax, in a third of the time
-- Fails   ALiBi and windows change the logits, but are not taken into account
local kv = require "kvlab"

return kv.policy.define {
  name = "mass_oracle", prefill = false, decode = true, own_bytes = 0,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2 },

  score = function(_, ctx) return ctx:masses() end,
}
