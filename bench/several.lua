--- Attention of several new tokens a sequence (P16), of other shapes of prefill (P17),
-- and of wide groups (P18), over paged memory with random tables. Flops: 4 * head_dim for
-- each head and each pair of a query and a key that it sees; bytes are K and V, once.
local attention = require "bench.lib.attention"

--- The work of a case; its limit comes from its bytes (by_bytes) or from its flops.
local function setup(o)
  return function(b)
    local work = attention.work(b, o)
    if o.by_bytes then work.flops = nil else work.bytes = nil end
    return work
  end
end

return function(b)
  local long, middle = b:shrunk(131072), b:shrunk(20480)
  for _, chunk in ipairs { 1, 2, 4, 8, 16, 32, 128 } do
    local name = ("%d new tokens over 1 x %d"):format(chunk, long)
    b:case { id = "P16", on = "cuda", name = name,
             setup = setup { chunk = chunk, len = long, by_bytes = chunk < 64 } }
  end
  local function shape(name, o)
    o.chunk, o.len = math.min(4096, middle / 2), middle
    name = ("prefill, the last %d of %d, %s"):format(o.chunk, middle, name)
    b:case { id = "P17", on = "cuda", name = name, setup = setup(o) }
  end
  for _, dim in ipairs { 128, 64, 96, 192, 256 } do
    shape("head_dim " .. dim, { dim = dim })
  end
  -- bench/peers.py has the same; PyTorch has no causal mask for the newest tokens alone.
  local whole = b:shrunk(16384)
  for _, dim in ipairs { 64, 96, 192, 256 } do
    b:case { id = "P17", on = "cuda", name = ("prefill, causal, %d, head_dim %d"):format(
               whole, dim), setup = setup { chunk = whole, len = whole, dim = dim } }
  end
  shape("f8 KV", { dtype = "f8e4m3" })
  shape("int8 KV", { dtype = "int8" })
  for _, dtype in ipairs { "f8e4m3", "int8" } do
    shape(dtype .. ", head_dim 256", { dtype = dtype, dim = 256 })
  end
  shape("head_dim 80", { dim = 80 })
  shape("ALiBi", { alibi = true })
  shape("soft cap", { soft_cap = 50 })
  shape("block 1", { block = 1 })
  for _, group in ipairs { 16, 17, 32, 64, 128 } do
    local name = ("decode, %d heads a KV head, 16 x %d"):format(group, b:shrunk(8192))
    b:case { id = "P18", on = "cuda", name = name,
             setup = setup { heads = 8 * group, seqs = 16, chunk = 1,
               len = b:shrunk(8192), by_bytes = true } }
  end
end
