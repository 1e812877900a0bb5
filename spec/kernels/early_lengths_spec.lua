--- Attention may look for its work while the kernel before it still runs. It has to see
-- the lengths that this kernel writes: the same bits as with lengths that stood there
-- before.
local kv = require "kvlab"
local S = require "spec.support"

local cpu = kv.device "cpu"
local BLOCK, BLOCKS, SEQS = 16, 64, 3
local LENGTHS, SHORT = { 900, 1000, 17 }, { 5, 980, 0 }

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
    tables = kv.arange(dev, "i32", BLOCKS * SEQS):reshape { SEQS, BLOCKS } }
end

local function check(dev)
  for _, c in ipairs(CASES) do
    local a = inputs(dev, c)
    a.lens = kv.from(dev, "i32", { SEQS }, LENGTHS)
    local want = kv.ops.paged_attention(a):list()
    local short = kv.from(dev, "i32", { SEQS }, SHORT)
    local more = a.lens - short
    for try = 1, 20 do
      a.lens = short:clone()
      dev:sync()
      a.lens:add(more, a.lens)
      S.equal(kv.ops.paged_attention(a), want,
        ("%d heads of %d, try %d"):format(c.heads, c.dim, try))
    end
  end
end

describe("attention right behind a kernel that writes lengths", function()
  S.it_on_cpu("sees them", check)
  S.it_on_gpu("sees them", check)
end)
