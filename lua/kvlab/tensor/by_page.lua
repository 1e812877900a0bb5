--- Memory on the device with an entry for every page of a cache: summaries, hashes,
-- fields of expressions. Where sequences have tables by layer or by head, a page belongs
-- to one layer, and all layers share one memory.
local library = require "kvlab.library"
local tensor = require "kvlab.tensor.tensor"

local M = {}

local ALIGNED = 16 -- bytes that kernels read at once

--- How many pages a layer's memory has so that the next layer's is aligned.
local function aligned(pages, dtype, dims)
  local bytes = tonumber(library.C.kvl_dtype_bytes(library.dtypes[dtype]))
  for _, n in ipairs(dims) do bytes = bytes * n end
  local step = 1
  while bytes * step % ALIGNED ~= 0 do step = 2 * step end
  return math.ceil(pages / step) * step
end

--- Memory [layers, pages, …], or [1, pages, …] where all layers share it. There are at
-- least as many pages as blocks. Returns it, and a view [blocks, …] of it for each layer,
-- from 0.
---@param make fun(device, dtype, dims): kvlab.Tensor  such as tensor.zeros
---@param shape table  as policy.init gets it
---@param dtype string
---@param dims integer[]  of what one page has
---@return kvlab.Tensor memory
---@return table<integer, kvlab.Tensor> layers
function M.new(make, shape, dtype, dims)
  local count, layers = shape.memory_layers or shape.layers, {}
  local memory = make(shape.device, dtype,
    { count, aligned(shape.blocks, dtype, dims), unpack(dims) })
  for layer = 0, shape.layers - 1 do
    layers[layer] = memory:index(layer % count):narrow(0, shape.blocks)
  end
  return memory, layers
end

--- Bytes that one page has of such memory.
---@param memory kvlab.Tensor
function M.bytes(memory) return memory:bytes() / (memory:size(0) * memory:size(1)) end

M.open = tensor.tensor -- memory whose contents are undefined

return M
