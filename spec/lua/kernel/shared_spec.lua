--- Expressions that use the same value in many places: texts and kernels have it once, so
-- their length grows with the number of nodes and not with the number of paths.
local emulation = require "spec.emulation"
local expressions = require "spec.expressions"
local kv = require "kvlab"

local e = kv.expr

--- x + x, doubled again and again: 2^n paths lead to x.
local function doubled(x, n)
  for _ = 1, n do x = x + x end
  return x
end

--- Two values, each made of both that came before, n times: exact in every language.
local function braided(x, y, n)
  for _ = 1, n do x, y = (x + y) % e.length, (x - y):abs() end
  return x + y
end

--- n reductions over tokens, each of what the one before it left.
local function peeled(x, n)
  for _ = 1, n do x = e.where(x:eq(x:max "token"), x / 2, x + 1) end
  return x
end

local FORMS = {
  score = function(n) return doubled((e.q * e.k):sum "dim", n):max("token", "head") end,
  products = function(n)
    return (doubled(e.q, n) * doubled(e.k, n)):sum "dim":max("token", "head")
  end,
  bounds = function(n)
    return e.max(e.q * e.lo, e.q * e.hi):sum "dim":max "head", { summary = {
      lo = doubled(e.k, n):min "token", hi = doubled(e.k, n):max "token" } }
  end,
  summary = function(n) return doubled(e.k, n):max "token" end,
  emit = function(n)
    return (doubled(e.query_position, n) * e.weight):sum "token":max "head"
  end,
  prompt = function(n)
    return (doubled(e.query_position, n) * e.weight):sum "token":max "head",
      { place = "prompt" }
  end,
  condition = function(n)
    local late = doubled(e.query_position, n):ge(7)
    return e.where(late, e.weight, 0):sum "token":max "head", { place = "prompt" }
  end,
  map = function(n) return doubled(e.input "x", n) end,
  chain = function(n) return peeled((e.k * e.k):sum "dim", n):sum "token" end,
}

--- The lengths of a form's kernels in the three languages.
local function lengths(form, n)
  local list = {}
  for i, target in ipairs { "lua", "c", "cuda" } do
    local x, o = FORMS[form](n)
    list[i] = #x:source(target, o)
  end
  return list
end

local SEED = 7

--- The scores that a policy gives on a small cache.
local function scores_of(def, target, shape)
  local o = shape or expressions.shape(SEED)
  local cache = expressions.cache("cpu", o, SEED)
  local p = expressions.attach(cache, def, target)
  if p.summary then expressions.update(cache, p) end
  return expressions.score(cache, p), cache.width
end

--- Compares the scores in C and in CUDA with those in plain Lua, and returns these.
local function compare(make)
  local function def() return { name = "shared", decode = true, score = make() } end
  local want, width = scores_of(def(), "lua")
  assert.is_nil(expressions.difference((scores_of(def())), want, 1e-4))
  if not emulation.problem() then
    emulation.with(function()
      assert.is_nil(expressions.difference((scores_of(def(), "emulated")), want, 1e-4))
    end)
  end
  return want, width
end

describe("an expression with shared parts", function()
  for form in pairs(FORMS) do
    it("is printed in a length that grows with its nodes: " .. form, function()
      local short, long = lengths(form, 15), lengths(form, 60)
      for i = 1, 3 do assert.is_true(long[i] < 6 * short[i]) end
    end)
  end

  it("is a text of names once it is long", function()
    assert.are.equal("q + q + (q + q)", tostring(doubled(e.q, 2)))
    local text = tostring(doubled(e.q, 1000))
    assert.is_true(#text < 40000)
    assert.is_truthy(text:find("^x999 %+ x999 with x1 = q %+ q, x2 = x1 %+ x1, "))
  end)

  it("is refused by the number of its nodes and not by its paths", function()
    local ok, why = pcall(function()
      return doubled((e.q * e.k):sum "dim", 1000):max("token", "head"):source "lua"
    end)
    assert.is_false(ok)
    assert.is_truthy(why:find("an expression of 1006 nodes, expected at most 500", 1,
      true))
  end)

  it("gives the same numbers in every language", function()
    local x = (e.q * e.k):sum "dim"
    local function braid() return braided(x, x * 3, 60):sum("token", "head") end
    compare(braid) -- in Lua there are more values than variables
    assert.is_truthy(braid():source "lua":find "more%.x%d")
    local scores, width = compare(function() return doubled(e.block, 20) / 2 ^ 20 end)
    for i, score in ipairs(scores) do
      if score > -math.huge then assert.are.equal((i - 1) % width, score) end
    end
  end)

  it("gives the same numbers where values of tokens are kept in arrays", function()
    local x = (e.k * e.k):sum "dim"
    compare(function() return peeled(x, 40):sum "token" end)
    compare(function() return peeled((e.q * e.k):sum "dim", 20):sum("token", "head") end)
  end)

  it("may need arrays that no stack has room for", function()
    local o = { dtype = "f32", group = 1, kv_heads = 1, block_size = 256, head_dim = 128,
                lens = { 20 }, blocks = 1, consts = {} }
    local x = peeled(e.k * e.q, 60):sum("token", "dim", "head")
    local def = { name = "wide", decode = true, score = x }
    local want, got = scores_of(def, "lua", o), scores_of(def, nil, o)
    assert.is_nil(expressions.difference(got, want, 1e-4))
    local text, on_stack, apart = x:source("c", { group = 1, block_size = 256 }), 0, 0
    for line in text:gmatch "[^\n]+" do
      local count = tonumber(line:match "array%d+%[(%d+) %+ VF%]")
      if line:find "_Thread_local" then apart = apart + count
      else on_stack = on_stack + (count or 0) end
    end
    assert.is_true(on_stack <= 65536 and apart > 65536)
  end)
end)

describe("a policy of many representatives", function()
  it("has kernels of a length that grows with them", function()
    local function length(representatives, target)
      local policy = kv.policy("infllm", { representatives = representatives })
      return #policy.expressions.fields.mean:source(target, { format = "bf16" })
    end
    for _, target in ipairs { "lua", "c", "cuda" } do
      assert.is_true(length(98, target) < 10 * length(14, target))
    end
  end)
end)
