--- Windows and places are exact; attention in chunks is attention over everything within
-- 1e-5: sums in another order.
local kv = require "kvlab"
local S = require "spec.support"
local reference = require "spec.reference.indexer"

local cpu = kv.device "cpu"

local CASES = {
  { lens = { 100 }, block_size = 16, capacity = 32 },
  { lens = { 100, 0, 33, 200 }, block_size = 16, capacity = 128 },
  { lens = { 64, 128, 1 }, block_size = 8, capacity = 100 },
  { lens = { 7, 5 }, block_size = 16 },
  { lens = { 0, 0 }, block_size = 16 },
}

local function chunks_of(c, dev)
  local paged = S.paged { lens = c.lens, block_size = c.block_size, kv_heads = 2,
                          head_dim = 32 }
  local cache, tables, lens = paged.on(dev)
  local chunks = kv.prefix_chunks { tables = tables, lens = c.lens,
    block_size = c.block_size, capacity = c.capacity }
  return chunks, paged, cache, tables, lens
end

local function specs(dev)
  local name = dev:name()

  it("cut prefixes into equal shares on " .. name, function()
    for _, c in ipairs(CASES) do
      local chunks, paged = chunks_of(c, dev)
      local capacity, seen = c.capacity or 131072, {}
      assert.equal(0, chunks.length % c.block_size)
      assert.is_true(chunks.length * #c.lens <= capacity)
      assert.is_true((chunks.length + c.block_size) * #c.lens > capacity)
      for i, chunk in ipairs(chunks) do
        local starts, lens = chunk.starts:list(), chunk.lens:list()
        local ends, sum = chunk.ends:list(), 0
        for s, len in ipairs(lens) do
          assert.equal((i - 1) * chunks.length, starts[s])
          assert.is_true(len >= 0 and len <= chunks.length)
          sum = sum + len
          assert.equal(sum, ends[s])
          seen[s] = (seen[s] or 0) + len
        end
        assert.equal(sum, chunk.tokens)
        assert.is_true(sum > 0 and sum <= capacity)
        S.equal(chunk.places, reference.ragged_places(paged.tables, paged.max_blocks,
          c.block_size, starts, ends, sum))
      end
      for s, len in ipairs(c.lens) do assert.equal(len, seen[s] or 0) end
    end
  end)

  it("attend to a prefix as attention over all of it does on " .. name, function()
    for _, c in ipairs(CASES) do
      for _, rows in ipairs { 1, 3 } do
        local chunks, _, cache, tables, lens = chunks_of(c, dev)
        local n, starts = #c.lens, nil
        if rows > 1 then starts = kv.arange(dev, "i32", n + 1, 0, rows) end
        local q = kv.randn(dev, "f32", { n * rows, 4, 32 }, { seed = 9 })
        local out, lse = chunks:attend { q = q, starts = starts, cache = cache }
        local want_lse = S.poisoned(dev, "f32", { n * rows, 4 })
        local want = kv.ops.paged_attention { q = q, starts = starts, cache = cache,
          tables = tables, lens = lens, causal = false, lse = want_lse }
        S.close(out, want, 1e-5)
        S.close(lse, want_lse, 1e-5)
      end
    end
  end)

  it("join with causal attention over what follows on " .. name, function()
    local total, prefix, size = 150, 96, 16
    local paged = S.paged { lens = { total }, block_size = size, kv_heads = 2,
                            head_dim = 32 }
    local cache, tables, lens = paged.on(dev)
    local rows = total - prefix
    local q = kv.randn(dev, "f32", { rows, 4, 32 }, { seed = 4 })
    local starts, blocks = kv.from(dev, "i32", { 2 }, { 0, rows }), {}
    for b = prefix / size, math.ceil(total / size) - 1 do blocks[#blocks + 1] = b end
    local call = { q = q, starts = starts, cache = cache, tables = tables, lens = lens }
    local want = kv.ops.paged_attention(call)
    local chunks = kv.prefix_chunks { tables = tables, lens = { prefix },
                                      block_size = size, capacity = 40 }
    assert.equal(3, #chunks)
    call.prev_out, call.prev_lse = chunks:attend { q = q, starts = starts, cache = cache }
    call.selection = kv.from(dev, "i32", { 1, 1, #blocks }, blocks)
    S.close(kv.ops.paged_attention(call), want, 1e-5)
  end)

  it("give an indexer the keys of a chunk on " .. name, function()
    local index = kv.index_cache { device = dev, blocks = 9, block_size = 16, dim = 32 }
    local tables = kv.from(dev, "i32", { 2, 4 }, { 8, 1, 7, 2, 0, 6, 3, 5 })
    local keys = kv.randn(dev, "f32", { 9 * 16, 32 }, { seed = 2 })
    index:append(0, keys, kv.arange(dev, "i64", 9 * 16))
    local chunks = kv.prefix_chunks { tables = tables, lens = { 50, 20 }, block_size = 16,
                                      capacity = 64 }
    local k = index:gather(0, chunks[2].places) -- tokens 32 ... 49 of the first
    local list = {}
    for p = 32, 49 do list[#list + 1] = (p < 48 and 7 or 2) * 16 + p % 16 end
    S.equal(k, (kv.ops.quantise_rows(keys:gather_rows(kv.from(dev, "i32",
      { #list }, list)))))
  end)
end

describe("prefix chunks", function()
  S.each_device(specs)

  it("say what is wrong", function()
    local tables = kv.zeros(cpu, "i32", { 2, 4 })
    local function try(o)
      return function() kv.prefix_chunks(o) end
    end
    S.raises("tables is missing", try { lens = { 3 }, block_size = 16 })
    S.raises("lens is 1 lengths, expected 2", try { tables = tables, lens = { 3 },
                                                    block_size = 16 })
    S.raises("block_size is missing", try { tables = tables, lens = { 3, 4 } })
    S.raises("capacity is 31, expected a block of 16 for each of 2",
      try { tables = tables, lens = { 3, 4 }, block_size = 16, capacity = 31 })
    S.raises("length 2 is 65, expected 0 ... 64", try { tables = tables, lens = { 3, 65 },
                                                        block_size = 16 })
    S.raises("did you mean lens?", try { tables = tables, len = { 3 } })
  end)
end)
