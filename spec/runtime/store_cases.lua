--- What the specs of stores share: opening one by the C interface, contents that tell who
-- wrote them, and a store in plain Lua to compare with.
local ffi = require "ffi"
local kv = require "kvlab"

local C = kv.C
local M = {}

local out = ffi.new "kvl_store *[1]"

---@class spec.Store
local Store = {}
Store.__index = Store

--- Open by the C interface; closed by the collector or :close().
function M.open(url, capacity, timeout_ms)
  kv.check(C.kvl_store_open(url, capacity or 0, timeout_ms or 0, out))
  return setmetatable({ handle = ffi.gc(out[0], C.kvl_store_close) }, Store)
end

function Store:close() C.kvl_store_close(ffi.gc(self.handle, nil)) end

--- A key for a number.
function M.key(i)
  return ffi.new("kvl_key", i * 0x9e3779b97f4a7c15ULL, i * 0xc2b2ae3d27d4eb4fULL)
end

--- n bytes that all depend on `version`.
function M.bytes(n, version)
  local b = ffi.new("uint8_t[?]", n)
  for i = 0, n - 1 do b[i] = (version * 31 + i * (version % 7 + 1)) % 251 end
  return b
end

--- Put n bytes of `version` under key i; what the library returns.
function Store:put(i, part, n, version)
  return C.kvl_store_put(self.handle, M.key(i), part, M.bytes(n, version), n)
end

--- The n bytes under key i as a string; nil for a miss, which must leave the buffer as it
-- was.
function Store:get(i, part, n)
  local buffer = ffi.new("uint8_t[?]", n + 8)
  ffi.fill(buffer, n + 8, 0xA5)
  local status = kv.check(C.kvl_store_get(self.handle, M.key(i), part, buffer, n))
  local text, poison = ffi.string(buffer, n), ("\xA5"):rep(n)
  assert(ffi.string(buffer + n, 8) == ("\xA5"):rep(8), "written past the end")
  if status == 1 then return text end
  assert(text == poison, "a miss has written to the buffer")
  return nil
end

--- Raise unless key i holds n bytes of `version`.
function Store:holds(i, part, n, version)
  local text = self:get(i, part, n)
  if text ~= ffi.string(M.bytes(n, version), n) then
    error(("key %d part %d: %s, expected %d bytes of version %d"):format(i, part,
      text and "other bytes" or "a miss", n, version), 2)
  end
end

function Store:remove(i, part)
  return kv.check(C.kvl_store_remove(self.handle, M.key(i), part))
end

--- The leading run and the flags, as text, of keys `from` to `to`.
function Store:find(from, to, part)
  local n = to - from + 1
  local keys, found = ffi.new("kvl_key[?]", n), ffi.new("uint8_t[?]", n)
  ffi.fill(found, n, 9)
  for i = 0, n - 1 do keys[i] = M.key(from + i) end
  local run = kv.check(C.kvl_store_find(self.handle, keys, n, part, found))
  assert(run == kv.check(C.kvl_store_find(self.handle, keys, n, part, nil)))
  local flags = {}
  for i = 0, n - 1 do flags[i + 1] = tostring(found[i]) end
  return run, table.concat(flags)
end

function Store:stats()
  local stats, t = ffi.new "kvl_store_stats", {}
  kv.check(C.kvl_store_stats_get(self.handle, stats))
  for _, name in ipairs { "hits", "misses", "puts", "evictions", "damaged", "errors",
                          "bytes_read", "bytes_written", "bytes_held", "records" } do
    t[name] = tonumber(stats[name])
  end
  return t
end

function Store:problem()
  local text = ffi.new "char[400]"
  return ffi.string(text, kv.check(C.kvl_store_problem(self.handle, text, 400)))
end

-- ---- the same in plain Lua ------------------------------------------------------------

--- A store that holds versions in place of bytes, in the order of their last use.
function M.model(capacity)
  local list, model = {}, { bytes = 0, evictions = 0 }
  local function at(id)
    for i, record in ipairs(list) do
      if record.id == id then return i end
    end
  end
  local function take(i)
    model.bytes = model.bytes - list[i].n
    return table.remove(list, i)
  end
  function model.put(id, n, version)
    if at(id) then take(at(id)) end
    while capacity > 0 and model.bytes + n > capacity do
      take(1)
      model.evictions = model.evictions + 1
    end
    list[#list + 1] = { id = id, n = n, version = version }
    model.bytes = model.bytes + n
  end
  function model.get(id)
    local i = at(id)
    if not i then return nil end
    local record = table.remove(list, i)
    list[#list + 1] = record
    return record
  end
  function model.remove(id)
    local i = at(id)
    return i and take(i) and 1 or 0
  end
  function model.records() return #list end
  return model
end

return M
