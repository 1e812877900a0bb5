--- Pages whose values are the first numbers of their keys, as those of latents are: all
-- ops that know them. Tolerances are those of paged_attention_spec.lua.
local kv = require "kvlab"
local support = require "spec.support"
local attention = require "spec.kernels.attention_cases"

local ulp = { f32 = 0, f16 = 2 ^ -11, bf16 = 2 ^ -8, f8_latent = 2 ^ -8 }

--- Cases of attention over latents, by what they are about.
local topics = {
  ["any sizes of keys and values"] = {}, ["any number of heads"] = {},
  ["every dtype"] = {}, ["several new tokens, and prompts"] = {},
  ["selections, slots and what came before"] = {}, ["lists of tokens"] = {},
  ["NaN and inf in what a row does not see"] = {},
  ["values in 8 bits"] = {},
}
local function add(topic, c)
  c.block_size, c.head_dim = c.block_size or 16, c.head_dim or 40
  c.value_dim = c.value_dim or 24
  table.insert(topics[topic], c)
end

for _, dims in ipairs { { 8, 8 }, { 24, 16 }, { 72, 64 }, { 96, 8 }, { 200, 200 },
                        { 288, 256 }, { 576, 512 }, { 576, 576 } } do
  for _, rows in ipairs { false, { 9 } } do
    add("any sizes of keys and values", { lens = { 70 }, rows = rows or nil, group = 5,
      head_dim = dims[1], value_dim = dims[2] })
  end
end
for _, group in ipairs { 1, 2, 4, 8, 9, 16, 33, 128, 130 } do
  add("any number of heads", { lens = { 45, 0, 100 }, group = group })
  add("any number of heads", { lens = { 45, 9 }, group = group, listed = "shared" })
end
add("any number of heads", { lens = { 30 }, group = 128, head_dim = 576,
  value_dim = 512 })
add("any number of heads", { lens = { 45, 7 }, kv_heads = 3, group = 4 })
for _, dtype in ipairs { "f32", "f16", "bf16" } do
  for _, with in ipairs { {}, { q = "f32" }, { out = "f32" } } do
    for _, rows in ipairs { false, { 30, 2 } } do
      add("every dtype", { lens = { 50, 3 }, rows = rows or nil, group = 6,
        dtype = dtype, q = with.q, out = with.out, block_size = 8 })
    end
  end
end
for _, c in ipairs {
  { lens = { 40, 33, 90 }, rows = { 40, 1, 25 }, group = 4 },
  { lens = { 200 }, rows = { 200 }, group = 2 },
  { lens = { 90 }, rows = { 33 }, group = 16, window = 20 },
  { lens = { 90 }, rows = { 33 }, group = 4, alibi = true, soft_cap = 3 },
  { lens = { 40, 70 }, rows = { 8, 5 }, group = 4, tree = true },
  { lens = { 3000, 5 }, group = 4 }, { lens = { 2500 }, rows = { 3 }, group = 16 },
} do add("several new tokens, and prompts", c) end
for _, group in ipairs { 4, 20, 40 } do -- a tree of one token, with tiles in boxes
  add("several new tokens, and prompts", { lens = { 40, 170 }, group = group,
    head_dim = 64, tree = true })
end
for _, rows in ipairs { false, { 30, 7, 1 } } do
  for _, with in ipairs { {}, { slots = "all" }, { slots = "gaps", prev = true },
                          { prev = true, parts = 3 } } do
    for _, group in ipairs { 4, 12 } do
      add("selections, slots and what came before", { lens = { 130, 39, 1 },
        rows = rows or nil, group = group, select = "shared", slots = with.slots,
        prev = with.prev, parts = with.parts })
    end
  end
end
for _, group in ipairs { 3, 16, 40 } do
  for _, rows in ipairs { false, { 5, 1, 3 } } do
    for _, with in ipairs { {}, { window = 30 }, { slots = "gaps" },
                            { count = 200, soft_cap = 2 } } do
      add("lists of tokens", { lens = { 130, 39, 4 }, rows = rows or nil, group = group,
        listed = "shared", window = with.window, slots = with.slots, count = with.count,
        soft_cap = with.soft_cap })
    end
  end
end
add("lists of tokens", { lens = { 70 }, rows = { 9 }, group = 12, listed = "shared",
  tree = true })
for _, group in ipairs { 2, 16 } do
  add("NaN and inf in what a row does not see", { lens = { 60 }, rows = { 20 },
    group = group, poison = { 1, 2, 3, 4, 5 } })
  add("NaN and inf in what a row does not see", { lens = { 60, 80 }, rows = { 4, 3 },
    group = group, window = 25, poison = { 50, 51, 52, 40 } })
end

for _, dims in ipairs { { 16, 16 }, { 24, 16 }, { 200, 144 }, { 576, 512 } } do
  for _, q in ipairs { "bf16", "f16", "f32" } do
    add("values in 8 bits", { lens = { 70, 9 }, group = 5, head_dim = dims[1],
      value_dim = dims[2], q = q, dtype = "f8_latent" })
  end
end
for _, c in ipairs {
  { lens = { 45, 0, 100 }, group = 16 }, { lens = { 45, 100 }, group = 130 },
  { lens = { 40, 33, 90 }, rows = { 40, 1, 25 }, group = 4 },
  { lens = { 90 }, rows = { 33 }, group = 16, window = 20, alibi = true, soft_cap = 3 },
  { lens = { 40, 70 }, rows = { 8, 5 }, group = 4, tree = true },
  { lens = { 130, 39, 1 }, group = 12, select = "shared", slots = "gaps", prev = true },
  { lens = { 130, 39, 4 }, rows = { 5, 1, 3 }, group = 40, listed = "shared",
    slots = "gaps" },
  { lens = { 130, 39, 4 }, group = 3, listed = "shared", count = 200 },
  { lens = { 60, 80 }, rows = { 4, 3 }, group = 16, window = 25,
    poison = { 50, 51, 52, 40 } },
  { lens = { 60 }, rows = { 20 }, group = 2, poison = { 1, 2, 3, 4, 5 } },
  { lens = { 45, 7 }, kv_heads = 3, group = 4 },
} do
  c.dtype, c.head_dim, c.value_dim = "f8_latent", 48, 32
  add("values in 8 bits", c)
end

local function format_of(o)
  return kv.format { codec = o.codec or "bf16", kv_heads = o.kv_heads or 1,
    block_size = o.block_size or 4, head_dim = o.head_dim or 24,
    value_dim = o.value_dim or 16 }
end

--- Cases for a GPU: the same in 16 bits, which tensor cores take, and in f32.
local function gpu_cases(cases)
  local all = {}
  for _, c in ipairs(cases) do
    all[#all + 1] = c
    if not c.dtype then
      for _, dtype in ipairs { "bf16", "f16" } do
        local with = {}
        for key, value in pairs(c) do with[key] = value end
        with.dtype = dtype
        all[#all + 1] = with
      end
    end
  end
  return all
end

local large = {} -- sizes that a GPU divides over its thread blocks
for _, group in ipairs { 1, 16, 20, 32, 33, 64, 128, 130 } do
  for _, with in ipairs { {}, { listed = "shared", count = 300 }, { window = 700 },
                          { select = "shared" }, { rows = { 3, 70 } } } do
    for _, dtype in ipairs { "bf16", "f8_latent" } do
      large[#large + 1] = { lens = { 900, 2000 }, rows = with.rows, group = group,
        head_dim = 576, value_dim = 512, dtype = dtype, block_size = 64,
        listed = with.listed, count = with.count, window = with.window,
        select = with.select }
    end
  end
end
for _, dtype in ipairs { "bf16", "f16", "f8_latent" } do -- scores rise from key to key
  for _, rows in ipairs { false, { 3, 70 } } do
    large[#large + 1] = { lens = { 900, 700 }, rows = rows or nil, group = 64,
      head_dim = 576, value_dim = 512, dtype = dtype, block_size = 64, alibi = true }
  end
end
for _, out in ipairs { "f32", "bf16" } do -- joined with what came before, in parts
  large[#large + 1] = { lens = { 900, 130 }, group = 40, head_dim = 576,
    value_dim = 512, dtype = "bf16", out = out, block_size = 64, select = "shared",
    prev = true, parts = 3 }
end
for _, block_size in ipairs { 1, 5, 8, 48, 128 } do
  for _, dtype in ipairs { "f16", "f8_latent" } do
    large[#large + 1] = { lens = { 700, 3, 0, 129 }, group = 16, head_dim = 576,
      value_dim = 512, dtype = dtype, block_size = block_size }
  end
end
for _, dim in ipairs { 512, 520, 568 } do -- fewer numbers behind those of a value
  for _, group in ipairs { 16, 32, 64 } do
    for _, q in ipairs { "bf16", "f16" } do
      large[#large + 1] = { lens = { 700, 65 }, group = group, head_dim = dim,
        value_dim = 512, dtype = "f8_latent", q = q, block_size = 16,
        listed = group == 32 and "shared" or nil }
    end
  end
end
local many = {}
for i = 1, 300 do many[i] = i * 7 % 90 end
large[#large + 1] = { lens = many, group = 64, head_dim = 128, value_dim = 64,
  dtype = "bf16", block_size = 16 }

for _, dtype in ipairs { "bf16", "f8_latent" } do -- more items than whole rounds of them
  large[#large + 1] = { lens = { 400 }, rows = { 300 }, group = 64, head_dim = 96,
    value_dim = 64, dtype = dtype, block_size = 16, listed = "shared", count = 100 }
  large[#large + 1] = { lens = { 1400 }, rows = { 600 }, group = 64, head_dim = 96,
    value_dim = 64, dtype = dtype, block_size = 16, window = 300, poison = { 900, 901 } }
end

local function check_gpu(cuda, cpu, cases)
  for i, c in ipairs(cases) do
    local out, lse = attention.run(cuda, c)
    local want, want_lse = attention.run(cpu, c)
    local rel = 2 * math.max(ulp[out:type()], ulp[c.dtype or "f32"])
    -- tensor cores take what is packed as numbers of q's dtype
    local kept = c.dtype == "f8_latent" and 2 * ulp[c.q or "bf16"] or 0
    support.close(out, want, 6e-5 + rel + kept, rel, ("out of case %d"):format(i))
    support.close(lse, want_lse, 6e-5 + rel / 8 + kept, 1e-5,
      ("lse of case %d"):format(i))
  end
end

describe("latents", function()
  for name, cases in pairs(topics) do
    support.it_on_gpu("are read by attention: " .. name, function(cuda, cpu)
      check_gpu(cuda, cpu, gpu_cases(cases))
    end)
    support.it_on_cpu("are read by attention: " .. name, function(dev)
      for i, c in ipairs(support.sample_for_isa(cases)) do
        local want, want_lse = attention.expected(c)
        local out, lse = attention.run(dev, c)
        local rel = ulp[out:type()]
        support.close(out, want, 3e-5 + rel / 8, rel, ("out of case %d"):format(i))
        support.close(lse, want_lse, 3e-5, 1e-6, ("lse of case %d"):format(i))
      end
    end)
  end

  support.it_on_gpu("are divided over a GPU", function(cuda, cpu)
    check_gpu(cuda, cpu, large)
  end)

  local function come_back(dev)
    for _, dtype in ipairs { "f32", "f16", "bf16" } do
      local format = format_of { codec = dtype, kv_heads = 2 }
      local memory = support.poisoned(dev, dtype, { 5, 2, 4, 24 })
      local k = support.randn(dev, dtype, { 9, 2, 24 }, 5)
      local at = { 17, 2, 0, -1, 7, 19, 1, 12, 400 }
      local places = kv.from(dev, "i64", { 9 }, at)
      kv.ops.append_kv(k, nil, places, memory, format)
      local blocks = kv.from(dev, "i32", { 6 }, { 0, 1, 2, 3, 4, -1 })
      local got = support.poisoned(dev, dtype, { 6, 2, 4, 24 })
      local values = support.poisoned(dev, dtype, { 6, 2, 4, 16 })
      kv.ops.read_blocks(memory, blocks, got, values, format)
      local given, keys, firsts = k:list(), got:list(), values:list()
      for token, place in ipairs(at) do
        for head = 0, place >= 0 and place < 20 and 1 or -1 do
          local row = (math.floor(place / 4) * 2 + head) * 4 + place % 4
          for d = 1, 24 do
            local x = given[((token - 1) * 2 + head) * 24 + d]
            assert.equal(x, keys[row * 24 + d])
            if d <= 16 then assert.equal(x, firsts[row * 16 + d]) end
          end
        end
      end
      for i = 5 * 2 * 4 * 24 + 1, #keys do assert.equal(0, keys[i]) end
    end
  end
  support.it_on_cpu("come back as they were appended", come_back)
  support.it_on_gpu("come back as they were appended", come_back)

  local function are_scored(dev)
    local C, check, dim, heads, lens = kv.C, kv.check, 576, 5, { 12, 7 }
    local format = format_of { codec = "f32", head_dim = dim, value_dim = 512 }
    local memory = support.poisoned(dev, "f32", { 5, 1, 4, dim })
    local k = support.randn(dev, "f32", { 20, 1, dim }, 7)
    kv.ops.append_kv(k, nil, kv.arange(dev, "i64", 20), memory, format)
    local q = support.randn(dev, "f32", { 2, heads, dim }, 8)
    local minmax = support.poisoned(dev, "f32", { 5, 2, 1, dim })
    local tokens = kv.from(dev, "i32", { 5 }, { 4, 4, 4, 4, 3 })
    check(C.kvl_block_minmax(memory, format, kv.arange(dev, "i32", 5), tokens, nil,
      minmax))
    local tables = kv.from(dev, "i32", { 2, 3 }, { 2, 0, 1, 3, 4, -1 })
    local held = kv.from(dev, "i32", { 2 }, lens)
    local exact = support.poisoned(dev, "f32", { 2, 1, 3 })
    local bound = support.poisoned(dev, "f32", { 2, 1, 3 })
    check(C.kvl_score_max_qk(q, memory, format, tables, held, C.KVL_GROUP_MAX, exact))
    check(C.kvl_score_minmax(q, minmax, tables, held, 4, C.KVL_GROUP_MAX, bound))
    local keys, queries, blocks = k:list(), q:list(), tables:list()
    for row = 0, 5 do
      local seq, block = math.floor(row / 3), blocks[row + 1]
      local best, most = -math.huge, -math.huge
      for h = 0, block >= 0 and heads - 1 or -1 do
        local sums, above = { 0, 0, 0, 0 }, 0
        local count = math.min(4, lens[seq + 1] - row % 3 * 4)
        for d = 1, dim do
          local x, high = queries[(seq * heads + h) * dim + d], -math.huge
          for t = 1, count do
            local product = x * keys[(block * 4 + t - 1) * dim + d]
            sums[t], high = sums[t] + product, math.max(high, product)
          end
          above = above + high
        end
        for t = 1, count do best = math.max(best, sums[t]) end
        most = math.max(most, above)
      end
      local got, upper = exact:list()[row + 1], bound:list()[row + 1]
      assert.is_true(got == best or math.abs(got - best) < 2e-4, row)
      assert.is_true(upper == most or math.abs(upper - most) < 2e-4, row)
    end
  end
  support.it_on_cpu("are scored and summarised by all of their numbers", are_scored)
  support.it_on_gpu("are scored and summarised by all of their numbers", are_scored)

  local cpu = kv.device "cpu"

  it("take pages of keys alone", function()
    assert.equal(64 * 576 * 2, tonumber(kv.C.kvl_format_bytes_page(format_of {
      block_size = 64, head_dim = 576, value_dim = 512 })))
  end)

  it("are refused where they cannot be", function()
    support.raises("values of 32 numbers, expected a multiple of 8 from 8 to the 24 of a "
      .. "key", format_of, { value_dim = 32 })
    support.raises("values of 12 numbers", format_of, { value_dim = 12 })
    support.raises("int8 with shared values, expected f32, f16, bf16 or f8_latent",
      format_of, { codec = "int8", block_size = 8, head_dim = 64, value_dim = 32 })
    local format, memory = format_of {}, kv.zeros(cpu, "bf16", { 3, 1, 4, 24 })
    local k, v = kv.zeros(cpu, "bf16", { 1, 1, 24 }), kv.zeros(cpu, "bf16", { 1, 1, 16 })
    local places = kv.zeros(cpu, "i64", { 1 })
    support.raises("v is given, expected none: values are the first numbers of keys",
      kv.ops.append_kv, k, v, places, memory, format)
    local q, at = kv.zeros(cpu, "bf16", { 1, 1, 24 }), kv.zeros(cpu, "i32", { 1 })
    support.raises("v is given, expected none: values are the first numbers of keys",
      kv.ops.rope_append, q, k, v, at, kv.zeros(cpu, "f32", { 4 }), places, memory,
      format)
    support.raises("inv_freq has 5 pairs, expected at most 4: head_dim is 24, and "
      .. "numbers from 16 on turn", kv.ops.rope_append, q, k, nil, at,
      kv.zeros(cpu, "f32", { 5 }), places, memory, format)
    support.raises("inv_freq has 130 pairs, expected at most 128", kv.ops.rope_append,
      kv.zeros(cpu, "bf16", { 1, 1, 304 }), kv.zeros(cpu, "bf16", { 1, 1, 304 }), nil, at,
      kv.zeros(cpu, "f32", { 130 }), places, kv.zeros(cpu, "bf16", { 3, 1, 4, 304 }),
      format_of { head_dim = 304 })
    support.raises("head_dim is 584, expected 576 at most", format_of, { head_dim = 584 })
    local out = kv.zeros(cpu, "bf16", { 1, 2, 24 })
    support.raises("out is bf16 [1, 2, 24]", kv.ops.paged_attention, {
      q = kv.zeros(cpu, "bf16", { 1, 2, 24 }), cache = memory, format = format,
      tables = kv.zeros(cpu, "i32", { 1, 1 }), lens = kv.ones(cpu, "i32", { 1 }),
      out = out })
  end)

  it("give results as long as a value", function()
    local out = kv.ops.paged_attention { q = kv.zeros(cpu, "bf16", { 1, 2, 24 }),
      cache = kv.zeros(cpu, "bf16", { 3, 1, 4, 24 }), format = format_of {},
      tables = kv.zeros(cpu, "i32", { 1, 1 }), lens = kv.ones(cpu, "i32", { 1 }) }
    assert.same({ 1, 2, 16 }, out:dims())
  end)
end)
