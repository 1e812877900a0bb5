--- Tolerance: up to 4096 values near 1 summed in fp32 and divided: 2e-6; a 16-bit summary
-- adds half a unit in the last place, twice that between devices, which round apart.
local kv = require "kvlab"
local support = require "spec.support"
local reference = require "spec.reference.attention"

local POISON = -3   -- summaries of blocks that are not named must keep it
local ulp = { f32 = 0, f16 = 2 ^ -11, bf16 = 2 ^ -8 }

local function summary_of(dev, c)
  local paged = support.paged(c)
  local blocks, tokens = support.named_blocks(paged)
  local l = paged.layout
  local summary = kv.full(dev, c.out, { l.blocks, l.kv_heads, l.head_dim }, POISON)
  kv.check(kv.C.kvl_block_mean((paged.on(dev)), nil,
    kv.from(dev, "i32", { #blocks }, blocks),
    kv.from(dev, "i32", { #tokens }, tokens), nil, summary))
  return summary, paged, blocks, tokens
end

local HEADS = support.is_full and 2 or 1 -- of the largest blocks
local cases = {}
for _, dtype in ipairs { "f32", "f16", "bf16" } do
  for _, out in ipairs(dtype == "f32" and { "f32" } or { "f32", dtype }) do
    for _, s in ipairs { { {}, 16, 1, 64 }, { { 1 }, 1, 1, 8 }, { { 50, 7 }, 16, 2, 80 },
                         { { 40 }, 17, 3, 24 }, { { 300 }, 256, 8, 128 },
                         { { 33 }, 8, 1, 256 }, { { 5000 }, 4096, HEADS, 96 } } do
      cases[#cases + 1] = { dtype = dtype, out = out, lens = s[1], block_size = s[2],
        kv_heads = s[3], head_dim = s[4] }
    end
    for len = 1, 16 do
      cases[#cases + 1] = { dtype = dtype, out = out, lens = { len }, block_size = 16,
        head_dim = 16 }
    end
  end
end

for _, out in ipairs { "f32", "f16", "bf16" } do
  for _, s in ipairs { { {}, 16, 1, 64 }, { { 1 }, 1, 1, 16 }, { { 50, 7 }, 16, 2, 80 },
                       { { 40 }, 17, 3, 48 }, { { 300 }, 256, 8, 128 },
                       { { 33 }, 8, 1, 256 }, { { 5000 }, 4096, HEADS, 96 } } do
    cases[#cases + 1] = { dtype = "f8e4m3", out = out, lens = s[1], block_size = s[2],
      kv_heads = s[3], head_dim = s[4] }
  end
end

describe("block mean", function()
  support.it_on_cpu("averages the valid tokens of the named blocks", function(dev)
    for i, c in ipairs(support.sample_for_isa(cases)) do
      local summary, paged, blocks, tokens = summary_of(dev, c)
      local want = support.filled(tonumber(summary.count), POISON)
      reference.block_mean(paged.cache, paged.layout, blocks, tokens, want)
      support.close(summary, want, 2e-6, 2e-6 + ulp[c.out],
        ("summary of case %d"):format(i))
    end
  end)
end)

describe("block mean on CUDA #gpu", function()
  support.it_on_gpu("agrees with the CPU", function(cuda, cpu)
    for i, c in ipairs(cases) do
      support.close((summary_of(cuda, c)), (summary_of(cpu, c)), 4e-6,
        4e-6 + 2 * ulp[c.out], ("summary of case %d"):format(i))
    end
  end)
end)
