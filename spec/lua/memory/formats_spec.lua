--- What a page is, said by a format instead of by a shape.
local kv = require "kvlab"
local support = require "spec.support"

local cpu = kv.device "cpu"
local BLOCKS, KV_HEADS, SIZE, DIM, GROUP, WIDTH = 12, 2, 8, 32, 2, 5
local LENS = { 33, 7 }

local function format(changes)
  local o = { codec = "bf16", kv_heads = KV_HEADS, block_size = SIZE, head_dim = DIM }
  for name, value in pairs(changes or {}) do o[name] = value end
  return kv.format(o)
end

--- The same op over memory as a tensor of pages and over memory without a shape of its
-- own, which a format describes.
local function both(dtype, run)
  local paged = support.randn(cpu, dtype, { BLOCKS, 2, KV_HEADS, SIZE, DIM }, 3)
  local flat = paged:clone():reshape { BLOCKS, 2 * KV_HEADS * SIZE * DIM }
  return { run(paged, nil) }, { run(flat, format { codec = dtype }) }
end

local function same(want, got, what)
  for i, tensor in ipairs(want) do
    support.equal(got[i], tensor, ("%s, result %d"):format(what, i))
  end
end

local function lists(dev)
  local order = support.distinct(support.rng(5), #LENS * WIDTH, BLOCKS)
  return kv.from(dev, "i32", { #LENS, WIDTH }, order),
    kv.from(dev, "i32", { #LENS }, LENS)
end

local OPS = {
  append_kv = function(memory, of, rows)
    local places = kv.from(memory.device, "i64", { 3 }, { 90, -1, 17 })
    local k = support.randn(memory.device, rows, { 3, KV_HEADS, DIM }, 1)
    kv.ops.append_kv(k, support.randn(memory.device, rows, { 3, KV_HEADS, DIM }, 2),
      places, memory, of)
    return memory:reshape { BLOCKS, -1 }
  end,
  rope_append = function(memory, of, rows)
    local places = kv.from(memory.device, "i64", { 2 }, { 90, 17 })
    local q = support.randn(memory.device, rows, { 2, KV_HEADS * GROUP, DIM }, 4)
    local k = support.randn(memory.device, rows, { 2, KV_HEADS, DIM }, 1)
    kv.ops.rope_append(q, k, k, kv.from(memory.device, "i32", { 2 }, { 5, 9 }),
      kv.from(memory.device, "f32", { 2 }, { 1, 0.5 }), places, memory, of)
    return memory:reshape { BLOCKS, -1 }, q
  end,
  paged_attention = function(memory, of, rows)
    local tables, lens = lists(memory.device)
    return kv.ops.paged_attention { cache = memory, format = of, tables = tables,
      lens = lens,
      q = support.randn(memory.device, rows, { #LENS, KV_HEADS * GROUP, DIM }, 4) }
  end,
  ["a prompt"] = function(memory, of, rows)
    local tables, lens = lists(memory.device)
    return kv.ops.paged_attention { cache = memory, format = of, tables = tables,
      lens = lens, starts = kv.from(memory.device, "i32", { 3 }, { 0, 20, 27 }),
      q = support.randn(memory.device, rows, { 27, KV_HEADS * GROUP, DIM }, 4) }
  end,
  ["listed tokens"] = function(memory, of, rows)
    local tables, lens = lists(memory.device)
    return kv.ops.paged_attention { cache = memory, format = of, tables = tables,
      lens = lens,
      listed = kv.from(memory.device, "i32", { 2, 1, 3 }, { 1, 36, 31, -1, 8, 8 }),
      q = support.randn(memory.device, rows, { 2, KV_HEADS * GROUP, DIM }, 4) }
  end,
  read_blocks = function(memory, of)
    local k = kv.zeros(memory.device, "f32", { 2, KV_HEADS, SIZE, DIM })
    local v = kv.zeros(memory.device, "f32",
      { 2, KV_HEADS, SIZE, of and of.value_dim or DIM })
    kv.ops.read_blocks(memory, kv.from(memory.device, "i32", { 2 }, { 7, 3 }), k, v, of)
    return k, v
  end,
  block_minmax = function(memory, of)
    local blocks = kv.from(memory.device, "i32", { 2 }, { 7, 3 })
    local out = kv.zeros(memory.device, memory:type() == "u8" and "f32" or memory:type(),
      { BLOCKS, 2, KV_HEADS, DIM })
    kv.check(kv.C.kvl_block_minmax(memory, of, blocks, blocks, nil, out))
    return out
  end,
  block_mean = function(memory, of)
    local blocks = kv.from(memory.device, "i32", { 2 }, { 7, 3 })
    local out = kv.zeros(memory.device, "f32", { BLOCKS, KV_HEADS, DIM })
    kv.check(kv.C.kvl_block_mean(memory, of, blocks, blocks, nil, out))
    return out
  end,
  block_hash = function(memory, of)
    local blocks = kv.from(memory.device, "i32", { 2 }, { 7, 3 })
    local out = kv.zeros(memory.device, "u64", { BLOCKS, KV_HEADS, 1 })
    kv.check(kv.C.kvl_block_hash(memory, of, blocks, blocks, nil,
      support.randn(memory.device, "f32", { 64, DIM }, 6), out))
    return out
  end,
  score_max_qk = function(memory, of, rows)
    local tables, lens = lists(memory.device)
    local out = kv.zeros(memory.device, "f32", { #LENS, KV_HEADS, WIDTH })
    kv.check(kv.C.kvl_score_max_qk(support.randn(memory.device, rows,
      { #LENS, KV_HEADS * GROUP, DIM }, 4), memory, of, tables, lens, kv.C.KVL_GROUP_MAX,
      out))
    return out
  end,
  move_blocks = function(memory, of)
    local to = memory:clone():fill_(0)
    local function list(...)
      return kv.from(memory.device, "i32", { 1, 2, 2 }, { ... })
    end
    kv.check(kv.C.kvl_move_blocks(memory, list(4, 1, 0, -1), to, list(0, 9, 2, 3), of,
      nil))
    return to:reshape { BLOCKS, -1 }
  end,
}

local READS, READS_OF_LATENTS = {}, {}
for name, run in pairs(OPS) do
  if not name:find "append" and name ~= "move_blocks" then
    READS[name] = run
    READS_OF_LATENTS[name] = name ~= "block_hash" and run or nil
  end
end

describe("a format", function()
  for name, run in pairs(OPS) do
    it("says to " .. name .. " what a shape says", function()
      for _, dtype in ipairs { "f32", "f16", "bf16", "f8e4m3" } do
        local want, got = both(dtype, function(memory, of)
          return run(memory, of, dtype == "f8e4m3" and "bf16" or dtype)
        end)
        same(want, got, dtype)
      end
    end)
  end

  for name, run in pairs(READS) do
    it(("lets %s read of int8 what it holds"):format(name), function()
      local memory, of, held = support.int8_pages(support.randn(cpu, "f32",
        { BLOCKS, 2, KV_HEADS, SIZE, DIM }, 3))
      same({ run(held, nil, "f32") }, { run(memory, of, "f32") }, name)
    end)
  end

  for name, run in pairs(READS_OF_LATENTS) do
    it(("lets %s read of f8_latent what it holds"):format(name), function()
      local memory, of, held = support.f8_latent_pages(support.randn(cpu, "f32",
        { BLOCKS, 2, KV_HEADS, SIZE, DIM }, 3), 16)
      local keys = held:transpose(0, 1):index(0):clone():reshape { BLOCKS, -1 }
      local plain = format { codec = "f32", value_dim = 16 }
      same({ run(keys, plain, "f32") }, { run(memory, of, "f32") }, name)
    end)
  end

  it("counts the bytes of a page", function()
    for dtype, bytes in pairs { f32 = 4, f16 = 2, bf16 = 2, f8e4m3 = 1 } do
      assert.equal(2 * KV_HEADS * SIZE * DIM * bytes,
        tonumber(kv.C.kvl_format_bytes_page(format { codec = dtype })))
    end
  end)

  it("keeps its scales while it lives", function()
    local one = format { codec = "f8e4m3", k_scale = kv.full(cpu, "f32", { 2 }, 3) }
    collectgarbage()
    collectgarbage()
    assert.same({ 3, 3 }, one.k_scale[0]:list())
  end)

  it("refuses pages that there cannot be", function()
    support.refuses(function() format { block_size = 5000 } end,
      "block_size is 5000, expected 1 ... 4096")
    support.refuses(function() format { codec = "f8e4m3", head_dim = 24 } end,
      "head_dim is 24, expected a multiple of 16 for an f8e4m3 format")
    support.refuses(function() format { codec = "i32" } end, "codec is \"i32\"", "f8e4m3")
    support.refuses(function() format { k_scale = kv.ones(cpu, "f32", { 2 }) } end,
      "k_scale is given for a cache of bf16, expected f8e4m3")
    support.refuses(function() format { head_dim = 576 } end, "head_dim is 576, "
      .. "expected 256 at most, or values that are the first numbers of keys")
    local odd = format()
    odd.value_dim = 16
    support.raises("format has keys of 32 numbers and values of 16, expected values like",
      function() kv.check(tonumber(kv.C.kvl_format_bytes_page(odd))) end)
    odd.codec = 77
    support.raises("format has codec 77, expected 0, 1, 2, 3, 16 or 17",
      function() kv.check(tonumber(kv.C.kvl_format_bytes_page(odd))) end)
  end)

  it("refuses memory that is not made of its pages", function()
    local function attend(memory, of)
      local tables, lens = lists(cpu)
      return function()
        kv.ops.paged_attention { cache = memory, format = of, tables = tables,
          lens = lens, q = kv.zeros(cpu, "bf16", { #LENS, KV_HEADS * GROUP, DIM }) }
      end
    end
    local page = 2 * KV_HEADS * SIZE * DIM
    support.refuses(attend(kv.zeros(cpu, "bf16", { BLOCKS, page + 16 }), format()),
      ("cache has %d bytes for 12 blocks, expected %d for each"):format(
        BLOCKS * (page + 16) * 2, page * 2))
    support.refuses(attend(kv.zeros(cpu, "f16", { BLOCKS, page }), format()),
      "cache is f16 [12, 1024], expected bf16")
    support.refuses(attend(kv.zeros(cpu, "bf16", { BLOCKS, page }), format {
      codec = "f32" }), "cache is bf16")
  end)
end)

-- Ops that a GPU sums in another order, or in 16 bits; the other ops are exact.
local CLOSE = { paged_attention = true, ["a prompt"] = true, ["listed tokens"] = true,
                block_mean = true, score_max_qk = true }

--- Numbers for pages, in which V of a token is up to 10^6 times as large as that of
-- another, or as small; positive: its magnitudes.
local function wild_values(positive)
  local list = support.randn(cpu, "f32", { BLOCKS, 2, KV_HEADS, SIZE, DIM }, 3):list()
  for i, x in ipairs(list) do
    local row = math.floor((i - 1) / DIM)
    if math.floor(row / (KV_HEADS * SIZE)) % 2 == 1 then
      list[i] = (positive and math.abs(x) or x) * 10 ^ (row * 7 % 13 - 6)
    end
  end
  return list
end

--- A device's attention is off by no more than a share of the magnitudes that a row sums.
-- is_listed: over lists of all tokens.
local function reads_wild_values(dev, is_listed)
  for _, starts in ipairs { false, { 0, 20, 27 } } do
    -- a prefill turns V into q's dtype, and f16 ends at 65504
    for _, rows in ipairs(starts and not is_listed and { "bf16" }
      or { "f16", "bf16" }) do
      local heads, tokens = KV_HEADS * GROUP, starts and 27 or #LENS
      local q = support.randn(cpu, rows, { tokens, heads, DIM }, 4)
      local function attend(on, positive)
        local memory, of = support.int8_pages(kv.from(on, "f32",
          { BLOCKS, 2, KV_HEADS, SIZE, DIM }, wild_values(positive)))
        local tables, lens = lists(on)
        local listed = kv.zeros(on, "i32", { tokens, 1, 1 }) + kv.arange(on, "i32", 40)
        return kv.ops.paged_attention { cache = memory, format = of, tables = tables,
          lens = lens, starts = starts and kv.from(on, "i32", { 3 }, starts) or nil,
          listed = is_listed and listed or nil,
          q = q:to(on), out = kv.zeros(on, "f32", { tokens, heads, DIM }) }:to(cpu):list()
      end
      local most, want, got = attend(cpu, true), attend(cpu), attend(dev)
      for i, x in ipairs(want) do
        assert.is_true(math.abs(got[i] - x) <= 2 ^ -6 * most[i], rows .. i)
      end
    end
  end
end

describe("int8 on a GPU #gpu", function()
  if not kv.cuda_available() then return end
  local cuda = kv.device "cuda"
  local function pages(dev)
    return support.int8_pages(support.randn(cpu, "f32",
      { BLOCKS, 2, KV_HEADS, SIZE, DIM }, 3):to(dev))
  end
  it("is packed as on the CPU", function()
    support.equal((pages(cuda)):to(cpu), (pages(cpu)))
  end)
  it("is rotated and packed as by two ops", function()
    for _, rows in ipairs { "f32", "f16", "bf16" } do
      for _, pairs_count in ipairs { 2, 12, DIM / 2 } do
        local dims = { 2, KV_HEADS, DIM }
        local k, positions = support.randn(cuda, rows, dims, 1),
          kv.from(cuda, "i32", { 2 }, { 5, 9 })
        local freq, places = kv.rand(cuda, "f32", { pairs_count }, { seed = 8 }),
          kv.from(cuda, "i64", { 2 }, { 90, 17 })
        local one, of = pages(cuda)
        local two, q = pages(cuda),
          support.randn(cuda, rows, { 2, KV_HEADS * GROUP, DIM }, 2)
        local turned, turned_q, what = k:clone(), q:clone(), rows .. pairs_count
        kv.ops.rope_append(q, k, k, positions, freq, places, one, of)
        kv.ops.rope(turned, positions, freq)
        kv.ops.rope(turned_q, positions, freq)
        kv.ops.append_kv(turned, k, places, two, of)
        support.equal(one, two, what)
        support.equal(q, turned_q, what)
      end
    end
  end)
  it("reads V of any sizes", function() reads_wild_values(cuda) end)
  it("reads V of any sizes of listed tokens", function()
    reads_wild_values(cuda, true)
  end)
  for name, run in pairs(OPS) do
    if name ~= "rope_append" then it("gives " .. name .. " what the CPU gives", function()
      for _, rows in ipairs { "f32", "f16", "bf16" } do
        local want, got = { run(pages(cpu), select(2, pages(cpu)), rows) },
          { run(pages(cuda), select(2, pages(cuda)), rows) }
        local tolerance = rows == "f32" and 1e-5 or 2e-2
        for i, tensor in ipairs(want) do
          local what = ("%s, %s, result %d"):format(name, rows, i)
          if CLOSE[name] then
            support.close(got[i]:to(cpu):cast "f32", tensor:cast "f32", tolerance,
              tolerance, what)
          else
            support.equal(got[i]:to(cpu), tensor, what)
          end
        end
      end
    end) end
  end
end)
