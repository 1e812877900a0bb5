--- Counts the blocks of K and V that the attention of a decoded layer reads, over all the
-- branches that a policy's dataflow has: a block that two branches read counts twice. An
-- attention counts while an observer is attached to it. It waits for the device.
local M = {}

---@class kvlab.Reads
---@field blocks number  read in the present layer, over sequences and KV heads

--- How many blocks of all KV heads a selection names; nil: every block.
---@param ctx kvlab.Context
---@param selection? kvlab.Tensor  i32 [seqs, kv_heads or 1, n]
function M.of_blocks(ctx, selection)
  local read = 0
  if selection then
    for _, block in ipairs(selection:list()) do read = read + (block >= 0 and 1 or 0) end
    return read * ctx.kv_heads / tonumber(selection.shape[1])
  end
  for _, seq in ipairs(ctx.sequences) do read = read + seq:blocks() end
  return read * ctx.kv_heads
end

--- The tokens that a list names, in blocks of all KV heads.
---@param places kvlab.Tensor  i32 [rows, k] or [rows, kv_heads, k]
function M.of_places(ctx, places)
  local read = 0
  for _, place in ipairs(places:list()) do read = read + (place >= 0 and 1 or 0) end
  local heads = places.ndim == 3 and tonumber(places.shape[1]) or 1
  return read / ctx.block_size * ctx.kv_heads / heads
end

return M
