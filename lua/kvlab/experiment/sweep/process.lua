--- Starts child processes and exchanges lines with them through a socket, which is file
-- descriptor 3 in the child. Parent and child share standard input, output and error.
local ffi = require "ffi"

ffi.cdef [[
typedef struct { int fd; short events, revents; } kvl_pollfd;
int socketpair(int domain, int type, int protocol, int fds[2]);
int close(int fd);
int fcntl(int fd, int command, ...);
int kill(int pid, int signal);
int poll(kvl_pollfd *fds, unsigned long n, int timeout_ms);
int prctl(int option, unsigned long value);
long recv(int fd, void *buffer, size_t size, int flags);
long send(int fd, const void *buffer, size_t size, int flags);
int shutdown(int fd, int how);
int waitpid(int pid, int *status, int options);
int posix_spawn_file_actions_init(void *actions);
int posix_spawn_file_actions_adddup2(void *actions, int fd, int as);
int posix_spawn_file_actions_destroy(void *actions);
int posix_spawnp(int *pid, const char *file, const void *actions, const void *attributes,
                 const char *const argv[], char *const envp[]);
extern char **environ;
]]
local C = ffi.C
local AF_UNIX, SOCK_STREAM, SOCK_CLOEXEC, MSG_NOSIGNAL = 1, 1, 0x80000, 0x4000
local SHUT_WR = 1
local POLLIN, EINTR, SIGKILL, SIGTERM, PR_SET_PDEATHSIG = 1, 4, 9, 15, 1
local F_SETFD, FD_CLOEXEC = 2, 1
local PARENT = 3 -- the child's descriptor
local BUFFER_BYTES = 65536

local M = {}

---@class kvlab.process
---@field pid integer
---@field fd integer   the parent's end of the socket
---@field text string  the beginning of a line that has not yet come completely
local Process = {}
Process.__index = Process

--- Starts a program that is in PATH.
---@param words string[]  the program and its arguments
---@return kvlab.process
function M.spawn(words)
  local fds = ffi.new "int[2]"
  if C.socketpair(AF_UNIX, SOCK_STREAM + SOCK_CLOEXEC, 0, fds) ~= 0 then
    error("a socket for a child process cannot be made: error " .. ffi.errno(), 0)
  end
  local actions = ffi.new "int64_t[32]" -- posix_spawn_file_actions_t takes 80 bytes
  C.posix_spawn_file_actions_init(actions)
  C.posix_spawn_file_actions_adddup2(actions, fds[1], PARENT)
  local argv = ffi.new("const char *[?]", #words + 1)
  for i, word in ipairs(words) do argv[i - 1] = word end
  local pid = ffi.new "int[1]"
  local failed = C.posix_spawnp(pid, words[1], actions, nil, argv, C.environ)
  C.posix_spawn_file_actions_destroy(actions)
  C.close(fds[1])
  if failed ~= 0 then
    C.close(fds[0])
    error(("%s cannot be started: error %d"):format(words[1], failed), 0)
  end
  return setmetatable({ pid = pid[0], fd = fds[0], text = "" }, Process)
end

--- Sends a text. Returns whether all of it could be sent.
local function send_all(fd, text)
  local bytes, at = ffi.cast("const char *", text), 0
  while at < #text do
    local n = tonumber(C.send(fd, bytes + at, #text - at, MSG_NOSIGNAL))
    if n < 0 and ffi.errno() ~= EINTR then return false end
    at = at + math.max(n, 0)
  end
  return true
end

--- Sends a line to the process. If the process has ended, wait_any reports it.
function Process:send(line) send_all(self.fd, line .. "\n") end

local buffer = ffi.new("char[?]", BUFFER_BYTES)

--- Returns the complete lines that have come; nil if the other end is closed.
local function receive(peer)
  local n = tonumber(C.recv(peer.fd, buffer, BUFFER_BYTES, 0))
  if n < 0 and ffi.errno() == EINTR then return {} end
  if n <= 0 then return nil end
  local lines, at = {}, 1
  local text = peer.text .. ffi.string(buffer, n)
  for line, after in text:gmatch "([^\n]*)\n()" do lines[#lines + 1], at = line, after end
  peer.text = text:sub(at)
  return lines
end

--- Waits until one of the processes has written or ended. Returns that process and its
-- lines, or nil instead of lines if it has ended.
---@param processes kvlab.process[]
---@return kvlab.process process, string[]|nil lines
function M.wait_any(processes)
  local fds = ffi.new("kvl_pollfd[?]", #processes)
  for i, process in ipairs(processes) do
    fds[i - 1].fd, fds[i - 1].events = process.fd, POLLIN
  end
  while C.poll(fds, #processes, -1) <= 0 do end -- again after a signal
  for i, process in ipairs(processes) do
    if fds[i - 1].revents ~= 0 then return process, receive(process) end
  end
end

--- Tells the process that no more lines will come. It then finishes its work and closes
-- its end.
function Process:finish() C.shutdown(self.fd, SHUT_WR) end

--- Closes the parent's end of the socket and waits until the process has ended. Returns
-- how it ended: "exit status 3", "signal 9".
---@param at_once? boolean  kills the process
---@return string
function Process:close(at_once)
  C.close(self.fd)
  if at_once then C.kill(self.pid, SIGKILL) end
  local status = ffi.new "int[1]"
  while C.waitpid(self.pid, status, 0) < 0 and ffi.errno() == EINTR do end
  local signal = bit.band(status[0], 127)
  if signal ~= 0 then return "signal " .. signal end
  return "exit status " .. bit.rshift(status[0], 8)
end

-- ---- on the child's side --------------------------------------------------------------

--- Makes this process end when its parent ends, even in the middle of its work. Programs
-- that this process starts do not inherit the socket, so the parent notices when this
-- process ends even if they go on.
function M.follow_parent()
  C.prctl(PR_SET_PDEATHSIG, SIGTERM)
  C.fcntl(PARENT, F_SETFD, ffi.cast("int", FD_CLOEXEC))
end

--- Returns an iterator over the lines from the parent, until the parent closes its end.
---@return fun(): string|nil
function M.lines()
  local parent, queue, at = { fd = PARENT, text = "" }, {}, 1
  return function()
    while not queue[at] do
      queue, at = receive(parent), 1
      if not queue then return nil end
    end
    at = at + 1
    return queue[at - 1]
  end
end

--- Sends a line to the parent.
---@param line string
function M.answer(line)
  if not send_all(PARENT, line .. "\n") then os.exit(1) end -- nobody is left to tell
end

return M
