--- Attention over a paged cache with a policy: the only place where policies meet
-- kernels. One call a layer: append K and V, tell the policies, let the policy of the
-- phase select, attend over the selection.
--
--   local quest = kv.policy.open("quest", { ratio = 0.1 })
--   local attention = kv.attention { cache = cache, heads = 8, decode_policy = quest }
--   attention:begin(batch, false)              once a step, after batch:append
--   attention:forward(layer, q, k, v, out)     once a layer
local context = require "kvlab.context"
local ops = require "kvlab.ops"
local policy = require "kvlab.policy"
local tensor = require "kvlab.tensor"

local M = {}

---@class kvlab.Attention
---@field cache kvlab.Cache
---@field prefill_policy table
---@field decode_policy table
local Attention = {}
Attention.__index = Attention

local function phase_policy(o, phase, default)
  local p = o[phase .. "_policy"] or default
  if not p[phase] then
    error(("policy %s does not %s, as %s_policy it would have to"):format(p.name,
      phase == "prefill" and "select in prefill" or "select in decode", phase), 3)
  end
  return p
end

local function each_policy(self, fn)
  fn(self.prefill_policy)
  if self.decode_policy ~= self.prefill_policy then fn(self.decode_policy) end
end

--- Attention over `cache` for `heads` query heads.
---@param o table  cache, heads; prefill_policy, decode_policy (full), scale
--                 (1 / sqrt(head_dim)), alibi (f32 [heads] slopes), max_seqs (16),
--                 max_blocks of a sequence (all of the cache)
---@return kvlab.Attention
function M.attention(o)
  local cache = o.cache
  if type(cache) ~= "table" or not cache.kv_heads then
    error(("attention: cache is a %s, expected a kv.cache"):format(type(cache)), 2)
  end
  if not o.heads or o.heads % cache.kv_heads ~= 0 then
    error(("attention: heads is %s, expected a multiple of kv_heads = %d"):format(
      tostring(o.heads), cache.kv_heads), 2)
  end
  local self = setmetatable({ cache = cache, event = {} }, Attention)
  self.prefill_policy = phase_policy(o, "prefill", policy.open "full")
  self.decode_policy = phase_policy(o, "decode", self.prefill_policy)
  self.shape = {
    device = cache.device, layers = cache.layers, blocks = cache.blocks, heads = o.heads,
    block_size = cache.block_size, kv_heads = cache.kv_heads, head_dim = cache.head_dim,
    dtype = cache.dtype,
  }
  each_policy(self, function(p) policy.attach(p, self.shape) end)
  self.context = context.new(self.shape, { max_seqs = o.max_seqs or 16,
    max_blocks = math.min(o.max_blocks or cache.blocks, cache.blocks) })
  self.call = { scale = o.scale or 1 / math.sqrt(cache.head_dim), alibi = o.alibi,
                causal = true }
  return self
end

--- Start a step: `batch` has been appended to. is_prefill: the sequences' new tokens are
-- a chunk of a prompt rather than one decoded token each.
function Attention:begin(batch, is_prefill)
  if not is_prefill and batch.tokens_count ~= batch.count then
    error(("a decode step of %d tokens for %d sequences, expected one each"):format(
      batch.tokens_count, batch.count), 2)
  end
  self.batch = batch
  self.policy = is_prefill and self.prefill_policy or self.decode_policy
  self.context:begin(batch, is_prefill)
end

local function offload_event(self, p, hook)
  if p[hook] then p[hook](p, self.event) end
end

--- Append k, v [tokens, kv_heads, head_dim] and attend with q [tokens, heads, head_dim].
---@return ffi.cdata* out  [tokens, heads, head_dim]
function Attention:forward(layer, q, k, v, out)
  local batch, ctx, ev, p = self.batch, self.context, self.event, self.policy
  local memory = self.cache:layer(layer)
  ops.append_kv(k, v, batch.slots, memory)
  ev.layer, ev.k = layer, memory
  ev.blocks, ev.num_tokens = batch.blocks, batch.block_tokens
  local hook = ctx.is_prefill and "on_prefill_offload" or "on_decode_offload"
  offload_event(self, self.prefill_policy, hook)
  if self.decode_policy ~= self.prefill_policy then
    offload_event(self, self.decode_policy, hook)
  end
  ctx.layer, ctx.query, ctx.cache = layer, q, memory
  if p.attention_begin then p:attention_begin(ctx) end
  local selection, counts
  local compute = ctx.is_prefill and p.compute_prefill or p.compute_decode
  out, selection, counts = compute(p, self, ctx, out)
  if self.probe then self.probe:observe(self, ctx, selection, counts) end
  if p.attention_finished then p:attention_finished(ctx) end
  return out
end

--- Attention of ctx.query over a selection (nil: every block), written to `out`; with lse
-- when given. For policies that override compute.
function Attention:over(selection, ctx, out, lse)
  local call = self.call
  call.q, call.cache, call.tables, call.lens = ctx.query, ctx.cache, ctx.tables, ctx.lens
  call.starts, call.selection, call.out, call.lse = ctx.starts, selection, out, lse
  return ops.paged_attention(call)
end

--- Tell the policies that a sequence begins to be served, and that it is done.
function Attention:request_begin(seq)
  each_policy(self, function(p)
    if p.request_begin then p:request_begin(seq) end
  end)
end

function Attention:request_finished(seq)
  each_policy(self, function(p)
    if p.request_finished then p:request_finished(seq) end
  end)
end

--- Show policies that were attached late the K of sequences that are in the cache
-- already, as if they had been prefilled now.
---@param seqs kvlab.Sequence[]
function Attention:adopt(seqs)
  local ids, tokens, size = {}, {}, self.cache.block_size
  for _, seq in ipairs(seqs) do
    local length = seq:length()
    self:request_begin(seq)
    for b, block in ipairs(seq:table()) do
      ids[#ids + 1] = block
      tokens[#tokens + 1] = math.min(size, length - (b - 1) * size)
    end
  end
  local ev = { blocks = tensor.from(self.cache.device, "i32", { #ids }, ids),
               num_tokens = tensor.from(self.cache.device, "i32", { #ids }, tokens) }
  for layer = 0, self.cache.layers - 1 do
    ev.layer, ev.k = layer, self.cache:layer(layer)
    each_policy(self, function(p)
      if p.on_prefill_offload then p:on_prefill_offload(ev) end
    end)
  end
end

--- Forget what the policies keep; sequences are not touched.
function Attention:reset()
  each_policy(self, function(p)
    if p.reset then p:reset() end
  end)
end

return M
