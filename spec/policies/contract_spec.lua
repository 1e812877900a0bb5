--- What every policy owes, whatever its idea: each policy that kv.policy.names() lists
-- runs through this, or the one whose file `kvlab test policy FILE` names.
local kv = require "kvlab"
local reference = require "spec.reference.attention"
local rig = require "spec.rig"
local support = require "spec.support"
local tried = require "spec.tried_policies"

-- Tokens before the decoded one; a block has 16. A hostile build, which is several times
-- slower, has one token, a partial block and full ones.
local LENGTHS = support.is_hostile and { 1, 17, 160 } or { 1, 3, 16, 17, 33, 160, 250 }
local STEPS = support.is_full and 18 or support.is_hostile and 3 or 6
local RATIOS = { 0, 0.02, 0.1, 0.37, 1 }

local of_full = {} -- what full attention gives

-- Options beside the budget that suit the rig.
local EXTRA = { layers = { dense = 1 } }

local function with(more, o)
  for key, value in pairs(more or {}) do o[key] = value end
  return o
end

local function third(name) return with(EXTRA[name], { ratio = 0.3 }) end

--- Options that let a policy have everything; nil if its output is never that of dense
-- attention.
local function everything(name, o)
  local complete = kv.policy(name).complete
  if complete == false then return nil end
  return with(EXTRA[name], with(complete, o))
end

-- Budgets of the last layer's KV heads, given in every way in which layers and heads may
-- differ: `of` makes the option on a device, heads are what the last layer has of it.
local RAGGED = {
  { "ratio", function() return { 0.4, 0.1 } end, { 0.1, 0.1 } },
  { "ratio", function(dev) return kv.from(dev, "f32", { 2, 2 }, { 1, 0, 0.07, 0.6 }) end,
    { 0.07, 0.6 } },
  { "ratio", function(dev) return kv.from(dev, "f32", { 2, 2 }, { 0, 0, 1, 0.1 }) end,
    { 1, 0.1 } },
  { "blocks", function() return { 3, 9 } end, { 9, 9 } },
  { "blocks", function(dev) return kv.from(dev, "i32", { 2, 2 }, { 3, 40, 12, 3 }) end,
    { 12, 3 } },
  { "tokens", function() return { 300, 49 } end, { 4, 4 } },
  { "tokens", function(dev) return kv.from(dev, "i32", { 2, 2 }, { 70, 80, 48, 81 }) end,
    { 3, 6 } },
}

--- Options that differ among layers and heads, and are divided among heads besides.
local function ragged(name, dev)
  local split = kv.split("adaptive", { floor = 0.4 })
  local ratio = kv.from(dev, "f32", { 2, 2 }, { 0.2, 0.5, 0.5, 0.2 })
  return with(EXTRA[name], { split = split, min_blocks = 0, ratio = ratio })
end

--- What full attention gives, once for all policies: o is of rig.decode.
local function dense_steps(dev, o)
  local key = table.concat({ dev:name(), o.steps, o.dtype or "", o.format or "",
                             unpack(o.lengths) }, " ")
  o.policy = "full"
  of_full[key] = of_full[key] or rig.decode(dev, o).steps
  return of_full[key]
end

local function rows_of(selection)
  local dims, flat, rows = selection:dims(), selection:list(), {}
  for r = 0, dims[1] * dims[2] - 1 do
    local row = {}
    for i = 1, dims[3] do row[i] = flat[r * dims[3] + i] end
    rows[r + 1] = row
  end
  return rows, dims[2]
end

--- A row of a selection over n blocks: ascending, in range, with sink and recent. Returns
-- how many were taken.
local function check_order(row, n, policy, count)
  local taken, before = 0, -1
  for i, block in ipairs(row) do
    if block == -1 then
      for j = i, #row do assert(row[j] == -1, "nothing after -1") end
      break
    end
    assert(block > before and block < n, "ascending and in range")
    taken, before = taken + 1, block
  end
  assert.equal(count, taken)
  local has = {}
  for i = 1, taken do has[row[i]] = true end
  for b = 0, math.min(policy.sink, n) - 1 do assert(has[b], "sink") end
  for b = math.max(0, n - policy.recent), n - 1 do assert(has[b], "recent") end
  return taken
end

--- The same, within a budget of so many blocks.
local function check_row(row, n, policy, count, budget)
  local taken = check_order(row, n, policy, count)
  budget = budget or kv.policy.budget_blocks(policy.budget, n)
  if policy.takes_less then
    assert.is_true(taken <= budget, "the budget is not exceeded")
  else
    assert.equal(budget, taken, "the budget is used and not exceeded; a block whose "
      .. "score is -inf or NaN is never selected")
  end
end

--- A policy that selects in prefill: a chunk attends to what it selects of the blocks
-- before it, and to itself.
local function prefill_contract(name, dev)
  local function run(o)
    local policy = kv.policy(name, { ratio = o.ratio, split = o.split, sink = 1,
                                     recent = 1, min_blocks = 0 })
    local rows = {}
    local select_blocks = policy.select_blocks
    policy.select_blocks = function(self, ctx)
      local selection, counts = select_blocks(self, ctx)
      if selection then
        rows[#rows + 1] = { selection = selection:clone(), counts = counts:list(),
                            length = ctx.lens:list()[1], open = ctx.batch.open_max }
      end
      return selection, counts
    end
    return rig.prefill(dev, { length = 200, chunk = o.chunk, prefill_policy = policy,
                              dtype = o.dtype, format = o.format }), rows, policy
  end

  --- Dense prefill; of a policy whose output never is that of dense attention, its own at
  -- once.
  local function whole(o)
    o.length = 200
    if kv.policy(name).complete ~= false then return rig.prefill(dev, o) end
    return (run { ratio = 1, chunk = 200, dtype = o.dtype, format = o.format })
  end

  it("selects in range, ascending, within the budget, with the chunk's own blocks",
    function()
      for _, ratio in ipairs { 0, 0.1, 0.37, 1 } do
        for _, chunk in ipairs { 16, 40 } do
          local _, calls, policy = run { ratio = ratio, chunk = chunk }
          for _, call in ipairs(calls) do
            policy.recent = math.max(1, call.open)
            policy.budget.recent = policy.recent
            for i, row in ipairs((rows_of(call.selection))) do
              check_row(row, math.ceil(call.length / 16), policy, call.counts[i])
            end
          end
        end
      end
    end)

  it("equals dense prefill when the budget is everything, in any chunks", function()
    local dense = whole {}
    for _, chunk in ipairs { 7, 16, 64, 200 } do
      support.close((run { ratio = 1, chunk = chunk }), dense, 3e-6, 3e-6, name)
    end
  end)

  it("takes budgets of heads and divides them, and is not above them", function()
    local ratios = { 0.1, 0.6 }
    local given = kv.from(dev, "f32", { 2, 2 }, { 0.1, 0.6, 0.1, 0.6 })
    for _, split in ipairs { false, "adaptive" } do
      local _, calls, policy = run { ratio = given, split = split or nil, chunk = 40 }
      for _, call in ipairs(calls) do
        local rows, lists = rows_of(call.selection)
        local n, taken, total = math.ceil(call.length / 16), 0, 0
        policy.recent = math.max(1, call.open)
        for i, row in ipairs(rows) do
          local budget = reference.budget_blocks({ ratio = ratios[(i - 1) % lists + 1],
            sink = 1, recent = policy.recent }, n)
          taken = taken + check_order(row, n, policy, call.counts[i])
          total = total + budget
          if not split then check_row(row, n, policy, call.counts[i], budget) end
        end
        assert.equal(total, taken)
      end
    end
  end)

  it("gives the same output for the same input", function()
    support.equal((run { ratio = 0.3, chunk = 32 }), (run { ratio = 0.3, chunk = 32 }))
  end)

  it("carries nothing from one request to the next", function()
    local o = { ratio = 0.3, min_blocks = 0, sink = 1, recent = 1 }
    local function outs(script)
      local all, its_rig = rig.play(dev, { prefill_policy = kv.policy(name, o) },
        script)
      its_rig.cache:close()
      return all[1]
    end
    local mine = { { "prefill", 1, 64 }, { "prefill", 1, 64 }, { "prefill", 1, 20 } }
    local alone = outs(mine)
    local after = outs { { "prefill", 2, 100 }, { "prefill", 2, 90 }, { "close", 2 },
                         unpack(mine) }
    for i = 1, #alone do support.equal(after[i], alone[i]) end
  end)

  it("works in every dtype", function()
    for _, dtype in ipairs { "f16", "bf16" } do
      local dense = whole { dtype = dtype }
      local out = run { ratio = 1, chunk = 64, dtype = dtype }
      support.close(out:cast "f32", dense:cast "f32", 1e-2, 1e-2)
    end
  end)

  for _, format in ipairs { "f8e4m3", "int8" } do
    it("works over a cache of " .. format, function()
      local dense = whole { format = format }
      support.close((run { ratio = 1, chunk = 64, format = format }), dense, 3e-6, 3e-6)
      run { ratio = 0.3, chunk = 64, format = format, dtype = "bf16" }
    end)
  end
end

--- nth: which of the budgets it meets, unless --full or it is the only policy. All
-- policies together meet all of them.
local function contract(name, dev, nth)
  local function some(list, most)
    return tried.own and list or support.one_each(list, nth, most)
  end

  local plain = {}

  --- Three steps of the policy after prompts of these lengths, decoded once.
  local function plain_steps(lengths)
    local key = table.concat(lengths, " ")
    plain[key] = plain[key] or rig.decode(dev, { policy = name, options = third(name),
                                                 lengths = lengths, steps = 3 }).steps
    return plain[key]
  end

  local function check_selections(o)
    local run = rig.decode(dev, { policy = name, options = with(EXTRA[name], o),
                                  lengths = LENGTHS, steps = STEPS })
    for _, step in ipairs(run.steps) do
      if not step.selection then
        assert.is_true(tried.may_read_all(name), "a score selects")
      else
        local rows, heads = rows_of(step.selection)
        local counts = step.counts:list()
        for i, row in ipairs(rows) do
          local length = step.lens[math.floor((i - 1) / heads) + 1]
          check_row(row, math.ceil(length / 16), run.policy, counts[i])
        end
      end
    end
  end

  it("selects in range, ascending, within the budget, with sink and recent", function()
    for _, ratio in ipairs(some(RATIOS, 2)) do
      check_selections { ratio = ratio, sink = 1, recent = 2, min_blocks = 3 }
    end
    check_selections { blocks = 5, sink = 2, recent = 1 }
    check_selections { tokens = 40, sink = 0, recent = 0, min_blocks = 0 }
  end)

  --- Calls fn(rows, lens, policy) for the steps that selected: rows are those of a
  -- sequence's KV heads.
  local function each_selection(o, fn)
    local run = rig.decode(dev, { policy = name, options = with(EXTRA[name], o),
                                  lengths = LENGTHS, steps = 3 })
    for _, step in ipairs(run.steps) do
      local rows, lists = {}, 0
      if step.selection then rows, lists = rows_of(step.selection) end
      local counts = lists > 0 and step.counts:list()
      for s = 1, lists > 0 and #step.lens or 0 do
        local own, taken = {}, {}
        for head = 1, lists do
          own[head] = rows[(s - 1) * lists + head]
          taken[head] = counts[(s - 1) * lists + head]
        end
        fn(own, taken, math.ceil(step.lens[s] / 16), run.policy)
      end
    end
  end

  it("takes budgets of layers and heads, and is above none of them", function()
    for i, case in ipairs(some(RAGGED, 2)) do
      local unit = case[1] == "ratio" and "ratio" or "blocks"
      local o = { [case[1]] = case[2](dev), min_blocks = i % 3 * 2, sink = 1, recent = 2 }
      each_selection(o, function(rows, counts, n, policy)
        for head, row in ipairs(rows) do
          local own = { [unit] = case[3][head], min_blocks = o.min_blocks, sink = 1,
                        recent = 2 }
          check_row(row, n, policy, counts[head], reference.budget_blocks(own, n))
        end
      end)
    end
  end)

  it("divides a budget among heads, and is not above it in all", function()
    local by_head = kv.from(dev, "f32", { 2, 2 }, { 1, 1, 0.1, 0.7 })
    for _, o in ipairs(some({ { ratio = 0.3 }, { ratio = 1 }, { blocks = 6 },
                              { ratio = by_head } }, 2)) do
      o.split, o.min_blocks, o.sink, o.recent =
        kv.split("adaptive", { floor = 0.5 }), 2, 1, 2
      local last = type(o.ratio) == "cdata" and { 0.1, 0.7 } or { o.ratio, o.ratio }
      each_selection(o, function(rows, counts, n, policy)
        local total, all = 0, 0
        for head, row in ipairs(rows) do
          local even = reference.budget_blocks({ ratio = last[head], blocks = o.blocks,
            min_blocks = 2, sink = 1, recent = 2 }, n)
          local taken = check_order(row, n, policy, counts[head])
          if not policy.takes_less then
            assert.is_true(taken >= math.floor(0.5 * even), "each head has its floor")
          end
          total, all = total + even, all + taken
        end
        if policy.takes_less then
          assert.is_true(all <= total, "the budget of all heads is not exceeded")
        else
          assert.equal(total, all)
        end
      end)
    end
  end)

  it("takes a list or tensor of equal numbers as the number", function()
    local function steps(ratio)
      local o = with(EXTRA[name], { ratio = ratio })
      return rig.decode(dev, { policy = name, options = o, lengths = LENGTHS,
                               steps = 3 }).steps
    end
    local number, list = steps(0.3), steps { 0.3, 0.3 }
    local tensor = steps(kv.full(dev, "f32", { 2, 2 }, 0.3))
    for i, step in ipairs(number) do
      support.equal(list[i].out, step.out, name)
      support.close(tensor[i].out, step.out, 2e-6, 2e-6, name)
    end
  end)

  it("says what it reads", function()
    assert.is_nil(kv.policy.uncounted(kv.policy(name)))
  end)

  it("equals dense attention when the budget is everything", function()
    for _, o in ipairs(some({ { ratio = 1 }, { blocks = 64 }, { ratio = { 1, 1 } },
                              { ratio = kv.ones(dev, "f32", { 2, 2 }) },
                              { ratio = 1, split = "adaptive" },
                              { ratio = 1, split = "pyramid" } }, 3)) do
      local all = everything(name, o)
      if not all then return end
      local want = dense_steps(dev, { lengths = LENGTHS, steps = 3 })
      local run = rig.decode(dev, { policy = name, options = all, lengths = LENGTHS,
                                    steps = 3 })
      for i, step in ipairs(run.steps) do
        support.close(step.out, want[i].out, 2e-6, 2e-6, name)
      end
    end
  end)

  it("gives the same output for the same input, in finite numbers", function()
    local o = { policy = name, options = third(name), lengths = LENGTHS, steps = 3 }
    local again = rig.decode(dev, o)
    for i, step in ipairs(plain_steps(LENGTHS)) do
      support.equal(step.out, again.steps[i].out, name)
      local sum = step.out:cast "f32":abs():sum():item()
      assert.is_true(sum > 0 and sum < math.huge,
        "attention is not finite, or 0 everywhere: its size is " .. sum)
    end
  end)

  it("keeps what it needs when every step is a scope", function()
    local o = { policy = name, options = third(name), lengths = LENGTHS, steps = 3,
                scoped = true }
    local want = plain_steps(LENGTHS) -- draws the tokens
    local scoped = rig.decode(dev, o)
    for i, step in ipairs(want) do
      support.equal(step.out, scoped.steps[i].out, name)
    end
  end)

  it("carries nothing from one request to the next", function()
    local o = { policy = name, options = third(name), lengths = { 200 }, steps = 3 }
    o.before = { 90, 250 } -- requests that come and go first, in the same blocks
    local after = rig.decode(dev, o)
    for i, step in ipairs(plain_steps { 200 }) do
      support.equal(step.out, after.steps[i].out, name)
    end
  end)

  it("gives a sequence in a batch what it gives it alone", function()
    local o = { policy = name, options = third(name), lengths = { 250, 90 },
                steps = 2 }
    local both = rig.decode(dev, o)
    o.lengths = { 250 }
    local alone = rig.decode(dev, o)
    for i, step in ipairs(alone.steps) do
      support.close(step.out:index(0), both.steps[i].out:index(0), 2e-6, 2e-6, name)
    end
  end)

  it("gives a fork or a batch by ragged budgets what it gives alone", function()
    local o = { policy = name, options = ragged(name, dev), lengths = { 195 },
                steps = 3 }
    local alone, runs = rig.decode(dev, o), {}
    o.fork = true
    runs[1] = rig.decode(dev, o)
    o.fork, o.scoped = nil, true
    runs[2] = rig.decode(dev, o)
    o.scoped, o.before = nil, { 90 }
    runs[3] = rig.decode(dev, o)
    o.before, o.chunk = nil, 16
    runs[4] = rig.decode(dev, o)
    o.chunk, o.lengths = nil, { 195, 90 }
    runs[5] = rig.decode(dev, o)
    for k, run in ipairs(runs) do
      for i, step in ipairs(alone.steps) do
        support.close(run.steps[i].out:index(0), step.out:index(0), 2e-6, 2e-6,
          ("%s, run %d"):format(name, k))
      end
    end
  end)

  it("sees a prompt in any chunking the same way", function()
    local o = { policy = name, options = third(name), lengths = { 200 }, steps = 3 }
    for _, chunk in ipairs(support.one_each({ 1, 7, 16, 64 }, nth, 2)) do
      o.chunk = chunk
      local cut = rig.decode(dev, o)
      for i, step in ipairs(plain_steps { 200 }) do
        support.close(cut.steps[i].out, step.out, 2e-6, 2e-6, name .. " chunk " .. chunk)
      end
    end
  end)

  it("sees a fork as a sequence of its own", function()
    local o = { policy = name, options = third(name), lengths = { 195 }, steps = 4 }
    local alone = rig.decode(dev, o)
    o.fork = true
    local forked = rig.decode(dev, o)
    for i, step in ipairs(alone.steps) do
      support.equal(forked.steps[i].out, step.out, name)
    end
  end)

  it("takes any number of blocks and KV heads", function()
    local o = { layers = 3, blocks = 13, block_size = 2, kv_heads = 3, head_dim = 8 }
    for _, more in ipairs(name == "nsa" and { {}, { index_pool = 2 } } or { {} }) do
      o.device, o.format = dev, "f32"
      local policy, cache = kv.policy(name, with(more, third(name))), kv.cache(o)
      local attention = kv.attention { cache = cache, heads = 6, decode_policy = policy }
      local seq, batch = cache:sequence(), cache:batch()
      attention:request_begin(seq)
      for step, n in ipairs { 17, 1, 1 } do
        batch:append({ seq }, { n })
        attention:begin(batch, step == 1, step == 1 and { true } or nil)
        for layer = 0, o.layers - 1 do
          local function draw(heads, seed)
            return kv.randn(dev, "f32", { n, heads, 8 }, { seed = 10 * step + seed })
          end
          local out = attention:forward(layer, draw(6, 1), draw(3, 2), draw(3, 3))
          assert.is_true(out:abs():max():item() < 10)
        end
      end
      seq:close()
      cache:close()
    end
  end)

  it("works in every dtype", function()
    for _, dtype in ipairs { "f16", "bf16" } do
      local all = everything(name, { ratio = 1 })
      local run = rig.decode(dev, { policy = name, steps = 2, lengths = { 100 },
        options = all or third(name), dtype = dtype })
      if not all then return end
      local want = dense_steps(dev, { steps = 2, lengths = { 100 }, dtype = dtype })
      for i, step in ipairs(run.steps) do
        support.close(step.out:cast "f32", want[i].out:cast "f32", 1e-2, 1e-2, name)
      end
    end
  end)

  for _, format in ipairs { "f8e4m3", "int8" } do
    it("works over a cache of " .. format, function()
      local function steps(o)
        return rig.decode(dev, { policy = name, options = o, steps = 2,
                                 lengths = { 100, 33 }, format = format }).steps
      end
      local want = dense_steps(dev, { steps = 2, lengths = { 100, 33 }, format = format })
      local all = everything(name, { ratio = 1 })
      for i, step in ipairs(all and steps(all) or {}) do
        support.close(step.out, want[i].out, 2e-6, 2e-6, name)
      end
      steps { ratio = 0.3, min_blocks = 0 }
    end)
  end
end

--- What the policy declares, on a device.
local function contracts(name, dev, nth)
  local policy = kv.policy(name)
  if policy.prefill then prefill_contract(name, dev) end
  if policy.decode then contract(name, dev, nth) end
end

for nth, name in ipairs(tried.names()) do
  describe("policy " .. name .. " #policy", function()
    contracts(name, kv.device "cpu", nth)
  end)
  describe("policy " .. name .. " on cuda #gpu #policy", function()
    if not kv.cuda_available() then return end
    contracts(name, kv.device "cuda", nth)

    it("selects and attends as on the cpu", function()
      if not kv.policy(name).decode then return end
      for _, options in ipairs { third(name), ragged(name, kv.device "cpu"),
                                 with(EXTRA[name], { blocks = { 4, 7 } }) } do
        local o = { policy = name, options = options, lengths = LENGTHS, steps = 3 }
        local cuda, cpu = rig.decode(kv.device "cuda", o), rig.decode(kv.device "cpu", o)
        for i, step in ipairs(cpu.steps) do
          if step.selection then
            support.equal(cuda.steps[i].selection, step.selection)
          end
          support.close(cuda.steps[i].out, step.out, 1e-5, 1e-5, name)
        end
      end
    end)
  end)
end
