--- Prefetch: the cost of a task (E30), bringing records from a store to the device (E31,
-- E32) and to the host tier (E33), and how much of this compute hides (E34). The store is
-- in memory, so a worker is as fast as one core checks and copies records.
--
-- Times are the host's, from the first submit until the last task is over; the median of
-- 31.
local kv = require "kvlab"

local KIB, MIB, REPEATS = 1024, 1024 * 1024, 31
local TOKEN_BYTES = 2 * 8 * 128 * 2 -- K and V, 8 KV heads of 128, bf16

local function clock_us() return tonumber(kv.C.kvl_clock_ns()) * 1e-3 end

local function median_of(fn)
  local times = {}
  fn()
  for i = 1, REPEATS do
    local begin = clock_us()
    fn()
    times[i] = clock_us() - begin
  end
  return kv.statistics.median(times)
end

--- A store with random blocks of `layers` layers, a cache with room for them, which takes
-- them in reverse order, and a prefetcher.
local function new_rig(b, o)
  local layers, blocks = o.layers or 1, o.blocks
  local rig = { layers = layers, blocks = blocks, places = {} }
  rig.cache = kv.cache { device = b.device, layers = layers, blocks = blocks,
    kv_heads = 8, block_size = o.record_bytes / TOKEN_BYTES, head_dim = 128,
    offload = o.pinned and { slots = 1, slot_blocks = 1, max_seqs = 1, max_tokens = 1 } }
  rig.store = kv.store("memory:", { model = "bench", block_size = 1 })
  local tokens = {}
  for i = 1, blocks do tokens[i], rig.places[i] = i, blocks - i end
  rig.keys = rig.store:keys(tokens)
  local shape = { blocks, 2, 8, rig.cache.block_size, 128 }
  rig.source = kv.randn(kv.device "cpu", "bf16", shape, { seed = 3 })
  for layer = 0, layers - 1 do
    for i = 0, blocks - 1 do rig.store:put_block(rig.keys + i, layer, rig.source, i) end
  end
  rig.prefetcher = kv.prefetch { device = b.device, store = rig.store,
    prefetch_workers = o.workers, max_pending_prefetch = 1024 }
  return rig
end

--- Submits a task for the store's blocks first ... first + n - 1.
local function submit(rig, first, n)
  local blocks = {}
  for i = 1, n do blocks[i] = rig.places[first + i] end
  return rig.prefetcher:submit { request = first, cache = rig.cache,
    keys = rig.keys + first, blocks = blocks }
end

--- Brings all blocks, in tasks of n blocks.
local function bring_all(rig, n)
  local tickets = {}
  for first = 0, rig.blocks - 1, n do tickets[#tickets + 1] = submit(rig, first, n) end
  for _, ticket in ipairs(tickets) do
    assert(ticket:wait().blocks == n, "blocks are missing")
    ticket:close()
  end
end

local function check(rig)
  for layer = 0, rig.layers - 1 do
    for _, i in ipairs { 0, rig.blocks - 1 } do
      local got = rig.cache:layer(layer):index(rig.places[i + 1]):to "cpu"
      local off = got:cast "f32" - rig.source:index(i):cast "f32"
      assert(off:abs():max():item() == 0, "a block differs")
    end
  end
end

local function close(rig)
  rig.prefetcher:close()
  rig.cache:close()
  rig.store:close()
end

--- Tasks without blocks show what the queue, a worker and a wait cost.
local function empty_tasks(workers)
  return function(b)
    local rig = new_rig(b, { record_bytes = 64 * KIB, blocks = 1, workers = workers })
    local n, tickets = 512, {}
    local us = median_of(function()
      for i = 1, n do tickets[i] = submit(rig, 0, 0) end
      for i = 1, n do
        tickets[i]:wait()
        tickets[i]:close()
      end
    end)
    close(rig)
    return { us = us, note = ("%.0f tasks a second"):format(n / us * 1e6) }
  end
end

local function records(record_bytes, workers, pinned)
  return function(b)
    local bytes = (b.kind == "cpu" and 64 or 256) * MIB / (b.quick and 16 or 1)
    local rig = new_rig(b, { record_bytes = record_bytes, workers = workers,
                             blocks = bytes / record_bytes, pinned = pinned })
    local n = math.max(1, rig.blocks / 16)
    local us = median_of(function() bring_all(rig, n) end)
    check(rig)
    close(rig)
    return { us = us, bytes = bytes, limit = "L" }
  end
end

--- The layers of a request, brought while compute uses the layers before them. Compute is
-- matrix products that take as long as a layer takes to arrive. Bound: the longer of
-- prefetch alone and compute alone.
local function beside_compute(record_bytes, workers)
  return function(b)
    local layers = b.kind == "cpu" and 4 or 16
    local bytes = (b.kind == "cpu" and 4 or 16) * MIB -- for each layer
    local rig = new_rig(b, { record_bytes = record_bytes, workers = workers,
                             blocks = bytes / record_bytes, layers = layers })
    local size = b.kind == "cpu" and 512 or 2048
    local x = kv.randn(b.device, "bf16", { size, size }, { seed = 1 })
    local product = kv.tensor(b.device, "bf16", { size, size })
    local each, parts = 1, workers
    local function compute()
      for _ = 1, each do x:matmul(x, product) end
    end
    local function alone()
      for _ = 1, layers do compute() end
      b.device:sync()
    end
    local function bring(per_layer)
      local tickets = {}
      for i = 0, parts - 1 do
        tickets[i + 1] = submit(rig, i * rig.blocks / parts, rig.blocks / parts)
      end
      for layer = 0, per_layer and layers - 1 or -1 do
        for _, ticket in ipairs(tickets) do assert(ticket:wait_layer(layer)) end
        compute()
      end
      for _, ticket in ipairs(tickets) do
        ticket:wait()
        ticket:close()
      end
      b.device:sync()
    end
    local transfer = median_of(bring)
    local one = median_of(alone)
    each = math.max(1, math.floor(transfer / one + 0.5))
    local product_us = median_of(alone)
    local us = median_of(function() bring(true) end)
    check(rig)
    close(rig)
    return { us = us, bytes = layers * bytes, bound = math.max(transfer, product_us),
             note = ("%d layers; compute %.0f us, prefetch %.0f us"):format(layers,
               product_us, transfer) }
  end
end

return function(b)
  for _, workers in ipairs { 1, 4 } do
    b:case { id = "E30", name = ("prefetch: 512 tasks of no blocks, %d workers"):format(
      workers), setup = empty_tasks(workers) }
  end
  for _, workers in ipairs { 1, 2, 4 } do
    b:case { id = "E31", name = ("prefetch: records of 64 KiB, %d workers"):format(
      workers), setup = records(64 * KIB, workers) }
    b:case { id = "E32", name = ("prefetch: records of 1 MiB, %d workers"):format(
      workers), setup = records(MIB, workers) }
  end
  b:case { id = "E33", name = "prefetch: records of 64 KiB to the host tier, 4 workers",
           setup = records(64 * KIB, 4, true) }
  for _, workers in ipairs { 1, 4 } do
    b:case { id = "E34", name = ("prefetch beside compute, 64 KiB, %d workers"):format(
      workers), setup = beside_compute(64 * KIB, workers) }
  end
end
