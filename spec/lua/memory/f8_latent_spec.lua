--- Pages of f8_latent: what is packed into them, by the definition, and what they refuse.
local ffi = require "ffi"
local kv = require "kvlab"
local support = require "spec.support"

local cpu = kv.device "cpu"
local GROUP = 128

local function f32(x) return kv.from(cpu, "f32", { #x }, x) end

--- The bytes of a tensor.
local function bytes_of(t)
  local bytes, list = ffi.cast("const uint8_t *", t.ptr), {}
  for i = 0, tonumber(t:bytes()) - 1 do list[i + 1] = bytes[i] end
  return list
end

local function append(to, list)
  for _, x in ipairs(list) do to[#to + 1] = x end
end

--- The bytes of a row, by the definition: the value in f8e4m3, where each number is times
-- 1 / scale; its scales in f32, the largest magnitude of 128 numbers / 448; the other
-- numbers in bf16. The scales have a multiple of 16 bytes, of which the rest stay as they
-- were (`keep`).
local function packed(row, value_dim, keep)
  local numbers, scales, rest = {}, {}, {}
  for first = 1, value_dim, GROUP do
    local group, most = {}, 0
    for i = first, math.min(first + GROUP - 1, value_dim) do
      group[#group + 1], most = row[i], math.max(most, math.abs(row[i]))
    end
    local scale = f32 { most } / 448
    local by = scale:list()[1] >= 2 ^ -126 and f32 { 1 } / scale or f32 { 0 }
    append(numbers, bytes_of((f32(group) * by):cast "f8e4m3"))
    append(scales, bytes_of(scale))
  end
  while #scales % 16 ~= 0 do scales[#scales + 1] = keep end
  for i = value_dim + 1, #row do rest[#rest + 1] = row[i] end
  append(numbers, scales)
  if #rest > 0 then append(numbers, bytes_of(f32(rest):cast "bf16")) end
  return numbers
end

local function format(heads, size, dim, value_dim)
  return kv.format { codec = "f8_latent", kv_heads = heads, block_size = size,
                     head_dim = dim, value_dim = value_dim }
end

--- Two pages in which k, f32 [tokens, heads, dim], lies from token 0 of block 1 on.
local function page_of(k, size, value_dim)
  local of = format(k:size(1), size, k:size(2), value_dim)
  local memory = kv.full(cpu, "u8", { 2, tonumber(kv.C.kvl_format_bytes_page(of)) }, 0xAB)
  kv.ops.append_kv(k, nil, kv.arange(cpu, "i64", k:size(0), size), memory, of)
  return memory, of
end

--- Rows [tokens, heads, dim] of which each 64 numbers have another size, or are zeros.
local function rows(tokens, heads, dim, seed)
  local t = kv.randn(cpu, "f32", { tokens, heads, dim }, { seed = seed })
  local list, rng = t:list(), support.rng(seed)
  for i = 1, #list, 64 do
    local by = 10 ^ (rng(9) - 4)
    for j = i, math.min(i + 63, #list) do
      list[j] = rng(7) == 0 and 0 or list[j] * by
    end
  end
  return kv.from(cpu, "f32", t:dims(), list)
end

--- What is held of tokens that were appended to a page of their own.
local function held(k, value_dim)
  local memory, of = page_of(k, 8, value_dim)
  local out = kv.zeros(cpu, "f32", { 1, k:size(1), 8, k:size(2) })
  kv.ops.read_blocks(memory, kv.ones(cpu, "i32", { 1 }), out, nil, of)
  return out:list()
end

describe("f8_latent", function()
  for _, s in ipairs { { 8, 1, 576, 512, 8 }, { 5, 2, 64, 48, 5 }, { 3, 1, 152, 144, 4 },
                       { 2, 1, 512, 512, 2 }, { 1, 3, 24, 16, 1 } } do
    it(("packs %d tokens of %d heads, head_dim %d, value_dim %d, block %d, by the "
        .. "definition"):format(unpack(s)), function()
      local tokens, heads, dim, value_dim, size = unpack(s)
      local k = rows(tokens, heads, dim, 1)
      local got, list, want = page_of(k, size, value_dim):index(1):list(), k:list(), {}
      for head = 0, heads - 1 do
        for t = 0, size - 1 do
          local row = {}
          for d = 1, dim do row[d] = list[(t * heads + head) * dim + d] or 0 end
          local bytes = packed(row, value_dim, 0xAB)
          if t >= tokens then for i = 1, #bytes do bytes[i] = 0xAB end end
          append(want, bytes)
        end
      end
      assert.same(want, got)
    end)
  end

  it("takes 656 bytes for a latent of 512 + 64 numbers", function()
    assert.equal(64 * 656, tonumber(kv.C.kvl_format_bytes_page(format(1, 64, 576, 512))))
  end)

  it("packs rows of f16 and bf16 as it packs their values", function()
    for _, dtype in ipairs { "f16", "bf16" } do
      local k = support.randn(cpu, dtype, { 4, 2, 64 }, 3)
      support.equal(page_of(k, 8, 48), (page_of(k:cast "f32", 8, 48)))
    end
  end)

  it("keeps normal numbers to 2.6% of their size, and the others as bf16", function()
    local k = kv.randn(cpu, "f32", { 8, 1, 576 }, { seed = 9 })
    local got, want, kept = held(k, 512), k:list(), k:cast("bf16"):list()
    local far, all = 0, 0
    for i, x in ipairs(want) do
      if (i - 1) % 576 < 512 then far, all = far + (got[i] - x) ^ 2, all + x ^ 2
      else assert.equal(kept[i], got[i]) end
    end
    assert.is_true(math.sqrt(far / all) < 0.026)
  end)

  it("keeps zeros, and makes NaN of a group with a number that is not finite", function()
    local list = {}
    for i = 1, 280 do list[i] = i <= 128 and 1 or 0 end
    for _, bad in ipairs { 0 / 0, math.huge, -math.huge } do
      list[7] = bad
      local got = held(kv.from(cpu, "f32", { 1, 1, 280 }, list), 256)
      for i = 1, 128 do assert.is_true(got[i] ~= got[i]) end
      for i = 129, 280 do assert.equal(0, got[i]) end
    end
  end)

  it("goes through a store as bytes, and not into another format", function()
    local function cache_of(name)
      return kv.cache { device = cpu, layers = 1, blocks = 2, block_size = 4,
        kv_heads = 1, head_dim = 24, value_dim = 16, format = name }
    end
    local cache, other = cache_of "f8_latent", cache_of "bf16"
    assert.not_equal(kv.store.model("m", cache), kv.store.model("m", other))
    local store = kv.store("memory:", { model = kv.store.model("m", cache),
                                        block_size = 4 })
    local keys, memory = store:keys { 1, 2, 3, 4 }, cache:layer(0)
    memory:fill_(7)
    store:put_block(keys[0], 0, memory, 1)
    memory:fill_(0)
    assert.truthy(store:get_block(keys[0], 0, memory, 0))
    support.equal(memory:index(0), kv.full(cpu, "u8", { memory:size(1) }, 7))
    store:close()
  end)

  it("refuses what it cannot hold", function()
    support.refuses(function() format(1, 16, 72) end, "format is f8_latent, expected "
      .. "values that are the first numbers of keys")
    support.refuses(function() format(1, 16, 72, 40) end,
      "values of 40 numbers, expected a multiple of 16 for f8_latent")
    support.refuses(function()
      kv.cache { device = cpu, layers = 1, blocks = 4, block_size = 16, kv_heads = 1,
                 head_dim = 64, format = "f8_latent" }
    end, "expected values that are the first numbers of keys")
    support.refuses(function()
      kv.ops.append_kv(kv.zeros(cpu, "f32", { 1, 1, 24 }), nil,
        kv.zeros(cpu, "i64", { 1 }), kv.zeros(cpu, "u8", { 2, 160 }),
        format(1, 4, 24, 16))
    end, "cache has 320 bytes for 2 blocks, expected 192 for each")
  end)
end)
