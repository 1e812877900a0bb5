--- What a policy says of attention (bias, mask, log_weight, emit), through every memory
-- tier, in chunks and in graphs. The numbers themselves: spec/lua/kernel/hook_spec.lua.
local kv = require "kvlab"
local policy = require "kvlab.policy.policy"
local rig = require "spec.rig"
local support = require "spec.support"

local e = kv.expr
local TOLERANCE = 1e-5

local TIERS = {
  resident = {}, ["a ring"] = { offload = { slots = 2 } },
  ["a hot cache"] = { blocks = 16, offload = { hot_slots = 48 } },
  ["a hot cache with overlap"] = { blocks = 16,
    offload = { hot_slots = 48, hot_overlap = true } },
}

local function define(fields)
  local def = { name = "hooked", decode = true, complete = false,
                select_blocks = function() end }
  for key, value in pairs(fields) do def[key] = value end
  return policy.define(def)
end

local function slopes(dev, heads)
  local list = {}
  for i = 1, heads do list[i] = 2 ^ -i end
  return kv.from(dev, "f32", { heads }, list)
end

local alibi = define {
  prefill = true,
  init = function(self, shape)
    self.slopes = slopes(shape.device, shape.heads):reshape { shape.kv_heads,
      shape.heads / shape.kv_heads }
  end,
  bias = e.const("f32", "slopes", "kv_head", "head") * (e.position - e.query_position),
}

local function merged(a, b)
  local all = {}
  for key, value in pairs(a) do all[key] = value end
  for key, value in pairs(b) do all[key] = value end
  return all
end

local function decode(dev, tier, o)
  return rig.decode(dev, merged(merged({ lengths = { 70, 33, 1 }, steps = 3 }, tier), o))
end

local function close(got, want, what)
  support.close(got, want, TOLERANCE, TOLERANCE, what)
end

local function specs(dev_name)
  local dev = kv.device(dev_name)

  for name, o in pairs {
    f32 = {}, bf16 = { dtype = "bf16" }, f8e4m3 = { dtype = "f16", format = "f8e4m3" },
    int8 = { dtype = "bf16", format = "int8" },
  } do
    it("reaches attention over listed tokens, window and soft cap, " .. name, function()
      local masses = {}
      local function attend(lists)
        return decode(dev, { window = 40, soft_cap = 5 }, merged(o, { policy = define {
          bias = (e.position - e.query_position) / 8,
          mask = (e.position % 5):gt(0):bor(e.position:eq(e.query_position)),
          emit = { mass = e.weight:sum("token", "head") },
          compute_decode = function(self, attention, ctx, out)
            if lists then
              local all = kv.arange(ctx.device, "i32", 80):reshape { 1, 1, 80 }
              out = attention:over_tokens(
                kv.zeros(ctx.device, "i32", { ctx.seqs, 1, 1 }) + all, ctx, out)
            else
              out = attention:over(nil, ctx, out)
            end
            masses[lists] = self.emitted.mass:list()
            return out
          end } {} }))
      end
      local want, got = attend(false), attend(true)
      local room = o.dtype and 1e-2 or TOLERANCE
      for n = 1, 3 do
        support.close(got.steps[n].out, want.steps[n].out, room, room, "step " .. n)
      end
      support.close(masses[true], masses[false], room, room)
    end)
  end

  for name, tier in pairs(TIERS) do
    it("adds a bias to every score, through " .. name, function()
      local p = alibi {}
      local got = decode(dev, tier, { policy = p, prefill_policy = p })
      local want = decode(dev, tier, { alibi = slopes(dev, rig.SHAPE.heads) })
      for n = 1, 3 do close(got.steps[n].out, want.steps[n].out, "step " .. n) end
    end)

    it("emits the mass of each block, which sums to one, through " .. name, function()
      local masses = {}
      local make = define {
        defaults = { ratio = 0.5, sink = 1, recent = 1 },
        select_blocks = function(self, ctx)
          return ctx:select(ctx:new_scores():fill_(0), self.budget)
        end,
        emit = { mass = e.weight:sum "token":mean "head" },
        attention_finished = function(self, ctx)
          if ctx.is_prefill or ctx.layer ~= 1 then return end
          masses[#masses + 1] = self.emitted.mass:clone()
        end,
      }
      local run = decode(dev, tier, { policy = make {} })
      for n = 1, 3 do
        for _, sum in ipairs(masses[n]:sum(2):reshape({ -1 }):list()) do
          assert.is_true(math.abs(sum - 1) < 1e-5, tostring(sum))
        end
        local at, width = masses[n]:list(), masses[n]:size(2)
        local selected, heads = run.steps[n].selection, rig.SHAPE.kv_heads
        local list, most = selected:list(), selected:size(2)
        local positive = 0
        for _, mass in ipairs(at) do positive = positive + (mass > 0 and 1 or 0) end
        local listed = 0
        for i, block in ipairs(list) do
          if block >= 0 then
            local row = math.floor((i - 1) / most)
            assert.is_true(at[row * width + block + 1] > 0)
            listed = listed + 1
          end
        end
        assert.equal(listed, positive)
        assert.equal(3 * heads * most, #list)
      end
    end)
  end

  for name, tier in pairs(TIERS) do
    it("leaves no hook behind when attention fails, through " .. name, function()
      local failed, direct, emitted = {}, {}, {}
      local make = define {
        bias = e.input "far",
        emit = { mass = e.weight:sum "token":mean "head" },
        compute_decode = function(self, attention, ctx, out)
          self.far = kv.full(dev, "f32", { ctx.seqs, 1, ctx.width }, 1):mul(
            kv.arange(dev, "f32", ctx.width))
          out = attention:over(nil, ctx, out)
          self.far = nil
          local ok, why = pcall(attention.over, attention, nil, ctx)
          failed[#failed + 1] = not ok and why
          emitted[#emitted + 1] = self.emitted.mass ~= nil
          if ctx.layer == 1 then
            direct[#direct + 1] = attention:direct(nil, ctx):clone()
          end
          return out
        end,
      }
      decode(dev, tier, { policy = make {}, steps = 2 })
      local want = decode(dev, tier, { steps = 2 })
      for n = 1, 2 do close(direct[n], want.steps[n].out, "step " .. n) end
      for i = 1, 4 do
        assert.matches("the input far is nil, expected a tensor", failed[i], 1, true)
        assert.is_false(emitted[i])
      end
    end)
  end

  it("leaves the result as it is if it only emits, even where V is not finite", function()
    local heads, kv_heads, dim, size = 8, 2, 64, 16
    local function rows(count)
      return kv.randn(dev, "bf16", { 2, count, dim }, { seed = 2 })
    end
    local function attend(p)
      local cache = kv.cache { device = dev, format = "bf16", layers = 1, blocks = 24,
        block_size = size, kv_heads = kv_heads, head_dim = dim }
      cache.memory:copy_(kv.randn(dev, "f32", cache.memory:dims(), { seed = 1 })
        :cast "bf16")
      local values = cache.memory:reshape { 24 * 2 * kv_heads, size * dim }
      for i, x in ipairs { 0 / 0, math.huge } do -- one number each, of V of two blocks
        values:index((3 * i) * 2 * kv_heads + kv_heads):narrow(5 * dim + 7, 1):fill_(x)
      end
      local attention = kv.attention { cache = cache, heads = heads, decode_policy = p }
      local batch = cache:batch { max_seqs = 2, max_tokens = 2, max_blocks = 14 }
      local seqs = { cache:sequence(), cache:sequence() }
      for i, seq in ipairs(seqs) do seq:extend(80 + 70 * i) end
      batch:append(seqs, { 1, 1 })
      attention:begin(batch, false)
      local out = attention:forward(0, rows(heads), rows(kv_heads), rows(kv_heads))
      local got = out:cast("f32"):list()
      cache:close()
      return got
    end
    local emits = define { emit = { mass = e.weight:mean "head" } } {}
    local want, count = attend(nil), 0
    for _, x in ipairs(want) do if x - x ~= 0 then count = count + 1 end end
    assert.is_true(count > 0 and count < #want / 4)
    support.close(kv.from(dev, "f32", { #want }, attend(emits)), want, 1e-6, 2 ^ -7)
  end)

  it("has no part in layers that have a window of their own", function()
    local sums = {}
    local p = define { bias = e.position / 2, mask = e.block:ne(0),
      emit = { mass = e.weight:sum "token":mean "head" },
      attention_finished = function(self, ctx)
        if ctx.is_prefill then return end
        sums[ctx.layer] = self.emitted.mass:sum(2):list()[1]
      end } {}
    local o = { lengths = { 70 }, steps = 2, window = { 0, 20 } }
    local got = decode(dev, {}, merged(o, { policy = p }))
    local want = decode(dev, {}, o)
    for n = 1, 2 do close(got.steps[n].out, want.steps[n].out, "step " .. n) end
    assert.is_true(math.abs(sums[0] - 1) < 1e-5)
    assert.equal(0, sums[1])
  end)

  it("prefills in chunks as at once", function()
    local function prefill(chunk)
      local p = alibi {}
      return rig.prefill(dev, { policy = p, prefill_policy = p, length = 90,
                                chunk = chunk })
    end
    local whole = prefill(90)
    for _, chunk in ipairs { 1, 7, 16, 45 } do close(prefill(chunk), whole, "chunk") end
  end)

  it("hides what a mask hides, and leaves zeros where nothing is seen", function()
    local first = define { mask = e.position:lt(16) } {}
    local got = decode(dev, {}, { policy = first, lengths = { 70 } })
    local want = decode(dev, {}, { lengths = { 70 }, policy = define {
      select_blocks = function(self, ctx)
        return kv.zeros(self.shape.device, "i32", { ctx.seqs, 1, 1 })
      end } {} })
    close(got.steps[3].out, want.steps[3].out, "mask")
    local none = define { mask = e.position:lt(0) } {}
    local nothing = decode(dev, {}, { policy = none, lengths = { 20 }, steps = 1 })
    assert.equal(0, nothing.steps[1].out:abs():max():item())
  end)

  it("counts a key e^log_weight times", function()
    local weigh = define {
      step_begin = function(self, ctx)
        self.weights = kv.lasting(function()
          return kv.full(self.shape.device, "f32", { ctx.seqs, 1, ctx.width }, 3)
        end)
      end,
      log_weight = e.input "weights",
    } {}
    -- all keys weigh the same, so the result is that without weights
    local got = decode(dev, {}, { policy = weigh })
    local want = decode(dev, {}, {})
    for n = 1, 3 do close(got.steps[n].out, want.steps[n].out, "step " .. n) end
  end)

  it("is recorded in a graph, and reads new values of its options", function()
    local p = define { defaults = { far = 0.1 },
      bias = (e.position - e.query_position) * e.param "far" } {}
    local cache = kv.cache { device = dev, layers = 1, blocks = 20, block_size = 16,
      kv_heads = 2, head_dim = 32, format = "f32" }
    local attention = kv.attention { cache = cache, heads = 8, decode_policy = p }
    local batch, seq = cache:batch { max_seqs = 1, max_tokens = 100 }, cache:sequence()
    attention:begin(batch:append({ seq }, { 90 }), true)
    local q = kv.randn(dev, "f32", { 90, 8, 32 }, { seed = 1 })
    local k = kv.randn(dev, "f32", { 90, 2, 32 }, { seed = 2 })
    attention:forward(0, q, k, k)
    attention:begin(batch:append({ seq }, { 1 }), false)
    local one, key = q:narrow(0, 1):clone(), k:narrow(0, 1):clone()
    local out = kv.tensor(dev, "f32", { 1, 8, 32 })
    attention:forward(0, one, key, key, out)
    local eager = out:clone()
    local graph = kv.graph(function() attention:forward(0, one, key, key, out) end)
    out:fill_(0 / 0)
    graph:replay()
    close(out, eager, "replayed")
    p.far = 0.5
    attention:forward(0, one, key, key, out)
    assert.is_true((out - eager):abs():max():item() > 1e-3)
    graph:close()
  end)
end

describe("a policy's attention", function() specs "cpu" end)

describe("a policy's attention #gpu", function()
  if kv.cuda_available() then specs "cuda" end
end)

describe("expressions for attention", function()
  local function refused(fields)
    local ok, why = pcall(define, fields)
    assert.is_false(ok)
    return why
  end

  it("are checked when the policy is defined", function()
    assert.matches("policy hooked: bias is 3, expected an expression",
      refused { bias = 3 }, 1, true)
    assert.matches("mask: position is i32, expected bool", refused { mask = e.position },
      1, true)
    assert.matches("bias: position > 3 is bool, expected f32 or i32",
      refused { bias = e.position:gt(3) }, 1, true)
    assert.matches("it is computed for each key by itself and knows no reductions",
      refused { bias = e.logit:sum "token" }, 1, true)
    assert.matches("has the dimension dim, expected none but head and token",
      refused { bias = e.const("f32", "x", "dim") }, 1, true)
    assert.matches("there is no q in a bias, a mask or a log_weight, which knows block,",
      refused { bias = (e.q * e.q):sum("dim", "head") }, 1, true)
    assert.matches("there is no weight in a bias", refused { bias = e.weight }, 1, true)
    assert.matches("there is no k in an emit, which knows block,",
      refused { emit = { x = e.k:sum("token", "dim") } }, 1, true)
    assert.matches("emit.x: weight has dimensions [head, token], expected none but "
      .. "token: reduce it over head", refused { emit = { x = e.weight } }, 1, true)
    assert.matches('emit.x: max_query(weight): max "query" is the last operation of an '
      .. "emit, and nothing else",
      refused { emit = { x = e.weight:max("query", "head") } }, 1, true)
    assert.matches('bias: sum_query(logit): sum "query" is the last operation of an emit',
      refused { bias = e.logit:sum "query" }, 1, true)
    support.raises('mean "query": what is emitted is joined over queries by sum or max',
      function() return e.weight:mean "query" end)
    support.raises('max "query": weight > 1 (bool [head, token]), expected f32 or i32',
      function() return e.weight:gt(1):max "query" end)
    assert.matches("emit.x is number, expected an expression",
      refused { emit = { x = 1 } }, 1, true)
    assert.matches("there is no option fra that is a number",
      refused { defaults = { far = 1 }, bias = e.param "fra" * e.position }, 1, true)
  end)

  it("need the tensors that they read", function()
    local p = define { log_weight = e.input "weights" } {}
    local ok, why = pcall(rig.decode, kv.device "cpu",
      { policy = p, lengths = { 20 }, steps = 1 })
    assert.is_false(ok)
    assert.matches("the input weights is nil, expected a tensor f32 [1, 2 or 1, ", why, 1,
      true)
  end)

  it("belong to the attention's policy, not to one that selects for it", function()
    local outer = policy.define { name = "outer", decode = true,
      init = function(self) policy.nest(self, "magicpig") end,
      score = e.block } {}
    local ok, why = pcall(rig.new, kv.device "cpu", { policy = outer })
    assert.is_false(ok)
    assert.matches("which only the attention's own policy can", why, 1, true)
  end)
end)
