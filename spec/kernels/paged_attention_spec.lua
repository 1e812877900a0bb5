--- Tolerance: results are means of values near 1, summed in fp32 in another order than
-- the reference: 3e-5. A 16-bit output adds its rounding, half a unit in the last place
-- (f16 2^-11, bf16 2^-8, relative). On the GPU 16-bit caches round the weights as well:
-- twice that.
local kv = require "kvlab"
local ffi = require "ffi"
local support = require "spec.support"
local reference = require "spec.reference.attention"

local ulp = { f32 = 0, f16 = 2^-11, bf16 = 2^-8 }

--- Some of the blocks of each list: "shared" has one list a sequence, "heads" one per KV
-- head. Wider than any list, so that -1 follows.
local function selection_of(c, paged)
  if not c.select then return nil end
  local rng, flat = support.rng(c.seed or 7), {}
  local heads = c.select == "heads" and paged.layout.kv_heads or 1
  local width = paged.max_blocks + 1
  for _, len in ipairs(c.lens) do
    for _ = 1, heads do
      local first = #flat
      for b = 0, math.ceil(len / c.block_size) - 1 do
        if rng(3) > 0 then flat[#flat + 1] = b end
      end
      for i = #flat + 1, first + width do flat[i] = -1 end
    end
  end
  return flat, heads, width
end

--- The inputs of a case, and what the reference makes of them.
local function prepare(c)
  if c.expected then return c.inputs, c.expected end
  local paged = support.paged(c)
  local heads, dim = paged.layout.kv_heads * (c.group or 1), paged.layout.head_dim
  local starts, tokens = nil, #c.lens
  if c.rows then
    starts, tokens = { 0 }, 0
    for _, rows in ipairs(c.rows) do
      tokens = tokens + rows
      starts[#starts + 1] = tokens
    end
  end
  local q_dtype = c.q or c.dtype or "f32"
  local q = support.randn(kv.device "cpu", q_dtype, { tokens, heads, dim }, 99)
  local alibi
  if c.alibi then
    alibi = {}
    for h = 1, heads do alibi[h] = 2^(-8 * h / heads) end
  end
  local selection, selection_heads, max_selected = selection_of(c, paged)
  local a = { layout = paged.layout, q = q:list(), cache = paged.cache,
    tables = paged.tables, lens = c.lens, max_blocks = paged.max_blocks, heads = heads,
    scale = 1 / math.sqrt(dim), causal = c.causal ~= false, starts = starts,
    alibi = alibi, selection = selection, selection_heads = selection_heads,
    max_selected = max_selected }
  local out, lse = reference.paged_attention(a)
  c.inputs = { paged = paged, q = q, tokens = tokens, a = a }
  c.expected = { out = out, lse = lse }
  return c.inputs, c.expected
end

--- Run a case: tensors out, lse.
local function run(dev, c)
  local inputs = prepare(c)
  local a = inputs.a
  local cache, tables, lens = inputs.paged.on(dev)
  local shape = { inputs.tokens, a.heads, a.layout.head_dim }
  local t = { q = inputs.q:to(dev), cache = cache, tables = tables, lens = lens,
    starts = a.starts and kv.from(dev, "i32", { #a.starts }, a.starts),
    alibi = a.alibi and kv.from(dev, "f32", { a.heads }, a.alibi),
    selection = a.selection and kv.from(dev, "i32",
      { #c.lens, a.selection_heads, a.max_selected }, a.selection),
    out = support.poisoned(dev, c.out or c.q or c.dtype or "f32", shape),
    lse = support.poisoned(dev, "f32", { inputs.tokens, a.heads }) }
  local call = ffi.new "kvl_attention"
  for name, tensor in pairs(t) do call[name] = tensor end
  if c.no_lse then call.lse = nil end
  call.scale, call.causal = a.scale, a.causal and 1 or 0
  kv.check(kv.C.kvl_paged_attention(call))
  return t.out, t.lse
end

local function check_cpu(dev, cases)
  for i, c in ipairs(cases) do
    local _, expected = prepare(c)
    local out, lse = run(dev, c)
    local rel = ulp[out:type()]
    support.close(out, expected.out, 3e-5 + rel / 8, rel, ("out of case %d"):format(i))
    if not c.no_lse then
      support.close(lse, expected.lse, 3e-5, 1e-6, ("lse of case %d"):format(i))
    end
  end
end

local function check_gpu(cuda, cpu, cases)
  for i, c in ipairs(cases) do
    local out, lse = run(cuda, c)
    local want, want_lse = run(cpu, c)
    local rel = 2 * math.max(ulp[out:type()], ulp[c.dtype or "f32"])
    support.close(out, want, 6e-5 + rel, rel, ("out of case %d"):format(i))
    if not c.no_lse then
      support.close(lse, want_lse, 6e-5 + rel / 8, 1e-5, ("lse of case %d"):format(i))
    end
  end
end

local topics = {}
local function topic(name, cases) topics[#topics + 1] = { name = name, cases = cases } end

local partial = {}
for len = 1, 34 do
  partial[#partial + 1] = { lens = { len }, block_size = 16, seed = len }
end
topic("ends at every position of a partial block", partial)

local groups = {}
for _, group in ipairs { 1, 2, 3, 4, 5, 7, 8, 9, 16, 33 } do
  groups[#groups + 1] = { lens = { 45, 0, 100 }, block_size = 16, kv_heads = 2,
    group = group, head_dim = 32 }
end
topic("shares K and V over groups of any size", groups)

local dims = {}
for _, dim in ipairs { 8, 16, 24, 64, 80, 96, 128, 192, 256 } do
  dims[#dims + 1] = { lens = { 70 }, block_size = 16, group = 4, head_dim = dim }
  dims[#dims + 1] = { lens = { 70 }, rows = { 9 }, block_size = 16, group = 2,
    head_dim = dim, dtype = "bf16" }
end
topic("takes any head_dim that is a multiple of 8", dims)

local sizes = {}
for _, size in ipairs { 1, 8, 16, 17, 256, 4096 } do
  sizes[#sizes + 1] = { lens = { 300, 17, 1 }, block_size = size, group = 4,
    head_dim = 16 }
  sizes[#sizes + 1] = { lens = { 300, 17, 1 }, rows = { 40, 17, 1 }, block_size = size,
    group = 2, head_dim = 16 }
end
topic("takes any block size", sizes)

local dtypes = {}
for _, dtype in ipairs { "f32", "f16", "bf16" } do
  for _, rows in ipairs { false, { 30, 2 } } do
    for _, with in ipairs { {}, { q = "f32" }, { out = "f32" } } do
      dtypes[#dtypes + 1] = { lens = { 50, 3 }, rows = rows or nil, block_size = 8,
        group = 4, dtype = dtype, q = with.q, out = with.out }
    end
  end
end
topic("reads and writes f32, f16 and bf16", dtypes)

topic("prefills with a causal mask offset by what came before", {
  { lens = { 40, 33, 90 }, rows = { 40, 1, 25 }, block_size = 16, group = 4 },
  { lens = { 40, 33, 90 }, rows = { 40, 1, 25 }, block_size = 16, kv_heads = 2 },
  { lens = { 200 }, rows = { 200 }, block_size = 16, group = 4, head_dim = 16 },
  { lens = { 10, 10, 10 }, rows = { 0, 10, 0 }, block_size = 4, group = 2 },
  { lens = { 150 }, rows = { 150 }, block_size = 17, group = 1, head_dim = 24 },
  { lens = { 3 }, rows = { 5 }, block_size = 4 },   -- two rows come before any key
})
topic("sees every key when it is not causal", {
  { lens = { 40, 90 }, rows = { 40, 25 }, block_size = 16, group = 4, causal = false },
  { lens = { 40, 90 }, block_size = 16, group = 4, causal = false },
})

local selected = {}
for _, select in ipairs { "shared", "heads" } do
  for _, rows in ipairs { false, { 30, 7, 1 } } do
    for _, size in ipairs { 1, 16, 17 } do
      selected[#selected + 1] = { lens = { 130, 39, 1 }, rows = rows or nil, group = 4,
        block_size = size, kv_heads = 3, head_dim = 16, select = select, seed = size }
    end
  end
end
topic("attends to selected blocks, shared or per KV head", selected)

topic("adds ALiBi's bias by logical position", {
  { lens = { 45, 7 }, block_size = 16, kv_heads = 2, group = 4, alibi = true },
  { lens = { 90 }, rows = { 33 }, block_size = 16, group = 4, alibi = true },
  { lens = { 90 }, rows = { 33 }, block_size = 16, group = 4, alibi = true,
    causal = false },
  { lens = { 90 }, block_size = 16, kv_heads = 2, select = "heads", alibi = true },
})
topic("splits long sequences and joins the parts", {
  { lens = { 3000, 5, 513 }, block_size = 16, group = 4, head_dim = 16 },
  { lens = { 2500 }, rows = { 3 }, block_size = 16, group = 1, head_dim = 8 },
  { lens = { 2500 }, rows = { 12 }, block_size = 16, group = 2, head_dim = 8,
    select = "shared" },
  { lens = { 700 }, block_size = 16, extra = 3000, group = 2, head_dim = 8 },
})
topic("runs without lse", {
  { lens = { 20 }, block_size = 16, no_lse = true },
  { lens = { 2000 }, block_size = 16, head_dim = 8, no_lse = true },
})
topic("does nothing for no sequences", { { lens = {}, block_size = 16 } })
topic("gives 0 and -inf where nothing is seen", {
  { lens = { 0, 5, 0 }, block_size = 4, group = 2 },
  { lens = { 0, 5, 0 }, rows = { 1, 1, 2 }, block_size = 4, group = 8 },
})

describe("paged attention", function()
  for _, t in ipairs(topics) do
    support.it_on_cpu(t.name, function(dev) check_cpu(dev, t.cases) end)
  end

  support.it_on_cpu("sees nothing through an empty selection", function(dev)
    local c = { lens = { 20, 30 }, block_size = 16, group = 2 }
    local inputs = prepare(c)
    local cache, tables, lens = inputs.paged.on(dev)
    local out = support.poisoned(dev, "f32", { 2, 2, 64 })
    local lse = support.poisoned(dev, "f32", { 2, 2 })
    kv.ops.paged_attention { q = inputs.q:to(dev), cache = cache, tables = tables,
      lens = lens, selection = kv.full(dev, "i32", { 2, 1, 3 }, -1), out = out,
      lse = lse }
    support.equal(out, kv.zeros(dev, "f32", { 2, 2, 64 }), "out")
    support.equal(lse, kv.full(dev, "f32", { 2, 2 }, -math.huge), "lse")
  end)
end)

describe("paged attention on CUDA #gpu", function()
  for _, t in ipairs(topics) do
    support.it_on_gpu(t.name, function(cuda, cpu) check_gpu(cuda, cpu, t.cases) end)
  end
end)
