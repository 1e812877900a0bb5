--- SnapKV by blocks: the prompt's last queries vote once for the blocks that the answer
-- will need.
-- Source  Li et al. 2024, arXiv:2404.14469. In the paper each head keeps the tokens with
--         most votes, pooled over neighbours, all tokens of the window, and all that are
--         decoded; it drops the others. Here each KV head selects blocks and none is
--         dropped. Blocks of the window have no privilege: they need votes, or to be
--         among the `recent` ones. Decoded blocks come first, but within the budget.
--         Votes are summed over a block and not pooled over neighbours
-- Score   the attention that the prompt's last `window` queries pay to a block, the mean
--         over them and a group's heads. Blocks that are not full at the end of the
--         prompt come first
-- Cost    the products of the window with all keys, in the first decode step of a
--         request; if the keys lie in host memory, they cross the link once. The weights
--         of one layer, 4 * window * heads bytes a token, and two copies of its keys in
--         f32 take memory for that time. Until then, window * heads queries of each layer
--         are kept
-- Fails   questions that come after the prompt: the votes do not change during generation
local kv = require "kvlab"

--- seq.state[self]: the queries that will vote, by layer, and the length of the prompt so
-- far; false after they have voted.
local function keep_queries(self, ctx, seq, _, first, count)
  if seq.state[self] == false then return end
  local kept = seq.state[self] or {}
  kept[ctx.layer] = ctx:newest_queries(kept[ctx.layer], first, count, self.window)
  kept.length = seq:length()
  seq.state[self] = kept
end

local function vote(self, ctx, seq, i, layer, queries, length)
  local size = self.shape.block_size
  local full = math.floor(length / size)
  if not queries or full == 0 then return end
  local votes = ctx:attention_weights(queries, layer, i, length):mean(1)
    :reshape { self.shape.kv_heads, -1, size }:sum(2)
  self.votes:put(seq, layer, votes[(":, 0:%d"):format(full)])
end

return kv.policy.define {
  name = "snapkv_blocks", prefill = false, decode = true, own_bytes = 0,
  watches_prompt = true,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2, window = 32 },
  takes = { window = kv.policy.count },

  init = function(self, shape) self.votes = kv.tally(shape, nil, math.huge) end,
  attention_finished = function(self, ctx)
    if ctx.is_prefill then ctx:each_sequence(keep_queries, self) end
  end,
  step_begin = function(self, ctx)
    self.votes:begin(ctx)
    for i, seq in ipairs(ctx.sequences) do
      local kept = seq.state[self] or {}
      for layer = 0, kept.length and self.shape.layers - 1 or -1 do
        kv.scope(vote, self, ctx, seq, i - 1, layer, kept[layer], kept.length)
      end
      seq.state[self] = false
    end
  end,
  score = function(self, ctx) return self.votes:load(ctx) end,
  inherit = function(self, seq, fork)
    fork.state[self] = seq.state[self] and {}
    for key, value in pairs(seq.state[self] or {}) do fork.state[self][key] = value end
  end,
  reset = function(self) self.votes:reset() end,
}
