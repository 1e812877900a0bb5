--- A server that clients of OpenAI's API can use: `./kvlab serve MODEL`. docs/server.md
-- says which parts of the API it supports.
--
--   local server = kv.http_server { model = kv.model "smollm2" }
--   server:run()                 until Ctrl-C; or server:turn(us), again and again
--
-- libmicrohttpd talks to the clients, on a thread of its own (connections.lua). This file
-- takes the requests that have arrived, between two steps of the model (calls.lua).
local C = require("kvlab.library").C
local answers = require "kvlab.http.answers"
local arguments = require "kvlab.arguments"
local asked = require "kvlab.http.asked"
local calls = require "kvlab.http.calls"
local closed = require "kvlab.closed"
local connections = require "kvlab.http.connections"
local draft = require "kvlab.serve.draft"
local fields = require "kvlab.http.fields"
local files = require "kvlab.files"
local generate = require "kvlab.serve.generate"
local json = require "kvlab.json"
local open_policy = require "kvlab.policy.policy"
local metrics = require "kvlab.http.metrics"
local options = require "kvlab.options"
local path_of = require "kvlab.http.path"
local policies = require "kvlab.http.policies"
local problem = require "kvlab.http.problem"
local tasks = require "kvlab.http.tasks"

local M = {}

local PAGE = debug.getinfo(1, "S").source:gsub("^@(.*)server%.lua$", "%1page.html")

--- Limits, and their defaults.
M.LIMITS = {
  queue = 256,             -- answers that wait; one more gets status 429
  connections = 1024,      -- at once
  bytes_body = 4 * 2 ^ 20, -- of a request
  n = 16,                  -- answers of one prompt
  logprobs = 20,           -- of the likeliest tokens
  stops = 16,              -- stop strings
  messages = 1024,         -- of a chat
  completion_tokens = 16,  -- of an answer, if no max_tokens says so; OpenAI's default
  chat_tokens = 1024,      -- the same for chats, or what there is room for
  request_s = 600,         -- in which an answer has to be complete
  arrival_s = 30,          -- in which a request has to arrive
  taking_s = 60,           -- how long a client may read nothing of its answer
  unsent = 4 * 2 ^ 20,     -- bytes of an answer that may wait for a client
  policies = 8,            -- of requests, that are kept at once
}

local LIMITS = {}
for name in pairs(M.LIMITS) do
  LIMITS[name] = name:find "_s$" and options.positive
    or name:find "^bytes" and options.any_count or options.count
end
LIMITS.connections = options.within(1, 2 ^ 20)
LIMITS.logprobs = options.within(1, 1000)

local KNOWN = {
  model = options.required(options.like("a model of kv.model", "engine_for",
    "tokenizer")),
  name = options.string, address = options.string, port = options.within(0, 65535),
  key = { "a key of one character or more", function(x)
    return type(x) == "string" and x ~= ""
  end },
  policy = options.string, policy_options = options.table, draft = draft.KIND,
  limits = options.nested(LIMITS), log = options.callable,
}

---@class kvlab.http.Server
---@field port integer
---@field url string
local HttpServer = {}
HttpServer.__index = HttpServer

local function limits_of(given)
  local all = {}
  for name, value in pairs(M.LIMITS) do all[name] = value end
  for name, value in pairs(given or {}) do all[name] = value end
  return all
end

--- Answers for cases in which there is no request yet: the texts, by their names in
-- connections.
local function early(limits)
  local function text(status, code, words, ...)
    return problem.encode(problem.new(status, words:format(...), { code = code }))
  end
  return {
    too_many = text(503, "too_many_connections",
      "there are %d connections, which is as many as this server has; try again later",
      limits.connections),
    too_large = text(413, "body_too_large",
      "the body of the request is longer than %d bytes", limits.bytes_body),
    too_slow = text(408, "request_timeout", "the request did not arrive within %g s",
      limits.arrival_s),
    malformed = text(400, "malformed_request",
      "the method or a header has characters that HTTP does not allow"),
    header_twice = text(400, "header_twice", "one of the headers Host, Content-Length, "
      .. "Transfer-Encoding, Content-Type, Authorization, Origin and Expect is given "
      .. "twice, expected once"),
    length_unclear = text(400, "length_unclear", "the header Transfer-Encoding is not "
      .. "chunked, or stands beside Content-Length or in HTTP 1.0"),
    no_host = text(400, "no_host", "the header Host is missing, which HTTP 1.1 needs"),
    wrong_expectation = text(417, "wrong_expectation",
      "the header Expect is not 100-continue"),
  }
end

--- Opens a server for clients of OpenAI's API, which listens from now on; see
-- docs/server.md.
---@param o table  model: of kv.model; name: what clients call it (its own); address
--                 (127.0.0.1), port (8000; 0: any that is free); key: what clients have
--                 to send (none); policy, policy_options: what decodes requests that
--                 name no policy (the engine's); draft: what makes the drafts of requests
--                 that name none, as for kv.generate (none); limits: a table of limits,
--                 as docs/server.md lists them; log(line): gets a line for each answer
---@return kvlab.http.Server
function M.http_server(o)
  options.check("http_server", o, KNOWN)
  local model, limits = o.model, limits_of(o.limits)
  local engine = model:engine_for(o.policy and open_policy(o.policy, o.policy_options))
  local self = setmetatable({
    model = model, engine = engine, tokenizer = model.tokenizer, limits = limits,
    name = o.name or model.name:gsub("/+$", ""):match "[^/]*$", key = o.key, log = o.log,
    metrics = metrics.new(), vocab = engine.model.config.vocab, started = os.time(),
    page = files.read(PAGE),
  }, HttpServer)
  self.policies = policies.new(engine, o.policy, o.policy_options, limits.policies)
  local evictor = self.policies.own.attention.evictor
  if o.draft and evictor then
    options.fail(("http_server: draft is a table, expected none, as policy %s evicts "
      .. "tokens"):format(evictor.policy.name))
  end
  self.asked, self.tasks = asked.new(self), tasks.new(limits.request_s)
  self.calls = calls.new {
    engine = self.engine, tokenizer = self.tokenizer, policies = self.policies,
    metrics = self.metrics, tasks = self.tasks, name = self.name, limits = limits,
    draft = o.draft, finished = function(call, status, generated)
      self:note(call.exchange, status, #call.jobs > 0 and generated)
    end,
  }
  local address = o.address or "127.0.0.1"
  local of_connections = early(limits)
  for _, name in ipairs { "connections", "bytes_body", "arrival_s", "taking_s" } do
    of_connections[name] = limits[name]
  end
  of_connections.address, of_connections.port = address, o.port or 8000
  self.http = connections.open(of_connections)
  self.port = self.http.port
  self.is_local = address:find "^127%." ~= nil or address == "::1"
  local host = address:find ":" and "[" .. address .. "]" or address
  self.url = ("http://%s:%d"):format(host, self.port)
  return self
end

-- ---- answers --------------------------------------------------------------------------

local KNOWN_PATHS = {}

-- Counts an answer, and logs it.
function HttpServer:note(exchange, status, generated)
  local path = KNOWN_PATHS[exchange.path] and exchange.path or "other"
  self.metrics:answered(path, status)
  if not self.log then return end
  self.log(("%s %s %s %d%s"):format(os.date "%H:%M:%S", exchange.method,
    KNOWN_PATHS[exchange.path] and path or problem.quoted(exchange.path), status,
    generated and (" %d tokens"):format(generated) or ""))
end

local function reply(self, exchange, object)
  exchange:answer(200, "application/json", answers.encode(object))
  self:note(exchange, 200)
end

local function refuse(self, exchange, p)
  exchange:answer(p.status, "application/json", problem.encode(p), p.header)
  self:note(exchange, p.status)
end

-- ---- what there is --------------------------------------------------------------------

--- Most tokens of a prompt and its answer together, under the server's own policy.
local function context_of(self)
  return (generate.room(self.engine, 1, self.policies.own.attention))
end

local function model_object(self)
  return { id = self.name, object = "model", created = self.started, owned_by = "kvlab",
           max_model_len = context_of(self) }
end

local function resident_bytes()
  local text = files.read "/proc/self/statm"
  return text and tonumber(text:match "^%d+ (%d+)") * 4096 or 0 / 0
end

--- The numbers of drafts, by their place in the draft.
local function by_place(list)
  local out = {}
  for place, n in ipairs(list) do
    out[place] = { ('{place="%d"}'):format(place), n }
  end
  return out
end

local function gauges(self)
  local cache, http, prefix = self.engine.cache, self.http:stats(),
    self.calls.server.scheduler.prefix
  local drafts, memory = self.calls.server.drafts, cache:stats()
  return {
    { "kvlab_requests_running", "Answers that are being computed", #self.calls.running },
    { "kvlab_requests_waiting", "Answers that wait for room", #self.calls.queue },
    { "kvlab_requests_reading", "Requests that are being read", self.tasks.count },
    { "kvlab_cache_blocks", "Blocks of the KV cache", cache.blocks },
    { "kvlab_cache_blocks_free", "Blocks of the KV cache that nothing is in",
      cache:blocks_free() },
    { "kvlab_cache_blocks_available", "Blocks that are free or that no request uses",
      math.floor(prefix:available() * cache.blocks / cache.pages) },
    { "kvlab_cache_pages", "Pages of the KV cache: its blocks, or as many by table",
      cache.pages },
    { "kvlab_cache_pages_held", "Pages that something is in", memory.pages_held },
    { "kvlab_cache_pages_peak", "Most pages so far that something was in at once",
      memory.pages_peak },
    { "kvlab_cache_pages_evicted_total",
      "Pages that evictions gave back, less those that they took", memory.pages_evicted },
    { "kvlab_connections", "Connections now", http.connections },
    { "kvlab_connections_total", "Connections so far", http.accepted },
    { "kvlab_connections_refused_total", "Connections that were too many", http.refused },
    { "kvlab_requests_too_large_total", "Requests whose body was too long",
      http.too_large },
    { "kvlab_requests_too_slow_total", "Connections whose request did not arrive in time",
      http.too_slow },
    { "kvlab_requests_malformed_total",
      "Requests whose headers are not HTTP, or not clear", http.malformed },
    { "kvlab_resident_bytes", "Memory of the process", resident_bytes() },
    { "kvlab_drafted_tokens_total", "Tokens of drafts, by their place in the draft",
      by_place(drafts.proposed_at) },
    { "kvlab_accepted_tokens_total", "Tokens of drafts that were right, by their place",
      by_place(drafts.accepted_at) },
    { "kvlab_draft_seconds_total", "Time in which policies made drafts",
      drafts.draft_us * 1e-6 },
    { "kvlab_check_seconds_total", "Time of steps that verified drafts",
      drafts.check_us * 1e-6 },
    { "kvlab_choose_seconds_total", "Time in which such steps chose tokens",
      drafts.choose_us * 1e-6 },
  }
end

local routes = {}

routes["/"] = { GET = function(self, exchange)
  exchange:answer(200, "text/html; charset=utf-8", self.page,
    "Content-Security-Policy: default-src 'self' 'unsafe-inline'; frame-ancestors 'none'")
  self:note(exchange, 200)
end, is_public = true }

routes["/health"] = { GET = function(self, exchange)
  reply(self, exchange, { status = "ok", running = #self.calls.running,
                          waiting = #self.calls.queue })
end, is_public = true }

routes["/metrics"] = { GET = function(self, exchange)
  exchange:answer(200, "text/plain; version=0.0.4; charset=utf-8",
    self.metrics:text(gauges(self)))
  self:note(exchange, 200)
end }

routes["/v1/models"] = { GET = function(self, exchange)
  reply(self, exchange, { object = "list", data = { model_object(self) } })
end }

routes["/tokenize"] = { POST = function(self, exchange)
  local ids, wants_texts = self.asked.tokenize(fields.decode(exchange.body),
    exchange.body)
  local texts
  if wants_texts then
    texts = json.array {}
    for i, id in ipairs(ids) do texts[i] = self.tokenizer:token_of(id) end
  end
  reply(self, exchange, { tokens = json.array(ids), count = #ids, token_strs = texts,
                          max_model_len = context_of(self) })
end }

routes["/detokenize"] = { POST = function(self, exchange)
  local ids = self.asked.detokenize(fields.decode(exchange.body))
  reply(self, exchange, { prompt = self.tokenizer:decode(ids, { special = true }) })
end }

routes["/tokenizer_info"] = { GET = function(self, exchange)
  local t = self.tokenizer
  local function token(id) return id and t:token_of(id) or json.null end
  reply(self, exchange, { tokenizer_class = "kvlab", bos_token = token(t.bos),
    eos_token = token(t.eos), unk_token = token(t.unk), pad_token = token(t.pad),
    chat_template = t.template or json.null })
end }

routes["/v1/completions"] = { POST = function(self, exchange, arrived_s)
  self.calls:add(exchange, self.asked.completion(fields.decode(exchange.body)), arrived_s)
end }

routes["/v1/chat/completions"] = { POST = function(self, exchange, arrived_s)
  self.calls:add(exchange, self.asked.chat(fields.decode(exchange.body), exchange.body),
    arrived_s)
end }

for path in pairs(routes) do KNOWN_PATHS[path] = true end

-- ---- who may ask ----------------------------------------------------------------------

--- Compares two texts in constant time, so that the time does not show how many letters
-- are right.
local function is_same(a, b)
  local differ = #a == #b and 0 or 1
  for i = 1, #a do
    if a:byte(i) ~= b:byte((i - 1) % #b + 1) then differ = differ + 1 end
  end
  return differ == 0
end

local LOCAL_NAMES = { ["localhost"] = true, ["127.0.0.1"] = true, ["[::1]"] = true }

--- Raises unless the client may use this. Otherwise a page of another site, shown in a
-- browser on the same machine, could use the server: by its address, or by a host name of
-- that site that resolves to this machine.
local function check_client(self, exchange, route)
  local host = exchange.host:lower()
  local name = host:gsub(":%d+$", "")
  if self.is_local and host ~= "" and not LOCAL_NAMES[name]
    and not name:find "^127%.[%d.]+$" then
    error(problem.new(403, ("the host %s is not this machine; a server that others may "
      .. "use is started with --host"):format(problem.quoted(exchange.host)),
      { code = "wrong_host" }), 0)
  end
  if exchange.origin ~= "" and exchange.origin:lower() ~= "http://" .. host then
    error(problem.new(403, "pages of other sites may not use this server",
      { code = "wrong_origin" }), 0)
  end
  if not self.key or route and route.is_public then return end
  local key = exchange.authorization:match "^[Bb]earer +(.-) *$"
  if not key or not is_same(key, self.key) then
    error(problem.new(401, key and "the API key is wrong"
      or "the API key is missing: send "
      .. "it in the header Authorization, after the word Bearer",
      { code = "invalid_api_key", header = "WWW-Authenticate: Bearer" }), 0)
  end
end

--- The routes of one path; nil if nothing is there.
local function route_of(self, path)
  local id = path:match "^/v1/models/(.+)$"
  if not id then return routes[path] end
  if id ~= self.name then
    error(problem.new(404, ("the model %s does not exist; this server has %q"):format(
      problem.quoted(id), self.name), { param = "model", code = "model_not_found" }), 0)
  end
  return { GET = function(_, exchange) reply(self, exchange, model_object(self)) end }
end

local function dispatch(self, exchange, arrived_s)
  check_client(self, exchange, routes[exchange.path])
  local path = path_of(exchange.path)
  local route = route_of(self, path)
  if not route then
    error(problem.new(404, ("there is no %s here"):format(problem.quoted(path)),
      { code = "unknown_url" }), 0)
  end
  local method = exchange.method == "HEAD" and "GET" or exchange.method
  if not route[method] then
    local allowed = route.GET and "GET, HEAD" or "POST"
    error(problem.new(405, ("%s takes %s, not %s"):format(problem.quoted(path), allowed,
      problem.quoted(exchange.method)),
      { code = "method_not_allowed", header = "Allow: " .. allowed }), 0)
  end
  route[method](self, exchange, arrived_s)
end

--- Answers a request, or takes it in.
local function handle(self, exchange, arrived_s)
  local ok, why = pcall(dispatch, self, exchange, arrived_s)
  if ok then return end
  if C.kvl_interrupted() ~= 0 then error(why, 0) end
  if not problem.is(why) then
    if self.log then self.log("error: " .. tostring(why)) end
    why = problem.new(500, "this is an error of the server: " .. tostring(why))
  end
  if exchange.is_open and not exchange.is_begun then refuse(self, exchange, why) end
  exchange:close()
end

-- ---- running --------------------------------------------------------------------------

-- Between two steps: requests that are taken, their bytes, and the time to read them.
local TAKEN_MOST, BYTES_MOST, US_READING = 64, 2 ^ 22, 1e4
local US_IDLE = 1e5

--- Takes requests that have arrived.
local function take(self, us)
  local bytes = 0
  for i = 1, TAKEN_MOST do
    local exchange = self.http:next(i == 1 and us or 0)
    if not exchange then return end
    local arrived_s = tonumber(C.kvl_clock_ns()) * 1e-9
    bytes = bytes + #exchange.body
    self.tasks:add(exchange, #exchange.body, function()
      handle(self, exchange, arrived_s)
    end)
    if bytes > BYTES_MOST then return end
  end
end

--- Takes the requests that have arrived, reads them for some milliseconds, and does one
-- step of the model.
---@param us? number  how long to wait for a request when there is nothing to compute, in
--                    microseconds (1e5)
function HttpServer:turn(us)
  local is_idle = not self.calls:is_busy() and self.tasks.count == 0
  take(self, is_idle and (us or US_IDLE) or 0)
  self.tasks:run(US_READING)
  if self.calls:is_busy() then self.calls:step() end
end

--- Serves until it is interrupted.
function HttpServer:run()
  while true do self:turn() end
end

--- Ends all requests and connections. The model stays open.
function HttpServer:close()
  local why = problem.new(503, "the server stops", { code = "server_stops" })
  self.calls:close(why)
  self.tasks:close(why)
  self.http:close()
  closed(self, "server")
end

local EXCHANGE = { "an exchange", function(x)
  return type(x) == "table" and type(x.path) == "string" and type(x.method) == "string"
end }
arguments.methods(HttpServer, "a server of kv.http_server", {
  turn = { us = options.optional(options.not_negative) },
  note = { exchange = EXCHANGE, status = options.whole,
           generated = options.optional(options.whole) },
})

return M
