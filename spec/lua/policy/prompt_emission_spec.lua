--- What a policy emits in a prefill, through every memory tier, in chunks, for several
-- sequences and beside other policies. The numbers of one step:
-- spec/lua/kernel/hook_spec.lua.
local kv = require "kvlab"
local policy = require "kvlab.policy.policy"
local rig = require "spec.rig"

local e = kv.expr
-- Of sums over up to 70 queries. A GPU multiplies other parts of f32 numbers than its
-- attention does.
local TOLERANCE = { cpu = 2e-5, cuda = 1e-4 }
local ROOM = 32 -- blocks of a sequence

local TIERS = {
  resident = {},
  ["a ring that holds the prompt"] = { offload = { slots = 8 } },
  ["a ring that reads the prompt twice"] = { offload = { slots = 2, slot_blocks = 1 } },
  ["a ring beside a hot cache"] = { offload = { slots = 2, slot_blocks = 2,
                                                hot_slots = 96 } },
}

local MASS = { mass = e.weight:sum "token":mean "head",
               most = e.weight:max("token", "head"),
               read = e.tokens:gt(0):cast "f32",
               of_token = e.weight:mean "head",
               top = e.weight:max("token", "head"):max "query",
               top_of_token = (e.weight:max "head" - e.index):max "query" }
local IS_MAX = { top = true, top_of_token = true }

--- Joins a step's emitted numbers with sums[i][name], a list [kv_heads, ROOM] of blocks
-- or of their tokens; i counts the sequences in the order in which they came.
local function add_emitted(self, ctx)
  for row, seq in ipairs(ctx.sequences) do
    seq = seq.base or seq
    if not self.number[seq] then
      self.sums[#self.sums + 1] = {}
      self.number[seq] = #self.sums
    end
    local sums = self.sums[self.number[seq]]
    for name, t in pairs(self.emitted) do
      local values, width, is_max = t:list(), t:size(2), IS_MAX[name]
      local room, nothing = ROOM * width / ctx.width, is_max and -math.huge or 0
      sums[name] = sums[name] or {}
      for head = 0, ctx.kv_heads - 1 do
        for cell = 0, room - 1 do
          local at = head * room + cell + 1
          local old, new = sums[name][at] or nothing, cell < width
            and values[((row - 1) * ctx.kv_heads + head) * width + cell + 1] or nothing
          sums[name][at] = is_max and math.max(old, new) or not is_max and old + new
        end
      end
    end
  end
end

--- A policy that reads all blocks, watches the prompt, and adds up what is emitted in a
-- layer (the last).
local function watcher(fields)
  local def = { name = "watcher", decode = true, watches_prompt = true, complete = false,
    emit = MASS, select_blocks = function() end }
  for key, value in pairs(fields or {}) do def[key] = value end
  def.attention_finished = function(self, ctx)
    if ctx.layer == (self.layer or 1) then add_emitted(self, ctx) end
  end
  local p = policy.define(def) {}
  p.sums, p.number = {}, {}
  return p
end

local function merged(a, b)
  local all = {}
  for key, value in pairs(a) do all[key] = value end
  for key, value in pairs(b) do all[key] = value end
  return all
end

--- The sums of a watcher after a script of rig.play, and the rig.
local function play(dev, o, script, fields)
  local p = watcher(fields)
  o = merged(o, { policy = p })
  if fields and fields.prefill then o.prefill_policy = p end
  local _, r = rig.play(dev, o, script)
  return p.sums, r
end

local function expect_close(got, want, what, tolerance)
  assert.equal(#want, #got)
  for i, sums in ipairs(want) do
    for name, list in pairs(sums) do
      for k, x in ipairs(list) do
        local y = got[i][name][k]
        local is_near = x == y
          or math.abs(x - y) <= tolerance * math.max(1, math.abs(x))
        if not is_near then
          error(("%s: %s %d of sequence %d is %.8g, expected %.8g"):format(what or "sums",
            name, k, i, y, x), 2)
        end
      end
    end
  end
end

--- One token after the other: what a prefill's emission is to be the same as.
local function decoded(lengths)
  local script = {}
  for s, length in ipairs(lengths) do
    for _ = 1, length do script[#script + 1] = { "decode", s } end
  end
  return script
end

local LENGTHS = { 70, 33, 1 }
local WHOLE = { { "prefill", 1, 70 }, { "prefill", 2, 33 }, { "prefill", 3, 1 } }
local TOGETHER = { { "chunks", 1, 1, 2, 3 }, { "chunks", 32, 1, 2 },
                   { "prefill", 1, 37 } }
local CHUNKS = { { "prefill", 1, 20 }, { "prefill", 2, 16 }, { "prefill", 1, 45 },
                 { "prefill", 2, 17 }, { "prefill", 1, 1 }, { "prefill", 3, 1 },
                 { "prefill", 1, 4 } }

-- The last chunk has 18 blocks before it, which do not fit in the slots of every tier.
local LONG = { { "prefill", 1, 288 }, { "prefill", 1, 30 }, { "prefill", 2, 20 } }

local function slopes(dev)
  local list = {}
  for i = 1, rig.SHAPE.heads do list[i] = 2 ^ -i end
  return kv.from(dev, "f32", { rig.SHAPE.heads }, list)
end

local function specs(dev_name)
  local dev = kv.device(dev_name)
  local function close(got, want, what)
    expect_close(got, want, what, TOLERANCE[dev_name])
  end
  local wanted = {}

  --- What decode steps of single tokens emit, on the device.
  local function of_decode(key, fields)
    wanted[key] = wanted[key] or play(dev, {}, decoded(LENGTHS), fields)
    return wanted[key]
  end

  for name, tier in pairs(TIERS) do
    it("is the sum of what decode steps emit, through " .. name, function()
      local want = of_decode "plain"
      close(play(dev, tier, WHOLE), want, "whole")
      close(play(dev, tier, CHUNKS), want, "in chunks")
      close(play(dev, tier, TOGETHER), want, "together")
      wanted.long = wanted.long or play(dev, {}, LONG)
      close(play(dev, tier, LONG), wanted.long, "long")
    end)

    it("knows bias, mask and log_weight, through " .. name, function()
      local fields = { prefill = true, defaults = { far = 0.02 },
        bias = (e.position - e.query_position) * e.param "far",
        mask = (e.position % 5):ne(3), log_weight = e.kv_head * 0.5 }
      local want = of_decode("hook", fields)
      close(play(dev, tier, WHOLE, fields), want, "whole")
      close(play(dev, tier, CHUNKS, fields), want, "in chunks")
    end)

    it("knows a selection of the prefill's policy, through " .. name, function()
      local fields = { prefill = true, defaults = { blocks = 2, sink = 1, recent = 1 },
        select_blocks = function(self, ctx)
          return ctx:select(ctx:new_scores(1):fill_(0), self.budget)
        end }
      -- a chunk of 16 tokens is a block, so all of its queries select as in decode
      local script = {}
      for _ = 1, 4 do script[#script + 1] = { "prefill", 1, 16 } end
      wanted.selected = wanted.selected or play(dev, {}, decoded { 64 }, fields)
      close(play(dev, tier, script, fields), wanted.selected)
    end)
  end

  for _, dtype in ipairs { "f16", "bf16", "f8e4m3" } do
    it("reads a cache of " .. dtype, function()
      local o = dtype == "f8e4m3" and { dtype = "bf16", format = dtype }
        or { dtype = dtype }
      local fields = { emit = { mass = MASS.mass } }
      local want = play(dev, o, decoded { 40 }, fields)
      local got = play(dev, o, { { "prefill", 1, 23 }, { "prefill", 1, 17 } }, fields)
      for i, x in ipairs(want[1].mass) do -- decode rounds queries of an f8e4m3 cache
        assert.is_true(math.abs(x - got[1].mass[i]) < 2e-3 * math.max(1, x))
      end
    end)
  end

  it("knows a window, a soft cap and ALiBi", function()
    for _, o in ipairs { { window = 20 }, { soft_cap = 2 }, { alibi = slopes(dev) },
                         { soft_cap = 1, window = 33, alibi = slopes(dev) } } do
      close(play(dev, o, CHUNKS), play(dev, o, decoded(LENGTHS)))
    end
  end)

  it("is zero in layers that have a window of their own", function()
    local o = { window = { 0, 20 } }
    local sums = play(dev, o, WHOLE)
    for _, name in ipairs { "mass", "of_token" } do
      for _, x in ipairs(sums[1][name]) do assert.equal(0, x) end
    end
    for _, x in ipairs(sums[1].top_of_token) do assert.equal(-math.huge, x) end
    local first = play(dev, o, WHOLE, { defaults = { layer = 0 } })
    close(first, play(dev, {}, WHOLE, { defaults = { layer = 0 } }))
  end)

  it("is there for a prefill's policy, and for one that watches the prompt", function()
    local function has_mass(o, fields)
      return play(dev, o, { { "prefill", 1, 20 } }, fields)[1].mass ~= nil
    end
    assert.is_true(has_mass({}, { prefill = true, watches_prompt = false }))
    assert.is_true(has_mass({}, {}))
    assert.is_false(has_mass({}, { watches_prompt = false }))
    -- it may select in prefill, but another policy does
    local p = watcher { prefill = true, watches_prompt = false }
    rig.play(dev, { policy = p, prefill_policy = kv.policy "full" },
      { { "prefill", 1, 20 }, { "decode", 1 } })
    local total = 0
    for _, x in ipairs(p.sums[1].mass) do total = total + x end
    assert.is_true(math.abs(total - rig.SHAPE.kv_heads) < 1e-4) -- of the decode step
  end)

  it("is nothing for an empty emit, and K is read once", function()
    local p = watcher { prefill = true, emit = {}, bias = e.position / 64 }
    rig.play(dev, { policy = p, prefill_policy = p }, { { "prefill", 1, 20 } })
    assert.is_nil(next(p.sums[1]))
    assert.is_nil(p.hook.prompt)
  end)

  it("has steps that begin for a policy that watches the prompt", function()
    local begun = {}
    local fields = { step_begin = function(_, ctx)
      begun[#begun + 1] = ctx.is_prefill
    end }
    local script = { { "prefill", 1, 20 }, { "prefill", 1, 3 }, { "decode", 1 } }
    play(dev, {}, script, fields)
    assert.same({ true, true, false }, begun)
    begun = {}
    play(dev, {}, script, merged(fields, { watches_prompt = false }))
    assert.same({ false }, begun)
    begun = {}
    play(dev, {}, script, merged(fields, { prefill = true }))
    assert.same({ true, true, false }, begun)
  end)

  it("does not reach attention over listed tokens", function()
    local p = policy.define { name = "listed", prefill = true,
      select_blocks = function() end,
      compute_prefill = function(_, attention, ctx, out)
        return attention:over_tokens(kv.zeros(dev, "i32", { ctx.query:size(0), 1, 1 }),
          ctx, out)
      end } {}
    local ok, why = pcall(play, dev, { prefill_policy = p }, { { "prefill", 1, 20 } })
    assert.is_false(ok)
    assert.matches("attention over tokens does not know what a policy emits", why, 1,
      true)
  end)

  it("is what the prefill's policy makes of attention", function()
    local fields = { prefill = true, defaults = { far = 0.02, keep = 3 },
      init = function(self, shape)
        self.slope = kv.from(shape.device, "f32", { shape.kv_heads }, { 1, 0.5 })
      end,
      step_begin = function(self, ctx)
        self.mixed = kv.full(dev, "f32", { ctx.seqs, 1, ctx.width }, 0.25)
      end,
      bias = (e.position - e.query_position) * e.param "far"
        * e.const("f32", "slope", "kv_head") + e.input "mixed" * e.block,
      mask = (e.position % e.param("keep", "i32")):ne(1) }
    local function changing()
      return policy.define(merged({ name = "changing", complete = false,
        select_blocks = function() end }, fields)) {}
    end
    local want = play(dev, {}, CHUNKS, fields)
    -- the options of the two have the same names, and their own values
    local own = { defaults = { far = 2, keep = 1 },
      emit = merged(MASS, { mass = (e.weight * e.param "far"):sum "token":mean "head" }) }
    local got = play(dev, { prefill_policy = changing() }, CHUNKS, own)
    for i, sums in ipairs(got) do
      for k, x in ipairs(sums.mass) do sums.mass[k] = x / 2 end
      assert.is_not_nil(want[i])
    end
    close(got, want)
  end)

  it("is for the prompt's last queries if the expression says so", function()
    local is_last = e.query_position:ge(e.length - 8)
    local votes = { emit = {
      votes = e.where(is_last, e.weight, 0):sum "token":mean "head" } }
    local got = play(dev, {}, { { "prefill", 1, 50 }, { "prefill", 1, 20 } }, votes)
    local before = play(dev, {}, { { "prefill", 1, 42 } })
    local all = play(dev, {}, { { "prefill", 1, 50 } })
    local of_last = play(dev, {}, { { "prefill", 1, 62 } })
    local whole = play(dev, {}, { { "prefill", 1, 70 } })
    for i, x in ipairs(got[1].votes) do
      local want = all[1].mass[i] - before[1].mass[i] + whole[1].mass[i]
        - of_last[1].mass[i]
      assert.is_true(math.abs(x - want) < 1e-4)
    end
  end)

  it("is nothing after an attention that failed, and leaves nothing behind", function()
    for name, tier in pairs(TIERS) do
      local failed
      local fields = { prefill = true, bias = e.input "far",
        compute_prefill = function(self, attention, ctx, out)
          self.far = kv.zeros(dev, "f32", { ctx.seqs, 1, ctx.width })
          out = attention:over(nil, ctx, out)
          self.far = nil
          local ok = pcall(attention.over, attention, nil, ctx)
          failed = not ok and self.emitted.mass == nil
          self.far = kv.zeros(dev, "f32", { ctx.seqs, 1, ctx.width })
          return attention:over(nil, ctx, out)
        end }
      close(play(dev, tier, { { "prefill", 1, 40 }, { "prefill", 1, 30 } }, fields),
        play(dev, {}, { { "prefill", 1, 70 } }), name)
      assert.is_true(failed)
    end
  end)

  it("crosses the link once if the slots hold the prompt, and else twice", function()
    local function bytes(tier, fields)
      local _, r = play(dev, tier, LONG, fields)
      r.cache.device:sync()
      return (r.cache.tier:bytes())
    end
    local silent = { watches_prompt = false }
    local holds, twice = TIERS["a ring that holds the prompt"],
      TIERS["a ring that reads the prompt twice"]
    assert.is_true(bytes(holds, silent) > 0)
    assert.equal(bytes(holds, silent), bytes(holds))
    assert.equal(2 * bytes(twice, silent), bytes(twice))
  end)
end

describe("what a prefill emits", function() specs "cpu" end)

describe("what a prefill emits #gpu", function()
  if kv.cuda_available() then specs "cuda" end
end)
