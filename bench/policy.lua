--- What a policy costs the host (H1): the microseconds of Lua and launches for one layer
-- of a decode step (append, summarise, score, select, attend). The context is so small
-- that the kernels hardly count. H2 is what a million temporary tensors cost.
local kv = require "kvlab"

local SEQS, LENGTH, LAYERS, ROUNDS = 4, 64, 32, 20

local function stepper(dev, name)
  local cache = kv.cache { device = dev, layers = LAYERS, blocks = SEQS * 8,
                           block_size = 16, kv_heads = 8, head_dim = 128 }
  local attention = kv.attention { cache = cache, heads = 32, max_seqs = SEQS,
                                   max_blocks = 8,
                                   decode_policy = kv.policy(name) }
  local batch = cache:batch { max_seqs = SEQS, max_blocks = 8 }
  local seqs, counts = {}, {}
  for i = 1, SEQS do seqs[i], counts[i] = cache:sequence(), LENGTH end
  batch:append(seqs, counts)
  for i = 1, SEQS do counts[i] = 1 end
  batch:append(seqs, counts)
  local q = kv.randn(dev, "bf16", { SEQS, 32, 128 }, { seed = 1 })
  local k = kv.randn(dev, "bf16", { SEQS, 8, 128 }, { seed = 2 })
  local out = kv.tensor(dev, "bf16", { SEQS, 32, 128 })
  cache.memory:fill_(0.5)
  return function()
    attention:begin(batch, false)
    for layer = 0, LAYERS - 1 do attention:forward(layer, q, k, k, out) end
  end
end

--- Host microseconds for each layer. On a GPU launches are asynchronous, so this is the
-- time of Lua and the driver; on the CPU it includes the (tiny) kernels.
local function host_time(name)
  return function(b)
    local step, best = stepper(b.device, name), {}
    for _ = 1, 30 do step() end
    b.device:sync()
    for i = 1, 30 do
      local start = kv.C.kvl_clock_ns()
      for _ = 1, ROUNDS do step() end
      best[i] = tonumber(kv.C.kvl_clock_ns() - start) * 1e-3 / (ROUNDS * LAYERS)
      b.device:sync()
    end
    return { us = kv.statistics.median(best), note = "host time a layer, 4 sequences" }
  end
end

local function temporaries(b)
  local dev, n = b.device, 1000000
  local x = kv.ones(dev, "f32", { 256 })
  local before, peak = dev:stats(), 0
  local start = kv.C.kvl_clock_ns()
  for i = 1, n do
    x = x * 1
    if i % 10000 == 0 then peak = math.max(peak, dev:stats().bytes_live) end
  end
  dev:sync()
  assert(x:min():item() == 1)
  local us = tonumber(kv.C.kvl_clock_ns() - start) * 1e-3 / n
  local note = ("peak %.1f MB live above %.1f MB, %d device allocations, "
    .. "Lua heap %.1f MB"):format(
    (peak - before.bytes_live) / 1e6, before.bytes_live / 1e6,
    dev:stats().allocations - before.allocations, collectgarbage "count" / 1e3)
  return { us = us, note = note }
end

return function(b)
  for _, name in ipairs { "full", "streaming_blocks", "quest" } do
    b:case { id = "H1", name = "policy step, " .. name, setup = host_time(name) }
  end
  b:case { id = "H2", name = "one of a million temporary tensors", setup = temporaries }
end
