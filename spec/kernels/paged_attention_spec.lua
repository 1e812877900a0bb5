--- Tolerance: results are means of values near 1, summed in fp32 in another order than
-- the reference: 3e-5. A 16-bit output adds its rounding, half a unit in the last place
-- (f16 2^-11, bf16 2^-8, relative). On the GPU 16-bit caches round the weights as well,
-- twice that; f8e4m3 caches round them to bf16. A prefill rounds what int8 holds to q's
-- dtype, and so does a decode of more than 16 heads on a KV head, but not over a list: of
-- 128 products, each off by half a unit, the sum is off by less than a unit.
local kv = require "kvlab"
local support = require "spec.support"
local attention = require "spec.kernels.attention_cases"

local inputs_of, expected, run = attention.inputs, attention.expected, attention.run
local ulp = { f32 = 0, f16 = 2 ^ -11, bf16 = 2 ^ -8, f8e4m3 = 2 ^ -8, int8 = 2 ^ -8 }

local function check_cpu(dev, cases)
  for i, c in ipairs(support.sample_for_isa(cases)) do
    local want, want_lse = expected(c)
    local out, lse = run(dev, c)
    local rel = ulp[out:type()]
    support.close(out, want, 3e-5 + rel / 8, rel, ("out of case %d"):format(i))
    if not c.no_lse then
      support.close(lse, want_lse, 3e-5, 1e-6, ("lse of case %d"):format(i))
    end
  end
end

local function check_gpu(cuda, cpu, cases)
  for i, c in ipairs(cases) do
    local out, lse = run(cuda, c)
    local want, want_lse = run(cpu, c)
    local rel = 2 * math.max(ulp[out:type()], ulp[c.dtype or "f32"])
    local rounds = c.dtype == "int8" and not c.listed
      and (c.rows or (c.group or 1) > 16)
    local kept = rounds and 2 * ulp[inputs_of(c).q:type()] or 0
    support.close(out, want, 6e-5 + rel + kept, rel, ("out of case %d"):format(i))
    if not c.no_lse then
      support.close(lse, want_lse, 6e-5 + rel / 8 + kept, 1e-5,
        ("lse of case %d"):format(i))
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
local DIMS = { 8, 16, 24, 40, 64, 72, 80, 96, 104, 128, 144, 192, 200, 256 }
for i, dim in ipairs(DIMS) do
  local odd = i % 2 + 1
  dims[#dims + 1] = { lens = { 70 }, block_size = 16, group = 4, head_dim = dim }
  dims[#dims + 1] = { lens = { 70, 9 }, rows = { 9, 1 }, block_size = ({ 16, 5 })[odd],
    group = 2, kv_heads = 2, head_dim = dim, dtype = ({ "bf16", "f16" })[odd],
    poison = { 3, 1 } }
  if dim % 16 == 0 then
    dims[#dims + 1] = { lens = { 70, 9 }, rows = { 40, 2 }, block_size = 8, group = 3,
      kv_heads = 2, head_dim = dim, dtype = ({ "int8", "f8e4m3" })[odd], q = "bf16" }
  end
end
topic("takes any head_dim that is a multiple of 8", dims)
topic("divides long work at head_dims that no tile has", {
  { lens = { 2000 }, rows = { 3 }, block_size = 16, group = 4, head_dim = 72,
    dtype = "bf16" },
  { lens = { 900, 40 }, block_size = 8, group = 20, head_dim = 144, dtype = "f16" },
  { lens = { 1500 }, rows = { 5 }, block_size = 8, group = 2, head_dim = 112,
    dtype = "f8e4m3", q = "bf16", scales = "both" },
  { lens = { 1200 }, rows = { 2 }, block_size = 8, group = 4, head_dim = 48,
    dtype = "int8", q = "f16", prev = true },
})
topic("divides the keys of a few new tokens", {
  { lens = { 900, 40, 420 }, rows = { 5, 1, 2 }, block_size = 24, group = 4,
    head_dim = 64, dtype = "bf16", window = 600, prev = true },
  { lens = { 600, 420 }, rows = { 4, 7 }, block_size = 17, group = 2, kv_heads = 2,
    head_dim = 32, dtype = "f16", select = "heads", slots = "gaps", soft_cap = 9 },
  { lens = { 520 }, rows = { 3 }, block_size = 16, group = 4, head_dim = 128,
    dtype = "bf16", poison = { 1, 2, 300 } },
  { lens = { 520 }, rows = { 3 }, block_size = 16, group = 4, head_dim = 128,
    dtype = "f16", poison = { 1 }, prev = true },
  { lens = { 500, 3 }, rows = { 9, 2 }, block_size = 16, group = 2, head_dim = 64,
    dtype = "bf16", tree = true },
})

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
-- On a GPU, 32 sequences, 1024 and more have plans of three kinds.
local many = {}
for i, count in ipairs { 32, 33, 70, 300, 1024, 1025 } do
  local lens = {}
  for s = 1, count do lens[s] = s % 19 == 0 and 300 + s % 7 or s * 5 % 40 end
  lens[count] = 500
  many[#many + 1] = { lens = lens, block_size = 16, group = 2, head_dim = 8,
    dtype = i % 2 == 0 and "bf16" or "f32", window = i % 3 == 0 and 30 or nil }
end
for i, count in ipairs { 33, 70 } do
  for j, dtype in ipairs { "f8e4m3", "int8" } do
    local lens = {}
    for s = 1, count do lens[s] = 5 + s * 7 % 130 end
    many[#many + 1] = { lens = lens, block_size = 8, kv_heads = 2, head_dim = 32,
      group = ({ 20, 4, 9 })[(i + j) % 3 + 1], dtype = dtype, q = "bf16", window = 40,
      alibi = true, soft_cap = 9, prev = true }
  end
end
topic("divides the work of many sequences", many)
topic("runs without lse", {
  { lens = { 20 }, block_size = 16, no_lse = true },
  { lens = { 2000 }, block_size = 16, head_dim = 8, no_lse = true },
})
topic("does nothing for no sequences", { { lens = {}, block_size = 16 } })
topic("gives 0 and -inf where nothing is seen", {
  { lens = { 0, 5, 0 }, block_size = 4, group = 2 },
  { lens = { 0, 5, 0 }, rows = { 1, 1, 2 }, block_size = 4, group = 8 },
})

local slots = {}
for _, select in ipairs { "shared", "heads" } do
  for _, rows in ipairs { false, { 30, 7, 1 } } do
    for _, dtype in ipairs { "f32", "bf16" } do
      slots[#slots + 1] = { lens = { 130, 39, 1 }, rows = rows or nil, group = 4,
        block_size = 16, kv_heads = 3, head_dim = 16, dtype = dtype, select = select,
        alibi = dtype == "f32" }
    end
  end
end
for _, size in ipairs { 1, 17, 256 } do
  slots[#slots + 1] = { lens = { 500, 3 }, rows = { 9, 3 }, group = 2, block_size = size,
    head_dim = 8, select = "shared" }
end
slots[#slots + 1] = { lens = { 3000, 5 }, block_size = 16, kv_heads = 2, head_dim = 8,
  select = "heads" }

--- Copies of cases with these fields changed.
local function with(cases, fields)
  local changed = {}
  for i, c in ipairs(cases) do
    changed[i] = {}
    for name, value in pairs(c) do changed[i][name] = value end
    for name, value in pairs(fields) do changed[i][name] = value end
  end
  return changed
end

local in_slots = with(slots, { slots = "all" })
topic("reads K and V from slots instead of the tables' blocks", in_slots)
topic("passes over blocks that have no slot", with(slots, { slots = "gaps" }))

local joined = {
  { lens = { 45, 0, 100 }, block_size = 16, kv_heads = 2, group = 4, head_dim = 32 },
  { lens = { 45, 0, 100 }, rows = { 9, 1, 30 }, block_size = 16, group = 3,
    head_dim = 24 },
  { lens = { 3 }, rows = { 5 }, block_size = 4 },   -- two rows come before any key
  { lens = { 3000, 0, 513 }, block_size = 16, group = 4, head_dim = 16 },
  { lens = { 2500 }, rows = { 12 }, block_size = 16, group = 2, head_dim = 8,
    select = "shared" },
  { lens = { 50, 3 }, block_size = 8, group = 4, dtype = "bf16" },
  { lens = { 50, 3 }, rows = { 30, 2 }, block_size = 8, dtype = "f16", out = "f32" },
  { lens = { 20 }, block_size = 16, no_lse = true },
}
topic("joins an attention over other keys", with(joined, { prev = true }))
topic("gives the whole in parts that are joined", with(slots, { parts = 3 }))
local whole = with(slots, { dtype = "f32" })
local in_parts = with(whole, { parts = 5 })
topic("gives the whole in parts over slots, joined to another one",
  with(slots, { slots = "gaps", parts = 4, prev = true }))

local windows = {}
for _, window in ipairs { 1, 5, 16, 40, 1000 } do
  for _, rows in ipairs { false, { 40, 1, 25 } } do
    for _, group in ipairs { 1, 4 } do
      windows[#windows + 1] = { lens = { 40, 33, 190 }, rows = rows or nil,
        block_size = 16, kv_heads = 2, group = group, head_dim = 16, window = window }
    end
  end
end
topic("sees a window of keys, the row's own among them", windows)
topic("sees what is later, too, when a window is not causal",
  with(windows, { causal = false }))
topic("puts a window over a selection", with(slots, { window = 30 }))
topic("puts a window over slots with gaps, joined to another attention",
  with(slots, { slots = "gaps", window = 9, prev = true, parts = 2 }))
topic("cuts long windows into segments", {
  { lens = { 3000, 5, 1713 }, block_size = 16, group = 4, head_dim = 16, window = 2500 },
  { lens = { 3000, 700 }, block_size = 5, group = 2, head_dim = 8, window = 1030 },
  { lens = { 2500 }, rows = { 12 }, block_size = 16, group = 2, head_dim = 8,
    window = 2100 },
  { lens = { 400 }, rows = { 300 }, block_size = 32, group = 2, head_dim = 8,
    window = 70 },
  { lens = { 3000 }, block_size = 256, head_dim = 8, window = 2147483647 },
  { lens = { 90 }, rows = { 33 }, block_size = 16, group = 4, window = 20,
    alibi = true },
})
topic("does not need the blocks that a window has left", with(windows, { forget = true }))

local capped = {}
for _, soft_cap in ipairs { 0.3, 2, 50 } do
  for _, rows in ipairs { false, { 30, 2 } } do
    for _, dtype in ipairs { "f32", "bf16" } do
      capped[#capped + 1] = { lens = { 70, 3 }, rows = rows or nil, block_size = 8,
        group = 4, dtype = dtype, soft_cap = soft_cap }
      capped[#capped + 1] = { lens = { 70, 3 }, rows = rows or nil, block_size = 8,
        group = 2, dtype = dtype, soft_cap = soft_cap, alibi = true, window = 20 }
    end
  end
end
topic("caps scores softly, before ALiBi's bias", capped)

local scaled = {}
for i, scales in ipairs { "none", "k", "v", "both" } do
  for _, rows in ipairs { false, { 30, 2 } } do
    for _, q in ipairs { "f32", "f16", "bf16" } do
      scaled[#scaled + 1] = { lens = { 50, 3 }, rows = rows or nil, block_size = 8,
        kv_heads = 3, group = 4, head_dim = 16 * i, dtype = "f8e4m3", q = q,
        scales = scales, out = i == 2 and "f32" or nil }
    end
  end
end
for _, c in ipairs(with(slots, { dtype = "f8e4m3", scales = "both", slots = "gaps" })) do
  c.head_dim = 16
  scaled[#scaled + 1] = c
end
topic("reads an f8e4m3 cache, and its scales", scaled)

-- On Hopper, prefill of these head_dims has kernels of its own.
local wide = {}
for i, dim in ipairs { 64, 96, 128, 192, 256 } do
  for j, size in ipairs { 1, 5, 12, 16, 48 } do
    local dtype = ({ "bf16", "f16", "f8e4m3" })[(i + j) % 3 + 1]
    wide[#wide + 1] = { lens = { 150, 17, 0 }, rows = { (i * j) % 5 * 9 + 1, 3, 0 },
      group = j, kv_heads = 2, head_dim = dim, block_size = size, dtype = dtype,
      q = dtype == "f8e4m3" and j % 2 == 0 and "f16" or nil,
      scales = dtype == "f8e4m3" and "both" or nil, seed = 10 * i + j,
      select = ({ "heads", "shared" })[(i + 2 * j) % 4], window = j == 3 and 40 or nil,
      alibi = i == j or nil, soft_cap = (i + j) % 4 == 1 and 3 * i or nil,
      prev = j == 4 or nil }
  end
end
for _, c in ipairs(wide) do if c.select then c.slots = c.prev and "gaps" or nil end end
topic("prefills with large heads over blocks of any size", wide)
topic("shows large heads a draft tree over blocks of any size",
  with({ wide[2], wide[7], wide[11], wide[20] }, { tree = true, alibi = false,
    rows = { 20, 3, 0 } }))
topic("caps large heads' scores far out", with({ wide[2], wide[6], wide[15] },
  { soft_cap = 500, alibi = false }))

local sizes_of_q = {}
for _, unit in ipairs { 2 ^ -120, 2 ^ -60 } do
  for _, dtype in ipairs { "bf16", "f8e4m3", "int8" } do
    for _, fields in ipairs { {}, { rows = { 20, 3 } }, { listed = "shared" } } do
      sizes_of_q[#sizes_of_q + 1] = { lens = { 90, 17 }, rows = fields.rows, group = 4,
        listed = fields.listed, block_size = 8, head_dim = 64, dtype = dtype, q = "bf16",
        unit = unit }
    end
  end
end
topic("takes queries that are almost nothing", sizes_of_q)

local trees = {}
for i, rows in ipairs { { 5, 1, 2 }, { 1, 64, 17 }, { 33, 9, 0 } } do
  for _, dtype in ipairs { "f32", "bf16" } do
    for _, group in ipairs { 1, 4, 9 } do
      trees[#trees + 1] = { lens = { 90, 64, 17 }, rows = rows, block_size = 16,
        kv_heads = 2, group = group, head_dim = 16, dtype = dtype, tree = true, seed = i,
        tree_words = i % 2 + 1 }
    end
  end
end
trees[#trees + 1] = { lens = { 300, 128 }, rows = { 128, 128 }, block_size = 16,
  group = 2, head_dim = 64, tree = true }
trees[#trees + 1] = { lens = { 3000, 5 }, rows = { 8, 3 }, block_size = 16, group = 4,
  head_dim = 16, tree = true, tree_words = 1 }
trees[#trees + 1] = { lens = { 140, 40 }, rows = { 70, 2 }, block_size = 17, group = 2,
  head_dim = 80, tree = true, soft_cap = 2, causal = false, prev = true }
trees[#trees + 1] = { lens = { 140, 40 }, rows = { 7, 20 }, block_size = 8, group = 2,
  dtype = "f8e4m3", head_dim = 64, scales = "both", tree = true }
topic("shows a row of a draft tree its ancestors and the context", trees)
topic("puts a draft tree over a selection", with(slots, { rows = { 30, 7, 1 },
  tree = true, alibi = false, lens = { 500, 39, 1 } }))
topic("puts a draft tree over slots with gaps, joined to another attention",
  with(in_slots, { rows = { 30, 7, 1 }, tree = true, alibi = false, slots = "gaps",
    lens = { 500, 39, 1 }, prev = true, parts = 2 }))

-- A row's result is that of the keys that it sees, whatever the others hold: a key that
-- is hidden from a row lies in a tile with keys that it sees, and other rows see it.
local poisoned = {}
for i, dim in ipairs { 64, 80, 96, 128, 192, 256 } do
  for j, rows in ipairs { { 1, 2, 6 }, { 40, 3, 2 }, { 135, 30, 9 } } do
    local dtype = ({ "bf16", "f16", "f8e4m3", "f32" })[(i + j) % 4 + 1]
    poisoned[#poisoned + 1] = { lens = { 190, 33, 9 }, rows = rows, group = j,
      kv_heads = 2, head_dim = dim, dtype = dtype,
      block_size = ({ 16, 5, 64 })[(i + 2 * j) % 3 + 1],
      scales = dtype == "f8e4m3" and "both" or nil, seed = 10 * i + j,
      poison = { 1, j == 3 and 70 or 2, 7 }, soft_cap = i == 4 and 3 or nil }
  end
end
topic("keeps NaN and inf in V of later keys from a row", poisoned)
local behind = {}
for i, c in ipairs(poisoned) do
  for _, far in ipairs { 10, 40 } do
    local copy = {}
    for name, value in pairs(c) do copy[name] = value end
    copy.window, copy.soft_cap = far, nil
    copy.poison = { far + c.rows[1] - 1, far + 1, far }
    copy.select = ({ nil, "heads", "shared" })[i % 3]
    copy.prev = i % 2 == 0 or nil
    behind[#behind + 1] = copy
  end
end
topic("keeps NaN and inf in V of keys before a window from a row", behind)
topic("keeps NaN and inf in V of other branches of a tree from a row", {
  { lens = { 90, 64 }, rows = { 9, 40 }, block_size = 16, kv_heads = 2, group = 4,
    head_dim = 64, dtype = "bf16", tree = true, poison = { 3, 6 } },
  { lens = { 90, 64 }, rows = { 9, 40 }, block_size = 8, group = 1, head_dim = 128,
    dtype = "f16", tree = true, poison = { 2, 8 }, seed = 5 },
  { lens = { 40 }, rows = { 6 }, block_size = 16, group = 2, head_dim = 80,
    dtype = "bf16", tree = true, poison = { 3 }, seed = 3 },
  { lens = { 40 }, rows = { 6 }, block_size = 16, group = 2, tree = true,
    poison = { 3 } },
})
topic("divides long work with NaN in V, and joins it", {
  { lens = { 3000 }, rows = { 3 }, block_size = 16, group = 4, head_dim = 128,
    dtype = "bf16", poison = { 1, 2 } },
  { lens = { 3000 }, rows = { 12 }, block_size = 16, group = 2, head_dim = 64,
    dtype = "bf16", window = 2500, poison = { 2505, 2509 } },
})

--- Everything with everything, by a seed.
local function mixtures(n)
  local rng, list = support.rng(2026), {}
  local function one_of(...) return (select(rng(select("#", ...)) + 1, ...)) end
  for i = 1, n do
    local group = one_of(1, 4, 8, 16, 32)
    local c = { seed = i, lens = {}, group = group, kv_heads = group < 32 and 2 or 1,
      head_dim = one_of(48, 64, 80, 96, 112, 128, 144, 192, 208, 256),
      block_size = one_of(5, 8, 16, 32, 64, 256),
      dtype = one_of("f32", "f16", "bf16", "f8e4m3", "int8"),
      window = one_of(nil, nil, 1, 3, 20, 100, 1000),
      soft_cap = one_of(nil, nil, 0.7, 30),
      select = one_of(nil, nil, "shared", "heads"),
      listed = one_of(nil, nil, nil, "shared", "heads"), count = one_of(3, 60, 200),
      alibi = one_of(nil, true), prev = one_of(nil, true),
      causal = one_of(nil, nil, nil, false) }
    local rows = one_of(nil, {})
    for s = 1, 3 do
      c.lens[s] = one_of(1, 17, 64, 130, 300)
      if rows then rows[s] = math.min(c.lens[s], one_of(0, 1, 2, 9, 33)) end
    end
    c.rows = rows
    if c.listed then c.select = nil end
    if c.select or c.listed then c.slots = one_of(nil, "all", "gaps") end
    if c.dtype == "int8" then
      c.block_size, c.q = math.ceil(c.block_size / 8) * 8, one_of("f32", "f16", "bf16")
    elseif c.dtype == "f8e4m3" then
      c.q, c.scales = one_of("f32", "f16", "bf16"), one_of("none", "k", "v", "both")
    end
    list[i] = c
  end
  return list
end
topic("takes all of it together", mixtures(support.is_full and 80 or 40))

-- The grid of docs/architecture.md, "Sources of keys".
local SOURCES = {
  ["a table"] = {}, ["a selection"] = { select = "shared" },
  ["a selection by heads"] = { select = "heads" },
  ["slots"] = { select = "heads", slots = "gaps" }, ["a list"] = { listed = "shared" },
  ["a list by heads"] = { listed = "heads" },
  ["a list in slots"] = { listed = "heads", slots = "gaps" },
}
local WITH = {
  {}, { window = 20 }, { alibi = true }, { soft_cap = 2 }, { prev = true },
  { causal = false }, { tree = true, rows = { 9, 33, 1 } }, { poison = { 1, 5 } },
  { window = 40, alibi = true, soft_cap = 9, prev = true, rows = { 30, 2, 1 } },
}
for _, name in ipairs(support.names(SOURCES)) do
  local grid = {}
  for i, dtype in ipairs { "f32", "f16", "bf16", "f8e4m3", "int8" } do
    for j, fields in ipairs(WITH) do
      for _, rows in ipairs { false, { 20, 3, 1 } } do
        local c = { lens = { 130, 40, 9 }, rows = rows or nil, block_size = 8,
          kv_heads = 2, group = ({ 1, 4, 20 })[(i + j) % 3 + 1], dtype = dtype,
          head_dim = ({ 32, 64, 128 })[j % 3 + 1], count = 60, seed = 10 * i + j,
          scales = dtype == "f8e4m3" and "both" or nil }
        for _, from in ipairs { SOURCES[name], fields } do
          for key, value in pairs(from) do c[key] = value end
        end
        if rows or not fields.rows then grid[#grid + 1] = c end
      end
    end
  end
  topic("reads every format with all that there is, through " .. name, grid)
end
for _, t in ipairs(require "spec.kernels.listed_cases") do topic(t.name, t.cases) end

describe("paged attention", function()
  for _, t in ipairs(topics) do
    support.it_on_cpu(t.name, function(dev) check_cpu(dev, t.cases) end)
  end

  support.it_on_cpu("gives the same bits through slots as through tables", function(dev)
    for i, c in ipairs(slots) do
      local out, lse = run(dev, in_slots[i])
      local want, want_lse = run(dev, c)
      support.equal(out, want, ("out of case %d"):format(i))
      support.equal(lse, want_lse, ("lse of case %d"):format(i))
    end
  end)

  support.it_on_cpu("gives the whole in f32 parts, but for their rounding", function(dev)
    for i, c in ipairs(whole) do
      local out, lse = run(dev, in_parts[i])
      local want, want_lse = run(dev, c)
      support.close(out, want, 2e-6, 2e-6, ("out of case %d"):format(i))
      support.close(lse, want_lse, 2e-6, 2e-6, ("lse of case %d"):format(i))
    end
  end)

  support.it_on_cpu("leaves an attention alone that is joined to nothing", function(dev)
    local nothing = { lens = { 0, 0 }, rows = { 1, 2 }, block_size = 4, group = 2,
      prev = true }
    local out, lse = run(dev, nothing)
    local want, want_lse = expected(nothing)
    support.equal(out, want, "out")
    support.equal(lse, want_lse, "lse")
    local something = { lens = { 45, 9 }, block_size = 16, group = 4 }
    want, want_lse = run(dev, something)
    local call = with({ something }, { prev = true })[1]
    local prev_lse = inputs_of(call).prev_lse
    for r = 1, #prev_lse do prev_lse[r] = -math.huge end
    out, lse = run(dev, call)
    support.equal(out, want, "out")
    support.equal(lse, want_lse, "lse")
  end)

  support.it_on_cpu("does not read keys that no row's window has", function(dev)
    for _, c in ipairs(with(windows, { forget = false })) do
      local inputs, want = inputs_of(c), expected(c)
      local layout, cache = inputs.paged.layout, inputs.paged.cache
      for s, len in ipairs(c.lens) do
        for p = 0, len - (c.rows and c.rows[s] or 1) - c.window do
          local block = inputs.paged.tables[(s - 1) * inputs.paged.max_blocks
            + math.floor(p / c.block_size) + 1]
          for lane = 0, 2 * layout.kv_heads - 1 do
            local row = (block * 2 * layout.kv_heads + lane) * c.block_size
            local at = (row + p % c.block_size) * layout.head_dim
            for d = 1, layout.head_dim do cache[at + d] = 0 / 0 end
          end
        end
      end
      support.close(run(dev, c), want, 3e-5)
    end
  end)

  support.it_on_cpu("sees nothing through an empty selection", function(dev)
    local c = { lens = { 20, 30 }, block_size = 16, group = 2 }
    local inputs = inputs_of(c)
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

describe("paged attention", function()
  support.it_on_cpu("gives the same bits with a tree that is a chain", function(dev)
    for _, c in ipairs(trees) do
      local chain = with({ c }, { tree = "chain", causal = true })[1]
      local out, lse = run(dev, chain)
      local none = with({ chain }, { tree = false })[1]
      local want, want_lse = run(dev, none)
      support.equal(out, want, "out")
      support.equal(lse, want_lse, "lse")
    end
  end)
end)

describe("paged attention", function()
  local dev = kv.device "cpu"

  --- A call over one sequence that must be refused in these words.
  local function refused(o, ...)
    local heads, dim, dtype = 2, o.dim or 32, o.dtype or "f8e4m3"
    local call = { q = kv.zeros(dev, o.q or "bf16", { 1, 2 * heads, dim }),
      cache = kv.full(dev, dtype, { 3, 2, heads, 4, dim }, 0),
      tables = kv.zeros(dev, "i32", { 1, 2 }), lens = kv.full(dev, "i32", { 1 }, 5) }
    for name, value in pairs(o.call or {}) do call[name] = value end
    if o.k_scale or o.v_scale then
      call.format = support.format_of(call.cache, o.k_scale, o.v_scale)
    end
    support.refuses(function() kv.ops.step.paged_attention(call) end, "paged_attention",
      ...) -- the library's own words, behind the check of options
  end
  local function scales(n, dtype) return kv.full(dev, dtype or "f32", { n }, 1) end

  it("refuses a negative window or soft cap", function()
    refused({ call = { window = -1 } }, "window is -1, expected >= 0")
    refused({ call = { soft_cap = -0.5 } }, "soft_cap is -0.5, expected >= 0")
    refused({ call = { soft_cap = 0 / 0 } }, "soft_cap is", "nan, expected >= 0")
    refused({ call = { soft_cap = 1 / 0 } }, "soft_cap is inf, expected >= 0 and finite")
  end)

  it("refuses a tree of another shape, or beside ALiBi or a window", function()
    local function tree(...) return kv.zeros(dev, "u64", { ... }) end
    refused({ call = { tree = tree(1, 3) } },
      "tree has 3 words for a row, expected 1 or 2")
    refused({ call = { tree = tree(2, 1) } }, "tree is u64 [2, 1]", "tokens=1")
    refused({ call = { tree = kv.zeros(dev, "i64", { 1, 1 }) } }, "tree is i64 [1, 1]")
    refused({ call = { tree = tree(1, 1), window = 5 } },
      "tree is given with a window, expected one of the two")
    refused({ call = { tree = tree(1, 1), alibi = kv.zeros(dev, "f32", { 4 }) } },
      "tree is given with alibi, expected one of the two")
  end)

  it("refuses scales of another cache, dtype or shape", function()
    local function of(dtype, k, v)
      return function()
        support.format_of(kv.full(dev, dtype, { 3, 2, 2, 4, 32 }, 0), k, v)
      end
    end
    support.refuses(of("bf16", scales(2)),
      "k_scale is given for a cache of bf16, expected f8e4m3")
    support.refuses(of("f32", nil, scales(2)),
      "v_scale is given for a cache of f32, expected f8e4m3")
    refused({ k_scale = scales(4) }, "k_scale is f32 [4]", "kv_heads=2")
    refused({ v_scale = scales(2, "bf16") }, "v_scale is bf16 [2]")
  end)

  it("refuses head_dims and queries that an f8e4m3 cache does not go with", function()
    refused({ dim = 24 },
      "head_dim is 24, expected a multiple of 16 for an f8e4m3 cache")
    refused({ q = "f8e4m3" }, "q is f8e4m3")
    refused({ dtype = "bf16", q = "f16" }, "q is f16")
  end)

  it("refuses lists that do not fit, in words", function()
    local function ints(...) return kv.zeros("cpu", "i32", { ... }) end
    local function call(o)
      local a = { q = kv.zeros("cpu", "bf16", { 3, 8, 64 }), tables = ints(3, 2),
                  cache = kv.zeros("cpu", "bf16", { 4, 2, 2, 16, 64 }), lens = ints(3) }
      for key, value in pairs(o) do a[key] = value end
      return function() kv.ops.paged_attention(a) end
    end
    support.refuses(call { listed = ints(2, 1, 5) }, "listed is i32 [2, 1, 5]",
      "tokens=3")
    support.refuses(call { listed = ints(3, 5) }, "listed is i32 [3, 5]")
    support.refuses(call { listed = ints(3, 4, 5) }, "listed is for 4 heads",
      "kv_heads = 2")
    support.refuses(call { listed = kv.zeros("cpu", "i64", { 3, 1, 5 }) }, "i64")
    support.refuses(call { listed = ints(3, 1, 5), selection = ints(3, 1, 2) },
      "selection and listed are given, expected one of the two")
    support.refuses(call { slots = ints(3, 1, 5) }, "without a selection or a list")
  end)
end)

-- ---- long prefills, whose pages are unpacked first --------------------------------

local HEADS, KV_HEADS, SIZE = 32, 2, 16

--- Long prefills: of the last n of `keys` tokens of two sequences, in blocks of SIZE.
-- bad: V of this new token of the first sequence is NaN. Only later ones may see it.
local LONG = {
  { head_dim = 128, dtype = "bf16", n = 800 },
  { head_dim = 96, dtype = "f16", n = 900, causal = false },
  { head_dim = 128, dtype = "bf16", window = 700, bad = 8 },
  { head_dim = 64, dtype = "f16", window = 700, alibi = true, bad = 8 },
  { head_dim = 72, dtype = "bf16" }, { head_dim = 88, dtype = "f16", window = 700 },
  { head_dim = 80, dtype = "bf16", soft_cap = 9, alibi = true },
  { head_dim = 136, dtype = "f16", n = 2048, keys = 8192 },
  { head_dim = 64, dtype = "f8e4m3", q = "f16" }, { head_dim = 256, dtype = "f8e4m3" },
  { head_dim = 144, dtype = "f8e4m3", causal = false },
  { head_dim = 128, dtype = "int8", q = "f16" }, { head_dim = 80, dtype = "int8" },
  { head_dim = 256, dtype = "int8", window = 700 },
  { head_dim = 128, dtype = "bf16", pinned = true },
  { head_dim = 64, dtype = "int8", pinned = true, soft_cap = 9 },
  { head_dim = 128, dtype = "int8", select = 1 },
  { head_dim = 80, dtype = "bf16", select = KV_HEADS, window = 700 },
  { head_dim = 128, dtype = "int8", select = 1, slots = KV_HEADS },
  { head_dim = 256, dtype = "f8e4m3", select = KV_HEADS, slots = 1, alibi = true },
}

--- Selections for `heads` KV heads, or one for all, of about two thirds of the blocks of
-- each sequence: i32 [2, heads, width], ascending and -1 padded.
local function long_selection(dev, heads, width)
  local rng, list = support.rng(8), {}
  for row = 1, 2 * heads do
    local from = (row - 1) * width
    local n = from
    for block = 0, width - 1 do
      if rng(3) > 0 then
        n = n + 1
        list[n] = block
      end
    end
    for i = n + 1, from + width do list[i] = -1 end
  end
  return kv.from(dev, "i32", { 2, heads, width }, list)
end

--- The arguments of a case, but for q and what says which tokens it has; and all of q.
local function long_inputs(dev, c)
  local n, keys, dim = c.n or 1024, c.keys or 4096, c.head_dim
  local blocks = 2 * keys / SIZE
  local values = kv.randn(dev, "f32", { blocks, 2, KV_HEADS, SIZE, dim }, { seed = 5 })
  local memory, format
  if c.dtype == "int8" then
    memory, format = support.int8_pages(values)
  else
    memory = values:cast(c.dtype)
    format = support.format_of(memory)
  end
  if c.pinned then memory = kv.pinned(dev, memory:type(), memory:dims()):copy_(memory) end
  local order = support.distinct(support.rng(3), blocks, blocks)
  if c.bad then
    local rows = memory:reshape { blocks * 2 * KV_HEADS * SIZE, dim }
    local at = keys - n + c.bad
    local block = order[math.floor(at / SIZE) + 1]
    for head = KV_HEADS, 2 * KV_HEADS - 1 do
      rows:narrow((block * 2 * KV_HEADS + head) * SIZE + at % SIZE, 1):fill_(0 / 0)
    end
  end
  local selection = c.select and long_selection(dev, c.select, blocks / 2)
  local rng, places = support.rng(4), nil
  if c.slots then
    places = {}
    for i = 1, c.slots * blocks do places[i] = rng(blocks) end
    places = kv.from(dev, "i32", { 2, c.slots, blocks / 2 }, places)
  end
  local q_dtype = c.q or (c.dtype == "f16" and "f16" or "bf16")
  local q = kv.randn(dev, q_dtype, { 2 * n, HEADS, dim }, { seed = 6, std = 2 })
  return { cache = memory, format = format, window = c.window, soft_cap = c.soft_cap,
    causal = c.causal ~= false,
    alibi = c.alibi and kv.rand(dev, "f32", { HEADS }, { seed = 7 }) * 0.01 or nil,
    selection = selection, slots = places,
    tables = kv.from(dev, "i32", { 2, blocks / 2 }, order) }, q, n, keys
end

--- Attends with `count` tokens of each sequence, from its token `first` on, of n.
local function attend_to(inputs, q, n, keys, first, count)
  local dev, shape = q.device, { 2 * count, HEADS, q:size(2) }
  local rows = q:reshape { 2, n, HEADS, q:size(2) }:narrow(first, count, 1)
  -- the second sequence lacks its last seven tokens
  local lens = { keys - n + first + count, keys - 7 - n + first + count }
  if not inputs.causal then lens = { keys, keys - 7 } end
  local call = { q = rows:clone():reshape(shape), lens = kv.from(dev, "i32", lens),
    starts = kv.from(dev, "i32", { 0, count, 2 * count }),
    out = support.poisoned(dev, "f32", shape),
    lse = support.poisoned(dev, "f32", { 2 * count, HEADS }) }
  for name, value in pairs(inputs) do call[name] = value end
  kv.ops.paged_attention(call)
  return call.out:reshape { 2, count, HEADS, q:size(2) }, call.lse, call
end

describe("paged attention on CUDA #gpu", function()
  for _, t in ipairs(topics) do
    support.it_on_gpu(t.name, function(cuda, cpu) check_gpu(cuda, cpu, t.cases) end)
  end

  for i, c in ipairs(LONG) do
    support.it_on_gpu(("gives a long prefill what its tokens get in short ones: %d")
      :format(i), function(cuda)
      local inputs, q, n, keys = long_inputs(cuda, c)
      local all = attend_to(inputs, q, n, keys, 0, n)
      for _, first in ipairs { 0, 777, n - 8 } do
        local part = attend_to(inputs, q, n, keys, first, 8)
        support.close(all:narrow(first, 8, 1):clone(), part, 0.03, 0.01,
          "from token " .. first)
      end
    end)
  end

  support.it_on_gpu("gives a long prefill over int8 what the same numbers in bf16 give",
    function(cuda)
      for _, pinned in ipairs { false, true } do
        local inputs, q, n, keys = long_inputs(cuda, { head_dim = 128, dtype = "int8",
          pinned = pinned })
        local out, lse = attend_to(inputs, q, n, keys, 0, n)
        local blocks = inputs.tables:size(0) * inputs.tables:size(1)
        local shape, parts = { blocks, KV_HEADS, SIZE, 128 }, {}
        for i = 1, 2 do parts[i] = kv.tensor(cuda, "bf16", shape) end
        kv.ops.read_blocks(inputs.cache, kv.arange(cuda, "i32", blocks), parts[1],
          parts[2], inputs.format)
        table.insert(shape, 2, 1)
        for i = 1, 2 do parts[i] = parts[i]:reshape(shape) end
        local plain = kv.cat(parts, 1)
        inputs.cache, inputs.format = plain, support.format_of(plain)
        local want, want_lse = attend_to(inputs, q, n, keys, 0, n)
        support.equal(out, want, "out")
        support.equal(lse, want_lse, "lse")
      end
    end)
end)
