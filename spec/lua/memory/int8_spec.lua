--- Pages of int8: what is packed into them, by the definition, and what they refuse.
local ffi = require "ffi"
local kv = require "kvlab"
local support = require "spec.support"

local cpu = kv.device "cpu"
local GROUP = 64

--- x / y in f32; and x in bf16: as a number, and as its two bytes.
local function quotient(x, y)
  return (kv.from(cpu, "f32", { 1 }, { x }) / kv.from(cpu, "f32", { 1 }, { y })):list()[1]
end
local function bf16(x)
  local t = kv.from(cpu, "f32", { 1 }, { x }):cast "bf16"
  local bytes = ffi.cast("const uint8_t *", t.ptr)
  return t:list()[1], bytes[0], bytes[1]
end

--- x * y in f32.
local function product(x, y)
  return (kv.from(cpu, "f32", { 1 }, { x }) * kv.from(cpu, "f32", { 1 }, { y })):list()[1]
end

--- The numbers and scales of a row by the definition: the scale of a group is its largest
-- magnitude / 127 in bf16, and a number is x * (1 / scale), rounded to the nearest whole
-- one, ties to even.
local function packed(row)
  local numbers, scales = {}, {}
  for first = 1, #row, GROUP do
    local most = 0
    for i = first, math.min(first + GROUP - 1, #row) do
      most = math.max(most, math.abs(row[i]))
    end
    local scale = bf16(quotient(most, 127))
    scales[#scales + 1] = scale
    local by = scale >= 2 ^ -126 and quotient(1, scale) or 0
    for i = first, math.min(first + GROUP - 1, #row) do
      local x = product(row[i], by)
      local low = math.floor(x)
      if x - low > 0.5 or x - low == 0.5 and low % 2 == 1 then low = low + 1 end
      numbers[i] = low
    end
  end
  return numbers, scales
end

local function format(heads, size, dim)
  return kv.format { codec = "int8", kv_heads = heads, block_size = size, head_dim = dim }
end

--- Two pages in which k and v, f32 [tokens, heads, dim], lie from token 0 of block 1 on.
local function page_of(k, v, size)
  local heads, dim = k:size(1), k:size(2)
  local of = format(heads, size, dim)
  local bytes = tonumber(kv.C.kvl_format_bytes_page(of))
  local memory = kv.full(cpu, "u8", { 2, bytes }, 0xAB)
  kv.ops.append_kv(k, v, kv.arange(cpu, "i64", k:size(0), size), memory, of)
  return memory, of
end

--- Checks every byte of the page against the definition. Tokens that were not appended
-- keep what was there.
local function check_page(k, v, size)
  local memory = page_of(k, v, size)
  local tokens, heads, dim = k:size(0), k:size(1), k:size(2)
  local got, bytes, groups = memory:list(), memory:size(1), math.ceil(dim / GROUP)
  local strip, want = size * (dim + 2 * groups), {}
  assert.equal(2 * heads * strip, bytes)
  for i = 1, bytes do want[i] = 0xAB end
  for half, rows in ipairs { k:list(), v:list() } do
    for head = 0, heads - 1 do
      local begin = ((half - 1) * heads + head) * strip
      for t = 0, tokens - 1 do
        local row = {}
        for d = 1, dim do row[d] = rows[(t * heads + head) * dim + d] end
        local numbers, scales = packed(row)
        for d = 1, dim do want[begin + t * dim + d] = numbers[d] % 256 end
        for g, scale in ipairs(scales) do
          local at = begin + size * dim + (t * groups + g - 1) * 2
          want[at + 1], want[at + 2] = select(2, bf16(scale))
        end
      end
    end
  end
  for i = 1, bytes do
    assert.equal(want[i], got[bytes + i], ("byte %d of the page"):format(i))
  end
end

--- Rows [tokens, heads, dim] whose groups have very different sizes; ties are among them.
local function rows(tokens, heads, dim, seed)
  local t = kv.randn(cpu, "f32", { tokens, heads, dim }, { seed = seed })
  local list, rng = t:list(), support.rng(seed)
  for i = 1, #list, GROUP do
    local by = 10 ^ (rng(9) - 4)
    for j = i, math.min(i + GROUP - 1, #list) do
      list[j] = rng(7) == 0 and 0 or list[j] * by
    end
  end
  list[1], list[2], list[3] = 127, 0.5, -1.5 -- the scale 1, and two ties
  return kv.from(cpu, "f32", t:dims(), list)
end

--- The held K of tokens that were appended to a page of its own.
local function held(k)
  local memory, of = page_of(k, k, 8)
  local out = kv.zeros(cpu, "f32", { 1, k:size(1), 8, k:size(2) })
  kv.ops.read_blocks(memory, kv.from(cpu, "i32", { 1 }), out, nil, of)
  return out:list()
end

describe("int8", function()
  for _, s in ipairs { { 8, 2, 128, 8 }, { 5, 1, 64, 8 }, { 11, 3, 96, 16 },
                       { 7, 2, 16, 24 }, { 3, 1, 256, 8 } } do
    it(("packs %d tokens of %d heads, head_dim %d, block %d, by the definition"):format(
        unpack(s)), function()
      check_page(rows(s[1], s[2], s[3], 1), rows(s[1], s[2], s[3], 2), s[4])
    end)
  end

  it("packs rows of f16 and bf16 as it packs their values", function()
    for _, dtype in ipairs { "f16", "bf16" } do
      local k = support.randn(cpu, dtype, { 4, 2, 64 }, 3)
      support.equal(page_of(k, k, 8), (page_of(k:cast "f32", k:cast "f32", 8)))
    end
  end)

  it("keeps normal numbers to 0.9% of their size", function()
    local k = kv.randn(cpu, "f32", { 8, 4, 128 }, { seed = 9 })
    local got, want, far, all = held(k), k:list(), 0, 0
    for t = 0, 7 do
      for h = 0, 3 do
        for d = 1, 128 do
          local x = want[(t * 4 + h) * 128 + d]
          far, all = far + (got[(h * 8 + t) * 128 + d] - x) ^ 2, all + x ^ 2
        end
      end
    end
    assert.is_true(math.sqrt(far / all) < 0.009)
  end)

  it("keeps zeros, and makes NaN of a group with a number that is not finite", function()
    local list = {}
    for i = 1, 128 do list[i] = i <= 64 and 1 or 0 end
    for _, bad in ipairs { 0 / 0, math.huge, -math.huge } do
      list[7] = bad
      local got = held(kv.from(cpu, "f32", { 1, 1, 128 }, list))
      for i = 1, 64 do assert.is_true(got[i] ~= got[i]) end
      for i = 65, 128 do assert.equal(0, got[i]) end
    end
  end)

  it("goes through a store as bytes, and not into another format", function()
    local function cache_of(name)
      return kv.cache { device = cpu, layers = 1, blocks = 2, block_size = 8,
                        kv_heads = 1, head_dim = 64, format = name }
    end
    local cache, other = cache_of "int8", cache_of "bf16"
    assert.not_equal(kv.store.model("m", cache), kv.store.model("m", other))
    local store = kv.store("memory:", { model = kv.store.model("m", cache),
                                        block_size = 8 })
    local keys, memory = store:keys { 1, 2, 3, 4, 5, 6, 7, 8 }, cache:layer(0)
    memory:fill_(7)
    store:put_block(keys[0], 0, memory, 1)
    memory:fill_(0)
    assert.truthy(store:get_block(keys[0], 0, memory, 0))
    support.equal(memory:index(0), kv.full(cpu, "u8", { memory:size(1) }, 7))
    support.equal(memory:index(1), kv.zeros(cpu, "u8", { memory:size(1) }))
    assert.falsy(store:get_block(keys[0], 0, other:layer(0), 0))
    store:close()
  end)

  it("refuses head_dims and block sizes that it cannot hold", function()
    support.refuses(function() format(1, 16, 72) end,
      "head_dim is 72, expected a multiple of 16 for an int8 format")
    support.refuses(function() format(1, 4, 64) end,
      "block_size is 4, expected a multiple of 8 for an int8 format")
    support.refuses(function()
      kv.cache { device = cpu, layers = 1, blocks = 4, block_size = 20, kv_heads = 1,
                 head_dim = 64, format = "int8" }
    end, "block_size is 20, expected a multiple of 8")
  end)

  it("refuses memory of another format", function()
    local of, k = format(1, 8, 64), kv.zeros(cpu, "f32", { 1, 1, 64 })
    local places = kv.from(cpu, "i64", { 0 })
    support.refuses(function()
      kv.ops.append_kv(k, k, places, kv.zeros(cpu, "f8e4m3", { 2, 2, 1, 8, 64 }), of)
    end, "cache is f8e4m3", "expected u8")
    support.refuses(function()
      kv.ops.append_kv(k, k, places, kv.zeros(cpu, "u8", { 2, 1024 }), of)
    end, "cache has 2048 bytes for 2 blocks, expected 1056 for each")
    support.refuses(function()
      kv.format { codec = "int8", kv_heads = 1, block_size = 8, head_dim = 64,
                  k_scale = kv.ones(cpu, "f32", { 1 }) }
      kv.ops.append_kv(k, k, places, kv.zeros(cpu, "u8", { 2, 1056 }),
        kv.format { codec = "int8", kv_heads = 1, block_size = 8, head_dim = 64,
                    k_scale = kv.ones(cpu, "f32", { 1 }) })
    end, "k_scale is given for a cache of int8, expected f8e4m3")
  end)
end)
