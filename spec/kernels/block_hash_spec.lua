--- Exact but for bits whose projection is next to 0, see hash_cases.
local kv = require "kvlab"
local hashes = require "spec.kernels.hash_cases"
local reference = require "spec.reference.hash"
local support = require "spec.support"

local cases = {}
for _, dtype in ipairs { "f32", "f16", "bf16", "f8e4m3" } do
  for _, s in ipairs { { {}, 16, 1, 64, 64 }, { { 1 }, 1, 1, 16, 32 },
                       { { 50, 7 }, 16, 2, 80, 64 }, { { 40 }, 17, 3, 48, 128 },
                       { { 70 }, 64, 2, 128, 64 }, { { 33 }, 8, 1, 256, 192 },
                       { { 9, 30 }, 16, 2, 64, 1024 } } do
    for _, per in ipairs { "block", "token" } do
      for _, is_moved in ipairs { false, true } do
        cases[#cases + 1] = { dtype = dtype, lens = s[1], block_size = s[2],
          kv_heads = s[3], head_dim = s[4], bits = s[5], per = per, is_moved = is_moved }
      end
    end
  end
end
for len = 1, 16 do
  cases[#cases + 1] = { dtype = "bf16", lens = { len }, block_size = 16, head_dim = 16,
    bits = 64, per = len % 2 == 0 and "token" or "block" }
end

local prepared = support.latest(function(c)
  local paged = support.paged(c)
  local blocks, tokens = support.named_blocks(paged)
  local rows = {}
  for i, block in ipairs(blocks) do -- the same rows in the opposite order
    rows[i] = block >= 0 and paged.layout.blocks - 1 - block or -1
  end
  return { paged = paged, blocks = blocks, tokens = tokens, rows = c.is_moved and rows,
           planes = support.randn(kv.device "cpu", "f32", { c.bits, c.head_dim }, 9) }
end)

local function run(dev, c)
  local p = prepared(c)
  local l, words = p.paged.layout, math.ceil(c.bits / 64)
  local dims = { l.blocks, l.kv_heads, words }
  if c.per == "token" then table.insert(dims, 3, l.block_size) end
  local function list(values) return kv.from(dev, "i32", { #values }, values) end
  local out = support.poisoned(dev, "u64", dims)
  kv.check(kv.C.kvl_block_hash((p.paged.on(dev)), nil, list(p.blocks), list(p.tokens),
    p.rows and list(p.rows) or nil, p.planes:to(dev), out))
  return out
end

--- Where the keys of (block, head) begin in the flat cache.
local function keys_at(l, block, head)
  return (block * 2 * l.kv_heads + head) * l.block_size * l.head_dim
end

--- Every hash that the call names, as fn(word, x, x_at, tokens): where it is, of which
-- vector, the mean of how many tokens.
local function each_hash(c, fn)
  local p = prepared(c)
  local l, words, cache = p.paged.layout, math.ceil(c.bits / 64), p.paged.cache
  for i, block in ipairs(p.blocks) do
    for head = 0, block >= 0 and l.kv_heads - 1 or -1 do
      local row = (p.rows or p.blocks)[i] * l.kv_heads + head
      local at = keys_at(l, block, head)
      if c.per == "block" then
        fn(row * words, reference.mean(cache, at, p.tokens[i], l.head_dim), 0,
          p.tokens[i])
      else
        for t = 0, p.tokens[i] - 1 do
          fn((row * l.block_size + t) * words, cache, at + t * l.head_dim, 1)
        end
      end
    end
  end
end

describe("hashing blocks", function()
  support.it_on_cpu("hashes the mean key or every valid token, and nothing else",
    function(dev)
      local near, all = 0, 0
      for i, c in ipairs(support.sample(cases)) do
        local words, count = hashes.words(run(dev, c))
        local planes, written = prepared(c).planes:list(), {}
        each_hash(c, function(at, x, x_at, tokens)
          local what = ("case %d, word %d"):format(i, at)
          if tokens > 0 then
            near = near + hashes.check(words, at, x, x_at, planes, c.bits, c.head_dim,
              what)
            all = all + c.bits
          end
          for w = at, at + math.ceil(c.bits / 64) - 1 do
            written[w] = true
            if tokens == 0 then assert.equal(0ULL, words[w], what) end
          end
        end)
        for w = 0, count - 1 do
          if not written[w] then assert.equal(77ULL, words[w], "a hash not named") end
        end
      end
      assert.is_true(near < all / 1000)
    end)
end)

describe("hashing blocks on CUDA #gpu", function()
  support.it_on_gpu("gives the CPU's bits", function(cuda, cpu)
    for i, c in ipairs(cases) do
      hashes.equal(run(cuda, c), run(cpu, c), ("case %d"):format(i))
    end
  end)
end)
