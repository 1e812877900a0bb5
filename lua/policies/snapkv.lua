--- SnapKV: the prompt's last queries vote once for the blocks that the answer will need.
-- Source  Li et al. 2024, arXiv:2404.14469. In the paper each head keeps the tokens with
--         most votes, pooled over neighbours, all tokens of the window, and all that are
--         decoded; it drops the others. Here each KV head selects blocks and none is
--         dropped. Blocks of the window have no privilege: they need votes, or to be
--         among the `recent` ones. Decoded blocks come first, but within the budget.
--         Votes are summed over a block and not pooled over neighbours
-- Score   the attention that the prompt's last `window` queries pay to a block, the mean
--         over them and a group's heads. The softmax is over the full blocks only: keys
--         of the prompt's open block take no part of the weight. Blocks that are not full
--         at the first decode step come first
-- Cost    the products of the window with all keys, once a request. For them the device
--         keeps all keys (half of the KV), and window * heads queries a layer
-- Fails   questions that come after the prompt: the votes do not change during generation
local kv = require "kvlab"

--- seq.state[self]: the queries that will vote, by layer; false after they have voted.
local function keep_queries(self, ctx, seq, _, first, count)
  if seq.state[self] == false then return end
  local kept = seq.state[self] or {}
  kept[ctx.layer] = ctx:newest_queries(kept[ctx.layer], first, count, self.window)
  seq.state[self] = kept
end

local function vote(self, ctx, seq, i, layer, queries)
  local s, length, rows = self.shape, seq:length() - 1, queries:size(0)
  local columns = length - length % s.block_size
  local weights = ctx:group_queries(queries, layer, 0, rows)
    :matmul_t(self.keys:gather(ctx, layer, i, columns / s.block_size):cast "f32")
    :reshape { s.heads, rows, columns }
    :add(ctx:causal_bias(rows, columns, length - rows + 1, 1)):softmax(ctx.scale)
  self.votes:put(seq, layer, weights
    :reshape { s.kv_heads, s.heads / s.kv_heads * rows, columns }:mean(1)
    :reshape { s.kv_heads, -1, s.block_size }:sum(2))
end

return kv.policy.define {
  name = "snapkv", prefill = false, decode = true, own_bytes = 0, watches_prompt = true,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2, window = 32 },
  takes = { window = kv.policy.count },

  init = function(self, shape)
    self.keys, self.votes = kv.summary.keys(shape), kv.tally(shape, nil, math.huge)
  end,
  on_prefill_offload = function(self, ev) self.keys:update(ev) end,
  on_decode_offload = function(self, ev) -- tokens may be decoded before the first draft
    if self.drafts then self.keys:update(ev) end
  end,
  attention_finished = function(self, ctx)
    if ctx.is_prefill then ctx:each_sequence(keep_queries, self) end
  end,
  step_begin = function(self, ctx)
    self.votes:begin(ctx)
    for i, seq in ipairs(ctx.sequences) do
      for layer, queries in pairs(seq.state[self] or {}) do
        kv.scope(vote, self, ctx, seq, i - 1, layer, queries)
      end
      seq.state[self] = false
    end
  end,
  score = function(self, ctx) return self.votes:load(ctx) end,
  inherit = function(self, seq, fork)
    fork.state[self] = seq.state[self] and {}
    for layer, q in pairs(seq.state[self] or {}) do fork.state[self][layer] = q end
  end,
  reset = function(self) self.votes:reset() end,
}
