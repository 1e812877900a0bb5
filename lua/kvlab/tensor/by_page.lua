--- Memory on the device with an entry for every page of a cache: summaries, hashes,
-- fields of expressions. Where sequences have tables by layer or by head, a page belongs
-- to one layer, and all layers share one memory.
local tensor = require "kvlab.tensor.tensor"

local M = {}

--- Memory [layers, blocks, …], or [1, blocks, …] where all layers share it.
-- Returns it, and a view [blocks, …] of it for each layer, from 0.
---@param make fun(device, dtype, dims): kvlab.Tensor  such as tensor.zeros
---@param shape table  as policy.init gets it
---@param dtype string
---@param dims integer[]  of what one page has
---@return kvlab.Tensor memory
---@return table<integer, kvlab.Tensor> layers
function M.new(make, shape, dtype, dims)
  local count, layers = shape.memory_layers or shape.layers, {}
  local memory = make(shape.device, dtype, { count, shape.blocks, unpack(dims) })
  for layer = 0, shape.layers - 1 do layers[layer] = memory:index(layer % count) end
  return memory, layers
end

--- Bytes that one page has of such memory.
---@param memory kvlab.Tensor
function M.bytes(memory) return memory:bytes() / (memory:size(0) * memory:size(1)) end

M.open = tensor.tensor -- memory whose contents are undefined

return M
