--- The verb `chat`: opens a model, and converses on the terminal until Ctrl-D.
local kv = require "kvlab"

local M = {}

--- Checks a command line.
---@param name string  of the model
---@param o table      the command line
---@return function work
function M.prepare(name, o)
  local engine, of_chat = {}, { policy = o.policy }
  for key, value in pairs(o.set) do
    local option = key:match "^engine%.([%w_]+)$"
    if option then engine[option] = value else of_chat[key] = value end
  end
  return function()
    kv.model(name, { dtype = o.dtype, engine = engine }):chat(of_chat)
    return 0
  end
end

return M
