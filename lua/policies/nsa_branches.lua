--- NSA in three branches: attention over compressed blocks, over selected blocks and over
-- a sliding window; the three results are added with gates.
-- Source  Native Sparse Attention, Yuan et al. 2025, arXiv:2502.11089. The paper trains
--         compression and gates, its compressed blocks overlap, and its window is the
--         newest `window` tokens. Here a compressed key is a block's mean (or a weighted
--         sum, see `compression`), blocks do not overlap, and gates are given numbers or
--         sigmoids of q . w. The window is whole blocks, the open one among them:
--         ceil(window / block_size), so it sees up to block_size - 1 tokens fewer
-- Score   the softmax over compressed keys, summed over a group's heads, as in the paper.
--         Only full blocks have a compressed key: the compressed branch and the softmax
--         leave the open block out, and it is selected as a recent one
-- Cost    2 f32 vectors a block and KV head, about 20 small launches, three attentions
-- Fails   a model that was not trained with it: each branch is only a share of the output
--         that the model expects. With gates 0, 1, 0 it is block selection, as elsewhere
local kv = require "kvlab"

local function update(self, ev) self.compressed:update(ev) end

--- The gate of branch i (from 0): a number, or f32 [seqs, heads, 1] from the queries.
local function gate(self, ctx, i, value)
  local w = self.gate_weights[ctx.layer + 1]
  if not w then return value end
  return ctx.query:reshape { -1, self.shape.head_dim }:cast "f32"
    :matmul(w:index(i):reshape { -1, 1 }):sigmoid():reshape { ctx.seqs, -1, 1 }
end

local function like(query) return kv.tensor(query.device, "f32", query:dims()) end

local function other_branches(self, attention, ctx)
  local _, v_scale = attention.cache.format:scales(ctx.layer)
  local newest = kv.policy.recent(math.ceil(self.window / ctx.block_size))
  local window = like(ctx.query)
  attention:over(ctx:select(ctx:new_scores(1):fill_(0), newest), ctx, window)
  return self.compressed:attend(ctx, v_scale) * gate(self, ctx, 0, self.gate_compressed)
    + window * gate(self, ctx, 2, self.gate_window)
end

local function add_selected(self, attention, ctx, selection, others, out)
  local selected = attention:over(selection, ctx, like(ctx.query))
  return (selected * gate(self, ctx, 1, self.gate_selected) + others)
    :cast(ctx.query:type(), out)
end

return kv.policy.define {
  name = "nsa_branches", prefill = false, decode = true, own_bytes = 0,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2, window = 64,
               gate_compressed = 1 / 3, gate_selected = 1 / 3, gate_window = 1 / 3,
               gate_weights = {}, compression = {} },
  takes = { window = kv.policy.count },
  complete = { gate_compressed = 0, gate_selected = 1, gate_window = 0 },

  init = function(self, shape)
    self.compressed = kv.compressed(shape, self.compression[1] and self.compression)
  end,
  on_prefill_offload = update, on_decode_offload = update,
  score = function(self, ctx) return self.compressed:score(ctx) end,
  compute_decode = function(self, attention, ctx, out)
    local others = kv.scope(other_branches, self, attention, ctx)
    local selection, counts = self:select_blocks(ctx)
    out = kv.scope(add_selected, self, attention, ctx, selection, others, out)
    others:free()
    return out, selection, counts
  end,
}
