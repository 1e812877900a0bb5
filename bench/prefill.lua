--- Prefill attention over paged memory, 32 query heads on 8 KV heads of 128, block 16,
-- random tables. P5 is on a GPU, P15 on the CPU. Flops: 4 * head_dim for each head and
-- each pair of a query and a key that it sees. Limit: the GEMM of the same run (sgemm on
-- the CPU). Targets of P5: the best that torch's cuDNN attention over contiguous KV
-- reached.
local kv = require "kvlab"
local paged = require "bench.lib.paged"

local HEADS, DIM, BLOCK = paged.HEADS, paged.DIM, paged.BLOCK

--- Checks some rows of two heads, each against attention over the keys that it sees.
local function check(w, chunk, history, is_causal)
  for _, head in ipairs { 0, HEADS - 1 } do
    local g = math.floor(head / paged.GROUP)
    for _, row in ipairs { 0, 1, math.floor(chunk / 3), chunk - 1 } do
      kv.scope(function()
        local seen = is_causal and history + row + 1 or history
        local order = w.tables:index(0):narrow(0, math.ceil(seen / BLOCK))
        local q = w.q:index(row):narrow(head, 1):cast "f32"
        local out, lse = paged.attend(q, paged.gather(w.cache, order, g, 0, seen),
          paged.gather(w.cache, order, g, 1, seen))
        paged.expect("prefill", w.out:index(row):narrow(head, 1), out, 0.02)
        local off = math.abs(w.lse:index(row):narrow(head, 1):item() - lse:item())
        assert(off < 2e-3, ("lse is off by %g"):format(off))
      end)
    end
  end
end

--- A chunk of queries. Causal: they are the newest tokens, after `history` others.
-- Otherwise every query sees all of `history` tokens, and no others.
local function prefill(chunk, history, is_causal)
  return function(b)
    local dev, keys = b.device, is_causal and history + chunk or history
    local tables, blocks = paged.random_tables(dev, { keys })
    local w = { tables = tables, cache = paged.random_memory(dev, "bf16", blocks),
      q = kv.randn(dev, "bf16", { chunk, HEADS, DIM }, { seed = 2 }),
      lens = kv.from(dev, "i32", { 1 }, { keys }), causal = is_causal,
      starts = kv.from(dev, "i32", { 2 }, { 0, chunk }),
      out = kv.full(dev, "bf16", { chunk, HEADS, DIM }, 0 / 0),
      lse = kv.full(dev, "f32", { chunk, HEADS }, 0 / 0) }
    local function run() kv.ops.step.paged_attention(w) end
    local pairs_seen = is_causal and chunk * history + chunk * (chunk + 1) / 2
      or chunk * history
    return { run = run, flops = 4 * DIM * HEADS * pairs_seen,
             check = function()
               run()
               check(w, chunk, history, is_causal)
             end }
  end
end

return function(b)
  local function length(n) return math.max(BLOCK, b:shrunk(n)) end
  for _, row in ipairs { { 4096 }, { 16384, 587 }, { 32768, 611 } } do
    local n = length(row[1])
    b:case { id = "P5", name = ("prefill, causal, %d"):format(n),
             setup = prefill(n, 0, true), target = row[2] and { tflop_s = row[2] } }
  end
  local chunk, history = length(4096), length(32768)
  b:case { id = "P5", name = ("prefill, %d over %d, all seen"):format(chunk, history),
           setup = prefill(chunk, history, false), target = { tflop_s = 638 } }
  local n = b.quick and 64 or 4096
  b:case { id = "P15", on = "cpu", name = ("prefill, causal, %d"):format(n),
           setup = prefill(n, 0, true), target = { of_limit = 0.5 } }
end
