--- Tolerance: results are means of values near 1, summed in fp32 in another order than
-- the reference: 3e-5. A 16-bit output adds its rounding, half a unit in the last place
-- (f16 2^-11, bf16 2^-8, relative). On the GPU 16-bit caches round the weights as well:
-- twice that.
local kv = require "kvlab"
local support = require "spec.support"
local attention = require "spec.kernels.attention_cases"

local prepare, run = attention.prepare, attention.run
local ulp = { f32 = 0, f16 = 2^-11, bf16 = 2^-8 }

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
    changed[i].inputs, changed[i].expected = nil, nil
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
    support.equal(out, nothing.expected.out, "out")
    support.equal(lse, nothing.expected.lse, "lse")
    local something = { lens = { 45, 9 }, block_size = 16, group = 4 }
    local want, want_lse = run(dev, something)
    local call = with({ something }, { prev = true })[1]
    prepare(call)
    for r = 1, #call.inputs.prev_lse do call.inputs.prev_lse[r] = -math.huge end
    out, lse = run(dev, call)
    support.equal(out, want, "out")
    support.equal(lse, want_lse, "lse")
  end)

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
