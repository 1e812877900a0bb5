--- vLLM's layout of KV memory, element by element, over flat numbers. `layout` as in
-- spec/reference/attention.lua.
local support = require "spec.support"

local M = {}

--- kvlab's cache [blocks, 2, kv_heads, block_size, head_dim] as vLLM's two:
--   keys    [blocks, kv_heads, head_dim / x, block_size, x]
--   values  [blocks, kv_heads, head_dim, block_size]
function M.from_blocks(cache, layout, x)
  local half, i = #cache / 2, 0
  local keys, values = support.filled(half, 0), support.filled(half, 0)
  local heads, size, dim = layout.kv_heads, layout.block_size, layout.head_dim
  for block = 0, layout.blocks - 1 do
    for side = 0, 1 do
      for head = 0, heads - 1 do
        for token = 0, size - 1 do
          for d = 0, dim - 1 do
            i = i + 1
            local slice = (block * heads + head) * dim * size
            if side == 0 then
              keys[slice + (math.floor(d / x) * size + token) * x + d % x + 1] = cache[i]
            else
              values[slice + d * size + token + 1] = cache[i]
            end
          end
        end
      end
    end
  end
  return keys, values
end

return M
