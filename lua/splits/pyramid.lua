--- Pyramid: more blocks for the first layers and fewer for the last, in equal steps.
-- Source  PyramidKV, Cai et al. 2024, arXiv:2406.02069: the last layer gets 1 / beta of
--         the mean, and the first what then remains. Blocks that are always kept (there
--         the window's, here sink, recent and min_blocks) are not divided. A ratio is
--         divided whole, and sink, recent and min_blocks hold in every layer, so at short
--         contexts the last layers have more than their share. If the first layer would
--         get more than all blocks, it gets all blocks, and the last layer the rest, as
--         in kvpress
-- Cost    none in a step: the numbers are those of a list by layer
-- Fails   models whose attention is no more spread in the first layers than in the last
local kv = require "kvlab"

return kv.split.define {
  name = "pyramid", defaults = { beta = 20 },
  takes = { beta = { "a number >= 1", function(x)
    return type(x) == "number" and x >= 1 and x < math.huge
  end } },

  layers = function(self, mean, most, count)
    local first = math.min(2 * mean - mean / self.beta, most)
    local step, list = count > 1 and 2 * (first - mean) / (count - 1) or 0, {}
    for i = 1, count do list[i] = count > 1 and first - (i - 1) * step or mean end
    return list
  end,
}
