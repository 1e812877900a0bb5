--- Paged decode attention over random block tables, 32 query heads on 8 KV heads of
-- 128, block 16: dense (P1, P2, P3), with f8e4m3 and int8 memory, with lengths that
-- differ a lot, and sparse (P4). P14 is dense decode on the CPU. Limit: reading K and V
-- once, of all tokens or of the selected ones, at the read bandwidth of the same run.
local kv = require "kvlab"
local paged = require "bench.lib.paged"

local KV_HEADS, BLOCK = paged.KV_HEADS, paged.BLOCK

--- Compares the heads of one KV head with attention over gathered blocks.
---@param blocks kvlab.Tensor  i32 [n], physical; they hold `tokens`
local function check_group(w, s, g, blocks, tokens)
  kv.scope(function()
    local function gather(half)
      local x = paged.gather(w.cache, blocks, g, half, tokens, w.format)
      local scale = half == 0 and w.k_scale or half == 1 and w.v_scale
      return scale and x * scale:narrow(g, 1) or x
    end
    local want = paged.attend(paged.group_rows(w.q, s, g), gather(0), gather(1))
    paged.expect("decode", paged.group_rows(w.out, s, g), want, 0.02)
  end)
end

--- The tensors that every decode needs, and `run`. lens has a length for each sequence.
local function work_of(b, lens, dtype)
  local dev, seqs, w = b.device, #lens, {}
  local tables, blocks = paged.random_tables(dev, lens)
  if dtype == "int8" then
    w.format = kv.format { codec = dtype, kv_heads = KV_HEADS, block_size = BLOCK,
      head_dim = paged.DIM }
  end
  w.tables, w.cache = tables, paged.random_memory(dev, dtype, blocks, w.format)
  w.q = kv.randn(dev, "bf16", { seqs, paged.HEADS, paged.DIM }, { seed = 2 })
  w.lens = kv.from(dev, "i32", { seqs }, lens)
  w.out = kv.full(dev, "bf16", { seqs, paged.HEADS, paged.DIM }, 0 / 0)
  if dtype == "f8e4m3" then
    w.k_scale = kv.rand(dev, "f32", { KV_HEADS }, { seed = 3, low = 0.5, high = 2 })
    w.v_scale = kv.rand(dev, "f32", { KV_HEADS }, { seed = 4, low = 0.5, high = 2 })
    w.format = kv.format { codec = dtype, kv_heads = KV_HEADS, block_size = BLOCK,
      head_dim = paged.DIM, k_scale = w.k_scale, v_scale = w.v_scale }
  end
  function w.run() kv.ops.step.paged_attention(w) end
  return w
end

--- Dense decode of sequences of these lengths.
local function dense(lens, dtype)
  return function(b)
    local w, total = work_of(b, lens, dtype or "bf16"), 0
    for _, len in ipairs(lens) do total = total + len end
    return { run = w.run,
      bytes = w.cache:bytes() * total / (w.cache:size(0) * BLOCK),
      check = function()
        w.run()
        for _, at in ipairs { { 0, 0 }, { #lens - 1, KV_HEADS - 1 } } do
          local tokens = lens[at[1] + 1]
          local blocks = w.tables:index(at[1]):narrow(0, math.ceil(tokens / BLOCK))
          check_group(w, at[1], at[2], blocks, tokens)
        end
      end }
  end
end

--- Decode over `share` of the blocks; every KV head reads other blocks.
local function sparse(lens, share)
  return function(b)
    local w = work_of(b, lens, "bf16")
    local seqs, width = #lens, w.tables:size(1)
    local count = math.ceil(share * width)
    local scores = kv.rand(b.device, "f32", { seqs, KV_HEADS, width }, { seed = 6 })
    w.selection = kv.full(b.device, "i32", { seqs, KV_HEADS, count }, -1)
    kv.ops.select(scores, w.lens, BLOCK, paged.budget(count), w.selection)
    return { run = w.run, bytes = seqs * KV_HEADS * count * BLOCK * paged.DIM * 2 * 2,
      check = function()
        w.run()
        for _, at in ipairs { { 0, 0 }, { seqs - 1, KV_HEADS - 1 } } do
          local list = w.selection:index(at[1]):index(at[2])
          local blocks = w.tables:index(at[1]):reshape({ -1, 1 }):gather_rows(list)
          check_group(w, at[1], at[2], blocks:reshape { -1 }, count * BLOCK)
        end
      end }
  end
end

local function same(seqs, len)
  local lens = {}
  for i = 1, seqs do lens[i] = len end
  return lens
end

--- Lengths as a server sees them: the i-th is 1/i of the longest.
local function zipf(seqs, longest)
  local lens = {}
  for i = 1, seqs do lens[i] = math.max(1, math.floor(longest / i)) end
  return lens
end

return function(b)
  local function length(n) return math.max(BLOCK, b:shrunk(n)) end
  for _, row in ipairs {
    { "P1", 16, 32768, { of_limit = 0.98 } },
    { "P2", 1, 32768, { us = 54 } }, { "P2", 1, 131072, { us = 184 } },
    { "P3", 8, 4096, { us = 53 } }, { "P3", 16, 8192, { us = 182 } },
    { "P3", 64, 4096, { us = 358 } },
  } do
    local seqs, len = row[2], length(row[3])
    b:case { id = row[1], name = ("paged decode, %d x %d"):format(seqs, len),
             target = row[4], setup = dense(same(seqs, len)) }
  end
  local len = length(32768)
  b:case { id = "P1-f8", name = ("paged decode, %d x %d, f8e4m3 KV"):format(16, len),
           setup = dense(same(16, len), "f8e4m3") }
  b:case { id = "P1-int8", name = ("paged decode, %d x %d, int8 KV"):format(16, len),
           setup = dense(same(16, len), "int8") }
  len = length(131072)
  b:case { id = "P1-zipf", name = ("paged decode, 32 of %d / i tokens"):format(len),
           setup = dense(zipf(32, len)) }
  for _, row in ipairs { { 16, 32768, 0.1 }, { 1, 131072, 0.05 } } do
    len = length(row[2])
    b:case { id = "P4", setup = sparse(same(row[1], len), row[3]),
             name = ("sparse decode, %g%% of %d x %d"):format(100 * row[3], row[1], len),
             target = { of_limit = 1 / 1.15 } }
  end
  len = b.quick and 512 or 32768
  b:case { id = "P14", on = "cpu", name = ("paged decode, 1 x %d"):format(len),
           setup = dense({ len }), target = { of_limit = 0.75 } }
end
