--- Block summaries: small per-block data of K that policies score with, one entry for
-- every physical block, so that sequences which share a block share its summary.
local library = require "kvlab.library"
local tensor = require "kvlab.arithmetic"

local C, check = library.C, library.check
local M = {}

---@class kvlab.Summary
local Summary = {}
Summary.__index = Summary

---@class kvlab.Keys
local Keys = {}
Keys.__index = Keys

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

--- The keys themselves, kept on the device: [layers, blocks * kv_heads, block_size *
-- head_dim] in the cache's dtype, half of the KV memory. For policies that look at every
-- key while KV lies in host memory.
---@return kvlab.Keys
function M.keys(shape)
  local s = shape
  local head = tensor.arange(s.device, "i32", s.kv_heads)
  local memory = tensor.tensor(s.device, s.dtype,
    { s.layers, s.blocks * s.kv_heads, s.block_size * s.head_dim })
  local layers = {}
  for layer = 0, s.layers - 1 do layers[layer] = memory:index(layer) end
  return setmetatable({ shape = s, layers = layers, memory = memory,
    head_across = head:reshape { 1, s.kv_heads },
    head_down = head:reshape { s.kv_heads, 1 },
  }, Keys)
end

--- Copy the K of an offload event's blocks.
function Keys:update(ev)
  tensor.scope(function()
    local heads, n = self.shape.kv_heads, ev.blocks:size(0)
    local function rows(blocks, stride)
      return (blocks:reshape { n, 1 } * stride + self.head_across):reshape { n * heads }
    end
    local k = ev.k:reshape { ev.k:size(0) * 2 * heads, self.layers[0]:size(1) }
    self.layers[ev.layer]:scatter_rows_(rows(ev.blocks, heads),
      k:gather_rows(rows(ev.k_blocks, 2 * heads)))
  end)
end

--- Keys of the first n blocks of sequence `seq` of a step: a new tensor [kv_heads, n *
-- block_size, head_dim] in the cache's dtype; of an f8e4m3 cache, in its own units, in
-- that of the queries.
function Keys:gather(ctx, seq, n)
  local s = self.shape
  local rows = ctx.tables:index(seq):narrow(0, n):reshape { 1, n } * s.kv_heads
    + self.head_down
  local keys = self.layers[ctx.layer]:gather_rows(rows:reshape { s.kv_heads * n })
    :reshape { s.kv_heads, n * s.block_size, s.head_dim }
  return s.dtype == "f8e4m3" and keys:cast(ctx.query:type()) or keys
end

--- Recompute the blocks of an offload event from their K.
function Summary:update(ev)
  check(self.update_op(ev.k, ev.k_blocks, ev.num_tokens, ev.blocks,
    self.layers[ev.layer]))
end

function Summary:layer(layer) return self.layers[layer] end

--- Bytes of one block and KV head: what scoring it reads.
function Summary:bytes_block()
  return self.values * C.kvl_dtype_bytes(library.dtypes[self.dtype])
end

return M
