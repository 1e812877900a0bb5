--- copy_tokens and replace, against plain Lua, in every format, on every device.
local ffi = require "ffi"
local kv = require "kvlab"
local support = require "spec.support"

local C, check = kv.C, kv.check
local BLOCKS, KV_HEADS, SIZE, DIM = 9, 2, 8, 64

local function i64(dev, list) return kv.from(dev, "i32", { #list }, list):cast "i64" end

--- Memory of random numbers in a format, the format, and its keys and values as a tensor
-- [blocks, 2, kv_heads, block_size, head_dim].
local function memory_of(dev, codec, seed)
  local values = kv.randn(dev, "f32", { BLOCKS, 2, KV_HEADS, SIZE, DIM }, { seed = seed })
  if codec == "int8" then return support.int8_pages(values) end
  local memory = values:cast(codec)
  return memory, nil, memory:cast "f32"
end

local function read(memory, format)
  if not format then return memory:cast("f32"):list() end
  local dev, n = memory.device, BLOCKS
  local k = kv.tensor(dev, "f32", { n, KV_HEADS, SIZE, DIM })
  local v = k:clone()
  kv.ops.read_blocks(memory, kv.arange(dev, "i32", n), k, v, format)
  return kv.cat({ k:reshape { n, 1, KV_HEADS, SIZE, DIM },
                  v:reshape { n, 1, KV_HEADS, SIZE, DIM } }, 1):list()
end

--- Where the numbers of a token's half and head begin in such a list.
local function at(place, half, head)
  local block, offset = math.floor(place / SIZE), place % SIZE
  return (((block * 2 + half) * KV_HEADS + head) * SIZE + offset) * DIM
end

local function specs(dev)
  for _, codec in ipairs { "f32", "f16", "bf16", "f8e4m3", "int8" } do
    it("copy_tokens moves tokens of " .. codec, function()
      local rng = support.rng(4)
      local src, format = memory_of(dev, codec, 1)
      local dst = memory_of(dev, codec, 2)
      for _, to_memory in ipairs { dst, src } do
        local before, want = read(src, format), read(to_memory, format)
        local from, to = {}, {}
        local order = support.distinct(rng, 20, BLOCKS * SIZE)
        for i = 1, 10 do from[i], to[i] = order[i], order[10 + i] end
        from[11], to[11] = -1, 0 -- which are skipped
        from[12], to[12] = 3, BLOCKS * SIZE
        for i = 1, 10 do
          for half = 0, 1 do
            for head = 0, KV_HEADS - 1 do
              for d = 1, DIM do
                want[at(to[i], half, head) + d] = before[at(from[i], half, head) + d]
              end
            end
          end
        end
        check(C.kvl_copy_tokens(src, i64(dev, from), to_memory, i64(dev, to), format))
        support.equal(kv.from(dev, "f32", { #want }, read(to_memory, format)), want)
      end
    end)
  end

  for _, codec in ipairs { "f32", "bf16", "f8_latent" } do
    it("copy_tokens moves latents of " .. codec, function()
      local rng = support.rng(5)
      local format
      local memory = kv.randn(dev, "f32", { BLOCKS, 1, 1, SIZE, 48 }, { seed = 3 })
      if codec == "f8_latent" then
        memory, format = support.f8_latent_pages(memory, 32)
      else
        memory = memory:reshape({ BLOCKS, 1, SIZE, 48 }):cast(codec)
        format = kv.format { codec = codec, kv_heads = 1,
          block_size = SIZE, head_dim = 48, value_dim = 32 }
      end
      local want = memory:list()
      local row = #want / (BLOCKS * SIZE)
      local from, to = {}, {}
      local order = support.distinct(rng, 20, BLOCKS * SIZE)
      for i = 1, 10 do
        from[i], to[i] = order[i], order[10 + i]
        for d = 1, row do want[to[i] * row + d] = want[from[i] * row + d] end
      end
      from[11], to[11] = BLOCKS * SIZE, 0 -- which is skipped
      check(C.kvl_copy_tokens(memory, i64(dev, from), memory, i64(dev, to), format))
      support.equal(memory:list(), want)
    end)
  end

  it("update_rows sets rows or adds to them, and keeps what stood there", function()
    for seed = 1, 30 do
      local rng = support.rng(seed)
      local rows, n = rng(5), 1 + rng(seed % 3 == 0 and 1500 or 40)
      local width = n + rng(3)
      local is_add, keeps, has_fresh = rng(2) == 1, rng(2) == 1, rng(2) == 1
      local function random(dims, own)
        return kv.randn(dev, "f32", dims, { seed = seed * 10 + own })
      end
      local cells = rows * width - (rows > 1 and rng(2) or 0) -- the last row sticks out
      local memory, values = random({ 1, cells }, 1), random({ rows, n }, 2)
      local firsts, fresh = {}, {}
      for r = 1, rows do firsts[r], fresh[r] = (rows - r) * width, rng(n + 1) - 1 end
      local before = support.poisoned(dev, "f32", { rows, n })
      local want, want_before = memory:list(), before:list()
      local old, new = memory:list(), values:list()
      for r = 1, rows do
        for i = 0, n - 1 do
          local cell, own = firsts[r] + i + 1, (r - 1) * n + i + 1
          if cell <= cells then
            local from = has_fresh and fresh[r] == i and 7 or old[cell]
            want[cell] = is_add and from + new[own] or new[own]
            want[cell] = tonumber(ffi.new("float", want[cell]))
            if keeps then want_before[own] = old[cell] end
          end
        end
      end
      local function ints(t) return kv.from(dev, "i32", { #t, 1 }, t) end
      check(C.kvl_update_rows(memory, ints(firsts), values, is_add and 1 or 0,
        is_add and has_fresh and ints(fresh) or nil, 7, keeps and before or nil))
      support.equal(memory, want)
      support.equal(before, want_before)
    end
  end)

  for _, codec in ipairs { "f32", "bf16", "f8e4m3", "int8" } do
    it("replace saves the token that goes, of " .. codec, function()
      local rng, rows, width = support.rng(7), 11, 3
      local memory, format = memory_of(dev, codec, 1)
      local saved, want = memory_of(dev, codec, 2), memory_of(dev, codec, 2)
      local tables, lens, wanted = {}, {}, {}
      for r = 1, rows do
        for b = 1, width do tables[(r - 1) * width + b] = rng(BLOCKS + 1) end
        lens[r], wanted[r] = rng(width * SIZE + 1), rng(3) == 0 and 5 or -1
      end
      local function new(dtype) return support.poisoned(dev, dtype, { rows }) end
      local function ints(t) return kv.from(dev, "i32", { #t }, t) end
      local places = new "i64"
      local call = ffi.new("kvl_replacement", { block_size = SIZE, cache = memory,
        saved = saved, format = format, places = places, index = new "i32",
        replaced = new "f32", blocks = new "i32", block_tokens = new "i32",
        positions = kv.randn(dev, "f32", { 1, rows * width * SIZE }, { seed = 3 }),
        firsts = (kv.arange(dev, "i32", rows) * (width * SIZE)):reshape { rows, 1 },
        tables = ints(tables):reshape { rows, width }, lens = ints(lens),
        now = kv.full(dev, "i32", { rows }, 100), wanted = ints(wanted):cast "i64" })
      check(C.kvl_replace(call))
      local own = kv.arange(dev, "i32", rows):cast "i64"
      check(C.kvl_copy_tokens(memory, places, want, own, format))
      support.equal(kv.from(dev, "f32", { BLOCKS * 2 * KV_HEADS * SIZE * DIM },
        read(saved, format)), read(want, format))
    end)
  end

  it("replace finds the token that is worth least, and room where there is some",
    function()
      for seed = 1, 20 do
        local rng = support.rng(seed)
        local rows, width = 1 + rng(30), 1 + rng(30)
        local n, cells = width * SIZE, 0
        local firsts, lens, now, wanted, tables, list = {}, {}, {}, {}, {}, {}
        local positions, scores = {}, {}
        local sink, recent = rng(3), rng(4)
        for r = 1, rows do
          firsts[r], cells = cells, cells + n
          lens[r] = 1 + rng(n)
          local order = support.distinct(rng, lens[r], 4 * n)
          for i = 1, n do
            positions[cells - n + i] = order[i] or 0
            local kind = rng(9)
            scores[(r - 1) * n + i] = kind == 0 and 0 / 0 or kind == 1 and -math.huge
              or rng(30) -- with ties
          end
          now[r], wanted[r] = 4 * n, rng(3) == 0 and 5 or -1
          for b = 1, width do tables[(r - 1) * width + b] = rng(1000) end
        end
        local with_scores = seed % 2 == 0
        for r = 1, rows do
          local best
          for i = 1, lens[r] do
            local p = positions[firsts[r] + i]
            local s = with_scores and scores[(r - 1) * n + i] or p
            if s ~= s then s = -math.huge end
            local one = { p < sink and 2 or p > now[r] - recent and 1 or 0, s, p, i - 1 }
            local is_less = best == nil
            for k = 1, best and 4 or 0 do
              if one[k] ~= best[k] then
                is_less = one[k] < best[k]
                break
              end
            end
            if is_less then best = one end
          end
          list[r] = wanted[r] < 0 and best[4] or lens[r] - 1
        end
        local function ints(t) return kv.from(dev, "i32", { #t }, t) end
        local out = { index = support.poisoned(dev, "i32", { rows }),
          replaced = support.poisoned(dev, "f32", { rows }),
          places = support.poisoned(dev, "i64", { rows }),
          blocks = support.poisoned(dev, "i32", { rows }),
          block_tokens = support.poisoned(dev, "i32", { rows }) }
        local in_memory = seed % 4 == 0 -- of a tally, in another order
        local given = {
          scores = with_scores and kv.from(dev, "f32", { rows, n }, scores) or nil,
          score_firsts = in_memory and (rows * n + 3 - kv.arange(dev, "i32", rows) * n)
            :reshape { rows, 1 } or nil,
          positions = kv.from(dev, "f32", { 1, cells }, positions),
          firsts = ints(firsts):reshape { rows, 1 }, lens = ints(lens), now = ints(now),
          tables = ints(tables):reshape { rows, width },
          wanted = ints(wanted):cast "i64" }
        if in_memory then
          local memory = kv.full(dev, "f32", { (rows + 1) * n + 3 }, -1e9)
          for r = 1, rows do
            memory:narrow((rows - r + 1) * n + 3, n):copy_(given.scores:index(r - 1))
          end
          given.scores = memory:reshape { 1, memory.count }
        end
        local call = ffi.new("kvl_replacement", { block_size = SIZE, sink = sink,
                                                  recent = recent })
        for _, part in ipairs { given, out } do
          for name, t in pairs(part) do call[name] = t end
        end
        check(C.kvl_replace(call))
        support.equal(out.index, list)
        local replaced, places, blocks, tokens, after = {}, {}, {}, {}, {}
        for i = 1, cells do after[i] = positions[i] end
        for r = 1, rows do
          local b = math.floor(list[r] / SIZE)
          replaced[r] = positions[firsts[r] + list[r] + 1]
          blocks[r] = tables[(r - 1) * width + b + 1]
          places[r] = blocks[r] * SIZE + list[r] % SIZE
          tokens[r] = math.min(SIZE, lens[r] - b * SIZE)
          after[firsts[r] + list[r] + 1] = now[r]
        end
        support.equal(out.replaced, replaced)
        support.equal(out.places:cast "i32", places)
        support.equal(out.blocks, blocks)
        support.equal(out.block_tokens, tokens)
        support.equal(given.positions, after)
      end
    end)
end

describe("eviction's op", function() support.each_device(specs) end)
