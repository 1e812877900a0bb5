--- Connections of HTTP: what an exchange may do and when, and what is left when a client
-- or the server goes first.
local C = require("kvlab.library").C
local client = require "spec.http_client"
local connections = require "kvlab.http.connections"
local ffi = require "ffi"
local processes = require "spec.processes"
local support = require "spec.support"

local options = client.options

--- A server, a client that sent a request, and its exchange.
local function exchange(text)
  local http = connections.open(options())
  local one = client.connect(http.port)
  one:send(text or client.text("POST", "/path%20a?query", "body", { Origin = "o" }))
  local function arrived() return http:next(1e5) end
  return http, one, processes.wait_until(arrived, "a request")
end

local function read_to_end(one)
  processes.wait_until(function()
    one:read()
    return one.is_over
  end, "the end")
  local answer = one:answer()
  one:close()
  return answer
end

describe("a server of HTTP", function()
  it("gives whole requests, and their answers to the clients", function()
    local http, one, x = exchange()
    assert.equal("POST", x.method)
    assert.equal("/path%20a", x.path)
    assert.equal("localhost", x.host)
    assert.equal("o", x.origin)
    assert.equal("", x.authorization)
    assert.equal("body", x.body)
    x:answer(201, "text/plain", "a\0b", "X-One: two words")
    local answer = read_to_end(one)
    assert.equal(201, answer.status)
    assert.equal("a\0b", answer.body)
    assert.truthy(answer.head:find "X%-One: two words")
    http:close()
  end)

  it("sends an answer in parts as they come", function()
    local http, one, x = exchange()
    x:begin "text/plain"
    local long = ("0123456789"):rep(20000)
    for _, part in ipairs { "first ", long, " last" } do
      x:send(part)
      processes.wait_until(function()
        one:read()
        return one.got:find(part:sub(-6), 1, true)
      end, part:sub(1, 6))
    end
    x:close()
    assert.equal("first " .. long .. " last", read_to_end(one).body)
    http:close()
  end)

  it("takes one answer of an exchange, and parts of one that was begun", function()
    local http, one, x = exchange()
    support.fails(C.kvl_http_exchange_send(x.handle, "a", 1), "no answer in parts")
    support.fails(C.kvl_http_exchange_answer(x.handle, 99, "text/plain", nil, "", 0),
      "status is 99")
    support.fails(C.kvl_http_exchange_answer(x.handle, 200, "text/plain", "none", "", 0),
      'header "none" is none')
    x:begin "text/plain"
    support.fails(C.kvl_http_exchange_begin(x.handle, "text/plain"), "has an answer")
    x:close()
    assert.equal(200, read_to_end(one).status)
    http:close()
  end)

  it("notices a client that leaves, and what it is sent then is dropped", function()
    local http, one, x = exchange()
    assert.is_false(x:is_gone())
    one:close()
    processes.wait_until(function() return x:is_gone() end, "its leaving")
    x:begin "text/plain"
    for _ = 1, 10 do x:send(("a"):rep(1000)) end
    x:close()
    processes.wait_until(function()
      http:next(0)
      return http:stats().connections == 0
    end, "no connections")
    http:close()
  end)

  it("ends the connection of an exchange that is closed without an answer", function()
    local http, one, x = exchange()
    x:close()
    assert.is_nil(read_to_end(one))
    http:close()
  end)

  it("may be closed before its exchanges, which then are over", function()
    for _, begins in ipairs { false, true } do
      local http, one, x = exchange()
      local waiting = client.connect(http.port) -- a request that nobody takes
      waiting:send(client.text("GET", "/"))
      processes.wait_until(function() return http:stats().requests == 2 end, "the second")
      if begins then x:begin "text/plain" end
      http:close()
      assert.is_true(x:is_gone())
      if begins then assert.equal(0, x:send "more")
      else x:answer(200, "text/plain", "late") end
      x:close()
      for _, left in ipairs { one, waiting } do read_to_end(left) end
    end
  end)

  it("sends what was answered before it closes, to clients that take it", function()
    local text = ("0123456789"):rep(1000)
    for i = 1, 40 do
      local http, one, x = exchange()
      if i % 2 == 0 then
        x:begin "text/plain"
        x:send(text)
        x:close()
      else
        x:answer(200, "text/plain", text)
      end
      http:close()
      local answer = read_to_end(one)
      assert.is_true(answer ~= nil and answer.body == text, "time " .. i)
    end
    local http, one, x = exchange()
    x:begin "text/plain"
    x:send(("a"):rep(2 ^ 24))
    x:close()
    local begin = C.kvl_clock_ns()
    http:close() -- though this client takes nothing
    assert.is_true(C.kvl_clock_ns() - begin < 10e9)
    one:close()
  end)

  it("answers several requests of a connection", function()
    local http = connections.open(options())
    local one = client.connect(http.port)
    local text = "GET /%d HTTP/1.1\r\nHost: a\r\n\r\n"
    one:send(text:format(1) .. text:format(2)) -- the second comes before the answer
    for i = 1, 3 do
      if i == 3 then one:send(text:format(3)) end
      local x = processes.wait_until(function() return http:next(1e5) end, "a request")
      assert.equal("/" .. i, x.path)
      assert.is_false(x:is_gone())
      x:answer(200, "text/plain", "answer " .. i .. ".")
      processes.wait_until(function()
        one:read()
        return one.got:find("answer " .. i .. ".", 1, true)
      end, "the answer")
    end
    one:close()
    http:close()
  end)

  it("refuses wrong options, and a port that is taken", function()
    local out = ffi.new "kvl_http *[1]"
    for words, o in pairs { ["port is 70000"] = { port = 70000 },
                            ["connections 0"] = { connections = 0 },
                            ['address is "localhost"'] = { address = "localhost" } } do
      local all = options(o)
      support.fails(C.kvl_http_open(ffi.new("kvl_http_options", {
        address = all.address, port = all.port, connections = all.connections,
        bytes_body = 1, us_arrival = 1, us_taking = 1,
        early = { "", "", "", "", "", "", "", "" } }), out), words)
    end
    local http = connections.open(options())
    support.raises("http: cannot listen on 127.0.0.1, port " .. http.port
      .. ": Address already in use", connections.open, options { port = http.port })
    http:close()
  end)

  it("is opened again after any of its allocations failed", function()
    if C.kvl_fail_allocation(0) < 0 then return pending "not a hostile build" end
    local failed = 0
    repeat
      C.kvl_fail_allocation(failed + 1)
      local ok, http = pcall(connections.open, options())
      C.kvl_fail_allocation(0)
      if ok then http:close() else failed = failed + 1 end
    until ok
    assert.is_true(failed > 8) -- of which eight are answers that are ready
  end)
end)
