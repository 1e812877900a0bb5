--- `kv.prefetch { store = … }` makes a prefetcher, which brings blocks from a store into
-- a cache while the device computes. Tasks wait by priority. Worker threads read their
-- records, layer 0 of all blocks first, and copy them to the device beside its other
-- work.
--
--   local prefetcher = kv.prefetch { store = store }
--   local ticket = prefetcher:submit { request = 7, priority = prefetcher.HIGH,
--                                      cache = cache, keys = keys, blocks = { 4, 5, 6 } }
--   …                                             -- other requests' steps
--   local result = ticket:wait()                  -- or layer by layer:
--   for layer = 0, layers - 1 do ticket:wait_layer(layer) … end
--
-- It is no error if the store lacks a block's key. The first result.leading blocks have
-- arrived, and result.arrived says which other blocks have. Source: UCM's GSA
-- (PrefetchEngine). Its submit_prefetch is prefetcher:submit, its wait_for_completion is
-- ticket:wait, and its get_prefetched_kv is the cache's own blocks.
local arguments = require "kvlab.arguments"
local ffi = require "ffi"
local device = require "kvlab.tensor.device"
local kinds = require "kvlab.tensor.kinds"
local library = require "kvlab.library"
local options = require "kvlab.options"
local protected = require "kvlab.protected"
local tensor = require "kvlab.tensor.tensor"

local C, check = library.C, library.check
local M = {}

local out_handle, out_ticket = ffi.new "kvl_prefetch *[1]", ffi.new "kvl_ticket *[1]"
local options_c, task = ffi.new "kvl_prefetch_options", ffi.new "kvl_prefetch_task"
local result_c, stats_c = ffi.new "kvl_prefetch_result", ffi.new "kvl_prefetch_stats"
local key_pointer, block_array = ffi.typeof "const kvl_key *", ffi.typeof "int32_t[?]"

--- Converts seconds (nil: as long as it takes) to microseconds for the library.
local function timeout_us(what, seconds)
  if seconds == nil then return -1 end
  if type(seconds) ~= "number" or seconds < 0 or seconds ~= seconds then
    error(("%s: timeout is %s, expected seconds"):format(what, tostring(seconds)), 3)
  end
  return math.min(math.floor(seconds * 1e6), 2 ^ 53)
end

-- ---- ticket ---------------------------------------------------------------------------

---@class kvlab.PrefetchResult
---@field state string       "completed" or "cancelled"
---@field blocks integer     that have arrived, with all of their layers
---@field leading integer    of them, those before the first that has not
---@field missing integer    keys that lacked a record
---@field arrived boolean[]  for each key
---@field bytes integer      read
---@field us_queued number   before it ran
---@field us_reading number  in the store
---@field us_copying number  on the device's queue, while there was something to copy

--- The result of a ticket that is over. The cache takes note of its bytes, once.
local function new_result(self)
  local arrived, cache = {}, self.cache
  self.cache = nil
  local so_far = cache and rawget(cache, "bytes_prefetched") -- nil: it is closed
  if so_far then cache.bytes_prefetched = so_far + tonumber(result_c.bytes) end
  for i = 1, result_c.n do arrived[i] = result_c.arrived[i - 1] == 1 end
  return {
    state = result_c.state == C.KVL_PREFETCH_COMPLETED and "completed" or "cancelled",
    blocks = result_c.blocks, leading = result_c.leading, missing = result_c.missing,
    arrived = arrived, bytes = tonumber(result_c.bytes), us_queued = result_c.us_queued,
    us_reading = result_c.us_reading, us_copying = result_c.us_copying,
  }
end

---@class kvlab.PrefetchTicket
local Ticket = {}
Ticket.__index = Ticket

local function ticket_of(self)
  return self.handle or error("prefetch: the ticket is closed", 3)
end

--- Waits until the task is over, for at most `seconds`. Raises the failure of the store
-- or the device.
---@return kvlab.PrefetchResult|nil, string|nil  nil, "timeout"
function Ticket:wait(seconds)
  local us = timeout_us("wait", seconds)
  if check(C.kvl_ticket_wait(ticket_of(self), us, result_c)) == 0 then
    return nil, "timeout"
  end
  return new_result(self)
end

--- The result, if the task is over.
---@return kvlab.PrefetchResult|nil, string|nil  nil, "pending"
function Ticket:poll()
  if check(C.kvl_ticket_wait(ticket_of(self), 0, result_c)) == 0 then
    return nil, "pending"
  end
  return new_result(self)
end

--- Waits until a layer has been read, and makes the stream (the current one) wait for the
-- layer's copies. Returns false if some block of the layer will not come.
function Ticket:wait_layer(layer, stream)
  options.argument("wait_layer", "layer", layer, options.integer)
  if stream ~= nil then device.stream_argument("wait_layer", stream) end
  return check(C.kvl_ticket_wait_layer(ticket_of(self), layer, stream)) == 1
end

--- Stops the task at its next record. Returns false if the task was already over.
function Ticket:cancel() return check(C.kvl_ticket_cancel(ticket_of(self))) == 1 end

--- Frees the ticket; the task goes on.
function Ticket:close()
  protected.close(self, "handle", C.kvl_ticket_close)
end

-- ---- prefetcher -----------------------------------------------------------------------

---@class kvlab.Prefetch
local Prefetch = { URGENT = 0, HIGH = 1, NORMAL = 2, LOW = 3 }
Prefetch.__index = Prefetch

local DEFAULTS = { prefetch_workers = 4, max_pending_prefetch = 64,
                   bytes_staging = 32 * 1024 * 1024 }
local OPTIONS = {
  store = options.required { "a store that is open", function(x)
    return type(x) == "table" and type(x.handle) == "cdata"
      and ffi.istype("kvl_store *", x.handle)
  end },
  device = kinds.device, prefetch_workers = options.within(1, 64),
  max_pending_prefetch = options.within(1, 2 ^ 20), bytes_staging = options.any_whole,
}

--- Opens a prefetcher over a store.
---@param o table  store; device (--device's); prefetch_workers (4) threads;
--                 max_pending_prefetch (64): how many tasks may wait; bytes_staging (32
--                 MiB): pinned memory for records on their way to a GPU, twice a block of
--                 a layer for every worker at least
---@return kvlab.Prefetch
function M.prefetch(o)
  options.check("prefetch", o, OPTIONS)
  local function option(name) return o[name] or DEFAULTS[name] end
  options_c.workers = option "prefetch_workers"
  options_c.max_pending = option "max_pending_prefetch"
  options_c.bytes_staging = option "bytes_staging"
  local dev = device.device(o.device)
  local handle = protected.open(C.kvl_prefetch_close, out_handle, C.kvl_prefetch_open,
    dev, o.store.handle, options_c, out_handle)
  return setmetatable({ device = dev, store = o.store, buffer = block_array(64),
    room = 64, handle = handle }, Prefetch)
end

local function handle_of(self)
  return self.handle or error("the prefetcher is closed", 3)
end

local TASK = {
  request = options.required(options.any_integer), priority = options.integer,
  cache = options.required { "a cache", function(x)
    return type(x) == "table" and tensor.is_tensor(x.memory) and x.tier ~= nil
      and type(x.layers) == "number"
  end },
  keys = options.required { "an array of kvl_key", function(x)
    return type(x) == "cdata" and tostring(ffi.typeof(x)):find "struct kvl_key [[*]"
  end },
  blocks = options.required { "a list", options.table[2] },
  first_layer = options.integer, layers = options.integer,
  timeout = { "seconds", function(x) return options.number[2](x) and x >= 0 end },
}

--- Writes the blocks to an array of the prefetcher. Returns the array and the number of
-- blocks.
local function fill_blocks(self, blocks)
  local n = #blocks
  if n > self.room then
    self.room = 2 * n
    self.buffer = block_array(self.room)
  end
  for i = 1, n do
    if not options.integer[2](blocks[i]) then
      error(("prefetch: block %d %s"):format(i,
        options.problem(blocks[i], options.integer)), 3)
    end
    self.buffer[i - 1] = blocks[i]
  end
  return n
end

--- Keys for n blocks.
local function pointer_to_keys(keys, n)
  local pointer = ffi.cast(key_pointer, keys)
  local size = ffi.sizeof(keys)
  if tostring(ffi.typeof(keys)):find("[", 1, true) and size < n * 16 then
    error(("prefetch: %d keys for %d blocks"):format(size / 16, n), 3)
  end
  return pointer
end

--- Queues a task.
---@param o table  request: whose it is, a whole number; cache; keys: an array of kvl_key;
--                 blocks: the block of the cache for each, a list; first_layer (0) and
--                 layers (the rest); priority (NORMAL): lower goes first; timeout (none):
--                 seconds to wait while max_pending_prefetch tasks wait
---@return kvlab.PrefetchTicket|nil, string|nil  nil, "full"
function Prefetch:submit(o)
  local handle = handle_of(self)
  options.check("submit", o, TASK)
  local cache, first = o.cache, o.first_layer or 0
  local layers = o.layers or cache.layers - first
  if first < 0 or layers < 0 or first + layers > cache.layers then
    error(("prefetch: layers %d ... %d, expected some of 0 ... %d"):format(first,
      first + layers - 1, cache.layers - 1), 2)
  end
  local us = timeout_us("submit", o.timeout)
  task.n = fill_blocks(self, o.blocks)
  task.keys, task.blocks = pointer_to_keys(o.keys, task.n), self.buffer
  task.request, task.priority = o.request, o.priority or Prefetch.NORMAL
  task.first_layer = first
  cache.tier:written(first, layers, o.blocks)
  local memory = cache.memory:narrow(first, layers)
  task.memory = memory
  local status = C.kvl_prefetch_submit(handle, task, us, out_ticket)
  memory:free()
  if check(status) == 0 then return nil, "full" end
  return setmetatable({ handle = ffi.gc(out_ticket[0], C.kvl_ticket_close),
                        cache = cache }, Ticket)
end

--- Cancels every task of a request. Returns the number of tasks that were not over.
function Prefetch:cancel(request)
  options.argument("prefetch", "request", request, options.any_integer)
  return check(C.kvl_prefetch_cancel(handle_of(self), request))
end

--- Gives the waiting tasks of a request another priority. Returns the number of these
-- tasks.
function Prefetch:reprioritise(request, priority)
  options.argument("prefetch", "request", request, options.any_integer)
  options.argument("prefetch", "priority", priority, options.integer)
  return check(C.kvl_prefetch_reprioritise(handle_of(self), request, priority))
end

local STATS = { "submitted", "completed", "cancelled", "failed", "hits", "misses",
                "bytes", "waits", "us_stalled", "pending", "pending_peak" }

--- The counters: tasks submitted, completed, cancelled, failed, pending (waiting now) and
-- pending_peak; hits and misses (records found, and keys that lacked one); bytes; waits
-- (calls that had to wait) and us_stalled, the microseconds that they took.
function Prefetch:stats()
  check(C.kvl_prefetch_stats_get(handle_of(self), stats_c))
  local t = {}
  for _, key in ipairs(STATS) do t[key] = tonumber(stats_c[key]) end
  return t
end

--- Closes the prefetcher: cancels waiting tasks and stops running ones. Tickets stay
-- valid.
function Prefetch:close()
  protected.close(self, "handle", C.kvl_prefetch_close)
end

arguments.methods(Ticket, "a ticket", {})
arguments.methods(Prefetch, "a prefetcher", {})

return M
