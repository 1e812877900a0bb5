--- Block mean: scores each block by the product of the query and the block's mean key.
-- Source  UCM's GSA represents blocks in this way (kpre, one mean per block and KV head);
--         InfLLM and NSA score against pooled keys in the same way
-- Score   q . mean(K); the max over the group's query heads
-- Cost    reads 1/block_size of the keys (in f32); no host synchronisation
-- Fails   one matching key among block_size others disappears in the average
local kv, e = require "kvlab", require("kvlab").expr

return kv.policy.define {
  name = "block_mean", prefill = false, decode = true,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2 },

  summary = { mean = e.k:mean "token" },
  score = (e.q * e.mean):sum "dim":max "head",
}
