--- What LuaJIT's compiler says of a function that runs.
local jit_util, vmdef = require "jit.util", require "jit.vmdef"

local M = {}

--- "attention.lua:91: NYI: bytecode 50"
local function describe_abort(func, pc, code, detail)
  local where = jit_util.funcinfo(func, pc)
  local ok, text = pcall(string.format, vmdef.traceerr[code] or code, detail)
  return ("%s: %s"):format(where.loc or "?", ok and text or tostring(code))
end

--- Traces that fn could not finish because its code cannot be compiled ("NYI: ..."), and
-- how many it finished. Aborts for other reasons say nothing of the code: the trace began
-- in an unlucky place (inside a loop, or in a function whose counter ran out first, from
-- which it returns to a frame below its own) and the compiler begins again elsewhere.
---@param fn fun()
---@return string[] aborts
---@return integer formed
function M.aborts_of(fn)
  local aborts, formed = {}, 0
  local function on_trace(what, _, func, pc, code, detail)
    if what == "stop" then formed = formed + 1 end
    if what ~= "abort" then return end
    local text = describe_abort(func, pc, code, detail)
    local is_code = text:find "NYI" and not text:find "return to lower frame"
    if is_code or text:find "blacklisted" then aborts[#aborts + 1] = text end
  end
  jit.attach(on_trace, "trace")
  local ok, why = pcall(fn)
  jit.attach(on_trace)
  if not ok then error(why, 0) end
  return aborts, formed
end

return M
