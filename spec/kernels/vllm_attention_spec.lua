--- Tolerance: results are means of values near 1, summed in fp32 in another order than
-- the reference: 3e-5. A 16-bit output adds its rounding, half a unit in the last place
-- (f16 2^-11, bf16 2^-8, relative); two devices or two versions may round it apart: twice
-- that. The numbers of an f8e4m3 cache are exact: the reference is given the same.
local kv = require "kvlab"
local support = require "spec.support"
local attention = require "spec.reference.attention"
local reference = require "spec.reference.vllm"

local VERSIONS = { 1, 2, 0 }
local ulp = { f32 = 0, f16 = 2 ^ -11, bf16 = 2 ^ -8 }

--- A cache's flat values, K times k_scale and V times v_scale.
local function scaled(cache, layout, k_scale, v_scale)
  local half = layout.kv_heads * layout.block_size * layout.head_dim
  local flat = support.filled(#cache, 0)
  for i = 1, #cache do
    flat[i] = cache[i] * (math.floor((i - 1) / half) % 2 == 0 and k_scale or v_scale)
  end
  return flat
end

--- Break entries of the tables; the reference gets the others as a selection.
local function break_tables(paged, a)
  local selection, rng = {}, support.rng(5)
  for i, block in ipairs(a.tables) do
    local logical = (i - 1) % paged.max_blocks
    if block >= 0 and rng(3) == 0 then
      paged.tables[i] = rng(2) == 0 and -1 - rng(5) or paged.layout.blocks + rng(5)
      logical = -1
    end
    selection[i] = block >= 0 and logical or -1
  end
  a.selection, a.selection_heads, a.max_selected = selection, 1, paged.max_blocks
end

--- A case names lens, and where wanted block_size (16), kv_heads (1), group (1), head_dim
-- (64), dtype (f32), q (the dtype of q beside an f8e4m3 cache), alibi, broken, k_scale,
-- v_scale, extra, seed.
local prepare = support.latest(function(c)
  c.block_size, c.dtype = c.block_size or 16, c.dtype or "f32"
  local paged = support.paged(c)
  local layout, cpu = paged.layout, kv.device "cpu"
  local heads, dim = layout.kv_heads * (c.group or 1), layout.head_dim
  local q = support.randn(cpu, c.q or c.dtype, { #c.lens, heads, dim }, 99)
  local slopes
  if c.alibi then
    slopes = {}
    for h = 1, heads do slopes[h] = 2 ^ (-8 * h / heads) end
  end
  local tables = {}
  for i, block in ipairs(paged.tables) do tables[i] = block end
  local a = { layout = layout, q = q:list(), tables = tables, lens = c.lens,
    cache = scaled(paged.cache, layout, c.k_scale or 1, c.v_scale or 1),
    max_blocks = paged.max_blocks, heads = heads, scale = 1 / math.sqrt(dim),
    causal = true, alibi = slopes }
  if c.broken then break_tables(paged, a) end
  local x = 16 / kv.dtype_bytes(c.dtype)
  local keys, values = reference.from_blocks(paged.cache, layout, x)
  local function on(dev)
    local _, tables_on, lens_on = paged.on(dev)
    local function scale(s) return s and kv.full(dev, "f32", { 1 }, s) end
    local blocks, kv_heads, size = layout.blocks, layout.kv_heads, layout.block_size
    return { q = q:to(dev), tables = tables_on, lens = lens_on,
      key_cache = support.from(dev, c.dtype, { blocks, kv_heads, dim / x, size, x },
        keys),
      value_cache = support.from(dev, c.dtype, { blocks, kv_heads, dim, size }, values),
      alibi = slopes and kv.from(dev, "f32", { heads }, slopes),
      k_scale = scale(c.k_scale), v_scale = scale(c.v_scale) }
  end
  return { on = on, a = a, shape = { #c.lens, heads, dim }, out = q:type() }
end)

local expected = support.latest(function(c)
  return (attention.paged_attention(prepare(c).a))
end)

local function run(dev, c, version)
  local inputs = prepare(c)
  local call = inputs.on(dev)
  call.version, call.out = version, support.poisoned(dev, inputs.out, inputs.shape)
  return kv.vllm.attention(call)
end

local topics = {}
local function topic(name, cases) topics[#topics + 1] = { name = name, cases = cases } end

local partial = {}
for _, size in ipairs { 8, 16, 32 } do
  for len = 1, size + 1 do
    for _, dtype in ipairs { "f32", "bf16", "f8e4m3" } do
      partial[#partial + 1] = { lens = { len, size + len }, block_size = size, seed = len,
        head_dim = 32, dtype = dtype, q = dtype == "f8e4m3" and "f32" or nil }
    end
  end
end
topic("ends at every position of a partial block", partial)

local groups = {}
for _, group in ipairs { 1, 4, 8 } do
  groups[#groups + 1] = { lens = { 45, 0, 100 }, kv_heads = 2, group = group }
  groups[#groups + 1] = { lens = { 45, 0, 100 }, kv_heads = 3, group = group,
    dtype = "f16", alibi = true }
end
topic("shares K and V over groups", groups)

local dims = {}
for _, dim in ipairs { 32, 64, 80, 96, 112, 120, 128, 192, 256 } do
  for _, size in ipairs { 8, 16, 32 } do
    for _, dtype in ipairs { "f32", "bf16", dim % 16 == 0 and "f8e4m3" or "f16" } do
      dims[#dims + 1] = { lens = { 70, 3 }, block_size = size, head_dim = dim, group = 2,
        dtype = dtype, q = dtype == "f8e4m3" and "bf16" or nil }
    end
  end
end
topic("takes vLLM's head sizes, block sizes and dtypes", dims)

topic("adds ALiBi's bias by position", {
  { lens = { 45, 7 }, kv_heads = 2, group = 4, alibi = true },
  { lens = { 700 }, block_size = 8, head_dim = 32, group = 2, alibi = true },
})
topic("ends before, at and behind a partition of 512 tokens", {
  { lens = { 0, 1, 511, 512, 513, 1025 }, head_dim = 32, group = 2 },
  { lens = { 0, 1, 511, 512, 513, 1025 }, head_dim = 32, block_size = 32,
    dtype = "bf16" },
  { lens = { 513, 5 }, head_dim = 32, extra = 200, block_size = 8, dtype = "f16" },
})
topic("gives 0 where there is no key", {
  { lens = { 0, 0 } }, { lens = { 0 }, group = 4, extra = 40, dtype = "f16" },
})
topic("does nothing for no sequences", { { lens = {} } })
topic("passes over broken table entries", {
  { lens = { 300, 17, 1, 64 }, group = 2, head_dim = 32, broken = true },
  { lens = { 1100, 600 }, head_dim = 32, block_size = 32, broken = true, alibi = true },
})
topic("scales what an f8e4m3 cache holds", {
  { lens = { 50, 3 }, dtype = "f8e4m3", q = "f32", k_scale = 0.5, v_scale = 2 },
  { lens = { 600 }, dtype = "f8e4m3", q = "bf16", group = 4, k_scale = 0.25,
    alibi = true },
  { lens = { 600 }, dtype = "f8e4m3", q = "f16", kv_heads = 2, v_scale = 0.125 },
})

local function each(cases, fn)
  for i, c in ipairs(support.sample_for_isa(cases)) do
    for _, version in ipairs(VERSIONS) do
      fn(c, version, ("V%d of case %d"):format(version, i))
    end
  end
end

describe("vLLM's paged attention", function()
  for _, t in ipairs(topics) do
    support.it_on_cpu(t.name, function(dev)
      each(t.cases, function(c, version, what)
        local out = run(dev, c, version)
        local rel = ulp[out:type()]
        support.close(out, expected(c), 3e-5 + rel / 8, rel, what)
      end)
    end)
  end

  it("agrees with kvlab's own over the same blocks", function()
    local dev = kv.device "cpu"
    local cache = support.randn(dev, "f32", { 9, 2, 2, 16, 64 }, 1)
    local key_cache, value_cache = kv.vllm.from_blocks(cache)
    local q = support.randn(dev, "f32", { 2, 8, 64 }, 2)
    local tables = kv.from(dev, "i32", { { 8, 3, 0, 1 }, { 7, 2, 3, 5 } })
    local lens = kv.from(dev, "i32", { 49, 64 })
    local own = kv.ops.paged_attention { q = q, cache = cache, tables = tables,
      lens = lens, scale = 0.2 }
    support.close(kv.vllm.attention { q = q, key_cache = key_cache,
      value_cache = value_cache, tables = tables, lens = lens, scale = 0.2 }, own, 3e-5)
  end)

  it("has words for what vLLM's kernels do not take", function()
    local dev = kv.device "cpu"
    local function attend(o)
      local dtype = o.dtype or "f32"
      local x, dim, size = o.x or 16 / kv.dtype_bytes(dtype), o.dim or 64, o.size or 16
      kv.vllm.attention { q = kv.zeros(dev, "f32", { 1, o.heads or 2, dim }),
        key_cache = kv.zeros(dev, dtype, { 3, 2, math.floor(dim / x), size, x }),
        value_cache = kv.zeros(dev, dtype, { 3, 2, dim, size }),
        tables = kv.zeros(dev, "i32", { 1, 2 }), lens = kv.zeros(dev, "i32", { 1 }),
        version = o.version, k_scale = o.k_scale }
    end
    attend {}
    for words, o in pairs {
      ["head_dim is 72, expected 32, 64, 80"] = { dim = 72 },
      ["block_size is 24, expected 8, 16 or 32"] = { size = 24 },
      ["expected a multiple of x = 16 for a cache of f8e4m3"] = { dim = 120,
                                                                  dtype = "f8e4m3" },
      ["8 runs of 8 elements a token, expected 16 of 4 (16 bytes of f32)"] = { x = 8 },
      ["heads is 3, expected a multiple of kv_heads = 2"] = { heads = 3 },
      ["version is 3, expected 1, 2 or 0"] = { version = 3 },
      ["k_scale is given for a cache of f32"] = { k_scale = kv.ones(dev, "f32", { 1 }) },
      ["q is f32 [1, 2, 64], expected bf16"] = { dtype = "bf16" },
    } do
      support.raises(words, attend, o)
    end
  end)
end)

describe("vLLM's paged attention on CUDA #gpu", function()
  for _, t in ipairs(topics) do
    support.it_on_gpu(t.name, function(cuda, cpu)
      each(t.cases, function(c, version, what)
        local out = run(cuda, c, version)
        local rel = 2 * ulp[out:type()]
        support.close(out, run(cpu, c, version), 6e-5 + rel / 8, rel, what)
      end)
    end)
  end

  support.it_on_gpu("gives the same by V1 and V2, and the same bits again", function(cuda)
    for _, t in ipairs(topics) do
      for i, c in ipairs(t.cases) do
        local one, two = run(cuda, c, 1), run(cuda, c, 2)
        local rel = 2 * ulp[one:type()]
        support.close(two, one:list(), 6e-5 + rel / 8, rel, ("%s %d"):format(t.name, i))
        support.equal(run(cuda, c, 1), one, "V1 again")
        support.equal(run(cuda, c, 2), two, "V2 again")
      end
    end
  end)

  support.it_on_gpu("has words for a sequence whose logits V1 cannot keep", function(cuda)
    local key_cache, value_cache = kv.vllm.cache(cuda, "bf16", 1, 1, 16, 64)
    local a = { q = kv.zeros(cuda, "bf16", { 1, 1, 64 }), key_cache = key_cache:fill_(0),
      value_cache = value_cache:fill_(0), tables = kv.zeros(cuda, "i32", { 1, 20000 }),
      lens = kv.full(cuda, "i32", { 1 }, 16) }
    for _, version in ipairs { 0, 2 } do
      a.version = version
      support.equal(kv.vllm.attention(a), kv.zeros(cuda, "bf16", { 1, 1, 64 }))
    end
    a.version = 1
    support.raises("V1: 320000 tokens", kv.vllm.attention, a)
  end)
end)
