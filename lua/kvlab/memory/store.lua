--- A block store keeps KV blocks longer than a request, a process or a machine lives, and
-- finds them by their tokens (docs/store.md).
--
--   local store = kv.store("lmdb:blocks.lmdb", { capacity = 8e9, block_size = 16,
--     model = kv.store.model("llama-3-8b", cache) })
--   local keys, n = store:keys(tokens)
--   for b = 0, store:find(keys, n, cache.layers) - 1 do ... store:get_block(...) end
local arguments = require "kvlab.arguments"
local constructor = require "kvlab.constructor"
local ffi = require "ffi"
local library = require "kvlab.library"
local options = require "kvlab.options"
local protected = require "kvlab.protected"
local secrets = require "kvlab.secrets"
local tensor = require "kvlab.tensor.tensor"

local C, check = library.C, library.check
local M = {}

local out_store = ffi.new "kvl_store *[1]"
local stats = ffi.new "kvl_store_stats"
local words = ffi.new "char[320]"
local key_list = ffi.typeof "kvl_key[?]"

local BYTES = { "a number of bytes >= 0", function(x)
  return options.not_negative[2](x) and x < 2 ^ 53
end }
local OPTIONS = { capacity = BYTES, model = options.string, block_size = options.count,
                  timeout_ms = options.whole }

---@class kvlab.Store
---@field url string
---@field model string|nil
---@field block_size integer|nil
---@field capacity integer|nil  in bytes
---@field handle ffi.cdata*  kvl_store *; nil once it is closed
local Store = {}

local argument = options.argument
local CACHE = { "a cache", function(x)
  return type(x) == "table" and type(x.layers) == "number"
    and type(x.kv_heads) == "number" and type(x.head_dim) == "number"
    and type(x.block_size) == "number" and type(x.format) == "table"
end }
local KEY = { "a key", function(x)
  return type(x) == "cdata" and tostring(ffi.typeof(x)):find("kvl_key", 1, true) ~= nil
end }
local KEYS = { "keys, from store:keys", function(x)
  return type(x) == "cdata" and tostring(ffi.typeof(x)):find("kvl_key", 1, true) ~= nil
end }

--- How many keys an array has; nil for a pointer into an array, whose length is not
-- known.
local function most_keys(keys)
  local is_array = tostring(ffi.typeof(keys)):find("[", 1, true)
  return is_array and math.floor(ffi.sizeof(keys) / 16) or 2 ^ 31 - 1
end
Store.__index = Store

--- A text with everything that makes blocks of `cache` unusable for other models and
-- caches.
---@param name string  of the model and its weights
---@param cache kvlab.Cache
function M.model(name, cache)
  argument("store.model", "name", name, options.string)
  argument("store.model", "cache", cache, CACHE)
  local format = "%s layers=%d kv_heads=%d head_dim=%d block_size=%d dtype=%s layout=%s"
  local layout = cache.format.is_shared and "hbd/" .. cache.value_dim or "2hbd"
  return format:format(name, cache.layers, cache.kv_heads, cache.head_dim,
    cache.block_size, cache.format.name, layout)
end

--- Opens a store.
---@param url string  memory:  lmdb:PATH  redis[s]://[user[:password]@]host[:port][/db]
---@param o? table  capacity: bytes of blocks (no limit); timeout_ms (1000), for Redis;
--                  model: see M.model, and block_size: for :keys
---@return kvlab.Store
local function open(url, o)
  if type(url) ~= "string" then
    error(("store: url is %s, expected a string"):format(tostring(url)), 2)
  elseif url:find("%z") then
    error("store: url has a byte 0", 2)
  end
  o = options.check("store", o, OPTIONS)
  local handle = protected.open(C.kvl_store_close, out_store, C.kvl_store_open, url,
    o.capacity or 0, o.timeout_ms or 0, out_store)
  return setmetatable({ handle = handle, url = secrets.mask(url), model = o.model,
    block_size = o.block_size, capacity = o.capacity, staging = {} }, Store)
end

local function handle_of(self)
  return self.handle or error("the store is closed", 3)
end

--- Computes the keys of the full blocks of a list of tokens. Returns the keys, which
-- count from 0, and their number.
---@param tokens integer[]
---@param parent? kvlab.BlockKey  the key of the block before the first; none: a text
--                                begins
---@return kvlab.BlockKey[], integer
function Store:keys(tokens, parent)
  if not self.block_size or not (self.model or parent) then
    error("the store was opened without model and block_size, which keys need", 2)
  end
  argument("keys", "tokens", tokens, options.list_of(options.integer))
  if parent ~= nil then argument("keys", "parent", parent, KEY) end
  local count = #tokens
  local ids = ffi.new("int32_t[?]", count)
  for i = 1, count do ids[i - 1] = tokens[i] end
  local keys = key_list(math.floor(count / self.block_size))
  return keys, check(C.kvl_block_keys(self.model, parent, ids, count, self.block_size,
    keys))
end

--- The number of blocks, from the first key on without a gap, whose layers are all in the
-- store.
---@param keys kvlab.BlockKey[]  from :keys
---@param n integer              how many of them
---@param layers integer
---@param first? integer         the first of these layers (0)
function Store:find(keys, n, layers, first)
  local handle = handle_of(self)
  argument("find", "keys", keys, KEYS)
  argument("find", "n", n, options.within(0, most_keys(keys)))
  argument("find", "layers", layers, options.whole)
  argument("find", "first", first, options.optional(options.whole))
  first = first or 0
  for layer = first, first + layers - 1 do
    if n == 0 then break end
    n = check(C.kvl_store_find(handle, keys, n, layer, nil))
  end
  return n
end

--- Host memory with the size of `block`, for blocks that lie on a GPU.
local function staging_for(self, block)
  local dtype, dims = library.dtype_names[block.dtype], { tonumber(block.count) }
  local id = ("%s %s %d"):format(block.device:name(), dtype, dims[1])
  local staging = self.staging[id]
  if not staging then
    staging = tensor.lasting(tensor.pinned, block.device, dtype, dims)
    self.staging[id] = staging
  end
  return staging
end

local view = ffi.new "kvl_tensor" -- of the block that is being moved

--- Calls move(handle, key, layer, host memory, its bytes, staging) for one block, after
-- everything launched before is done. staging is given if the host cannot reach the
-- block.
local function with_block(self, move, key, layer, memory, block)
  local handle = self.handle or error("the store is closed", 3)
  if not tensor.is_tensor(memory) then
    error(("memory is a %s, expected a tensor [blocks, 2, kv_heads, block_size, "
      .. "head_dim]"):format(type(memory)), 3)
  end
  argument("store", "key", key, KEY)
  argument("store", "layer", layer, options.integer)
  argument("store", "block", block, options.integer)
  check(C.kvl_tensor_index(memory, block, view), 3)
  local bytes = view.count * C.kvl_dtype_bytes(view.dtype)
  local is_near = C.kvl_device_is_cpu(view.device) == 1 or memory:is_pinned()
  local staging = not is_near and staging_for(self, view) or nil
  local status = C.kvl_device_sync(view.device)
  if status >= 0 then
    status = move(handle, key, layer, (staging or view).ptr, bytes, staging)
  end
  C.kvl_tensor_close(view)
  return check(status, 3) == 1
end

local function put(handle, key, layer, host, bytes, staging)
  local status = 0
  if staging then
    status = C.kvl_copy(view, staging)
    if status >= 0 then status = C.kvl_device_sync(view.device) end
  end
  return status < 0 and status or C.kvl_store_put(handle, key, layer, host, bytes)
end

local function get(handle, key, layer, host, bytes, staging)
  local status = C.kvl_store_get(handle, key, layer, host, bytes)
  if status == 1 and staging then
    local copied = C.kvl_copy(staging, view)
    if copied < 0 then return copied end
  end
  return status
end

--- Stores block `block` of a layer's memory, on any device, pinned or not. Waits for the
-- device. Returns true, or nil and the reason why it could not be stored.
---@param key kvlab.BlockKey  keys[i]
---@param layer integer
---@param memory kvlab.Tensor cache:layer(layer): [blocks, 2, kv_heads, block_size, ...]
---@param block integer       its physical number
function Store:put_block(key, layer, memory, block)
  if with_block(self, put, key, layer, memory, block) then return true end
  return nil, self:problem()
end

--- Fills block `block` of a layer's memory with the record of `key`. Waits for the
-- device. Returns true; or nil and the reason, and then the block is unchanged.
function Store:get_block(key, layer, memory, block)
  if with_block(self, get, key, layer, memory, block) then return true end
  return nil, "not in the store"
end

--- Removes the record of a block in a layer. Returns whether there was one.
function Store:remove(key, layer)
  argument("remove", "key", key, KEY)
  argument("remove", "layer", layer, options.integer)
  return check(C.kvl_store_remove(handle_of(self), key, layer)) == 1
end

--- Makes the records of an lmdb store survive a power failure.
function Store:sync() check(C.kvl_store_sync(handle_of(self))) end

--- The message of the last damaged record or error; nil if there was none.
---@return string|nil
function Store:problem()
  local n = check(C.kvl_store_problem(handle_of(self), words, ffi.sizeof(words)))
  return n > 0 and ffi.string(words, n) or nil
end

--- The counters of this store since it was opened: hits, misses, puts, evictions,
-- damaged, errors, bytes_read, bytes_written. bytes_held and records are the present
-- state; they are nil if not known.
function Store:stats()
  check(C.kvl_store_stats_get(handle_of(self), stats))
  local t = {}
  for _, name in ipairs { "hits", "misses", "puts", "evictions", "damaged", "errors",
                          "bytes_read", "bytes_written", "bytes_held", "records" } do
    local n = tonumber(stats[name])
    t[name] = n >= 0 and n or nil
  end
  return t
end

--- Syncs the store, and frees its memory, file and connections.
function Store:close()
  if not self.handle then return end
  protected.close(self, "handle", C.kvl_store_close)
  for _, staging in pairs(self.staging) do staging:free() end
end

arguments.methods(Store, "a store", {})

return constructor(M, open)
