--- Logits of an indexer, 64 heads of 128 in f8e4m3 (P11). In prefill, each of the newest
-- rows of a sequence looks at the tokens up to its own; the limit is the f8e4m3 GEMM of
-- the same run. Decode has blocks of 64 in random order; the limit is the read bandwidth.
-- Flops: 2 * heads * dim for each pair of a row and a token. On the CPU, whose kernels
-- multiply in f32, the limit is sgemm. Targets: what DeepGEMM was measured at.
local kv = require "kvlab"
local paged = require "bench.lib.paged"

local HEADS, DIM, BLOCK = 64, 128, 64
local FLOPS_PAIR = 2 * HEADS * DIM

--- Queries as the logits op takes them: q in f8e4m3, and weights times the scales of q.
local function queries(dev, rows)
  return kv.scope(function()
    local q = kv.randn(dev, "bf16", { rows, HEADS, DIM }, { seed = 2 })
    local q8, scales = kv.ops.quantise_rows(q)
    return q8, kv.randn(dev, "f32", { rows, HEADS }, { seed = 3 }) * scales
  end)
end

--- Compares row r of the logits with products, relu and sums in f32.
local function check_row(w, r, k, scales, got)
  kv.scope(function()
    local q = w.q:index(r):cast "f32"
    local dots = k:cast("f32"):matmul_t(q):relu()              -- [tokens, heads]
    local want = dots:matmul(w.weights:index(r):reshape { HEADS, 1 })
    paged.expect("logits", got, want:reshape { -1 } * scales, 1e-3)
  end)
end

local function prefill(rows, tokens)
  return function(b)
    local dev = b.device
    local q, weights = queries(dev, rows)
    local k, scales = kv.ops.quantise_rows(kv.randn(dev, "bf16", { tokens, DIM },
      { seed = 4 }))
    local starts, ends = kv.zeros(dev, "i32", { rows }),
      kv.arange(dev, "i32", rows, tokens - rows + 1)
    local w = { q = q, weights = weights }
    local logits = kv.full(dev, "f32", { rows, tokens }, 0 / 0)
    local function run()
      kv.ops.mqa_logits(q, weights, k, scales, starts, ends, logits)
    end
    local pairs_seen = rows * (tokens - rows) + rows * (rows + 1) / 2
    return { run = run, flops = FLOPS_PAIR * pairs_seen,
             limit = b.kind == "cpu" and "T" or "F", check = function()
               run()
               for _, r in ipairs { 0, 1, math.floor(rows / 3), rows - 1 } do
                 local n = tokens - rows + r + 1
                 check_row(w, r, k:narrow(0, n), scales:narrow(0, n),
                   logits:index(r):narrow(0, n))
               end
             end }
  end
end

--- An index-K cache of `blocks` blocks with random keys, filled piece by piece.
local function random_memory(dev, blocks)
  local index, piece = kv.index_cache { device = dev, blocks = blocks }, 4096
  for from = 0, blocks - 1, piece do
    local n = math.min(piece, blocks - from) * BLOCK
    kv.scope(function()
      index:append(0, kv.randn(dev, "bf16", { n, DIM }, { seed = 5 + from }),
        kv.arange(dev, "i64", n, from * BLOCK))
    end)
  end
  return index
end

local function decode(seqs, len)
  return function(b)
    local dev, lens = b.device, {}
    for s = 1, seqs do lens[s] = len end
    local tables, blocks = paged.random_tables(dev, lens, BLOCK)
    local index = random_memory(dev, blocks)
    local q, weights = queries(dev, seqs)
    local w = { q = q, weights = weights }
    local lengths = kv.from(dev, "i32", { seqs }, lens)
    local logits = kv.full(dev, "f32", { seqs, len }, 0 / 0)
    local function run() index:logits(0, q, weights, tables, lengths, logits) end
    local on_cpu = b.kind == "cpu"
    local bytes = seqs * len * (index:bytes_token() + 4)
    return { run = run, bytes = not on_cpu and bytes or nil,
             flops = on_cpu and seqs * len * FLOPS_PAIR or nil, check = function()
               run()
               for _, s in ipairs { 0, seqs - 1 } do
                 kv.scope(function()
                   local order = tables:index(s):to("cpu"):list()
                   local places = {}
                   for j = 0, len - 1 do
                     places[j + 1] = order[math.floor(j / BLOCK) + 1] * BLOCK + j % BLOCK
                   end
                   local k, scales = index:gather(0, kv.from(dev, "i64", { len }, places))
                   check_row(w, s, k, scales, logits:index(s))
                 end)
               end
             end }
  end
end

return function(b)
  for _, row in ipairs { { 2048, 32768, 1022 }, { 4096, 65536, 991 } } do
    local rows, tokens = b:shrunk(row[1]), b:shrunk(row[2])
    b:case { id = "P11", target = { tflop_s = row[3] }, setup = prefill(rows, tokens),
             name = ("index logits, prefill, %d over %d"):format(rows, tokens) }
  end
  for _, row in ipairs { { 64, 65536, 0.92 }, { 16, 32768, 0.8 } } do
    local len = math.max(BLOCK, b:shrunk(row[2]))
    b:case { id = "P11", name = ("index logits, decode, %d x %d"):format(row[1], len),
             setup = decode(row[1], len), target = { of_limit = row[3] } }
  end
end
