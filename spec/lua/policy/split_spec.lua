--- How budgets are divided among layers and heads. What adaptive selects is compared with
-- a reference in plain Lua that sorts the scores of all heads.
local files = require "kvlab.files"
local kv = require "kvlab"
local named = require "kvlab.named"
local reference = require "spec.reference.attention"
local rig = require "spec.rig"
local support = require "spec.support"
local temporary = require "spec.temporary"

local cpu, raises = kv.device "cpu", support.raises
local INF = math.huge

local function attached(o)
  local its_rig = rig.new(cpu, { policy = kv.policy("quest", o) })
  its_rig.cache:close()
  return its_rig.policy
end

describe("a split among layers", function()
  for _, name in ipairs(kv.split.names()) do
    it("of " .. name .. " gives numbers in range whose mean is the budget", function()
      local split, rng = kv.split(name), support.rng(7)
      for _ = 1, split.layers and 200 or 0 do
        local mean, count = rng(1001) / 1000, 1 + rng(40)
        local most, sum = rng(2) == 0 and 1 or INF, 0
        if most == INF then mean = mean * 100 end
        local list = split:layers(mean, most, count)
        assert.equal(count, #list)
        for _, x in ipairs(list) do
          assert.is_true(x >= -1e-12 and x <= most, x)
          sum = sum + x
        end
        assert.near(count * mean, sum, 1e-9 * count * (1 + mean))
      end
    end)
  end

  it("of pyramid falls in equal steps to mean / beta", function()
    local list = kv.split("pyramid", { beta = 4 }):layers(0.2, 1, 4)
    for i, x in ipairs { 0.35, 0.25, 0.15, 0.05 } do assert.near(x, list[i], 1e-12) end
    list = kv.split("pyramid"):layers(0.7, 1, 3) -- 1.365 is more than everything
    for i, x in ipairs { 1, 0.7, 0.4 } do assert.near(x, list[i], 1e-12) end
  end)

  it("divides blocks beside those that are always selected, to a whole number", function()
    for blocks = 3, 40 do
      local p = attached { blocks = blocks, split = "pyramid", sink = 1, recent = 2,
                           min_blocks = 0 }
      local first = kv.policy.budget_blocks(p.budget, 1000, 0)
      local last = kv.policy.budget_blocks(p.budget, 1000, 1)
      assert.equal(2 * blocks, first + last)
      assert.near(3 + (blocks - 3) / 20, last, 0.5)
    end
  end)

  it("divides a ratio", function()
    local p = attached { ratio = 0.2, split = kv.split("pyramid", { beta = 4 }),
                         min_blocks = 0 }
    assert.equal(350, kv.policy.budget_blocks(p.budget, 1000, 0))
    assert.equal(50, kv.policy.budget_blocks(p.budget, 1000, 1))
    raises("ratio is a list, expected a number that split pyramid divides among layers",
      attached, { ratio = { 0.1, 0.1 }, split = "pyramid" })
    raises("ratio is a tensor, expected a number that split pyramid divides", attached,
      { ratio = kv.ones(cpu, "f32", { 2, 2 }), split = "pyramid" })
  end)
end)

describe("a split among layers of one's own", function()
  local function attach(list)
    attached { ratio = 0.25, min_blocks = 0, split = kv.split.define { name = "own",
      layers = function() return list end } {} }
  end

  it("is refused when its numbers are no division of the budget", function()
    attach { 0.5, 0 }
    local want = ", expected 2 numbers, 0 ... 1, with a mean of 0.25"
    raises("policy quest: split own gives layers a list of 1" .. want, attach, { 0.25 })
    raises("gives layers a list of 3" .. want, attach, { 0.25, 0.25, 0.25 })
    raises("gives layers nil" .. want, attach, nil)
    raises("gives layers nan, layer 0,", attach, { 0 / 0, 0.25 })
    raises("gives layers -0.5, layer 0,", attach, { -0.5, 1 })
    raises("gives layers 1.5, layer 0,", attach, { 1.5, -1 })
    raises('gives layers "a", layer 1,', attach, { 0.25, "a" })
    raises("gives layers a mean of 0.75" .. want, attach, { 0.75, 0.75 })
  end)
end)

-- ---- among heads ----------------------------------------------------------------------

--- A policy whose scores are random, with what its last layer scored.
local function scoring(o, kind)
  local policy
  policy = kv.policy.define {
    name = "scoring", decode = true, own_bytes = 0,
    defaults = { ratio = 0.3, min_blocks = 0, sink = 0, recent = 0 },
    score = function(_, ctx)
      local heads = kind == "shared" and 1 or ctx.kv_heads
      local scores = ctx:new_scores(heads):rand_(5, ctx.layer + ctx.total_kv_len)
      local skew = heads == 1 and { 1 } or { 4, 9 }
      scores:sub(0.5, scores):mul(kv.from(cpu, "f32", { 1, heads, 1 }, skew), scores)
      if kind == "sparse" then
        scores:lt(-0.5):where(-INF, scores, scores)
      elseif kind == "infinite" then
        scores:gt(0):where(INF, scores, scores)
      elseif kind == "few" then
        scores:cast("i32"):cast("f32", scores)
      end
      policy.scored = { list = scores:list(), width = ctx.width, heads = heads }
      return scores
    end,
  } (o)
  return policy
end

--- The blocks of each head: its own best `floor`, then the best of all heads; sink and
-- recent count as the very best, and ties go to the first head and the lower block.
local function adaptive(rows, n, o, floor)
  local best, lists, total = {}, {}, 0
  for head, row in ipairs(rows) do
    local even = reference.budget_blocks({ ratio = o.ratio[head] or o.ratio,
      min_blocks = o.min_blocks, sink = o.sink, recent = o.recent }, n)
    total = total + even
    local sure, is_sure = reference.select(row, n, { blocks = math.floor(floor * even),
      min_blocks = o.min_blocks, sink = o.sink, recent = o.recent }, n), {}
    for _, b in ipairs(sure) do is_sure[b] = true end
    for b = 0, n - 1 do
      local x = row[b + 1]
      if is_sure[b] or x > -INF then
        best[#best + 1] = { head = head, block = b, x = is_sure[b] and INF
          or math.min(x, 1e30), at = #best }
      end
    end
    lists[head] = {}
  end
  table.sort(best, function(a, b)
    if a.x ~= b.x then return a.x > b.x end
    return a.at < b.at
  end)
  for i = 1, math.min(total, #best) do
    table.insert(lists[best[i].head], best[i].block)
  end
  for _, list in ipairs(lists) do table.sort(list) end
  return lists
end

local function softmax(rows, n, scale)
  for _, row in ipairs(rows) do
    local top, sum = -INF, 0
    for b = 1, n do top = math.max(top, row[b]) end
    for b = 1, n do row[b] = math.exp(scale * (row[b] - top)) end
    for b = 1, n do sum = sum + row[b] end
    for b = 1, n do row[b] = row[b] / sum end
  end
end

describe("a split among heads", function()
  local LENGTHS = { 1, 3, 16, 17, 33, 160, 250 }
  local CASES = {
    { {}, { ratio = 0.3 } }, { {}, { ratio = 0 } }, { {}, { ratio = 1 } },
    { { floor = 0 }, { ratio = 0.2, sink = 1, recent = 2 } },
    { { floor = 1 }, { ratio = 0.4, sink = 1, recent = 2 } },
    { { floor = 0.5 }, { ratio = 0.3, min_blocks = 4, recent = 1 } },
    { { floor = 0.3 }, { ratio = { 0.1, 0.7 }, sink = 1 } },
  }
  for _, kind in ipairs { "distinct", "few", "sparse", "infinite", "shared" } do
    it("of adaptive takes the best of all heads: " .. kind, function()
      for i, case in ipairs(CASES) do
        local o = { sink = case[2].sink or 0, recent = case[2].recent or 0,
                    min_blocks = case[2].min_blocks or 0,
                    split = kv.split("adaptive", case[1]) }
        local ratio = case[2].ratio
        o.ratio = type(ratio) == "number" and ratio
          or kv.from(cpu, "f32", { 2, 2 }, { 1, 1, unpack(ratio) })
        local policy = scoring(o, kind)
        local run = rig.decode(cpu, { policy = policy, lengths = LENGTHS, steps = 1 })
        local selection, at = run.steps[1].selection:list(), 0
        local width = run.steps[1].selection:size(2)
        local scored = policy.scored
        for s, len in ipairs(run.steps[1].lens) do
          local rows, n = {}, math.ceil(len / 16)
          for head = 1, 2 do
            rows[head] = {}
            local row = (s - 1) * scored.heads + math.min(head, scored.heads) - 1
            for b = 1, n do rows[head][b] = scored.list[row * scored.width + b] end
          end
          local want = adaptive(rows, n, { ratio = type(ratio) == "table" and ratio
            or { ratio, ratio }, sink = o.sink, recent = o.recent,
            min_blocks = o.min_blocks }, case[1].floor or 0.2)
          for head = 1, 2 do
            for b = 1, width do
              assert.equal(want[head][b] or -1, selection[at + b],
                ("case %d, sequence %d, head %d, entry %d"):format(i, s, head, b))
            end
            at = at + width
          end
        end
      end
    end)
  end

  it("of adaptive compares weights of heads with softmax", function()
    local policy = scoring { ratio = 0.3, split = kv.split("adaptive",
      { softmax = true, floor = 0.1 }) }
    local run = rig.decode(cpu, { policy = policy, lengths = { 250 }, steps = 1 })
    local selection, scored, rows = run.steps[1].selection, policy.scored, { {}, {} }
    for head = 1, 2 do
      for b = 1, 16 do rows[head][b] = scored.list[(head - 1) * scored.width + b] end
    end
    local plain = adaptive(rows, 16, { ratio = { 0.3, 0.3 } }, 0.1)
    softmax(rows, 16, 1 / math.sqrt(32))
    local want = adaptive(rows, 16, { ratio = { 0.3, 0.3 } }, 0.1)
    local width = selection:size(2)
    assert.is_true(#want[1] ~= #plain[1], "the scale of a head decides without it")
    for i, block in ipairs(selection:list()) do
      local head = math.ceil(i / width)
      assert.equal(want[head][i - (head - 1) * width] or -1, block)
    end
  end)

  --- A step by a split whose heads are fn.
  local function divided(fn)
    local split = kv.split.define { name = "own", heads = fn } {}
    rig.decode(cpu, { policy = scoring { ratio = 0.3, split = split },
                      lengths = { 200, 90 }, steps = 1 })
  end

  it("is a function of the context, the scores and the even budget", function()
    local seen
    divided(function(self, ctx, scores, even, budget)
      seen = { self.name, ctx.layer, scores:size(1), budget.sink }
      return even:mul(kv.from(cpu, "i32", { 1, 2 }, { 0, 1 }))
    end)
    assert.same({ "own", 1, 2, 0 }, seen)
  end)

  it("is refused when it gives what no list may have", function()
    raises("split own returns nil, expected i32 [2, 2]: sequences, KV heads", divided,
      function() end)
    raises("split own returns f32 [2, 2], expected i32 [2, 2]", divided,
      function(_, _, _, even) return even:cast "f32" end)
    raises("split own returns i32 [1, 2], expected i32 [2, 2]", divided,
      function(_, _, _, even) return even:narrow(0, 1) end)
    local closed = kv.ones(cpu, "i32", { 2, 2 })
    closed:free()
    raises("split own returns a tensor that is closed, expected i32 [2, 2]", divided,
      function() return closed end)
    raises("split own gives sequence 0, head 0 -1 blocks, expected 0 or more", divided,
      function(_, _, _, even) return even - even - 1 end)
    raises("split own gives the heads of sequence 0 10 blocks, expected at most the 8 "
      .. "that they have undivided", divided, function(_, _, _, even) return even + 1 end)
  end)

  it("may return what it keeps, and what it was given", function()
    local kept = kv.from(cpu, "i32", { 2, 2 }, { 1, 2, 2, 1 })
    divided(function() return kept end)
    assert.same({ 1, 2, 2, 1 }, kept:list())
    divided(function(_, _, _, even) return even end)
  end)

  it("is compared with what the heads had before it was called", function()
    raises("split own gives the heads of sequence 0 2000 blocks, expected at most the 8",
      divided, function(_, _, _, even) return even:fill_(1000) end)
  end)

  it("keeps what it makes apart for each attention", function()
    local made = {}
    local split = kv.split.define { name = "own", heads = function(self, _, _, even)
      made[self] = true
      return even:clone()
    end } {}
    local policy = scoring { ratio = 0.3, split = split }
    for _, p in ipairs { policy, kv.policy.again(policy) } do
      rig.decode(cpu, { policy = p, lengths = { 40 }, steps = 1 })
    end
    local count = 0
    for _ in pairs(made) do count = count + 1 end
    assert.equal(2, count)
    assert.is_nil(made[split])
  end)
end)

describe("kv.split", function()
  it("names what is wrong", function()
    raises('no split "pyramyd"; did you mean "pyramid"?', kv.split, "pyramyd")
    raises('no split "pyramyd"', kv.policy, "quest", { split = "pyramyd" })
    raises("split is 3, expected the name of a split, or one that kv.split makes",
      kv.policy, "quest", { split = 3 })
    raises("split is a table, expected the name of a split", kv.policy, "quest",
      { split = {} })
    raises('split adaptive: "flor" is no option, did you mean floor?', kv.split,
      "adaptive", { flor = 0.5 })
    raises("floor is 2, expected 0 ... 1", kv.split, "adaptive", { floor = 2 })
    raises("beta is 0.5, expected a number >= 1", kv.split, "pyramid", { beta = 0.5 })
    raises("split x has neither layers nor heads", kv.split.define, { name = "x" })
    raises("the default of list is a table", kv.split.define,
      { name = "x", defaults = { list = {} }, layers = function() end })
    raises('"layer" is no option, did you mean layers?', kv.split.define,
      { name = "x", layer = function() end, heads = function() end })
    raises("split x: takes has shares, expected one of its defaults", kv.split.define,
      { name = "x", defaults = { share = 1 }, takes = { shares = kv.policy.share },
        layers = function() end })
    local split = kv.split.define { name = "x", own = function() return 7 end,
      layers = function(self) return self:own() end } {}
    assert.equal(7, split:layers())
  end)

  it("lists the splits that there are", function()
    assert.same({ "adaptive", "pyramid" }, kv.split.names())
  end)

  it("is among the files that a policy's rows depend on", function()
    local names = table.concat(kv.policy("quest", { split = "pyramid" }).files, " ")
    assert.is_truthy(names:find("splits/pyramid.lua", 1, true))
    assert.is_truthy(names:find("policies/quest.lua", 1, true))
  end)

  it("opens files that give another split other options", function()
    local path = temporary.folder() .. "/milder.lua"
    files.write(path, "return 0")
    local pyramid = require "splits.pyramid"
    named.give("splits", "milder", path, function() return pyramid { beta = 2 } end)
    local split = kv.policy("quest", { split = "milder" }).split
    assert.equal(2, split.beta)
    assert.equal(path, split.files[1])
    assert.is_truthy(split.files[2]:find("splits/pyramid.lua", 1, true))
    named.give("splits", "milder", path, function() return {} end)
    raises("milder.lua makes a table, expected a split", kv.split, "milder")
    named.give("splits", "milder", path, 3)
    raises("milder.lua returns 3, expected what kv.split.define returns", kv.split,
      "milder")
  end)
end)
