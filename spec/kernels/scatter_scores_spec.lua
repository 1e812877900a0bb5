--- Exact: numbers are copied.
local kv = require "kvlab"
local support = require "spec.support"

local function case(rng, c)
  local t = { scores = {}, tables = {}, out = {} }
  for i = 1, c.seqs * c.heads * c.width do t.scores[i] = rng(1000) / 8 end
  for i = 1, c.kv_heads * c.blocks do t.out[i] = -rng(1000) end
  for seq = 0, c.seqs - 1 do -- sequences share their first block, and one has none
    local own = support.distinct(rng, math.min(c.width, c.blocks), c.blocks)
    for b = 0, c.width - 1 do
      local block = own[b + 1] or -1
      for other = 0, seq - 1 do -- a block has the same place in all tables
        for at = 0, c.width - 1 do
          if at ~= b and t.tables[other * c.width + at + 1] == block then block = -1 end
        end
      end
      if b == 0 and seq > 0 then block = t.tables[1] end
      if seq == 2 then block = b % 2 == 0 and -1 or c.blocks end
      t.tables[#t.tables + 1] = block
    end
  end
  return t
end

--- What `out` has afterwards.
local function expected(t, c)
  local out = { unpack(t.out) }
  for seq = 0, c.seqs - 1 do
    for head = 0, c.kv_heads - 1 do
      for b = 0, c.width - 1 do
        local block = t.tables[seq * c.width + b + 1]
        local row = seq * c.heads + (c.heads > 1 and head or 0)
        if block >= 0 and block < c.blocks then
          out[head * c.blocks + block + 1] = t.scores[row * c.width + b + 1]
        end
      end
    end
  end
  return out
end

local CASES = {
  { seqs = 1, heads = 1, kv_heads = 1, width = 1, blocks = 1 },
  { seqs = 1, heads = 4, kv_heads = 4, width = 9, blocks = 30 },
  { seqs = 4, heads = 1, kv_heads = 3, width = 13, blocks = 60 },
  { seqs = 5, heads = 8, kv_heads = 8, width = 70, blocks = 500 },
  { seqs = 0, heads = 2, kv_heads = 2, width = 3, blocks = 4 },
  { seqs = 2, heads = 2, kv_heads = 2, width = 0, blocks = 4 },
}

describe("scattering scores to blocks", function()
  local function copies(dev)
    for i, c in ipairs(CASES) do
      local t = case(support.rng(i), c)
      local out = kv.from(dev, "f32", { c.kv_heads, c.blocks }, t.out)
      kv.check(kv.C.kvl_scatter_scores(
        kv.from(dev, "f32", { c.seqs, c.heads, c.width }, t.scores),
        kv.from(dev, "i32", { c.seqs, c.width }, t.tables), out))
      support.equal(out, expected(t, c), "case " .. i)
    end
  end
  local name = "writes each where its block is; the last sequence wins"
  support.it_on_cpu(name, copies)
  support.it_on_gpu(name, copies)

  it("names heads that do not fit", function()
    local dev = kv.device "cpu"
    support.refuses(function()
      kv.check(kv.C.kvl_scatter_scores(kv.zeros(dev, "f32", { 1, 2, 3 }),
        kv.zeros(dev, "i32", { 1, 3 }), kv.zeros(dev, "f32", { 4, 3 })))
    end, "scores are for 2 heads, expected 1 or kv_heads = 4")
  end)
end)
