--- A client of HTTP for specs: sockets that never wait. The server runs in the same
-- process, one turn after the other, while answers are awaited.
local connections = require "kvlab.http.connections"
local ffi = require "ffi"
local json = require "kvlab.json"
local processes = require "spec.processes"

ffi.cdef [[
int connect(int fd, const void *address, unsigned size);
int shutdown(int fd, int how);
int setsockopt(int fd, int level, int name, const int *value, unsigned size);
]]
local libc = ffi.C
local DONTWAIT, NOSIGNAL, EAGAIN, STREAM, INET = 0x40, 0x4000, 11, 1, 2
local SOL_SOCKET, SO_RCVBUF = 1, 8

local M = {}

local Client = {}
Client.__index = Client

--- Options for connections.open: `o` over small ones. A request that is turned away gets
-- the reason's name.
function M.options(o)
  local all = { address = "127.0.0.1", port = 0, connections = 8, bytes_body = 1000,
                arrival_s = 30, taking_s = 30 }
  for _, name in ipairs(connections.EARLY) do all[name] = name end
  for name, value in pairs(o or {}) do all[name] = value end
  return all
end

--- Connects to a port of this machine.
---@param port integer
---@param bytes_unread? integer  how much the socket holds that was not read; the system
--                               gives twice as much (many megabytes)
function M.connect(port, bytes_unread)
  local fd = libc.socket(INET, STREAM, 0)
  assert(fd >= 0, "no socket")
  if bytes_unread then
    libc.setsockopt(fd, SOL_SOCKET, SO_RCVBUF, ffi.new("int[1]", bytes_unread), 4)
  end
  local address = ffi.new("uint8_t[16]", INET, 0, math.floor(port / 256), port % 256,
    127, 0, 0, 1)
  assert(libc.connect(fd, address, 16) == 0, "cannot connect")
  return setmetatable({ fd = fd, got = "" }, Client)
end

--- Sends as much of a text as goes without waiting. Returns how many bytes.
function Client:send(text)
  local n = libc.send(self.fd, text, #text, DONTWAIT + NOSIGNAL)
  return tonumber(n)
end

local buffer = ffi.new "char[65536]"

--- Sends a text of any length: what does not go without waiting is sent by `read`.
function Client:post(text)
  local n = self:send(text)
  self.rest = n < #text and text:sub(math.max(n, 0) + 1) or nil
end

--- Reads what is there. Sets is_over when the server has ended the connection.
function Client:read()
  if self.rest then self:post(self.rest) end
  while not self.is_over do
    local n = tonumber(libc.recv(self.fd, buffer, 65536, DONTWAIT))
    if n > 0 then self.got = self.got .. ffi.string(buffer, n)
    elseif n < 0 and ffi.errno() == EAGAIN then return
    else self.is_over = true end
  end
end

function Client:close()
  if self.fd then libc.close(self.fd) end
  self.fd = nil
end

--- Takes the parts of a chunked body together.
local function joined(text)
  local parts, at = {}, 1
  while true do
    local size, from = text:match("^(%x+)\r\n()", at)
    size = size and tonumber(size, 16)
    if not size or size == 0 then break end
    parts[#parts + 1] = text:sub(from, from + size - 1)
    at = from + size + 2
  end
  return table.concat(parts)
end

--- The answer so far: status, body and headers; nil before the headers are there.
function Client:answer()
  local status, head, body = self.got:match "^HTTP/1.1 (%d+)[^\r]*\r\n(.-)\r\n\r\n(.*)$"
  if not status then return nil end
  if head:lower():find "transfer%-encoding: chunked" then body = joined(body) end
  return { status = tonumber(status), head = head, body = body, json = function()
    return json.decode(body)
  end }
end

--- The text of a request. Its connection ends after the answer.
function M.text(method, path, body, headers)
  local lines = { ("%s %s HTTP/1.1"):format(method, path), "Connection: close" }
  for name, value in pairs(headers or {}) do lines[#lines + 1] = name .. ": " .. value end
  if not (headers or {}).Host then lines[#lines + 1] = "Host: localhost" end
  if body then lines[#lines + 1] = "Content-Length: " .. #body end
  return table.concat(lines, "\r\n") .. "\r\n\r\n" .. (body or "")
end

--- Sends a request. A table is sent as JSON.
function M.start(server, method, path, body, headers)
  if type(body) == "table" then body = json.encode(body) end
  local client = M.connect(server.port)
  client:post(M.text(method, path, body, headers))
  return client
end

--- Runs the server, which waits for requests only where it has nothing to do, until
-- test() gives something true, and returns that.
function M.run_until(server, test, what)
  return processes.wait_until(function()
    server:turn(1000)
    return test()
  end, what, 0)
end

--- Runs the server until the connections of these clients have ended.
function M.finish(server, clients)
  for _, client in ipairs(clients) do
    M.run_until(server, function()
      for _, other in ipairs(clients) do other:read() end
      return client.is_over
    end, "an answer")
    client:close()
  end
end

--- Sends a request and returns its answer.
function M.ask(server, method, path, body, headers)
  local client = M.start(server, method, path, body, headers)
  M.finish(server, { client })
  return client:answer()
end

--- The objects of a stream, and whether it came to its end.
function M.events(body)
  local list, is_done = {}, false
  for data in body:gmatch "data: ([^\n]*)\n\n" do
    if data == "[DONE]" then is_done = true else list[#list + 1] = json.decode(data) end
  end
  return list, is_done
end

return M
