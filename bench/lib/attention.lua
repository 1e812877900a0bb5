--- Attention over paged memory with random tables, in any shape that the op takes, as the
-- work of a case. Flops: 2 for each number of a key and of a value, for each head and
-- each pair of a query and a key that it sees. Bytes: K and V, once for each sequence, or
-- of every entry of every list. The check computes some heads of the newest token in f32.
local kv = require "kvlab"
local paged = require "bench.lib.paged"

local M = {}

local DEFAULTS = { seqs = 1, chunk = 1, heads = 32, kv_heads = 8, dim = 128, block = 16,
                   dtype = "bf16", window = 0, soft_cap = 0 }

--- The keys and values of one KV head of the first sequence that its newest token sees.
local function seen(w, o, g)
  local n = math.ceil(o.len / o.block)
  local function read(dim)
    return kv.tensor(w.q.device, "f32", { n, o.kv_heads, o.block, dim })
  end
  local keys, values = read(o.dim), not o.value_dim and read(o.dim) or nil
  kv.ops.read_blocks(w.cache, w.tables:index(0):narrow(0, n), keys, values, w.format)
  local first = o.window > 0 and math.max(0, o.len - o.window) or 0
  local function rows(x)
    x = x:transpose(0, 1):index(g):reshape { -1, o.dim }
    if w.listed then
      local row = o.chunk - 1
      return x:gather_rows(w.listed:reshape({ o.seqs * o.chunk, -1 }):index(row))
    end
    return x:narrow(first, o.len - first)
  end
  keys = rows(keys)
  if not o.value_dim then return keys, rows(values), first end
  values = keys:transpose(0, 1):narrow(0, o.value_dim):transpose(0, 1)
  return keys, values, first
end

local function check(w, o)
  local group, last = o.heads / o.kv_heads, o.chunk - 1
  for _, g in ipairs(o.kv_heads > 1 and { 0, o.kv_heads - 1 } or { 0 }) do
    kv.scope(function()
      local keys, values, first = seen(w, o, g)
      local q = w.q:index(last):narrow(g * group, group):cast "f32"
      local scores = q:matmul_t(keys) / math.sqrt(o.dim)
      if o.soft_cap > 0 then scores = (scores / o.soft_cap):tanh() * o.soft_cap end
      if w.alibi then
        local away = kv.arange(w.q.device, "f32", o.len - first) - (o.len - 1 - first)
        scores = scores + w.alibi:narrow(g * group, group):reshape { -1, 1 }
          * away:reshape { 1, -1 }
      end
      local got = w.out:index(last):narrow(g * group, group)
      paged.expect("the newest token", got, scores:softmax():matmul(values), 0.02)
    end)
  end
end

--- Pairs of a new token of a sequence and a key that it sees.
local function pairs_seen(o)
  if o.listed then return o.chunk * o.listed end
  local sum = 0
  for i = o.len - o.chunk + 1, o.len do
    sum = sum + (o.window > 0 and math.min(i, o.window) or i)
  end
  return sum
end

--- The work of one call.
---@param o table  len: tokens of each sequence; seqs, chunk: new tokens of each; heads,
--                 kv_heads, dim, block, dtype (of the cache, also int8); window,
--                 soft_cap, alibi; value_dim: of latents; listed: tokens in the list of
--                 each row; then all sequences have the same blocks
function M.work(b, o)
  o = setmetatable(o, { __index = DEFAULTS })
  local dev, seqs, lens, tokens = b.device, o.seqs, {}, o.seqs * o.chunk
  for s = 1, seqs do lens[s] = o.len end
  local tables, blocks = paged.random_tables(dev, o.listed and { o.len } or lens, o.block)
  if o.listed then tables = kv.zeros(dev, "i32", { seqs, 1 }) + tables end
  local w = { tables = tables, lens = kv.from(dev, "i32", lens), causal = true,
    starts = o.chunk > 1 and kv.arange(dev, "i32", seqs + 1) * o.chunk or nil,
    q = kv.randn(dev, "bf16", { tokens, o.heads, o.dim }, { seed = 2 }),
    alibi = o.alibi and kv.rand(dev, "f32", { o.heads }, { seed = 3 }) * 0.1 or nil,
    soft_cap = o.soft_cap, window = o.window,
    listed = o.listed and kv.randint(dev, "i32", { tokens, 1, o.listed },
      { seed = 4, low = 0, high = o.len - o.chunk + 1 }) or nil,
    out = kv.full(dev, "bf16", { tokens, o.heads, o.value_dim or o.dim }, 0 / 0) }
  w.format = kv.format { codec = o.dtype, kv_heads = o.kv_heads, block_size = o.block,
    head_dim = o.dim, value_dim = o.value_dim }
  if o.dtype == "int8" then
    w.cache = paged.random_memory(dev, "int8", blocks, w.format)
  else
    local shape = { blocks, 2, o.kv_heads, o.block, o.dim }
    if o.value_dim then table.remove(shape, 2) end
    w.cache = kv.randn(dev, "bf16", shape, { seed = 1 }):cast(o.dtype)
  end
  local function run() kv.ops.step.paged_attention(w) end
  local bytes_token = w.cache:bytes() / blocks / o.block
  local pairs_all = seqs * pairs_seen(o)
  local read = o.listed and pairs_all
    or seqs * math.min(o.len, o.window > 0 and o.window + o.chunk - 1 or o.len)
  return { run = run, bytes = bytes_token * read,
    flops = 2 * (o.dim + (o.value_dim or o.dim)) * o.heads * pairs_all,
    check = function()
      run()
      check(w, o)
    end }
end

return M
