--- A cache is the paged KV memory of all layers: its format, the memory tier that it lies
-- in, and the pool that counts its blocks.
local arguments = require "kvlab.arguments"
local ffi = require "ffi"
local batch = require "kvlab.memory.batch"
local closed = require "kvlab.closed"
local device_of = require("kvlab.tensor.device").device
local formats = require "kvlab.memory.formats"
local host_tier = require "kvlab.memory.host_tier"
local journal = require "kvlab.memory.journal"
local kinds = require "kvlab.tensor.kinds"
local library = require "kvlab.library"
local options = require "kvlab.options"
local protected = require "kvlab.protected"
local resident = require "kvlab.memory.resident"
local sequence = require "kvlab.memory.sequence"

local C, check = library.C, library.check
local M = {}

---@class kvlab.Cache
---@field device kvlab.Device
---@field layers integer
---@field blocks integer       blocks of each layer
---@field tables string        one, layer or head: which tables a sequence has
---@field pages integer        of the pool: the blocks of all layers where tables are by
--                             layer, those of all KV heads, too, where they are by head
---@field block_size integer   tokens of a block
---@field kv_heads integer
---@field head_dim integer   numbers of a key
---@field value_dim integer  numbers of a value
---@field format kvlab.Format  what a page holds
---@field dtype string         of keys and values that are read out of pages
---@field tier kvlab.Resident|kvlab.HostTier  where KV memory lies
---@field journal kvlab.Journal  what a failed step takes back
---@field followers table      others with memory for each of its blocks, as keys: their
--                             copy_blocks(from, to) copies along
---@field graphs table         recorded steps over the cache, as keys: they hold its
--                             memory, so they are closed with it
---@field memory kvlab.Tensor  [layers, blocks, 2, kv_heads, block_size, head_dim], or u8
--                             [layers, blocks, bytes] of int8, on the device or, with
--                             offload, in pinned host memory; of tables by layer [1,
--                             pages, …], and by head with one KV head in a page
local Cache = {}
Cache.__index = Cache

---@class kvlab.CacheStats  what Cache:stats returns, which lists its numbers

--- The set of open caches, as keys.
M.open = setmetatable({}, { __mode = "k" })

local OPTIONS = {
  layers = options.required(options.count), blocks = options.required(options.count),
  block_size = options.required(options.count),
  kv_heads = options.required(options.count), head_dim = options.required(options.count),
  value_dim = options.count, device = kinds.device,
  format = options.one_of(unpack(formats.NAMES)),
  watermark = options.whole, k_scale = kinds.tensor, v_scale = kinds.tensor,
  offload = host_tier.OFFLOAD, tables = options.one_of("one", "layer", "head"),
}

--- Raises for what a cache whose tables are by layer or by head does not have.
local function check_tables(o)
  local lacks = o.offload and "KV in host memory"
    or o.tables == "head" and (o.k_scale or o.v_scale) and "scales of KV heads"
  if lacks then
    error(("cache: tables by %s do not go with %s, expected tables = \"one\""):format(
      o.tables, lacks), 3)
  end
end

--- Opens KV memory for `blocks` blocks in each of `layers` layers.
---@param o table  layers, blocks, block_size, kv_heads, head_dim; value_dim: a value is
--                 the first value_dim numbers of its key, as that of a latent is, and
--                 keys alone are held (values are as long as keys);
--                 device (--device's), format of a page (bf16; f32 f16 f8e4m3 int8
--                 f8_latent); watermark (0): blocks that an append must leave free;
--                 k_scale, v_scale: of an f8e4m3 cache, f32 [layers, kv_heads] (1): it
--                 holds k / k_scale;
--                 tables ("one"): a sequence has one block table for all KV, or one for
--                 each "layer", or for each layer and KV "head". Then pages of one pool
--                 serve all layers and heads, and any layer or head can take what another
--                 gives back;
--                 offload: KV lies in host memory, with these options (host_tier.lua)
---@return kvlab.Cache
function M.cache(o)
  o = options.check("cache", o, OPTIONS)
  local device, tables = device_of(o.device), o.tables or "one"
  if tables ~= "one" then check_tables(o) end
  local self = setmetatable({
    device = device, tables = tables,
    cut_layers = tables == "one" and 1 or o.layers,
    cut_heads = tables == "head" and o.kv_heads or 1,
    layers = o.layers, blocks = o.blocks, block_size = o.block_size,
    kv_heads = o.kv_heads, head_dim = o.head_dim,
    value_dim = o.value_dim or o.head_dim, layer_views = {},
    followers = setmetatable({}, { __mode = "k" }),
    graphs = setmetatable({}, { __mode = "k" }),
    bytes_copied = 0, bytes_prefetched = 0,
  }, Cache)
  self.pages = o.blocks * self.cut_layers * self.cut_heads
  self.format = formats.new({ format = o.format or "bf16", layers = o.layers,
    kv_heads = o.kv_heads / self.cut_heads, block_size = o.block_size,
    head_dim = o.head_dim, value_dim = o.value_dim,
    k_scale = o.k_scale, v_scale = o.v_scale }, 2)
  self.dtype = self.format.dtype
  self.tier = o.offload and host_tier.new(self, o.offload) or resident.new(self)
  local out = ffi.new "kvl_pool *[1]"
  self.pool = protected.open(C.kvl_pool_close, out, C.kvl_pool_open, self.pages,
    o.block_size, (o.watermark or 0) * self.pages / o.blocks, out)
  self.journal = journal.new(self)
  self.memory = self.tier:allocate { o.layers / self.cut_layers, self.pages,
    unpack(self.format.dims) }
  for layer = 0, o.layers - 1 do
    self.layer_views[layer] = self.memory:index(tables == "one" and layer or 0)
  end
  M.open[self] = true
  return self
end

--- One layer's memory, [blocks, 2, kv_heads, block_size, head_dim], of int8 u8 [blocks,
-- bytes]. Layers count from 0.
function Cache:layer(layer)
  return self.layer_views[layer]
    or options.fail(("layer is %s, expected 0 ... %d"):format(options.shown(layer),
      self.layers - 1))
end

--- The number of blocks that no sequence holds; with tables by layer or head, the number
-- of whole blocks (a page in every layer and head) that the free pages make.
function Cache:blocks_free()
  return math.floor(self:pages_free() * self.blocks / self.pages)
end

--- The number of pages that no sequence holds.
function Cache:pages_free() return C.kvl_pool_blocks_free(self.pool) end

local pool_stats = ffi.new "kvl_pool_stats"
local COUNTERS = { "pages_evicted", "bytes_evicted", "bytes_moved", "bytes_to_device",
                   "bytes_to_host", "bytes_copied" }
local SINCE = options.optional({ "an earlier result of stats", function(x)
  if type(x) ~= "table" then return false end
  for _, name in ipairs(COUNTERS) do
    if not options.number[2](x[name]) then return false end
  end
  return true
end })

--- Bytes of one of the cache's `pages`: of a block in all layers, unless the tables are
-- by layer or head.
local function bytes_page(self)
  return self.format:bytes_page() * self.layers / self.cut_layers
end

--- What KV memory holds and what it moved, in bytes of K and V:
--   bytes_held       of the pages that are held now, by sequences or otherwise
--   bytes_peak       the most that were held at once, since the cache was made or
--                    reset_peak; pages of a step that then failed count, too
--   bytes_evicted    of the pages that evictions gave back, less those that they took for
--                    the tokens that stay. An eviction that is undone does not count
--   bytes_moved      the sum of the next three, since the cache was made
--   bytes_to_device  over the link to the device: by the ring, the hot cache, prefetches,
--                    and ctx:attention_weights
--   bytes_to_host    over the link to host memory
--   bytes_copied     to other pages: shared blocks that a sequence writes to, forks where
--                    tokens are evicted, tokens that stay after a prompt, and in decode
--                    tokens that others replace, which are kept until the step is over
-- and pages_held, pages_peak, pages_evicted, of the cache's `pages` of bytes_page each.
-- Waits for the device if KV lies in host memory. A prefetch counts once its ticket was
-- found to be over. Not counted are what Store:get_block reads, which is given memory and
-- no cache (Store:stats has it), what scores read in host memory (a probe counts it), and
-- copies in a graph that a script recorded by itself.
-- since: an earlier result, from which evictions and bytes moved are counted then; the
-- peak is since reset_peak.
---@param since? kvlab.CacheStats
---@return kvlab.CacheStats
function Cache:stats(since)
  check(C.kvl_pool_stats_get(self.pool, pool_stats))
  local to_device, to_host = self.tier:bytes()
  local page, out = bytes_page(self), {}
  out.bytes_to_device = to_device + self.bytes_prefetched
  out.bytes_to_host, out.bytes_copied, out.bytes_page = to_host, self.bytes_copied, page
  out.bytes_moved = out.bytes_to_device + to_host + self.bytes_copied
  for _, name in ipairs { "held", "peak", "evicted" } do
    local pages = tonumber(pool_stats["blocks_" .. name])
    out["pages_" .. name], out["bytes_" .. name] = pages, pages * page
  end
  for _, name in ipairs(since and COUNTERS or {}) do
    out[name] = out[name] - since[name]
  end
  return out
end

--- Starts bytes_peak again from what is held now.
function Cache:reset_peak() check(C.kvl_pool_reset_peak(self.pool)) end

--- Makes an empty sequence.
---@return kvlab.Sequence
function Cache:sequence() return sequence.new(self) end

--- Makes a reusable batch. limits: max_seqs (16); max_tokens (512) of one step;
-- max_blocks of one sequence (the whole cache); fixed_width (false): make tables
-- max_blocks wide from the start, so that a step that is recorded in a graph serves any
-- length.
---@return kvlab.Batch
---@param limits? table
---@return kvlab.Batch
function Cache:batch(limits)
  local new = batch.new(self, limits)
  return new
end

--- Runs fn(...) and returns what it returns. If fn raises, every step that began in it is
-- undone before the error is passed on: the sequences have the lengths and blocks that
-- they had before, and so has what policies store for them. So the same call may be tried
-- again. An engine runs each of its calls in a transaction; use this one to make several
-- calls happen together or not at all.
---@param fn fun(...): ...
function Cache:transaction(fn, ...)
  options.argument("transaction", "fn", fn, options.fn)
  return self.journal:transaction(fn, ...)
end

--- Copies blocks in every layer, or the pages of tables by layer or head; from and to are
-- i32 [n].
function Cache:copy_blocks(from, to)
  options.argument("copy_blocks", "from", from, kinds.tensor)
  options.argument("copy_blocks", "to", to, kinds.tensor)
  for layer = 0, self.layers / self.cut_layers - 1 do
    self.tier:before_copy(layer, to)
    self.format:copy(from, to, self:layer(layer))
  end
  for follower in pairs(self.followers) do follower:copy_blocks(from, to) end
  self.bytes_copied = self.bytes_copied + tonumber(from.count) * bytes_page(self)
end

--- Notes that `tokens` tokens of a layer's table were copied: of all KV heads that a page
-- holds.
function Cache:count_copied(tokens)
  self.bytes_copied = self.bytes_copied
    + tokens * self.kv_heads / self.cut_heads * self:bytes_token()
end

--- Bytes of K and V of one token in one layer and KV head.
function Cache:bytes_token() return self.format:bytes_token() end

--- Makes the bookkeeping of a cache without its memory: sequence, blocks_free, blocks and
-- block_size exist. Simulations of a server use it.
---@param blocks integer
---@param block_size integer
function M.pool(blocks, block_size)
  local out = ffi.new "kvl_pool *[1]"
  local pool = protected.open(C.kvl_pool_close, out, C.kvl_pool_open, blocks, block_size,
    0, out)
  local own = arguments.own -- it is no cache, which Cache's checks ask for
  return { pool = pool, blocks = blocks, block_size = block_size, tables = "one",
           pages = blocks, layers = 1, kv_heads = 1, cut_layers = 1, cut_heads = 1,
           pages_free = own(Cache.pages_free), sequence = own(Cache.sequence),
           blocks_free = own(Cache.blocks_free) }
end

--- Frees the memory and the blocks. Sequences of the cache raise from now on.
function Cache:close()
  M.open[self] = nil
  for graph in pairs(self.graphs) do graph:close() end
  self.tier:close()
  self.memory:free()
  for _, view in pairs(self.layer_views) do view:free() end
  protected.close(self, "pool", C.kvl_pool_close)
  closed(self, "cache")
end

arguments.methods(Cache, "a cache", {
  stats = { since = SINCE }, count_copied = { tokens = options.whole },
})

return M
