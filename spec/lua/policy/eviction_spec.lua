--- Evictions: each evicts what a plain reference evicts, step by step, and changes no bit
-- of what comes out; wrong ones are refused by name.
local files = require "kvlab.files"
local kv = require "kvlab"
local reference = require "spec.reference.hot_cache"
local rig = require "spec.rig"
local support = require "spec.support"
local temporary = require "spec.temporary"
local tiny = require "spec.models.tiny"

local e = kv.expr
local LAYERS, KV_HEADS = rig.SHAPE.layers, rig.SHAPE.kv_heads

local mixed = kv.eviction.define { name = "mixed", defaults = { weight = 0.25 },
  priority = function(age, score, uses)
    return e.min(uses, 3) - e.param "weight" * age + e.layer * 0.5 - e.kv_head
      + e.max(score, -100) * 0.125
  end }
local oldest = kv.eviction.define { name = "oldest",
  priority = function(age) return -age end }

-- The priority of a block by what the reference keeps of it, in one layer: h has uses,
-- age, score and predicted, at `at`.
local PLAIN = {
  lru = false, lfu = function(h, at) return h.uses[at] end,
  last_score = function(h, at) return h.score[at] end,
  predicted_score = function(h, at) return h.predicted[at] end,
  oldest = function(h, at) return -h.age[at] end,
  mixed = function(h, at, layer, head)
    return math.min(h.uses[at], 3) - 0.75 * h.age[at] + layer * 0.5 - head
      + math.max(h.score[at], -100) * 0.125
  end,
}
local NAMES = { "lru", "lfu", "last_score", "predicted_score", "oldest", "mixed" }

local function evict_of(name)
  if name == "mixed" then return mixed { weight = 0.75 } end
  return name == "oldest" and oldest() or name
end

--- A policy whose scores differ from step to step, in quarters, so that no sum of them is
-- rounded. It predicts at every third step, by other numbers.
local function random_policy(seed, heads)
  local function scores(_, ctx, salt)
    local rng = support.rng(seed + 100 * ctx.step + ctx.layer + salt)
    local list = {}
    for i = 1, ctx.seqs * heads * ctx.width do list[i] = rng(40) / 4 end
    return ctx:new_scores(heads):copy_(kv.from(ctx.device, "f32",
      { ctx.seqs, heads, ctx.width }, list))
  end
  return kv.policy.define { name = "random_scores", decode = true, eager = true,
    defaults = { blocks = 6, sink = 1, recent = 1 },
    score = function(self, ctx) return scores(self, ctx, 0) end,
    predict = function(self, ctx)
      return ctx.step % 3 == 0 and ctx:expect(scores(self, ctx, 50), self.budget, 4)
        or nil
    end } {}
end

--- Lets a reference follow the hot cache of a rig. Returns a function that compares them.
local function follow(its_rig, name)
  local hot, cache, steps = its_rig.cache.tier.hot, its_rig.cache, 0
  local of_layer, priority_of = {}, PLAIN[name]
  for layer = 0, LAYERS - 1 do
    local h = reference.new(KV_HEADS, cache.blocks, hot.slots)
    h.score, h.predicted, of_layer[layer] = {}, {}, h
    for i = 1, KV_HEADS * cache.blocks do
      h.score[i], h.predicted[i] = -math.huge, -math.huge
    end
  end
  local function keep(ctx, scores, ...)
    local list, tables, heads = scores:list(), ctx.tables:list(), scores:size(1)
    local h = of_layer[ctx.layer]
    for seq = 0, ctx.seqs - 1 do
      for head = 0, KV_HEADS - 1 do
        for b = 0, ctx.width - 1 do
          local block = tables[seq * ctx.width + b + 1]
          local row = seq * heads + (heads > 1 and head or 0)
          for _, kept in ipairs(block >= 0 and { ... } or {}) do
            h[kept][head * cache.blocks + block + 1] = list[row * ctx.width + b + 1]
          end
        end
      end
    end
  end
  local function resolve(ctx, selection, is_ahead)
    local h, priority = of_layer[ctx.layer], priority_of and {}
    for at = 1, priority and KV_HEADS * cache.blocks or 0 do
      priority[at] = priority_of(h, at, ctx.layer, math.floor((at - 1) / cache.blocks))
    end
    reference.resolve(h, { selection = selection:list(), is_ahead = is_ahead,
      selection_heads = selection:size(1), seqs = ctx.seqs, n = selection:size(2),
      tables = ctx.tables:list(), max_blocks = ctx.width, priority = priority })
    for _, field in ipairs { "slot_of", "block_of", "order" } do
      support.equal(hot[field]:index(ctx.layer), h[field], ("%s of layer %d, step %d, %s")
        :format(field, ctx.layer, steps, name))
    end
    reference.check(h)
    steps = steps + 1
  end
  local ctx = its_rig.attention.context
  local select, expect = ctx.select, ctx.expect
  ctx.select = function(context, scores, budget)
    if not context.is_prefill then keep(context, scores, "score", "predicted") end
    return select(context, scores, budget)
  end
  ctx.expect = function(context, scores, ...)
    keep(context, scores, "predicted")
    return expect(context, scores, ...)
  end
  its_rig.attention.probe = { observe = function(_, _, context, selection)
    if not context.is_prefill then resolve(context, selection, false) end
  end }
  local drop, bring_ahead = hot.drop, hot.bring_ahead
  hot.drop = function(self, layer, blocks)
    reference.drop(of_layer[layer], blocks:list())
    return drop(self, layer, blocks)
  end
  hot.bring_ahead = function(self, selection, context, wanted)
    bring_ahead(self, selection, context, wanted)
    self:join()
    resolve(context, selection, true)
  end
  return of_layer, function() return steps end
end

--- Sequences that begin, grow in turn, fork, and end.
local function script_of(seed)
  local rng, script = support.rng(seed), { { "prefill", 1, 180 }, { "prefill", 2, 90 } }
  for i = 1, 14 do
    local line = ({ { "decode", 1 }, { "decode", 2 }, { "decode", 1, 2 } })[1 + rng(3)]
    script[#script + 1] = line
    if i == 6 then script[#script + 1] = { "prefill", 2, 30 } end
    if i == 9 then
      script[#script + 1] = { "close", 2 }
      script[#script + 1] = { "prefill", 2, 70 }
    end
  end
  return script
end

local function play(dev, name, seed, heads, o)
  local given = { policy = random_policy(seed, heads), heads = 4 }
  for key, value in pairs(o or {}) do given[key] = value end
  local its_rig = rig.new(dev, given)
  local of_layer, steps
  if name then of_layer, steps = follow(its_rig, name) end
  local outs = rig.play(dev, { rig = its_rig }, script_of(seed))
  local hot = its_rig.cache.tier.hot
  local stats = hot and hot:stats()
  its_rig.cache:close()
  return outs, stats, of_layer, steps
end

local function check_device(dev)
  for i, name in ipairs(NAMES) do
    it(name .. " evicts what a plain reference evicts, and changes no result", function()
      for seed = 1, 2 do
        local heads = (seed + i) % 2 == 0 and 1 or KV_HEADS
        local want = play(dev, nil, seed, heads)
        local got, stats, of_layer, steps = play(dev, name, seed, heads,
          { offload = { hot_slots = 14, evict = evict_of(name) } })
        for s, outs in pairs(want) do
          for n, out in ipairs(outs) do -- a prompt comes through the ring, in parts
            local rounding = #out > 4 * rig.SHAPE.head_dim and 3e-6 or 0
            support.close(got[s][n], out, rounding, rounding,
              ("step %d of sequence %d"):format(n, s))
          end
        end
        assert.is_true(steps() > 30 and stats.evictions > 50)
        local counted = { 0, 0, 0 }
        for layer = 0, LAYERS - 1 do
          for k = 1, 3 do
            counted[k] = counted[k] + of_layer[layer].counters[k]
          end
        end
        assert.same({ stats.hits, stats.misses + stats.ahead.brought, stats.evictions },
          { counted[1] - (stats.ahead.predicted - stats.ahead.brought), counted[2],
            counted[3] })
      end
    end)
  end

  it("lru is what the age of blocks gives", function()
    local function order(evict)
      local its_rig = rig.new(dev, { policy = random_policy(5, 1), heads = 4,
        offload = { hot_slots = 14, evict = evict } })
      rig.play(dev, { rig = its_rig }, script_of(5))
      its_rig.cache.tier.hot:join() -- blocks are brought ahead on another stream
      local list = its_rig.cache.tier.hot.block_of:list()
      its_rig.cache:close()
      return list
    end
    assert.same(order "lru", order(oldest()))
    assert.same(order(nil), order "lru")
    assert.are_not.same(order "lru", order "lfu")
  end)

  it("gives the same in graphs that are replayed, drafts among them", function()
    for _, name in ipairs { "lfu", "last_score", "mixed" } do
      local function run(graph, draft)
        local policy = kv.policy("quest", { ratio = 0.3, sink = 1, recent = 1 })
        local engine = tiny.attentive(dev):engine { policy = policy, blocks = 220,
          draft_policy = draft and kv.policy("streaming_blocks", { ratio = 0.5 }) or nil,
          block_size = 4, chunk = 48, max_seqs = 2, max_blocks = 64, graph = graph,
          offload = { hot_slots = 40, slots = 2, slot_blocks = 2,
                      evict = evict_of(name) } }
        local pairs_of, tokens, text = { { 1, 2 }, { 3, 4 } }, {}, {}
        for i, length in ipairs { 220, 150, 190, 200 } do
          local prompt, seq = {}, engine:sequence()
          for t = 1, length do prompt[t] = t * (13 + 4 * i) % 97 end
          local pair = pairs_of[math.ceil(i / 2)]
          pair[2 - i % 2] = seq
          tokens[seq] = engine:prefill(seq, prompt):argmax():list()[1]
        end
        for step = 1, 12 do
          local seqs = pairs_of[1 + step % 2]
          local first, second = tokens[seqs[1]], tokens[seqs[2]]
          local says
          if draft then
            engine:draft(seqs, { 2, 2 }, { first, second })
            says = engine:verify(seqs, { 3, 3 }, { first, 0, 0, second, 0, 0 }, nil,
              { 2, 2 }):argmax():list()
            engine:take_back { 2, 2 }
            says[2] = says[4]
          else
            says = engine:decode(seqs, { first, second }):argmax():list()
          end
          tokens[seqs[1]], tokens[seqs[2]] = says[1], says[2]
          text[step] = says[1] .. " " .. says[2]
        end
        local hot = engine.cache.tier.hot
        local state, evictions = {}, hot:stats().evictions
        for _, field in ipairs { "counters", "block_of", "order" } do
          state[field] = table.concat(hot[field]:list(), " ")
        end
        for kept, values in pairs(hot.eviction.kept) do
          state[kept] = table.concat(values:list(), " ")
        end
        engine.cache:close()
        return table.concat(text, ", "), state, evictions
      end
      for _, draft in ipairs { false, true } do
        local text, state, evictions = run(false, draft)
        local text_replayed, state_replayed = run(true, draft)
        assert.equal(text, text_replayed)
        assert.is_true(evictions > 0)
        for field, values in pairs(state) do
          assert.is_true(values == state_replayed[field], name .. ": " .. field)
        end
      end
    end
  end)

  it("counts nothing of a draft", function()
    local engine = tiny.attentive(dev):engine {
      policy = kv.policy("quest", { ratio = 0.3, sink = 1, recent = 1 }),
      draft_policy = kv.policy("quest", { ratio = 0.5 }), blocks = 60, block_size = 4,
      chunk = 48, max_seqs = 1,
      offload = { hot_slots = 20, slots = 2, slot_blocks = 2, evict = mixed() } }
    local seq, prompt = engine:sequence(), {}
    for t = 1, 150 do prompt[t] = t * 17 % 97 end
    engine:prefill(seq, prompt)
    engine:decode({ seq }, { 5 })
    local function kept()
      local list = {}
      for _, name in ipairs { "uses", "age", "score" } do
        list[#list + 1] = table.concat(engine.cache.tier.hot.eviction.kept[name]:list(),
          " ")
      end
      return table.concat(list, "; ")
    end
    local before = kept()
    engine:draft({ seq }, { 3 }, { 7 })
    assert.is_true(before == kept())
    engine:verify({ seq }, { 4 }, { 7, 0, 0, 0 }, nil, { 3 })
    assert.is_true(before ~= kept())
    engine.cache:close()
  end)

  it("goes on after a step that failed, with counts that are whole", function()
    local policy = kv.policy("quest", { ratio = 0.3, sink = 1, recent = 1 })
    local engine = tiny.attentive(dev):engine { policy = policy, blocks = 60,
      block_size = 4, chunk = 48, max_seqs = 2,
      offload = { hot_slots = 20, slots = 2, slot_blocks = 2, evict = mixed() } }
    local seq, prompt = engine:sequence(), {}
    for t = 1, 150 do prompt[t] = t * 17 % 97 end
    engine:prefill(seq, prompt)
    local hot, finished, calls = engine.cache.tier.hot, policy.attention_finished, 0
    for step = 1, 12 do
      policy.attention_finished = step % 3 == 0 and function()
        calls = calls + 1
        if calls % 2 == 0 then error "the hook is broken" end
      end or finished
      local ok = pcall(engine.decode, engine, { seq }, { step })
      policy.attention_finished = finished
      if not ok then engine:decode({ seq }, { step }) end
    end
    local cache, at = engine.cache, 0
    local held, uses, age = hot.slot_of:list(), hot.eviction.kept.uses:list(),
      hot.eviction.kept.age:list()
    for i, slot in ipairs(held) do
      if slot >= 0 then
        at = at + 1
        assert.is_true(uses[i] >= 1 and uses[i] <= 16 and uses[i] % 1 == 0)
        assert.is_true(age[i] >= 0 and age[i] <= 16 and age[i] % 1 == 0)
      end
    end
    assert.is_true(calls > 0 and at > 0)
    cache:close()
  end)
end

support.each_device(function(dev)
  describe("evictions on " .. dev:name(), function() check_device(dev) end)
end)

describe("an eviction", function()
  local dev = kv.device "cpu"

  local function open(offload, policy)
    local cache = kv.cache { device = dev, format = "f32", layers = 1, blocks = 8,
      block_size = 4, kv_heads = 2, head_dim = 8, offload = offload }
    local ok, attention = pcall(kv.attention, { cache = cache, heads = 2,
      decode_policy = policy })
    if not ok then
      cache:close()
      error(attention, 0)
    end
    return cache, attention
  end

  local function hot(evict, policy)
    return open({ slots = 1, slot_blocks = 1, max_seqs = 1, hot_slots = 8,
      evict = evict }, policy)
  end

  it("is a file that is known by its name", function()
    assert.same({ "last_score", "lfu", "lru", "predicted_score" }, kv.eviction.names())
    assert.equal("lfu", kv.eviction("lfu").name)
  end)

  it("has the options that its file says, and no others", function()
    local own = mixed { weight = 3 }
    assert.equal(3, own.options.weight)
    support.raises("eviction mixed: \"wieght\" is no option, did you mean weight?", mixed,
      { wieght = 1 })
    support.raises('eviction mixed: weight is "x", expected a number', mixed,
      { weight = "x" })
    support.raises('eviction lfu: "weight" is no option; there are none', kv.eviction,
      "lfu", { weight = 1 })
  end)

  it("belongs to one cache", function()
    local own = mixed()
    local cache = hot(own)
    support.raises("eviction mixed belongs to another cache already", hot, own)
    cache:close()
  end)

  it("needs a hot cache", function()
    support.raises("offload: evict is given, but there is no hot cache of blocks, "
      .. "expected hot_slots", open, { slots = 1, evict = "lfu" })
    support.raises("evict is 3, expected the name of an eviction or what kv.eviction "
      .. "makes", hot, 3)
    support.raises("evict is a table, expected", hot, { name = "lfu" })
  end)

  it("is refused by name if there is none, or its file is wrong", function()
    support.raises('no eviction "lfuu"; did you mean "lfu"? There are last_score, lfu',
      hot, "lfuu")
    local folder = temporary.folder()
    files.make_folder(folder .. "/evictions")
    local command_line = require "kvlab.command_line"
    local before = command_line.path
    command_line.path = folder
    finally(function() command_line.path = before end)
    local function write(name, text)
      files.write(("%s/evictions/%s.lua"):format(folder, name), text)
      return name
    end
    support.raises("the eviction wrong_value: ", hot, write("wrong_value", "return 7"))
    support.raises("wrong_value.lua returns 7, expected what kv.eviction.define returns",
      hot, "wrong_value")
    support.raises("wrong_syntax.lua:1: ", hot, write("wrong_syntax", "return {"))
    local define = "local kv, e = require 'kvlab', require('kvlab').expr\n"
      .. "return kv.eviction.define "
    local function refused(name, text, words)
      support.raises(words, hot, write(name, define .. text))
    end
    refused("wrong_field", "{ name = 'x', priorty = 1 }",
      "eviction: \"priorty\" is no option, did you mean priority?")
    refused("wrong_parameter",
      "{ name = 'x', priority = function(hits) return hits end }",
      "eviction x: priority has a parameter hits, expected one of age, predicted, score, "
      .. "uses")
    refused("wrong_leaf",
      "{ name = 'x', priority = function(age) return age + e.block end }",
      "there is no block in a priority, which knows kv_head, layer")
    refused("wrong_const", "{ name = 'x', priority = function(age)\n"
      .. "return age + e.const('f32', 'c', 'kv_head') end }",
      "there is no c in a priority")
    refused("wrong_option",
      "{ name = 'x', priority = function(age) return age * e.param 'a' end }",
      "there is no option a that is a number")
    refused("wrong_constant", "{ name = 'x', priority = function() return e.layer end }",
      "eviction x: priority has no parameter")
    refused("wrong_result", "{ name = 'x', priority = function(age) return 1 end }",
      "fn returns 1, expected an expression")
    refused("wrong_default", "{ name = 'x', defaults = { a = 'b' } }",
      'eviction x: the default of a is "b", expected a number')
    write("right", define
      .. "{ name = 'right', priority = function(age) return age end }")
    hot("right"):close()
  end)

  it("refuses a policy that does not give what it reads", function()
    local newest = kv.policy.define { name = "newest", decode = true,
      select_blocks = function(_, ctx)
        return kv.zeros(dev, "i32", { ctx.seqs, 1, 1 })
      end }
    local function refused(words, evict, policy)
      local cache, attention = hot(evict, policy)
      local batch, seq = cache:batch { max_seqs = 1 }, cache:sequence()
      batch:append({ seq }, { 1 })
      attention:begin(batch, false)
      local q = kv.zeros(dev, "f32", { 1, 2, 8 })
      support.raises(words, attention.forward, attention, 0, q, q, q)
      cache:close()
    end
    refused("the eviction last_score needs scores, but policy newest selects without "
      .. "scores in layer 0", "last_score", newest {})
    refused("the eviction predicted_score reads what the policy predicts, but quest has "
      .. "no predict", "predicted_score", kv.policy "quest")
  end)

  it("that decides leaves no room for priorities that a policy writes", function()
    local cache = hot "lfu"
    support.raises('use_priority: the eviction lfu decides what leaves, expected evict = '
      .. '"lru"', cache.tier.hot.use_priority, cache.tier.hot)
    cache:close()
    cache = hot "lru"
    assert.same({ 1, 2, 8 }, cache.tier.hot:use_priority():dims())
    cache:close()
  end)

  it("allocates nothing where the least recently used block leaves", function()
    local cache = hot "lru"
    assert.is_nil(cache.tier.hot.eviction)
    cache:close()
  end)
end)
