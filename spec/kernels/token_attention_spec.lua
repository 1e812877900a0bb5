--- Tolerance: means of values near 1, summed in fp32 in another order than the reference:
-- 3e-5. On CUDA 16-bit P is rounded to q's dtype before P V: one rounding of values up to
-- about 4 (bf16 2^-8, f16 2^-11). A 16-bit output adds its own.
local kv = require "kvlab"
local reference = require "spec.reference.attention"
local support = require "spec.support"

--- A list for every row (and KV head, where c.heads): random places, some of them twice,
-- some nothing. c.fill: a share of the entries that are tokens (0.8).
local function lists_of(c, layout)
  local rng, flat = support.rng(c.seed or 11), {}
  local all = layout.blocks * layout.block_size
  for _ = 1, c.rows * (c.heads and layout.kv_heads or 1) do
    for _ = 1, c.k do
      local is = rng(100) < 100 * (c.fill or 0.8)
      flat[#flat + 1] = is and rng(all) or ({ -1, -77, all, 2 ^ 31 - 1 })[rng(4) + 1]
    end
  end
  return flat
end

--- A case names rows, k and where wanted group (1), kv_heads (2), head_dim (64),
-- block_size (16), blocks (9), dtype (f32), q, out (dtypes), heads (a list a KV head),
-- fill, scales, no_lse, seed.
local prepare = support.latest(function(c)
  local layout = { blocks = c.blocks or 9, kv_heads = c.kv_heads or 2,
                   block_size = c.block_size or 16, head_dim = c.head_dim or 64 }
  local dtype, cpu = c.dtype or "f32", kv.device "cpu"
  local q_dtype = c.q or dtype == "f8e4m3" and "bf16" or dtype
  local shape = { layout.blocks, 2, layout.kv_heads, layout.block_size, layout.head_dim }
  return { layout = layout, places = lists_of(c, layout),
    cache = support.randn(cpu, dtype, shape, 5),
    q = support.randn(cpu, q_dtype, { c.rows, layout.kv_heads * (c.group or 1),
                                      layout.head_dim }, 6),
    k_scale = c.scales and support.scales(layout.kv_heads, 61),
    v_scale = c.scales and support.scales(layout.kv_heads, 62) }
end)

local function run(dev, c)
  local p = prepare(c)
  local heads, layout = p.q:size(1), p.layout
  local list = c.heads and { c.rows, layout.kv_heads, c.k } or { c.rows, c.k }
  local out = support.poisoned(dev, c.out or p.q:type(), p.q:dims())
  local lse = support.poisoned(dev, "f32", { c.rows, heads })
  local function scale(values)
    return values and kv.from(dev, "f32", { layout.kv_heads }, values)
  end
  local cache = p.cache:to(dev)
  kv.ops.token_attention { q = p.q:to(dev), cache = cache,
    places = kv.from(dev, "i32", list, p.places), scale = 0.1, out = out,
    lse = not c.no_lse and lse or nil,
    format = support.format_of(cache, scale(p.k_scale), scale(p.v_scale)) }
  return out, lse
end

local expected = support.latest(function(c)
  local p = prepare(c)
  return { reference.token_attention { layout = p.layout, q = p.q:list(),
    cache = p.cache:list(), places = p.places, rows = c.rows, heads = p.q:size(1),
    k = c.k, place_heads = c.heads and p.layout.kv_heads or 1, scale = 0.1,
    k_scale = p.k_scale, v_scale = p.v_scale } }
end)

local function check(dev, c)
  local out, lse = run(dev, c)
  local want, dtype = expected(c), out:type()
  local q_dtype = prepare(c).q:type()
  local inside = not dev:is_cpu() and q_dtype ~= "f32" and 4 * support.eps[q_dtype] or 0
  support.close(out, want[1], 3e-5 + inside, dtype ~= "f32" and support.eps[dtype] or 0)
  if not c.no_lse then support.close(lse, want[2], 1e-4) end
end

local function topic(name, cases)
  support.it_on_cpu(name, function(dev)
    for _, c in ipairs(cases) do check(dev, c) end
  end)
  support.it_on_gpu(name, function(dev)
    for _, c in ipairs(cases) do check(dev, c) end
  end)
end

describe("attention over lists of tokens", function()
  local dims, groups, lengths, bytes = {}, {}, {}, {}
  for _, dim in ipairs { 8, 16, 64, 80, 128, 192, 256 } do
    for _, dtype in ipairs { "f32", "f16", "bf16" } do
      dims[#dims + 1] = { rows = 2, k = 70, head_dim = dim, dtype = dtype, group = 2 }
      dims[#dims + 1] = { rows = 2, k = 70, head_dim = dim, dtype = dtype, q = "f32" }
    end
  end
  for _, group in ipairs { 1, 3, 4, 8, 9, 16, 17, 40, 72 } do
    groups[#groups + 1] = { rows = 2, k = 100, group = group, head_dim = 32 }
    groups[#groups + 1] = { rows = 2, k = 100, group = group, head_dim = 32,
                            dtype = "bf16", heads = true, kv_heads = 3 }
  end
  for _, k in ipairs { 0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300 } do
    for _, rows in ipairs { 0, 1, 5 } do
      lengths[#lengths + 1] = { rows = rows, k = k, group = 2, head_dim = 16, seed = k }
      lengths[#lengths + 1] = { rows = rows, k = k, group = 4, head_dim = 16,
                                dtype = "f16", heads = true, fill = 0.3 }
    end
  end
  for _, dim in ipairs { 16, 48, 64, 80, 128, 144, 256 } do
    for _, q in ipairs { "f16", "bf16" } do
      bytes[#bytes + 1] = { rows = 2, k = 70, head_dim = dim, dtype = "f8e4m3", q = q,
                            group = 2, scales = true }
    end
  end
  for _, group in ipairs { 1, 16, 17, 33, 72 } do
    bytes[#bytes + 1] = { rows = 2, k = 140, group = group, head_dim = 32, heads = true,
                          dtype = "f8e4m3", kv_heads = 3, fill = 0.5 }
  end
  for _, k in ipairs { 0, 1, 31, 33, 127, 128, 129, 257, 520 } do
    bytes[#bytes + 1] = { rows = 3, k = k, group = 4, head_dim = 16, dtype = "f8e4m3",
                          seed = k, fill = 0.3, out = "f32" }
  end
  topic("takes every dtype and head_dim", dims)
  topic("reads a token once for a group of any size", groups)
  topic("takes lists of any length", lengths)
  topic("takes blocks of any size", {
    { rows = 3, k = 90, block_size = 1, blocks = 50 },
    { rows = 3, k = 90, block_size = 7, blocks = 50, dtype = "bf16" },
    { rows = 3, k = 90, block_size = 300, blocks = 2, dtype = "bf16", heads = true },
  })
  topic("writes other dtypes, with and without lse", {
    { rows = 3, k = 40, dtype = "bf16", out = "f32" },
    { rows = 3, k = 40, dtype = "f16", no_lse = true, group = 4 },
    { rows = 3, k = 40, q = "f32", dtype = "bf16", no_lse = true },
  })
  topic("reads an f8e4m3 cache in its units", {
    { rows = 3, k = 90, dtype = "f8e4m3", group = 4, scales = true },
    { rows = 3, k = 90, dtype = "f8e4m3", q = "f32", group = 2, scales = true },
    { rows = 3, k = 90, dtype = "f8e4m3", q = "f16", group = 20, head_dim = 128 },
  })
  topic("reads an f8e4m3 cache of every head_dim, group and length of lists", bytes)
  topic("gives 0 and -inf to a row that sees nothing", {
    { rows = 4, k = 5, fill = 0 }, { rows = 4, k = 200, fill = 0.004, dtype = "bf16" },
  })

  support.each_device(function(dev)
    it("equals paged attention where the list is everything", function()
      local paged = support.paged { lens = { 200, 77 }, block_size = 16, kv_heads = 2,
                                    dtype = "bf16" }
      local cache, tables, lens = paged.on(dev)
      local q = support.randn(dev, "bf16", { 2, 8, 64 }, 3)
      local want = kv.ops.paged_attention { q = q, cache = cache, tables = tables,
                                            lens = lens }
      local flat = {}
      for s, len in ipairs(paged.lens) do
        for t = 0, 207 do
          local block = paged.tables[(s - 1) * paged.max_blocks + math.floor(t / 16) + 1]
          flat[#flat + 1] = t < len and block * 16 + t % 16 or -1
        end
      end
      local got = kv.ops.token_attention { q = q, cache = cache,
        places = kv.from(dev, "i32", { 2, 208 }, flat) }
      support.close(got:cast "f32", want:cast "f32", 4e-3, 2 ^ -7)
    end)
  end)

  it("refuses what does not fit, in words", function()
    local dev = kv.device "cpu"
    local cache = kv.zeros(dev, "bf16", { 4, 2, 2, 16, 64 })
    local q = kv.zeros(dev, "bf16", { 3, 8, 64 })
    local function call(o)
      local a = { q = q, cache = cache, places = kv.zeros(dev, "i32", { 3, 5 }) }
      for key, value in pairs(o) do a[key] = value end
      return function() kv.ops.token_attention(a) end
    end
    support.refuses(call { places = kv.zeros(dev, "i32", { 2, 5 }) }, "places", "[2, 5]")
    support.refuses(call { places = kv.zeros(dev, "i32", { 3, 4, 5 }) }, "places",
      "kv_heads")
    support.refuses(call { places = kv.zeros(dev, "i64", { 3, 5 }) }, "places", "i64")
    support.refuses(call { q = kv.zeros(dev, "bf16", { 3, 7, 64 }) }, "heads is 7")
    support.refuses(call { format = support.format_of(cache,
      kv.ones(dev, "f32", { 2 })) }, "k_scale", "f8e4m3")
  end)
end)
