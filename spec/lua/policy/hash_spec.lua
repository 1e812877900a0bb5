--- Planes, the summary of hashes, and the cache of them by content.
local ffi = require "ffi"
local kv = require "kvlab"
local hash_cases = require "spec.kernels.hash_cases"
local reference = require "spec.reference.hash"
local rig = require "spec.rig"
local support = require "spec.support"

local raises = support.raises

--- Products of all pairs of rows.
local function gram(planes) return planes:matmul_t(planes):list() end

describe("planes", function()
  it("are unit rows, orthogonal within a stack of head_dim", function()
    for _, shape in ipairs { { 64, 64 }, { 64, 128 }, { 256, 64 }, { 192, 80 },
                             { 32, 16 } } do
      local bits, dim = shape[1], shape[2]
      local dots = gram(kv.hash.planes { device = "cpu", bits = bits, head_dim = dim })
      for i = 0, bits - 1 do
        for j = 0, bits - 1 do
          local dot = dots[i * bits + j + 1]
          if i == j then assert.near(1, dot, 1e-5)
          elseif math.floor(i / dim) == math.floor(j / dim) then
            assert.near(0, dot, 1e-5)
          end
        end
      end
    end
  end)

  it("are unit rows at random angles when they are gaussian", function()
    local dots, largest = gram(kv.hash.planes { device = "cpu", bits = 64, head_dim = 64,
                                                kind = "gaussian" }), 0
    for i = 0, 63 do
      assert.near(1, dots[i * 64 + i + 1], 1e-5)
      for j = 0, i - 1 do largest = math.max(largest, math.abs(dots[i * 64 + j + 1])) end
    end
    assert.is_true(largest > 0.2 and largest < 0.7)
  end)

  it("of both kinds begin with the same normal row, and keep its side", function()
    local x = kv.randn("cpu", "f32", { 64, 64 }, { seed = 3 })
    for _, kind in ipairs { "orthogonal", "gaussian" } do
      local planes = kv.hash.planes { device = "cpu", head_dim = 64, kind = kind,
                                      seed = 3 }
      local row, first = planes:index(0):list(), x:index(0):list()
      for d = 2, 64 do assert.near(first[d] / first[1], row[d] / row[1], 1e-3) end
      local sides = planes:mul(x):sum(1):list()
      for i = 1, 64 do assert.is_true(sides[i] > 0) end
    end
  end)

  it("have no direction that they like: a Haar matrix's entries are even", function()
    local sum, count = 0, 0
    for seed = 1, 200 do
      local planes = kv.hash.planes { device = "cpu", bits = 32, head_dim = 8,
                                      seed = seed }
      sum = sum + planes:index(7):list()[8] -- of the last row of a stack
      count = count + 1
    end
    assert.near(0, sum / count, 4 / math.sqrt(8 * count))
  end)

  it("are the same for the same seed, and others for another", function()
    local function planes(seed)
      return kv.hash.planes { device = "cpu", bits = 128, head_dim = 64, seed = seed }
    end
    support.equal(planes(5), planes(5))
    assert.is_true((planes(5) - planes(6)):abs():max():item() > 0.1)
  end)

  it("refuse what they cannot be", function()
    raises("bits is 96, expected 32 or a multiple of 64 up to 1024", kv.hash.planes,
      { bits = 96, head_dim = 8 })
    raises("head_dim is missing, expected a whole number from 1", kv.hash.planes, {})
    raises('kind is "round", expected one of orthogonal, gaussian', kv.hash.planes,
      { head_dim = 8, kind = "round" })
    raises('hash.planes: "bit" is no option, did you mean bits?', kv.hash.planes,
      { head_dim = 8, bit = 64 })
  end)
end)

describe("distances of hashes", function()
  it("tell the angle between two vectors", function()
    local bits, dim = 1024, 64
    local planes = kv.hash.planes { device = "cpu", bits = bits, head_dim = dim }
    for _, angle in ipairs { 0, 0.3, 1, math.pi / 2, 3 } do
      local x = kv.zeros("cpu", "f32", { 2, dim })
      local p = x:data()
      p[0], p[dim], p[dim + 1] = 1, math.cos(angle), math.sin(angle)
      local words = hash_cases.words(kv.hash.rows(x, planes))
      local n = reference.distance(hash_cases.bits(words, 0, bits),
        hash_cases.bits(words, bits / 64, bits))
      assert.near(angle / math.pi, n / bits, 4 * 0.5 / math.sqrt(bits))
    end
  end)
end)

local SHAPE = { layers = 2, blocks = 9, kv_heads = 2, block_size = 4, head_dim = 16,
                heads = 4, dtype = "f32" }

local function summary(dev, o)
  local shape = { device = dev }
  for key, value in pairs(SHAPE) do shape[key] = value end
  return kv.hash.summary(shape, o)
end

local function check_summary(dev)
  it("keeps the hashes of a block's tokens, or of its mean, for each layer", function()
    for _, per in ipairs { "token", "block" } do
      local hashes = summary(dev, { bits = 128, per = per })
      assert.equal(per == "token" and 64 or 16, hashes:bytes_block())
      local memory = kv.randn(dev, "f32", { 9, 2, 2, 4, 16 }, { seed = 2 })
      local blocks = kv.from(dev, "i32", { 3 }, { 7, 1, 8 })
      hashes:update { layer = 1, k = memory, k_blocks = blocks, blocks = blocks,
                      num_tokens = kv.from(dev, "i32", { 3 }, { 4, 4, 4 }) }
      local empty = kv.zeros(dev, "u64", hashes:layer(0):dims())
      hash_cases.equal(hashes:layer(0), empty, "the other layer")
      local k = memory:index(8):index(0) -- [kv_heads, block_size, head_dim]
      local x = per == "token" and k:reshape { 8, 16 } or k:mean(1)
      local want = kv.hash.rows(x, hashes.planes)
      hash_cases.equal(hashes:layer(1):index(8):reshape { -1, 2 }, want, per)
    end
  end)

  it("gives a block that a policy is shown kept hashes, or makes them anew", function()
    for _, per in ipairs { "block", "token" } do
      local its_rig = rig.new(dev, { policy = "gsa_on_device",
        options = { per = per, hash_cache_size = 2 } })
      local hashes, cache = its_rig.policy.hashes, its_rig.cache
      for layer = 0, 1 do
        cache:layer(layer):copy_(kv.randn(dev, "f32", cache:layer(layer):dims(),
          { seed = 5 + layer }))
      end
      local function show(keys, ...) its_rig.attention:show({ ... }, { 16, 16 }, keys) end
      local function rows(block)
        return { hashes:layer(0):index(block):clone(),
                 hashes:layer(1):index(block):clone() }
      end
      local function expect(want, block)
        for layer = 0, 1 do
          hash_cases.equal(hashes:layer(layer):index(block), want[layer + 1], per)
        end
      end
      show(nil, 3, 4)
      local three, four = rows(3), rows(4)
      its_rig.attention:keep("three", 3)
      its_rig.attention:keep("four", 4)
      for layer = 0, 1 do -- the contents move to blocks that had others
        local memory = cache:layer(layer)
        memory:index(8):copy_(memory:index(4))
        memory:index(7):fill_(0 / 0) -- whose K is not needed
      end
      show({ "three", "new" }, 7, 8)
      expect(three, 7)
      expect(four, 8)
      assert.same({ 1, 1 }, { hashes.cache:stats().hits, hashes.cache:stats().misses })
      cache:close()
    end
  end)

  it("gives a block the hashes that were stored for its content", function()
    local hashes = summary(dev, { per = "token", cache_size = 2 })
    for layer = 0, 1 do
      hashes:layer(layer):copy_(hash_cases.random(dev, { 9, 2, 4, 1 }, 64,
        support.rng(layer)))
    end
    local kept = { hashes:layer(0):index(3):clone(), hashes:layer(1):index(3):clone() }
    hashes:store("three", 3)
    for layer = 0, 1 do hashes:layer(layer):fill_(0) end
    assert.is_true(hashes:restore("three", 5))
    assert.is_false(hashes:restore("four", 5))
    for layer = 0, 1 do
      hash_cases.equal(hashes:layer(layer):index(5), kept[layer + 1], "hashes")
    end
    hashes:store("four", 4)
    hashes:store("five", 5)
    assert.is_false(hashes:restore("three", 5))
    assert.same({ entries = 2, hits = 1, misses = 2, puts = 3, evictions = 1 },
      hashes.cache:stats())
  end)
end

describe("a summary of hashes", function()
  support.each_device(check_summary)

  it("refuses what it cannot be", function()
    raises('per is "row", expected one of block, token', summary, "cpu", { per = "row" })
    raises('planes is "flat", expected one of orthogonal, gaussian', summary, "cpu",
      { planes = "flat" })
    raises("hash_planes is 32, expected bits = 64", summary, "cpu", { hash_planes = 32 })
    assert.equal(64, summary("cpu", { hash_planes = 64 }).bits)
  end)
end)

describe("a cache of hashes", function()
  it("drops the least recently used", function()
    local cache = kv.hash.cache { size = 3 }
    for i = 1, 3 do cache:put("k" .. i, i) end
    assert.equal(1, cache:get "k1")
    cache:put("k4", 4)
    assert.is_nil(cache:get "k2")
    cache:put("k3", 33) -- again: the newest
    cache:put("k5", 5)
    assert.is_nil(cache:get "k1")
    assert.equal(33, cache:get "k3")
    assert.equal(4, cache:get "k4")
    assert.same({ entries = 3, hits = 3, misses = 2, puts = 6, evictions = 2 },
      cache:stats())
  end)

  it("does what a list searched from its end does, over many steps", function()
    local cache, rng, list = kv.hash.cache { size = 5 }, support.rng(3), {}
    local function find(key)
      for i, entry in ipairs(list) do
        if entry.key == key then return table.remove(list, i) end
      end
    end
    for step = 1, 3000 do
      local key, action = rng(9), rng(5)
      local entry = find(key)
      if action == 0 then
        assert.equal(entry and entry.value, cache:remove(key))
      elseif action < 3 then
        assert.equal(entry and entry.value, cache:get(key))
        list[#list + 1] = entry
      else
        cache:put(key, step)
        list[#list + 1] = { key = key, value = step }
        if #list > 5 then table.remove(list, 1) end
      end
      assert.equal(#list, cache.count)
    end
  end)

  it("keeps nothing when it may not, and takes no nil", function()
    local cache = kv.hash.cache { size = 0 }
    cache:put(1, 1)
    assert.is_nil(cache:get(1))
    raises("value is nil", cache.put, cache, 1)
    raises("size is -1, expected a whole number >= 0", kv.hash.cache, { size = -1 })
  end)
end)

describe("policy gsa_on_device", function()
  it("takes the names of its source, and both names of one number", function()
    local policy = kv.policy("gsa_on_device", { sparse_ratio = 0.2, hash_bits = 128,
      hash_planes = 128, local_window_sz = 3, init_window_sz = 2, hash_cache_size = 7 })
    assert.equal(0.2, policy.ratio)
    assert.equal(3, policy.recent)
    assert.equal(2, policy.sink)
  end)

  it("selects per token and for all heads as its ops do", function()
    for _, o in ipairs { { per = "token" }, { heads = "shared" },
                         { per = "token", heads = "shared", hash_bits = 128 },
                         { planes = "gaussian", hash_bits = 32 } } do
      o.ratio, o.min_blocks = 0.3, 0
      local lengths = { 1, 17, 160, 250 }
      local run = rig.decode(kv.device "cpu", { policy = "gsa_on_device", options = o,
                                                lengths = lengths, steps = 2 })
      local heads = o.heads == "shared" and 1 or rig.SHAPE.kv_heads
      for _, step in ipairs(run.steps) do
        assert.equal(heads, step.selection:size(1))
        local counts = step.counts:list()
        for i, len in ipairs(step.lens) do
          assert.equal(kv.policy.budget_blocks(run.policy.budget, math.ceil(len / 16)),
            counts[(i - 1) * heads + 1])
        end
      end
    end
  end)
end)

describe("ops of hashes", function()
  local C = kv.C
  local function zeros(dtype, ...) return kv.zeros("cpu", dtype, { ... }) end

  it("say which argument is wrong", function()
    support.fails(C.kvl_hash_rows(zeros("f32", 2, 8), zeros("f32", 48, 8),
      zeros("u64", 2, 1)), "planes has 48 bits, expected 32 or a multiple of 64")
    support.fails(C.kvl_hash_rows(zeros("f32", 2, 8), zeros("f32", 64, 8),
      zeros("u64", 2, 2)), "hashes have 2 words, expected 1 for 64 planes")
    support.fails(C.kvl_score_hamming(zeros("u64", 1, 2, 1), zeros("u64", 4, 2, 8, 1),
      zeros("i32", 1, 3), zeros("i32", 1), 16, zeros("f32", 1, 2, 3)),
      "hashes are of blocks of 8 tokens, expected block_size = 16")
    support.fails(C.kvl_score_hamming(zeros("u64", 1, 4, 1), zeros("u64", 4, 4, 1),
      zeros("i32", 1, 3), zeros("i32", 1), 16, zeros("f32", 1, 2, 3)),
      "scores has 2 heads, expected kv_heads = 4 or 1")
    local call = ffi.new "kvl_hamming"
    support.fails(C.kvl_select_hamming(call), "q is missing, expected a tensor")
  end)
end)
