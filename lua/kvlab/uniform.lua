--- Uniform numbers in [0, 1) for drawing workloads, by the library's own generator: the
-- same for a seed on every machine.
local M = {}

local AT_ONCE = 4096

---@param seed integer
---@return fun(): number
function M.generator(seed)
  local kv = require "kvlab" -- which loads modules that draw
  local numbers, at, block = {}, 0, 0
  return function()
    if at == #numbers then
      numbers = kv.rand(kv.device "cpu", "f32", { AT_ONCE },
        { seed = seed, offset = AT_ONCE * block }):list()
      at, block = 0, block + 1
    end
    at = at + 1
    return 1 - numbers[at] -- (0, 1] to [0, 1)
  end
end

return M
