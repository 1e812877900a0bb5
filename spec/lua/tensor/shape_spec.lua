--- The tensor methods that change the shape, as users call them. What the kernels compute
-- is spec/kernels/strided_copy_spec.lua's to prove.
local kv = require "kvlab"
local support = require "spec.support"

local raises = support.raises

local function check(dev)
  describe("shapes on " .. dev:name(), function()
    local a = kv.arange(dev, "i32", 24):reshape { 2, 3, 4 }

    it("transposes the last two dims, or any two", function()
      assert.same({ 2, 4, 3 }, a:transpose():dims())
      assert.same({ 0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11 },
        a:transpose():index(0):reshape({ -1 }):list())
      assert.same(a:list(), a:transpose(0, -1):transpose(-1, 0):list())
      assert.same({ 3, 2, 4 }, a:transpose(0, 1):dims())
      local out = kv.zeros(dev, "i32", { 4, 3, 2 })
      assert.equal(out, a:transpose(0, 2, out))
      assert.same({ 0, 12, 4, 16 }, out:reshape({ 24 }):narrow(0, 4):list())
      raises("transpose: dim0 is 3 of 3 dims", a.transpose, a, 3, 0)
      raises("transpose: dim1 is -4 of 3 dims", a.transpose, a, 0, -4)
      raises("transpose: dim0 is \"x\", expected a whole number", a.transpose, a, "x")
      raises("transpose: dim0 is -2 of 1 dims", a.transpose, a:reshape { 24 })
    end)

    it("expands to a shape", function()
      local row = kv.from(dev, "f32", { { 1 }, { 2 } })
      assert.same({ 1, 1, 1, 2, 2, 2 }, row:expand({ 2, 3 }):list())
      assert.same({ 2, 2, 2 }, row:expand({ 2, 2, 2 }):dims())
      local copy = row:expand { 2, 1 }
      copy:fill_(7)
      assert.same({ 1, 2 }, row:list())
      raises("a is f32 [2, 1], out is f32 [3, 2]", row.expand, row, { 3, 2 })
      raises("expand: shape is nil, expected a list, each a whole number >= 0",
        row.expand, row)
      raises("expand: shape is a table, expected a list, each a whole number >= 0",
        row.expand, row, { 2, print }, kv.zeros(dev, "f32", { 2, 2 }))
      raises("expand: out is [2, 2], expected [2, 3]", row.expand, row, { 2, 3 },
        kv.zeros(dev, "f32", { 2, 2 }))
    end)

    it("narrows dim 0 to a view, and other dims to copies", function()
      local t = a:clone()
      local middle = t:narrow(1, 2, -1):index(0)
      assert.same({ 1, 2, 5, 6, 9, 10 }, middle:reshape({ 6 }):list())
      assert.same({ 2, 1, 4 }, t:narrow(2, 1, 1):dims())
      t:narrow(0, 2, 2):fill_(-1)
      t:narrow(0, 1, 0):index(0):index(0):fill_(-5)
      assert.same({ -5, -5, -5, -5, 4 }, t:reshape({ 24 }):narrow(0, 5):list())
      local out = kv.zeros(dev, "i32", { 2, 3, 2 })
      assert.equal(out, t:narrow(2, 2, 2, out))
      assert.same({ -5, -5, 6, 7 }, out:reshape({ 12 }):narrow(0, 4):list())
      raises("narrow: entries 3 ... 5 of dim 2, expected within 0 ... 4", t.narrow, t, 3,
        2, 2)
      raises("narrow: entries 0 ... -1 of dim 1", t.narrow, t, 0, -1, 1)
      raises("narrow: dim is 3 of 3 dims", t.narrow, t, 0, 1, 3)
      raises("narrow: out has not 1 entries along dim 2", t.narrow, t, 0, 1, 2, out)
      raises("narrow: dim is 0.5, expected a whole number", t.narrow, t, 0, 1, 0.5)
    end)

    it("joins tensors along any dim", function()
      local b = a:narrow(0, 1, 1)
      assert.same({ 2, 4, 4 }, kv.cat({ a, b }, 1):dims())
      assert.same(a:narrow(1, 2, 1):list(), kv.cat({ a, b }, 1):narrow(1, 2, 1):list())
      assert.same(b:list(), kv.cat({ a, b }, -2):narrow(3, 1, 1):list())
      assert.same({ 4, 3, 4 }, kv.cat({ a, a }):dims())
      assert.same(a:list(), kv.cat({ a:narrow(0, 1), a:narrow(1, 1) }):list())
      assert.same(a:list(), kv.cat({ a:narrow(0, 0), a, a:narrow(1, 0) }):list())
      raises("cat: tensor 2 is i32 [2, 1, 4], expected i32 [2, 3, 4] but for dim 2",
        kv.cat, { a, b }, 2)
      raises("cat: tensor 2 is f32 [2, 3, 4]", kv.cat, { a, a:cast "f32" })
      raises("cat: tensor 1 is nil, expected a tensor", kv.cat, {})
      raises("cat: tensor 2 is 3, expected a tensor", kv.cat, { a, 3 })
      raises("cat: dim is 0 of 0 dims", kv.cat, { kv.zeros(dev, "f32", {}) })
      raises("cat: out has not 4 entries along dim 0", kv.cat, { a, a }, 0, a)
      raises("cat: tensors is nil, expected a table", kv.cat)
    end)

    it("clamps, and keeps NaN", function()
      local x = kv.from(dev, "f32", { -3, -0.5, 0.5, 3, 0 / 0, 1 / 0 })
      support.equal(x:clamp(-1, 1), { -1, -0.5, 0.5, 1, 0 / 0, 1 })
      support.equal(x:clamp(0), { 0, 0, 0.5, 3, 0 / 0, 1 / 0 })
      support.equal(x:clamp(nil, 0), { -3, -0.5, 0, 0, 0 / 0, 0 })
      support.equal(x:clamp(2, 1), { 1, 1, 1, 1, 0 / 0, 1 })
      assert.same({ -2, 0, 2 }, kv.from(dev, "i32", { -9, 0, 9 }):clamp(-2, 2):list())
      assert.equal(x, x:clamp(-1, 1, x))
      support.equal(x, { -1, -0.5, 0.5, 1, 0 / 0, 1 })
      raises("clamp: low and high are nil", x.clamp, x)
      raises("clamp: high is \"1\", expected a number", x.clamp, x, 0, "1")
      raises("closed", function()
        local t = x:clone()
        t:free()
        t:clamp(0, 1)
      end)
    end)

    it("takes powers by an operator, and floors", function()
      local x = kv.from(dev, "f32", { 1.5, -1.5, 3 })
      assert.same({ 2.25, 2.25, 9 }, (x ^ 2):list())
      assert.same({ 8, 4 }, (kv.full(dev, "f32", { 2 }, 2)
        ^ kv.from(dev, "f32", { 3, 2 })):list())
      assert.same({ 2, 4, 8 }, (2 ^ kv.from(dev, "f32", { 1, 2, 3 })):list())
      assert.same({ 1, -2, 3 }, x:floor():list())
    end)
  end)
end

support.each_device(check)
