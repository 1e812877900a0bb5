--- Block stores: putting records (E20), getting them (E21) and looking up keys (E22), by
-- one thread of the host. lmdb uses a temporary file, or the one of --set lmdb=FILE.
-- redis has rows only with --set redis=URL.
local ffi = require "ffi"
local kv = require "kvlab"
local set = require("kvlab.command_line").set

local C, check = kv.C, kv.check
local KIB, ROUNDS, BYTES = 1024, 7, 128 * 1024 * 1024

local function clock_us() return tonumber(C.kvl_clock_ns()) * 1e-3 end

--- Returns an open store, `count` keys, and a function that removes the records,
-- closes the store and removes its file.
local function open(kind, count)
  local file = kind == "lmdb" and (set.lmdb or os.tmpname())
  if file then os.remove(file) end
  local url = kind == "redis" and set.redis or kind .. ":" .. (file or "")
  local store = kv.store(url, { model = "bench", block_size = 1 })
  local tokens = {}
  for i = 1, count do tokens[i] = i end
  local keys = store:keys(tokens)
  return store, keys, function()
    for i = 0, count - 1 do store:remove(keys[i], 0) end
    store:close()
    if file then os.remove(file) end
    if file then os.remove(file .. "-lock") end
  end
end

--- The microseconds of one of `count` calls of fn(i): the median of the rounds.
local function time(count, fn)
  local rounds = {}
  for round = 0, ROUNDS do -- round 0 allocates memory and file
    local start = clock_us()
    for i = 0, count - 1 do fn(i) end
    if round > 0 then rounds[round] = (clock_us() - start) / count end
  end
  return kv.statistics.median(rounds)
end

local function put_and_get(kind, bytes, what)
  return function(b)
    local count = BYTES / (b.quick and 16 or 1) / bytes
    local store, keys, close = open(kind, count)
    local source = kv.pinned(b.device, "f32", { 1, bytes / 4 })
    check(C.kvl_random(source, C.KVL_RANDOM_NORMAL, 0, 1, 1, 0))
    b.device:sync()
    local from = ffi.cast("uint8_t *", source.ptr)
    local to = ffi.new("uint8_t[?]", bytes)
    local handle, us = store.handle, nil
    local put_us = time(count, function(i)
      assert(check(C.kvl_store_put(handle, keys[i], 0, from, bytes)) == 1)
    end)
    if what == "get" then
      us = time(count, function(i)
        assert(check(C.kvl_store_get(handle, keys[i], 0, to, bytes)) == 1)
      end)
      assert(ffi.string(to, bytes) == ffi.string(from, bytes), "other bytes")
    end
    close()
    return { us = us or put_us, bytes = bytes, limit = "none" } -- in the caches
  end
end

local function look_up(kind)
  return function()
    local count = 1024
    local store, keys, close = open(kind, count)
    local byte = ffi.new("uint8_t[1]", 1)
    for i = 0, count - 1 do
      if i ~= 700 then check(C.kvl_store_put(store.handle, keys[i], 0, byte, 1)) end
    end
    local found = ffi.new("uint8_t[?]", count)
    local us = time(20, function()
      assert(check(C.kvl_store_find(store.handle, keys, count, 0, found)) == 700)
    end)
    close()
    return { us = us, note = ("%.2f M lookups/s"):format(count / us) }
  end
end

return function(b)
  for _, kind in ipairs(set.redis and { "memory", "lmdb", "redis" }
                        or { "memory", "lmdb" }) do
    for _, kib in ipairs { 64, 1024 } do
      b:case { id = "E20", name = ("%s store, put %d KiB"):format(kind, kib),
               setup = put_and_get(kind, kib * KIB, "put") }
      b:case { id = "E21", name = ("%s store, get %d KiB"):format(kind, kib),
               setup = put_and_get(kind, kib * KIB, "get") }
    end
    b:case { id = "E22", name = ("%s store, look up 1024 keys"):format(kind),
             setup = look_up(kind) }
  end
end
