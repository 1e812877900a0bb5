--- Long work in slices, so that other work can run in between; a server treats large
-- requests in this way. Work that may take long calls `rest` every few hundred
-- microseconds. Inside a task, that call lets the task wait when its time is over;
-- elsewhere it does nothing.
--
--   local task = slices.task(function() return tokenizer:encode(text) end)
--   repeat local is_done, ok, ids = slices.run(task, 1000) until is_done
local M = {}

local thread, ns_end -- of the task that runs
local C -- the library, for its clock; texts that are read without it have no tasks

---@class kvlab.Task
---@field thread thread

--- Lets a task wait for its next slice when this one is over. Raises the error that `run`
-- was given to end the task.
function M.rest()
  if not thread or C.kvl_clock_ns() < ns_end then return end
  if coroutine.running() ~= thread then return end -- it cannot wait in here
  local why = coroutine.yield()
  if why then error(why, 0) end
end

--- A task, which has not begun.
---@param fn function
---@return kvlab.Task
function M.task(fn) return { thread = coroutine.create(fn) } end

--- Runs a task for so many microseconds or until it ends.
---@param task kvlab.Task
---@param us number
---@param why? any   ends the task: it is raised where the task waits
---@return boolean is_done
---@return boolean|nil ok    as of pcall
---@return any result
function M.run(task, us, why)
  C = C or require("kvlab.library").C
  thread, ns_end = task.thread, C.kvl_clock_ns() + us * 1000
  local ok, result = coroutine.resume(task.thread, why)
  thread = nil
  if coroutine.status(task.thread) ~= "dead" then return false end
  return true, ok, result
end

return M
