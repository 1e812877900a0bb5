--- Prints one line on stderr that says how far a run has got and how long it will still
-- take. It prints nothing when stderr is not a terminal.
local ffi = require "ffi"

ffi.cdef "int isatty(int fd);"

local M = {}
local progress = {}
progress.__index = progress

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
---@param is_shown? boolean  nil: shown if stderr is a terminal
function M.new(total, is_shown)
  if is_shown == nil then is_shown = ffi.C.isatty(2) ~= 0 end
  local line = { total = total, is_shown = is_shown, started = os.time() }
  return setmetatable(line, progress)
end

--- Shows that another piece of work begins.
---@param done integer  how many are finished
---@param words string  what it is
function progress:show(done, words)
  if not self.is_shown then return end
  local left = ""
  local spent = os.difftime(os.time(), self.started)
  if done > 0 and spent > 0 then
    left = "  " .. M.duration(spent / done * (self.total - done)) .. " left"
  end
  local line = ("%d/%d  %s%s"):format(done + 1, self.total, words, left)
  io.stderr:write("\r\27[K", #line > 100 and line:sub(1, 97) .. "..." or line)
end

--- Clears the line.
function progress:clear()
  if self.is_shown then io.stderr:write "\r\27[K" end
end

return M
