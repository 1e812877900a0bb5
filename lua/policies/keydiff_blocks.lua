--- KeyDiff by blocks: selects the blocks whose keys differ most from the other keys of
-- the sequence, whatever the query is.
-- Source  Park et al. 2025, arXiv:2504.15364. The paper selects tokens by the cosine of
--         each key to the mean of all unit keys, and evicts the others for good. This
--         policy selects blocks by the cosine of their mean key, and none is dropped
-- Score   -cos(mean key of the block, mean of the unit vectors of all mean keys of the
--         sequence), over full blocks, computed when one becomes full; the open block
--         comes first
-- Cost    reads 1/block_size of the keys (in f32) every block_size steps; needs no query.
--         An expression sees one block, and the mean of the unit vectors is over all
-- Fails   questions about blocks that look common, since it never sees the question
local kv = require "kvlab"

--- x divided by the lengths of its vectors; the lengths are reshaped to `dims`.
local function unit(x, dims)
  return x / (x * x):sum(-1):sqrt():add(1e-20):reshape(dims)
end

--- Puts the scores of the full blocks of sequence i (from 0): f32 [kv_heads, blocks].
local function differences(self, ctx, seq, i, layer, blocks)
  local means = self.means:gather(ctx, layer, i, blocks)
  local heads, dim = means:size(0), means:size(2)
  local units = unit(means, { heads, blocks, 1 })
  local anchor = unit(units:mean(1), { heads, 1 }):reshape { heads, 1, dim }
  self.scores:put(seq, layer, (units * anchor):sum(2):neg())
end

return kv.policy.define {
  name = "keydiff_blocks", prefill = false, decode = true, own_bytes = 0,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2 },

  init = function(self, shape)
    self.means, self.scores = kv.summary.mean(shape), kv.tally(shape, nil, 1)
  end,
  on_prefill_offload = function(self, ev) self.means:update(ev) end,
  on_decode_offload = function(self, ev) self.means:update(ev) end,
  step_begin = function(self, ctx)
    self.scores:begin(ctx)
    for i, seq in ipairs(ctx.sequences) do
      local blocks = math.floor((seq:length() - 1) / self.shape.block_size)
      if blocks > 0 and seq.state[self] ~= blocks then -- more full blocks than before
        for layer = 0, ctx.layers - 1 do
          kv.scope(differences, self, ctx, seq, i - 1, layer, blocks)
        end
        seq.state[self] = blocks
      end
    end
  end,
  score = function(self, ctx) return self.scores:load(ctx) end,
  reset = function(self) self.scores:reset() end,
}
