--- What specs do with processes: children of this one, and a Redis server.
local ffi = require "ffi"
local kv = require "kvlab"
local temporary = require "spec.temporary"

ffi.cdef [[
int fork(void);
int getpid(void);
int kill(int pid, int signal);
int waitpid(int pid, int *status, int options);
int usleep(unsigned us);
int prctl(int option, unsigned long value);
int socket(int domain, int type, int protocol);
int bind(int fd, const void *address, unsigned size);
int getsockname(int fd, void *address, unsigned *size);
int listen(int fd, int backlog);
int accept(int fd, void *address, unsigned *size);
long recv(int fd, void *buffer, size_t size, int flags);
long send(int fd, const void *buffer, size_t size, int flags);
int close(int fd);
void _exit(int status);
void *mmap(void *address, size_t bytes, int protection, int flags, int fd, long offset);
]]
local libc = ffi.C
local KILL, STOP, CONT = 9, 19, 18 -- signals
local PR_SET_PDEATHSIG = 1

local M = {}

function M.sleep(seconds) libc.usleep(seconds * 1e6) end

local HUNG_S = 120 -- no machine is as slow as that

--- Calls test(), again and again, until it gives something true, and returns that. Raises
-- where that never comes, so that a spec ends. Between two calls it sleeps: at first half
-- a millisecond, later `most_s`, which is 10 ms, or 0 for a test that does some work.
function M.wait_until(test, what, most_s)
  local deadline, pause_s = os.time() + HUNG_S, 0.0005
  most_s = most_s or 0.01
  repeat
    local result = test()
    if result then return result end
    if most_s > 0 then M.sleep(pause_s) end
    pause_s = math.min(2 * pause_s, most_s)
  until os.time() > deadline
  error(("%s: not after %d s"):format(what, HUNG_S), 2)
end

--- Runs fn() in a child, which ends without any clearing up, at the latest with us.
-- Returns its pid.
function M.fork(fn)
  io.stdout:flush()
  temporary.prepare()
  local pid = libc.fork()
  if pid == 0 then
    libc.prctl(PR_SET_PDEATHSIG, KILL)
    local ok, why = pcall(fn)
    if not ok then io.stderr:write("in a child: ", tostring(why), "\n") end
    libc._exit(ok and 0 or 1)
  end
  return pid
end

--- A whole number, 0, that this process and its children share: n[0].
function M.shared_number()
  local READ_WRITE, SHARED_ANONYMOUS = 3, 0x21
  return ffi.cast("int *", libc.mmap(nil, 4096, READ_WRITE, SHARED_ANONYMOUS, -1, 0))
end

--- Waits until a child has ended. 0: fn returned.
function M.wait(pid)
  local status = ffi.new("int[1]", -1)
  libc.waitpid(pid, status, 0)
  return status[0]
end

function M.kill(pid)
  libc.kill(pid, KILL)
  M.wait(pid)
end

--- Runs a shell command, which must go well.
function M.sh(command)
  if os.execute(command) ~= 0 then error(command, 2) end
end

function M.has(command)
  return os.execute("command -v " .. command .. " >/dev/null 2>&1") == 0
end

--- A port of the loopback interface that nobody has.
function M.free_port()
  local fd = libc.socket(2, 1, 0) -- AF_INET, SOCK_STREAM
  local address, size = ffi.new("uint8_t[16]", 2, 0, 0, 0, 127, 0, 0, 1),
    ffi.new("unsigned[1]", 16)
  assert(libc.bind(fd, address, 16) == 0)
  libc.getsockname(fd, address, size)
  libc.close(fd)
  return address[2] * 256 + address[3]
end

---@class spec.Redis
---@field port integer
local Redis = {}
Redis.__index = Redis

--- A Redis server that keeps nothing on disk, with further `options`.
function M.redis(options)
  local self = setmetatable({ port = M.free_port(), options = options or "" }, Redis)
  self.url = ("redis://127.0.0.1:%d"):format(self.port)
  self:start()
  return self
end

--- Starts it, on its old port after a stop, and waits until it answers.
function Redis:start()
  local pipe = io.popen(("redis-server --port %d --bind 127.0.0.1 --save '' --appendonly "
    .. "no --dir /tmp %s >/dev/null 2>&1 & echo $!"):format(self.port, self.options))
  self.pid = pipe:read "*n"
  pipe:close()
  M.wait_until(function() return self:ask "ping" end, "the Redis server starts")
end

--- The first line that redis-cli prints; nil when there is no answer.
function Redis:ask(command)
  local pipe = io.popen(("redis-cli -p %d %s 2>/dev/null"):format(self.port, command))
  local answer = pipe:read "*l"
  pipe:close()
  return answer and #answer > 0 and answer or nil
end

--- It stops answering, until `continue`.
function Redis:freeze() libc.kill(self.pid, STOP) end
function Redis:continue() libc.kill(self.pid, CONT) end

function Redis:stop()
  libc.kill(self.pid, CONT)
  libc.kill(self.pid, KILL)
  while libc.kill(self.pid, 0) == 0 and self:ask "ping" do M.sleep(0.01) end
end

---@class spec.Answering
local Answering = {}
Answering.__index = Answering

--- Sends `answer` to every command of a connection; PING is answered as by Redis.
local function answer_all(fd, answer)
  local text, buffer = "", ffi.new "char[65536]"
  while true do
    local n = tonumber(libc.recv(fd, buffer, 65536, 0))
    if n <= 0 then return end
    text = (text .. ffi.string(buffer, n)):sub(-65536)
    local reply = text:find "PING\r\n$" and "+PONG\r\n" or answer
    if text:sub(-2) == "\r\n" then
      libc.send(fd, reply, #reply, 0x4000) -- MSG_NOSIGNAL
      text = ""
    end
  end
end

--- A server that is no Redis server: it gives every command but PING the same answer.
function M.answering(answer)
  local fd, port = libc.socket(2, 1, 0), M.free_port()
  local address = ffi.new("uint8_t[16]", 2, 0, math.floor(port / 256), port % 256, 127, 0,
    0, 1)
  assert(libc.bind(fd, address, 16) == 0 and libc.listen(fd, 16) == 0)
  local self = setmetatable({ url = "redis://127.0.0.1:" .. port }, Answering)
  self.pid = M.fork(function()
    while true do
      local peer = libc.accept(fd, nil, nil)
      M.fork(function() answer_all(peer, answer) end)
      libc.close(peer)
    end
  end)
  libc.close(fd)
  return self
end

function Answering:stop() M.kill(self.pid) end

--- Milliseconds that fn() takes.
function M.ms(fn)
  local start = kv.C.kvl_clock_ns()
  fn()
  return tonumber(kv.C.kvl_clock_ns() - start) * 1e-6
end

return M
