--- index-K of several layers: what goes in comes back, and makes the logits that the ops
-- make of it.
local kv = require "kvlab"
local support = require "spec.support"

support.each_device(function(dev)
  local where = " on " .. dev:name()

  local function keys(n, dim, seed)
    return support.randn(dev, "bf16", { n, dim }, seed)
  end
  local function places(list) return kv.from(dev, "i64", { #list }, list) end

  describe("an index-K cache" .. where, function()
    it("keeps the keys of its layers apart", function()
      local index = kv.index_cache { layers = 2, blocks = 3, block_size = 16, dim = 32,
                                     device = dev }
      local first, second = keys(3, 32, 1), keys(3, 32, 2)
      index:append(0, first, places { 40, 3, -1 })
      index:append(1, second, places { 40, 3, -1 })
      for layer, k in pairs { [0] = first, second } do
        local want, want_scales = kv.ops.quantise_rows(k)
        local got, scales = index:gather(layer, places { 40, 3 })
        support.equal(got, want:narrow(0, 2))
        support.equal(scales, want_scales:narrow(0, 2))
      end
      assert.equal(36, index:bytes_token())
      assert.same({ 2, 3, 16 * 36 }, index.memory:dims())
    end)

    it("holds zeros where nothing was written", function()
      local index = kv.index_cache { blocks = 1, device = dev }
      local k, scales = index:gather(0, places { 5 })
      support.equal(k, kv.zeros(dev, "f8e4m3", { 1, 128 }))
      support.equal(scales, { 0 })
    end)

    for _, rotate in ipairs { false, true } do
      it("finds the token that a query is like, rotated: " .. tostring(rotate), function()
        local index = kv.index_cache { blocks = 4, block_size = 16, dim = 64,
                                       rotate = rotate, device = dev }
        local k, tokens = keys(64, 64, 3), {}
        for j = 0, 63 do tokens[j + 1] = (63 - j) end  -- tables: blocks 3, 2, 1, 0
        index:append(0, k, places(tokens))
        local order = kv.from(dev, "i32", { 1, 4 }, { 3, 2, 1, 0 })
        local q, weights = index:queries(k:narrow(21, 1):reshape { 1, 1, 64 },
          kv.ones(dev, "f32", { 1, 1 }))
        local logits = index:logits(0, q, weights, order,
          kv.from(dev, "i32", { 1 }, { 64 }), kv.tensor(dev, "f32", { 1, 64 }))
        -- token j lies at place 63 - j: position 16 b + t is block 3 - b, offset t
        local place = 63 - 21
        local position = (3 - math.floor(place / 16)) * 16 + place % 16
        assert.equal(position, logits:argmax():item())
        local square = (k:narrow(21, 1):cast "f32" * k:narrow(21, 1):cast "f32"):sum(1)
        support.close({ logits:max(1):item() }, square, 0, 0.05)
      end)
    end

    for bits, last in pairs { [4] = 7, [2] = 1 } do
      it("rounds keys to " .. bits .. " bits", function()
        local index = kv.index_cache { blocks = 1, dim = 32, bits = bits, device = dev }
        local k = support.randn(dev, "f32", { 3, 32 }, 5)
        k:narrow(2, 1):fill_(0)
        index:append(0, k, places { 0, 1, 2 })
        local k8, scales = index:gather(0, places { 0, 1, 2 })
        local got, unit, numbers = k8:cast("f32"):list(), scales:list(), k:list()
        for row = 0, 1 do
          local top = 0
          for i = 1, 32 do top = math.max(top, math.abs(numbers[row * 32 + i])) end
          for i = row * 32 + 1, row * 32 + 32 do
            local n = math.floor(numbers[i] / top * last + 0.5)
            assert.equal(n * 448 / last, got[i])
          end
          support.close({ unit[row + 1] * 448 }, { top }, 0, 1e-6)
        end
        for i = 65, 96 do assert.equal(0, got[i]) end
      end)
    end

    it("has scales that are powers of two, of keys and queries, if asked", function()
      local index = kv.index_cache { blocks = 1, block_size = 16, dim = 32,
                                     scale = "ue8m0", device = dev }
      local k, q = keys(9, 32, 6), support.randn(dev, "f32", { 2, 3, 32 }, 7)
      local order = {}
      for i = 1, 9 do order[i] = i - 1 end
      index:append(0, k, places(order))
      local k8, scales = index:gather(0, places(order))
      local want8, want = kv.ops.quantise_rows(k, nil, nil, "ue8m0")
      support.equal(k8, want8)
      support.equal(scales, want)
      for _, scale in ipairs(scales:list()) do
        assert.equal(0.5, (math.frexp(scale)))
      end
      local ones = kv.ones(dev, "f32", { 2, 3 })
      local q8, weights = index:queries(q, ones)
      for _, weight in ipairs(weights:list()) do
        assert.equal(0.5, (math.frexp(weight)))
      end
      local logits = index:logits(0, q8, weights, kv.zeros(dev, "i32", { 2, 1 }),
        kv.full(dev, "i32", { 2 }, 9), kv.tensor(dev, "f32", { 2, 9 })):list()
      local queries, numbers = q:list(), k:cast("f32"):list()
      for row = 0, 1 do
        for t = 0, 8 do -- sum over heads of relu(q . k), in double
          local sum, size = 0, 0
          for head = 0, 2 do
            local dot = 0
            for d = 1, 32 do
              local x = queries[(row * 3 + head) * 32 + d] * numbers[t * 32 + d]
              dot, size = dot + x, size + math.abs(x)
            end
            sum = sum + math.max(0, dot)
          end
          -- e4m3 is right to 1/16 of each number, twice
          assert.is_true(math.abs(logits[row * 9 + t + 1] - sum) < 0.13 * size)
        end
      end
    end)

    it("keeps rotated keys where it rotates", function()
      local index = kv.index_cache { blocks = 1, rotate = true, device = dev }
      local k = keys(2, 128, 4)
      index:append(0, k, places { 9, 8 })
      local got, scales = index:gather(0, places { 9, 8 })
      local want, want_scales = kv.ops.quantise_rows(kv.ops.hadamard(k, 128 ^ -0.5))
      support.equal(got, want)
      support.equal(scales, want_scales)
      local off = got:cast "f32" * scales:reshape { 2, 1 } - k:cast "f32"
      assert.is_true(off:abs():max():item() > 1)
    end)

    it("says what it expects", function()
      support.raises('"block" is no option, did you mean blocks?', kv.index_cache,
        { block = 3 })
      support.raises("blocks is missing, expected a whole number", kv.index_cache, {})
      support.raises("dim is 48, expected one of 32, 64, 128", kv.index_cache,
        { blocks = 1, dim = 48 })
      support.raises("bits is 5, expected one of 2, 4, 8", kv.index_cache,
        { blocks = 1, bits = 5 })
      support.raises("block_size is 5000, expected a whole number from 1 to 4096",
        kv.index_cache, { blocks = 1, block_size = 5000 })
      local index = kv.index_cache { blocks = 1, device = dev }
      support.raises("layer is 1, expected 0 ... 0", index.append, index, 1)
    end)
  end)
end)
