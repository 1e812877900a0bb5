--- How tokens are chosen: the chances after each filter are those of transformers
-- (tools/sampling_goldens.py), and tokens are drawn as often as these chances say.
-- Tolerance of chances: f32 on both sides, sums in another order: 2e-6.
local json = require "kvlab.json"
local kv = require "kvlab"
local sampler = require "kvlab.serve.sampler"
local support = require "spec.support"

local TOLERANCE = 2e-6

local function read(path)
  local file = assert(io.open(kv.paths.root .. path))
  local fields = json.decode(file:read "*a")
  file:close()
  return fields
end

local golden = read "/spec/data/sampling/filters.json"

--- What the sampler reads of a request, with `n` tokens of output.
local function request(options, n, tokens)
  tokens = tokens or golden.seen
  return { choice = sampler.take(options), tokens = tokens, num_tokens = #tokens,
           output_length = function() return n or 0 end }
end

local function row(i)
  local list = {}
  for at, x in ipairs(golden.logits[i]) do
    list[at] = x == json.null and -math.huge or x
  end
  return list
end

local function drawn_options(options)
  local o = { temperature = 1 }
  for name, value in pairs(options) do o[name] = value end
  return o
end

support.each_device(function(dev)
  describe("chances of tokens on " .. dev:name(), function()
    local function compare(got, case, what)
      for id, wanted in ipairs(case.chances) do
        assert.near(wanted, got[id], TOLERANCE, what .. ", token " .. id - 1)
        assert.equal(wanted == 0, got[id] == 0, what .. ", token " .. id - 1)
      end
    end

    it("after every filter and combination are those of transformers", function()
      assert.is_true(#golden.cases >= 80)
      for _, case in ipairs(golden.cases) do
        local logits = kv.from(dev, "f32", { row(case.row + 1) })
        local list, before = { request(drawn_options(case.options)) }, logits:list()
        compare(sampler.chances(logits, list):list(), case, json.encode(case.options))
        assert.same(before, logits:list()) -- they stay as they are
      end
    end)

    local EXTREMES = { 5e-324, 1e-60, 1e-45, 1e-38, 2 ^ -126, 1e-20, 1e20, 3e38, 1e39,
                       1e300 }
    local LOGITS = { -1, 3, 5, -math.huge, 5 - 1e-6, 0, -2 }

    --- The probabilities of LOGITS' tokens with one option at an extreme value, after a
    -- prompt that holds every token.
    local function extreme(name, value)
      local o = drawn_options { [name] = value }
      local r = request(o, 0, { 0, 1, 2, 3, 4, 5, 6 })
      return sampler.chances(kv.from(dev, "f32", { LOGITS }), { r }):list(), o, r
    end

    it("add up to 1 however small or large an option is", function()
      for _, name in ipairs { "temperature", "top_p", "min_p", "repetition_penalty" } do
        for _, value in ipairs(EXTREMES) do
          if value <= 1 or name == "temperature" or name == "repetition_penalty" then
            local chances, sum = extreme(name, value), 0
            for _, chance in ipairs(chances) do sum = sum + chance end
            assert.near(1, sum, 1e-5, ("%s = %g"):format(name, value))
            assert.equal(0, chances[4], name)
          end
        end
      end
    end)

    it("are all on the likeliest token where temperature or top_p is tiny", function()
      for _, value in ipairs { 5e-324, 1e-60, 1e-45, 1e-38 } do
        assert.same({ 0, 0, 1, 0, 0, 0, 0 }, (extreme("temperature", value)))
        assert.same({ 0, 0, 1, 0, 0, 0, 0 }, (extreme("top_p", value)))
        local _, o, r = extreme("temperature", value)
        assert.equal(value, o.temperature)
        assert.same({ 2 }, (sampler.choose(kv.from(dev, "f32", { LOGITS }), { r })))
      end
      assert.near(1 / 6, extreme("temperature", 1e300)[1], 1e-5)
    end)

    it("are the same in a batch with others", function()
      for first = 1, #golden.cases, 8 do
        local rows, list = {}, {}
        for i = first, math.min(first + 7, #golden.cases) do
          rows[#rows + 1] = row(golden.cases[i].row + 1)
          list[#list + 1] = request(drawn_options(golden.cases[i].options))
        end
        local got = sampler.chances(kv.from(dev, "f32", rows), list)
        for i = 1, #list do
          local case = golden.cases[first + i - 1]
          compare(got:index(i - 1):list(), case, json.encode(case.options))
        end
      end
    end)

    for _, n in ipairs { 5000, 20000 } do
      it(("have a top_p beyond the first tokens of %d"):format(n), function()
        local x = kv.randn(dev, "f32", { 3, n }, { seed = 3, std = 0.5 })
        local sorted = x:softmax():sort(true):index(0):list()
        local sum, count = 0, 0
        while sum < 0.9 do
          count = count + 1
          sum = sum + sorted[count]
        end
        assert.is_true(count > 2000)
        local got = sampler.chances(x, { request { temperature = 1, top_p = 0.9 },
          request { temperature = 1, top_p = 0.01 },
          request { temperature = 1, top_p = 0.5, top_k = 100 } })
        local kept = got:gt(0):cast("f32"):sum(-1):list()
        assert.is_true(math.abs(kept[1] - count) <= 1) -- the last one by rounding
        assert.is_true(kept[2] < 100 and kept[3] < 100)
        for i = 0, 2 do assert.near(1, got:index(i):sum():item(), 1e-5) end
      end)
    end

    -- What top_p keeps by its definition: the fewest of the best tokens that have this
    -- mass together, and those that are equal to the last one. In double; returns how
    -- many, and how near the sum came to top_p on either side of the last one.
    local known = {} -- by logits: what is the same for every top_p
    local function kept_by_definition(x, top_p)
      local sorted, total = unpack(known[x] or {})
      if not sorted then
        local negative = (-x):list() -- a function that compares takes 10 times as long
        table.sort(negative)
        sorted, total = {}, 0
        for i, v in ipairs(negative) do
          sorted[i] = math.exp(-v)
          total = total + sorted[i]
        end
        known[x] = { sorted, total }
      end
      local sum, count = 0, 0
      while sum < top_p * total do
        count = count + 1
        sum = sum + sorted[count]
      end
      local before = top_p * total - (sum - sorted[count])
      local margin = math.min(sum - top_p * total, before) / total
      while sorted[count + 1] == sorted[count] do count = count + 1 end
      return count, margin
    end

    it("have the top_p of flat distributions over a whole vocabulary", function()
      local n = 49152
      local steps = {}
      for i = 1, n do steps[i] = -((i * 7919) % n % 64) / 64 end
      local kinds = { kv.zeros(dev, "f32", { 1, n }), kv.from(dev, "f32", { steps }),
        kv.randn(dev, "f32", { 1, n }, { seed = 3, std = 0.01 }),
        kv.randn(dev, "f32", { 1, n }, { seed = 4, std = 1 }) }
      for _, top_p in ipairs { 0.015, 0.1, 0.501, 0.9, 0.97, 0.999, 0.999999 } do
        local rows, list = kv.tensor(dev, "f32", { 4, n }), {}
        for i, x in ipairs(kinds) do
          rows:narrow(i - 1, 1):copy_(x)
          list[i] = request { temperature = 1, top_p = top_p }
        end
        local got = sampler.chances(rows, list)
        local kept = got:gt(0):cast("f32"):sum(-1):list()
        for i, x in ipairs(kinds) do
          local count, margin = kept_by_definition(kinds[i], top_p)
          -- sums of f32 are right to 1e-6 of all mass, as many tokens may be off
          local most = margin < 1e-6 and math.ceil(1e-6 * n * 4) or 0
          assert.is_true(math.abs(kept[i] - count) <= most,
            ("kind %d, top_p %g: %d kept, %d by definition"):format(i, top_p, kept[i],
            count))
          local alone = sampler.chances(x, { list[i] })
          assert.equal(kept[i], alone:gt(0):cast("f32"):sum():item())
        end
        for i = 0, 3 do assert.near(1, got:index(i):sum():item(), 1e-5) end
      end
    end)

    it("stay finite at the lowest temperature", function()
      local logits = kv.from(dev, "f32", { { 1, 5, 3, -math.huge } })
      assert.same({ 0, 1, 0, 0 },
        sampler.chances(logits, { request { temperature = 1e-38 } }):list())
    end)
  end)

  describe("tokens on " .. dev:name(), function()
    -- 0.9999 of chi-square with 20 degrees of freedom; the seeds are fixed.
    local DEGREES, MOST = 20, 52.4

    --- Draws once for each of n seeds, and compares how often each token came.
    local function check(options, logits, n, more)
      local chances = sampler.chances(kv.from(dev, "f32", { logits }),
        { request(drawn_options(options)) }):list()
      local rows, counts = {}, {}
      for i = 1, 64 do rows[i] = logits end
      rows = kv.from(dev, "f32", rows)
      for first = 1, n, 64 do
        local list = {}
        for i = 1, 64 do
          local o = drawn_options(options)
          o.seed = more and 7 or first + i
          list[i] = request(o, more and first + i or 0)
        end
        for _, id in ipairs((sampler.choose(rows, list))) do
          counts[id] = (counts[id] or 0) + 1
        end
      end
      local sum, total = 0, 0
      for id, chance in ipairs(chances) do
        local count = counts[id - 1] or 0
        total = total + count
        if chance == 0 then assert.equal(0, count)
        else sum = sum + (count - n * chance) ^ 2 / (n * chance) end
      end
      assert.equal(n, total)
      assert.is_true(sum < MOST, ("chi-square %.1f"):format(sum))
    end

    local logits = {}
    for i = 1, DEGREES + 1 do logits[i] = math.sin(i * 1.7) * 1.5 end

    it("come as often as their chances, over seeds", function()
      check({}, logits, 16384)
      check({ temperature = 0.8, top_k = 12, min_p = 0.05 }, logits, 8192)
      check({ top_p = 0.8, repetition_penalty = 1.5 }, logits, 8192)
    end)

    it("come as often as their chances, over the tokens of one seed", function()
      check({}, logits, 16384, true)
    end)

    it("are the same for a seed, alone and beside others", function()
      local x = kv.randn(dev, "f32", { 6, 300 }, { seed = 1, std = 2 })
      local kinds = { { temperature = 1, seed = 4 }, { temperature = 0.5, top_k = 9 }, {},
        { temperature = 1, top_p = 0.7, seed = 2 }, { repetition_penalty = 3 },
        { temperature = 2, min_p = 0.01, repetition_penalty = 1.2, seed = 9 } }
      for n = 0, 200, 50 do
        local list = {}
        for i, o in ipairs(kinds) do list[i] = request(o, n) end
        local all = sampler.choose(x, list)
        for i, o in ipairs(kinds) do
          local alone = sampler.choose(x:narrow(i - 1, 1), { request(o, n) })
          assert.equal(all[i], alone[1], i)
        end
      end
    end)

    it("are the likeliest where nothing else is asked for", function()
      local x = kv.randn(dev, "f32", { 3, 50 }, { seed = 1 })
      local likeliest = x:argmax():list()
      assert.same(likeliest, (sampler.choose(x, { {}, {}, {} })))
      assert.same(likeliest, (sampler.choose(x, { {}, request { logprobs = 0 },
        request { temperature = 0, top_p = 0.1 } })))
      assert.same(likeliest, (sampler.choose(x, { {}, request { seed = 3 },
        request { temperature = 1, top_k = 1 } })))
    end)

    it("are none of logits that hold NaN or inf, or that are all -inf", function()
      local n = 5000
      local kinds = { {}, request {}, request { temperature = 1, seed = 3 },
        request { temperature = 0.7, top_k = 20 },
        request { temperature = 1, top_p = 0.9 },
        request { temperature = 1, min_p = 0.1 }, request { repetition_penalty = 2 },
        request { temperature = 1, top_k = 9, top_p = 0.5, min_p = 0.1, logprobs = 2,
                  repetition_penalty = 1.3 }, request { logprobs = 0 } }
      local good = kv.randn(dev, "f32", { #kinds, n }, { seed = 2, std = 2 })
      local ids, _, none = sampler.choose(good, kinds)
      assert.is_nil(none)
      for words, value in pairs { ["hold NaN"] = 0 / 0, ["hold inf"] = math.huge,
                                  ["are all -inf"] = -math.huge } do
        for i = 1, #kinds do
          for _, at in ipairs { 0, 1234, n - 1 } do
            local x = good:clone()
            local its = x:index(i - 1)
            if words ~= "are all -inf" then its = its:narrow(at, 1) end
            its:fill_(value)
            local got, _, wrong = sampler.choose(x, kinds)
            assert.same({ [i] = words }, wrong)
            for j = 1, #kinds do assert.equal(i == j and -1 or ids[j], got[j]) end
            local own, _, own_wrong = sampler.choose(x:narrow(i - 1, 1), { kinds[i] })
            assert.same({ -1 }, own)
            assert.same({ words }, own_wrong)
            x:free()
          end
        end
      end
      good:narrow(0, 1):reshape { n }:narrow(5, 4990):fill_(-math.huge) -- some may be
      local _, _, wrong = sampler.choose(good, kinds)
      assert.is_nil(wrong)
    end)

    it("have the log-probabilities of the model, before all filters", function()
      local x = kv.randn(dev, "f32", { 2, 50 }, { seed = 1 })
      local ids, logprobs = sampler.choose(x, { request { temperature = 3, seed = 5,
        top_k = 30, repetition_penalty = 2, logprobs = 4 }, {} })
      local all = x:softmax():log():index(0):list()
      assert.is_nil(logprobs[2])
      assert.near(all[ids[1] + 1], logprobs[1].logprob, 1e-5)
      assert.equal(4, #logprobs[1].top)
      table.sort(all, function(a, b) return a > b end)
      for i, one in ipairs(logprobs[1].top) do assert.near(all[i], one.logprob, 1e-5) end
    end)

    it("cost no allocation from the device once a step has been made", function()
      local x = kv.randn(dev, "f32", { 3, 3000 }, { seed = 1 })
      local list = { request { temperature = 1, top_p = 0.9, logprobs = 2 },
        request({ temperature = 1, top_k = 9, min_p = 0.1, repetition_penalty = 2 }, 5),
        {} }
      collectgarbage "stop" -- which may hold what a scope would give back at once
      for _ = 1, 3 do sampler.choose(x, list) end
      local before = dev:stats().allocations
      for _ = 1, 10 do sampler.choose(x, list) end
      collectgarbage "restart"
      assert.equal(before, dev:stats().allocations)
    end)
  end)
end)
