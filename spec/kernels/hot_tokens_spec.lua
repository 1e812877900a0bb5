--- A hot cache whose slots hold tokens is one of blocks with one token each, though its
-- memory and the host tier have larger blocks. Exact: the same calls on both leave the
-- same numbers everywhere.
local kv = require "kvlab"
local ffi = require "ffi"
local support = require "spec.support"

local C = kv.C
local CASES = { -- KV heads, block size, head_dim, blocks, slots, sequences, listed, dtype
  { 1, 4, 8, 6, 13, 2, 5, "bf16" }, { 3, 5, 24, 9, 31, 3, 9, "f32" },
  { 2, 16, 64, 5, 40, 2, 20, "f16" }, { 2, 16, 48, 7, 70, 3, 23, "f8e4m3" },
  { 1, 1, 16, 30, 12, 3, 4, "bf16" }, { 1, 8, 576, 40, 200, 4, 50, "bf16", 512 },
  { 4, 64, 128, 40, 2100, 3, 700, "bf16" },
}

--- A world by token, or one whose blocks have one token each.
local function open(dev, c, by_token)
  local heads, size, dim, blocks, slots = unpack(c, 1, 5)
  local tokens, strips = blocks * size, c[9] and 1 or 2
  local function format(n)
    return kv.format { codec = c[8], kv_heads = heads, block_size = n, head_dim = dim,
                       value_dim = c[9] }
  end
  local function memory(n, each)
    return kv.zeros(dev, c[8], { math.ceil(n / each), strips, heads, each, dim })
  end
  local function index(n) return kv.full(dev, "i32", { heads, n }, -1) end
  local each = by_token and size or 1
  local w = { by_token = by_token and 1 or 0, format = format(each),
    cache = memory(tokens, each), buffer = memory(tokens, each),
    memory = memory(slots, each), slot_of = index(tokens), block_of = index(slots),
    order = index(slots), counters = kv.zeros(dev, "i64", { 5 }),
    uses = kv.zeros(dev, "f32", { heads, tokens }),
    age = kv.zeros(dev, "f32", { heads, tokens }) }
  for head = 0, heads - 1 do w.order:index(head):arange_() end
  w.hot = ffi.new "kvl_hot"
  for _, name in ipairs { "memory", "slot_of", "block_of", "order", "counters", "uses",
                          "age", "format", "by_token" } do w.hot[name] = w[name] end
  return w
end

--- The rows of memory in the order of their tokens: [tokens, strips * kv_heads * dim].
local function rows_of(memory)
  local dims = memory:dims()
  return memory:cast("f32"):reshape { dims[1], dims[2] * dims[3], dims[4], dims[5] }
    :transpose(1, 2):reshape { dims[1] * dims[4], -1 }
end

--- One step: tokens are appended, lists resolved, and what is missing is moved.
local function step(dev, w, c, s)
  local heads, size, dim, _, _, seqs, n = unpack(c, 1, 7)
  local places = kv.from(dev, "i64", { #s.places }, s.places)
  local k = support.randn(kv.device "cpu", c[8] == "f8e4m3" and "bf16" or c[8],
    { #s.places, heads, dim }, s.seed):clone():to(dev)
  kv.check(C.kvl_hot_append(w.hot, k, not c[9] and k or nil, places, w.cache,
    kv.from(dev, "i64", { #s.places }, s.buffer_places), w.buffer))
  local shape = { 1, heads, seqs * n }
  local call = { selection = kv.from(dev, "i32", { seqs, s.lists, n }, s.listed),
    slots = support.poisoned(dev, "i32", { seqs, heads, n }),
    miss_from = support.poisoned(dev, "i32", shape),
    miss_to = support.poisoned(dev, "i32", shape) }
  local tables = s.tables
  if w.by_token == 0 then
    tables = {}
    for i, block in ipairs(s.tables) do
      for t = 0, size - 1 do
        tables[(i - 1) * size + t + 1] = block < 0 and -1 or block * size + t
      end
    end
  end
  call.tables = kv.from(dev, "i32", { seqs, #tables / seqs }, tables)
  local made = ffi.new "kvl_resolve"
  for name, x in pairs(call) do made[name] = x end
  kv.check(C.kvl_hot_resolve(w.hot, made))
  local moved = kv.zeros(dev, "i64", { 1 })
  local move = w.by_token == 1 and C.kvl_move_tokens or C.kvl_move_blocks
  kv.check(move(w.cache, call.miss_from, w.memory, call.miss_to, w.format, moved))
  if s.drops then
    local list = s.drops
    if w.by_token == 0 then
      list = {}
      for _, block in ipairs(s.drops) do
        for t = 0, size - 1 do list[#list + 1] = block < 0 and -1 or block * size + t end
      end
    end
    kv.check(C.kvl_hot_drop(w.hot, kv.from(dev, "i32", { #list }, list)))
  end
  return { slots = call.slots, miss_from = call.miss_from, miss_to = call.miss_to,
    moved = moved }
end

local function random_step(rng, c, i)
  local heads, size, _, blocks, _, seqs, n = unpack(c, 1, 7)
  local width = math.max(1, math.floor(blocks * 0.8))
  local s = { seed = i, lists = i % 2 == 0 and heads or 1, listed = {}, tables = {},
              drops = i % 3 == 2 and { rng(blocks), -1, rng(blocks) } or nil }
  for _ = 1, seqs do
    local order = support.distinct(rng, blocks, blocks)
    for b = 1, width do s.tables[#s.tables + 1] = rng(9) == 0 and -1 or order[b] end
  end
  for _ = 1, seqs * s.lists do
    local order = support.distinct(rng, width * size, width * size)
    for j = 1, n do
      local token = order[j] or -1
      s.listed[#s.listed + 1] = rng(7) == 0 and (rng(2) == 0 and -1 or width * size)
        or token
    end
  end
  s.places = support.distinct(rng, math.min(seqs + 5, blocks * size), blocks * size)
  s.buffer_places = support.distinct(rng, #s.places, blocks * size)
  s.places[3] = -1
  return s
end

support.each_device(function(dev)
  describe("a hot cache of tokens on " .. dev:name(), function()
    it("does what one does whose blocks have one token", function()
      for number, c in ipairs(CASES) do
        local rng = support.rng(number)
        local token, block = open(dev, c, true), open(dev, c, false)
        for i = 1, 6 do
          local s = random_step(rng, c, i)
          local got, want = step(dev, token, c, s), step(dev, block, c, s)
          local function same(a, b, name)
            support.equal(a, b, ("%s after step %d of case %d"):format(name, i, number))
          end
          for name, x in pairs(want) do same(got[name], x, name) end
          for _, name in ipairs { "slot_of", "block_of", "order", "counters", "uses",
                                  "age" } do same(token[name], block[name], name) end
          for _, name in ipairs { "cache", "buffer", "memory" } do
            local b = rows_of(block[name])
            same(rows_of(token[name]):narrow(0, b:size(0)), b, name)
          end
        end
      end
    end)
  end)
end)

describe("a hot cache of tokens", function()
  it("is refused where it cannot be", function()
    local dev, c = kv.device "cpu", { 2, 8, 64, 4, 30, 1, 2, "int8" }
    local w = { format = kv.format { codec = "int8", kv_heads = 2, block_size = 8,
      head_dim = 64 }, cache = kv.zeros(dev, "u8", { 4, 2 * 2 * 8 * 66 }) }
    local list = kv.full(dev, "i32", { 1, 2, 3 }, -1)
    support.fails(C.kvl_move_tokens(w.cache, list, w.cache, list, w.format, nil),
      "move_tokens", "src is int8")
    c[8] = "bf16"
    w = open(dev, c, true)
    local one = kv.full(dev, "i32", { 1, 1, 3 }, -1)
    support.fails(C.kvl_move_tokens(w.cache, one, w.memory, one, w.format, nil),
      "from is for 1 heads, expected kv_heads = 2 for tokens")
    w.slot_of = kv.full(dev, "i32", { 2, 30 }, -1)
    w.hot.slot_of, w.hot.uses, w.hot.age = w.slot_of, nil, nil
    support.fails(C.kvl_hot_drop(w.hot, kv.zeros(dev, "i32", { 1 })),
      "slot_of is for 30 tokens, expected a multiple of block_size = 8")
    w.slot_of = kv.full(dev, "i32", { 2, 32 }, -1)
    w.hot.slot_of = w.slot_of
    w.order, w.block_of = kv.zeros(dev, "i32", { 2, 33 }), kv.zeros(dev, "i32", { 2, 33 })
    w.hot.order, w.hot.block_of = w.order, w.block_of
    support.fails(C.kvl_hot_drop(w.hot, kv.zeros(dev, "i32", { 1 })),
      "order has 33 slots, expected at most the 32 tokens of memory")
  end)
end)
