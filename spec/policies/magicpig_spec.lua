--- Draws: means over seeds within 4 standard errors. Attention: f32 against double, 1e-5.
local ffi = require "ffi"
local kv = require "kvlab"
local small = require "spec.policies.small"
local support = require "spec.support"

local cpu = kv.device "cpu"

describe("sampling", function()
  local HEADS, BLOCKS = 2, 40
  local budget = ffi.new("kvl_budget", -1, 9, 0, 1, 2)

  --- A context over one sequence of BLOCKS blocks, and chances of them.
  local function prepare()
    local cache = kv.cache { device = cpu, layers = 1, blocks = 64, block_size = 4,
                             kv_heads = HEADS, head_dim = 8, dtype = "f32" }
    local attention = kv.attention { cache = cache, heads = HEADS }
    local seq = cache:sequence()
    attention:begin(cache:batch():append({ seq }, { BLOCKS * 4 - 1 }), true)
    attention:begin(cache:batch():append({ seq }, { 1 }), false)
    local ctx = attention.context
    ctx.layer = 0
    local dims = { ctx.seqs, ctx.kv_heads, ctx.width }
    local chances, list = kv.rand(cpu, "f32", dims, { seed = 3 }), {}
    for head = 0, HEADS - 1 do
      local row = chances:index(0):index(head):list()
      for b = 1, ctx.width do
        list[head * ctx.width + b] = b <= BLOCKS and 0.1 + 0.9 * row[b] or 0
      end
    end
    return attention, ctx, kv.from(cpu, "f32", dims, list)
  end

  it("is right on average: what was drawn, weighted, stands for all", function()
    local attention, ctx, chances = prepare()
    local sampling = kv.sampling(attention.shape, 0)
    local RUNS, sum, squares = 3000, 0, 0
    for run = 1, RUNS do
      sampling.draws:rand_(run)
      ctx:begin_layer(ctx.layer, ctx.query, ctx.cache)
      local selection, counts, drawn = sampling:draw(ctx, chances:clone(), budget)
      assert.same({ 9, 9 }, counts:list())
      local weights, estimate = drawn:list(), 0
      for i, block in ipairs(selection:list()) do
        local head = math.floor((i - 1) / selection:size(2))
        estimate = estimate + math.exp(weights[head * ctx.width + block + 1])
          * (1 + block % 5) -- what is to be summed
      end
      sum, squares = sum + estimate, squares + estimate ^ 2
    end
    local want = 0
    for block = 0, BLOCKS - 1 do want = want + HEADS * (1 + block % 5) end
    local mean = sum / RUNS
    local error = math.sqrt((squares / RUNS - mean ^ 2) / RUNS)
    assert.is_true(math.abs(mean - want) < 4 * error,
      ("%g +- %g, expected %g"):format(mean, error, want))
    assert.is_true(error < 0.02 * want, ("error %g of %g"):format(error, want))
  end)

  it("counts sink, recent and, with room for all, every block once", function()
    local attention, ctx, chances = prepare()
    local sampling = kv.sampling(attention.shape, 5)
    local _, _, drawn = sampling:draw(ctx, chances:clone(), budget)
    local weights = drawn:list()
    for head = 0, HEADS - 1 do
      for _, block in ipairs { 0, BLOCKS - 2, BLOCKS - 1 } do
        assert.equal(0, weights[head * ctx.width + block + 1])
      end
    end
    _, _, drawn = sampling:draw(ctx, chances:clone(), kv.policy.everything)
    for _, weight in ipairs(drawn:list()) do assert.equal(0, weight) end
  end)
end)

describe("attention with weights", function()
  it("counts the keys of each block so many times", function()
    local run = small.play(kv.policy "full", { 30 }, 1)
    local ctx, n = run.attention.context, 5
    ctx.layer = 0
    local q, blocks, logs = {}, { 0, 2, 3, 7, -1, 1, 2, 4, 5, 6 }, {}
    for head = 1, 4 do q[head] = run.q[31][head] end
    ctx.query = kv.from(cpu, "f32", { q })
    for i = 1, 2 * ctx.width do logs[i] = (i * 7 % 11) / 3 - 1 end
    local out = run.attention:over_weighted(kv.from(cpu, "i32", { 1, 2, n }, blocks),
      kv.from(cpu, "f32", { 1, 2, ctx.width }, logs), ctx)
    local want = {}
    for head = 1, 4 do
      local kv_head = math.ceil(head / 2)
      local scores, values = {}, {}
      for i = 1, n do
        local block = blocks[(kv_head - 1) * n + i]
        for t = block * 4 + 1, block >= 0 and math.min(block * 4 + 4, 31) or -9 do
          scores[#scores + 1] = small.dot(q[head], run.k[t][kv_head]) / math.sqrt(8)
            + logs[(kv_head - 1) * ctx.width + block + 1]
          values[#values + 1] = run.v[t][kv_head]
        end
      end
      local weights = small.softmax(scores)
      for d = 1, 8 do
        local sum = 0
        for i, weight in ipairs(weights) do sum = sum + weight * values[i][d] end
        want[#want + 1] = sum
      end
    end
    support.close(out, want, 1e-5)
  end)
end)
