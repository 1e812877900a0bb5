--- Uniform numbers in [0, 1), for generating workloads. They come from the library's own
-- generator, so a seed gives the same numbers on every machine.
local device = require "kvlab.tensor.device"
local tensor = require "kvlab.tensor.tensor"

local M = {}

local AT_ONCE = 4096

---@param seed integer
---@return fun(): number
function M.generator(seed)
  local numbers, at, block = {}, 0, 0
  return function()
    if at == #numbers then
      numbers = tensor.rand(device.device "cpu", "f32", { AT_ONCE },
        { seed = seed, offset = AT_ONCE * block }):list()
      at, block = 0, block + 1
    end
    at = at + 1
    return 1 - numbers[at] -- (0, 1] to [0, 1)
  end
end

return M
