--- Decode steps of several new tokens for a sequence, and tokens that are taken back:
-- what every policy owes, through every memory tier.
local kv = require "kvlab"
local rig = require "spec.rig"
local support = require "spec.support"
local tried = require "spec.tried_policies"

-- So small that a ring and a hot cache take the rows of some steps in parts.
local TIERS = {
  resident = {},
  ring = { offload = { slots = 2, slot_blocks = 1 } },
  hot = { offload = { hot_slots = 128 } },
  overlap = { offload = { hot_slots = 128, hot_overlap = true } },
}
local NAMES = { "hot", "overlap", "resident", "ring" }

local EXTRA = { layers = { dense = 1 } }

-- Rows of one step see neither what the rows before them add to a tally, nor, where a
-- policy normalises over all blocks or does not select the open block, the summary of an
-- open block without the later rows' keys.
local SEQUENTIAL = { quest = true, block_mean = true, oracle = true, mass_oracle = true,
  streaming_blocks = true, layers = true, union = true, full = true, infllm = true,
  gsa_on_device = true, keydiff_blocks = true, snapkv_blocks = true, nsa = true }

--- Whether a policy is one of these, or one of one's own that is a score alone, made of
-- an expression, and always selects the open block.
local function is_sequential(name)
  if SEQUENTIAL[name] or name ~= tried.own then return SEQUENTIAL[name] end
  local policy = kv.policy(name)
  return policy.expressions.score and not tried.may_read_all(name)
    and not policy.step_begin and (policy.recent or 0) > 0
end

local function options_of(name, o)
  local all = {}
  for key, value in pairs(EXTRA[name] or {}) do all[key] = value end
  for key, value in pairs(o) do all[key] = value end
  return all
end

-- Policies whose selection hangs on everything that they keep of a sequence.
local OWN = {}

-- Blocks that were selected least often come first.
OWN.shy = kv.policy.define {
  name = "shy", decode = true, defaults = { ratio = 0.2 },
  init = function(self, shape) self.counts = kv.tally(shape) end,
  step_begin = function(self, ctx) self.counts:begin(ctx) end,
  select_blocks = function(self, ctx)
    local selection, counts = ctx:select(self.counts:load(ctx):neg(ctx:new_scores()),
      self.budget)
    self.counts:count(ctx, ctx:mark(selection))
    return selection, counts
  end,
}

-- Like shy, but its scores read keys, too.
OWN.fickle = kv.policy.define {
  name = "fickle", decode = true, defaults = { ratio = 0.2 },
  init = function(self, shape)
    self.bounds, self.counts = kv.summary.minmax(shape), kv.tally(shape)
  end,
  on_prefill_offload = function(self, ev) self.bounds:update(ev) end,
  on_decode_offload = function(self, ev) self.bounds:update(ev) end,
  step_begin = function(self, ctx) self.counts:begin(ctx) end,
  select_blocks = function(self, ctx)
    local scores = kv.ops.score_minmax(ctx.query, self.bounds, ctx)
    local selection, counts = ctx:select(scores:sub(self.counts:load(ctx), scores),
      self.budget)
    self.counts:count(ctx, ctx:mark(selection))
    return selection, counts
  end,
}

-- Scores by every third query, for two tokens more.
OWN.lazy = kv.policy.define {
  name = "lazy", decode = true, eager = true, defaults = { ratio = 0.2 },
  init = function(self, shape)
    self.means, self.kept = kv.summary.mean(shape), kv.tally(shape, nil, -math.huge)
  end,
  on_prefill_offload = function(self, ev) self.means:update(ev) end,
  on_decode_offload = function(self, ev) self.means:update(ev) end,
  step_begin = function(self, ctx)
    self.kept:begin(ctx)
    self.kept:due(ctx, 3)
  end,
  score = function(self, ctx)
    return self.kept:renew(ctx, function(_, c)
      return kv.ops.score_mean(c.query, self.means, c)
    end, self)
  end,
}

-- Puts a number for each block that a step finds full.
OWN.strict = kv.policy.define {
  name = "strict", decode = true, defaults = { ratio = 0.2 },
  init = function(self, shape) self.numbers = kv.tally(shape) end,
  step_begin = function(self, ctx)
    self.numbers:begin(ctx)
    for _, seq in ipairs(ctx.sequences) do
      local n = math.floor(seq:length() / ctx.block_size)
      for layer = 0, n > 0 and ctx.layers - 1 or -1 do
        self.numbers:put(seq, layer, kv.rand(ctx.device, "f32",
          { ctx.kv_heads, n }, { seed = seq:length() }), true)
      end
    end
  end,
  score = function(self, ctx) return self.numbers:load(ctx) end,
}

--- Plays a script with a policy; the outputs of each sequence, step after step.
local function play(dev, name, tier, script, o)
  local all = { policy = name, options = options_of(name, o or { ratio = 0.3 }) }
  if OWN[name] then all.policy, all.options = OWN[name](o or {}), nil end
  for key, value in pairs(TIERS[tier]) do all[key] = value end
  local outs, its_rig = rig.play(dev, all, script)
  its_rig.cache:close()
  return outs
end

local function close(out, want, within, what)
  assert.equal(#want, #out, what)
  for i = 1, #want do
    local difference = math.abs(out[i] - want[i])
    local is_close = difference <= within * (1 + math.abs(want[i]))
    if not is_close then
      error(("%s: number %d is %.9g, expected %.9g"):format(what, i, out[i], want[i]), 2)
    end
  end
end

local function equal(out, want, what)
  assert.equal(#want, #out, what)
  for i = 1, #want do
    if out[i] ~= want[i] then
      error(("%s: number %d is %.9g, expected %.9g"):format(what, i, out[i], want[i]), 2)
    end
  end
end

--- The lists of numbers, one after the other.
local function joined(lists, first, last)
  local all = {}
  for i = first, last do
    for _, x in ipairs(lists[i]) do all[#all + 1] = x end
  end
  return all
end

local function complete_of(name)
  return (OWN[name] and OWN[name] {} or kv.policy(name)).complete
end

local function decode_policies()
  local list = {}
  for _, name in ipairs(tried.names "decode") do list[#list + 1] = name end
  for name in pairs(tried.own and {} or OWN) do list[#list + 1] = name end
  table.sort(list)
  return list
end

--- The specs on a device. within: of outputs up to about 1, summed in another order.
local function specs(dev, tags, within)
  local dense -- what full attention gives, once for all policies
  for nth, name in ipairs(decode_policies()) do
    local tiers = support.one_each(NAMES, nth, not tried.own and 1)
    describe("policy " .. name .. " in a decode step of several tokens #policy" .. tags,
      function()
      local PROMPTS = { { "prefill", 1, support.is_hostile and 120 or 250 },
                        { "prefill", 2, 61 } }

      local function script(...)
        return { PROMPTS[1], PROMPTS[2], ... }
      end

      it("equals dense attention when the budget is everything", function()
        local complete = complete_of(name)
        if complete == false then return end
        local all = { ratio = 1 }
        for key, value in pairs(complete or {}) do all[key] = value end
        local steps = script({ "verify", { 5, 9 }, 1, 2 }, { "verify", { 1, 4 }, 1, 2 })
        dense = dense or play(dev, "full", "resident", steps, {})
        for _, tier in ipairs(tiers) do
          local outs = play(dev, name, tier, steps, all)
          for s = 1, 2 do
            close(joined(outs[s], 2, 3), joined(dense[s], 2, 3), within, tier)
          end
        end
      end)

      it("gives what it gives in steps of one token", function()
        if not is_sequential(name) then return end
        local one = script()
        for _ = 1, 5 do one[#one + 1] = { "decode", 1, 2 } end
        local several = script({ "verify", { 3, 3 }, 1, 2 }, { "verify", { 2, 2 }, 1, 2 })
        for _, tier in ipairs(tiers) do
          local want, out = play(dev, name, tier, one), play(dev, name, tier, several)
          for s = 1, 2 do
            close(joined(out[s], 2, 3), joined(want[s], 2, 6), within, tier)
          end
        end
      end)

      it("gives the same through every memory tier", function()
        local steps = script({ "verify", { 4, 7 }, 1, 2 }, { "decode", 1, 2 },
          { "verify", { 18, 1 }, 1, 2 })
        local want = play(dev, name, "resident", steps)
        for _, tier in ipairs { "ring", "hot", "overlap" } do
          local out = play(dev, name, tier, steps)
          for s = 1, 2 do
            close(joined(out[s], 2, 4), joined(want[s], 2, 4), within, tier)
          end
        end
      end)

      --- Compares a script in which tokens are taken back with one that never had them.
      local function check_taken(tier, back, o)
        local n, kept = { 20, 6 }, { 20 - back[1], 6 - back[2] }
        local taken = script({ "verify", { 2, 2 }, 1, 2 }, { "verify", n, 1, 2 },
          { "take_back", back })
        local never = script({ "verify", { 2, 2 }, 1, 2 })
        if kept[1] > 0 then never[4] = { "verify", kept, 1, 2 } end
        for _, line in ipairs { { "decode", 1, 2 }, { "verify", { 3, 9 }, 1, 2 },
                                { "decode", 2 }, { "decode", 1 }, { "decode", 1, 2 } } do
          taken[#taken + 1], never[#never + 1] = line, line
        end
        local out, want = play(dev, name, tier, taken, o), play(dev, name, tier, never, o)
        for s = 1, 2 do
          local what = ("%s %s, sequence %d, %d back"):format(name, tier, s, back[s])
          for i = 0, 3 do
            local a, b = out[s][#out[s] - i], want[s][#want[s] - i]
            -- hits and misses are attended to by themselves, and their parts differ
            if tier == "overlap" then close(a, b, within, what) else equal(a, b, what) end
          end
        end
      end

      it("is as if tokens that are taken back had never been", function()
        local less = { ratio = 0.1, sink = 0, recent = 0, min_blocks = 0 }
        local some, none, all = { 3, 2 }, { 0, 4 }, { 20, 6 }
        local cases = {}
        for _, tier in ipairs(tiers) do
          for _, back in ipairs { some, none, all } do
            for _, is_less in ipairs { false, name ~= "full" or nil } do
              cases[#cases + 1] = { tier = tier, back = back, is_less = is_less }
            end
          end
        end
        for _, c in ipairs(support.sample(cases, not tried.own)) do
          check_taken(c.tier, c.back, c.is_less and less or nil)
        end
      end)
    end)
  end

  describe("a decode step of several tokens" .. tags, function()
    it("shows a policy each token as a sequence of its own", function()
      local seen, taken = {}, {}
      local make = kv.policy.define {
        name = "looker", decode = true, defaults = { ratio = 0.5 },
        step_begin = function(_, ctx)
          for i, seq in ipairs(ctx.sequences) do seen[i] = { begin = seq:length() } end
        end,
        score = function(_, ctx)
          assert.equal(ctx.seqs, ctx.query:size(0))
          assert.same({ ctx.seqs, ctx.width }, ctx.tables:dims())
          local lens = ctx.lens:list()
          for i, seq in ipairs(ctx.sequences) do
            assert.equal(lens[i], seq:length())
            assert.equal(math.ceil(lens[i] / 16), seq:blocks())
            assert.equal(seq:blocks(), #seq:table())
            assert.equal(seq.base.state, seq.state)
            seen[i].length, seen[i].base = seq:length(), seq.base:length()
          end
          return ctx:new_scores(1):arange_()
        end,
        take_back = function(_, seq, tokens)
          taken[#taken + 1] = { seq:length(), tokens }
        end,
      }
      local _, its_rig = rig.play(dev, { policy = make {} }, { { "prefill", 1, 30 },
        { "prefill", 2, 7 }, { "verify", { 3, 2 }, 1, 2 }, { "take_back", { 2, 0 } } })
      assert.same({ { begin = 31, length = 31, base = 33 },
        { begin = 31, length = 32, base = 33 }, { begin = 31, length = 33, base = 33 },
        { begin = 8, length = 8, base = 9 }, { begin = 8, length = 9, base = 9 } }, seen)
      assert.same({ { 31, 2 } }, taken)
      its_rig.cache:close()
    end)

    it("is observed by a probe, which counts what its attention reads once", function()
      for name, most in pairs { full = 1 / 4, quest = 0.75 } do
        local its_rig = rig.new(dev, { policy = name,
          options = name ~= "full" and { ratio = 0.3 } or nil })
        local probe = kv.probe(its_rig.attention)
        rig.play(dev, { rig = its_rig },
          { { "prefill", 1, 250 }, { "verify", { 4 }, 1 } })
        local metrics = probe:metrics()
        assert.is_true(metrics.blocks_share > 0 and metrics.blocks_share <= most)
        assert.is_true(metrics.attention_mass > 0.1 and metrics.attention_mass < 1.001)
        if name == "full" then assert.is_true(metrics.output_error < 1e-5) end
        its_rig.cache:close()
      end
    end)

    it("equals a prefill of the same tokens", function()
      for _, tier in ipairs(NAMES) do
        local first = { "prefill", 1, 100 }
        local want = play(dev, "full", tier, { first, { "prefill", 1, 70 } }, {})
        local out = play(dev, "full", tier, { first, { "verify", { 70 }, 1 } }, {})
        close(out[1][2], want[1][2], within, tier)
      end
    end)
  end)
end

specs(kv.device "cpu", "", 3e-6)
if kv.cuda_available() then specs(kv.device "cuda", " on cuda #gpu", 1e-5) end
