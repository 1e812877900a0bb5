--- Exact: whole numbers.
local kv = require "kvlab"
local cases = require "spec.kernels.hamming_cases"
local support = require "spec.support"

local function lists(c) return c.is_shared and 1 or c.kv_heads end

local function run(dev, c)
  local p = cases.prepare(c)
  local hashes, tables, lens = p.on(dev)
  local scores = support.poisoned(dev, "f32", { #c.lens, lists(c), c.max_blocks })
  kv.check(kv.C.kvl_score_hamming(p.q_hashes:to(dev), hashes, tables, lens, c.block_size,
    scores))
  return scores
end

local function expected(c)
  local flat = {}
  for s = 0, #c.lens - 1 do
    for head = 0, lists(c) - 1 do
      local scores = cases.scores(c, s, head)
      for b = 1, c.max_blocks do flat[#flat + 1] = scores[b] or -math.huge end
    end
  end
  return flat
end

describe("scoring blocks by their hashes", function()
  support.it_on_cpu("counts the bits that differ, of the nearest token and head",
    function(dev)
      for i, c in ipairs(cases.list) do
        support.equal(run(dev, c), expected(c), ("scores of case %d"):format(i))
      end
    end)
end)

describe("scoring blocks by their hashes on CUDA #gpu", function()
  support.it_on_gpu("agrees with the CPU", function(cuda, cpu)
    for i, c in ipairs(cases.list) do
      support.equal(run(cuda, c), run(cpu, c), ("scores of case %d"):format(i))
    end
  end)
end)
