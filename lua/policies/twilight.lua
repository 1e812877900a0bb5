--- Twilight: selects as many blocks as hold a given share of the attention, up to the
-- budget.
-- Source  Lin et al. 2025, arXiv:2502.02770 (top-p in place of top-k). The paper prunes
--         the tokens that another policy selected, by weights from 4-bit keys. This
--         policy prunes blocks, by weights from their mean keys: a mean counts once,
--         however many tokens its block has. Sink and recent blocks always stay
-- Score   softmax over blocks of q . mean(K), which estimates a block's attention; the
--         max over the group's heads is taken before the softmax. The heaviest blocks are
--         kept until their weights add up to `p`
-- Cost    reads 1/block_size of the keys (in f32); no host synchronisation
-- Fails   an estimate that is too sharp keeps one block of several that matter; one that
--         is too flat reaches the budget before `p`
local kv, e = require "kvlab", require("kvlab").expr

return kv.policy.define {
  name = "twilight", prefill = false, decode = true, own_bytes = 0,
  defaults = { ratio = 0.3, min_blocks = 0, sink = 1, recent = 2, p = 0.95 },
  takes = { p = kv.policy.share }, takes_less = true, complete = { p = 1 },

  summary = { mean = e.k:mean "token" },
  score = (e.q * e.mean):sum "dim":max "head",
  select_blocks = function(self, ctx)
    local weights = self:score(ctx)
    weights:softmax(ctx.scale, weights)
    local selection, counts = ctx:select(weights, self.budget)
    return ctx:trim(weights, self.p, self.budget, selection, counts)
  end,
}
