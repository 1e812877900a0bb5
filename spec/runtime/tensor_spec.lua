local ffi = require "ffi"
local kv = require "kvlab"
local support = require "spec.support"

local raises = support.raises
local MIB = 1024 * 1024

local function check(dev)
  describe("tensor on " .. dev:name(), function()
    it("takes a device by name", function()
      assert.equal(dev, kv.zeros(dev:name(), "f32", { 1 }).device)
      raises("expected \"cpu\"", kv.zeros, "gpu", "f32", { 1 })
    end)

    it("holds what it was made from", function()
      local t = kv.from(dev, "f32", { { 1, 2, 3 }, { 4, 5, 6 } })
      assert.same({ 2, 3 }, t:dims())
      assert.same({ 1, 2, 3, 4, 5, 6 }, t:list())
      assert.same({ 1, -2 }, kv.from(dev, "i64", { 2 }, { 1, -2 }):list())
      assert.same({ 0.5, -1.5 }, kv.from(dev, "bf16", { 0.5, -1.5 }):list())
      assert.same({}, kv.from(dev, "f32", { 0, 3 }, {}):list())
    end)

    it("narrows, indexes and reshapes without a copy", function()
      local t = kv.arange(dev, "i32", 24):reshape { 4, 3, 2 }
      assert.same({ 6, 7, 8, 9, 10, 11 }, t:index(1):list())
      assert.same({ 3, 2 }, t:index(1):dims())
      assert.same({ 12, 13, 14, 15, 16, 17 }, t:narrow(2, 1):list())
      assert.same({ 4, 6 }, t:reshape({ -1, 6 }):dims())
      t:narrow(0, 1):fill_(9)
      assert.equal(9, t:list()[6])
      local view = t:index(3)
      t:free()
      assert.same({ 18, 19, 20, 21, 22, 23 }, view:list())
    end)

    it("copies, casts and moves", function()
      local t = kv.from(dev, "f32", { 1.5, -2.25, 3 })
      local copy = t:clone()
      t:fill_(0)
      assert.same({ 1.5, -2.25, 3 }, copy:list())
      assert.same({ 1, -2, 3 }, copy:cast("i32"):list())
      assert.same(copy:list(), copy:to(kv.device "cpu"):to(dev):list())
      assert.same({ 1.5, -2.25, 3 }, t:copy_(copy):list())
      raises("dst is f32 [3], expected f32 [4]", function()
        t:copy_(kv.zeros(dev, "f32", { 4 }))
      end)
    end)

    it("keeps a frozen tensor from being written", function()
      local t = kv.from(dev, "f32", { 2, 2 }, { 1, 2, 3, 4 })
      assert.is_false(t:is_frozen())
      local row = t:freeze():narrow(1, 1)
      assert.is_true(row:is_frozen())
      local other = kv.zeros(dev, "f32", { 2, 2 })
      raises("fill: t is frozen, expected a tensor that may be written", t.fill_, t, 1)
      raises("out is frozen", row.add, other:narrow(0, 1), 1, row)
      raises("dst is frozen", t.copy_, t, other)
      raises("write: the tensor is frozen", function()
        kv.check(kv.C.kvl_tensor_write(t, ffi.new("float[4]"), 16))
      end)
      assert.same({ 1, 2, 3, 4 }, t:list())
      assert.same({ 2, 4, 6, 8 }, t:mul(2):list())
      raises("freeze: is_frozen is \"no\", expected true or false", t.freeze, t, "no")
      t:freeze(false):fill_(5)
      assert.same({ 5, 5, 5, 5 }, t:list())
      -- the next tensor in the same memory is not frozen
      t:freeze():free()
      assert.is_false(kv.zeros(dev, "f32", { 2, 2 }):is_frozen())
    end)

    it("keeps all 64 bits of whole numbers", function()
      local list = kv.from(dev, "u64", { 0, 5, 2 ^ 53, 0xfedcba9876543211ULL }):list()
      assert.equal(0xfedcba9876543211ULL, list[4])
      assert.equal("18364758544493064721ULL", tostring(list[4]))
      assert.equal("5ULL", tostring(list[2]))
      local signed = kv.from(dev, "i64", { -3, -0x7edcba9876543211LL }):list()
      assert.equal(-3, signed[1])
      assert.equal(-0x7edcba9876543211LL, signed[2])
      local word = kv.from(dev, "u64", { 0xfedcba9876543211ULL })
      assert.equal(0xfedcba9876543211ULL, word:item())
      assert.truthy(tostring(word):find("18364758544493064721\n", 1, true))
      assert.truthy(tostring(kv.from(dev, "u64", { 1, 2 })):find("   1\n   2\n", 1, true))
    end)

    it("reads every NaN as a NaN, whatever its bits", function()
      for _, dtype in ipairs { "f32", "bf16", "f16" } do
        local bits = kv.full(dev, "u8", { 64 }, 255)
        local t = kv.zeros(dev, dtype, { 64 / kv.dtype_bytes(dtype) })
        kv.check(kv.C.kvl_tensor_write(t, ffi.new("uint8_t[64]", bits:list()), 64))
        for _, x in ipairs(t:list()) do
          assert.equal("number", type(x))
          assert.is_true(x ~= x)
        end
      end
    end)

    it("draws the same numbers for the same seed", function()
      local a = kv.randn(dev, "f32", { 1000 }, { seed = 3 }):list()
      assert.same(a, kv.randn(dev, "f32", { 1000 }, { seed = 3 }):list())
      assert.not_same(a, kv.randn(dev, "f32", { 1000 }, { seed = 4 }):list())
      local later = kv.randn(dev, "f32", { 500 }, { seed = 3, offset = 500 }):list()
      for i = 1, 500 do assert.equal(a[500 + i], later[i]) end
    end)

    it("names the argument, what came and what was expected", function()
      raises("dtype is f31", kv.tensor, dev, "f31", { 1 })
      raises("size of dim 1 is -2", kv.tensor, dev, "f32", { 1, -2 })
      raises("size of dim 0 is 1.5", kv.tensor, dev, "f32", { 1.5 })
      raises("2^63", kv.tensor, dev, "f32", { 2 ^ 40, 2 ^ 40 })
      raises("7 dims", kv.tensor, dev, "f32", { 1, 1, 1, 1, 1, 1, 1 })
      raises("3 values for shape [2]", kv.from, dev, "f32", { 2 }, { 1, 2, 3 })
      raises("rmsnorm: x is a table, expected a tensor", kv.ops.rmsnorm, { 1 }, 3, 1e-5)
      raises("rmsnorm: x is nil, expected a tensor", kv.ops.rmsnorm, nil, 3, 1e-5)
      raises("paged_attention: cache is missing, expected a tensor",
        kv.ops.paged_attention, {})
      raises("ragged", kv.from, dev, "f32", { { 1 }, { 1, 2 } })
      local t = kv.zeros(dev, "f32", { 2, 3 })
      raises("rows 1 ... 3, expected within 0 ... 2", t.narrow, t, 1, 2)
      raises("index: 2, expected 0 ... 1", t.index, t, 2)
      raises("f32 [2, 3] to f32 [4]", t.reshape, t, { 4 })
      raises("item() of 6", t.item, t)
      t:free()
      raises("closed", t.narrow, t, 0, 1)
      raises("closed", t.exp, t)
      assert.equal("[closed tensor]", tostring(t))
    end)

    it("takes no number that its dtype cannot hold", function()
      local words = "%s, expected a whole number that %s holds"
      local wrong = { i32 = { 2 ^ 31, -2 ^ 31 - 1, 0.5, 0 / 0, 1 / 0, -1 / 0, 2 ^ 53 },
                      u8 = { 256, -1, 0.5, 0 / 0 }, u64 = { -1, 2 ^ 64, 1.5, 0 / 0 },
                      i64 = { 2 ^ 63, -2 ^ 63 - 2048, 1.5, 1 / 0 } }
      for dtype, numbers in pairs(wrong) do
        local t = kv.full(dev, dtype, { 2 }, 7)
        for _, x in ipairs(numbers) do
          local is = words:format(("is %.17g"):format(x), dtype)
          raises("value 1 " .. is, kv.from, dev, dtype, { 3, x })
          raises("value 1 " .. is, kv.from, dev, dtype, { { 3 }, { x } })
          raises("value " .. is, kv.full, dev, dtype, { 2 }, x)
          raises("value " .. is, t.fill_, t, x)
          raises(("start is %.17g, expected a"):format(x), t.arange_, t, x)
          local many = {}
          for i = 1, 500 do many[i] = i % 100 end
          many[450] = x -- when the loop is compiled
          raises("value 449 " .. is, kv.from, dev, dtype, many)
        end
        if dtype ~= "u64" then assert.same({ 7, 7 }, t:list()) end
      end
      raises("value 0 is -1LL, expected", kv.from, dev, "u64", { -1LL })
      raises("value 0 is 9223372036854775808ULL, expected", kv.from, dev, "i64",
        { 2ULL ^ 63 })
      raises("value 0 is 4294967296LL, expected", kv.from, dev, "i32", { 2LL ^ 32 })
      raises("start + step is 0.5", kv.arange, dev, "i32", 3, 0, 0.5)
      raises("the last element is 256", kv.arange, dev, "u8", 257)
      raises("high - 1 is 2147483648", kv.randint, dev, "i32", { 2 }, { low = 2 ^ 31 - 9,
        high = 2 ^ 31 + 1 })
      assert.same({ -2 ^ 31, 2 ^ 31 - 1 }, kv.from(dev, "i32",
        { -2 ^ 31, 2 ^ 31 - 1 }):list())
      assert.same({ 0, 255 }, kv.from(dev, "u8", { 0, 255LL }):list())
      assert.same({ 255, 254, 253 }, kv.arange(dev, "u8", 3, 255, -1):list())
      assert.equal(0, #kv.arange(dev, "u8", 0, 300):list())
      local most = { 0x7fffffffffffffffLL, -0x7fffffffffffffffLL - 1 }
      assert.same(most, kv.from(dev, "i64", most):list())
      assert.same({ 0xffffffffffffffffULL }, kv.from(dev, "u64",
        { 0xffffffffffffffffULL }):list())
    end)

    it("asks for more than the device has and stays usable", function()
      raises("no memory on " .. dev:name(), kv.tensor, dev, "f32", { 2 ^ 42 })
      assert.equal(3, kv.full(dev, "f32", { 1 }, 3):item())
    end)

    it("asks the device once for large temporaries of a loop", function()
      local x = kv.ones(dev, "f32", { 10 * MIB })
      support.collect()
      dev:trim()
      local before = dev:stats().allocations
      for _ = 1, 10 do x:add(1):free() end
      assert.equal(before + 1, dev:stats().allocations)
      kv.tensor(dev, "f32", { 9 * MIB }):free() -- fits the block of 40 MiB
      assert.equal(before + 1, dev:stats().allocations)
      local other = kv.tensor(dev, "u8", { 33 * MIB }) -- would leave 7 MiB unused
      assert.equal(before + 2, dev:stats().allocations)
      assert.equal(40 * MIB, dev:stats().bytes_cached)
      other:free()
      assert.equal(40 * MIB + 34 * MIB, dev:stats().bytes_cached)
      local best = kv.tensor(dev, "u8", { 34 * MIB })
      assert.equal(40 * MIB, dev:stats().bytes_cached)
      best:free()
      dev:trim()
      assert.equal(0, dev:stats().bytes_cached)
    end)

    it("runs the collector for tensors that nobody frees, and for no others", function()
      support.collect()
      collectgarbage "stop"
      local collections = 0
      coroutine.wrap(function() -- so that no slot of this stack refers to it
        getmetatable(newproxy(true)).__gc = function() collections = collections + 1 end
      end)()
      -- 256 MiB; on a GPU, which writes that in no time, a sixteenth of its memory
      local most = dev:is_cpu() and 256 * MIB or dev:stats().bytes_total / 16
      local each = dev:is_cpu() and 16 * MIB or 256 * MIB
      local many = math.ceil(2.5 * most / each)
      for _ = 1, many do kv.tensor(dev, "u8", { each }):free() end
      assert.equal(0, collections)
      for _ = 1, many do kv.tensor(dev, "u8", { each }) end
      assert.equal(1, collections)
      collectgarbage "restart"
    end)

    it("frees in a scope all but what it returns", function()
      dev:sync()
      support.collect()
      local before = dev:stats().bytes_live
      local kept, list = kv.scope(function()
        local t = kv.zeros(dev, "f32", { 1024 })
        for _ = 1, 10 do t = t + 1 end
        return t, { x = { kv.ones(dev, "f32", { 1024 }) } }
      end)
      assert.equal(before + 2 * 4096, dev:stats().bytes_live)
      assert.equal(10, kept:max():item())
      assert.equal(1, list.x[1]:max():item())
      raises("inside", kv.scope, function()
        kv.zeros(dev, "f32", { 1024 })
        error "inside"
      end)
      kept:free()
      list.x[1]:free()
      support.collect()
      assert.equal(before, dev:stats().bytes_live)
    end)

    it("holds memory flat while a loop makes temporaries #slow", function()
      local t = kv.ones(dev, "f32", { 256 })
      local peak, rounds = 0, 200000
      for i = 1, rounds do
        t = t * 1
        if i % 1000 == 0 then peak = math.max(peak, dev:stats().bytes_live) end
      end
      assert.equal(1, t:min():item())
      assert.is_true(peak < 512 * 1024 * 1024, ("peak of %d bytes"):format(peak))
    end)
  end)
end

support.each_device(check)

describe("#gpu", function()
  if not kv.cuda_available() then return end

  it("refuses tensors of two devices in one op", function()
    local a = kv.ones(kv.device "cuda", "f32", { 2 })
    local b = kv.ones(kv.device "cpu", "f32", { 2 })
    raises("b is on cpu, expected cuda:0", function() return a + b end)
    raises("expected one on the cpu", a.data, a)
  end)
end)

describe("tensor printing", function()
  local dev = kv.device "cpu"

  it("aligns columns and ends with dtype, shape and device", function()
    assert.equal("   1    2\n   3    4\n[i32 tensor of shape [2, 2] on cpu]",
      tostring(kv.from(dev, "i32", { { 1, 2 }, { 3, 4 } })))
    assert.equal("0.5000\n1.2500\n[f32 tensor of shape [2] on cpu]",
      (tostring(kv.from(dev, "f32", { 0.5, 1.25 })):gsub("\n ", "\n"):gsub("^ +", "")))
  end)

  it("takes out a common scale and shows nan and inf", function()
    local text = tostring(kv.from(dev, "f32", { 1e-7, 2.5e-7 }))
    assert.truthy(text:find("1e-07 *", 1, true), text)
    text = tostring(kv.from(dev, "f32", { 0 / 0, 1 / 0, 1 }))
    assert.truthy(text:find "nan" and text:find "inf", text)
  end)

  it("cuts long tensors and names matrices", function()
    local text = tostring(kv.zeros(dev, "f32", { 100, 100 }))
    assert.truthy(#text < 2000 and text:find "..", text)
    assert.truthy(tostring(kv.zeros(dev, "f32", { 2, 2, 2 })):find("(1,.,.) =", 1, true))
    assert.equal("[f32 tensor of shape [0, 3] on cpu]",
      tostring(kv.zeros(dev, "f32", { 0, 3 })))
  end)
end)

describe("a hostile build", function()
  local dev = kv.device "cpu"
  local hostile = kv.C.kvl_fail_allocation(0) == 0

  it("fails every allocation of an open once and leaves everything usable", function()
    if not hostile then return pending "not a hostile build" end
    local out = ffi.new "kvl_pool *[1]"
    local opens = {
      function() return kv.tensor(dev, "f32", { 100000000 }) end, -- past the cache
      function() return dev:open_stream() end,
      function() return dev:open_event() end,
      function()
        kv.check(kv.C.kvl_pool_open(8, 4, 0, out))
        return ffi.gc(out[0], kv.C.kvl_pool_close)
      end,
      function() return kv.safetensors "lua/models/recall/model.safetensors" end,
    }
    for i, open in ipairs(opens) do
      local failures = 0
      for n = 1, 200 do
        collectgarbage()
        kv.check(kv.C.kvl_fail_allocation(n))
        local ok, why = pcall(open)
        local unused = kv.C.kvl_fail_allocation(0)
        assert.equal(0, unused)
        if ok and n > failures + 2 then break end -- a retry may have succeeded
        if not ok then
          failures = failures + 1
          assert.truthy(why:find "memory", why)
        end
      end
      assert.is_true(i == 1 or failures > 0)
      assert.is_truthy(open())
    end
  end)

  it("poisons fresh memory", function()
    if not hostile then return pending "not a hostile build" end
    local x = kv.tensor(dev, "f32", { 100 }):list()
    for i = 1, 100 do assert.is_true(x[i] ~= x[i]) end
  end)
end)
