--- Ctrl-C at a chosen place, for specs of what must not be cut in half.
local kv = require "kvlab"

local C = kv.C
local pcall = pcall -- busted looks globals up with functions, which would be counted
local M = {}

--- pcall(fn), with each(n) before the nth call of a Lua function in it. Code that was
-- compiled before calls nothing.
---@return boolean ok
---@return any result
---@return integer calls
function M.at_calls(fn, each)
  local n, is_over = 0, false
  jit.off()
  debug.sethook(function()
    if is_over then return end
    n = n + 1
    each(n)
  end, "c")
  local ok, result = pcall(fn)
  is_over = true
  debug.sethook()
  jit.on()
  return ok, result, n
end

--- pcall(fn), with the interrupt flag set at the nth call of a Lua function, so that the
-- next launch fails. With `raises`, Lua raises in a transaction of `cache`, too, as the
-- executable's hook does.
---@param from? string  a pattern: only calls are counted that a file of this name makes
---@return boolean ok
---@return any result
function M.call(cache, fn, nth, raises, from)
  local counted = 0
  local ok, result = M.at_calls(fn, function(n)
    if from then
      local caller = debug.getinfo(4, "S") -- after this function, the hook and the called
      if counted < nth and not (caller and caller.source:find(from)) then return end
      counted = counted + 1
      n = counted
    end
    if n < nth then return end
    if n == nth then C.kvl_interrupt(1) end
    local is_held = C.kvl_interrupt_hold(0) > 0 or cache.journal.depth == 0
    if raises and not is_held and C.kvl_interrupted() ~= 0 then
      debug.sethook()
      error("interrupted")
    end
  end)
  C.kvl_interrupt(0)
  return ok, result
end

return M
