--- Times the stages of decode steps: how long an attention takes to update summaries, to
-- score, to select and to attend. It replaces the functions of one attention and its
-- decode policy by functions that first record an event of the device. So nothing waits,
-- and other attentions run as before.
--
--   local stages = require("kvlab.observe.stages").new(attention)
--   stages:begin(true)            of several layers or of one
--   attention:forward(…)
--   stages:finish()               waits for the device
--   stages.us.score               microseconds since stages:reset(); nil: no such stage
--
-- If a stage runs inside another one, such as the score inside the selection, its time
-- counts only for the inner stage. Time outside of all stages is `other`: appending K and
-- V, and a policy's other work. An event costs about a microsecond; stages:begin(false)
-- records only the first and the last one, for the time of the whole.
local policies = require "kvlab.policy.policy"

local M = {}

--- The stages, in the order of a step.
M.NAMES = { "summary", "score", "select", "attend", "other" }

local OF_POLICY = { on_decode_offload = "summary", score = "score",
                    select_blocks = "select", select_tokens = "select" }
local OF_CONTEXT = { select = "select", select_nearest = "select" }
local OF_ATTENTION = { over = "attend", over_tokens = "attend", attend_slots = "attend" }

---@class kvlab.Stages
---@field us table<string, number>  microseconds by stage; `total` is all of them
local Stages = {}
Stages.__index = Stages

--- Records that from now on time belongs to `stage`.
local function mark(self, stage)
  local n = self.marks + 1
  self.events[n] = self.events[n] or self.device:open_event()
  self.events[n]:record(self.device:stream())
  self.marks, self.stages[n] = n, stage
end

--- Ends the stage that began with mark `at`, and returns what its function has returned.
local function leave(self, at, first, ...)
  self.depth = self.depth - 1
  mark(self, self.open[self.depth])
  if first == nil and self.stages[at] == "select" then
    self.stages[at] = "other" -- every block is read, so nothing was selected
  end
  return first, ...
end

local function wrap(self, object, stage_of)
  for name, stage in pairs(stage_of) do
    local fn = object[name]
    object[name] = fn and function(...)
      if not self.is_on then return fn(...) end
      self.depth = self.depth + 1
      self.open[self.depth] = stage
      mark(self, stage)
      return leave(self, self.marks, fn(...))
    end
  end
end

--- Prepares an attention, whose decode policy belongs to it alone, to be timed.
---@param attention kvlab.Attention
---@return kvlab.Stages
function M.new(attention)
  local self = setmetatable({ device = attention.cache.device, events = {}, stages = {},
    open = { "other" }, depth = 1, marks = 0, is_on = false, us = {} }, Stages)
  local policy, selecting = attention.decode_policy, {}
  policies.add_with_nested(policy, selecting)
  for _, one in ipairs(selecting) do wrap(self, one, OF_POLICY) end
  wrap(self, attention, OF_ATTENTION)
  wrap(self, attention.context, OF_CONTEXT)
  return self
end

--- Forgets all times.
function Stages:reset() self.us = { total = 0 } end

--- Begins to time what the attention does until `finish`.
---@param is_apart boolean  by stages; else only the whole
function Stages:begin(is_apart)
  self.marks, self.depth, self.is_on = 0, 1, is_apart
  mark(self, "other")
end

--- Adds what was timed since `begin` to `us`, after waiting for the device.
function Stages:finish()
  mark(self, "other")
  self.is_on = false
  local us = self.us
  us.total = us.total + self.events[1]:elapsed_us(self.events[self.marks])
  if self.marks == 2 then return end
  for i = 1, self.marks - 1 do
    local stage = self.stages[i]
    us[stage] = (us[stage] or 0) + self.events[i]:elapsed_us(self.events[i + 1])
  end
end

--- Closes the events.
function Stages:close()
  for _, event in ipairs(self.events) do event:close() end
  self.events = {}
end

return M
