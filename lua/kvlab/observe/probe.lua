--- A probe watches an attention while it decodes, and compares every selection with dense
-- attention over the same cache. It measures the share of the true attention mass that
-- the selection keeps (exp(lse_selected - lse_dense)), the relative error of the output,
-- and the blocks and bytes read. It runs dense attention once for each layer and waits
-- for the device, so do not use it in timed steps.
local constructor = require "kvlab.constructor"
local tensor = require "kvlab.tensor.tensor"

local M = {}

---@class kvlab.Probe
local Probe = {}
Probe.__index = Probe

local ZERO = { mass = 0, error = 0, rows = 0, blocks = 0, bytes = 0, blocks_all = 0,
               heads = 0, steps = 0 }

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

--- How many blocks the tokens listed for each sequence would fill, in the form of counts.
local function token_blocks(tokens, shape)
  local listed = tokens:ge(0):cast "f32"
  return listed:sum(-1):reshape { tokens:size(0), -1 } / shape.block_size
end

--- Adds the blocks of a selection (nil: all) and the bytes of their K and V. A partial
-- last block counts as a whole block.
local function count_blocks(self, ctx, shape, counts)
  local per_seq, lens = counts and counts:list(), ctx.lens:list()
  local heads = counts and tonumber(counts.shape[1]) or 1
  local scored = self.attention.policy:score_bytes(shape)
  for s = 1, ctx.seqs do
    local n = math.ceil(lens[s] / shape.block_size)
    for head = 1, shape.kv_heads do
      local row = (s - 1) * heads + math.min(head, heads)
      local selected = per_seq and per_seq[row] or n
      self.blocks, self.blocks_all = self.blocks + selected, self.blocks_all + n
      self.bytes = self.bytes + n * scored
        + selected * shape.block_size * self.attention.cache:bytes_token()
    end
  end
  self.heads = self.heads + ctx.seqs * shape.kv_heads
end

local function row_norms(x) return x:mul(x):sum(2):sqrt() end

--- The attention calls this after each decoded layer. tokens: places instead of a
-- selection, see Attention:over_tokens.
function Probe:observe(attention, ctx, selection, counts, tokens)
  if ctx.is_prefill then return end
  tensor.scope(function()
    local shape, q = attention.shape, ctx.query
    local dims = { q:size(0), q:size(1) }
    local function attend(over, places)
      local out = tensor.tensor(shape.device, "f32", q:dims())
      local lse = tensor.tensor(shape.device, "f32", dims)
      if places then attention:over_tokens(places, ctx, out, lse)
      else attention:direct(over, ctx, out, lse) end
      return out, lse
    end
    local dense, dense_lse = attend(nil)
    local sparse, sparse_lse = attend(selection, tokens)
    self.mass = self.mass + (sparse_lse - dense_lse):exp():sum():item()
    self.error = self.error + (row_norms(sparse - dense) / row_norms(dense)):sum():item()
    self.rows = self.rows + dims[1] * dims[2]
    count_blocks(self, ctx, shape, tokens and token_blocks(tokens, shape) or counts)
    if ctx.layer == 0 then self.steps = self.steps + ctx.seqs end
  end)
end

--- Means over everything observed: attention_mass and output_error (per query head and
-- token), blocks_read (per KV head and layer), blocks_share, and bytes_read (per token,
-- all layers and KV heads: K, V and what scoring reads).
function Probe:metrics()
  return {
    attention_mass = self.mass / self.rows, output_error = self.error / self.rows,
    blocks_read = self.blocks / self.heads, blocks_share = self.blocks / self.blocks_all,
    bytes_read = self.bytes / self.steps,
  }
end

return constructor(M, attach)
