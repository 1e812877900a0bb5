--- Reads one input after another, from the editor, a terminal, a pipe or a file. An
-- input is as many lines as it needs to be complete. If the next line is already there
-- (in a paste, a pipe or a file) and can only continue the previous one, as `:sum()` or
-- `+ 1` does, it belongs to the same input.
local compile = require "kvlab.shell.repl.compile"
local commands = require "kvlab.shell.repl.commands"
local ffi = require "ffi"
local line_edit = require "kvlab.shell.repl.line_edit"
local tokens = require("kvlab.shell.repl.locals").tokens

ffi.cdef [[
struct kvl_pollfd { int fd; short events, revents; };
int poll(struct kvl_pollfd *fds, unsigned long n, int ms);
int ungetc(int c, void *stream);
]]

local M = {}

local EINTR = 4 -- a signal came while a line was read
local POLLIN = 1
-- How long to wait for the line after a complete one. A program that writes a whole
-- script has written it by then; a program that waits for each answer waits this much
-- longer.
local MS_NEXT_LINE = 20

---@class kvlab.Reader
---@field is_terminal boolean  input comes from a terminal, so there are prompts
---@field is_coloured boolean
---@field editor kvlab.LineEditor|nil
---@field sources table<string, string[]>  the lines of every chunk by its name
---@field queue string[]       lines of a paste that are not read yet
---@field lines_read integer   of what is no terminal
---@field is_broken boolean    the input cannot be read
local Reader = {}
Reader.__index = Reader

--- A reader of standard input.
---@param is_terminal boolean
---@param is_coloured boolean
---@return kvlab.Reader
function M.reader(is_terminal, is_coloured)
  -- Unbuffered, so that poll knows whether there is more, and a program that the input
  -- runs reads what follows.
  if not is_terminal then io.stdin:setvbuf "no" end
  return setmetatable({ is_terminal = is_terminal, is_coloured = is_coloured,
    sources = {}, queue = {}, lines_read = 0, is_broken = false }, Reader)
end

--- The name of input number `number` in errors.
---@param number integer
---@return string
function Reader:chunk_name(number)
  return self.is_terminal and ("[%d]"):format(number) or "stdin"
end

-- ---- lines ----------------------------------------------------------------------------

--- Reads a line without an editor; nil at the end.
local function read_plain(self)
  local line, problem, errno = io.read "*l"
  if not line and errno then
    self.is_broken = errno ~= EINTR
    error(self.is_broken and "standard input cannot be read: " .. problem or problem, 0)
  end
  return line
end

--- What was typed up to Enter, or pasted; nil at the end of the input.
local function read_typed(self, number, is_first)
  local words = ("[%d] "):format(number)
  local going_on = (" "):rep(#words - 3) .. ".. "
  if not self.editor then
    io.stdout:write(is_first and words or going_on)
    io.stdout:flush()
    return read_plain(self)
  end
  local function prompt(text)
    return self.is_coloured and "\1\27[1;34m\1" .. text .. "\1\27[0m\1" or text
  end
  return self.editor:read(prompt(is_first and words or going_on), prompt(going_on))
end

local BEGIN, END = line_edit.PASTE_BEGIN, line_edit.PASTE_END

--- A line of a pipe or a file, or a paste, which a program marks as terminals do.
local function read_piped(self)
  local line = read_plain(self)
  if not line or line:sub(1, #BEGIN) ~= BEGIN then return line end
  local lines = { line:sub(#BEGIN + 1) }
  while line and line:sub(-#END) ~= END do
    line = read_plain(self)
    lines[#lines + 1] = line
  end
  if line then lines[#lines] = lines[#lines]:sub(1, -#END - 1) end
  return table.concat(lines, "\n")
end

--- The next line; nil at the end of the input.
local function next_line(self, number, is_first)
  if self.queue[1] then return table.remove(self.queue, 1) end
  local text
  if self.is_terminal then
    text = read_typed(self, number, is_first)
  else
    text = read_piped(self)
  end
  if not text or not text:find "\n" then return text end
  for line in (text .. "\n"):gmatch "(.-)\r?\n" do
    self.queue[#self.queue + 1] = line
  end
  return table.remove(self.queue, 1)
end

local pollfd = ffi.new "struct kvl_pollfd[1]"

--- Gives a line back to standard input. What the input runs may read it.
local function unread(self, line)
  local text = line .. "\n"
  for i = #text, 1, -1 do
    if ffi.C.ungetc(text:byte(i), io.stdin) < 0 then
      table.insert(self.queue, 1, text:sub(1, i):gsub("\n$", ""))
      return
    end
  end
end

--- The next line, if it is there already; it stays unread.
local function peek(self)
  if self.queue[1] or self.is_terminal then return self.queue[1] end
  pollfd[0].fd, pollfd[0].events = 0, POLLIN
  if ffi.C.poll(pollfd, 1, MS_NEXT_LINE) ~= 1 then return nil end
  local line = io.read "*l"
  if line then unread(self, line) end
  return line
end

-- ---- inputs ---------------------------------------------------------------------------

--- Whether a line is for the REPL itself: `:time f()`, `?kv.randn`, `$ ls`.
local function is_command(line) return line:find "^%s*[:?$]" ~= nil end

-- Text that neither a statement nor an expression can begin with.
local INNER = {}
for sign in (".. . , + * / % ^ == ~= < <= > >= and or"):gmatch "%S+" do
  INNER[sign] = true
end
-- Text that can begin an expression or continue one. If it is indented, it continues.
local EITHER = { ["-"] = true, ["{"] = true, ["["] = true }

local function indent(line) return #line:match "^%s*" end

--- Whether a line continues an input that is complete without it. A comment does, because
-- the line after it may.
local function goes_on(lines, line, name, first)
  local token = tokens(line, 1)[1]
  if lines[#lines]:find ";%s*$" then return false end
  if not token then return line:find "^%s*%-%-" ~= nil and not line:find "^%s*%-%-%[" end
  local is_deeper = indent(line) > indent(lines[1])
  local method = line:match "^%s*:%s*([%a_][%w_]*)%s*[%({\"'%[]"
  local may = INNER[token.text] or is_deeper and (EITHER[token.text]
    or token.kind == "string")
    or method and (is_deeper or not commands.has(method))
  if not may then return false end
  local chunk, _, is_unfinished = compile(table.concat(lines, "\n") .. "\n" .. line,
    "=" .. name, first, true)
  return chunk ~= nil or is_unfinished
end

--- The lines of one input as the history has them: joined into one line, if that means
-- the same.
local function joined(lines)
  local text = table.concat(lines, "\n")
  if #lines == 1 or text:find "%-%-" or text:find "%[=*%[" then return lines end
  return { (text:gsub("%s*\n%s*", " ")) }
end

--- The chunk of these lines; or nil, what is wrong, and whether more lines could complete
-- them.
local function compile_lines(lines, name, first)
  local text = table.concat(lines, "\n")
  if #lines == 1 then text = text:gsub("^%s*=", "return ") end
  return compile(text, "=" .. name, first, true)
end

--- Whether lines are complete inputs, one after another; if not, what is wrong with the
-- first one that is none.
local function is_list_of_inputs(all, name, first)
  local lines, begins = {}, first
  for i, line in ipairs(all) do
    lines[#lines + 1] = line
    local is_special = #lines == 1 and is_command(line)
    local chunk, problem, is_unfinished
    if not is_special then
      chunk, problem, is_unfinished = compile_lines(lines, name, begins)
    end
    if not (is_special or chunk or is_unfinished) then return false, problem end
    local next_one = all[i + 1]
    if is_special or chunk and not (next_one
       and goes_on(lines, next_one, name, begins)) then
      lines, begins = {}, first + i
    end
  end
  return #lines == 0
end

--- Takes the rest of a paste. If the paste is one chunk, it is one input; otherwise, if
-- it is a list of inputs, it is read input by input. Returns what is wrong with a paste
-- that is neither.
local function take_paste(self, lines, name, first)
  if #self.queue == 0 then return nil end
  local all = { unpack(lines) }
  for _, line in ipairs(self.queue) do all[#all + 1] = line end
  local is_chunk = not is_command(all[1]) and compile_lines(all, name, first) ~= nil
  local is_list, wrong
  if not is_chunk then is_list, wrong = is_list_of_inputs(all, name, first) end
  if is_list then return nil end
  for _, line in ipairs(self.queue) do lines[#lines + 1] = line end
  self.queue = {}
  return wrong
end

--- Takes the lines that continue a complete input, and compiles it anew.
local function take_more(self, lines, name, first)
  local line, chunk = peek(self), nil
  while line and goes_on(lines, line, name, first) do
    lines[#lines + 1] = next_line(self)
    local is_unfinished, _
    chunk, _, is_unfinished = compile(table.concat(lines, "\n"), "=" .. name, first, true)
    if is_unfinished then return nil, true end
    line = peek(self)
  end
  return chunk
end

--- Reads until the lines compile. Returns the chunk (of a command: its text) and the
-- text; nil at the end of the input. An error is one of syntax.
---@param number integer  of the input
---@return function|string|nil
---@return string|nil text
function Reader:read(number)
  local lines, first = {}, self.is_terminal and 1 or self.lines_read + 1
  local name, wrong = self:chunk_name(number), nil
  local source = self.sources[name] or {}
  self.sources[name] = source
  local function note()
    for i, line in ipairs(lines) do source[first + i - 1] = line end
    if not self.is_terminal then self.lines_read = first + #lines - 1 end
  end
  while true do
    local line = next_line(self, number, #lines == 0)
    if not line and #lines == 0 then return nil end
    lines[#lines + 1] = line
    if #lines == 1 then wrong = take_paste(self, lines, name, first) end
    local is_special = #lines == 1 and is_command(lines[1])
    local chunk, problem, is_unfinished
    if not is_special then
      chunk, problem, is_unfinished = compile_lines(lines, name, first)
    end
    if chunk then
      local more, is_open = take_more(self, lines, name, first)
      chunk, is_unfinished = more or not is_open and chunk or nil, is_open
    end
    note()
    if is_special or not is_unfinished or not line then
      for _, kept in ipairs(self.editor and joined(lines) or {}) do
        self.editor:remember(kept)
      end
      if not chunk and not is_special then
        error(wrong or problem, 0)
      end
      return chunk or lines[1], table.concat(lines, "\n")
    end
  end
end

--- Forgets the rest of a paste, because it may depend on what failed.
function Reader:drop_paste()
  if self.is_terminal then self.queue = {} end
end

return M
