--- A decode step of an attention whose policy has expressions: bias, log_weight, emit.
local kv = require "kvlab"
local paged = require "bench.lib.paged"
local policy = require "kvlab.policy.policy"

local M = {}

local SHARE = 0.1 -- of the blocks, where some are selected

--- A decode step of an attention over a filled cache.
---@param o table  seqs, len; heads, kv_heads, dim, value_dim, block: as in a cache; def:
--                 what the policy defines; selects: a share of the blocks; alibi,
--                 soft_cap: of the op
function M.prepare(b, o)
  local heads, kv_heads = o.heads or paged.HEADS, o.kv_heads or paged.KV_HEADS
  local dim, block = o.dim or paged.DIM, o.block or paged.BLOCK
  local dev, blocks = b.device, o.seqs * (math.ceil(o.len / block) + 1)
  local cache = kv.cache { device = dev, layers = 1, kv_heads = kv_heads, head_dim = dim,
    value_dim = o.value_dim, block_size = block, blocks = blocks, format = "bf16" }
  cache:layer(0):copy_(kv.randn(dev, "bf16", cache:layer(0):dims(), { seed = 1 }))
  local def = { name = "bench", decode = true, select_blocks = function() end,
                complete = false }
  for key, value in pairs(o.def or {}) do def[key] = value end
  local p = policy.define(def) {}
  local slopes = {}
  for i = 1, heads do slopes[i] = 2 ^ (-8 * i / heads) end
  p.slopes = kv.from(dev, "f32", { kv_heads, heads / kv_heads }, slopes)
  local attention = kv.attention { cache = cache, heads = heads, decode_policy = p,
    max_seqs = o.seqs, soft_cap = o.soft_cap,
    alibi = o.alibi and p.slopes:reshape { heads } }
  local seqs, lens, ones = {}, {}, {}
  local batch = cache:batch { max_seqs = o.seqs, max_tokens = o.seqs * o.len }
  for i = 1, o.seqs do seqs[i], lens[i], ones[i] = cache:sequence(), o.len - 1, 1 end
  attention:begin(batch:append(seqs, lens), true)
  attention:begin(batch:append(seqs, ones), false)
  local ctx = attention.context
  local q = kv.randn(dev, "bf16", { o.seqs, heads, dim }, { seed = 2 })
  ctx:begin_layer(0, q, cache:layer(0))
  local width = ctx.width
  local r = { attention = attention, ctx = ctx, p = p, q = q, memory = cache:layer(0),
    out = kv.tensor(dev, "bf16", { o.seqs, heads, cache.value_dim }),
    keep = { cache, batch, seqs } }
  p.weights = kv.rand(dev, "f32", { o.seqs, kv_heads, width }, { seed = 3 })
  if o.selects then
    local budget = paged.budget(math.ceil(width * SHARE))
    r.selection = (ctx:select(p.weights, budget)):clone()
  end
  local read = r.selection and r.selection:size(2) * block or o.len
  r.bytes = o.seqs * read * kv_heads * (o.value_dim and dim or 2 * dim) * 2
  return r
end

--- Computes the attention of a step, and returns the policy's tensors to their pools.
function M.attend(r)
  r.ctx:begin_layer(0, r.q, r.memory)
  return r.attention:over(r.selection, r.ctx, r.out)
end

return M
