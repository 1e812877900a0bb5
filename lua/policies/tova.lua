--- TOVA: evicts the token that the newest query attends to least.
-- Source  Oren et al. 2024, arXiv:2401.06104. The paper drops one token for all heads of
--         a layer, by the mean of their weights. Tables by layer do so here. Tables by
--         head drop one for each KV head, by the mean over its group
-- Worth   the weight of each token in the attention of the newest query, of the prompt or
--         decoded, exact
-- Cost    the weights of one query a step; 4 bytes for each token that is held
-- Fails   tokens that the newest query does not attend to are lost to all later queries
local kv = require "kvlab"
local e = kv.expr

return kv.policy.define {
  name = "tova", decode = true, own_bytes = 0, watches_prompt = true,
  defaults = { ratio = 0.1, sink = 0, recent = 0 },
  emit = { newest = e.where(e.query_index:ge(e.length - 1), e.weight, 0):mean "head" },

  init = function(self, shape) self.newest = kv.tally(shape, nil, 0, "token") end,
  attention_finished = function(self, ctx)
    self.newest:store(ctx, self.emitted.newest)
  end,
  evict = function(self) return self.newest end,
  reset = function(self) self.newest:reset() end,
}
