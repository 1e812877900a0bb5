--- The names that a user gives stand in the text of kernels: only identifiers do, and
-- none of them is taken for a word of C, of CUDA or of kvlab.
local emulation = require "spec.emulation"
local expressions = require "spec.expressions"
local kv = require "kvlab"

local e = kv.expr

local function define(def)
  def.name, def.decode, def.score = "named", true, e.block * 1
  return kv.policy.define(def)
end

local NO_NAMES = { "", "two words", "x;y", "x[9]; int y", "1st", "\0", "x\0", "é", "a-b",
                   "\n", "%s" }

describe("the name of a field of a summary", function()
  for _, name in ipairs(NO_NAMES) do
    it(("is no name of kernels: %q"):format(name), function()
      local words = ("summary[\"%s\"] has no name"):format(name)
      local why = select(2, pcall(define, { summary = { [name] = e.k:min "token" } }))
      assert.is_truthy(tostring(why):find(words, 1, true), why)
      assert.is_truthy(why:find "names_spec%.lua:%d+: policy named: ", why)
      why = select(2, pcall(define, { summary = function()
        return { [name] = e.k:min "token" }
      end }))
      assert.is_truthy(tostring(why):find(words, 1, true), why)
      local mass = e.weight:sum("token", "head")
      why = select(2, pcall(define, { emit = { [name] = mass } }))
      assert.is_truthy(tostring(why):find(("emit[\"%s\"] has no name"):format(name), 1,
        true), why)
    end)
  end

  it("is none of its methods", function()
    for _, name in ipairs { "update", "bytes_block" } do
      local why = select(2, pcall(define, { summary = { [name] = e.k:min "token" } }))
      local words = "a summary has a method " .. name
      assert.is_truthy(tostring(why):find(words, 1, true), why)
    end
  end)

  it("may be a word of any language, and of kvlab's own", function()
    local names = { "int", "float", "while", "class", "template", "__global__", "TOKENS",
      "main", "local_", "nil_", "kernel", "owner", "shape", "names", "of", "a", "item",
      "struct", "a_1", "a_0", "_" }
    local summary, score, want = {}, 0, 0
    for i, name in ipairs(names) do
      summary[name] = e.tokens * i
      score, want = score + e[name], want + i
    end
    local function run(target)
      local o = expressions.shape(7)
      o.consts = {}
      local cache = expressions.cache("cpu", o, 7)
      local p = expressions.attach(cache, { name = "named", decode = true, summary =
        summary, score = score }, target)
      expressions.update(cache, p)
      return expressions.score(cache, p)
    end
    local function check(scores)
      local most = math.max(unpack(scores))
      assert.is_true(most > 0 and most % want == 0)
      assert.are.same(run "lua", scores)
    end
    check(run())
    if emulation.problem() then return end
    emulation.with(function() check(run "emulated") end)
  end)
end)

describe("a const", function()
  it("is one tensor, wherever it is read", function()
    local a = e.const("f32", "planes", "bit", "dim")
    for _, b in ipairs { e.const("i32", "planes", "bit", "dim"),
                         e.const("f32", "planes", "dim"),
                         e.const("f32", "planes", "dim", "bit") } do
      local x = (e.q * a):sum("bit", "dim") + (e.q * b):sum(unpack(b.stored))
      local why = select(2, pcall(function() return x:max "head":source "lua" end))
      local words = "the const planes is %w+ %[.-%] here and f32 %[bit, dim%] on"
      assert.is_truthy(why:find(words), why)
    end
  end)
end)
