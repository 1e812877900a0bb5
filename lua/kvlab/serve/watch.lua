--- Which blocks the decode steps of a server's requests read. It sees what the attention
-- selects in each layer, so a step waits for the device at every layer; it is attached
-- only in steps with a request that asks for it (`watch`).
--
-- request.reads then says of the newest step: blocks, how many the sequence has, and [1],
-- [2], …: the share of all KV heads of all layers that read each block. It is nil where a
-- policy lists tokens, not blocks. With drafts, it says what the verifying step read for
-- the newest token of the text before the draft.
local M = {}

---@class kvlab.serve.Watch
---@field list kvlab.Request[]  of the step
---@field inner table|nil       the attention's own observer
local Watch = {}
Watch.__index = Watch

--- The observer of a step of these requests.
---@param list kvlab.Request[]
---@param inner table|nil  an observer that goes on observing
---@return table|nil
function M.over(list, inner)
  for _, r in ipairs(list) do
    if r.watches then return setmetatable({ list = list, inner = inner }, Watch) end
  end
  return inner
end

--- Adds what one layer read of row i of a step.
local function add(reads, selection, i, heads, weight)
  if not selection then
    for j = 1, reads.blocks do reads[j] = reads[j] + heads * weight end
    return
  end
  local row = selection:index(i - 1)
  local each = heads / row:size(0) * weight -- all heads may share one row
  for _, block in ipairs(row:list()) do
    if block >= 0 and block < reads.blocks then reads[block + 1] =
      reads[block + 1] + each end
  end
  row:free()
end

--- The attention calls this after each layer, see kvlab.observe.probe.
function Watch:observe(attention, ctx, selection, counts, tokens, out)
  if self.inner then
    self.inner:observe(attention, ctx, selection, counts, tokens, out)
  end
  if ctx.is_prefill then return end
  local shape = attention.shape
  for i, r in ipairs(self.list) do
    local row = ctx.is_rows and ctx.batch.first[i] or i -- of its newest token
    if r.watches and ctx.layer == 0 then
      r.reads = { blocks = math.ceil(ctx.sequences[row]:length() / shape.block_size) }
      for j = 1, r.reads.blocks do r.reads[j] = 0 end
    end
    if tokens then r.reads = nil end
    if r.watches and r.reads then
      add(r.reads, selection, row, shape.kv_heads, 1 / (shape.layers * shape.kv_heads))
    end
  end
end

return M
