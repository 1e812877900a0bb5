--- Code that Ctrl-C must not interrupt halfway: changes for the duration of a call, and
-- opening and closing handles of the C library.
--
-- Some functions change something for the duration of a call (the scope, the current
-- stream). The functions that they call must return before the caller continues, so a
-- yield out of them is an error. Ctrl-C must not come between the change and its end
-- either, so they write:
--
--   C.kvl_interrupt_hold(1)
--   … the change
--   local results = protected.call(what, fn, n, arguments)   -- fn can be interrupted
--   … the end of the change
--   C.kvl_interrupt_hold(-1)
--
-- Where fn may yield, they write `protected.pcall(fn, ...)`, which returns what pcall
-- does.
local ffi = require "ffi"
local library = require "kvlab.library"

local C = library.C
local M = {}

local function hold_again(...)
  C.kvl_interrupt_hold(1)
  return ...
end

local function interruptible(fn, ...)
  C.kvl_interrupt_hold(-1)
  return hold_again(fn(...))
end

-- Interrupts are held again by the message handler, so that none comes between an error
-- and the end of pcall. Lua calls no handler when its memory is full.
local is_held = false

local function on_error(why)
  C.kvl_interrupt_hold(1)
  is_held = true
  return why
end

local function held(is_ok, ...)
  if not is_ok then
    if not is_held then C.kvl_interrupt_hold(1) end
    is_held = false
  end
  return is_ok, ...
end

--- pcall for a caller that holds interrupts: they can come while fn runs, and are held
-- again when it returns.
function M.pcall(fn, ...) return held(xpcall(interruptible, on_error, fn, ...)) end

local function released(ok, ...)
  C.kvl_interrupt_hold(-1)
  if not ok then error((...), 0) end
  return ...
end

--- Calls fn(...) so that no interrupt comes before it returns or raises, and returns what
-- it returns. For changes that belong together and are short.
function M.whole(fn, ...)
  C.kvl_interrupt_hold(1)
  return released(pcall(fn, ...))
end

--- Notes in results.n how many results there are: up to the last that is not nil.
local function count(results)
  local n = 0
  for i in pairs(results) do if i > n then n = i end end
  results.n = n
  return results
end

local function after_first(_, ...) return ... end

--- Calls fn with the n arguments of a list. Returns a list of what pcall returns, with n,
-- its length. Only code that runs in a coroutine can yield, so only there does the call
-- need a coroutine of its own, whose state says whether it returned.
--
-- Arguments and results are in tables, because a JIT trace ends at coroutine.running, and
-- none that begins inside a function with `...` can read `...`.
---@param what string   who calls, for the error
---@param fn function
---@param n integer
---@param arguments table
---@return table results
function M.call(what, fn, n, arguments)
  if not coroutine.running() then
    return count { M.pcall(fn, unpack(arguments, 1, n)) }
  end
  local thread = coroutine.create(M.pcall)
  local results = { after_first(coroutine.resume(thread, fn, unpack(arguments, 1, n))) }
  if coroutine.status(thread) == "suspended" then
    C.kvl_interrupt_hold(1)
    return { false, what .. ": the function yielded, expected it to return", n = 2 }
  end
  return count(results)
end

--- Returns the handle that open(...) opened and wrote to out[0]; `by` closes it when it
-- is no longer referenced. Ctrl-C comes only before or after, so that every open handle
-- has an owner. Not for an open(...) that waits long: nothing can interrupt it.
---@param by function  closes a handle
---@param out ffi.cdata*
---@param open function  returns a status
---@return ffi.cdata* handle
function M.open(by, out, open, ...)
  C.kvl_interrupt_hold(1)
  local status = open(...)
  local handle = status >= 0 and ffi.gc(out[0], by)
  C.kvl_interrupt_hold(-1)
  library.check(status)
  return handle
end

--- Closes the handle owner[name] with `by`, unless it is closed. owner[name] is set
-- exactly while the handle is open.
---@param owner table
---@param name string
---@param by function
function M.close(owner, name, by)
  local handle = owner[name]
  if not handle then return end
  C.kvl_interrupt_hold(1)
  owner[name] = nil
  by(ffi.gc(handle, nil))
  C.kvl_interrupt_hold(-1)
end

return M
