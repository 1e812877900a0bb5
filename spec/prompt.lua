--- The REPL, fed with a file or through a pipe: what it answers.
local files = require "kvlab.files"
local paths = require("kvlab").paths
local temporary = require "spec.temporary"

local M = {}

local executable = paths.executable or paths.library_dir .. "/kvlab"

--- What the REPL answers to an input (standard output and error), and its exit status.
---@param input string
---@param is_piped? boolean  a file is read without it
---@return string output, integer status
function M.feed(input, is_piped)
  local path = temporary.path()
  files.write(path, input)
  local from = files.shell_line { path }
  local repl = files.shell_line { executable, "repl", "--device=cpu" } .. " 2>&1"
  local pipe = io.popen((is_piped and "cat %s | %s" or "<%s %s"):format(from, repl)
    .. "; echo \"status $?\"")
  local output, status = pipe:read "*a":match "^(.*)status (%d+)\n$"
  pipe:close()
  return output, tonumber(status)
end

return M
