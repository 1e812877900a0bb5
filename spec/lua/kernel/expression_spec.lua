--- Expressions as they are built: dimensions, types, errors that name the line, and text.
local e = require("kvlab").expr
local expression = require "kvlab.kernel.expression.expression"
local place = require "kvlab.kernel.expression.place"

local HERE = "spec/lua/kernel/expression_spec%.lua:%d+: "

--- The error of fn, which must name a line of this file.
local function message(fn)
  local ok, why = pcall(fn)
  assert.is_false(ok)
  assert.matches(HERE, why)
  return (why:gsub("^.-" .. HERE, ""))
end

describe("an expression", function()
  it("joins dimensions by their names", function()
    assert.same({ "head", "token", "dim" }, (e.q * e.k).dims)
    assert.same({ "token", "dim" }, (e.position + e.k).dims)
    assert.same({ "head" }, (e.q * e.k):sum "dim":max "token".dims)
    assert.same({}, (e.q * e.k):sum("dim", "token", "head").dims)
    local planes = e.const("f32", "planes", "bit", "dim")
    assert.same({ "head", "bit" }, (e.q * planes):sum "dim".dims)
    assert.same({ "head", "word" }, (e.q * planes):sum "dim":gt(0):pack "bit".dims)
  end)

  it("has a type", function()
    assert.equal("f32", (e.q + 1).type)
    assert.equal("i32", (e.block + 1).type)
    assert.equal("f32", (e.block * e.q).type)
    assert.equal("f32", (e.block / 2).type)
    assert.equal("f32", (e.block * 0.01).type)
    assert.equal("f32", (0.5 + e.block).type)
    assert.equal("bool", e.q:gt(0).type)
    assert.equal("i32", e.q:argmax "dim".type)
    assert.equal("u32", e.block:cast "u32":lshift(3).type)
    assert.equal("i32", e.block:cast "u32":popcount().type)
  end)

  it("reads like mathematics", function()
    assert.equal("max_head(sum_dim(max(q * lo, q * hi)))",
      tostring(e.max(e.q * e.lo, e.q * e.hi):sum "dim":max "head"))
    assert.equal("-q^2 - (q - (q - 1)) / 2", tostring(-e.q ^ 2 - (e.q - (e.q - 1)) / 2))
    assert.equal("where(block < 3, exp(q), k)",
      tostring(e.where(e.block:lt(3), e.q:exp(), e.k)))
  end)

  for name, case in pairs {
    ["a dimension that is not there"] = { function() local _ = e.q:sum "token" .. "" end,
      'sum "token": q %(f32 %[head, dim%]%) has no dimension token' },
    ["a misspelt dimension"] = { function() local _ = e.q:sum "heads" .. "" end,
      'sum "heads": .* did you mean head%?' },
    ["bits of a float"] = { function() local _ = e.q:band(e.k) .. "" end,
      "band: q %(f32 %[head, dim%]%), expected bits" },
    ["a bool as a number"] = { function() local _ = e.q:gt(0) + 1 end,
      "one side is the number 1 and the other a bool" },
    ["a fraction beside an unsigned number"] = {
      function() local _ = e.block:cast "u32" + 0.5 end, "0.5 is no u32" },
    ["a number that no i32 holds"] = { function() local _ = e.block + 2 ^ 31 end,
      "2.14748365e%+09 is no i32" },
    ["different whole numbers"] = {
      function() local _ = e.block + e.block:cast "u32" end,
      "block %(i32 no dimensions%) and u32%(block%) %(u32 no dimensions%) are of "
        .. "different" },
    ["Lua's own comparison"] = { function() local _ = e.q < e.k end,
      "write a:lt%(b%) or a:le%(b%) for q and k" },
    ["a function that there is not"] = { function() local _ = e.maxx(e.q, 1) .. "" end,
      "maxx is no function of expressions" },
    ["a method that there is not"] = { function() local _ = e.q:summ "dim" .. "" end,
      "summ is no method of an expression, did you mean sum%?" },
    ["an expression in place of a dimension"] = {
      function() local _ = e.q:max(e.k) .. "" end, "e.max%(a, b%) is the larger" },
    ["a text as an operand"] = { function() local _ = e.q + {} end,
      "an operand is a table, expected an expression or a number" },
    ["a wrong cast"] = { function() local _ = e.q:cast "f64" .. "" end,
      'the type is "f64", expected f32, i32, u32 or u64' },
    ["three values of max"] = { function() local _ = e.max(e.q, e.lo, e.hi) .. "" end,
      "max takes two values, given 3" },
    ["two values of abs"] = { function() local _ = e.abs(e.q, e.k) .. "" end,
      "abs takes one value, given 2" },
    ["a sum of bools"] = { function() local _ = e.q:gt(0):sum "dim" .. "" end,
      'expected f32, i32, u32, u64; :cast "i32" makes 0 and 1 of a bool' },
    ["a method that is an operator"] = { function() local _ = e.q:pow(2) .. "" end,
      "pow is no method of an expression: write a %^ b" },
    ["a standard deviation"] = { function() local _ = e.k:std "token" .. "" end,
      'with m = x:mean "token", %(%(x %- m%) %^ 2%):mean "token" is the variance' },
    ["a method like no other"] = { function() local _ = e.q:cumulate() .. "" end,
      "cumulate is no method of an expression$" },
    ["a wrong dtype of a const"] = { function() local _ = e.const("i8", "t") .. "" end,
      'the dtype is "i8"' },
  } do
    it("refuses " .. name, function()
      assert.matches(case[2], message(case[1]))
    end)
  end

  it("has no entries", function()
    local function refused(x, i, name, dims)
      assert.equal(("%s[%d]: an expression has no entries, expected the name of a "
        .. "method; it stands for all of %s at once"):format(name, i, dims),
        message(function() return x[i] end))
    end
    for _, i in ipairs { 0, 1, -1 } do refused(e.k, i, "k", "[token, dim]") end
    refused(e.q * e.k, 0, "(q * k)", "[head, token, dim]")
    refused(e.lo, 2, "lo", "its dimensions")
    assert.equal("0 is no name of a field", message(function() return e[0] end))
  end)

  it("is checked again when its fields are known", function()
    local score = (e.q * e.lo):sum "token"
    local fields = place.fields({ lo = e.k:min "token" }, "policy p")
    local ok, why = pcall(expression.resolve, score, fields, "policy p: score")
    assert.is_false(ok)
    assert.matches("has no dimension token", why)
    ok, why = pcall(expression.resolve, e.low:sum "dim", fields, "policy p: score")
    assert.is_false(ok)
    assert.matches("there is no field low in the summary, which has lo", why)
  end)

  it("is refused in a place that it does not fit", function()
    local function refused(fn, ...)
      local ok, why = pcall(fn, ...)
      assert.is_false(ok)
      return why
    end
    assert.matches("the dimension head", refused(place.fields, { a = e.q }, "policy p"))
    assert.matches("expressions have a max of their own",
      refused(place.fields, { max = e.k:max "token" }, "policy p"))
    assert.matches(HERE .. "policy p: summary is an expression, expected a table",
      refused(place.fields, e.k:min "token", "policy p"))
    assert.matches(HERE .. "policy p: summary%[1%] has no name",
      refused(place.fields, { e.k:min "token", lo = e.k:min "token" }, "policy p"))
    assert.matches(HERE .. "policy p: summary.z: lo is a field of the same summary",
      refused(place.fields, { lo = e.k:min "token", z = e.lo + 1 }, "policy p"))
    assert.matches(HERE .. "policy p: bias: there is no k in a bias",
      refused(place.check_attention, { bias = (e.k * 2):sum "dim" }, "policy p"))
    local large = e.block
    for i = 1, 600 do large = large + i end
    assert.matches(HERE .. "p: score: an expression of %d+ nodes, expected at most 500; "
      .. "what depends on keys alone", refused(place.check_score, large, {}, "p"))
    assert.matches("reduce it over head",
      refused(place.check_score, e.q:sum "dim", {}, "p"))
    assert.matches("there is no block in a summary",
      refused(place.fields, { a = e.k:sum "token" + e.block }, "policy p"))
    assert.matches("there is no weight in a score",
      refused(place.check_score, e.weight:sum("token", "head"), {}, "p"))
  end)

  it("is refused when it is too large", function()
    local x = e.q
    for _ = 1, 600 do x = x + e.q end
    local ok, why = pcall(expression.resolve, x, {}, "policy p: score")
    assert.is_false(ok)
    assert.matches("expected at most 500", why)
  end)
end)
