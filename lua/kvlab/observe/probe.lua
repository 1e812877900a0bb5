--- A probe watches an attention while it decodes, and compares what it does with dense
-- attention over the same cache. It measures the relative error of the output that the
-- policy hands to the model, the share of the true attention mass that lies in the
-- selection (exp(lse_selected - lse_dense)), and the blocks and bytes read. It runs dense
-- attention once for each layer and waits for the device. Set attention.probe to nil
-- during steps that are timed, and back afterwards; what policies read is still counted
-- in these steps.
local arguments = require "kvlab.arguments"
local constructor = require "kvlab.constructor"
local kinds = require "kvlab.tensor.kinds"
local objects = require "kvlab.memory.objects"
local policy = require "kvlab.policy.policy"
local reads = require "kvlab.policy.reads"
local tensor = require "kvlab.tensor.tensor"

local M = {}

---@class kvlab.Probe
local Probe = {}
Probe.__index = Probe

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
function Probe:detach() self.attention.probe, self.attention.reads = nil, nil end

--- Restarts the averages.
function Probe:reset()
  self.mass, self.error, self.rows = 0, 0, 0
  local attention = self.attention
  self.reads = reads.new(attention.shape, attention.cache)
  attention.reads = self.reads
end

local function row_norms(x) return x:mul(x):sum(2):sqrt() end

--- The attention calls this after each decoded layer. listed: tokens instead of a
-- selection, see Attention:over_tokens. out: what the layer hands on. The dense output
-- has the dtype of `out`, so that rounding alone is no error.
function Probe:observe(attention, ctx, selection, _, listed, out)
  if ctx.is_prefill then return end
  local counter = ctx.reads
  ctx.reads = nil -- what is read here is not the policy's
  tensor.scope(function()
    local shape, q = attention.shape, ctx.query
    local dims = { q:size(0), q:size(1) }
    local of_out = { dims[1], dims[2], attention.cache.value_dim }
    local attended = out:cast "f32"
    local other = tensor.tensor(shape.device, out:type(), of_out)
    local dense_lse = tensor.tensor(shape.device, "f32", dims)
    local lse = tensor.tensor(shape.device, "f32", dims)
    attention:direct(nil, ctx, other, dense_lse)
    local dense = other:cast "f32"
    self.error = self.error
      + (row_norms(attended:reshape(of_out) - dense) / row_norms(dense)):sum():item()
    other = tensor.tensor(shape.device, out:type(), of_out)
    attention:direct(selection, ctx, other, lse, listed)
    self.mass = self.mass + (lse - dense_lse):exp():sum():item()
    self.rows = self.rows + dims[1] * dims[2]
  end)
  ctx.reads = counter
end

--- Means over everything observed: attention_mass (of the selection) and output_error (of
-- the policy's own output), each per query head and token; blocks_read (per KV head and
-- layer) and blocks_share; bytes_read (per token, all layers and KV heads: K and V, by
-- all branches, and what policies read, see policy/reads.lua) and bytes_share, of what
-- dense attention reads; held_share, the tokens that are held, of those of the texts;
-- moved_share, the bytes that a step moves over the link or copies, of those that dense
-- attention reads. What policies read is the mean over all decode steps since the
-- probe was made, also over those that were not observed because attention.probe was nil.
-- attention_mass and output_error are NaN where tokens were evicted, because dense
-- attention would need them.
-- note, a text: if a policy is uncounted (kv.policy.uncounted).
function Probe:metrics()
  local metrics = self.reads:metrics()
  local rows = metrics.held_share < 1 and 0 / 0 or self.rows -- NaN
  metrics.attention_mass = self.mass / rows
  metrics.output_error = self.error / rows
  metrics.note = policy.uncounted(self.attention.decode_policy)
  return metrics
end

arguments.methods(Probe, "a probe", {
  observe = { attention = objects.attention, ctx = objects.layer_context,
              selection = kinds.tensor_or_nil, listed = kinds.tensor_or_nil,
              out = kinds.tensor },
})

return constructor(M, arguments.of("probe", attach, { attention = objects.attention }))
