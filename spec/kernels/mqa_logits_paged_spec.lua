--- Tolerances: mqa_cases.
local kv = require "kvlab"
local mqa = require "spec.kernels.mqa_cases"
local reference = require "spec.reference.index"
local support = require "spec.support"

local cases = {}
local function add(lens, each, heads, dim, block_size, o)
  local c = o or {}
  c.lens, c.each, c.heads, c.dim, c.block_size = lens, each, heads, dim, block_size
  c.seed, c.dtype = 20 * #cases, c.dtype or "f32"
  cases[#cases + 1] = c
end
add({}, 1, 8, 32, 64)
add({ 0 }, 1, 8, 32, 64)
add({ 1, 0, 65 }, 1, 8, 32, 64)
for _, heads in ipairs { 1, 8, 20, 32, 64 } do
  add({ 100, 7, 64 }, 1, heads, ({ 32, 64, 128 })[1 + heads % 3], 64)
end
for _, size in ipairs { 1, 7, 8, 16, 24, 100, 256 } do
  add({ 130, 40, 9 }, 1, 16, 64, size)
end
add({ 130, 129, 64, 63 }, 2, 32, 128, 64)
add({ 90, 91, 92, 20, 21, 22 }, 3, 64, 128, 64, { dtype = "bf16" })
add({ 50, 60, 70, 80, 90 }, 5, 64, 64, 32)
add({ 100, 300, 100 }, 1, 16, 32, 64, { columns = 70 })
add({ 100, 300 }, 1, 16, 32, 64, { columns = 1000, too_long = true })
add({ 200, 130 }, 1, 16, 64, 64, { broken = true })

--- Keys in the blocks of random tables; what no sequence has is NaN.
local inputs = support.latest(function(c)
  local sequences = #c.lens / c.each
  local rng, most, longest = support.rng(c.seed + 3), 0, {}
  for s = 1, sequences do
    longest[s] = 0
    for r = 1, c.each do
      longest[s] = math.max(longest[s], c.lens[(s - 1) * c.each + r])
    end
    most = math.max(most, longest[s])
  end
  local width = math.ceil(most / c.block_size) + 1
  local blocks = width * math.max(sequences, 1) + 2
  local i = mqa.inputs(#c.lens, c.heads, c.dim, blocks * c.block_size, c.seed, c.whole)
  i.width, i.columns = width, c.columns or math.max(most, 1)
  i.tables = support.block_table(rng, longest, c.block_size, width, blocks)
  if c.broken then i.tables[2], i.tables[width + 1] = -1, blocks end
  local used = {}
  for s = 1, sequences do
    for j = 0, longest[s] - 1 do
      local block = i.tables[(s - 1) * width + math.floor(j / c.block_size) + 1]
      used[block * c.block_size + j % c.block_size] = true
    end
  end
  local k, scales, bytes = i.k:list(), i.scales:list(), {}
  local row = c.block_size * (c.dim + 4)
  for place = 0, blocks * c.block_size - 1 do
    used[place] = used[place] or c.too_long
    local at = math.floor(place / c.block_size) * row
    local offset = place % c.block_size
    for d = 1, c.dim do
      bytes[at + offset * c.dim + d] =
        used[place] and reference.byte(k[place * c.dim + d]) or 0x7F
    end
    local scale = used[place] and scales[place + 1] or 0 / 0
    for b, byte in ipairs(reference.float_bytes(scale)) do
      bytes[at + c.block_size * c.dim + 4 * offset + b] = byte
    end
  end
  i.cache = kv.from("cpu", "u8", { blocks, row }, bytes)
  i.blocks, i.place_scales = blocks, scales
  i.lens = {}
  for r, len in ipairs(c.lens) do i.lens[r] = c.too_long and len + 1000 or len end
  return i
end)

local function run(dev, c)
  local i = inputs(c)
  local out = mqa.poisoned(dev, c.dtype, #c.lens, i.columns)
  kv.check(kv.C.kvl_mqa_logits_paged(i.q:to(dev), i.weights:to(dev), i.cache:to(dev),
    kv.from(dev, "i32", { #c.lens / c.each, i.width }, i.tables),
    kv.from(dev, "i32", { #c.lens }, i.lens), out))
  return out
end

local function check(c, got, share, what)
  local i = inputs(c)
  mqa.check(i, got, c.dtype, share, function() return 0 end,
    function(r) return math.min(i.lens[r + 1], i.columns, i.width * c.block_size) end,
    function(r, j)
      local s, entry = math.floor(r / c.each), math.floor(j / c.block_size)
      local block = i.tables[s * i.width + entry + 1]
      if block < 0 or block >= i.blocks then return nil end
      local place = block * c.block_size + j % c.block_size
      return place * c.dim, i.place_scales[place + 1]
    end, what)
end

--- The same bits as of the keys in a row.
local function check_contiguous(dev, c)
  local i, got = inputs(c), run(dev, c)
  for s = 0, #c.lens / c.each - 1 do
    local places, n = {}, c.lens[s * c.each + 1]
    for j = 0, n - 1 do
      local block = i.tables[s * i.width + math.floor(j / c.block_size) + 1]
      places[j + 1] = block * c.block_size + j % c.block_size
    end
    local k = kv.tensor(dev, "f8e4m3", { n, c.dim })
    local scales = kv.tensor(dev, "f32", { n })
    kv.ops.index_gather(i.cache:to(dev), kv.from(dev, "i64", { n }, places), k, scales)
    local function part(t) return t:narrow(s * c.each, c.each):to(dev) end
    local want = kv.ops.mqa_logits(part(i.q), part(i.weights), k, scales,
      kv.zeros(dev, "i32", { c.each }), kv.full(dev, "i32", { c.each }, n),
      mqa.poisoned(dev, c.dtype, c.each, i.columns))
    support.equal(got:narrow(s * c.each, c.each), want, ("sequence %d"):format(s))
  end
end

local even = { lens = { 200, 200, 77, 77, 130, 130 }, each = 2, heads = 64, dim = 128,
               block_size = 64, seed = 3, dtype = "f32" }

describe("logits over index-K memory", function()
  support.it_on_cpu("are those of each sequence's tokens", function(dev)
    for i, c in ipairs(cases) do check(c, run(dev, c), mqa.CPU, ("case %d"):format(i)) end
  end)

  support.it_on_cpu("are the bits of contiguous keys", function(dev)
    check_contiguous(dev, even)
  end)

  it("have words for what does not fit", function()
    local cpu, C = kv.device "cpu", kv.C
    local i = mqa.inputs(3, 8, 32, 5, 1)
    local cache = kv.zeros(cpu, "u8", { 4, 64 * 36 })
    local lens, out = kv.zeros(cpu, "i32", { 3 }), kv.zeros(cpu, "f32", { 3, 5 })
    local function tables(n) return kv.zeros(cpu, "i32", { n, 2 }) end
    support.fails(C.kvl_mqa_logits_paged(i.q, i.weights, cache, tables(2), lens, out),
      "3 rows for 2 sequences")
    support.fails(C.kvl_mqa_logits_paged(i.q, i.weights, cache, tables(0), lens, out),
      "3 rows for 0 sequences")
    support.fails(C.kvl_mqa_logits_paged(i.q, i.weights, kv.zeros(cpu, "u8", { 4, 100 }),
      tables(3), lens, out), "cache", "100", "36")
  end)
end)

describe("logits over index-K memory on CUDA #gpu", function()
  support.it_on_gpu("agree with the reference", function(cuda)
    for i, c in ipairs(cases) do
      check(c, run(cuda, c), mqa.CUDA, ("case %d"):format(i))
    end
  end)

  support.it_on_gpu("are the bits of contiguous keys", function(cuda)
    check_contiguous(cuda, even)
  end)

  support.it_on_gpu("of whole numbers are the CPU's bits", function(cuda, cpu)
    for n, heads in ipairs { 8, 24, 32, 64 } do
      local c = { lens = { 3000, 1, 700, 2048, 0, 64 }, each = 1 + n % 2, heads = heads,
                  dim = ({ 32, 64, 128 })[1 + n % 3], block_size = 64, seed = 40 * n,
                  dtype = "f32", whole = true }
      support.equal(run(cuda, c), run(cpu, c), ("%d heads"):format(heads))
    end
  end)
end)
