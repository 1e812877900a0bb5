--- kv.store: keys of token lists, and blocks between a cache's memory and a store.
local ffi = require "ffi"
local kv = require "kvlab"
local support = require "spec.support"

local raises = support.raises

local function bits(t)
  local host = t:to "cpu"
  return ffi.string(host:data(), host:bytes())
end

describe("kv.store", function()
  it("names blocks by model, tokens and block size", function()
    local store = kv.store("memory:", { model = "llama bf16 block_size=16",
                                             block_size = 16 })
    local tokens = {}
    for i = 0, 299 do tokens[i + 1] = (i * 7919 + 12345) % 32000 end
    local keys, n = store:keys(tokens)
    assert.equal(18, n)
    assert.equal(18 * 16, ffi.sizeof(keys))
    assert.equal("db72d620d8e0feab", bit.tohex(keys[17].hi, 16))
    local rest, m = store:keys({ unpack(tokens, 273) }, keys[16])
    assert.equal(1, m)
    assert.equal(keys[17].lo, rest[0].lo)
    assert.equal(0, select(2, store:keys { 1, 2, 3 }))
    assert.equal(0, store:find(keys, n, 2))
    store:close()
  end)

  it("describes a cache in its model's text", function()
    local cache = kv.cache { device = "cpu", layers = 3, blocks = 2, block_size = 8,
                             kv_heads = 2, head_dim = 16, format = "f8e4m3" }
    local text = kv.store.model("tiny", cache)
    for _, word in ipairs { "tiny", "layers=3", "kv_heads=2", "head_dim=16",
                            "block_size=8", "dtype=f8e4m3" } do
      assert.matches(word, text, 1, true)
    end
    cache:close()
  end)

  it("refuses what it does not know", function()
    raises("url is nil, expected a string", kv.store)
    raises('store: "block_sise" is no option, did you mean block_size?', kv.store,
      "memory:", { block_sise = 1 })
    raises('capacity is "8G", expected a number', kv.store, "memory:",
      { capacity = "8G" })
    raises("block_size is 1.5, expected a whole number >= 1", kv.store, "memory:",
      { block_size = 1.5 })
    raises("url begins with \"disk:\"", kv.store, "disk:x")
    local store = kv.store "memory:"
    raises("without model and block_size", store.keys, store, { 1 })
    local key, t = ffi.new "kvl_key", kv.zeros("cpu", "f32", { 2, 2, 1, 4, 8 })
    raises("memory is a number", store.put_block, store, key, 0, 5, 0)
    raises("index: 2, expected 0 ... 1", store.put_block, store, key, 0, t, 2)
    raises("part is -1", store.get_block, store, key, -1, t, 0)
    store:close()
    store:close()
    raises("the store is closed", store.put_block, store, key, 0, t, 0)
    raises("the store is closed", store.find, store, key, 1, 1)
    raises("the store is closed", store.stats, store)
  end)

  it("blames the line that misuses it", function()
    local store = kv.store "memory:"
    local ok, why = pcall(function() store:put_block(ffi.new "kvl_key", 0, 5, 0) end)
    assert.is_false(ok)
    assert.matches("store_spec.lua:%d+: memory is a number", why)
    store:close()
  end)

  it("does not tell the password of its URL", function()
    raises("redis store: 127.0.0.1:1", kv.store, "redis://u:secret@127.0.0.1:1")
    local _, why = pcall(kv.store, "redis://u:secret@127.0.0.1:1")
    assert.is_nil(why:find "secret")
  end)
end)

support.each_device(function(dev)
  describe("blocks on " .. dev:name(), function()
    for _, dtype in ipairs { "f32", "bf16", "f8e4m3" } do
      it("of " .. dtype .. " come back with the same bits, pinned or not", function()
        local store = kv.store("memory:", { model = "m", block_size = 4 })
        local shape = { 5, 2, 2, 4, 8 }
        local source = support.randn(dev, dtype, shape, 1)
        source:index(2):fill_(0 / 0)
        local keys = store:keys { 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 }
        for b = 0, 2 do
          assert.is_true(store:put_block(keys[b], 0, source, b + 1))
          if b < 2 then assert.is_true(store:put_block(keys[b], 1, source, b)) end
        end
        assert.equal(3, store:find(keys, 3, 1))
        assert.equal(2, store:find(keys, 3, 2))
        assert.equal(0, store:find(keys, 3, 3))
        for _, target in ipairs { kv.tensor(dev, dtype, shape),
                                  kv.pinned(dev, dtype, shape) } do
          target:fill_(7)
          assert.is_true(store:get_block(keys[0], 0, target, 4))
          assert.is_true(store:get_block(keys[1], 0, target, 0))
          assert.equal(bits(source:index(1)), bits(target:index(4)))
          assert.equal(bits(source:index(2)), bits(target:index(0)))
          local before = bits(target)
          local ok, why = store:get_block(keys[2], 1, target, 1)
          assert.is_nil(ok)
          assert.equal("not in the store", why)
          assert.equal(before, bits(target))
        end
        assert.same({ hits = 4, misses = 2, puts = 5, evictions = 0, damaged = 0,
          errors = 0, bytes_read = 4 * source:bytes() / 5, records = 5,
          bytes_written = source:bytes(), bytes_held = source:bytes() }, store:stats())
        assert.is_true(store:remove(keys[0], 0))
        assert.is_false(store:remove(keys[0], 0))
        assert.is_nil(store:problem())
        store:close()
      end)
    end

    it("are put after what was launched before", function()
      local store = kv.store "memory:"
      local x = kv.randn(dev, "f32", { 256, 256 }, { seed = 3 })
      local memory = kv.zeros(dev, "f32", { 1, 2, 1, 128, 256 })
      local stream, key = dev:open_stream(), ffi.new "kvl_key"
      dev:sync()
      dev:with_stream(stream, function()
        for _ = 1, 10 do x:matmul(x, memory:reshape { 256, 256 }) end
        memory:fill_(3)
        store:put_block(key, 0, memory, 0)
        memory:fill_(9)
        store:get_block(key, 0, memory, 0)
        memory:add(1, memory)
      end)
      dev:sync()
      assert.equal(4, memory:min():item())
      assert.equal(4, memory:max():item())
      stream:close()
      store:close()
    end)
  end)
end)
