--- Read, evaluate, print. The values of an expression are printed unless it ends with
-- `;`, a statement is run, and an unfinished input continues in the next line.
-- docs/repl.md is the manual; `:help` its short form.
--
-- The parts: repl/reader (inputs), repl/line_edit (typing), repl/complete (Tab),
-- repl/locals (variables), repl/inspect (printing), repl/help (`?name`), repl/commands
-- (`:name`), repl/failure (errors).
local commands = require "kvlab.shell.repl.commands"
local ffi = require "ffi"
local failure = require "kvlab.shell.repl.failure"
local inspect = require "kvlab.shell.repl.inspect"
local line_edit = require "kvlab.shell.repl.line_edit"
local locals = require "kvlab.shell.repl.locals"
local reader = require "kvlab.shell.repl.reader"
local hint = require("kvlab.words").hint

ffi.cdef [[
int isatty(int fd);
void kvl_interrupt(int set);
int kvl_interrupted(void);
]]

local M = {}

local RESULTS_KEPT = 20 -- a result that is a tensor keeps its memory

---@class kvlab.Session
---@field environment table   the global variables; the program's shine through
---@field scope kvlab.Scope    all variables: these, and what `local` declared
---@field reader kvlab.Reader
---@field number integer      of the input that is read or runs
---@field is_terminal boolean input comes from a terminal, so there are prompts
---@field is_coloured boolean
---@field has_failed boolean  an input ended with an error
---@field is_broken boolean   the input cannot be read
---@field sources table<string, string[]>  the lines of every chunk by its name
---@field columns fun(): integer  of the terminal
local Session = {}
Session.__index = Session

-- ---- the session's variables ----------------------------------------------------------

--- Warns when a name is read that was never set; once for each input.
local function warn(session, name)
  if session.warned[name] or name == "_" then return nil end
  session.warned[name] = true
  local names = {}
  for key in pairs(session.scope:variables()) do names[#names + 1] = tostring(key) end
  for key in pairs(_G) do names[#names + 1] = tostring(key) end
  table.sort(names)
  local words = ""
  if name:find "^_%d+$" then
    words = (": the results of the last %d inputs are kept"):format(RESULTS_KEPT)
  elseif #name > 2 then
    words = hint(name, names)
  end
  io.stdout:flush()
  io.stderr:write(inspect.paint(("warning: %s is not defined%s"):format(name, words),
    "warning", session.is_coloured), "\n")
end

local function make_environment(session)
  local environment = { kv = require "kvlab" }
  session.hidden = { kv = true } -- not variables of the user's
  return setmetatable(environment, { __index = function(_, name)
    if name == locals.NAME then return session.scope:declared() end
    local value = rawget(_G, name)
    if value == nil and type(name) == "string" then warn(session, name) end
    return value
  end })
end

--- A new session; nothing is read yet.
---@param is_terminal boolean
---@return kvlab.Session
function M.session(is_terminal)
  local self = setmetatable({ number = 1, is_terminal = is_terminal, warned = {},
    has_failed = false, columns = line_edit.columns,
    is_coloured = ffi.C.isatty(1) ~= 0 and inspect.wants_colour() }, Session)
  self.reader = reader.reader(is_terminal, self.is_coloured)
  self.environment = make_environment(self)
  self.scope = locals.scope(self.environment)
  return self
end

-- ---- evaluating -----------------------------------------------------------------------

--- Prints values: side by side when each is short, else below each other.
function Session:print(...)
  local texts, is_short, total = {}, true, 0
  for i = 1, select("#", ...) do
    texts[i] = inspect.text((select(i, ...)), { colour = self.is_coloured,
      columns = self.columns() })
    total = total + #texts[i]
    is_short = is_short and not texts[i]:find "\n"
  end
  is_short = is_short and (total < 100 or #texts == 1)
  io.stdout:write(table.concat(texts, is_short and "\t" or "\n"), "\n")
end

--- Keeps a result as `_` and `_N`.
function Session:keep(value)
  local name = "_" .. self.number
  self.environment._, self.environment[name] = value, value
  self.hidden._, self.hidden[name] = true, true
end

--- Moves to the next input; its result replaces an old one.
function Session:advance()
  local old = "_" .. self.number - RESULTS_KEPT
  self.environment[old], self.hidden[old] = nil, nil
  self.number = self.number + 1
end

local function take(...) return { n = select("#", ...), ... } end

--- Runs what was read.
function Session:evaluate(chunk, text)
  if type(chunk) == "string" then
    return commands.run(self, chunk)
  end
  local values = take(self.scope:run(chunk))
  if values.n == 0 then return end
  self:keep(values[1])
  if not text:find ";%s*$" then self:print(unpack(values, 1, values.n)) end
end

--- Ctrl-C ends what runs (or forgets what was typed), not the session.
function Session:recover(problem)
  local editor = self.reader.editor
  self.has_failed = true
  self.reader:drop_paste()
  io.stdout:flush()
  if ffi.C.kvl_interrupted() ~= 0 then
    ffi.C.kvl_interrupt(0)
    debug.sethook()
    if editor then editor:leave() end
    io.stderr:write(self.is_terminal and "\n" or "", "interrupted\n")
  else
    failure.print(problem, self.is_coloured)
  end
end

--- The name of the input that runs.
---@return string
function Session:chunk_name() return self.reader:chunk_name(self.number) end

--- The line of the input on which a command stands.
function Session:line() return self.is_terminal and 1 or self.reader.lines_read end

--- One input; false at the end of all, and when no more can be read.
function Session:step()
  local ok, chunk, text = pcall(self.reader.read, self.reader, self.number)
  if ok and not chunk then return false end
  self.warned = {}
  local problem = chunk
  if ok then
    ok, problem = xpcall(function() self:evaluate(chunk, text) end,
      failure.handler(self.reader.sources))
  end
  if not ok then self:recover(problem) end
  io.stdout:flush() -- for a program that waits for the answer
  self:advance()
  return not self.reader.is_broken
end

-- ---- the whole ------------------------------------------------------------------------

local function open_editor(self)
  local complete = require "kvlab.shell.repl.complete" -- loads the library for its names
  local editor, reason = line_edit.open(function(before)
    return complete.candidates(before, self.scope:variables(), commands.names())
  end, line_edit.history_file())
  self.reader.editor = editor
  if reason then io.stderr:write("kvlab: ", reason, "\n") end
end

--- Sets every local of a running function as a variable in `environment`.
local function take_locals(fn, environment)
  local level = 2
  repeat
    local info = debug.getinfo(level, "f")
    if not info then return end -- it has ended with a tail call
    level = level + 1
  until info.func == fn
  for i = 1, math.huge do
    local name, value = debug.getlocal(level - 1, i)
    if not name then return end
    if not name:find "^%(" and value ~= nil then environment[name] = value end
  end
end

--- Runs a script; its globals and the locals of its main part become variables, also when
-- it ends with an error.
function Session:run_script(path)
  local file = assert(io.open(path))
  local text = file:read "*a":gsub("^#[^\n]*", "")
  file:close()
  local environment = self.environment
  -- called by the last statement, unless the script has a `return` there
  local chunk = loadstring(text .. "\ndo _take_locals() end", "@" .. path)
    or assert(loadstring(text, "@" .. path))
  environment._take_locals = function() take_locals(chunk, environment) end
  local describe = failure.handler(self.reader.sources)
  local ok, problem = xpcall(setfenv(chunk, environment), function(raised)
    take_locals(chunk, environment)
    return describe(raised) -- a tail call: it looks at the stack above itself
  end)
  environment._take_locals = nil
  if not ok then self:recover(problem) end
end

--- Runs until the input ends.
---@param script? string  runs first, and leaves its variables
---@return integer        # exit status: 1 after an error in an input that is no terminal
function M.main(script)
  local session = M.session(ffi.C.isatty(0) ~= 0)
  if session.is_terminal then
    open_editor(session)
    io.stdout:write("kvlab, ", jit.version,
      ". Tab completes, :help lists commands, Ctrl-D ends.\n")
  end
  if script then session:run_script(script) end
  repeat until not session:step()
  if session.is_terminal then io.stdout:write "\n" end
  return session.has_failed and not session.is_terminal and 1 or 0
end

return M
