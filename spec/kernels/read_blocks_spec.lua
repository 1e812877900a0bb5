--- Reading the keys and values of blocks out of their pages.
local kv = require "kvlab"
local link_bytes = require "spec.kernels.link_bytes"
local support = require "spec.support"

local BLOCKS, LISTED = 7, { 3, -1, 0, 6, 99, 3 }
local SHAPES = { { 1, 16, 1 }, { 2, 32, 5 }, { 3, 80, 16 }, { 2, 256, 4 } }

local cases = {}
for _, dtype in ipairs { "f32", "f16", "bf16", "f8e4m3" } do
  for _, out in ipairs { "f32", "f16", "bf16", dtype == "f8e4m3" and dtype or nil } do
    for i, s in ipairs(SHAPES) do
      cases[#cases + 1] = { dtype = dtype, out = out, kv_heads = s[1], head_dim = s[2],
        block_size = s[3], which = ({ "kv", "k", "v" })[(i + #cases) % 3 + 1] }
    end
  end
end

--- The numbers of a half (0: K, 1: V) of the listed blocks, from those of a cache.
local function expected(c, numbers, half)
  local strip, out = c.block_size * c.head_dim, {}
  for _, block in ipairs(LISTED) do
    for head = 0, c.kv_heads - 1 do
      local at = ((block * 2 + half) * c.kv_heads + head) * strip
      for i = 1, strip do
        out[#out + 1] = block >= 0 and block < BLOCKS and numbers[at + i] or 0
      end
    end
  end
  return out
end

local function check(dev, c)
  local cpu = kv.device "cpu"
  local cache = support.randn(cpu, c.dtype,
    { BLOCKS, 2, c.kv_heads, c.block_size, c.head_dim }, 3)
  local numbers = support.numbers(cache:cast(c.out))
  local shape = { #LISTED, c.kv_heads, c.block_size, c.head_dim }
  local k = c.which:find "k" and support.poisoned(dev, c.out, shape) or nil
  local v = c.which:find "v" and support.poisoned(dev, c.out, shape) or nil
  kv.ops.read_blocks(cache:to(dev), kv.from(dev, "i32", { #LISTED }, LISTED), k, v)
  for half, got in pairs { [0] = k, v } do
    support.equal(got, expected(c, numbers, half), ("half %d of %s as %s"):format(half,
      c.dtype, c.out))
  end
end

describe("read_blocks", function()
  support.it_on_cpu("gives the keys and values of the listed blocks", function(dev)
    for _, c in ipairs(support.sample(cases)) do check(dev, c) end
  end)
  support.it_on_gpu("gives them on CUDA", function(dev)
    for _, c in ipairs(support.sample(cases)) do check(dev, c) end
  end)

  it("tells the link what comes from pinned memory", function()
    local dev = kv.device "cpu"
    local cache = kv.pinned(dev, "bf16", { BLOCKS, 2, 2, 4, 16 }):fill_(1)
    local k = kv.zeros(dev, "f32", { #LISTED, 2, 4, 16 })
    local blocks = kv.from(dev, "i32", { #LISTED }, LISTED)
    assert.same({ 4 * 2 * 4 * 16 * 2, 0 }, { link_bytes(dev, function()
      kv.ops.read_blocks(cache, blocks, k)
    end) })
  end)

  it("refuses what does not fit", function()
    local dev = kv.device "cpu"
    local cache = kv.zeros(dev, "bf16", { BLOCKS, 2, 2, 4, 16 })
    local blocks = kv.from(dev, "i32", { 2 }, { 0, 1 })
    local function refuses(words, k, v)
      support.raises(words, kv.ops.read_blocks, cache, blocks, k, v)
    end
    refuses("k is f32 [3, 2, 4, 16], expected", kv.zeros(dev, "f32", { 3, 2, 4, 16 }))
    refuses("v is i32 [2, 2, 4, 16]", nil, kv.zeros(dev, "i32", { 2, 2, 4, 16 }))
    local frozen = kv.zeros(dev, "f32", { 2, 2, 4, 16 })
    kv.check(kv.C.kvl_tensor_freeze(frozen, 1))
    refuses("k is frozen, expected a tensor that may be written", frozen)
    refuses("v is frozen, expected a tensor that may be written", nil, frozen)
    refuses("v is f32 [2, 2, 4, 16], expected bf16", kv.zeros(dev, "bf16",
      { 2, 2, 4, 16 }), kv.zeros(dev, "f32", { 2, 2, 4, 16 }))
  end)
end)
