--- Requests that are being read: parsed, checked and tokenized, and answers that are
-- being written. All of this is done in slices between the steps of the model, so that a
-- large request does not delay the others.
--
-- Requests of about the same size wait for each other; those of different sizes take
-- turns. So a small request never waits for a large one. Large requests need memory while
-- they are read, so only a few of them are begun at the same time.
local C = require("kvlab.library").C
local problem = require "kvlab.http.problem"
local slices = require "kvlab.slices"

local M = {}

local US_TURN = 2000 -- of one task, before the next
local BYTES_SMALL, TIMES = 2 ^ 14, 4 -- of the first size, and from each to the next

---@class kvlab.http.Tasks
---@field count integer  tasks that have not ended
local Tasks = {}
Tasks.__index = Tasks

---@param request_s number  in which a task has to end
---@return kvlab.http.Tasks
function M.new(request_s)
  return setmetatable({ sizes = {}, count = 0, request_s = request_s }, Tasks)
end

local function now_s() return tonumber(C.kvl_clock_ns()) * 1e-9 end

--- Adds the work that a request asks for. It ends when its exchange is closed.
---@param exchange kvlab.http.Exchange
---@param bytes integer  how large it is
---@param fn function
function Tasks:add(exchange, bytes, fn)
  local size = 1
  while bytes > BYTES_SMALL * TIMES ^ (size - 1) do size = size + 1 end
  for i = #self.sizes + 1, size do self.sizes[i] = {} end
  local task = slices.task(fn)
  task.exchange, task.until_s = exchange, now_s() + self.request_s
  table.insert(self.sizes[size], task)
  self.count = self.count + 1
end

--- The reason why a task has to end, or nil. The task gets it as an error only once:
-- whatever it does afterwards, such as sending an answer, has to finish.
local function reason_to_end(self, task)
  if not task.has_begun or task.reason then return nil end
  if not task.exchange.is_open or task.exchange:is_gone() then
    return problem.new(499, "the client has left")
  elseif now_s() > task.until_s then
    return problem.new(504, ("the request was not read after %g s"):format(
      self.request_s), { code = "timeout" })
  end
end

--- Runs the first task of a list, and ends it if there is a reason. Any other error is a
-- bug, or an interrupt.
local function run_first(self, list, why)
  local task = list[1]
  task.has_begun, task.reason = true, task.reason or why
  local is_done, ok, raised = slices.run(task, US_TURN, why)
  if not is_done then return end
  table.remove(list, 1)
  self.count = self.count - 1
  if ok then return end
  task.exchange:close()
  if raised ~= task.reason then error(raised, 0) end
end

--- Works for about so many microseconds, or until nothing is left.
---@param us number
function Tasks:run(us)
  local ns_end = C.kvl_clock_ns() + us * 1000
  while self.count > 0 do
    for _, list in ipairs(self.sizes) do
      if list[1] then
        run_first(self, list, reason_to_end(self, list[1]))
        if C.kvl_clock_ns() >= ns_end then return end
      end
    end
  end
end

--- Ends all tasks.
---@param why kvlab.http.Problem
function Tasks:close(why)
  for _, list in ipairs(self.sizes) do
    while list[1] do
      local task = list[1]
      if not task.has_begun then
        task.exchange:close()
        table.remove(list, 1)
        self.count = self.count - 1
      else
        pcall(run_first, self, list, not task.reason and why or nil)
      end
    end
  end
end

return M
