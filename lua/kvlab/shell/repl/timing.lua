--- How long code takes, the device's work included.
local ffi = require "ffi"
local C = require("kvlab.library").C
local device = require "kvlab.tensor.device"
local tensor = require "kvlab.tensor.tensor"

local M = {}

local REPEAT_FOR_S, REPEATS = 0.1, 5 -- what is shorter is repeated, so often at least

local function sync_all()
  for _, dev in ipairs(device.opened()) do dev:sync() end
end

--- Runs fn once, and again while it is short; returns the seconds of each run, sorted.
---@return number[]
function M.runs(fn)
  local seconds, total = {}, 0
  repeat
    sync_all()
    local start = C.kvl_clock_ns()
    tensor.scope(function()
      fn()
      sync_all()
    end)
    seconds[#seconds + 1] = tonumber(ffi.cast("int64_t", C.kvl_clock_ns() - start)) / 1e9
    total = total + seconds[#seconds]
  until seconds[1] >= REPEAT_FOR_S or total >= REPEAT_FOR_S and #seconds >= REPEATS
  table.sort(seconds)
  return seconds
end

--- The median of sorted times.
function M.median(seconds) return seconds[math.ceil(#seconds / 2)] end

--- "1.5 ms".
function M.text(s)
  if s < 1e-6 then return ("%.3g ns"):format(s * 1e9) end
  if s < 1e-3 then return ("%.3g us"):format(s * 1e6) end
  if s < 1 then return ("%.3g ms"):format(s * 1e3) end
  return ("%.3g s"):format(s)
end

return M
