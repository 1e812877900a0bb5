--- What the prefetch specs share: a store with random blocks, caches and prefetchers for
-- them, and what has to be in a cache afterwards.
local assert = require "luassert"
local ffi = require "ffi"
local kv = require "kvlab"
local support = require "spec.support"

local C, check = kv.C, kv.check
local cpu = kv.device "cpu"
local M = { LAYERS = 3, BLOCKS = 12, HEADS = 2, SIZE = 4, DIM = 16 }
local LAYERS, BLOCKS, HEADS, SIZE, DIM = M.LAYERS, M.BLOCKS, M.HEADS, M.SIZE, M.DIM

local out_store = ffi.new "kvl_store *[1]"

function M.new_store()
  check(C.kvl_store_open("memory:", 0, 0, out_store))
  local store = { handle = ffi.gc(out_store[0], C.kvl_store_close) }
  function store.close() C.kvl_store_close(ffi.gc(store.handle, nil)) end
  return store
end

function M.keys_of(n, first)
  local keys = ffi.new("kvl_key[?]", n)
  for i = 0, n - 1 do keys[i].lo, keys[i].hi = (first or 0) + i, 7 end
  return keys
end

--- Random KV of `blocks` blocks on the CPU, in the store under keys 0 ... blocks - 1;
-- lacks(block, layer): not this record.
function M.fill(store, dtype, blocks, lacks, layers)
  layers = layers or LAYERS
  local shape = { layers, blocks, 2, HEADS, SIZE, DIM }
  local source = support.randn(cpu, dtype, shape, 5)
  local keys, bytes = M.keys_of(blocks), source:bytes() / (layers * blocks)
  for layer = 0, layers - 1 do
    for i = 0, blocks - 1 do
      if not lacks or not lacks(i, layer) then
        local record = source:index(layer):index(i)
        check(C.kvl_store_put(store.handle, keys + i, layer, record.ptr, bytes))
      end
    end
  end
  return source, keys
end

function M.new_cache(dev, dtype, offload)
  local cache = kv.cache { device = dev, layers = LAYERS, blocks = BLOCKS, format = dtype,
    kv_heads = HEADS, block_size = SIZE, head_dim = DIM,
    offload = offload and { slots = 1, slot_blocks = 1, max_seqs = 1, max_tokens = 4,
                            hot_slots = 4 } }
  check(C.kvl_fill(cache.memory, -3))
  return cache
end

--- Block `block` of every layer is the source's `i`; nil: untouched.
function M.expect_block(cache, block, source, i)
  for layer = 0, LAYERS - 1 do
    local got = cache:layer(layer):index(block):cast("f32")
    local want = i and source:index(layer):index(i):cast("f32") or kv.full(cpu, "f32",
      { 2, HEADS, SIZE, DIM }, -3)
    support.equal(got, want, ("block %d of layer %d"):format(block, layer))
  end
end

--- A prefetcher whose halves hold two records of f32.
function M.new_prefetcher(dev, store, o)
  o = o or {}
  local workers = o.workers or 2
  return kv.prefetch { device = dev, store = store, prefetch_workers = workers,
    max_pending_prefetch = o.max_pending or 64,
    bytes_staging = o.staging or 2 * workers * 2304 }
end

--- Blocks 0 ... n - 1 of a random source go to random blocks of a cache.
function M.expect_arrival(dev, dtype, offload, n, workers)
  local store, rng = M.new_store(), support.rng(n + 3)
  local source, keys = M.fill(store, dtype, math.max(n, 1))
  local cache, prefetcher = M.new_cache(dev, dtype, offload), M.new_prefetcher(dev, store,
    { workers = workers })
  local places = support.distinct(rng, n, BLOCKS)
  local result = prefetcher:submit { request = 1, cache = cache, keys = keys,
                                 blocks = places }:wait()
  assert.same({ "completed", n, n, 0, n * source:bytes() / math.max(n, 1) },
    { result.state, result.blocks, result.leading, result.missing, result.bytes })
  local place_of = {}
  for i, block in ipairs(places) do place_of[block] = i - 1 end
  for block = 0, BLOCKS - 1 do M.expect_block(cache, block, source, place_of[block]) end
  local stats = prefetcher:stats()
  assert.same({ 1, 1, 0, 0, n * LAYERS, 0, result.bytes, 0 },
    { stats.submitted, stats.completed, stats.cancelled, stats.failed, stats.hits,
      stats.misses, stats.bytes, stats.pending })
  prefetcher:close()
  cache:close()
  store.close()
end

return M
