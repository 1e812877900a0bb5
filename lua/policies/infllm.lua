--- InfLLM: represents each block by a few of its tokens.
-- Source  Xiao et al. 2024, arXiv:2402.04617. The paper takes the tokens that the queries
--         of the following tokens attend to most, and looks blocks up once for a group of
--         tokens, and gives all far tokens one position. This policy takes the keys
--         farthest from their block's mean, looks blocks up for every token, and leaves
--         positions as they are
-- Score   the sum over the representatives of q . k. It ranks blocks like q . their mean
--         does, so one vector a block is kept; the max over the group's query heads
-- Cost    reads 1/block_size of the keys (in f32); choosing the representatives compares
--         the keys of a block once for each of them (98 at most)
-- Fails   a key that is near the mean of its block is not found. Keys at one distance are
--         chosen together
local kv, e = require "kvlab", require("kvlab").expr

--- The mean of the n keys of a block that are farthest from the mean of all its keys: n
-- times, the farthest of those that are left.
local function far(n)
  local from = e.k - e.k:mean "token"
  local left, chosen = (from * from):sum "dim", nil
  for _ = 1, n do
    local is = left:eq(left:max "token")
    chosen = chosen and chosen:bor(is) or is
    left = is:where(-1, left)
  end
  return chosen:where(e.k, 0):sum "token" / chosen:cast "i32":sum "token"
end

return kv.policy.define {
  name = "infllm", prefill = false, decode = true,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2, representatives = 4 },
  takes = { representatives = kv.policy.within(1, 98) },

  summary = function(o) return { mean = far(o.representatives) } end,
  score = (e.q * e.mean):sum "dim":max "head",
}
