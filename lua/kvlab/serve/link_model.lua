--- A model of a prefetcher over a link, in modelled time, with the rules of the real one.
-- A queue holds at most max_pending tasks; the task with the lowest priority number goes
-- first, and equals go in the order of submission. `workers` workers take the tasks and
-- share the link's bandwidth equally. The first byte of a task takes link_us. The model
-- never looks at a clock: advance(us) does everything that happens until that time.
local M = {}

---@class kvlab.LinkModel
local LinkModel = {}
LinkModel.__index = LinkModel

--- o: workers, max_pending, bytes_us (bytes per microsecond), us_latency,
-- begin(task): called when a task is taken; returns how many blocks there are to bring
function M.new(o)
  return setmetatable({
    workers = o.workers, max_pending = o.max_pending, bytes_us = o.bytes_us,
    us_latency = o.us_latency, begin = o.begin, now_us = 0, submitted = 0,
    pending = {}, active = {},
    stats = { submitted = 0, completed = 0, cancelled = 0, full = 0, bytes = 0,
              pending_peak = 0, us_queued = 0, us_busy = 0 },
  }, LinkModel)
end

--- The index of the task with the lowest priority number; of equals, the first submitted.
local function best(pending)
  local at = 1
  for i = 2, #pending do
    local a, b = pending[i], pending[at]
    if a.priority < b.priority or (a.priority == b.priority and a.number < b.number) then
      at = i
    end
  end
  return at
end

--- Gives tasks to idle workers.
local function take(self)
  while #self.active < self.workers and #self.pending > 0 do
    local task = table.remove(self.pending, best(self.pending))
    self.stats.us_queued = self.stats.us_queued + self.now_us - task.us_submitted
    task.blocks = self.begin(task)
    task.us_wait, task.bytes_left = self.us_latency, task.blocks * task.bytes_block
    self.stats.bytes = self.stats.bytes + task.bytes_left
    task.state = "active"
    self.active[#self.active + 1] = task
  end
end

--- Microseconds until the next active task gets its first byte or is done, and how many
-- tasks share the link until then.
local function next_event(self)
  local sharing, us = 0, math.huge
  for _, task in ipairs(self.active) do
    if task.us_wait <= 0 then sharing = sharing + 1 end
  end
  for _, task in ipairs(self.active) do
    us = math.min(us, task.us_wait > 0 and task.us_wait
      or task.bytes_left * sharing / self.bytes_us)
  end
  return us, sharing
end

--- Lets `us` microseconds pass. No task may end before the end of that time.
local function pass(self, us, sharing, is_event)
  local active, kept = self.active, 0
  local bytes = sharing > 0 and us * self.bytes_us / sharing or 0
  local least = is_event and 1e-6 or 0 -- rounding may leave this much of an ended task
  for i = 1, #active do
    local task = active[i]
    if task.us_wait > 0 then
      task.us_wait = task.us_wait - us
      if task.us_wait <= least then task.us_wait = 0 end
    else
      task.bytes_left = task.bytes_left - bytes
    end
    if task.us_wait <= 0 and task.bytes_left <= least * self.bytes_us then
      task.state = "complete"
      self.stats.completed = self.stats.completed + 1
    else
      kept = kept + 1
      active[kept] = task
    end
  end
  for i = #active, kept + 1, -1 do active[i] = nil end
  if sharing > 0 then self.stats.us_busy = self.stats.us_busy + us end
  self.now_us = self.now_us + us
end

--- Does everything that happens until `to`; with `task`, only until that task is done.
function LinkModel:advance(to, task)
  take(self)
  while #self.active > 0 and self.now_us < to
        and not (task and task.state == "complete") do
    local us, sharing = next_event(self)
    local is_event = self.now_us + us <= to
    pass(self, is_event and us or to - self.now_us, sharing, is_event)
    take(self)
  end
  if not task then self.now_us = math.max(self.now_us, to) end
end

--- Puts a task in the queue: { request_id, priority, bytes_block, … }. Returns nil,
-- "full" when max_pending tasks are waiting.
function LinkModel:submit(task)
  local stats = self.stats
  if #self.pending >= self.max_pending then
    stats.full = stats.full + 1
    return nil, "full"
  end
  self.submitted = self.submitted + 1
  task.number, task.us_submitted, task.state = self.submitted, self.now_us, "pending"
  self.pending[#self.pending + 1] = task
  stats.submitted = stats.submitted + 1
  take(self)
  stats.pending_peak = math.max(stats.pending_peak, #self.pending)
  return task
end

--- Removes a task that is not complete.
function LinkModel:cancel(task)
  for _, list in ipairs { self.pending, self.active } do
    for i, other in ipairs(list) do
      if other == task then
        table.remove(list, i)
        task.state = "cancelled"
        self.stats.cancelled = self.stats.cancelled + 1
        return take(self)
      end
    end
  end
end

--- The time at which a task is done.
function LinkModel:finish(task)
  self:advance(math.huge, task)
  return self.now_us
end

return M
