--- H2O: the heavy hitters, blocks that had most of the attention so far.
-- Source  Zhang et al. 2023, arXiv:2306.14048. There tokens are kept, half of the budget
--         for the newest, and what is dropped is gone; here blocks, `recent` of them, and
--         a block that was passed over still gathers its share
-- Score   sum over all earlier queries, of the prompt too, of the softmax over blocks of
--         q . mean(K), an estimate of a block's attention; the mean over a group's heads
-- Cost    reads 1/block_size of the keys (in f32) to keep count, for prompt queries too
-- Fails   what nothing has asked for yet: an answer that the prompt never looked at. One
--         heavy token among light ones is averaged away
local kv = require "kvlab"

--- The attention of a chunk's queries to the blocks that were complete before each one's
-- own: f32 [kv_heads, n].
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
  score_bytes = function(self) return self.means:bytes_block() end,
  reset = function(self) self.mass:reset() end,
}
