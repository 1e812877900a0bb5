--- Lines typed at a terminal, edited by libedit (BSD licence), with completion and a
-- history that outlives the session. libedit is run one key at a time (EL_UNBUFFERED), so
-- that Lua asks it and it never calls Lua.
local ffi = require "ffi"
local files = require "kvlab.files"

ffi.cdef [[
typedef struct kvl_editline kvl_editline;
typedef struct kvl_history kvl_history;
typedef struct { int num; const char *str; } kvl_history_event;
typedef struct { const char *buffer, *cursor, *lastchar; } kvl_line_info;
kvl_editline *el_init(const char *, void *, void *, void *);
void el_end(kvl_editline *);
int el_set(kvl_editline *, int, ...);
int el_source(kvl_editline *, const char *);
void el_push(kvl_editline *, const char *);
void el_deletestr(kvl_editline *, int);
int el_insertstr(kvl_editline *, const char *);
const char *el_gets(kvl_editline *, int *);
const kvl_line_info *el_line(kvl_editline *);
kvl_history *history_init(void);
int history(kvl_history *, kvl_history_event *, int, ...);
char *setlocale(int category, const char *locale);
struct kvl_winsize { unsigned short rows, columns, x, y; };
int isatty(int fd);
int ioctl(int fd, unsigned long request, ...);
ssize_t read(int fd, void *bytes, size_t n);
extern char kvlab_prompt[];
char *kvlab_prompt_of(void *);
]]

local EL_EDITOR, EL_BIND, EL_HIST, EL_UNBUFFERED, EL_REFRESH, EL_PROMPT_ESC =
  2, 4, 10, 15, 20, 21
local H_SETSIZE, H_ENTER, H_SETUNIQUE = 1, 10, 20
local LC_CTYPE, TIOCGWINSZ = 0, 0x5413
local CTRL_D = "\4" -- alone in the line
-- What a terminal sends around a paste ("bracketed paste") once it is asked to. PASTE is
-- the letter that PASTE_BEGIN becomes.
local PASTE_ON, PASTE_OFF = "\27[?2004h", "\27[?2004l"
local PASTE_BEGIN, PASTE_END, PASTE = "\27[200~", "\27[201~", "\29"
local HISTORY_MAX = 2000
local PROMPT_BYTES = 128 -- of kvlab_prompt in runtime/main.c

local M = { PASTE_BEGIN = PASTE_BEGIN, PASTE_END = PASTE_END }

---@class kvlab.LineEditor
local Editor = {}
Editor.__index = Editor

-- A variadic function takes its arguments as they come.
local function int(n) return ffi.new("int", n) end
local function text(s) return ffi.cast("const char *", s) end

--- The columns of the terminal; 80 when it does not tell.
---@return integer
function M.columns()
  local size = ffi.new "struct kvl_winsize"
  local known = ffi.C.ioctl(1, TIOCGWINSZ, size) == 0 and size.columns > 0
  return known and size.columns or 80
end

-- ---- history --------------------------------------------------------------------------

--- $XDG_STATE_HOME/kvlab/history, or ~/.local/state/kvlab/history; nil without a home.
---@return string|nil
function M.history_file()
  local state, home = os.getenv "XDG_STATE_HOME", os.getenv "HOME"
  if not state or state:sub(1, 1) ~= "/" then
    state = home and home ~= "" and home .. "/.local/state"
  end
  return state and state .. "/kvlab/history" or nil
end

local function enter(self, line)
  self.library.history(self.history, self.event, int(H_ENTER), text(line))
end

--- Reads the file into libedit; one that has grown to twice the limit is cut. Where there
-- is no file yet, its folder is made.
local function load_history(self)
  local file = self.path and io.open(self.path)
  if not file then
    local folder = (self.path or ""):match "^(.*)/" or "."
    os.execute(files.shell_line { "mkdir", "-p", "-m", "700", "--", folder }
      .. " 2>/dev/null")
    return
  end
  local lines = {}
  for line in file:lines() do lines[#lines + 1] = line end
  file:close()
  local first = math.max(1, #lines - HISTORY_MAX + 1)
  for i = first, #lines do enter(self, lines[i]) end
  if #lines >= 2 * HISTORY_MAX then
    pcall(files.write, self.path, table.concat(lines, "\n", first) .. "\n")
  end
end

--- Adds a line to the history and to its file, at once: sessions that end badly and
-- sessions side by side lose nothing.
---@param line string
function Editor:remember(line)
  if not line:find "%S" or line == self.newest then return end
  self.newest = line
  enter(self, line)
  local file = self.path and io.open(self.path, "a")
  if not file then return end
  file:write(line, "\n")
  file:close()
end

-- ---- completion -----------------------------------------------------------------------

local function common_start(words)
  local start = words[1]
  for _, word in ipairs(words) do
    while word:sub(1, #start) ~= start do start = start:sub(1, -2) end
  end
  return start
end

--- The words in columns, as ls prints them.
local function lay_out(words, columns)
  local widest = 0
  for _, word in ipairs(words) do widest = math.max(widest, #word) end
  local across = math.max(1, math.floor(columns / (widest + 2)))
  local down = math.ceil(#words / across)
  local lines = {}
  for row = 1, down do
    local line = {}
    for i = row, #words, down do line[#line + 1] = words[i] end
    for i = 1, #line - 1 do line[i] = line[i] .. (" "):rep(widest + 2 - #line[i]) end
    lines[row] = table.concat(line)
  end
  return table.concat(lines, "\n")
end

--- What Tab does: it types what all candidates have in common, and lists them when that
-- is nothing. At the beginning of a line, it indents. A Tab reaches the line like a
-- letter; a pushed DEL removes it again.
local function complete(self, before)
  local library, editor = self.library, self.editor
  if not before:find "%S" then return library.el_push(editor, "\127  ") end
  local stem, candidates, suffix = self.complete(before)
  local rest = #candidates > 0 and common_start(candidates):sub(#stem + 1) or ""
  if #candidates == 1 then rest = rest .. (suffix or "") end
  if rest ~= "" or #candidates < 2 then return library.el_push(editor, "\127" .. rest) end
  library.el_deletestr(editor, 1)
  io.stdout:write("\n", lay_out(candidates, M.columns()), "\n")
  io.stdout:flush()
  library.el_set(editor, EL_REFRESH)
end

-- ---- pasting --------------------------------------------------------------------------

--- The pasted text, up to the end that the terminal marks. It is read without libedit,
-- which reads one byte at a time and has read none of these yet.
local function read_paste()
  local byte, bytes = ffi.new "char[1]", {}
  repeat
    if ffi.C.read(0, byte, 1) ~= 1 then break end
    bytes[#bytes + 1] = ffi.string(byte, 1)
    local is_over = bytes[#bytes] == "~"
      and table.concat(bytes, "", math.max(1, #bytes - 5)) == PASTE_END
    if is_over then for _ = 1, #PASTE_END do bytes[#bytes] = nil end end
  until is_over
  return (table.concat(bytes):gsub("\r\n?", "\n"):gsub("\t", "  "))
end

--- Puts a paste into the line. All of its lines but the last go to `held`, and are shown
-- above the line that is edited. Returns true where the paste ends with a line break, so
-- that nothing is left to edit.
local function take_paste(self, held, before, prompts)
  local library, editor, at = self.library, self.editor, self.library.el_line(self.editor)
  local after = ffi.string(at.cursor, at.lastchar - at.cursor)
  local pasted = read_paste()
  library.el_deletestr(editor, 1) -- PASTE
  if not pasted:find "\n" then
    library.el_insertstr(editor, text(pasted))
    library.el_set(editor, EL_REFRESH)
    return false
  end
  local whole = before .. pasted .. after
  io.stdout:write "\r\27[K"
  for line in whole:gmatch "(.-)\n" do
    io.stdout:write((prompts[#held == 0 and 1 or 2]:gsub("\1", "")), line, "\n")
    held[#held + 1] = line
  end
  io.stdout:flush()
  library.el_deletestr(editor, #before)
  local last = whole:match "[^\n]*$"
  if last == "" then return true end
  ffi.copy(ffi.C.kvlab_prompt, prompts[2]:sub(1, PROMPT_BYTES - 1))
  library.el_insertstr(editor, text(last:sub(1, #last - #after)))
  library.el_set(editor, EL_REFRESH)
  return false
end

-- ---- reading --------------------------------------------------------------------------

--- Reads one line, or the lines of a paste, which are shown as they are and run with the
-- Enter after the last one. nil at the end of the input (Ctrl-D), and after a signal.
---@param prompt string   escape sequences stand between two bytes 1
---@param further string  the prompt of further lines
---@return string|nil
function Editor:read(prompt, further)
  local library, editor, count = self.library, self.editor, ffi.new "int[1]"
  local held, prompts = {}, { prompt, further }
  ffi.copy(ffi.C.kvlab_prompt, prompt:sub(1, PROMPT_BYTES - 1))
  io.stdout:write(PASTE_ON)
  io.stdout:flush()
  library.el_set(editor, EL_UNBUFFERED, int(1)) -- draws the prompt
  local line
  repeat
    ffi.errno(0)
    local typed = library.el_gets(editor, count)
    line = typed ~= nil and ffi.string(typed, count[0]) or ""
    -- NULL is an empty line, too; isatty fails when the terminal is gone
    local is_over = typed == nil and (ffi.errno() ~= 0 or ffi.C.isatty(0) == 0)
    if is_over or line == CTRL_D then return self:leave() end
    local at = library.el_line(editor)
    local before = ffi.string(at.buffer, at.cursor - at.buffer)
    local last = before:sub(-1)
    if last == "\t" then complete(self, before:sub(1, -2)) end
    if last == PASTE and take_paste(self, held, before:sub(1, -2), prompts) then
      line = "\n"
    end
  until line:find "[\n\r]$"
  self:leave()
  held[#held + 1] = line ~= "\n" and line:gsub("[\r\n]$", "") or nil
  return #held == 0 and "" or table.concat(held, "\n")
end

--- Ends the line that is being edited; also called by code that catches the error of a
-- Ctrl-C.
function Editor:leave()
  self.library.el_set(self.editor, EL_UNBUFFERED, int(0))
  io.stdout:write(PASTE_OFF)
  io.stdout:flush()
end

local KEYS = {
  { "\t", "ed-insert" }, -- seen by take_tab
  { "^R", "em-inc-search-prev" },
  { "\\e[A", "ed-search-prev-history" }, { "\\eOA", "ed-search-prev-history" },
  { "\\e[B", "ed-search-next-history" }, { "\\eOB", "ed-search-next-history" },
  { "\\e[3~", "ed-delete-next-char" },
  { "\\e[H", "ed-move-to-beg" }, { "\\e[1~", "ed-move-to-beg" },
  { "\\e[F", "ed-move-to-end" }, { "\\e[4~", "ed-move-to-end" },
  { "\\e[1;5C", "em-next-word" }, { "\\e[1;5D", "ed-prev-word" },
}

--- Opens an editor on the terminal.
---@param complete_fn fun(before: string): string, string[], string|nil  the text before
---  the cursor -> the part of it that candidates begin with, the candidates, and what to
---  append if there is only one
---@param history_path? string
---@return kvlab.LineEditor|nil, string|nil reason
function M.open(complete_fn, history_path)
  local ok, library = pcall(ffi.load, "libedit.so.2")
  if not ok then return nil, "libedit.so.2 is not there: no line editing" end
  ffi.C.setlocale(LC_CTYPE, "")
  local editor = library.el_init("kvlab", io.stdin, io.stdout, io.stderr)
  if editor == nil then return nil, "libedit refuses this terminal: no line editing" end
  local self = setmetatable({ library = library, editor = editor, complete = complete_fn,
    path = history_path, history = library.history_init(),
    event = ffi.new "kvl_history_event" }, Editor)
  library.el_set(editor, EL_PROMPT_ESC, ffi.C.kvlab_prompt_of, int(1))
  library.el_set(editor, EL_EDITOR, text "emacs")
  library.history(self.history, self.event, int(H_SETSIZE), int(HISTORY_MAX))
  library.history(self.history, self.event, int(H_SETUNIQUE), int(1))
  library.el_set(editor, EL_HIST, ffi.cast("void *", library.history), self.history)
  for _, key in ipairs(KEYS) do
    library.el_set(editor, EL_BIND, text(key[1]), text(key[2]), text(nil))
  end
  library.el_set(editor, EL_BIND, text(PASTE), text "ed-insert", text(nil))
  library.el_set(editor, EL_BIND, text "-s", text(PASTE_BEGIN), text(PASTE), text(nil))
  library.el_source(editor, nil)
  load_history(self)
  return self
end

return M
