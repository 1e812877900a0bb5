--- Says on stderr how far a run has got and how long it will still take: on a terminal in
-- one line that changes, elsewhere, such as in the log of a job, in a line of its own
-- every EVERY_S seconds at most.
local ffi = require "ffi"

ffi.cdef "int isatty(int fd);"

local M = {}
local progress = {}
progress.__index = progress

local EVERY_S = 30

--- Returns a duration as text: "40 s", "12 min", "3 h 05 min".
---@param seconds number
---@return string
function M.duration(seconds)
  if seconds < 90 then return ("%d s"):format(math.ceil(seconds)) end
  local minutes = math.ceil(seconds / 60)
  if minutes < 90 then return minutes .. " min" end
  return ("%d h %02d min"):format(math.floor(minutes / 60), minutes % 60)
end

---@param total integer  pieces of work
---@param is_terminal? boolean      nil: whether stderr is one
---@param clock? fun(): integer      in seconds, in place of os.time
function M.new(total, is_terminal, clock)
  if is_terminal == nil then is_terminal = ffi.C.isatty(2) ~= 0 end
  clock = clock or os.time
  local now = clock()
  return setmetatable({ total = total, is_terminal = is_terminal, clock = clock,
    started = now, told = now }, progress)
end

--- Says that another piece of work begins.
---@param done integer  how many are finished
---@param words string  what it is
function progress:show(done, words)
  local now, left = self.clock(), ""
  if not self.is_terminal and now - self.told < EVERY_S then return end
  local spent = now - self.started
  if done > 0 and spent > 0 then
    left = "  " .. M.duration(spent / done * (self.total - done)) .. " left"
  end
  self.told = now
  local line = ("%d/%d  %s%s"):format(done + 1, self.total, words, left)
  if not self.is_terminal then
    io.stderr:write(line, "\n")
    return
  end
  io.stderr:write("\r\27[K", #line > 100 and line:sub(1, 97) .. "..." or line)
end

--- Clears the line of a terminal.
function progress:clear()
  if self.is_terminal then io.stderr:write "\r\27[K" end
end

return M
