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
                             kv_heads = HEADS, head_dim = 8, format = "f32" }
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
    -- the newest block may be open, and counts as recent whatever its chance
    local open = ffi.new("kvl_budget", -1, 2, 0, 0, 0)
    local selection
    selection, _, drawn = sampling:draw(ctx, chances:clone():mul(1e-6), open)
    assert.equal(BLOCKS - 1, selection:list()[2])
    assert.equal(0, drawn:list()[BLOCKS])
    _, _, drawn = sampling:draw(ctx, chances:clone(), kv.policy.everything)
    for _, weight in ipairs(drawn:list()) do assert.equal(0, weight) end
  end)
end)

describe("centred hashes", function()
  local TOKENS, HEADS, DIM, SIZE, BITS = 41, 2, 16, 4, 128
  local FULL = math.floor((TOKENS - 1) / SIZE) -- blocks before the last token

  --- Keys of TOKENS tokens, each with `shift` added: f32 [TOKENS, HEADS, DIM].
  local function keys(shift)
    return kv.randn(cpu, "f32", { TOKENS, HEADS, DIM }, { seed = 8 }):add(shift)
  end

  --- A sequence that gets the tokens in chunks and then one by one. Truncates it after
  -- `cut` chunks to `length` tokens, and goes on with other tokens, if asked.
  local function feed(k, chunks, cut, length)
    local cache = kv.cache { device = cpu, layers = 1, blocks = 32, block_size = SIZE,
                             kv_heads = HEADS, head_dim = DIM, format = "f32" }
    local policy = kv.policy("magicpig", { code = BITS })
    local attention = kv.attention { cache = cache, heads = HEADS,
                                     decode_policy = policy }
    local batch, seq = cache:batch(), cache:sequence()
    local function step(source, at, n, is_prefill)
      attention:begin(batch:append({ seq }, { n }), is_prefill)
      local part = source:narrow(at, n)
      attention:forward(0, part:clone(), part, part)
    end
    if cut then
      step(keys(3), 0, cut, true)
      for at = cut, cut + 2 do step(keys(3), at, 1, false) end
      seq:truncate(length)
    end
    for _, n in ipairs(chunks) do step(k, seq:length(), n, true) end
    for at = seq:length(), TOKENS - 1 do step(k, at, 1, false) end
    return { cache = cache, seq = seq, policy = policy, attention = attention }
  end

  --- The hashes of the full blocks by their logical order: a list for each.
  local function hashes_of(run, seq)
    local layer, rows = run.policy.hashes:layer(0), {}
    for b, block in ipairs((seq or run.seq):table()) do
      if b <= FULL then rows[b] = layer:index(block):list() end
    end
    return rows
  end

  it("are those of the mean keys, less the mean of the first 2^k blocks", function()
    local k = keys(5)
    local run = feed(k, { TOKENS - 1 })
    local got = hashes_of(run)
    local flat, planes = k:list(), run.policy.hashes.planes
    local function mean_of(first, count, head)
      local mean = {}
      for d = 1, DIM do
        mean[d] = 0
        for t = first * SIZE, (first + count) * SIZE - 1 do
          mean[d] = mean[d] + flat[(t * HEADS + head) * DIM + d] / (count * SIZE)
        end
      end
      return mean
    end
    for b = 0, FULL - 1 do
      for head = 0, HEADS - 1 do
        local power = 1
        while 2 * power <= b do power = 2 * power end
        local mean = mean_of(b, 1, head)
        if b > 0 then
          for d, x in ipairs(mean_of(0, power, head)) do mean[d] = mean[d] - x end
        end
        local want = kv.hash.rows(kv.from(cpu, "f32", { 1, DIM }, mean), planes):list()
        local words = BITS / 64
        for w = 1, words do
          assert.equal(want[w], got[b + 1][head * words + w], "block " .. b)
        end
      end
    end
  end)

  it("do not see a mean that all keys share", function()
    local plain = hashes_of(feed(keys(0), { 40 }))
    local shifted = hashes_of(feed(keys(8), { 40 }))
    for b = 2, FULL do assert.same(plain[b], shifted[b], "block " .. b - 1) end
  end)

  it("are the same in any chunks, prefilled or decoded", function()
    local whole = hashes_of(feed(keys(5), { 40 }))
    for _, chunks in ipairs { { 1 }, { 3, 7, 30 }, { 16, 8 }, { 13 } } do
      assert.same(whole, hashes_of(feed(keys(5), chunks)))
    end
  end)

  it("forget blocks that a truncated sequence writes again", function()
    local whole = hashes_of(feed(keys(5), { 40 }))
    assert.same(whole, hashes_of(feed(keys(5), { 40 }, 29, 0)))
    assert.same(whole, hashes_of(feed(keys(5), { 2 }, 29, 0)))
    assert.same(whole, hashes_of(feed(keys(5), {}, 29, 0)))
  end)

  it("are those of the parent in a fork", function()
    local run = feed(keys(5), { 20 })
    local fork = run.seq:fork()
    assert.equal(run.seq.state[run.policy.hashes], fork.state[run.policy.hashes])
    assert.same(hashes_of(run), hashes_of(run, fork))
  end)
end)

describe("attention with weights", function()
  it("counts the keys of each block so many times", function()
    local policy = kv.policy.define {
      name = "weighted", decode = true, complete = false, select_blocks = function() end,
      log_weight = kv.expr.input "log_weights",
      step_begin = function(self, ctx)
        self.log_weights = kv.zeros(cpu, "f32", { ctx.seqs, 1, ctx.width })
      end,
    } {}
    local run = small.play(policy, { 30 }, 1)
    local ctx, n = run.attention.context, 5
    ctx.layer = 0
    local q, blocks, logs = {}, { 0, 2, 3, 7, -1, 1, 2, 4, 5, 6 }, {}
    for head = 1, 4 do q[head] = run.q[31][head] end
    ctx.query = kv.from(cpu, "f32", { q })
    for i = 1, 2 * ctx.width do logs[i] = (i * 7 % 11) / 3 - 1 end
    policy.log_weights = kv.from(cpu, "f32", { 1, 2, ctx.width }, logs)
    local out = run.attention:over(kv.from(cpu, "i32", { 1, 2, n }, blocks), ctx)
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
