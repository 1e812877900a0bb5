--- Attention may look for its work while the kernel before it still runs. It has to see
-- the lengths, tables and lists that this kernel writes: the same bits as with those that
-- stood there before.
local kv = require "kvlab"
local S = require "spec.support"

local cpu = kv.device "cpu"
local BLOCK, BLOCKS, SEQS, LISTED = 16, 64, 3, 128

-- Heads on a KV head: for a decode kernel, and for one with many rows; over latents, for
-- few rows and for many.
local CASES = {
  { heads = 4, dim = 64 }, { heads = 40, dim = 64 },
  { heads = 20, dim = 576, value_dim = 512 }, { heads = 70, dim = 576, value_dim = 512 },
}

local function inputs(dev, c)
  local format = kv.format { codec = "bf16", kv_heads = 1, block_size = BLOCK,
    head_dim = c.dim, value_dim = c.value_dim }
  local shape = c.value_dim and { BLOCKS * SEQS, 1, BLOCK, c.dim }
    or { BLOCKS * SEQS, 2, 1, BLOCK, c.dim }
  return { format = format, q = S.randn(cpu, "bf16", { SEQS, c.heads, c.dim }, 1):to(dev),
    cache = S.randn(cpu, "bf16", shape, 2):to(dev),
    tables = kv.arange(dev, "i32", BLOCKS * SEQS):reshape { SEQS, BLOCKS },
    lens = kv.from(dev, "i32", { SEQS }, { 900, 1000, 17 }) }
end

local function list(dev, seed)
  return kv.randint(cpu, "i32", { SEQS, 1, LISTED }, { seed = seed, low = 0, high = 900 })
    :to(dev)
end

--- What is written late, and what stands there before.
local LATE = {
  lens = function(dev) return kv.from(dev, "i32", { SEQS }, { 5, 980, 0 }) end,
  tables = function(dev)
    local last = BLOCKS * SEQS - 1
    return (kv.full(dev, "i32", { last + 1 }, last) - kv.arange(dev, "i32", last + 1))
      :reshape { SEQS, BLOCKS }
  end,
  listed = function(dev) return list(dev, 4) end,
}

local function check(dev, name)
  for _, c in ipairs(CASES) do
    local a = inputs(dev, c)
    if name == "listed" then a.listed = list(dev, 3) end
    local want = kv.ops.paged_attention(a):list()
    local before = LATE[name](dev)
    local more = a[name] - before
    for try = 1, 20 do
      a[name] = before:clone()
      dev:sync()
      a[name]:add(more, a[name])
      S.equal(kv.ops.paged_attention(a), want,
        ("%s, %d heads of %d, try %d"):format(name, c.heads, c.dim, try))
    end
  end
end

describe("attention right behind a kernel that writes sees", function()
  for name, what in pairs { lens = "lengths", tables = "tables", listed = "lists" } do
    S.it_on_cpu(what, function(dev) check(dev, name) end)
    S.it_on_gpu(what, function(dev) check(dev, name) end)
  end
end)
