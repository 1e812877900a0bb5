--- Read, evaluate, print: an expression's values are printed, a statement is run, an
-- unfinished one goes on in the next line. `kv` is the library, `_` the last value.
local ffi = require "ffi"

ffi.cdef [[
int isatty(int fd);
void kvl_interrupt(int set);
int kvl_interrupted(void);
]]

local M = {}

--- Text -> a function, or nil, a message and whether more lines could complete it.
local function compile(text)
  -- Not `return text`: as a tail call, error("x") would blame this file.
  local chunk = loadstring(("return (function(...) return ... end)(%s\n)"):format(text),
    "=stdin")
  if chunk then return chunk end
  local problem
  chunk, problem = loadstring(text, "=stdin")
  return chunk, problem, problem and problem:find "'<eof>'$" ~= nil
end

--- Reads until the text compiles; returns the function, or nil at the end of the input.
local function read(is_terminal)
  local text
  while true do
    if is_terminal then
      io.stdout:write(text and ">> " or "> ")
      io.stdout:flush()
    end
    local line, problem, errno = io.read "*l"
    if not line then return nil, errno and error(problem, 0) end
    text = text and text .. "\n" .. line or line:gsub("^%s*=", "return ")
    local chunk, is_unfinished
    chunk, problem, is_unfinished = compile(text)
    if chunk then return chunk end
    if not is_unfinished then error(problem, 0) end
  end
end

--- Ctrl-C ends what runs (or forgets what was typed), not the REPL.
local function recover(is_terminal, problem)
  io.stdout:flush()
  if ffi.C.kvl_interrupted() ~= 0 then
    ffi.C.kvl_interrupt(0)
    io.stderr:write(is_terminal and "\n" or "", "interrupted\n")
  else
    io.stderr:write(tostring(problem), "\n")
  end
end

local function show(environment, ...)
  local count = select("#", ...)
  if count == 0 then return end
  environment._ = (...)
  local words = {}
  for i = 1, count do words[i] = tostring((select(i, ...))) end
  io.stdout:write(table.concat(words, "\t"), "\n")
end

--- Runs until the input ends.
---@return integer  # exit status 0
function M.main()
  local is_terminal = ffi.C.isatty(0) ~= 0
  local environment = setmetatable({ kv = require "kvlab" }, { __index = _G })
  if is_terminal then
    io.stdout:write("kvlab, ", jit.version, ". `kv` is the library; Ctrl-D ends.\n")
  end
  while true do
    local ok, chunk = pcall(read, is_terminal)
    if ok and not chunk then break end
    local problem = chunk
    if ok then
      setfenv(chunk, environment)
      ok, problem = pcall(function() show(environment, chunk()) end)
    end
    if not ok then recover(is_terminal, problem) end
  end
  if is_terminal then io.stdout:write "\n" end
  return 0
end

return M
