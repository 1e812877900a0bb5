--- Maps against the reference by the book, on every printer, and as a policy calls them.
-- Stated tolerance: 1e-4 of the larger number.
local compiler = require "kvlab.kernel.run.compiler"
local expressions = require "spec.expressions"
local kernel = require "kvlab.kernel.run.kernel"
local kv = require "kvlab"
local maps = require "spec.maps"
local policy = require "kvlab.policy.policy"
local traces = require "spec.traces"

local e = kv.expr
local attach, context = maps.attach, maps.context
local SEQS, KV_HEADS, WIDTH, BLOCK = maps.SEQS, maps.KV_HEADS, maps.WIDTH, maps.BLOCK

--- Calls the map with tensors of so many heads, with and without out.
local function check(dev, target, map, heads_x, heads_y, out_heads, more, list)
  local why = maps.difference(dev, target, map, { x = heads_x, y = heads_y }, out_heads,
    more, list)
  assert.is_nil(why, ("%s\n%s"):format(why or "", tostring(map)))
end

local SLOPES = { init = function(p, shape)
  p.slope = kv.from(shape.device, "f32", { 2, KV_HEADS }, { 1, 2, 3, 4 })
end }

local function mix(x, y) return e.param "weight" * x + (1 - e.param "weight") * y end
local function ramp(x) return 0.5 * x + 0.1 + e.block / e.max(e.blocks - 1, 1) * 0.9 end
local function slope(x) return x * e.const("f32", "slope", "layer", "kv_head") end

local function known(dev, target)
  it("mixes scores of one head and of all", function()
    for _, heads in ipairs { { 1, 1, 1 }, { 2, 1, 2 }, { 1, 2, 2 }, { 2, 2, 2 } } do
      check(dev, target, kv.kernel.map(mix), unpack(heads))
    end
  end)

  it("is the same over a cache of another dtype", function()
    check(dev, target, kv.kernel.map(mix), 2, 1, 2, { dtype = "f8e4m3" })
  end)

  it("knows where its blocks are", function()
    check(dev, target, kv.kernel.map(ramp), 1, 1, 1)
    check(dev, target, kv.kernel.map(ramp), 2, 1, 2)
  end)

  it("knows the layer and the head, and has a row for each head if it asks", function()
    check(dev, target, kv.kernel.map(slope), 1, 1, 2, SLOPES)
    check(dev, target, kv.kernel.map(function(x) return x + e.kv_head * 10 + e.layer end),
      1, 1, 2)
  end)

  it("needs no tensor, and gives whole numbers as f32", function()
    check(dev, target, kv.kernel.map(function() return e.length - e.block end), 1, 1, 1)
  end)

  it("computes with inf and NaN as scores do", function()
    local odd = { -1 / 0, 1 / 0, 0 / 0, 0, 1, -1 }
    check(dev, target, kv.kernel.map(mix), 2, 2, 2, nil, odd)
    check(dev, target, kv.kernel.map(function(x, y)
      return e.where(e.max(x, y):gt(0), e.min(x, y), e.param "weight")
    end), 2, 1, 2, nil, odd)
  end)

  it("computes random expressions", function()
    for seed = 1, target == "lua" and 60 or 12 do
      assert.is_nil(maps.random_difference(dev, target, seed))
    end
  end)

  it("writes over a tensor that it reads", function()
    local decay = kv.kernel.map(function(tally) return tally * 0.5 + 1 end)
    local p, ctx = attach(dev, decay, nil, target), context(dev)
    local tally = kv.full(dev, "f32", { SEQS, 1, WIDTH }, 8)
    for _ = 1, 3 do p:mapped(ctx, tally, tally) end
    assert.same({ 2.75, 2.75 }, { unpack(tally:list(), 1, 2) })
  end)

  it("takes a new value of an option at the next call", function()
    local map = kv.kernel.map(function(x) return x * e.param "weight" end)
    local p, ctx = attach(dev, map, nil, target), context(dev)
    local one = kv.ones(dev, "f32", { SEQS, 1, WIDTH })
    assert.equal(3, p:mapped(ctx, one):list()[1])
    p.weight = -7
    assert.equal(-7, p:mapped(ctx, one):list()[1])
  end)
end

local function compiled(dev)
  it("compiles: a call aborts no trace", function()
    local p, ctx = attach(dev, kv.kernel.map(mix)), context(dev)
    local x = kv.zeros(dev, "f32", { SEQS, 2, WIDTH })
    p:mapped(ctx, x, x, x)
    jit.flush()
    local aborts, formed = traces.aborts_of(function()
      for _ = 1, 1000 do p:mapped(ctx, x, x, x) end
    end)
    assert.same({}, aborts)
    assert.is_true(formed > 0)
  end)

  it("is recorded by a graph and replayed", function()
    local map = kv.kernel.map(function(x) return x + e.length end)
    local p, ctx = attach(dev, map), context(dev)
    local x, out = kv.zeros(dev, "f32", { SEQS, 1, WIDTH }),
      kv.zeros(dev, "f32", { SEQS, 1, WIDTH })
    p:mapped(ctx, x, out)
    local g = kv.graph(function() p:mapped(ctx, x, out) end, dev)
    x:fill_(0.5)
    ctx.lens:fill_(3)
    g:replay()
    assert.equal(3.5, out:list()[1])
    g:close()
  end)

  it("allocates nothing on the device when it has an out", function()
    local p, ctx = attach(dev, kv.kernel.map(mix)), context(dev)
    local x = kv.zeros(dev, "f32", { SEQS, 2, WIDTH })
    local out = kv.zeros(dev, "f32", { SEQS, 2, WIDTH })
    p:mapped(ctx, x, x, out)
    local before = ctx.lens.device:stats()
    for _ = 1, 50 do p:mapped(ctx, x, x, out) end
    local after = ctx.lens.device:stats()
    assert.equal(before.allocations, after.allocations)
    assert.equal(before.launches + 50, after.launches)
  end)
end

describe("a map in Lua", function() known("cpu", "lua") end)

describe("a map in C", function()
  if not compiler.find() then
    pending "there is no C compiler"
    return
  end
  known "cpu"
  compiled "cpu"
end)

describe("a map in CUDA #gpu", function()
  if not kv.cuda_available() then return end
  known "cuda"
  compiled "cuda"
end)

describe("a map of a policy", function()
  it("is compiled by NVRTC, which needs no GPU", function()
    local nvrtc = require "kvlab.kernel.run.nvrtc"
    local place = require "kvlab.kernel.expression.place"
    if not nvrtc.open() then return pending "NVRTC is not here" end
    for _, fn in ipairs { mix, ramp, slope } do
      local plan = place.map(kv.kernel.map(fn).expression, "map", { codec = "f32",
        group = 2, layers = 2, block_size = BLOCK, head_dim = 16, kv_heads = KV_HEADS,
        const_dims = function() return { 2, KV_HEADS } end })
      local image, why = nvrtc.compile(kernel.print(plan, "sm_90a"), "sm_90a")
      assert.is_string(image, why)
    end
  end)

  local function refused(words, fn, ...)
    local ok, why = pcall(fn, ...)
    assert.is_false(ok)
    assert.equal(words, (why:gsub("^[^:]*:%d+: ", "")))
  end

  it("is computed in the steps of an attention as tensor ops would", function()
    local compared = 0
    local p = policy.define {
      name = "history", decode = true, defaults = { ratio = 0.5, sink = 1, recent = 1 },
      init = function(self, shape) self.tally = kv.tally(shape, 1, 0) end,
      step_begin = function(self, ctx) self.tally:begin(ctx) end,
      ranked = kv.kernel.map(ramp),
      select_blocks = function(self, ctx)
        local counts = self.tally:load(ctx)
        local want = counts:mul(0.5):add(ctx:ramp(0.1, 1))
        local scores = self:ranked(ctx, counts)
        assert.is_nil(expressions.difference(scores:list(), want:list(), 1e-6))
        compared = compared + 1
        local selection, n = ctx:select(scores, self.budget)
        self.tally:count(ctx, ctx:mark(selection))
        return selection, n
      end,
    } {}
    local s = kv.synthetic { device = "cpu", shape = "small", layers = 2, context = 256,
                             chunk = 64, decode_policy = p }
    local seq = s:sequence(100)
    for _ = 1, 3 do s:decode { seq } end
    assert.equal(6, compared)
    s:close()
  end)

  it("refuses what does not fit, and names it", function()
    local p, ctx = attach("cpu", kv.kernel.map(mix)), context "cpu"
    local x = kv.zeros("cpu", "f32", { SEQS, KV_HEADS, WIDTH })
    local function is(shape, dtype) return kv.zeros("cpu", dtype or "f32", shape) end
    local want = "expected f32 [seqs=4, kv_heads=2 or 1, width=9] on cpu"
    refused("policy mine: mapped: y is nil, " .. want, p.mapped, p, ctx, x)
    refused("policy mine: mapped: x is 3, " .. want, p.mapped, p, ctx, 3, x)
    refused("policy mine: mapped: x is f32 [4, 3, 9] on cpu, " .. want, p.mapped, p, ctx,
      is { 4, 3, 9 }, x)
    refused("policy mine: mapped: x is f32 [4, 9] on cpu, " .. want, p.mapped, p, ctx,
      is { 4, 9 }, x)
    refused("policy mine: mapped: x is i32 [4, 1, 9] on cpu, " .. want, p.mapped, p, ctx,
      is({ 4, 1, 9 }, "i32"), x)
    refused("policy mine: mapped: out is f32 [4, 1, 9] on cpu, expected f32 [seqs=4, "
      .. "heads=2, width=9] on cpu", p.mapped, p, ctx, x, x, is { 4, 1, 9 })
    refused("map(x, y) = weight * x + (1 - weight) * y: 1 tensors more than its "
      .. "parameters and out", p.mapped, p, ctx, x, x, nil, x)
    refused("policy mine: mapped: ctx is f32 [4, 2, 9], expected a context of an "
      .. "attention's step", p.mapped, p, x, x)
    refused("map(x, y) = weight * x + (1 - weight) * y is not called as a method of a "
      .. "policy that has it and is attached", p.mapped, ctx, x, x)
    local closed = is { 4, 2, 9 }
    closed:free()
    refused("policy mine: mapped: x is f32 [4, 2, 9] on nothing, for it is closed, "
      .. want, p.mapped, p, ctx, closed, x)
  end)

  it("is refused when it is made or defined, if it makes no sense", function()
    local map = kv.kernel.map
    refused("kernel.map: fn is nil, expected a function", map)
    refused("kernel.map: fn is a function of any number of parameters, expected named "
      .. "ones", map, function(...) return (...) end)
    refused("kernel.map: fn returns 3, expected an expression", map, function()
      return 3
    end)
    refused("kernel.map: x * 1 does not read the parameter y", map, function(x, y)
      local _ = y
      return x * 1
    end)
    refused("kernel.map: x + z reads z, which is no parameter of fn", map, function(x)
      return x + e.input "z"
    end)
    local function define(fn)
      policy.define { name = "mine", decode = true, score = function() end,
                      mapped = map(fn) }
    end
    refused("policy mine: mapped: there is no q in a map, which knows block, blocks, "
      .. "kv_head, layer, length, scale", define, function(x)
      return x + e.q:sum("dim", "head")
    end)
    refused("policy mine: mapped: x + q has dimensions [head, dim], expected none",
      define, function(x) return x + e.q end)
    refused("policy mine: mapped: x > 0 is bool, expected f32 or i32", define,
      function(x) return x:gt(0) end)
    refused("policy mine: mapped: lo is no parameter of the map, and a map reads no "
      .. "summary", define, function(x) return x * e.lo end)
  end)
end)

describe("a parameter of an expression", function()
  local function why_not(def)
    def.name, def.decode = "mine", true
    local ok, why = pcall(policy.define, def)
    assert.is_false(ok)
    return why
  end
  local here = debug.getinfo(1, "S").short_src

  it("has to be an option of the policy, a number, when it is defined", function()
    local line = debug.getinfo(1, "l").currentline + 2
    local words = why_not { defaults = { cost = 1 },
      score = e.block * e.param "cots" }
    assert.equal(("%s:%d: policy mine: score: there is no option cots that is a number, "
      .. "did you mean cost?"):format(here, line), words)
    assert.matches("policy mine: summary.lo: there is no option kind that is a number",
      why_not { defaults = { kind = "x" }, score = function() end,
        summary = { lo = (e.k * e.param "kind"):min "token" } })
    assert.matches("policy mine: mixed: there is no option weigth that is a number, did "
      .. "you mean weight%?", why_not { defaults = { weight = 1 }, score = function() end,
        mixed = kv.kernel.map(function(x) return x * e.param "weigth" end) })
  end)

  it("may be an option of every policy", function()
    policy.define { name = "mine", decode = true, defaults = { ratio = 0.5 },
      score = e.block * e.param "ratio" + e.param "recent" }
  end)
end)
