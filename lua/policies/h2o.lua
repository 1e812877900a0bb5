--- H2O: evicts the token that received least of the attention so far.
-- Source  Zhang et al. 2023, arXiv:2306.14048. The paper spends half of the budget on
--         the newest tokens: so does `recent`, if it is half of the budget's blocks. Each
--         KV head evicts for itself, by the mean over its group
-- Worth   sum over all queries since the token came, those of the prompt included, of
--         the token's weight in their attention, exact
-- Cost    the prompt's weights are computed once more; 4 bytes for each held token
-- Fails   an answer that no earlier query has looked at is not found
local kv = require "kvlab"
local e = kv.expr

return kv.policy.define {
  name = "h2o", decode = true, own_bytes = 0, watches_prompt = true,
  defaults = { ratio = 0.1, sink = 0, recent = 2 },
  emit = { mass = e.weight:mean "head" },

  init = function(self, shape) self.mass = kv.tally(shape, nil, 0, "token") end,
  attention_finished = function(self, ctx)
    self.mass:count(ctx, self.emitted.mass)
  end,
  evict = function(self) return self.mass end,
  reset = function(self) self.mass:reset() end,
}
