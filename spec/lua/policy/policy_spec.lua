--- What the core checks for every policy: definitions, options, budgets; and that a
-- step's Lua code compiles.
local files = require "kvlab.files"
local kv = require "kvlab"
local named = require "kvlab.named"
local support = require "spec.support"
local rig = require "spec.rig"
local temporary = require "spec.temporary"
local traces = require "spec.traces"
local tried = require "spec.tried_policies"

local raises = support.raises

describe("note", function()
  local quest = kv.policy("quest", { ratio = 0.05, sink = 1, recent = 2, min_blocks = 0 })

  it("says when the budget does not decide what is read", function()
    local more = "sink, recent and min_blocks alone are more than the budget"
    local all = "sink and recent alone are the whole budget"
    assert.equal(more, kv.policy.note(quest, 32, 16)) -- 2 blocks asked for, 3 read
    assert.equal(all, kv.policy.note(quest, 48, 16)) -- 3 asked for
    assert.is_nil(kv.policy.note(quest, 64, 16)) -- 4 asked for
    assert.is_nil(kv.policy.note(kv.policy "full", 1, 16))
    local whole = kv.policy("quest", { ratio = 1, sink = 1, recent = 2 })
    assert.is_nil(kv.policy.note(whole, 3, 16))
    local least = kv.policy("quest", { blocks = 4, sink = 1, recent = 2, min_blocks = 4 })
    assert.is_nil(kv.policy.note(least, 64, 16))
    assert.is_nil(kv.policy.note(kv.policy("topk", { blocks = 0 }), 64, 16))
  end)

  it("says when a policy is uncounted", function()
    local function open(more)
      local def = { name = "mine", decode = true, defaults = { blocks = 4 },
                    score = function(_, ctx) return ctx:masses() end }
      for key, value in pairs(more) do def[key] = value end
      return kv.policy.define(def)()
    end
    local function note(more) return kv.policy.note(open(more), 64, 16) end
    assert.equal("uncounted: policy mine does not say what its score reads (own_bytes)",
      note {})
    assert.matches("what its select_blocks reads",
      note { score = kv.expr.block, select_blocks = function() return nil end })
    assert.is_nil(note { own_bytes = 0 })
    assert.is_nil(note { own_bytes = function() return 4 end })
    assert.is_nil(note { score = kv.expr.block, init = function() end })
    assert.matches("what its step_begin reads",
      note { score = kv.expr.block, step_begin = function() end })
    raises('own_bytes is "4"', open, { own_bytes = "4" })
    raises("own_bytes is -4", open, { own_bytes = -4 })
    raises("own_bytes", open, { score_bytes = function() return 4 end })
  end)

  it("names a wrong argument", function()
    local check = kv.policy.note
    raises("note: self is", check, {}, 3, 4)
    raises('note: n is "a", expected a whole number', check, quest, "a", 4)
    raises("note: block_size is 0", check, quest, 3, 0)
  end)
end)

describe("a summary that depends on an option", function()
  local e = kv.expr
  local function open(summary, o)
    return kv.policy.define { name = "powers", decode = true, defaults = { power = 2 },
      summary = summary, score = e.x:sum "dim" }(o)
  end
  local function power(o)
    local x = e.k
    for _ = 2, o.power do x = x * e.k end
    return { x = x:mean "token" }
  end

  it("has the fields that its function returns for the options", function()
    assert.equal("mean_token(k * k)", tostring(open(power).expressions.fields.x))
    local third = open(power, { power = 3 })
    assert.equal("mean_token(k * k * k)", tostring(third.expressions.fields.x))
    assert.equal(1, #third.files)
  end)

  it("computes them", function()
    local best = {}
    for i = 1, 3 do
      local p = open(power, { power = i })
      rig.decode(kv.device "cpu", { policy = p, lengths = { 40 }, steps = 1 })
      best[i] = p.summary.x:layer(0):index(0):index(0):list()[1]
    end
    assert.is_true(best[2] > 0 and best[1] ~= best[2] and best[2] ~= best[3])
  end)

  it("is refused when it is no table of expressions", function()
    raises("policy powers: summary returns nil, expected a table of expressions", open,
      function() end)
    raises("policy powers: summary.x is number, expected an expression", open,
      function() return { x = 1 } end)
    raises("policy powers: summary is 3, expected a table or a function", open, 3)
    raises("there is no field x in the summary, which has y", open,
      function() return { y = e.k:mean "token" } end)
    raises("there is no field x in the summary, which has y", open, function(o)
      return { [o.power == 2 and "x" or "y"] = e.k:mean "token" }
    end, { power = 3 })
  end)
end)

describe("the files of a policy", function()
  it("are those of its expressions, too, wherever they were built", function()
    local shared = temporary.file([[local e = require("kvlab").expr
      return e.max(e.q * e.lo, e.q * e.hi):sum "dim":max "head"]], "shared.lua")
    local own = temporary.file(([[local kv, e = require "kvlab", require("kvlab").expr
      return kv.policy.define { name = "pure", decode = true, score = dofile %q,
        summary = { lo = e.k:min "token", hi = e.k:max "token" } }]]):format(shared),
      "pure.lua")
    local p = dofile(own) {}
    table.sort(p.files)
    local want = { own, shared }
    table.sort(want)
    assert.same(want, p.files)
  end)

  it("are the one that its name stands for, if nothing in it tells", function()
    local folder = temporary.folder()
    files.make_folder(folder .. "/policies")
    local path = folder .. "/policies/bare_leaf.lua"
    files.write(path, [[local kv = require "kvlab"
      return kv.policy.define { name = "bare_leaf", decode = true,
        score = kv.expr.block }]])
    named.give("policies", "bare_leaf", path, dofile(path))
    local p = kv.policy "bare_leaf"
    named.give("policies", "bare_leaf", nil, nil)
    assert.same({ path }, p.files)
  end)
end)

describe("policy options", function()
  it("are merged over the defaults", function()
    local p = kv.policy("quest", { sink = 3 })
    assert.equal(3, p.sink)
    assert.equal(0.1, p.ratio)
    assert.equal(2, p.recent)
  end)

  it("replace the default budget by the given one", function()
    local p = kv.policy("quest", { blocks = 7 })
    assert.equal(7, p.blocks)
    assert.is_nil(p.ratio)
  end)

  it("are refused with the names that are known", function()
    raises('policy quest: "ration" is no option, did you mean ratio?; the options are '
      .. "blocks, min_blocks", kv.policy, "quest", { ration = 0.1 })
    raises("1 is no option", kv.policy, "quest", { 0.1, ratio = 0.1 })
    raises("ratio is 1.5, expected 0 ... 1", kv.policy, "quest", { ratio = 1.5 })
    raises("ratio is nan", kv.policy, "quest", { ratio = 0 / 0 })
    raises("sink is -1, expected a whole number >= 0", kv.policy, "quest",
      { sink = -1 })
    raises("seed is \"x\", expected a number", kv.policy, "random", { seed = "x" })
    raises("both blocks and ratio", kv.policy, "quest", { ratio = 0.1, blocks = 3 })
    raises('no policy "qest"; did you mean "quest"? There are block_mean, duo, full',
      kv.policy, "qest")
  end)
end)

describe("the seed of a policy", function()
  local NAMES = { "random", "magicpig", "gsa_on_device", "nsa" }

  it("is that of the command line unless it is given", function()
    kv.command_line.seed = 7
    local ok, text = pcall(function()
      for _, name in ipairs(NAMES) do
        assert.equal(7, kv.policy(name).seed, name)
        assert.equal(3, kv.policy(name, { seed = 3 }).seed, name)
      end
    end)
    kv.command_line.seed = 0
    assert.is_true(ok, text)
    assert.equal(0, kv.policy("random").seed)
    assert.is_nil(kv.policy("quest").seed)
  end)

  it("changes what is drawn", function()
    for _, name in ipairs { "random", "magicpig", "gsa_on_device" } do
      local function selected(seed)
        local run = rig.decode(kv.device "cpu", { policy = name, lengths = { 250 },
          options = { blocks = 5, seed = seed, min_blocks = 0 }, steps = 1 })
        return run.steps[1].selection:list()
      end
      assert.same(selected(1), selected(1), name)
      assert.not_same(selected(1), selected(2), name)
    end
  end)
end)

describe("policy aliases", function()
  local seeds = kv.policy.define {
    name = "x", decode = true, score = function() end,
    defaults = { ratio = 0.3, kind = "a", refresh = 3 },
    takes = { kind = kv.policy.one_of("a", "b"), refresh = kv.policy.count },
    aliases = { sparse_ratio = "ratio", window = "recent", period = "refresh" },
  }

  it("are other names of options", function()
    local p = seeds { sparse_ratio = 0.5, window = 4 }
    assert.equal(0.5, p.ratio)
    assert.equal(4, p.recent)
    assert.is_nil(p.sparse_ratio)
    assert.is_nil(seeds { blocks = 3 }.ratio)
  end)

  it("are refused beside what they stand for, and with wrong values", function()
    raises("both ratio and sparse_ratio are given, which are the same option", seeds,
      { ratio = 0.1, sparse_ratio = 0.1 })
    raises("both blocks and sparse_ratio are given, expected one budget", seeds,
      { blocks = 3, sparse_ratio = 0.1 })
    raises("sparse_ratio is 7, expected 0 ... 1", seeds, { sparse_ratio = 7 })
    raises("period is 0, expected a whole number >= 1", seeds, { period = 0 })
  end)

  it("are named by errors", function()
    raises("did you mean sparse_ratio?; the options are blocks, kind, min_blocks, "
      .. "period, ratio, recent, refresh, reuse_layers, reuse_steps, sink, "
      .. "sparse_ratio, split, tokens, window", seeds, { sparse_ration = 0.1 })
  end)

  it("name an option that is there, by a name that is not", function()
    local function define(aliases)
      return kv.policy.define { name = "x", decode = true, score = function() end,
                                aliases = aliases }
    end
    raises("alias a of ration, expected a new name", define, { a = "ration" })
    raises("alias sink of recent, expected a new name", define, { sink = "recent" })
  end)

  it("come with checks of values that have the right type", function()
    raises('kind is "c", expected one of a, b', seeds, { kind = "c" })
    raises("refresh is 1.5, expected a whole number >= 1", seeds, { refresh = 1.5 })
    assert.equal("b", seeds { kind = "b" }.kind)
  end)
end)

describe("policy budget", function()
  --- A function of n: how many of n blocks these options allow.
  local function budget(options, block_size)
    local p = kv.policy("quest", options)
    local cache = kv.cache { device = kv.device "cpu", layers = 1, blocks = 4,
                             kv_heads = 1, block_size = block_size or 16, head_dim = 8 }
    kv.attention { cache = cache, heads = 1, decode_policy = p }
    return function(n) return kv.policy.budget_blocks(p.budget, n) end
  end

  local function blocks(options, n, block_size) return budget(options, block_size)(n) end

  it("is a share of the blocks, rounded up", function()
    local none = { min_blocks = 0, sink = 0, recent = 0 }
    local function ratio(r, n)
      none.ratio = r
      return blocks(none, n)
    end
    assert.equal(3, ratio(0.1, 30)) -- 0.1 * 30 is a little more than 3 in floating point
    assert.equal(4, ratio(0.1, 31))
    assert.equal(1, ratio(0.02, 1))
    assert.equal(0, ratio(0, 100))
    assert.equal(100, ratio(1, 100))
    assert.equal(0, ratio(1, 0))
    none.ratio = 0.25
    local quarter = budget(none)
    for n = 1, 2000 do assert.equal(math.ceil(n / 4), quarter(n)) end
  end)

  it("is tokens in whole blocks, or blocks", function()
    local o = { tokens = 33, min_blocks = 0, sink = 0, recent = 0 }
    assert.equal(3, blocks(o, 100))
    assert.equal(5, blocks(o, 100, 8))
    assert.equal(9, blocks({ blocks = 9 }, 100))
    assert.equal(6, blocks({ blocks = 9 }, 6))
  end)

  it("never falls below min_blocks and sink + recent", function()
    assert.equal(8, blocks({ ratio = 0, min_blocks = 8 }, 100))
    assert.equal(7, blocks({ ratio = 0, min_blocks = 0, sink = 3, recent = 4 }, 100))
  end)
end)

describe("policy definition", function()
  local define = kv.policy.define
  local function score() end

  it("is refused with what is wrong with it", function()
    raises("name is missing", define, { score = score, decode = true })
    raises('policy x: "scores" is no option, did you mean score?', define,
      { name = "x", scores = score, decode = true })
    raises('decode is "yes", expected true or false', define,
      { name = "x", score = score, decode = "yes" })
    raises("neither prefill nor decode", define, { name = "x", score = score })
    raises("none of score, select_blocks, select_tokens, compute_decode and evict",
      define, { name = "x", decode = true })
    raises("has by_token, expected select_tokens beside it", define,
      { name = "x", decode = true, score = score, by_token = true })
  end)

  it("makes policies that attach once", function()
    local p = define { name = "x", decode = true, score = score } ()
    local cache = kv.cache { device = kv.device "cpu", layers = 1, blocks = 4,
                             kv_heads = 1, block_size = 16, head_dim = 8 }
    kv.attention { cache = cache, heads = 1, decode_policy = p }
    raises("attached already", kv.attention,
      { cache = cache, heads = 1, decode_policy = p })
  end)

  it("may score in plain Lua on the host", function()
    local newest_first = define {
      name = "host", decode = true, defaults = { blocks = 2 },
      score = function(_, ctx)
        return ctx:score_on_host(function(row, n)
          for b = 0, n - 1 do row[b] = b == 1 and 9 or -b end
        end)
      end,
    }
    local cache = kv.cache { device = kv.device "cpu", layers = 1, blocks = 8,
                             kv_heads = 2, block_size = 4, head_dim = 8, format = "f32" }
    local attention = kv.attention { cache = cache, heads = 2,
                                     decode_policy = newest_first() }
    local batch, seq = cache:batch(), cache:sequence()
    local selected
    attention.probe = { observe = function(_, _, _, selection) selected = selection end }
    for _, n in ipairs { 20, 1 } do
      batch:append({ seq }, { n })
      attention:begin(batch, n > 1)
      local function draw(seed)
        return kv.randn(cache.device, "f32", { n, 2, 8 }, { seed = seed })
      end
      attention:forward(0, draw(1), draw(2), draw(3))
    end
    assert.same({ 0, 1, 0, 1 }, selected:list())
  end)
end)

describe("a policy step", function()
  --- Policies with budgets that differ, under names.
  local function ragged()
    local ratio = kv.from("cpu", "f32", { 2, 2 }, { 0.2, 0.5, 0.6, 0.1 })
    return { ["quest by layer"] = kv.policy("quest", { ratio = { 0.2, 0.5 } }),
             ["quest by head"] = kv.policy("quest", { ratio = ratio }),
             ["topk by head"] = kv.policy("topk", { ratio = ratio }),
             ["hashes by head"] = kv.policy("gsa_on_device", { ratio = ratio }),
             adaptive = kv.policy("quest", { ratio = ratio, split = "adaptive" }) }
  end

  it("does not grow the device's memory and allocates nothing there #policy", function()
    local all = tried.own and {} or ragged()
    for _, name in ipairs(tried.names "decode") do all[name] = name end
    for name, policy in pairs(all) do
      local run = rig.stepper(kv.device "cpu", policy, { 200, 90 })
      -- what prefill and other policies left would be freed between steps, and would join
      -- free memory into other pieces
      for _ = 1, 2 do collectgarbage() end
      for _ = 1, 3 do run() end
      local before = kv.device("cpu"):stats()
      for _ = 1, 10 do run() end
      local after = kv.device("cpu"):stats()
      assert.equal(before.allocations, after.allocations, name)
    end
  end)

  it("compiles: its Lua code aborts no trace", function()
    local all = ragged()
    for _, name in ipairs(kv.policy.names "decode") do all[name] = name end
    for name, policy in pairs(all) do
      local run = rig.stepper(kv.device "cpu", policy, { 200, 90 })
      run() -- the first step may do what no other one does
      jit.flush()
      local aborts, formed = traces.aborts_of(function()
        for _ = 1, 500 do run() end
      end)
      assert.same({}, aborts, name)
      assert.is_true(formed > 0, name .. " formed no trace")
    end
  end)
end)
