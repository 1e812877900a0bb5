--- H2O: selects the heavy hitters, the blocks that received most of the attention so far.
-- Source  Zhang et al. 2023, arXiv:2306.14048. The paper keeps tokens, spends half of the
--         budget on the newest ones and drops the others for good. This policy selects
--         blocks, `recent` of them newest, and a block that it passed over still gathers
--         its share of the attention. A query of the prompt counts the full blocks
--         before its own block; a decoded one counts its own block too, however short
--         that is. So a token weighs a little more when it was decoded than when it was
--         prefilled
-- Score   sum over all earlier queries, those of the prompt included, of the softmax over
--         blocks of q . mean(K), which estimates a block's attention; the mean over a
--         group's heads
-- Cost    reads 1/block_size of the keys (in f32) to update the sums, also in the prompt
-- Fails   an answer that no earlier query has looked at is not found. One heavy token
--         among light ones disappears in the average
local kv = require "kvlab"

--- The attention of a chunk's queries to blocks, where each query counts only the blocks
-- that were complete before its own block: f32 [kv_heads, n].
local function chunk_mass(self, ctx, seq, i, first, count)
  local s, start = self.shape, seq:length() - count
  local n = math.floor((start + count - 1) / s.block_size)
  if n == 0 then return end
  local q = ctx:group_queries(ctx.query, ctx.layer, first, count)
  local group = s.heads / s.kv_heads
  local weights = q:matmul_t(self.means:gather(ctx, ctx.layer, i, n))
    :reshape { s.heads, count, n }:add(ctx:causal_bias(count, n, start, s.block_size))
    :softmax(ctx.scale)
  local mass = weights:reshape { s.kv_heads, group * count, n }:sum(1)
  self.mass:put(seq, ctx.layer, mass / group, true)
end

return kv.policy.define {
  name = "h2o", prefill = false, decode = true, watches_prompt = true,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 0, recent = 2 },

  init = function(self, shape)
    self.means, self.mass = kv.summary.mean(shape), kv.tally(shape)
  end,
  on_prefill_offload = function(self, ev) self.means:update(ev) end,
  on_decode_offload = function(self, ev) self.means:update(ev) end,
  attention_finished = function(self, ctx)
    if ctx.is_prefill then ctx:each_sequence(chunk_mass, self) end
  end,
  step_begin = function(self, ctx) self.mass:begin(ctx) end,
  select_blocks = function(self, ctx)
    local mass = self.mass:load(ctx)
    local selection, counts = ctx:select(mass, self.budget)
    local scores = kv.ops.score_mean(ctx.query, self.means, ctx, "mean")
    mass:add(ctx:weights(scores), mass)
    self.mass:store(ctx)
    return selection, counts
  end,
  score_bytes = function(self)
    return self.means:bytes_block() + self.mass:bytes_block()
  end,
  reset = function(self) self.mass:reset() end,
}
