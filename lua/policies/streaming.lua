--- StreamingLLM: holds the first tokens and the newest ones, and evicts the others.
-- Source  Xiao et al. 2023, arXiv:2309.17453. Tokens keep their positions here; the paper
--         numbers them anew by their places in its cache
-- Worth   the position, so that the oldest token after the sinks goes
-- Cost    reads the positions of the tokens that are held
-- Fails   everything between the sinks and the newest tokens is lost
local kv = require "kvlab"

return kv.policy.define {
  name = "streaming", decode = true, own_bytes = 0,
  defaults = { ratio = 0.1, sink = 1, recent = 0 },

  evict = function() return nil end,
}
