--- Redis servers that go away, hang, refuse, or answer something else.
local ffi = require "ffi"
local files = require "kvlab.files"
local kv = require "kvlab"
local cases = require "spec.runtime.store_cases"
local processes = require "spec.processes"
local support = require "spec.support"
local temporary = require "spec.temporary"

local C, fails = kv.C, support.fails
local out_store = ffi.new "kvl_store *[1]"
local NO_HURRY_MS = 60000 -- a timeout that nothing here waits for

ffi.cdef [[
int setenv(const char *name, const char *value, int overwrite);
int unsetenv(const char *name);
]]

describe("a Redis server", function()
  if not processes.has "redis-server" then return pending "no redis-server" end
  local server

  after_each(function() server:stop() end)

  it("that goes away gives misses and one error, and is found again", function()
    server = processes.redis()
    local s = cases.open(server.url, 0, NO_HURRY_MS)
    assert.equal(1, s:put(1, 0, 5000, 1))
    server:stop()
    assert.equal(0, s:put(9, 0, 2 ^ 23, 9)) -- more than sockets buffer: no SIGPIPE
    for _ = 1, 50 do
      assert.is_nil(s:get(1, 0, 5000))
      assert.equal(0, s:put(2, 0, 100, 2))
      assert.equal(0, (s:find(1, 3, 0)))
    end
    assert.equal(1, s:stats().errors)
    assert.equal(-1, s:stats().records)
    assert.matches("redis store: 127.0.0.1:" .. server.port .. ": ", s:problem(), 1, true)
    server:start()
    processes.wait_until(function() return s:put(3, 0, 70000, 3) == 1 end, "it is found")
    s:holds(3, 0, 70000, 3)
    assert.is_nil(s:get(1, 0, 5000))
    assert.equal(1, s:stats().errors)
    s:close()
  end)

  it("that restarts between two commands loses no connection for long", function()
    server = processes.redis()
    local s = cases.open(server.url, 0, NO_HURRY_MS)
    s:put(1, 0, 10, 1)
    server:stop()
    server:start()
    assert.is_nil(s:get(1, 0, 10))
    processes.wait_until(function() return s:put(1, 0, 10, 2) == 1 end, "it is found")
    s:holds(1, 0, 10, 2)
    assert.equal(1, s:stats().errors)
    s:close()
  end)

  it("that does not answer holds nobody up for longer than the timeout", function()
    server = processes.redis()
    local timeout_ms = 1000
    local s = cases.open(server.url, 0, timeout_ms)
    for i = 1, 5 do s:put(i, 0, 100000, i) end
    server:freeze() -- who waited for its answer would wait for ever
    assert.is_nil(s:get(1, 0, 100000))
    assert.matches("no answer in time", s:problem())
    local waits = 0 -- most calls do not even try
    for i = 1, 50 do
      local ms = processes.ms(function() assert.is_nil(s:get(i % 5 + 1, 0, 100000)) end)
      if ms >= timeout_ms then waits = waits + 1 end
      processes.sleep(0.01)
    end
    assert.is_true(waits < 25, waits)
    assert.equal(1, s:stats().errors)
    fails(C.kvl_store_open(server.url, 0, timeout_ms, out_store), "no answer in time")
    server:continue()
    for i = 1, 5 do -- answers are not mixed up
      local text = processes.wait_until(function() return s:get(i, 0, 100000) end,
        "it answers")
      assert.equal(ffi.string(cases.bytes(100000, i), 100000), text)
    end
    assert.equal(1, s:stats().errors)
    s:close()
  end)

  it("is given a password and a database, and its refusals are reported", function()
    server = processes.redis "--requirepass 'p@ss/word'"
    local address = "127.0.0.1:" .. server.port
    fails(C.kvl_store_open("redis://" .. address, 0, 0, out_store), address, "NOAUTH")
    fails(C.kvl_store_open("redis://:no@" .. address, 0, 0, out_store), "WRONGPASS")
    local one = cases.open("redis://:p%40ss%2Fword@" .. address .. "/1")
    local two = cases.open("redis://default:p%40ss%2fword@" .. address .. "/2")
    one:put(1, 0, 10, 1)
    assert.is_nil(two:get(1, 0, 10))
    assert.equal(0, two:stats().records)
    assert.equal(1, one:stats().records)
    fails(C.kvl_store_open("redis://:p%40ss%2Fword@" .. address .. "/99", 0, 0,
      out_store), "SELECT: ERR DB index is out of range")
    one:close()
    two:close()
  end)

  --- fn() with variables of the environment.
  local function with_environment(variables, fn)
    for name, value in pairs(variables) do ffi.C.setenv(name, value, 1) end
    local ok, why = pcall(fn)
    for name in pairs(variables) do ffi.C.unsetenv(name) end
    if not ok then error(why, 0) end
  end

  it("is given a password by the environment or a file", function()
    server = processes.redis "--requirepass 'p@ss/word'"
    local address, path = "127.0.0.1:" .. server.port, temporary.path()
    local PASSWORD, FILE = "KVLAB_REDIS_PASSWORD", "KVLAB_REDIS_PASSWORD_FILE"
    local function opens(url)
      local s = cases.open(url)
      assert.equal(1, s:put(1, 0, 10, 1))
      s:close()
    end
    files.write(path, "p@ss/word\nanother line\n")
    with_environment({ [PASSWORD] = "p@ss/word" }, function()
      opens(server.url)
      opens("redis://default@" .. address)
      fails(C.kvl_store_open("redis://:no@" .. address, 0, 0, out_store), "WRONGPASS")
    end)
    with_environment({ [FILE] = path }, function() opens(server.url) end)
    with_environment({ [FILE] = path .. ".none" }, function()
      fails(C.kvl_store_open(server.url, 0, 0, out_store), FILE, path, "No such file")
    end)
    with_environment({ [FILE] = "/" }, function()
      fails(C.kvl_store_open(server.url, 0, 0, out_store), FILE, "Is a directory")
    end)
    files.write(path, "\n")
    with_environment({ [FILE] = path }, function()
      fails(C.kvl_store_open(server.url, 0, 0, out_store), path, "first line is empty")
    end)
    with_environment({ [PASSWORD] = ("x"):rep(256) }, function()
      fails(C.kvl_store_open(server.url, 0, 0, out_store), "more than 255 bytes")
    end)
    fails(C.kvl_store_open("redis://me@" .. address, 0, 0, out_store), PASSWORD)
  end)

  it("that quotes the password it refuses does so without a reader", function()
    server = processes.redis "--rename-command AUTH ''"
    fails(C.kvl_store_open("redis://:secret@127.0.0.1:" .. server.port, 0, 0, out_store),
      "unknown command 'AUTH'", "'******'")
    assert.is_nil(ffi.string(C.kvl_last_error()):find("secret", 1, true))
  end)

  --- Why a URL cannot be opened.
  local function refusal(url)
    if C.kvl_store_open(url, 0, NO_HURRY_MS, out_store) >= 0 then error "it opens" end
    return ffi.string(C.kvl_last_error())
  end

  it("is reached through TLS, where hiredis has it, with a good certificate", function()
    server = processes.redis()
    server:stop()
    local words = refusal("rediss://:secret@127.0.0.1:" .. server.port)
    assert.is_nil(words:find("secret", 1, true))
    if words:find("which hiredis has since 1.0", 1, true) then
      assert.matches("rediss: needs TLS.*kvlab was built with 0%.", words)
      return
    end
    local folder = temporary.folder()
    processes.sh(([[cd '%s' && exec >log 2>&1
      openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=spec -keyout ca.key \
        -out ca.pem
      for name in good other; do
        [ $name = good ] && host=127.0.0.1 || host=127.0.0.2
        openssl req -newkey rsa:2048 -nodes -subj /CN=$name -keyout $name.key \
          -out $name.csr
        echo "subjectAltName=IP:$host" >$name.ext
        openssl x509 -req -in $name.csr -CA ca.pem -CAkey ca.key -CAcreateserial \
          -days 2 -extfile $name.ext -out $name.pem
      done]]):format(folder))
    local function serve(name)
      local port = processes.free_port()
      server = processes.redis(("--tls-port %d --tls-cert-file %s/%s.pem --tls-key-file "
        .. "%s/%s.key --tls-ca-cert-file %s/ca.pem --tls-auth-clients no"):format(port,
        folder, name, folder, name, folder))
      return "rediss://127.0.0.1:" .. port
    end
    local function trusting(fn)
      with_environment({ SSL_CERT_FILE = folder .. "/ca.pem" }, fn)
    end
    local url = serve "good"
    assert.matches("certificate verify failed", refusal(url))
    trusting(function()
      local s, n = cases.open(url, 0, NO_HURRY_MS), 3000000
      assert.equal(1, s:put(1, 0, n, 1)) -- more than the socket takes at once
      s:holds(1, 0, n, 1)
      server:stop()
      for i = 2, 5 do assert.equal(0, s:put(i, 0, n, i)) end -- no SIGPIPE
      assert.equal(1, s:stats().errors)
      s:close()
      url = serve "other"
      assert.matches("certificate verify failed", refusal(url))
    end)
  end)

  it("that sends more than a record is not listened to", function()
    server = processes.redis()
    local s = cases.open(server.url, 0, NO_HURRY_MS)
    s:put(1, 0, 5000, 1)
    local name = server:ask "keys 'kvlab:*'"
    server:ask("setrange " .. name .. " 100000000 x")
    local before = tonumber(files.read "/proc/self/status":match "VmHWM:%s*(%d+)")
    assert.is_nil(s:get(1, 0, 5000))
    local after = tonumber(files.read "/proc/self/status":match "VmHWM:%s*(%d+)")
    assert.is_true(after - before < 20000, after - before) -- kB; the reply has 100 MB
    assert.matches("longer than the record", s:problem())
    assert.equal(1, s:stats().errors)
    s:close()
  end)

  it("that is full says so", function()
    server = processes.redis "--maxmemory 3mb --maxmemory-policy noeviction"
    local s, stored = cases.open(server.url), 0
    for i = 1, 40 do stored = stored + s:put(i, 0, 200000, i) end
    assert.is_true(stored < 40)
    assert.equal(40 - stored, s:stats().errors)
    assert.matches("OOM", s:problem())
    s:close()
  end)

  it("with a changed record, or one of something else, gives a miss", function()
    server = processes.redis()
    local s = cases.open(server.url)
    s:put(1, 0, 5000, 1)
    local name = server:ask "keys 'kvlab:*'"
    server:ask("setrange " .. name .. " 3000 x")
    assert.is_nil(s:get(1, 0, 5000))
    assert.matches("checksum is", s:problem())
    assert.equal(0, (s:find(1, 1, 0))) -- so a user will put it again
    server:ask("set " .. name .. " theirs")
    assert.is_nil(s:get(1, 0, 5000))
    assert.equal(2, s:stats().damaged)
    server:ask("lpush " .. name .. " theirs")
    assert.is_nil(s:get(1, 0, 5000))
    assert.matches("WRONGTYPE", s:problem())
    assert.equal(0, (s:find(1, 1, 0)))
    s:close()
  end)

  it("whose replies are of another kind is not listened to", function()
    server = processes.redis "--rename-command SET '' --rename-command APPEND SET"
    local s = cases.open(server.url, 0, NO_HURRY_MS)
    assert.equal(0, s:put(1, 0, 5000, 1)) -- the reply is a length
    assert.matches("a reply of another kind", s:problem())
    assert.equal(1, s:stats().errors)
    s:close()
  end)
end)
