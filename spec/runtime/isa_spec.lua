--- Instruction sets of the CPU backend: how far apart their results are. Bounds: ops to
-- 4e-6 of the largest number, since sums have another order; metrics of a row to 3e-5.
local exam = require "models.recall.exam"
local kv = require "kvlab"
local support = require "spec.support"

local cpu = kv.device "cpu"

--- fn() with each instruction set that there is: name -> result.
local function with_each(fn)
  local before, results = support.isa(), {}
  for _, isa in ipairs(support.isas()) do
    kv.check(kv.C.kvl_cpu_use_isa(isa))
    local ok, result = pcall(fn)
    kv.check(kv.C.kvl_cpu_use_isa(before))
    if not ok then error(result, 0) end
    results[isa] = result
  end
  return results
end

local function random(dims, seed) return kv.randn(cpu, "f32", dims, { seed = seed }) end

--- Ops that add up many numbers or compute functions, over inputs of a model's size.
local OPS = {
  matmul = function() return random({ 33, 500 }, 1):matmul(random({ 500, 70 }, 2)) end,
  softmax = function() return random({ 9, 3000 }, 3):softmax(2) end,
  exp = function() return random({ 5000 }, 4):exp() end,
  silu_mul = function()
    return kv.ops.silu_mul(random({ 20, 704 }, 5), random({ 20, 704 }, 15))
  end,
  rmsnorm = function() return kv.ops.rmsnorm(random({ 9, 256 }, 6), random({ 256 }, 7),
                                             1e-5) end,
  sum = function() return random({ 9, 4000 }, 8):sum(1) end,
  paged_attention = function()
    return kv.ops.paged_attention { q = random({ 2, 8, 64 }, 9),
      cache = random({ 80, 2, 2, 16, 64 }, 10),
      tables = kv.arange(cpu, "i32", 80):reshape { 2, 40 },
      lens = kv.from(cpu, "i32", { 2 }, { 637, 333 }) }
  end,
}

describe("instruction sets", function()
  for _, name in ipairs(support.names(OPS)) do
    it("give nearly the same results of " .. name, function()
      local results = with_each(function() return kv.scope(OPS[name]):list() end)
      local want, most = results[support.isas()[1]], 0
      for _, x in ipairs(want) do most = math.max(most, math.abs(x)) end
      assert.is_true(most > 0)
      for isa, got in pairs(results) do
        assert.equal(#want, #got)
        for i, x in ipairs(want) do
          assert.is_true(math.abs(x - got[i]) <= 4e-6 * most,
            ("%s, number %d: %.9g and %.9g"):format(isa, i, x, got[i]))
        end
      end
    end)
  end

  -- In this exam no two blocks are so nearly equal that rounding decides between them,
  -- with any of OpenBLAS's kernels that were tried (docs/performance.md has more on it).
  it("give the same answers and nearly the same metrics of a row", function()
    local results = with_each(function()
      local rows = {}
      local sitting = exam.open { context = 512, prompts = 2, needles = 32,
                                  block_size = 16, seed = 4 }
      for i, name in ipairs { "full", "quest", "block_mean", "mass_oracle" } do
        local policy = kv.policy(name, name ~= "full" and { ratio = 0.3 } or nil)
        local accuracy, _, probe = sitting:ask(policy, kv.probe)
        rows[i] = probe:metrics()
        rows[i].accuracy, rows[i].policy = accuracy, name
      end
      sitting:close()
      return rows
    end)
    local want = results[support.isas()[1]]
    for isa, rows in pairs(results) do
      for i, row in ipairs(rows) do
        assert.equal(want[i].accuracy, row.accuracy)
        for _, metric in ipairs { "attention_mass", "output_error" } do
          local apart = math.abs(row[metric] - want[i][metric])
          assert.is_true(apart <= 3e-5, ("%s, %s of %s: %g apart"):format(isa, metric,
            row.policy, apart))
        end
      end
    end
  end)

  it("are chosen by name; an error names those that there are", function()
    local there = table.concat(support.isas(), ", ")
    support.fails(kv.C.kvl_cpu_use_isa "sse9",
      'isa is "sse9"; this build and this processor have ' .. there)
    support.fails(kv.C.kvl_cpu_use_isa "", 'isa is ""; ')
    assert.is_true(#support.isas() >= 1)
  end)
end)
