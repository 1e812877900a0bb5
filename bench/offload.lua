--- Offloaded KV: scattered blocks over the link (P9), a decode step whose KV is in host
-- memory (P10), and the host's share of a step (P12).
local kv = require "kvlab"

local MIB = 1024 * 1024

-- ---- P9: scattered blocks -------------------------------------------------------------

--- Two memories of `bytes` in blocks of `block_bytes`: `far` is pinned, `near` is on the
-- device. Also a random order of the blocks of `far`, which are copied to `near`.
local function scattered(b, block_bytes, bytes)
  local size, blocks = block_bytes / 512, bytes / block_bytes -- one KV head of 128, bf16
  local shape = { blocks, 2, 1, size, 128 }
  local far, near = kv.pinned(b.device, "bf16", shape), kv.tensor(b.device, "bf16", shape)
  kv.check(kv.C.kvl_random(far, kv.C.KVL_RANDOM_NORMAL, 0, 1, 1, 0))
  local _, order = kv.rand(b.device, "f32", { blocks }, { seed = 2 }):sort()
  local from = order:reshape { 1, 1, blocks }
  local to = kv.arange(b.device, "i32", blocks):reshape { 1, 1, blocks }
  return far, near, from, to, order
end

local function check_moved(far, near, order)
  local want = far:reshape { far:size(0), far.count / far:size(0) }:gather_rows(order)
  local got = near:reshape(want:dims())
  assert((got:cast "f32" - want:cast "f32"):abs():max():item() == 0, "blocks differ")
end

local function gather(block_bytes)
  return function(b)
    local bytes = b.device:is_cpu() and 64 * MIB or 256 * MIB
    local far, near, from, to, order = scattered(b, block_bytes, bytes)
    local function run() kv.check(kv.C.kvl_move_blocks(far, from, near, to, nil, nil)) end
    run()
    check_moved(far, near, order)
    return { run = run, bytes = bytes, limit = "L" }
  end
end

--- The same without the gather: a copy for each block.
local function loop_of_copies(block_bytes)
  return function(b)
    local bytes = 64 * MIB
    local far, near, _, _, order = scattered(b, block_bytes, bytes)
    local blocks, sources, targets = bytes / block_bytes, {}, {}
    for i, block in ipairs(order:list()) do
      sources[i], targets[i] = far:index(block), near:index(i - 1)
    end
    local function run() for i = 1, blocks do targets[i]:copy_(sources[i]) end end
    run()
    check_moved(far, near, order)
    return { run = run, bytes = bytes, limit = "L" }
  end
end

-- ---- P10: an offloaded decode step ----------------------------------------------------

--- The median time in microseconds of a decode step of sequences of one length, and the
-- number of steps. before(i) runs untimed before step i.
local function time_steps(b, s, list, context, before)
  local times, steps = {}, 0
  local function step()
    steps = steps + 1
    if before then before(steps) end
    s:begin_decode(list)
    local us = s:time(function() s:layers_of_step() end)
    for _, seq in ipairs(list) do seq:truncate(context) end
    return us
  end
  b:settle(step)
  for i = 1, 31 do times[i] = step() end
  return kv.statistics.median(times), steps
end

local function synthetic_of(b, o, offload)
  local seqs, layers = o.seqs or 1, b.device:is_cpu() and 2 or o.layers or 8
  local context = b.device:is_cpu() and o.context / 16 or o.context
  local s = kv.synthetic { device = b.device, shape = "llama-8b", layers = layers,
    context = seqs * (context + 64), max_seqs = seqs, block_size = o.block_size or 16,
    decode_policy = o.policy(), offload = offload and offload(seqs, context) }
  local list = {}
  for i = 1, seqs do list[i] = s:sequence(context) end
  return s, list, context
end

--- A decode step with KV in host memory. Its bound is the longer of two times: the bytes
-- that it fetches at the link's speed, and the same step with nothing to fetch (KV on the
-- device, or all of it in the hot cache). angle: by how much queries rotate from step to
-- step, so that a hot cache has to fetch.
local function step_of(o)
  return function(b)
    local link, compute = b:limit "L", nil
    if not o.angle then
      local s, list, context = synthetic_of(b, o)
      compute = time_steps(b, s, list, context)
      s:close()
    end
    local s, list, context = synthetic_of(b, o, o.offload)
    local engine, layers = s.cache.tier, s.layers
    if o.angle then compute = time_steps(b, s, list, context) end
    if engine.hot then engine.hot:reset_counts() end
    local before = engine:bytes()
    local us, steps = time_steps(b, s, list, context, o.angle and function(i)
      s:turn(o.angle, i)
    end)
    local bytes = (engine:bytes() - before) / steps
    local transfer = bytes / link * 1e-3
    local note = ("%d layers; compute %.0f us, transfer %.0f us"):format(layers, compute,
      transfer)
    if engine.hot then
      note = ("%s; %.1f%% hits"):format(note, 100 * engine.hot:stats().hit_rate)
    end
    s:close()
    local bound = b.kind == "cuda" and math.max(transfer, compute) or nil
    return { us = us, bytes = bytes, limit = "L", bound = bound, note = note }
  end
end

--- A whole prefill through the ring, in chunks of one block of 1024 tokens. Its bound is
-- the longer of two times: the bytes at the link's speed, and the same prefill with KV on
-- the device.
local function prefill_of(context)
  return function(b)
    local layers = b.device:is_cpu() and 1 or 32
    if b.device:is_cpu() then context = context / 8 end
    local function run(offload)
      local s = kv.synthetic { device = b.device, shape = "llama-8b", layers = layers,
        context = context, block_size = 1024, chunk = 1024, offload = offload }
      local us, bytes = {}, 0
      for i = 1, 3 do
        local seq = s.cache:sequence()
        us[i] = s:time(function() s:prefill(seq, context) end)
        seq:close()
      end
      if offload then bytes = s.cache.tier:bytes() / 3 end
      s:close()
      return kv.statistics.median(us), bytes
    end
    local compute = run(nil)
    local us, bytes = run { slots = 4 }
    local n = context / 1024
    assert(bytes == n * (n - 1) / 2 * layers * 4 * MIB, "bytes differ from the formula")
    local transfer = bytes / b:limit "L" * 1e-3
    return { us = us, bytes = bytes, bound = math.max(transfer, compute),
             note = ("%d layers; compute %.0f us, transfer %.0f us"):format(layers,
               compute, transfer) }
  end
end

-- The target: a step takes at most 1.05 times as long as its bound.
local HIDDEN = { of_limit = 1 / 1.05 }

local function full() return kv.policy "full" end
local function quest(ratio)
  return function()
    return kv.policy("quest", { ratio = ratio, sink = 1, recent = 2 })
  end
end

-- ---- P12: the host's share ------------------------------------------------------------

local HOST_WARM, HOST_STEPS = 200, 30 -- before the first, Lua is not compiled

--- The microseconds that the host takes for a step of 32 layers with Quest over a hot
-- cache, launched from Lua or replayed. The note has the time of the device.
local function host_share(recorded)
  return function(b)
    local context = b.device:is_cpu() and 512 or 8192
    local s = kv.synthetic { device = b.device, shape = "llama-8b",
      context = context + 512, decode_policy = quest(0.1)(),
      offload = { hot_slots = 512 }, max_blocks = context / 16 + 32, fixed_width = true }
    local list = { s:sequence(context) }
    for _ = 1, 3 do s:decode(list) end
    s:begin_decode(list)
    local step = function() s:layers_of_step() end
    if recorded then
      local graph = kv.graph(step, b.device)
      step = function() graph:replay() end
    end
    local host, device = {}, {}
    for n = 1, HOST_WARM + HOST_STEPS do
      local i = math.max(1, n - HOST_WARM)
      b.device:sync()
      device[i] = s:time(function()
        local start = kv.C.kvl_clock_ns()
        s:begin_decode(list)
        step()
        host[i] = tonumber(kv.C.kvl_clock_ns() - start) * 1e-3
      end)
    end
    local one, start = kv.tensor(b.device, "f32", { 1 }), kv.C.kvl_clock_ns()
    for _ = 1, 100 do one:fill_(0) end
    local empty = tonumber(kv.C.kvl_clock_ns() - start) * 1e-5
    return { us = kv.statistics.median(host),
      note = ("host, where the smallest op takes %.1f; the device takes %.0f us"):format(
        empty, kv.statistics.median(device)) }
  end
end

return function(b)
  for _, kib in ipairs { 8, 16, 64, 1024 } do
    b:case { id = "P9", name = ("scattered blocks of %d KiB to the device"):format(kib),
             setup = gather(kib * 1024), target = { of_limit = 0.92 } }
  end
  for _, kib in ipairs { 8, 64, 1024 } do
    b:case { id = "P9", name = ("the same, a copy for each block of %d KiB"):format(kib),
             setup = loop_of_copies(kib * 1024) }
  end
  for _, kib in ipairs { 32, 64 } do
    b:case { id = "P10", name = ("ring, prefill of %dK, block, chunk 1024"):format(kib),
             setup = prefill_of(kib * 1024), target = HIDDEN }
  end
  b:case { id = "P10", name = "ring, dense, 1 x 32K, block 256", target = HIDDEN,
    setup = step_of { context = 32768, block_size = 256, policy = full,
                      offload = function() return { slots = 4 } end } }
  b:case { id = "P10", name = "ring, Quest 10%, 1 x 32K", target = HIDDEN,
    setup = step_of { context = 32768, policy = quest(0.1),
                      offload = function() return { slots = 4 } end } }
  local function hot(seqs, context)
    return { hot_slots = math.ceil(seqs * context / 16 * 0.2), hot_overlap = true }
  end
  for _, angle in ipairs { 0, 0.02, 0.1, math.pi / 2 } do
    b:case { id = "P10", name = ("hot, Quest 10%%, 4 x 32K, queries turn by %.2f"):format(
      angle), target = HIDDEN,
      setup = step_of { context = 32768, seqs = 4, policy = quest(0.1), offload = hot,
                        angle = angle > 0 and angle or nil } }
  end
  b:case { id = "P10", name = "hot, Quest 10%, 16 x 32K, queries turn by 0.02",
    target = HIDDEN, setup = step_of { context = 32768, seqs = 16, layers = 4,
      policy = quest(0.1), offload = hot, angle = 0.02 } }
  b:case { id = "P12", name = "a step of 32 layers, Quest, hot cache, eager",
           setup = host_share(false), target = { us = 1500 } }
  b:case { id = "P12", name = "the same replayed from a graph", setup = host_share(true),
           target = { us = 50 } }
end
