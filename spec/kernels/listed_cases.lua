--- Topics of attention over listed tokens: lists of { name, cases } for
-- paged_attention_spec.lua. attention_cases.lua says what a case names.
local topics = {}
local function topic(name, cases)
  for _, c in ipairs(cases) do
    c.listed, c.block_size = c.listed or "shared", c.block_size or 16
  end
  topics[#topics + 1] = { name = name, cases = cases }
end

local dims, groups, lengths, bytes = {}, {}, {}, {}
for _, dim in ipairs { 8, 16, 64, 80, 128, 192, 256 } do
  for _, dtype in ipairs { "f32", "f16", "bf16" } do
    dims[#dims + 1] = { lens = { 140, 90 }, count = 70, head_dim = dim, dtype = dtype,
      group = 2 }
    dims[#dims + 1] = { lens = { 140, 90 }, count = 70, head_dim = dim, dtype = dtype,
      q = "f32" }
  end
end
for _, group in ipairs { 1, 3, 4, 8, 9, 16, 17, 40, 72 } do
  groups[#groups + 1] = { lens = { 140, 90 }, count = 100, group = group, head_dim = 32 }
  groups[#groups + 1] = { lens = { 140, 90 }, count = 100, group = group, head_dim = 32,
    dtype = "bf16", listed = "heads", kv_heads = 3 }
end
for _, count in ipairs { 0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300 } do
  for _, lens in ipairs { {}, { 140 }, { 140, 3, 0, 17, 90 } } do
    lengths[#lengths + 1] = { lens = lens, count = count, group = 2, head_dim = 16,
      seed = count }
    lengths[#lengths + 1] = { lens = lens, count = count, group = 4, head_dim = 16,
      dtype = "f16", listed = "heads", fill = 0.3, kv_heads = 2 }
  end
end
for _, dim in ipairs { 16, 48, 64, 80, 128, 144, 256 } do
  for _, q in ipairs { "f16", "bf16" } do
    bytes[#bytes + 1] = { lens = { 140, 90 }, count = 70, head_dim = dim,
      dtype = "f8e4m3", q = q, group = 2, scales = "both" }
  end
end
for _, group in ipairs { 1, 16, 17, 33, 72 } do
  bytes[#bytes + 1] = { lens = { 140, 90 }, count = 140, group = group, head_dim = 32,
    listed = "heads", dtype = "f8e4m3", kv_heads = 3, fill = 0.5 }
end
for _, count in ipairs { 0, 1, 31, 33, 127, 128, 129, 257, 520 } do
  bytes[#bytes + 1] = { lens = { 140, 3, 90 }, count = count, group = 4, head_dim = 16,
    dtype = "f8e4m3", seed = count, fill = 0.3, out = "f32" }
end
local packed = {}
for _, dim in ipairs { 16, 48, 64, 80, 128, 144, 192, 256 } do
  for _, q in ipairs { "f16", "bf16" } do
    packed[#packed + 1] = { lens = { 140, 90 }, count = 130, head_dim = dim,
      dtype = "int8", q = q, group = 2, kv_heads = 2, seed = dim,
      listed = q == "f16" and "heads" or "shared", out = "f32" }
  end
end
for _, group in ipairs { 1, 8, 16, 17, 33, 40, 72 } do
  for i, dim in ipairs { 32, 128, 160 } do
    packed[#packed + 1] = { lens = { 140, 90 }, count = 140, group = group,
      head_dim = dim, dtype = "int8", seed = group, fill = 0.5,
      listed = i == 2 and "heads" or "shared", alibi = i == 3 or nil,
      soft_cap = i == 2 and 3 or nil, window = i == 1 and 60 or nil }
  end
end
for _, count in ipairs { 0, 1, 31, 33, 127, 128, 129, 257, 1300 } do
  packed[#packed + 1] = { lens = { 140, 3, 90 }, count = count, group = 4, head_dim = 48,
    dtype = "int8", seed = count, fill = 0.3, out = "f32", block_size = 8 }
  packed[#packed + 1] = { lens = { 140, 3, 0 }, count = count, group = 20,
    head_dim = 144, dtype = "int8", q = "f16", seed = count, fill = 0.7,
    slots = "gaps" }
end
-- Of both signs and far from 1; K is not.
for _, unit in ipairs { 2 ^ -60, 2 ^ 100 } do
  for _, dim in ipairs { 64, 128, 256 } do
    packed[#packed + 1] = { lens = { 90, 17 }, count = 60, group = 4, head_dim = dim,
      dtype = "int8", unit = unit }
  end
end
topic("reads listed tokens of every dtype and head_dim", dims)
topic("reads a listed token once for a group of any size", groups)
topic("takes lists of any length", lengths)
topic("takes lists over blocks of any size", {
  { lens = { 50, 7, 31 }, count = 90, block_size = 1 },
  { lens = { 350, 7, 31 }, count = 90, block_size = 7, dtype = "bf16" },
  { lens = { 500, 7, 31 }, count = 90, block_size = 300, dtype = "bf16",
    listed = "heads", kv_heads = 2 },
})
topic("writes attention over lists in other dtypes, with and without lse", {
  { lens = { 140, 3, 90 }, count = 40, dtype = "bf16", out = "f32" },
  { lens = { 140, 3, 90 }, count = 40, dtype = "f16", no_lse = true, group = 4 },
  { lens = { 140, 3, 90 }, count = 40, q = "f32", dtype = "bf16", no_lse = true },
})
topic("reads listed tokens of f8e4m3 of every head_dim, group and length", bytes)
topic("reads listed tokens of int8 of every head_dim, group and length", packed)
topic("gives 0 and -inf to a row that lists nothing", {
  { lens = { 20, 0, 3, 7 }, count = 5, fill = 0 },
  { lens = { 20, 0, 3, 7 }, count = 300, fill = 0, dtype = "int8", group = 4 },
  { lens = { 200, 0, 30, 700 }, count = 200, fill = 0.004, dtype = "int8" },
  { lens = { 200, 0, 30, 700 }, count = 200, fill = 0.004, dtype = "bf16" },
})

-- A list leaves out what a row may not see, so it needs no care of its maker.
local seen = {}
for i, rows in ipairs { false, { 40, 1, 25 }, { 3, 2, 0 } } do
  for _, dtype in ipairs { "f32", "bf16", "f8e4m3" } do
    for j, fields in ipairs { {}, { window = 9 }, { alibi = true, window = 60 },
                              { soft_cap = 2 }, { prev = true, alibi = true },
                              { causal = false }, { slots = "all" },
                              { slots = "gaps", prev = true, window = 40 } } do
      local c = { lens = { 90, 33, 190 }, rows = rows or nil, kv_heads = 2,
        group = j % 2 == 0 and 4 or 2, head_dim = 32, dtype = dtype, count = 50 + 30 * i,
        seed = i + j,
        scales = dtype == "f8e4m3" and "both" or nil,
        listed = j % 3 == 0 and "heads" or "shared" }
      for name, value in pairs(fields) do c[name] = value end
      seen[#seen + 1] = c
    end
  end
end
topic("lists tokens in decode and in prompts, with all that other keys have", seen)
local trees = {}
for i, rows in ipairs { { 5, 1, 2 }, { 1, 64, 17 } } do
  for _, dtype in ipairs { "f32", "bf16", "int8" } do
    trees[#trees + 1] = { lens = { 90, 64, 17 }, rows = rows, kv_heads = 2, group = 4,
      head_dim = 64, dtype = dtype, tree = true, seed = i, tree_words = i % 2 + 1,
      count = 120 }
  end
end
topic("shows a row of a draft tree those of its list that the tree shows", trees)
local poisoned = {}
for i, dtype in ipairs { "f32", "bf16", "f16", "f8e4m3", "int8", "int8" } do
  poisoned[i] = { lens = { 300, 33, 9 }, rows = { 40, 3, 2 }, group = 4, kv_heads = 2,
    head_dim = 64, dtype = dtype, poison = { 1, 2, 7 }, count = 100,
    window = i % 2 == 0 and 30 or nil }
end
topic("keeps NaN and inf in V of listed tokens from a row that may not see them",
  poisoned)

return topics
