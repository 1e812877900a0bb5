--- Block summaries: small per-block data of K that policies score with, one entry for
-- every physical block, so that sequences which share a block share its summary.
local library = require "kvlab.library"
local tensor = require "kvlab.tensor"

local C, check = library.C, library.check
local M = {}

---@class kvlab.Summary
local Summary = {}
Summary.__index = Summary

local function new(kind, shape, dtype, dims, values)
  local memory = tensor.tensor(shape.device, dtype, dims)
  local layers = {}
  for layer = 0, shape.layers - 1 do layers[layer] = memory:index(layer) end
  return setmetatable({ update_op = kind, layers = layers, memory = memory,
                        values = values, dtype = dtype }, Summary)
end

--- Elementwise min and max of K: [layers, blocks, 2, kv_heads, head_dim] in the cache's
-- dtype (they are elements of K, so nothing is rounded).
---@param shape table  as policy.init gets it
---@return kvlab.Summary
function M.minmax(shape)
  return new(C.kvl_block_minmax, shape, shape.dtype,
    { shape.layers, shape.blocks, 2, shape.kv_heads, shape.head_dim }, 2 * shape.head_dim)
end

--- Mean of K: f32 [layers, blocks, kv_heads, head_dim].
---@return kvlab.Summary
function M.mean(shape)
  return new(C.kvl_block_mean, shape, "f32",
    { shape.layers, shape.blocks, shape.kv_heads, shape.head_dim }, shape.head_dim)
end

--- Recompute the blocks of an offload event from their K.
function Summary:update(ev)
  check(self.update_op(ev.k, ev.blocks, ev.num_tokens, self.layers[ev.layer]))
end

function Summary:layer(layer) return self.layers[layer] end

--- Bytes of one block and KV head: what scoring it reads.
function Summary:bytes_block()
  return self.values * C.kvl_dtype_bytes(library.dtypes[self.dtype])
end

return M
