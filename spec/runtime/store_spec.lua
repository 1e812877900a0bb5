--- Stores: one contract for every backend. What happens to files, servers, processes and
-- threads is in store_..._spec.lua.
local ffi = require "ffi"
local files = require "kvlab.files"
local kv = require "kvlab"
local cases = require "spec.runtime.store_cases"
local processes = require "spec.processes"
local support = require "spec.support"
local temporary = require "spec.temporary"

local C, fails = kv.C, support.fails
local folder, redis

local function path(name) return folder .. "/" .. name end

-- ---- keys -----------------------------------------------------------------------------

describe("block keys", function()
  local tokens = ffi.new "int32_t[300]"
  for i = 0, 299 do tokens[i] = (i * 7919 + 12345) % 32000 end

  local function keys_of(model, parent, count, block_size, list)
    local keys = ffi.new "kvl_key[300]"
    local n = kv.check(C.kvl_block_keys(model, parent, list or tokens, count, block_size,
      keys))
    return keys, n
  end
  local function hex(key) return bit.tohex(key.hi, 16) .. bit.tohex(key.lo, 16) end

  -- By Python's xxhash: xxh3_128(lo, hi of the parent, then tokens, little-endian)
  it("are the XXH3-128 of parent and tokens", function()
    local model = "llama bf16 block_size=16"
    local keys, n = keys_of(model, nil, 300, 16)
    assert.equal(18, n)
    assert.equal("87d60db072fcf5c7f4e4c4cb1d8180f1", hex(keys[0]))
    assert.equal("d0c84ac10b7d2b0216527e3c8453dbaa", hex(keys[1]))
    assert.equal("db72d620d8e0feabfdb9968fc3e02e9b", hex(keys[17]))
    keys, n = keys_of(model, nil, 300, 128)
    assert.equal(2, n)
    assert.equal("4f90dd4aa2a509cc9f91de4bfb453b06", hex(keys[0]))
    assert.equal("10713996842b627d3045bdb01428888c", hex(keys[1]))
    assert.equal("5735eb859069d6cb56455ec658ca2f27", hex(keys_of(model, nil, 300, 1)[0]))
    assert.equal("2a1bea454a7ccb226b7fcf02ec0f4b1c", hex(keys_of(model, nil, 3, 3,
      ffi.new("int32_t[3]", -1, 2147483647, 0))[0]))
    assert.equal("3d4e9da40160ca12d160ec4eb1436c01",
      hex(keys_of(nil, ffi.new "kvl_key", 300, 7)[41]))
    assert.equal("e3fc9bf53b7a558135b405d38ccacdc3", hex(keys_of("", nil, 300, 300)[0]))
  end)

  it("go on from a parent", function()
    local whole = keys_of("m", nil, 300, 16)
    local rest, n = keys_of(nil, whole[4], 300 - 80, 16, tokens + 80)
    assert.equal(13, n)
    for i = 0, 12 do assert.equal(hex(whole[5 + i]), hex(rest[i])) end
  end)

  it("have none for a block that is not full", function()
    assert.equal(0, select(2, keys_of("m", nil, 0, 16)))
    assert.equal(0, select(2, keys_of("m", nil, 15, 16)))
    assert.equal(1, select(2, keys_of("m", nil, 31, 16)))
    assert.equal(0, C.kvl_block_keys("m", nil, nil, 0, 16, nil))
  end)

  it("refuse what makes none", function()
    local keys = ffi.new "kvl_key[4]"
    fails(C.kvl_block_keys(nil, nil, tokens, 9, 4, keys), "model and parent are both")
    fails(C.kvl_block_keys("m", nil, tokens, 9, 0, keys), "block_size is 0, expected >=")
    fails(C.kvl_block_keys("m", nil, tokens, -1, 4, keys), "count is -1, expected >= 0")
    fails(C.kvl_block_keys("m", nil, nil, 9, 4, keys), "tokens are missing")
    fails(C.kvl_block_keys("m", nil, tokens, 9, 4, nil), "keys are missing")
  end)
end)

-- ---- every backend --------------------------------------------------------------------

local function check_contract(open)
  local s
  before_each(function() s = open() end)
  after_each(function() s:close() end)

  it("gives back what was put, of any size", function()
    local sizes = { 0, 1, 7, 240, 241, 4072, 4096, 4097, 65536, 1048579 }
    for i, n in ipairs(sizes) do assert.equal(1, s:put(i, 0, n, i)) end
    for i, n in ipairs(sizes) do s:holds(i, 0, n, i) end
    assert.equal(#sizes, s:stats().records)
  end)

  it("tells keys and parts apart", function()
    for i = 0, 3 do
      for part = 0, 3 do s:put(i, part, 50, 4 * i + part) end
    end
    s:put(0, 2147483647, 50, 99)
    for i = 0, 3 do
      for part = 0, 3 do s:holds(i, part, 50, 4 * i + part) end
    end
    s:holds(0, 2147483647, 50, 99)
    assert.is_nil(s:get(4, 0, 50))
    assert.is_nil(s:get(0, 4, 50))
    local pairs_of = { { 5, 6 }, { 6, 5 }, { 5, 5 }, { 6, 6 } } -- lo, hi
    for version, pair in ipairs(pairs_of) do
      local key = ffi.new("kvl_key", pair[1], pair[2])
      assert.equal(1, C.kvl_store_put(s.handle, key, 0, cases.bytes(9, version), 9))
    end
    for version, pair in ipairs(pairs_of) do
      local key, got = ffi.new("kvl_key", pair[1], pair[2]), ffi.new "uint8_t[9]"
      assert.equal(1, C.kvl_store_get(s.handle, key, 0, got, 9))
      assert.equal(ffi.string(cases.bytes(9, version), 9), ffi.string(got, 9))
    end
  end)

  it("replaces a record, with one of another size too", function()
    for version, n in ipairs { 100, 100, 70000, 3 } do
      s:put(5, 1, n, version)
      s:holds(5, 1, n, version)
    end
    local stats = s:stats()
    assert.equal(1, stats.records)
    assert.is_true(stats.bytes_held == 3 or stats.bytes_held == -1)
  end)

  it("takes a record of another size for damaged", function()
    s:put(1, 7, 64, 1)
    assert.equal("", s:problem())
    assert.is_nil(s:get(1, 7, 65))
    assert.is_nil(s:get(1, 7, 0))
    assert.equal(2, s:stats().damaged)
    assert.matches("part 7: its length is 64, expected 0", s:problem(), 1, true)
    s:holds(1, 7, 64, 1)
  end)

  it("finds the leading run, and all that is there", function()
    for _, i in ipairs { 0, 1, 2, 5, 300 } do s:put(i, 3, 10, i) end
    for i = 1, 299 do s:put(i, 4, 1, i) end
    local run, flags = s:find(0, 6, 3)
    assert.equal(3, run)
    assert.equal("1110010", flags)
    run, flags = s:find(3, 5, 3)
    assert.equal(0, run)
    assert.equal("001", flags)
    run, flags = s:find(1, 310, 4)
    assert.equal(299, run)
    assert.equal(("1"):rep(299) .. ("0"):rep(11), flags)
    assert.equal(0, (s:find(0, 2, 5)))
    assert.equal(0, C.kvl_store_find(s.handle, nil, 0, 0, nil))
  end)

  it("forgets what is removed", function()
    s:put(1, 0, 10, 1)
    s:put(1, 1, 10, 1)
    assert.equal(1, s:remove(1, 0))
    assert.equal(0, s:remove(1, 0))
    assert.is_nil(s:get(1, 0, 10))
    s:holds(1, 1, 10, 1)
    assert.equal(1, s:stats().records)
  end)

  it("counts", function()
    s:put(1, 0, 1000, 1)
    s:put(2, 0, 500, 1)
    s:put(2, 0, 400, 2)
    s:get(1, 0, 1000)
    s:get(2, 0, 400)
    s:get(3, 0, 400)
    s:remove(1, 0)
    kv.check(C.kvl_store_sync(s.handle))
    local stats = s:stats()
    assert.is_true(stats.bytes_held == 400 or stats.bytes_held == -1)
    stats.bytes_held = nil
    assert.same({ hits = 2, misses = 1, puts = 3, evictions = 0, damaged = 0, errors = 0,
      bytes_read = 1400, bytes_written = 1900, records = 1 }, stats)
  end)

  it("does what a store in plain Lua does", function()
    local model, rng = cases.model(0), support.rng(3)
    for step = 1, 1500 do
      local i, part, n = rng(12), rng(2), rng(3) * 2500
      local id, what = i * 2 + part, rng(10)
      if what < 4 then
        model.put(id, n, step)
        assert.equal(1, s:put(i, part, n, step))
      elseif what < 9 then
        local want = model.get(id)
        if want then s:holds(i, part, want.n, want.version)
        else assert.is_nil(s:get(i, part, n)) end
      else
        assert.equal(model.remove(id), s:remove(i, part))
      end
    end
    assert.equal(model.records(), s:stats().records)
    assert.equal(0, s:stats().damaged + s:stats().errors)
  end)

  it("refuses what cannot be meant", function()
    local key, b, h = cases.key(1), cases.bytes(8, 1), s.handle
    fails(C.kvl_store_put(nil, key, 0, b, 8), "store_put: the store is closed")
    fails(C.kvl_store_put(h, nil, 0, b, 8), "store_put: the key is missing")
    fails(C.kvl_store_put(h, key, -1, b, 8), "part is -1, expected >= 0")
    fails(C.kvl_store_put(h, key, 0, b, -8), "-8 bytes, expected >= 0")
    fails(C.kvl_store_put(h, key, 0, nil, 8), "bytes are missing")
    fails(C.kvl_store_get(nil, key, 0, b, 8), "store_get: the store is closed")
    fails(C.kvl_store_get(h, key, 0, nil, 8), "store_get: bytes are missing")
    fails(C.kvl_store_find(h, key, -1, 0, nil), "-1 keys, expected >= 0")
    fails(C.kvl_store_find(h, nil, 1, 0, nil), "store_find: the key is missing")
    fails(C.kvl_store_remove(h, key, -2), "store_remove: part is -2")
    fails(C.kvl_store_sync(nil), "the store is closed")
    fails(C.kvl_store_stats_get(nil, nil), "the store is closed")
    fails(C.kvl_store_problem(h, ffi.new "char[1]", 0), "text of 0 bytes, expected >= 1")
    assert.equal(0, s:stats().records)
    C.kvl_store_close(nil)
  end)
end

--- `open(capacity)` opens a fresh store; `again(capacity)` the same one once more.
local function check_capacity(open, again)
  it("holds at most its capacity, and evicts the least recently used", function()
    local s, model, rng = open(10000), cases.model(10000), support.rng(8)
    for step = 1, 1200 do
      local i, n = rng(40), 100 + rng(9) * 200
      if rng(3) == 0 then
        model.put(i, n, step)
        assert.equal(1, s:put(i, 0, n, step))
      else
        local want = model.get(i)
        if want then s:holds(i, 0, want.n, want.version)
        else assert.is_nil(s:get(i, 0, n)) end
      end
      if again and step % 300 == 0 then -- the order is kept
        model.evictions = model.evictions - s:stats().evictions
        s:close()
        s = again(10000)
      end
    end
    local stats = s:stats()
    assert.equal(model.bytes, stats.bytes_held)
    assert.equal(model.records(), stats.records)
    assert.equal(model.evictions, stats.evictions)
    assert.is_true(again ~= nil or stats.evictions > 100)
    s:close()
  end)

  it("takes a record of exactly its capacity, and refuses a larger one", function()
    local s = open(1000)
    s:put(1, 0, 600, 1)
    s:put(2, 0, 1000, 2)
    s:holds(2, 0, 1000, 2)
    assert.is_nil(s:get(1, 0, 600))
    fails(s:put(3, 0, 1001, 3), "store_put: 1001 bytes, the capacity is 1000")
    s:holds(2, 0, 1000, 2)
    s:close()
  end)
end

describe("store", function()
  local names = 0
  local function fresh_lmdb(capacity)
    names = names + 1
    return cases.open("lmdb:" .. path(names), capacity)
  end
  local function lmdb_again(capacity)
    return cases.open("lmdb:" .. path(names), capacity)
  end

  lazy_setup(function()
    folder = temporary.folder() .. "/stores"
    files.make_folder(folder)
    if processes.has "redis-server" then redis = processes.redis() end
  end)
  lazy_teardown(function()
    if redis then redis:stop() end
  end)

  it("is opened by a URL, and an unknown one names those that are known", function()
    local out = ffi.new "kvl_store *[1]"
    local function open(url, capacity, ms)
      return C.kvl_store_open(url, capacity or 0, ms or 0, out)
    end
    fails(open "file:/x", "url begins with \"file:\"",
      "memory:, lmdb:PATH, redis://[user")
    fails(open "rediss://u:secret@h", "rediss")
    assert.is_nil(ffi.string(C.kvl_last_error()):find "secret")
    fails(open "", "url has no scheme, expected memory:")
    fails(open(nil), "url is missing")
    fails(open "memory:x", "url is \"memory:x\", expected \"memory:\"")
    fails(open("memory:", -1), "capacity is -1, expected >= 0")
    fails(open("memory:", 0, -1), "timeout_ms is -1, expected >= 0")
    fails(open "lmdb:", "expected lmdb:PATH")
    fails(open "lmdb:/nowhere/at/all", "/nowhere/at/all: No such file")
    fails(open("lmdb:" .. folder), folder .. ": Is a directory")
    fails(open "redis:h", "expected // after redis:")
    support.raises("store: url has a byte 0", kv.store, "redis://h\0x:1")
    fails(open "redis://", "expected a host")
    fails(open "redis://h:0", "expected a port of 1 ... 65535")
    fails(open "redis://h:65536", "expected a port")
    fails(open "redis://[::1]x", "expected a port")
    fails(open "redis://h/x", "expected the number of a database")
    fails(open "redis://user@h", "expected user:password")
    fails(open "redis://u:p%2@h", "expected user:password")
    fails(open("redis://h", 1),
      "capacity is 1, expected 0: the server's maxmemory sets the limit")
  end)

  describe("memory:", function()
    check_contract(function() return cases.open "memory:" end)
    check_capacity(function(capacity) return cases.open("memory:", capacity) end)
  end)

  describe("lmdb:", function()
    check_contract(fresh_lmdb)
    check_capacity(fresh_lmdb, lmdb_again)
  end)

  describe("redis:", function()
    if not processes.has "redis-server" then return pending "no redis-server" end
    check_contract(function()
      redis:ask "flushall"
      return cases.open(redis.url)
    end)
  end)
end)
