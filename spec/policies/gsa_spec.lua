--- Selections: only comparisons, of scores whose differences are far above rounding.
local kv = require "kvlab"
local reference = require "spec.reference.attention"
local rig = require "spec.rig"
local small = require "spec.policies.small"
local support = require "spec.support"

local cpu = kv.device "cpu"

local function equal_selections(a, b)
  for i, step in ipairs(a.steps) do
    support.equal(step.selection, b.steps[i].selection, "step " .. i)
  end
end

describe("gsa by history", function()
  --- The selections of a sequence of `length` tokens, step by step.
  local function simulate(length, steps, budget)
    local times, lists = {}, {}
    for step = 1, steps do
      local n, scores = math.ceil((length + step) / 16), {}
      for b = 0, n - 1 do
        scores[b + 1] = 0.5 * (times[b] or 0) + 0.1 + 0.9 * b / math.max(1, n - 1)
      end
      lists[step] = reference.select(scores, n, budget, n)
      for _, b in ipairs(lists[step]) do times[b] = (times[b] or 0) + 1 end
    end
    return lists
  end

  it("adds half for every time, and a ramp over positions", function()
    local lengths = { 250, 40, 1 }
    local budget = { ratio = 0.4, min_blocks = 2, sink = 1, recent = 0 }
    local run = rig.decode(cpu, { policy = "gsa", options = budget, lengths = lengths,
                                  steps = 30 })
    for s, length in ipairs(lengths) do
      for step, want in ipairs(simulate(length, 30, budget)) do
        local row = run.steps[step].selection:index(s - 1):list()
        for i, block in ipairs(row) do
          assert.equal(want[i] or -1, block, ("sequence %d step %d"):format(s, step))
        end
      end
    end
  end)

  it("has a ramp from the first block of each sequence to its last", function()
    local its_rig = rig.new(cpu, { policy = "gsa" })
    local batch, seqs, lengths = its_rig.cache:batch(), {}, { 250, 32, 17, 1 }
    for i = 1, #lengths do seqs[i] = its_rig.cache:sequence() end
    batch:append(seqs, { 249, 31, 16, 0 })
    its_rig.attention:begin(batch, true)
    batch:append(seqs, { 1, 1, 1, 1 })
    its_rig.attention:begin(batch, false)
    local ctx = its_rig.attention.context
    local ramp = ctx:ramp(0.1, 1):list()
    for s, length in ipairs(lengths) do
      local n = math.ceil(length / 16)
      for b = 0, n - 1 do
        support.close({ ramp[(s - 1) * ctx.width + b + 1] },
          { 0.1 + 0.9 * b / math.max(1, n - 1) }, 1e-6)
      end
    end
  end)

  it("starts anew with every request, and a fork goes on", function()
    local o = { ratio = 0.3, min_blocks = 0, sink = 0, recent = 1 }
    local policy = kv.policy("gsa", o)
    local run, selected = small.play(policy, { 60 }, 20), 0
    for length = 61, 80 do
      selected = selected
        + kv.policy.budget_blocks(policy.budget, math.ceil(length / 4))
    end
    local counts, sum = small.tallied(run, policy.tally, 20), 0
    for _, count in ipairs(counts) do sum = sum + count end
    assert.equal(selected, sum)
    run.seq = run.seq:fork()
    assert.same(counts, small.tallied(run, policy.tally, 20))
    run.seq = run.cache:sequence()
    for _, count in ipairs(small.tallied(run, policy.tally, 20)) do
      assert.equal(0, count)
    end
  end)
end)

describe("gsa by means", function()
  local BUDGET = { ratio = 0.3, min_blocks = 0, sink = 1, recent = 2 }
  local function decode(policy, refresh, lengths, steps)
    local options = { scores = policy == "gsa" and "mean" or nil, refresh = refresh }
    for key, value in pairs(BUDGET) do options[key] = value end
    return rig.decode(cpu, { policy = policy, options = options, steps = steps,
                             lengths = lengths })
  end

  it("selects as topk does when it looks at every step", function()
    local lengths = { 250, 90 }
    equal_selections(decode("gsa", 1, lengths, 20), decode("topk", nil, lengths, 20))
  end)

  it("looks at every third step, and keeps that selection until the next", function()
    local fresh = decode("topk", nil, { 241, 83 }, 9)
    local run = decode("gsa", 3, { 241, 83 }, 9)
    local differ = false
    for i, step in ipairs(run.steps) do
      local looked = i - (i - 1) % 3
      support.equal(step.selection, run.steps[looked].selection, "step " .. i)
      support.equal(run.steps[looked].selection, fresh.steps[looked].selection)
      local a, b = step.selection:list(), fresh.steps[i].selection:list()
      for j in ipairs(a) do differ = differ or a[j] ~= b[j] end
    end
    assert.is_true(differ, "a selection of before is another one")
  end)

  it("counts the steps of each sequence by itself", function()
    local function outs(script)
      local o = { scores = "mean", ratio = 0.5, min_blocks = 0, recent = 1 }
      local all, its_rig = rig.play(cpu, { policy = "gsa", options = o }, script)
      its_rig.cache:close()
      return all
    end
    local alone = outs { { "prefill", 1, 200 }, { "decode", 1 }, { "decode", 1 },
                         { "decode", 1 }, { "decode", 1 } }
    local joined = outs { { "prefill", 2, 250 }, { "decode", 2 }, { "decode", 2 },
      { "prefill", 1, 200 }, { "decode", 2, 1 }, { "decode", 1, 2 }, { "decode", 1 },
      { "decode", 2, 1 } }
    for i, out in ipairs(alone[1]) do support.close(joined[1][i], out, 2e-6, 2e-6) end
  end)

  it("refuses to be recorded where its steps differ", function()
    local function record(o)
      local run = small.play(kv.policy("gsa", o), { 60 }, 3)
      local q = kv.zeros(cpu, "f32", { 1, 4, 8 })
      local k = kv.zeros(cpu, "f32", { 1, 2, 8 })
      run.attention.probe = nil
      kv.graph(function() run.attention:forward(0, q, k, k, q) end, cpu):close()
    end
    record { scores = "mean", refresh = 1 }
    record { scores = "history" }
    support.raises("policy gsa decides at each step what to launch", record,
      { scores = "mean" })
  end)
end)

describe("attention over gsa's selection", function()
  support.each_device(function(dev)
    it("is gather, compute and scatter back to full positions", function()
      local HEADS, KV_HEADS, DIM, SIZE, BLOCKS = 4, 2, 64, 16, 40
      local memory = kv.randn(dev, "f32", { BLOCKS, 2, KV_HEADS, SIZE, DIM },
        { seed = 1 })
      local q = kv.randn(dev, "f32", { 3, HEADS, DIM }, { seed = 2 })
      local order, lens = support.distinct(support.rng(3), BLOCKS, BLOCKS), { 160, 87, 3 }
      local selections = { { 0, 3, 8, 9 }, { 0, 4, 5, -1 }, { 0, -1, -1, -1 } }
      local function attend(given)
        given.scale, given.causal = DIM ^ -0.5, true
        return kv.ops.paged_attention(given)
      end
      local function ints(dims, list) return kv.from(dev, "i32", dims, list) end
      local tables, flat, full = {}, {}, kv.full(dev, "f32", { 3, HEADS * DIM }, 0 / 0)
      for s, selection in ipairs(selections) do
        local row, blocks = { unpack(order, 12 * s - 11, 12 * s) }, {}
        for _, block in ipairs(row) do tables[#tables + 1] = block end
        for _, logical in ipairs(selection) do
          flat[#flat + 1] = logical
          if logical >= 0 then blocks[#blocks + 1] = row[logical + 1] end
        end
        local compact = memory:reshape { BLOCKS, 2 * KV_HEADS * SIZE * DIM }
          :gather_rows(ints({ #blocks }, blocks))
          :reshape { #blocks, 2, KV_HEADS, SIZE, DIM }
        local left, places = math.ceil(lens[s] / SIZE) - #blocks, {}
        for i = 1, #blocks do places[i] = i - 1 end
        local out = attend { q = q:narrow(s - 1, 1), cache = compact,
          tables = ints({ 1, #blocks }, places), lens = ints({ 1 },
          { lens[s] - left * SIZE }), out = kv.tensor(dev, "f32", { 1, HEADS, DIM }) }
        full:scatter_rows_(ints({ 1 }, { s - 1 }), out:reshape { 1, HEADS * DIM })
      end
      local out = attend { q = q, cache = memory, tables = ints({ 3, 12 }, tables),
        lens = ints({ 3 }, lens), selection = ints({ 3, 1, 4 }, flat),
        out = kv.full(dev, "f32", { 3, HEADS, DIM }, 0 / 0) }
      support.close(out:reshape { 3, HEADS * DIM }, full, 2e-6, 2e-6)
    end)
  end)
end)

describe("gsa options", function()
  it("have the names of the system they come from", function()
    local gsa = kv.policy("gsa", { sparse_ratio = 0.2, local_window_sz = 3,
                                        init_window_sz = 0, prefetch_workers = 2 })
    assert.same({ 0.2, 3, 0, 4, 2, 64, 2, 1000 }, { gsa.ratio, gsa.recent, gsa.sink,
      gsa.min_blocks, gsa.prefetch_workers, gsa.max_pending_prefetch, gsa.prefetch_ahead,
      gsa.prefetch_cache_size })
    support.raises('scores is "newest", expected one of history, mean', kv.policy, "gsa",
      { scores = "newest" })
  end)
end)
