--- What a server answers to those who mean it badly, or write to it by hand: each case
-- has its status and its code, and a plain request after it is answered as before.
local client = require "spec.http_client"
local json = require "kvlab.json"
local kv = require "kvlab"
local named = require "kvlab.named"
local problem = require "kvlab.http.problem"
local processes = require "spec.processes"
local servers = require "spec.http_servers"
local tried = require "spec.tried_policies"
local unicode = require "kvlab.text.unicode"

after_each(servers.close_all)

local BODY = '{"prompt": "a", "max_tokens": 1}'
local LENGTH = "Content-Length: " .. #BODY .. "\r\n"

--- Sends bytes; what comes back until the server ends the connection.
local function raw(server, bytes)
  local one = client.connect(server.port)
  one:send(bytes)
  client.finish(server, { one })
  return one
end

--- A request as a client would send it, with these headers.
local function get(headers, path, method, version)
  return ("%s %s HTTP/%s\r\nConnection: close\r\n%s\r\n"):format(method or "GET",
    path or "/health", version or "1.1", headers or "Host: localhost\r\n")
end

local function post(headers, body)
  return get("Host: localhost\r\n" .. headers, "/v1/completions", "POST")
    .. (body or BODY)
end

local function chunked(body) return ("%x\r\n%s\r\n0\r\n\r\n"):format(#body, body) end

local CHUNKED = "Transfer-Encoding: chunked\r\n"

local function is_well(server)
  local answer = client.ask(server, "GET", "/health")
  assert.equal(200, answer.status)
  assert.same({ status = "ok", running = 0, waiting = 0 }, answer:json())
end

--- Sends each case { bytes, status, code or false for an answer of libmicrohttpd's own }.
local function try(server, cases)
  for name, case in pairs(cases) do
    local answer = raw(server, case[1]):answer()
    assert.truthy(answer, name)
    assert.equal(case[2], answer.status, name)
    assert.equal(nil, unicode.repaired(answer.body) ~= answer.body or nil, name)
    if case[3] then
      assert.truthy(answer.head:find "application/json", name)
      assert.equal(case[3], answer:json().error.code, name)
    end
    is_well(server)
  end
end

describe("headers", function()
  it("that leave open where a body ends are refused", function()
    local server = servers.open()
    try(server, {
      ["a length twice"] = { post(LENGTH .. LENGTH), 400, "header_twice" },
      ["two lengths"] = { post(LENGTH .. "Content-Length: 3\r\n"), 400, "header_twice" },
      ["a length beside chunks"] = { post(LENGTH .. CHUNKED, chunked(BODY)), 400,
        "length_unclear" },
      ["chunks twice"] = { post(CHUNKED .. CHUNKED, chunked(BODY)), 400, "header_twice" },
      ["another encoding"] = { post("Transfer-Encoding: gzip, chunked\r\n",
        chunked(BODY)), 400, "length_unclear" },
      ["an unknown encoding"] = { post "Transfer-Encoding: xchunked\r\n", 400,
        "length_unclear" },
      ["chunks in HTTP 1.0"] = { get(CHUNKED, "/v1/completions", "POST", "1.0")
        .. chunked(BODY), 400, "length_unclear" },
      ["a space in front of a colon"] = { post("Content-Length : 3\r\n" .. LENGTH), 400,
        "malformed_request" },
      ["a list of lengths"] = { post "Content-Length: 3, 3\r\n", 400 },
      ["a negative length"] = { post "Content-Length: -1\r\n", 400 },
      ["a length with a sign"] = { post "Content-Length: +3\r\n", 400 },
      ["a length that is no number"] = { post "Content-Length: x\r\n", 400 },
      ["a length of 23 digits"] = { post("Content-Length: " .. ("9"):rep(23) .. "\r\n"),
        413 },
      ["a chunk of no length"] = { post(CHUNKED, "zz\r\n"), 400 },
      ["a chunk of a negative length"] = { post(CHUNKED, "-1\r\n"), 400 },
      ["a chunk of 20 digits"] = { post(CHUNKED, ("f"):rep(20) .. "\r\n"), 413 },
    })
    assert.equal(8, server.http:stats().malformed)
    local text = client.ask(server, "GET", "/metrics").body
    assert.truthy(text:find("kvlab_requests_malformed_total 8\n", 1, true))
    for _, good in ipairs { post(LENGTH), post(CHUNKED, chunked(BODY)),
      post("transfer-encoding: Chunked\r\n", chunked(BODY)),
      post(LENGTH .. "Expect: 100-continue\r\n") } do
      assert.truthy(raw(server, good).got:find("HTTP/1.1 200", 1, true), good)
    end
  end)

  it("that name two hosts, none, or two keys are refused", function()
    local server = servers.open()
    local host = "Host: localhost\r\n"
    try(server, {
      ["no host"] = { get "", 400, "no_host" },
      ["a host twice"] = { get(host .. host), 400, "header_twice" },
      ["two hosts"] = { get(host .. "host: evil.example\r\n"), 400, "header_twice" },
      ["a host that is none"] = { get "Host: a b@c\r\n", 403, "wrong_host" },
      ["a host of another site"] = { get("Host: " .. ("\195\169"):rep(100) .. "\r\n"),
        403, "wrong_host" },
      ["two keys"] = { get(host .. ("Authorization: Bearer a\r\n"):rep(2)), 400,
        "header_twice" },
      ["two origins"] = { get(host .. ("Origin: http://localhost\r\n"):rep(2)), 400,
        "header_twice" },
      ["an unknown expectation"] = { post(LENGTH .. "Expect: 200-ok\r\n"), 417,
        "wrong_expectation" },
      ["controls in a value"] = { get(host .. "X: a\27b\r\n"), 400, "malformed_request" },
      ["controls in a name"] = { get(host .. "X\1: a\r\n"), 400, "malformed_request" },
      ["a name that is none"] = { get(host .. "X(): a\r\n"), 400, "malformed_request" },
      ["no colon"] = { get(host .. "rubbish\r\n"), 400 },
      ["60 000 bytes"] = { get(host .. "X: " .. ("a"):rep(60000) .. "\r\n"), 431 },
      ["5 000 of them"] = { get(host .. ("X: 1\r\n"):rep(5000)), 431 },
    })
    assert.equal(200, raw(server, get("", nil, nil, "1.0")):answer().status)
  end)
end)

describe("a path or method", function()
  it("that is not here, or is none, is refused in UTF-8", function()
    local logged = {}
    local server = servers.open { log = function(line) logged[#logged + 1] = line end }
    try(server, {
      ["escapes that are not UTF-8"] = { get(nil, "/%FF%FE"), 400, "invalid_path" },
      ["bytes that are not UTF-8"] = { get(nil, "/\255\254"), 400, "invalid_path" },
      ["a NUL"] = { get(nil, "/health%00x"), 400, "invalid_path" },
      ["a new line"] = { get(nil, "/a%0d%0aHTTP/1.1"), 400, "invalid_path" },
      ["a half escape"] = { get(nil, "/a%4"), 400, "invalid_path" },
      ["an escape that is none"] = { get(nil, "/%zz"), 400, "invalid_path" },
      ["a model that is not UTF-8"] = { get(nil, "/v1/models/%FF"), 400, "invalid_path" },
      ["a character cut at 200 bytes"] = { get(nil, "/" .. ("a"):rep(198) .. "é/b"), 404,
        "unknown_url" },
      ["8 000 bytes"] = { get(nil, "/" .. ("é"):rep(4000)), 404, "unknown_url" },
      ["60 000 bytes"] = { get(nil, "/" .. ("a"):rep(60000)), 414 },
      ["a star"] = { get(nil, "*", "OPTIONS"), 404, "unknown_url" },
      ["another protocol"] = { "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505 },
      ["controls in a method"] = { get(nil, "/health", "G\1T"), 400,
        "malformed_request" },
    })
    for _, line in ipairs(logged) do
      assert.is_nil(line:find "%c", line)
      assert.equal(line, unicode.repaired(line))
    end
    local words = raw(server, get(nil, "/" .. ("é"):rep(4000))):answer():json().error
    assert.equal('there is no "/' .. ("é"):rep(79) .. '…" here', words.message)
    assert.equal(200, raw(server, get(nil, "/v1/models/t%69ny")):answer().status)
  end)

  it("of another kind is refused with what is allowed", function()
    local server = servers.open()
    for _, case in ipairs { { "OPTIONS", "/v1/completions", "POST" },
      { "GET", "/tokenize", "POST" }, { "DELETE", "/v1/models/tiny", "GET, HEAD" },
      { "FOO", "/health", "GET, HEAD" }, { "POST", "/v1/models", "GET, HEAD" } } do
      local answer = raw(server, get(nil, case[2], case[1])):answer()
      assert.equal(405, answer.status)
      assert.truthy(answer.head:find("Allow: " .. case[3] .. "\r\n", 1, true),
        answer.head)
      assert.equal("method_not_allowed", answer:json().error.code)
    end
    local answer = raw(server, get(nil, "/health", "HEAD")):answer()
    assert.equal(200, answer.status)
    assert.equal("", answer.body)
    is_well(server)
  end)

  it("may come several at once on one connection", function()
    local server = servers.open()
    local all = ("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"):rep(3)
      .. get(nil, "/nothing")
    local _, count = raw(server, all).got:gsub("HTTP/1.1 200", "")
    assert.equal(3, count)
  end)
end)

describe("a body", function()
  it("that goes on for ever is cut off soon after its limit", function()
    local server = servers.open { limits = { bytes_body = 1000 } }
    local one = client.connect(server.port)
    local part = "8000\r\n" .. ("a"):rep(32768) .. "\r\n"
    one:send(post(CHUNKED, ""))
    local sent, rest = 0, ""
    processes.wait_until(function()
      server:turn(0)
      if rest == "" then rest = part end
      local n = one:send(rest)
      if n > 0 then sent, rest = sent + n, rest:sub(n + 1) end
      one:read()
      return one.is_over and n < 0 or sent > 2 ^ 26
    end, "the end")
    one:close()
    assert.equal(413, one:answer().status)
    assert.equal("body_too_large", one:answer():json().error.code)
    assert.is_true(sent < 2 ^ 24, sent) -- 1 MiB, and what the sockets hold
    assert.equal(1, server.http:stats().too_large)
    is_well(server)
  end)

  it("that is a little too long in chunks gets its answer", function()
    local server = servers.open { limits = { bytes_body = 1000 } }
    for _, tail in ipairs { "0\r\n\r\n", "" } do
      local answer = raw(server, post(CHUNKED, ("200\r\n" .. ("a"):rep(512)
        .. "\r\n"):rep(4) .. tail)):answer()
      assert.equal(413, answer.status)
      assert.equal("body_too_large", answer:json().error.code)
    end
    assert.equal(413, raw(server, post "Content-Length: 1001\r\nExpect: 100-continue\r\n")
      :answer().status)
    is_well(server)
  end)
end)

describe("words of a client", function()
  it("are cut where an answer shows them", function()
    local server, long = servers.open(), ("x"):rep(60000)
    local function message(path, body)
      local answer = client.ask(server, "POST", path, body)
      assert.is_true(#answer.body < 2500, #answer.body)
      return answer:json().error.message
    end
    local shown = '"' .. ("x"):rep(80) .. '…"'
    for _, body in ipairs { { model = long }, { [long] = 1 }, { temperature = long },
      { prompt = "a", policy = long } } do
      assert.truthy(message("/v1/completions", body):find(shown, 1, true))
    end
    assert.truthy(message("/v1/completions", { prompt = "a", policy = "quest",
      policy_options = { [long] = 1 } }):find(("x"):rep(80), 1, true))
    assert.truthy(message("/v1/chat/completions", { messages = json.array {
      { role = "user", content = "a", [long] = 1 } } }):find(shown, 1, true))
  end)
end)

describe("options of policies", function()
  local function is_amount(policy, option)
    option = policy.aliases[option] or option
    return option == "ratio" or option == "blocks" or option == "tokens"
  end

  --- Takes a policy with options: nil, or the error's status, code and field.
  local function refused(server, name, options)
    local ok, found = pcall(server.policies.take, server.policies, name, options)
    if ok then return server.policies:give(found) end
    assert.is_true(problem.is(found), tostring(found))
    return { found.status, found.code, found.param }
  end

  it("take from requests what JSON can say, of every policy #policy", function()
    local server = servers.open { limits = { policies = 1000 } }
    for _, name in ipairs(tried.names "decode") do
      local own = kv.policy(name)
      local defaults = { min_blocks = 0, sink = 0, recent = 0, split = "pyramid" }
      for option, value in pairs(own.defaults) do defaults[option] = value end
      for alias, option in pairs(own.aliases) do defaults[alias] = defaults[option] end
      assert.is_nil(refused(server, name, {}))
      for option, default in pairs(defaults) do
        local field = "policy_options." .. option
        local is_set_by_scripts = type(default) == "table" or type(default) == "function"
        for _, value in ipairs { true, "a/path", {}, { 1 }, { a = 1 }, 1e300 } do
          local expected = { 400, "invalid_policy", "policy_options" }
          if is_set_by_scripts then expected = { 400, "unsupported_value", field }
          elseif type(value) == "table" and not (is_amount(own, option) and value[1]) then
            expected = { 400, nil, field } -- a list of 1 has too few layers
          end
          local got = refused(server, name, { [option] = value })
          if type(value) ~= type(default) or got then
            assert.same(expected, got, ("%s.%s = %s"):format(name, option,
              tostring(value)))
          end
        end
        if not is_set_by_scripts then
          assert.is_nil(refused(server, name, { [option] = json.null }))
        end
      end
    end
  end)

  it("may be lists of budgets by layer, and names of splits", function()
    local server = servers.open {}
    local layers = server.engine.model.config.layers
    local function list(n, x)
      local numbers = {}
      for i = 1, n do numbers[i] = x end
      return json.array(numbers)
    end
    assert.is_nil(refused(server, "quest", { ratio = list(layers, 0.5) }))
    assert.is_nil(refused(server, "quest", { blocks = list(layers, 6),
                                             split = "adaptive" }))
    assert.is_nil(refused(server, "quest", { split = "pyramid" }))
    for _, wrong in ipairs { { ratio = list(layers, 2) }, { ratio = list(layers, true) },
        { ratio = list(layers, {}) }, { ratio = list(layers + 1, 0.5) },
        { blocks = list(layers, 1) }, { blocks = list(layers, 6.5) },
        { split = "../splits/pyramid" }, { split = "quest" }, { split = 3 },
        { ratio = list(layers, 0.5), split = "pyramid" } } do
      assert.same({ 400, "invalid_policy", "policy_options" },
        refused(server, "quest", wrong), json.encode(wrong))
    end
  end)

  it("that only a script can set are refused by their names", function()
    named.give("policies", "reads", "spec", kv.policy.define { name = "reads",
      decode = true, defaults = { file = "weights", fn = function() end, ratio = 0.5 },
      score = function(_, ctx) return ctx:new_scores():fill_(0) end })
    local server = servers.open { policy = "nsa_branches",
      policy_options = { gate_weights = { kv.randn(kv.device "cpu", "f32",
        { 3, 32 }) } } }
    for _, case in ipairs { { "reads", "file", "/etc/passwd" }, { "reads", "fn", 1 },
      { "nsa", "index_weights", json.array { 1 } },
      { "nsa_branches", "gate_weights", json.array { 1 } },
      { nil, "compression", json.array { 1 } } } do
      local answer = client.ask(server, "POST", "/v1/completions", { prompt = "a",
        policy = case[1], policy_options = { [case[2]] = case[3] } })
      assert.equal(400, answer.status, answer.body)
      local error = answer:json().error
      assert.equal("policy_options." .. case[2], error.param)
      assert.equal("unsupported_value", error.code)
      is_well(server)
    end
    -- The server's own policy keeps what its script gave it.
    assert.is_nil(refused(server, nil, { window = 8 }))
    assert.is_nil(refused(server, "layers", { base = "quest" }))
    assert.same({ 400, "invalid_policy", "policy_options" },
      refused(server, "layers", { base = "../quest" }))
  end)
end)

describe("fields", function()
  it("of any JSON are taken or refused by their names", function()
    local server = servers.open()
    local FIELDS = { "model", "prompt", "max_tokens", "temperature", "top_p", "top_k",
      "min_p", "repetition_penalty", "seed", "n", "stop", "stop_token_ids", "ignore_eos",
      "stream", "stream_options", "policy", "policy_options", "watch_blocks", "echo",
      "logprobs", "suffix", "best_of", "user" }
    local VALUES = { "null", "true", '""', '"x"', "-1", "0", "1.5", "2147483648",
      "9007199254740993", "1e300", "-1e-300", "[]", "[1]", '["x", null]', "{}",
      '{"a": [1]}' }
    local clients, count = {}, 0
    for _, field in ipairs(FIELDS) do
      for _, value in ipairs(VALUES) do
        local body = field == "prompt" and ("{%q: %s, \"max_tokens\": 1}")
          or field == "max_tokens" and '{"prompt": "a", %q: %s}'
          or '{"prompt": "a", "max_tokens": 1, %q: %s}'
        clients[#clients + 1] = client.start(server, "POST", "/v1/completions",
          body:format(field, value))
        if #clients == 40 or field == "user" then
          client.finish(server, clients)
          for _, one in ipairs(clients) do
            local answer = one:answer()
            count = count + 1
            if answer.status ~= 200 then
              assert.equal(answer.status == 404 and 404 or 400, answer.status,
                answer.body)
              assert.truthy(answer:json().error.param, answer.body)
            end
          end
          clients = {}
        end
      end
    end
    assert.equal(#FIELDS * #VALUES, count)
    is_well(server)
  end)
end)
