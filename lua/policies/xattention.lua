--- XAttention: in prefill, attends to the blocks with the most weight on antidiagonals.
-- Source  Xu et al. 2025, arXiv:2503.16428. The paper takes blocks for each head and
--         block of 128 queries until they hold a threshold of the weight: 0.9 unless it
--         is given, as for Qwen2-VL; 0.9 or 0.95 for HunyuanVideo; for Llama one for each
--         head, found by search. This policy takes blocks for each KV head and a whole
--         chunk, within the budget, however much weight they hold. Its softmax is over
--         the full blocks before the chunk; the paper's has the chunk's own keys, too
-- Score   tokens form groups of `stride`; a pair of groups scores the sum over i of
--         q[stride - 1 - i] . k[i]. Softmax over the groups of earlier keys, then the sum
--         over the chunk's queries and over a block
-- Cost    1/stride of the products of dense attention, and a second copy of the keys
--         (half of the KV) on the device, so that scoring brings nothing over a link
-- Fails   heads that look for single tokens: the sum over a group hides them
local kv = require "kvlab"

--- The queries of one sequence in reversed groups: [kv_heads, rows, stride * head_dim].
local function grouped_queries(self, q, first, count)
  local s, stride, index = self.shape, self.stride, {}
  local groups = math.ceil(count / stride)
  for head = 0, s.heads - 1 do
    for a = 0, groups - 1 do
      for i = stride - 1, 0, -1 do
        local t = a * stride + i -- rows past the last token are zeros
        index[#index + 1] = t < count and (first + t) * s.heads + head or -1
      end
    end
  end
  return q:reshape { q:size(0) * s.heads, s.head_dim }
    :gather_rows(kv.from(s.device, "i32", index))
    :reshape { s.kv_heads, s.heads / s.kv_heads * groups, stride * s.head_dim }
end

--- The weight of each of the first n blocks, for every KV head: f32 [kv_heads, n].
local function block_weights(self, ctx, seq, first, count, n)
  local s, per_block = self.shape, self.shape.block_size / self.stride
  local keys = self.keys:gather(ctx, ctx.layer, seq, n):cast(ctx.query:type())
    :reshape { s.kv_heads, n * per_block, self.stride * s.head_dim }
  return grouped_queries(self, ctx.query, first, count):matmul_t(keys):cast "f32"
    :softmax(1 / (self.stride * math.sqrt(s.head_dim))):sum(1)
    :reshape { s.kv_heads, n, per_block }:sum(2)
end

return kv.policy.define {
  name = "xattention", prefill = true, decode = false,
  defaults = { ratio = 0.25, sink = 1, recent = 0, stride = 8 },
  takes = { stride = kv.policy.count },

  init = function(self, shape)
    self.stride = math.min(self.stride, shape.block_size)
    while shape.block_size % self.stride ~= 0 do self.stride = self.stride - 1 end
    self.keys = kv.summary.keys(shape)
  end,
  on_prefill_offload = function(self, ev) self.keys:update(ev) end,
  on_decode_offload = function(self, ev) self.keys:update(ev) end,
  score = function(self, ctx)
    return ctx:score_sequences(function(seq, first, count, n)
      return block_weights(self, ctx, seq, first, count, n)
    end)
  end,
}
