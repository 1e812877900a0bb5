--- Paged decode attention over random block tables, bf16, 32 query heads on 8 KV heads of
-- 128, block 16: P1 and P2 on a GPU, P14 on the CPU. Limit: every K and V once at the
-- read bandwidth of the same run.
local kv = require "kvlab"

local HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16

--- A table of all blocks in random order, the same for the same seed.
local function random_table(dev, seqs, blocks)
  local keys = kv.rand(kv.device "cpu", "f32", { 1, seqs * blocks }, { seed = 5 })
  local _, order = keys:sort()
  return order:reshape({ seqs, blocks }):to(dev)
end

--- The same attention from gathered keys and values, in f32, for one sequence and KV
-- head.
local function reference(w, s, g)
  local order = w.tables:index(s)
  local rows = w.cache:reshape { w.cache:size(0), 2 * KV_HEADS, BLOCK * DIM }
  local function half(i)
    local blocks = rows:gather_rows(order):cast "f32"
    local index = kv.arange(w.cache.device, "i32", w.blocks, i * KV_HEADS + g,
      2 * KV_HEADS)
    return blocks:reshape({ w.blocks * 2 * KV_HEADS, BLOCK * DIM }):gather_rows(index)
      :reshape { w.len, DIM }
  end
  local group = HEADS / KV_HEADS
  local q = w.q:index(s):narrow(g * group, group):cast "f32"
  return q:matmul_t(half(0)):softmax(1 / math.sqrt(DIM)):matmul(half(1))
end

local function check(w)
  local group = HEADS / KV_HEADS
  for _, at in ipairs { { 0, 0 }, { w.seqs - 1, KV_HEADS - 1 } } do
    kv.scope(function()
      local want = reference(w, at[1], at[2])
      local got = w.out:index(at[1]):narrow(at[2] * group, group):cast "f32"
      local off = (got - want):abs():max():item()
      local size = want:abs():max():item()
      assert(off <= 0.02 * size, ("decode is off by %g of %g"):format(off, size))
    end)
  end
end

local function decode(seqs, len)
  return function(b)
    local dev = b.device
    local w = { seqs = seqs, len = len, blocks = len / BLOCK }
    w.cache = kv.randn(dev, "bf16", { seqs * w.blocks, 2, KV_HEADS, BLOCK, DIM },
      { seed = 1 })
    w.q = kv.randn(dev, "bf16", { seqs, HEADS, DIM }, { seed = 2 })
    w.tables = random_table(dev, seqs, w.blocks)
    w.lens = kv.full(dev, "i32", { seqs }, len)
    w.out = kv.full(dev, "bf16", { seqs, HEADS, DIM }, 0 / 0)
    local function run()
      kv.ops.paged_attention { q = w.q, cache = w.cache, tables = w.tables, lens = w.lens,
                               out = w.out }
    end
    return { bytes = seqs * len * KV_HEADS * DIM * 2 * 2, run = run,
             check = function()
               run()
               check(w)
             end }
  end
end

return function(b)
  local on_cpu = b.device:is_cpu()
  local shapes = on_cpu and { { "P14", 1, 32768 } }
    or { { "P1", 16, 32768 }, { "P2", 1, 32768 }, { "P2", 1, 131072 } }
  for _, shape in ipairs(shapes) do
    b:case { id = shape[1],
             name = ("paged decode, batch %d x %d"):format(shape[2], shape[3]),
             setup = decode(shape[2], shape[3]) }
  end
end
