--- Times decode attention with one table, by layer and by head (append and attention of a
-- layer, replayed), the host's part of an append, and a compaction to a tenth.
--
--   ./kvlab run tools/time_tables.lua --device=cuda
local kv = require "kvlab"
local dev = kv.device "cuda"
local HEADS, KV, DIM, SIZE = 32, 8, 128, 16
local function now() return tonumber(kv.C.kvl_clock_ns()) * 1e-3 end
local SHAPES = { { 1, 32768 }, { 8, 4096 }, { 16, 32768 }, { 8, 32768 }, { 64, 4096 },
                 { 16, 2048 } }
for _, shape in ipairs(SHAPES) do
  local n, ctx = unpack(shape)
  local line = ("%dx%d"):format(n, ctx)
  local base
  for _, tables in ipairs { "one", "layer", "head", "one", "head" } do
    local blocks = ctx / SIZE + 8
    local layers = 4
    local cache = kv.cache { device = dev, format = "bf16", layers = layers,
      blocks = n * blocks, block_size = SIZE, kv_heads = KV, head_dim = DIM,
      tables = tables }
    local attention = kv.attention { cache = cache, heads = HEADS, max_seqs = n,
      max_blocks = blocks }
    local batch = cache:batch { max_seqs = n, max_tokens = n, max_blocks = blocks,
      fixed_width = true }
    cache.memory:rand_(1)
    local seqs, ones = {}, {}
    for i = 1, n do seqs[i] = cache:sequence() seqs[i]:extend(ctx - 32) ones[i] = 1 end
    local q = kv.randn(dev, "bf16", { n, HEADS, DIM }, { seed = 1 })
    local k = kv.randn(dev, "bf16", { n, KV, DIM }, { seed = 2 })
    local out = kv.tensor(dev, "bf16", { n, HEADS, DIM })
    local function step()
      for layer = 0, layers - 1 do attention:forward(layer, q, k, k, out) end
    end
    batch:append(seqs, ones); attention:begin(batch, false); step(); dev:sync()
    batch:append(seqs, ones); attention:begin(batch, false)
    local graph = kv.graph(step, dev)
    for _ = 1, 5 do graph:replay() end
    dev:sync()
    local best = 1e9
    for _ = 1, 15 do
      local t = now()
      for _ = 1, 20 do graph:replay() end
      dev:sync()
      best = math.min(best, (now() - t) / 20 / layers)
    end
    -- host time of an append
    local h = 1e9
    for _ = 1, 14 do
      dev:sync()
      local t = now()
      batch:append(seqs, ones)
      h = math.min(h, now() - t)
    end
    base = base or best
    line = line .. ("  %s %.1f us (%.3f) host %.0f"):format(tables, best, best / base,
      h)
    cache:close(); graph:close()
    collectgarbage()
  end
  print(line)
end
-- compaction: 16 x 32K to a tenth, one layer of 8 heads
local ROWS, CONTEXT, KEPT = 16 * KV, 32768, 3264

--- Microseconds of fn, the least of 10 times 4 runs.
local function time(fn)
  fn()
  dev:sync()
  local best = math.huge
  for _ = 1, 10 do
    local start = now()
    for _ = 1, 4 do fn() end
    dev:sync()
    best = math.min(best, (now() - start) / 4)
  end
  return best
end

local pages = ROWS * (CONTEXT / SIZE + KEPT / SIZE)
local memory = kv.tensor(dev, "bf16", { pages, 2, 1, SIZE, DIM }):rand_(3)
local kept = kv.ops.select(kv.rand(dev, "f32", { ROWS, 1, CONTEXT }, { seed = 5 }),
  kv.full(dev, "i32", { ROWS }, CONTEXT), 1,
  require("ffi").new("kvl_budget", -1, KEPT, 0, 0, 0),
  kv.tensor(dev, "i32", { ROWS, 1, KEPT })):reshape { ROWS, KEPT }
local from = (kept + kv.arange(dev, "i32", ROWS, 0, CONTEXT):reshape { ROWS, 1 })
  :cast("i64"):reshape { ROWS * KEPT }
local to = kv.arange(dev, "i32", ROWS * KEPT, ROWS * CONTEXT):cast "i64"
local bytes = 2 * ROWS * KEPT * 2 * DIM * 2 -- read and written
local us = time(function()
  kv.check(kv.C.kvl_copy_tokens(memory, from, memory, to, nil))
end)
print(("compaction of 16x32K to %d tokens, one layer: %.1f us, %.0f GB/s"):format(KEPT, us,
  bytes / us * 1e-3))
local a = kv.randn(dev, "bf16", { bytes / 4 }, { seed = 1 })
local b = a:clone()
us = time(function() b:copy_(a) end)
print(("a plain copy of as many bytes: %.1f us, %.0f GB/s"):format(us,
  bytes / us * 1e-3))
