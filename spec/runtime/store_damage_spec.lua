--- Damaged records and files of lmdb stores, and machines that go down.
local ffi = require "ffi"
local files = require "kvlab.files"
local kv = require "kvlab"
local cases = require "spec.runtime.store_cases"
local lmdb_file = require "spec.runtime.lmdb_file"
local processes = require "spec.processes"
local support = require "spec.support"

local C, fails, sh = kv.C, support.fails, processes.sh
local flipped, name_of = lmdb_file.flipped, lmdb_file.name_of
local out_store = ffi.new "kvl_store *[1]"
local file -- the path of the present spec's

describe("a damaged record of an lmdb store", function()
  before_each(function() file = lmdb_file.fresh() end)
  local BYTES = 5000

  --- Two records, the first of which becomes change(itself, the other one).
  local function check(change, words)
    local s = lmdb_file.open()
    s:put(1, 0, BYTES, 1)
    s:put(2, 0, BYTES, 2)
    s:close()
    lmdb_file.edit("records", function(get, put)
      put(name_of(1), change(get(name_of(1)), get(name_of(2))))
    end)
    s = lmdb_file.open()
    assert.is_nil(s:get(1, 0, BYTES))
    s:holds(2, 0, BYTES, 2)
    assert.equal(1, s:stats().damaged)
    assert.equal(0, s:stats().errors)
    assert.matches(words, s:problem(), 1, true)
    assert.equal(0, (s:find(1, 1, 0))) -- so a user will put it again
    assert.equal(1, s:put(1, 0, BYTES, 3))
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
  before_each(function() file = lmdb_file.fresh() end)

  it("that is cut gives misses, and whole blocks", function()
    local s = lmdb_file.open()
    for i = 1, 40 do s:put(i, 0, 9000 + i, i) end
    s:close()
    sh(("cp '%s' '%s.whole'"):format(file, file))
    local bytes, cut, whole = #files.read(file), 0, 0
    for size = 8192, bytes, math.floor(bytes / 23) do
      sh(("cp '%s.whole' '%s' && truncate -s %d '%s'"):format(file, file, size, file))
      local reader = processes.fork(function() -- which would die
        local ok, cut_store = pcall(lmdb_file.open)
        if not ok then return end -- the words say why
        for i = 1, 40 do
          local text = cut_store:get(i, 0, 9000 + i)
          assert(not text or text == ffi.string(cases.bytes(9000 + i, i), 9000 + i))
        end
        files.write(file .. ".hits", tostring(cut_store:stats().hits))
        cut_store:put(50, 0, 9000, 1)
        cut_store:close()
      end)
      assert.equal(0, processes.wait(reader), "cut to " .. size)
      local hits = tonumber(files.read(file .. ".hits") or 0)
      if hits == 40 then whole = whole + 1 else cut = cut + 1 end
    end
    assert.is_true(cut > 5)
  end)

  it("that is cut while it is open gives misses and errors", function()
    for _, size in ipairs { 0, 4096, 8192, 50000, 300000 } do
      sh(("rm -f '%s'*"):format(file))
      local s = lmdb_file.open()
      for i = 1, 40 do s:put(i, 0, 9000 + i, i) end
      s:close()
      local user = processes.fork(function() -- which would be killed
        local cut = lmdb_file.open()
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
    local s = lmdb_file.open()
    for i = 1, 5 do s:put(i, 0, 9000, i) end
    s:close()
    local turn = processes.shared_number()
    local grower = processes.fork(function()
      processes.wait_until(function() return turn[0] == 1 end, "the file is open")
      local other = lmdb_file.open()
      for i = 10, 60 do assert(other:put(i, 0, 9000, i) == 1) end
      other:close()
      turn[0] = 2
    end)
    local user = processes.fork(function()
      local cut, found = lmdb_file.open(), 0
      cut:holds(1, 0, 9000, 1)
      turn[0] = 1
      processes.wait_until(function() return turn[0] == 2 end, "the file is longer")
      sh(("truncate -s %d '%s'"):format(#files.read(file) - 200000, file))
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
    files.write(file, ("not a database "):rep(1000))
    fails(C.kvl_store_open("lmdb:" .. file, 0, 0, out_store), file, "not an LMDB file")
    sh(("rm -f '%s'*"):format(file))
    lmdb_file.edit(nil, function(_, put) put("theirs", "value") end)
    fails(C.kvl_store_open("lmdb:" .. file, 0, 0, out_store),
      "an LMDB file of another program")
    lmdb_file.edit(nil, function(get) assert.equal("value", get "theirs") end)
  end)

  it("of another version is refused", function()
    lmdb_file.open():close()
    lmdb_file.edit(nil, function(get, put) put("kvlab", flipped(get "kvlab", 4)) end)
    fails(C.kvl_store_open("lmdb:" .. file, 0, 0, out_store), file,
      "MDB_VERSION_MISMATCH")
  end)

  it("is opened once by a process, by whatever name", function()
    local s = lmdb_file.open()
    sh(("ln -s '%s' '%s.link'"):format(file, file))
    fails(C.kvl_store_open("lmdb:" .. file .. ".link", 0, 0, out_store),
      file .. " is open in this process")
    s:close()
    cases.open("lmdb:" .. file .. ".link"):close()
  end)

  it("grows beyond its first map", function()
    local s, n = lmdb_file.open(), support.is_hostile and 20000 or 2000000
    for i = 1, 50 do assert.equal(1, s:put(i, 0, n, i)) end
    for i = 1, 50 do s:holds(i, 0, n, i) end
    assert.is_true(#files.read(file) > 50 * n)
    assert.equal(0, s:stats().errors)
    s:close()
  end)

  it("keeps what was put, and begins anew when the machine went down before a sync",
    function()
      local note = file .. "-unsynced"
      local s = lmdb_file.open()
      s:put(1, 0, 100, 1)
      assert.equal(36, #files.read(note))
      kv.check(C.kvl_store_sync(s.handle))
      assert.is_nil(files.read(note))
      s:put(2, 0, 100, 2)
      assert.equal(36, #files.read(note))
      s:close()
      assert.is_nil(files.read(note))
      s = lmdb_file.open()
      s:holds(1, 0, 100, 1)
      s:holds(2, 0, 100, 2)
      assert.is_nil(files.read(note)) -- who only reads risks nothing
      s:put(3, 0, 100, 3)
      s:close()
      files.write(note, files.read "/proc/sys/kernel/random/boot_id":sub(1, 36))
      s = lmdb_file.open()
      s:holds(3, 0, 100, 3)
      s:close()
      files.write(note, ("0"):rep(36))
      s = lmdb_file.open()
      assert.equal(0, s:stats().records)
      assert.equal(1, s:stats().damaged)
      assert.matches("the machine went down before the file was synced", s:problem())
      s:put(4, 0, 100, 4)
      s:holds(4, 0, 100, 4)
      s:close()
    end)
end)
