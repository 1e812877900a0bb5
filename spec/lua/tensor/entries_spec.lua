--- t.shape, t[i], slices, the errors of unknown names, var, std and linspace.
local kv = require "kvlab"
local traces = require "spec.traces"

local function refused(fn, words)
  local ok, why = pcall(fn)
  assert.is_false(ok)
  assert.equal(words, (why:gsub("^[^\n]-entries_spec.lua:%d+: ", "")))
  assert.matches("entries_spec.lua:%d+: ", why) -- on the caller's line
end

local function matrix() return kv.arange("cpu", "f32", 12):reshape { 3, 4 } end

describe("t.shape", function()
  it("has the sizes, from 0, and the number of dims", function()
    local shape = matrix().shape
    assert.equal("[3, 4]", tostring(shape))
    assert.same({ 2, 3, 4, 4, 3 }, { #shape, shape[0], shape[1], shape[-1], shape[-2] })
    assert.equal("number", type(shape[0]))
    assert.equal("[]", tostring(kv.full("cpu", "f32", {}, 1).shape))
    for _, i in ipairs { 2, -3, 0.5 } do
      refused(function() return shape[i] end,
        ("shape: dim is %s, expected -2 ... 1"):format(i))
    end
    refused(function() return shape.x end,
      "shape.x: a shape has no names, expected shape[i], #shape or t:dims()")
    refused(function() shape[0] = 1 end, "shape: it is read-only; t:reshape changes it")
    refused(function() matrix().shape = { 12 } end,
      "a tensor's shape is read-only; t:reshape gives it another one")
  end)

  it("is equal to the same shape and to a list of the same sizes", function()
    local shape = matrix().shape
    assert.is_true(shape == kv.zeros("cpu", "u8", { 3, 4 }).shape)
    assert.is_true(shape == { 3, 4 })
    assert.is_false(shape == kv.zeros("cpu", "f32", { 4, 3 }).shape)
    assert.is_false(shape == { 3 })
    assert.is_false(shape == { 3, 4, 1 })
    assert.is_false(shape == 3)
  end)

  it("is taken for a list of sizes", function()
    local t = matrix()
    assert.is_true(kv.zeros("cpu", "f16", t.shape).shape == t.shape)
    assert.is_true(kv.arange("cpu", "f32", 12):reshape(t.shape).shape == t.shape)
    assert.is_true(kv.ones("cpu", "f32", { 4 }):expand(t.shape).shape == t.shape)
    assert.same(t:dims(), kv.randn("cpu", "f32", t.shape):dims())
  end)
end)

describe("t[i]", function()
  it("is an entry of dim 0, a view", function()
    local t = matrix()
    assert.same({ 4, 5, 6, 7 }, t[1]:list())
    assert.same({ 8, 9, 10, 11 }, t[-1]:list())
    assert.same({ 4, 5, 6, 7 }, t[1LL]:list())
    assert.equal(6, t[1][2]:item())
    t[0]:fill_(7)
    assert.same({ 7, 7, 7, 7 }, t["0"]:list())
  end)

  it("is an error where there is no such entry", function()
    local t = matrix()
    for _, i in ipairs { 3, -4, 0.5 } do
      refused(function() return t[i] end,
        ("t[%s]: entry %s of dim 0, expected -3 ... 2"):format(i, i))
    end
    local empty, number = kv.zeros("cpu", "f32", { 0 }), t[0][0]
    local nothing = "t[0]: entry 0 of dim 0, expected 0 ... -1"
    refused(function() return empty[0] end, nothing)
    refused(function() return number[0] end, nothing)
    t:free()
    refused(function() return t[0] end, "index: the tensor is closed")
  end)

  it("can be assigned a number or a tensor", function()
    local t = matrix()
    t[0], t["1:"] = 1, kv.full("cpu", "f32", { 2, 4 }, 2)
    t["2, 3"] = 5
    assert.same({ 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 5 }, t:list())
    refused(function() t[3] = 1 end, "t[3]: entry 3 of dim 0, expected -3 ... 2")
    refused(function() t[":, 1"] = 1 end,
      't[":, 1"] = ...: this part is a copy, not a view')
    refused(function() t.sum_of = 1 end,
      "a tensor has no method and no field sum_of")
  end)

  it("is compiled, as t.shape and methods are", function()
    local t, total = matrix(), 0
    local aborts, formed = traces.aborts_of(function()
      for i = 1, 300 do
        total = total + t.shape[i % 2] + t:size(0) + tonumber(t.sizes[1])
      end
    end)
    assert.same({}, aborts)
    assert.is_true(formed > 0)
    assert.equal(300 * 3.5 + 300 * 7, total)
  end)
end)

describe("a slice", function()
  it("is half open, and counts from the end with negative numbers", function()
    local t = matrix()
    for text, expected in pairs {
      ["1:3"] = { 4, 5, 6, 7, 8, 9, 10, 11 }, ["1:"] = { 4, 5, 6, 7, 8, 9, 10, 11 },
      [":1"] = { 0, 1, 2, 3 }, [":-2"] = { 0, 1, 2, 3 }, ["-1:"] = { 8, 9, 10, 11 },
      ["1:1"] = {}, ["3:"] = {}, [":"] = t:list(), [":, :"] = t:list(),
      [":, 1"] = { 1, 5, 9 }, [":,-1"] = { 3, 7, 11 }, ["1:3, 0"] = { 4, 8 },
      [" 0 , 1:3 "] = { 1, 2 }, ["1:, 2:"] = { 6, 7, 10, 11 }, ["2, -1"] = { 11 },
    } do
      assert.same(expected, t[text]:list(), text)
    end
    assert.same({ 2, 2 }, t["1:, 2:"]:dims())
    assert.same({ 2 }, t["1:, 2"]:dims())
    assert.same({}, t["1, 2"]:dims())
    local cube = kv.arange("cpu", "i32", 24):reshape { 2, 3, 4 }
    assert.same({ 13, 17, 21 }, cube["1, :, 1"]:list())
    assert.same({ 4, 5, 6, 7, 16, 17, 18, 19 }, cube[":, 1"]:list())
  end)

  it("is a view along the first dim that no single entry chooses", function()
    local t = matrix()
    t["1:2"]:fill_(0)
    t["2, 1:3"]:fill_(-1)
    assert.same({ 0, 1, 2, 3, 0, 0, 0, 0, 8, -1, -1, 11 }, t:list())
    t[":, 1:2"]:fill_(9)
    assert.equal(1, t[0][1]:item())
  end)

  it("is an error outside of the tensor", function()
    local t = matrix()
    for text, words in pairs {
      ["0:4"] = 't["0:4"]: bound 4 of dim 0, expected 0 ... 3',
      ["-4:"] = 't["-4:"]: bound -4 of dim 0, expected 0 ... 3',
      ["2:1"] = 't["2:1"]: bound 1 of dim 0, expected 2 ... 3',
      [":, 4"] = 't[":, 4"]: entry 4 of dim 1, expected -4 ... 3',
      ["0, 0:5"] = 't["0, 0:5"]: bound 5 of dim 0, expected 0 ... 4',
      ["0, 0, 0"] = 't["0, 0, 0"]: 3 dims are given, the tensor has 2',
      ["1:2:3"] = 't["1:2:3"]: "1:2:3" is no entry and no slice, expected i, a:b or :',
      ["0,"] = 't["0,"]: "" is no entry and no slice, expected i, a:b or :',
    } do
      refused(function() return t[text] end, words)
    end
  end)
end)

describe("an unknown name", function()
  it("is refused with the nearest one", function()
    local t = matrix()
    for name, words in pairs {
      sofmax = "; did you mean softmax?", shap = "; did you mean shape?", xyzzy = "",
      foo = "", shpae = "; did you mean shape?",
      unsqueeze = "; it is written t:reshape", T = "; it is written t:transpose()",
    } do
      refused(function() return t[name] end,
        ("a tensor has no method and no field %s%s"):format(name, words))
    end
    refused(function() return t[{ 0, 2 }] end,
      't[a table]: expected a number, a text such as "0, 1:3", or the name of a method '
        .. "or a field")
  end)
end)

describe("a tensor that is made without a device", function()
  it("is refused with what came in its place", function()
    for _, made in ipairs { function() kv.zeros(3) end,
      function() kv.tensor(3, { 2 }) end, function() kv.randn(3, { 2 }) end,
      function() kv.linspace(3, 1, 5) end } do
      refused(made, "device is 3, expected a device, its name or nil")
    end
    refused(function() kv.zeros("cpu", { 2 }) end,
      "dtype is a table, expected one of f32 f16 bf16 f8e4m3 i32 i64 u8 u64")
  end)
end)

describe("mean", function()
  it("of whole numbers is f32", function()
    local t = kv.from("cpu", "i32", { 2, 2 }, { 1, 2, 3, 5 })
    assert.same({ "f32", 2.75 }, { t:mean():type(), t:mean():item() })
    assert.same({ 2, 3.5 }, t:mean(0):list())
    assert.same({ 1.5, 4 }, t:mean(-1):list())
  end)
end)

describe("var and std", function()
  --- The variance by its definition.
  local function variance(list, correction)
    local mean, sum = 0, 0
    for _, x in ipairs(list) do mean = mean + x / #list end
    for _, x in ipairs(list) do sum = sum + (x - mean) ^ 2 end
    return sum / (#list - correction)
  end

  it("are those of the definition, along each dim and of all elements", function()
    local t = kv.randn("cpu", "f32", { 3, 5, 4 }, { seed = 3, mean = 100 })
    for correction = 0, 1 do
      assert.near(variance(t:list(), correction), t:var(nil, correction):item(), 1e-4)
      for dim = 0, 2 do
        local got = t:var(dim, correction)
        local rows = dim == 2 and t or t:transpose(dim, 2)
        rows = rows:reshape { -1, t:size(dim) }
        local order = dim == 2 and got or got:reshape { -1 }
        if dim == 0 then order = got:transpose():reshape { -1 } end
        for i = 0, rows:size(0) - 1 do
          local expected = variance(rows[i]:list(), correction)
          assert.near(expected, order:reshape { -1 }[i]:item(), 1e-3)
        end
        assert.same(t:std(dim, correction):list(), got:sqrt():list())
      end
    end
    assert.same(t:var(2):list(), t:var(-1):list())
  end)

  it("keep f16 and bf16, and are f32 of other dtypes", function()
    local t = kv.from("cpu", "i32", { 1, 2, 3, 6 })
    for dtype, result in pairs { f32 = "f32", f16 = "f16", bf16 = "bf16", i32 = "f32",
                                 u8 = "f32", f8e4m3 = "f32" } do
      local other = (dtype == "f8e4m3" and t:cast "f32" or t):cast(dtype)
      local var = other:var()
      assert.equal(result, var:type())
      assert.equal(3.5, var:item())
      assert.near(14 ^ 0.5 / 2, other:std():item(), 0.01)
    end
  end)

  it("are NaN of nothing, and of one element with a correction of 1", function()
    local function is_nan(t) return t:item() ~= t:item() end
    assert.is_true(is_nan(kv.zeros("cpu", "f32", { 0 }):var()))
    assert.is_true(is_nan(kv.ones("cpu", "f32", { 1 }):var(nil, 1)))
    assert.equal(0, kv.ones("cpu", "f32", { 1 }):std():item())
    refused(function() return matrix():var(2) end, "var: dim is 2 of 2 dims")
    refused(function() return matrix():std(0, -1) end,
      "std: correction is -1, expected a number >= 0, or nil")
  end)
end)

describe("kv.linspace", function()
  it("has both ends", function()
    assert.same({ 0, 0.25, 0.5, 0.75, 1 }, kv.linspace("cpu", "f32", 5, 0, 1):list())
    assert.same({ 3, 1, -1 }, kv.linspace("cpu", "bf16", 3, 3, -1):list())
    assert.same({ 2 }, kv.linspace("cpu", "f16", 1, 2, 9):list())
    assert.same({}, kv.linspace("cpu", "f32", 0, 2, 9):list())
    local t = kv.linspace("cpu", "f32", 1000, 0, 0.1)
    assert.equal(kv.full("cpu", "f32", {}, 0.1):item(), t[-1]:item())
  end)

  it("refuses whole numbers' dtypes and what is no number", function()
    refused(function() kv.linspace("cpu", "i32", 2, 0, 1) end,
      'linspace: dtype is "i32", expected one of f32, f16, bf16, f8e4m3')
    refused(function() kv.linspace("cpu", "f32", -1, 0, 1) end,
      "linspace: n is -1, expected a whole number >= 0")
    refused(function() kv.linspace("cpu", "f32", 2, 0) end,
      "linspace: last is nil, expected a number")
  end)
end)
