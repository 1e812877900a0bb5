--- A probe watches an attention while it decodes, and compares what it does with dense
-- attention over the same cache. It measures the relative error of the output that the
-- policy hands to the model, the share of the true attention mass that lies in the
-- selection (exp(lse_selected - lse_dense)), and the blocks and bytes read. It runs dense
-- attention once for each layer and waits for the device, so do not use it in timed
-- steps.
local arguments = require "kvlab.arguments"
local constructor = require "kvlab.constructor"
local kinds = require "kvlab.tensor.kinds"
local objects = require "kvlab.memory.objects"
local tensor = require "kvlab.tensor.tensor"

local M = {}

---@class kvlab.Probe
local Probe = {}
Probe.__index = Probe

local ZERO = { mass = 0, error = 0, rows = 0, blocks = 0, bytes = 0, blocks_all = 0,
               bytes_all = 0, heads = 0, steps = 0 }

--- Attaches a probe to an attention; probe:detach() ends it.
---@param attention kvlab.Attention
---@return kvlab.Probe
local function attach(attention)
  local self = setmetatable({ attention = attention }, Probe)
  self:reset()
  attention.probe = self
  return self
end

--- Stops observing.
function Probe:detach() self.attention.probe = nil end

--- Restarts the averages.
function Probe:reset()
  for key, value in pairs(ZERO) do self[key] = value end
end

--- Adds the blocks of K and V that the attention read, and the bytes: those of K and V,
-- and what the policy read to score. If the policy scores by the keys themselves, the
-- attention need not read the keys of these blocks again. A partial last block counts as
-- a whole block.
local function count_reads(self, attention, ctx, shape)
  local policy, all = attention.policy, 0
  for _, seq in ipairs(ctx.sequences) do all = all + shape.kv_heads * seq:blocks() end
  local read = attention.blocks_read
  local block = shape.block_size * attention.cache:bytes_token()
  local again = policy.scores_keys and block / 2 or 0
  self.blocks, self.blocks_all = self.blocks + read, self.blocks_all + all
  self.bytes = self.bytes + read * (block - again)
    + all * policy:score_bytes(shape, ctx.layer)
  self.bytes_all = self.bytes_all + all * block
  self.heads = self.heads + ctx.seqs * shape.kv_heads
end

local function row_norms(x) return x:mul(x):sum(2):sqrt() end

--- The attention calls this after each decoded layer. tokens: places instead of a
-- selection, see Attention:over_tokens. out: what the layer hands on. The dense output
-- has the dtype of `out`, so that rounding alone is no error.
function Probe:observe(attention, ctx, selection, _, tokens, out)
  if ctx.is_prefill then return end
  count_reads(self, attention, ctx, attention.shape)
  tensor.scope(function()
    local shape, q = attention.shape, ctx.query
    local dims = { q:size(0), q:size(1) }
    local attended = out:cast "f32"
    local other = tensor.tensor(shape.device, out:type(), q:dims())
    local dense_lse = tensor.tensor(shape.device, "f32", dims)
    local lse = tensor.tensor(shape.device, "f32", dims)
    attention:direct(nil, ctx, other, dense_lse)
    local dense = other:cast "f32"
    self.error = self.error
      + (row_norms(attended:reshape(q:dims()) - dense) / row_norms(dense)):sum():item()
    other = tensor.tensor(shape.device, out:type(), q:dims())
    if tokens then attention:over_tokens(tokens, ctx, other, lse)
    else attention:direct(selection, ctx, other, lse) end
    self.mass = self.mass + (lse - dense_lse):exp():sum():item()
    self.rows = self.rows + dims[1] * dims[2]
    if ctx.layer == 0 then self.steps = self.steps + ctx.seqs end
  end)
end

--- Means over everything observed: attention_mass (of the selection) and output_error (of
-- the policy's own output), each per query head and token; blocks_read (per KV head and
-- layer) and blocks_share; bytes_read (per token, all layers and KV heads: K and V, by
-- all branches, and what scoring reads) and bytes_share, of what dense attention reads.
function Probe:metrics()
  return {
    attention_mass = self.mass / self.rows, output_error = self.error / self.rows,
    blocks_read = self.blocks / self.heads, blocks_share = self.blocks / self.blocks_all,
    bytes_read = self.bytes / self.steps, bytes_share = self.bytes / self.bytes_all,
  }
end

arguments.methods(Probe, "a probe", {
  observe = { attention = objects.attention, ctx = objects.layer_context,
              selection = kinds.tensor_or_nil, tokens = kinds.tensor_or_nil,
              out = kinds.tensor },
})

return constructor(M, arguments.of("probe", attach, { attention = objects.attention }))
