--- Attention of several new tokens a sequence (P16), of other shapes of prefill (P17),
-- and of wide groups (P18), over paged memory with random tables. Flops: 4 * head_dim for
-- each head and each pair of a query and a key that it sees; bytes are K and V, once.
local kv = require "kvlab"
local paged = require "bench.lib.paged"

local BYTES = { bf16 = 2, f8e4m3 = 1 } -- of a number
local SIZE = { heads = 32, kv_heads = 8, dim = 128, block = 16, dtype = "bf16" }

--- Rows of some heads of the newest token of the first sequence, computed in f32.
local function check(w, o, len)
  local group, blocks = o.heads / o.kv_heads, math.ceil(len / o.block)
  local last = o.chunk - 1
  for _, g in ipairs { 0, o.kv_heads - 1 } do
    kv.scope(function()
      local index = w.tables:index(0):narrow(0, blocks) * (2 * o.kv_heads) + g
      local function rows(at)
        return w.cache:reshape({ -1, o.block * o.dim }):gather_rows(index + at)
          :cast("f32"):reshape({ -1, o.dim }):narrow(0, len)
      end
      local q = w.q:index(last):narrow(g * group, group):cast "f32"
      local scores = q:matmul_t(rows(0)) / math.sqrt(o.dim)
      if o.soft_cap then scores = (scores / o.soft_cap):tanh() * o.soft_cap end
      if o.alibi then
        local away = kv.arange(scores.device, "f32", len) - (len - 1)
        scores = scores + w.alibi:narrow(g * group, group):reshape { -1, 1 }
          * away:reshape { 1, -1 }
      end
      local want = scores:softmax():matmul(rows(o.kv_heads))
      local got = w.out:index(last):narrow(g * group, group)
      paged.expect("the newest token", got, want, 0.02)
    end)
  end
end

--- `chunk` new tokens over `len` tokens with them, in `seqs` sequences.
local function attention(o)
  for name, value in pairs(SIZE) do o[name] = o[name] or value end
  return function(b)
    local dev, seqs, lens, starts = b.device, o.seqs or 1, {}, {}
    for s = 1, seqs do lens[s], starts[s] = o.len, (s - 1) * o.chunk end
    starts[seqs + 1] = seqs * o.chunk
    local tables, blocks = paged.random_tables(dev, lens, o.block)
    local tokens = seqs * o.chunk
    local w = { tables = tables, lens = kv.from(dev, "i32", lens), causal = true,
      starts = o.chunk > 1 and kv.from(dev, "i32", starts) or nil,
      cache = kv.randn(dev, "bf16", { blocks, 2, o.kv_heads, o.block, o.dim },
        { seed = 1 }):cast(o.dtype),
      q = kv.randn(dev, "bf16", { tokens, o.heads, o.dim }, { seed = 2 }),
      alibi = o.alibi and kv.rand(dev, "f32", { o.heads }, { seed = 3 }) * 0.1 or nil,
      soft_cap = o.soft_cap,
      out = kv.full(dev, "bf16", { tokens, o.heads, o.dim }, 0 / 0) }
    local function run() kv.ops.step.paged_attention(w) end
    local pairs_seen = o.chunk * (o.len - o.chunk) + o.chunk * (o.chunk + 1) / 2
    local bytes = 2 * seqs * o.len * o.kv_heads * o.dim * BYTES[o.dtype]
    return { run = run, bytes = o.by_bytes and bytes or nil,
             flops = not o.by_bytes and 4 * o.dim * o.heads * pairs_seen * seqs or nil,
             check = function()
               run()
               check(w, o, o.len)
             end }
  end
end

return function(b)
  local long, middle = b:shrunk(131072), b:shrunk(20480)
  for _, chunk in ipairs { 1, 2, 4, 8, 16, 32, 128 } do
    local name = ("%d new tokens over 1 x %d"):format(chunk, long)
    b:case { id = "P16", on = "cuda", name = name,
             setup = attention { chunk = chunk, len = long, by_bytes = chunk < 64 } }
  end
  local function shape(name, o)
    o.chunk, o.len = math.min(4096, middle / 2), middle
    name = ("prefill, the last %d of %d, %s"):format(o.chunk, middle, name)
    b:case { id = "P17", on = "cuda", name = name, setup = attention(o) }
  end
  for _, dim in ipairs { 128, 64, 96, 192, 256 } do
    shape("head_dim " .. dim, { dim = dim })
  end
  -- bench/peers.py has the same; PyTorch has no causal mask for the newest tokens alone.
  local whole = b:shrunk(16384)
  for _, dim in ipairs { 64, 96, 192, 256 } do
    b:case { id = "P17", on = "cuda", name = ("prefill, causal, %d, head_dim %d"):format(
               whole, dim), setup = attention { chunk = whole, len = whole, dim = dim } }
  end
  shape("f8 KV", { dtype = "f8e4m3" })
  shape("ALiBi", { alibi = true })
  shape("soft cap", { soft_cap = 50 })
  shape("block 1", { block = 1 })
  for _, group in ipairs { 16, 17, 32, 64, 128 } do
    local name = ("decode, %d heads a KV head, 16 x %d"):format(group, b:shrunk(8192))
    b:case { id = "P18", on = "cuda", name = name,
             setup = attention { heads = 8 * group, seqs = 16, chunk = 1,
               len = b:shrunk(8192), by_bytes = true } }
  end
end
