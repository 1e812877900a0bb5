--- What happens to stores: damaged records and files, processes that are killed, machines
-- that go down, servers that go away, threads, memory that is missing.
local ffi = require "ffi"
local kv = require "kvlab"
local cases = require "spec.runtime.store_cases"
local processes = require "spec.processes"
local support = require "spec.support"

local C, fails = kv.C, support.fails
local is_hostile = C.kvl_fail_allocation(0) == 0
local out_store = ffi.new "kvl_store *[1]"
local NO_HURRY_MS = 60000 -- a timeout that nothing here waits for
local folder, file -- a file of the present spec, which is not there yet

local function sh(command)
  assert(os.execute(command) == 0, command)
end

local function read(name)
  local f = io.open(name)
  if not f then return nil end
  local text = f:read "*a"
  f:close()
  return text
end

local function write(name, text)
  local f = assert(io.open(name, "w"))
  f:write(text)
  f:close()
end

local function open(capacity) return cases.open("lmdb:" .. file, capacity) end

-- ---- the file, by LMDB itself ---------------------------------------------------------

ffi.cdef [[
int setenv(const char *name, const char *value, int overwrite);
int unsetenv(const char *name);
typedef struct { size_t mv_size; void *mv_data; } MDB_val;
int mdb_env_create(void **env);
int mdb_env_set_maxdbs(void *env, unsigned n);
int mdb_env_open(void *env, const char *path, unsigned flags, unsigned mode);
void mdb_env_close(void *env);
int mdb_txn_begin(void *env, void *parent, unsigned flags, void **txn);
int mdb_txn_commit(void *txn);
int mdb_dbi_open(void *txn, const char *name, unsigned flags, unsigned *dbi);
int mdb_get(void *txn, unsigned dbi, MDB_val *key, MDB_val *value);
int mdb_put(void *txn, unsigned dbi, MDB_val *key, MDB_val *value, unsigned flags);
]]
local lmdb = ffi.load "liblmdb.so.0"
local NOSUBDIR, CREATE = 0x4000, 0x40000

local function val(text) return ffi.new("MDB_val", #text, ffi.cast("void *", text)) end

--- edit(get, put) with functions over the strings of one tree of the file.
local function edit_file(tree, edit)
  local env, txn, dbi = ffi.new "void *[1]", ffi.new "void *[1]", ffi.new "unsigned[1]"
  assert(lmdb.mdb_env_create(env) == 0)
  assert(lmdb.mdb_env_set_maxdbs(env[0], 4) == 0)
  assert(lmdb.mdb_env_open(env[0], file, NOSUBDIR, 438) == 0)
  assert(lmdb.mdb_txn_begin(env[0], nil, 0, txn) == 0)
  assert(lmdb.mdb_dbi_open(txn[0], tree, CREATE, dbi) == 0)
  local function get(key)
    local value = ffi.new "MDB_val"
    assert(lmdb.mdb_get(txn[0], dbi[0], val(key), value) == 0)
    return ffi.string(value.mv_data, value.mv_size)
  end
  local function put(key, value)
    assert(lmdb.mdb_put(txn[0], dbi[0], val(key), val(value), 0) == 0)
  end
  edit(get, put)
  assert(lmdb.mdb_txn_commit(txn[0]) == 0)
  lmdb.mdb_env_close(env[0])
end

--- What a record of part 0 is filed under.
local function name_of(i) return ffi.string(cases.key(i), 16) .. "\0\0\0\0" end

local function flipped(text, at)
  local byte = bit.bxor(text:byte(at + 1), 16)
  return text:sub(1, at) .. string.char(byte) .. text:sub(at + 2)
end

local function use_folder()
  lazy_setup(function()
    folder = os.tmpname()
    sh(("rm -f '%s' && mkdir '%s'"):format(folder, folder))
  end)
  lazy_teardown(function() sh(("rm -rf '%s'"):format(folder)) end)
  before_each(function()
    file = folder .. "/blocks"
    sh(("rm -f '%s'*"):format(file))
  end)
end

describe("a damaged record of an lmdb store", function()
  use_folder()
  local BYTES = 5000

  --- Two records, the first of which becomes change(itself, the other one).
  local function check(change, words)
    local s = open()
    s:put(1, 0, BYTES, 1)
    s:put(2, 0, BYTES, 2)
    s:close()
    edit_file("records", function(get, put)
      put(name_of(1), change(get(name_of(1)), get(name_of(2))))
    end)
    s = open()
    assert.is_nil(s:get(1, 0, BYTES))
    s:holds(2, 0, BYTES, 2)
    assert.equal(1, s:stats().damaged)
    assert.equal(0, s:stats().errors)
    assert.matches(words, s:problem(), 1, true)
    assert.equal(1, s:put(1, 0, BYTES, 3)) -- heals it
    s:holds(1, 0, BYTES, 3)
    assert.equal(2 * BYTES, s:stats().bytes_held)
    s:close()
  end

  for words, list in pairs {
    ["magic is "] = { 0, 3 }, ["version is 17, expected 1"] = { 4 },
    ["its size is 5000, expected "] = { 8, 15 }, ["checksum is "] = { 16, 23, 24, 2523,
    5023 } } do
    for _, at in ipairs(list) do
      it(("is a miss, with byte %d changed"):format(at), function()
        check(function(record) return flipped(record, at) end, words)
      end)
    end
  end

  for words, lengths in pairs {
    ["its size with the head is "] = { 0, 23 },
    ["its size is "] = { 24, 1000, 5023, 5025 } } do
    for _, length in ipairs(lengths) do
      it(("is a miss, with %d bytes of 5024"):format(length), function()
        check(function(record) return (record .. "x"):sub(1, length) end, words)
      end)
    end
  end

  it("is a miss when it is whole, but another block's", function()
    check(function(_, other) return other end, "checksum is ")
  end)
end)

describe("an lmdb file", function()
  use_folder()

  it("that is cut gives misses, and whole blocks", function()
    local s = open()
    for i = 1, 40 do s:put(i, 0, 9000 + i, i) end
    s:close()
    sh(("cp '%s' '%s.whole'"):format(file, file))
    local bytes, cut, whole = #read(file), 0, 0
    for size = 8192, bytes, math.floor(bytes / 23) do
      sh(("cp '%s.whole' '%s' && truncate -s %d '%s'"):format(file, file, size, file))
      local reader = processes.fork(function() -- which would die
        local ok, cut_store = pcall(open)
        if not ok then return end -- the words say why
        for i = 1, 40 do
          local text = cut_store:get(i, 0, 9000 + i)
          assert(not text or text == ffi.string(cases.bytes(9000 + i, i), 9000 + i))
        end
        write(file .. ".hits", tostring(cut_store:stats().hits))
        cut_store:put(50, 0, 9000, 1)
        cut_store:close()
      end)
      assert.equal(0, processes.wait(reader), "cut to " .. size)
      local hits = tonumber(read(file .. ".hits") or 0)
      if hits == 40 then whole = whole + 1 else cut = cut + 1 end
    end
    assert.is_true(cut > 5)
  end)

  it("that is cut while it is open gives misses and errors", function()
    for _, size in ipairs { 0, 4096, 8192, 50000, 300000 } do
      sh(("rm -f '%s'*"):format(file))
      local s = open()
      for i = 1, 40 do s:put(i, 0, 9000 + i, i) end
      s:close()
      local user = processes.fork(function() -- which would be killed
        local cut = open()
        cut:holds(1, 0, 9001, 1)
        assert(cut:put(41, 0, 9000, 1) == 1)
        sh(("truncate -s %d '%s'"):format(size, file))
        for i = 1, 40 do assert(not cut:get(i, 0, 9000 + i)) end
        assert(cut:find(1, 3, 0) == 0)
        assert(cut:put(50, 0, 9000, 1) == 0)
        assert(cut:remove(1, 0) == 0)
        assert(cut:stats().records == -1)
        assert(cut:stats().errors > 40)
        local words = cut:problem()
        assert(words:find(file, 1, true) and words:find("cut off", 1, true), words)
        fails(C.kvl_store_sync(cut.handle), file, "cut off")
        cut:close()
      end)
      assert.equal(0, processes.wait(user), "cut to " .. size)
    end
  end)

  it("that another process has made longer and somebody cuts gives misses", function()
    local s = open()
    for i = 1, 5 do s:put(i, 0, 9000, i) end
    s:close()
    local turn = processes.shared_number()
    local grower = processes.fork(function()
      processes.wait_until(function() return turn[0] == 1 end, "the file is open")
      local other = open()
      for i = 10, 60 do assert(other:put(i, 0, 9000, i) == 1) end
      other:close()
      turn[0] = 2
    end)
    local user = processes.fork(function()
      local cut, found = open(), 0
      cut:holds(1, 0, 9000, 1)
      turn[0] = 1
      processes.wait_until(function() return turn[0] == 2 end, "the file is longer")
      sh(("truncate -s %d '%s'"):format(#read(file) - 200000, file))
      for i = 1, 60 do
        local text = cut:get(i, 0, 9000)
        assert(not text or text == ffi.string(cases.bytes(9000, i), 9000))
        if text then found = found + 1 end
      end
      assert(found < 56)
      assert(cut:problem() ~= "")
      cut:close()
    end)
    assert.equal(0, processes.wait(user))
    assert.equal(0, processes.wait(grower))
  end)

  it("of another program, or none at all, is refused", function()
    write(file, ("not a database "):rep(1000))
    fails(C.kvl_store_open("lmdb:" .. file, 0, 0, out_store), file, "not an LMDB file")
    sh(("rm -f '%s'*"):format(file))
    edit_file(nil, function(_, put) put("theirs", "value") end)
    fails(C.kvl_store_open("lmdb:" .. file, 0, 0, out_store),
      "an LMDB file of another program")
    edit_file(nil, function(get) assert.equal("value", get "theirs") end)
  end)

  it("of another version is refused", function()
    open():close()
    edit_file(nil, function(get, put) put("kvlab", flipped(get "kvlab", 4)) end)
    fails(C.kvl_store_open("lmdb:" .. file, 0, 0, out_store), file,
      "MDB_VERSION_MISMATCH")
  end)

  it("is opened once by a process, by whatever name", function()
    local s = open()
    sh(("ln -s '%s' '%s.link'"):format(file, file))
    fails(C.kvl_store_open("lmdb:" .. file .. ".link", 0, 0, out_store),
      file .. " is open in this process")
    s:close()
    cases.open("lmdb:" .. file .. ".link"):close()
  end)

  it("grows beyond its first map", function()
    local s, n = open(), is_hostile and 20000 or 2000000
    for i = 1, 50 do assert.equal(1, s:put(i, 0, n, i)) end
    for i = 1, 50 do s:holds(i, 0, n, i) end
    assert.is_true(#read(file) > 50 * n)
    assert.equal(0, s:stats().errors)
    s:close()
  end)

  it("keeps what was put, and begins anew when the machine went down before a sync",
    function()
      local note = file .. "-unsynced"
      local s = open()
      s:put(1, 0, 100, 1)
      assert.equal(36, #read(note))
      kv.check(C.kvl_store_sync(s.handle))
      assert.is_nil(read(note))
      s:put(2, 0, 100, 2)
      assert.equal(36, #read(note))
      s:close()
      assert.is_nil(read(note))
      s = open()
      s:holds(1, 0, 100, 1)
      s:holds(2, 0, 100, 2)
      assert.is_nil(read(note)) -- who only reads risks nothing
      s:put(3, 0, 100, 3)
      s:close()
      write(note, read "/proc/sys/kernel/random/boot_id":sub(1, 36))
      s = open()
      s:holds(3, 0, 100, 3)
      s:close()
      write(note, ("0"):rep(36))
      s = open()
      assert.equal(0, s:stats().records)
      assert.equal(1, s:stats().damaged)
      assert.matches("the machine went down before the file was synced", s:problem())
      s:put(4, 0, 100, 4)
      s:holds(4, 0, 100, 4)
      s:close()
    end)
end)

-- ---- processes ------------------------------------------------------------------------

describe("a writer of an lmdb store", function()
  use_folder()
  local RECORDS, CAPACITY = 24, 700000

  local function bytes_of(i) return 20000 + i * 997 end

  local puts = processes.shared_number()

  --- Puts records without an end, each of one byte over and over, another every time, and
  -- counts them.
  local function write_on(capacity)
    local s, rng = open(capacity), support.rng(ffi.C.getpid())
    for step = 1, math.huge do
      local i = rng(RECORDS)
      local b = ffi.new("uint8_t[?]", bytes_of(i), step % 256)
      ffi.fill(b, bytes_of(i), step % 256)
      kv.check(C.kvl_store_put(s.handle, cases.key(i), 0, b, bytes_of(i)))
      puts[0] = puts[0] + 1
      if rng(50) == 0 then kv.check(C.kvl_store_sync(s.handle)) end
    end
  end

  --- How many records there are; all of them whole.
  local function check_whole(s)
    local found = 0
    for i = 0, RECORDS - 1 do
      local text = s:get(i, 0, bytes_of(i))
      if text then
        found = found + 1
        assert.equal(text:sub(1, 1):rep(#text), text)
      end
    end
    assert.equal("", s:problem())
    return found
  end

  --- Kills writers: a moment after their first puts, or while they open the file.
  local function kill_often(rounds)
    local rng, found = support.rng(5), 0
    for round = 1, rounds do
      if round % 10 == 1 then sh(("rm -f '%s'*"):format(file)) end
      puts[0] = 0
      local enough = rng(20)
      local writer = processes.fork(function() write_on(CAPACITY) end)
      processes.wait_until(function() return puts[0] >= enough end, "a writer puts")
      processes.sleep(rng(3000) * 1e-6)
      processes.kill(writer)
      local s = open(CAPACITY)
      local stats = s:stats()
      assert.is_true(stats.bytes_held <= CAPACITY)
      local there = check_whole(s)
      assert.equal(stats.records, there)
      found = found + there
      s:close()
    end
    assert.is_true(found > rounds)
  end

  it("is killed 20 times and leaves whole blocks", function() kill_often(20) end)
  it("is killed 200 times and leaves whole blocks #slow", function() kill_often(200) end)

  it("works beside another process, which follows as the file grows", function()
    open():close()
    local first = processes.fork(write_on)
    local grower = processes.fork(function()
      local s = open()
      for i = 1, 50 do
        assert(s:put(1000 + i, 0, is_hostile and 9000 or 1500000, i) == 1)
      end
      s:close()
    end)
    local s, rng, steps = open(), support.rng(6), 0
    repeat
      check_whole(s)
      local i = rng(RECORDS)
      local b = ffi.new("uint8_t[?]", bytes_of(i), 77)
      ffi.fill(b, bytes_of(i), 77)
      assert.equal(1, C.kvl_store_put(s.handle, cases.key(i), 0, b, bytes_of(i)))
      steps = steps + 1
    until steps >= 60 and ffi.C.waitpid(grower, nil, 1) ~= 0 -- 1: WNOHANG
    processes.kill(first)
    assert.is_true(check_whole(s) > 0)
    assert.equal(0, s:stats().errors)
    s:close()
  end)
end)

-- ---- a Redis server -------------------------------------------------------------------

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
    local address, path = "127.0.0.1:" .. server.port, os.tmpname()
    local PASSWORD, FILE = "KVLAB_REDIS_PASSWORD", "KVLAB_REDIS_PASSWORD_FILE"
    local function opens(url)
      local s = cases.open(url)
      assert.equal(1, s:put(1, 0, 10, 1))
      s:close()
    end
    write(path, "p@ss/word\nanother line\n")
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
    write(path, "\n")
    with_environment({ [FILE] = path }, function()
      fails(C.kvl_store_open(server.url, 0, 0, out_store), path, "first line is empty")
    end)
    with_environment({ [PASSWORD] = ("x"):rep(256) }, function()
      fails(C.kvl_store_open(server.url, 0, 0, out_store), "more than 255 bytes")
    end)
    fails(C.kvl_store_open("redis://me@" .. address, 0, 0, out_store), PASSWORD)
    os.remove(path)
  end)

  it("that quotes the password it refuses does so without a reader", function()
    server = processes.redis "--rename-command AUTH ''"
    fails(C.kvl_store_open("redis://:secret@127.0.0.1:" .. server.port, 0, 0, out_store),
      "unknown command 'AUTH'", "'******'")
    assert.is_nil(ffi.string(C.kvl_last_error()):find("secret", 1, true))
  end)

  it("that would need TLS is refused with words", function()
    server = processes.redis()
    fails(C.kvl_store_open("rediss://127.0.0.1", 0, 0, out_store), "rediss:", "no TLS")
  end)

  it("that sends more than a record is not listened to", function()
    server = processes.redis()
    local s = cases.open(server.url, 0, NO_HURRY_MS)
    s:put(1, 0, 5000, 1)
    local name = server:ask "keys 'kvlab:*'"
    server:ask("setrange " .. name .. " 100000000 x")
    local before = tonumber(read "/proc/self/status":match "VmHWM:%s*(%d+)")
    assert.is_nil(s:get(1, 0, 5000))
    local after = tonumber(read "/proc/self/status":match "VmHWM:%s*(%d+)")
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
    server:ask("set " .. name .. " theirs")
    assert.is_nil(s:get(1, 0, 5000))
    assert.equal(2, s:stats().damaged)
    server:ask("del " .. name)
    server:ask("lpush " .. name .. " theirs")
    assert.is_nil(s:get(1, 0, 5000))
    assert.matches("WRONGTYPE", s:problem())
    s:close()
  end)
end)

-- ---- threads, and memory that is missing ----------------------------------------------

describe("a store under eight threads", function()
  use_folder()
  local server

  after_each(function()
    if server then server:stop() end
    server = nil
  end)

  local function hammer(url, capacity, rounds, pid)
    if is_hostile then return pending(support.SAME_PROGRAMS) end
    local source = kv.paths.root .. "/spec/runtime/store_threads.c"
    if not processes.has "gcc" or not read(kv.paths.root .. "/runtime/store/store.c") then
      return pending "no compiler, or no sources"
    end
    local program = folder .. "/threads"
    if not read(program) then
      sh(("cd '%s/runtime' && gcc -std=gnu17 -g -O1 -fsanitize=thread -I. -I../build "
        .. "-o '%s' '%s' store/*.c core/status.c -llmdb -lhiredis -lpthread")
        :format(kv.paths.root, program, source))
    end
    local pipe = io.popen(("TSAN_OPTIONS=halt_on_error=1 '%s' '%s' %d %d %s 2>&1; "
      .. "echo $?"):format(program, url, capacity, rounds, pid or ""))
    local output = pipe:read "*a"
    pipe:close()
    assert.equal("0\n", output)
  end

  it("keeps its promises in memory", function() hammer("memory:", 300000, 3000) end)
  it("keeps them in a file", function() hammer("lmdb:" .. file, 300000, 400) end)
  it("keeps them in a Redis server", function()
    if not processes.has "redis-server" then return pending "no redis-server" end
    server = processes.redis()
    hammer(server.url, 0, 400)
  end)
  it("keeps them when the server is killed", function()
    if not processes.has "redis-server" then return pending "no redis-server" end
    server = processes.redis()
    hammer(server.url, 0, 400, server.pid)
  end)
end)

describe("a failed allocation", function()
  use_folder()

  --- try() with its n-th allocation failing, for every n; it succeeds in the end.
  local function fail_each(try)
    local failures = 0
    for n = 1, 50 do
      kv.check(C.kvl_fail_allocation(n))
      local status = try()
      kv.check(C.kvl_fail_allocation(0))
      if status >= 0 then return failures end
      failures = failures + 1
      fails(status, "no host memory for ")
    end
    error "it never succeeds"
  end

  it("leaves a store as it was", function()
    if not is_hostile then return pending "not a hostile build" end
    local server = processes.has "redis-server" and processes.redis()
    for _, url in ipairs { "memory:", "lmdb:" .. file, server and server.url } do
      assert.is_true(fail_each(function()
        return C.kvl_store_open(url, 0, 0, out_store)
      end) > 0)
      C.kvl_store_close(out_store[0])
      local s = cases.open(url)
      for i = 1, 9 do
        fail_each(function() return s:put(i, 0, 1000, i) end)
      end
      for i = 1, 9 do s:holds(i, 0, 1000, i) end
      s:close()
    end
    if server then server:stop() end
  end)
end)
