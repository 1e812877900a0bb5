--- The cases that the three block scores share, and how they are checked.
local busted = require "busted"
local kv = require "kvlab"
local support = require "spec.support"

-- list: for every score; summaries: longer than keys of caches with values of their own;
-- many_heads: too slow for the reference, for GPUs.
local M = { list = {}, summaries = {}, many_heads = {} }

local function add(c) M.list[#M.list + 1] = c end

add { lens = {}, block_size = 16 }
add { lens = { 0, 1 }, block_size = 1 }
for _, group in ipairs { 1, 2, 3, 4, 8, 9, 33 } do
  for _, join in ipairs { "max", "mean" } do
    add { lens = { 45, 0, 100 }, block_size = 16, kv_heads = 2, group = group,
      join = join, head_dim = 32 }
  end
end
for _, dim in ipairs { 8, 24, 64, 80, 96, 128, 256 } do
  add { lens = { 70, 3 }, block_size = 8, group = 4, head_dim = dim }
end
for _, size in ipairs { 1, 8, 16, 17, 256, 4096 } do
  add { lens = { 600, 17, 1 }, block_size = size, group = 4, head_dim = 16 }
end
for len = 1, 17 do add { lens = { len }, block_size = 16, head_dim = 8, seed = len } end
for _, dtype in ipairs { "f16", "bf16" } do
  add { lens = { 70, 3 }, block_size = 16, group = 4, kv_heads = 2, dtype = dtype }
  add { lens = { 70, 3 }, block_size = 16, group = 1, q = dtype }
  add { lens = { 70, 3 }, block_size = 16, group = 2, dtype = dtype, q = dtype }
end
for _, q in ipairs { "f32", "f16", "bf16" } do
  for _, dim in ipairs { 16, 64, 80, 128, 256 } do
    add { lens = { 70, 3 }, block_size = 16, group = 4, kv_heads = 2, head_dim = dim,
      dtype = "f8e4m3", q = q }
  end
end
add { lens = { 70, 3 }, block_size = 5, group = 9, dtype = "f8e4m3", join = "mean" }
add { lens = { 300, 2000 }, block_size = 4, head_dim = 16, kv_heads = 2, group = 2,
  extra = 150 }                -- several runs of blocks, and some with none

add { lens = { 37, 0, 5 }, block_size = 16, group = 130, head_dim = 24, dtype = "bf16",
  join = "mean" }

-- Passes of 32 to 128 heads, parts of 64 dims, terms of q, tiles of 64 blocks or tokens.
for i, group in ipairs { 11, 33, 48, 64, 96, 128, 130, 19, 16, 27, 32, 90, 75 } do
  for j, types in ipairs { { "bf16", "bf16" }, { "f16", "f16" }, { "f32", "bf16" },
                           { "f32", "f16" }, { "bf16", "f16" }, { "f16", "bf16" } } do
    M.many_heads[#M.many_heads + 1] = { lens = { 45, 0, i % 3 == 0 and 2100 or 700 },
      block_size = j % 3 == 0 and 5 or 16, group = group, kv_heads = j == 1 and 2 or 1,
      head_dim = ({ 64, 72, 128, 192, 256 })[(i + j) % 5 + 1], q = types[1],
      dtype = types[2], join = (i + j) % 2 == 0 and "mean" or "max", holes = j > 3 }
  end
end

for _, s in ipairs { { 576, 128, 1 }, { 576, 16, 1 }, { 320, 5, 2 }, { 264, 70, 1 },
                     { 576, 1, 1 }, { 256, 250, 1 } } do
  for i, dtype in ipairs { "bf16", "f16", "f32" } do
    M.summaries[#M.summaries + 1] = { lens = { 45, 0, 300 }, block_size = 16,
      head_dim = s[1], group = s[2], kv_heads = s[3], dtype = dtype, q = dtype,
      join = (i + s[2]) % 2 == 0 and "mean" or "max" }
  end
end

function M.group_number(c)
  return c.join == "mean" and kv.C.KVL_GROUP_MEAN or kv.C.KVL_GROUP_MAX
end

--- With `holes`, every fifth entry of the table is no block.
local paged_of = support.latest(function(c)
  local paged = support.paged(c)
  for i = 2, c.holes and #paged.tables or 0, 5 do paged.tables[i] = -1 end
  return paged
end)

--- The memory, the number of query heads and the queries of a case.
function M.prepare(c)
  local paged = paged_of(c)
  local heads = paged.layout.kv_heads * (c.group or 1)
  return paged, heads, support.randn(kv.device "cpu", c.q or "f32",
    { #c.lens, heads, paged.layout.head_dim }, 42)
end

--- `run(dev, case)` returns the scores and a function that gives the reference's.
---@param of_summaries? boolean  which may be longer
function M.describe(name, run, tolerance, of_summaries)
  local list = { unpack(M.list) }
  for _, c in ipairs(of_summaries and M.summaries or {}) do list[#list + 1] = c end
  busted.describe(name, function()
    support.it_on_cpu("matches the reference", function(dev)
      for i, c in ipairs(list) do
        local scores, want = run(dev, c)
        support.close(scores, want(), tolerance, 1e-6, ("scores of case %d"):format(i))
      end
    end)
  end)

  busted.describe(name .. " on CUDA #gpu", function()
    support.it_on_gpu("agrees with the CPU", function(cuda, cpu)
      for _, cases in ipairs { list, M.many_heads } do
        for i, c in ipairs(cases) do
          support.close((run(cuda, c)), (run(cpu, c)), 2 * tolerance, 1e-6,
            ("scores of case %d, %d heads"):format(i, c.group or 1))
        end
      end
    end)
  end)
end

return M
