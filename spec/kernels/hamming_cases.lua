--- Cases of the ops that compare hashes, their inputs, and the reference's scores.
local kv = require "kvlab"
local hashes = require "spec.kernels.hash_cases"
local reference = require "spec.reference.hash"
local support = require "spec.support"

local M = { list = {} }

local function add(c)
  for _, is_shared in ipairs { false, true } do
    local copy = { block_size = 16, kv_heads = 1, bits = 64, per = "block",
                   max_blocks = 12, is_shared = is_shared }
    for key, value in pairs(c) do copy[key] = value end
    M.list[#M.list + 1] = copy
  end
end

for _, per in ipairs { "block", "token" } do
  add { per = per, lens = {} }
  for _, bits in ipairs { 32, 64, 128, 192, 256, 320, 512, 1024 } do
    add { per = per, lens = { 0, 1, 100, 192 }, bits = bits, kv_heads = 2 }
  end
  for _, size in ipairs { 1, 3, 8, 16, 17, 32, 64 } do
    for _, bits in ipairs { 64, 128 } do
      add { per = per, lens = { 12 * size, size + 1, 12 * size - 1 }, block_size = size,
            bits = bits, kv_heads = 3, few = size % 2 == 0 }
    end
  end
  for len = 1, 16 do add { per = per, lens = { len }, max_blocks = 1, bits = 128 } end
  add { per = per, lens = { 1300, 700 }, block_size = 2, max_blocks = 700, few = true,
        holes = true }
end

--- Inputs of a case: hashes and query hashes as words, block tables.
M.prepare = support.latest(function(c)
  local rng, cpu, words = support.rng(#c.lens + c.bits), kv.device "cpu",
    math.ceil(c.bits / 64)
  local p = { blocks = #c.lens * c.max_blocks + 3, words = words }
  p.tables = support.block_table(rng, c.lens, c.block_size, c.max_blocks, p.blocks)
  for i = 1, c.holes and #p.tables or 0, 13 do
    p.tables[i] = i % 2 == 0 and -1 or p.blocks
  end
  local dims = { p.blocks, c.kv_heads, words }
  if c.per == "token" then table.insert(dims, 3, c.block_size) end
  p.hashes = hashes.random(cpu, dims, c.bits, rng, c.few)
  p.q_hashes = hashes.random(cpu, { #c.lens, c.kv_heads, words }, c.bits, rng, c.few)
  p.stored, p.bits = hashes.words(p.hashes), {} -- bits by the word that they begin at
  function p.on(dev)
    return p.hashes:to(dev), kv.from(dev, "i32", { #c.lens, c.max_blocks }, p.tables),
      kv.from(dev, "i32", { #c.lens }, c.lens)
  end
  return p
end)

--- The reference's scores of list `head` of sequence s, by block; q_bits(s, g): the bits
-- of a query's hash (those of the case's q_hashes).
function M.scores(c, s, head, q_bits)
  local p = M.prepare(c)
  local stored, asked = p.stored, hashes.words(p.q_hashes)
  q_bits = q_bits or function(seq, g)
    return hashes.bits(asked, (seq * c.kv_heads + g) * p.words, c.bits)
  end
  local tokens = c.per == "token" and c.block_size or 1
  local a = { lens = c.lens, tables = p.tables, max_blocks = c.max_blocks,
    blocks = p.blocks, block_size = c.block_size, is_token = c.per == "token",
    hash_of = function(block, g, t)
      local at = ((block * c.kv_heads + g) * tokens + t) * p.words
      p.bits[at] = p.bits[at] or hashes.bits(stored, at, c.bits)
      return p.bits[at]
    end }
  if not c.is_shared then return reference.scores(a, s, head, q_bits(s, head)) end
  local best = reference.scores(a, s, 0, q_bits(s, 0))
  for g = 1, c.kv_heads - 1 do
    best = reference.best(best, reference.scores(a, s, g, q_bits(s, g)))
  end
  return best
end

return M
