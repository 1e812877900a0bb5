--- Connections of HTTP, over kvl_http (runtime/kvlab.h): whole requests come out, answers
-- go in, and nothing waits for a client.
--
--   local http = connections.open { port = 8000 }
--   local exchange = http:next(1e6)
--   exchange:answer(200, "text/plain", "hello")
--   exchange:close()
local ffi = require "ffi"
local library = require "kvlab.library"
local options = require "kvlab.options"
local protected = require "kvlab.protected"

local C, check = library.C, library.check
local M = {}

---@class kvlab.http.Connections
---@field port integer
local Connections = {}
Connections.__index = Connections

---@class kvlab.http.Exchange  a request, and its answer
---@field method string
---@field path string           as it was sent, without what follows a "?"
---@field authorization string  "" where there is none, and so on
---@field host string
---@field origin string
---@field body string
---@field is_open boolean       it was not closed yet
local Exchange = {}
Exchange.__index = Exchange

local KNOWN = {
  address = options.required(options.string),
  port = options.required(options.within(0, 65535)),
  connections = options.required(options.within(1, 2 ^ 20)),
  bytes_body = options.required(options.any_whole),
  arrival_s = options.required(options.positive),
  taking_s = options.required(options.positive),
}

--- Why a request is refused before Lua sees it. ORDER kvl_http_early
local EARLY = { "too_many", "too_large", "too_slow", "malformed", "header_twice",
                "length_unclear", "no_host", "wrong_expectation" }
for _, name in ipairs(EARLY) do KNOWN[name] = options.required(options.string) end
M.EARLY = EARLY

--- Listens.
---@param o table  address, port (0: any that is free), connections at once, bytes_body:
--                 of a request; arrival_s: in which a request has to arrive; taking_s:
--                 how long a client may read nothing of its answer; too_many (503),
--                 too_large (413), too_slow (408), malformed, header_twice,
--                 length_unclear, no_host (400) and wrong_expectation (417): the JSON of
--                 the answers that are given before a request is there
---@return kvlab.http.Connections
function M.open(o)
  options.check("http", o, KNOWN)
  local out = ffi.new "kvl_http *[1]"
  local given = ffi.new("kvl_http_options", {
    address = o.address, port = o.port, connections = o.connections,
    bytes_body = o.bytes_body, us_arrival = o.arrival_s * 1e6,
    us_taking = o.taking_s * 1e6,
  })
  for i, name in ipairs(EARLY) do given.early[i - 1] = o[name] end
  local handle = protected.open(C.kvl_http_close, out, C.kvl_http_open, given, out)
  return setmetatable({ handle = handle, port = C.kvl_http_port(handle),
    exchange = ffi.new "kvl_http_exchange *[1]", request = ffi.new "kvl_http_request" },
    Connections)
end

--- The next request; nil if none arrives in time.
---@param us number
---@return kvlab.http.Exchange|nil
function Connections:next(us)
  if check(C.kvl_http_next(self.handle, us, self.exchange)) == 0 then return nil end
  local handle, q = ffi.gc(self.exchange[0], C.kvl_http_exchange_close), self.request
  check(C.kvl_http_exchange_request(handle, q))
  return setmetatable({
    handle = handle, is_open = true, method = ffi.string(q.method),
    path = ffi.string(q.path), authorization = ffi.string(q.authorization),
    host = ffi.string(q.host), origin = ffi.string(q.origin),
    body = ffi.string(q.body, tonumber(q.bytes_body)),
  }, Exchange)
end

--- Counters: connections (now), accepted, requests, refused, too_large, too_slow,
-- malformed.
---@return table<string, integer>
function Connections:stats()
  local s = ffi.new "kvl_http_stats"
  check(C.kvl_http_stats_get(self.handle, s))
  local out = {}
  for _, name in ipairs { "connections", "accepted", "requests", "refused", "too_large",
                          "too_slow", "malformed" } do
    out[name] = tonumber(s[name])
  end
  return out
end

--- Ends all connections.
function Connections:close()
  protected.close(self, "handle", C.kvl_http_close)
end

--- Answers, and closes the exchange.
---@param status integer
---@param type string   of the body
---@param body string
---@param header? string  one more, "Name: value"
function Exchange:answer(status, type, body, header)
  check(C.kvl_http_exchange_answer(self.handle, status, type, header, body, #body))
  self:close()
end

--- Begins an answer that comes in parts.
---@param type string
function Exchange:begin(type)
  check(C.kvl_http_exchange_begin(self.handle, type))
  self.is_begun = true
end

--- Adds a part. Returns how many bytes wait for the client.
---@param text string
---@return integer
function Exchange:send(text)
  return check(C.kvl_http_exchange_send(self.handle, text, #text))
end

--- Whether the client has left.
function Exchange:is_gone() return C.kvl_http_exchange_is_gone(self.handle) == 1 end

--- Ends the answer. Without one, the connection is closed.
function Exchange:close()
  if not self.is_open then return end
  self.is_open = false
  protected.close(self, "handle", C.kvl_http_exchange_close)
end

return M
