--- Exact: only whole numbers and comparisons. Both devices are driven through the same
-- long sequences of calls; after each one every array is compared.
local kv = require "kvlab"
local ffi = require "ffi"
local support = require "spec.support"
local reference = require "spec.reference.hot_cache"

local INF, NAN = math.huge, 0 / 0
local PRIORITIES = { NAN, -INF, -1, 0, -1 / INF, 1e-40, 1, 1, 2.5, INF }
local STATE = { "slot_of", "block_of", "order", "counters", "ahead", "uses", "age" }
local LISTS = { "slots", "miss_from", "miss_to" }
local PARTED = { "hit_logical", "hit_slots", "miss_logical", "miss_slots" }

--- Random ascending selections of each row's blocks, -1 padded, most about as long
-- as they may be. `focus` of 4 choices are among the first few blocks: these are hits.
local function selections(rng, c)
  local flat = {}
  for _ = 1, c.seqs * (c.per_head and c.kv_heads or 1) do
    local chosen, row, count = {}, {}, rng(3) == 0 and rng(c.n + 1) or c.n
    for i, b in ipairs(support.distinct(rng, c.max_blocks, c.max_blocks)) do
      if i > count then break end
      if rng(4) < (c.focus or 2) then b = rng(math.min(c.n, c.max_blocks)) end
      chosen[b] = true
    end
    for b = 0, c.max_blocks - 1 do
      if chosen[b] then row[#row + 1] = b end
    end
    for i = 1, c.n do flat[#flat + 1] = row[i] or -1 end
  end
  return flat
end

--- Sequences share the blocks of their first half; the last column of some names nothing.
local function tables(rng, c)
  local flat, shared = {}, math.floor(c.max_blocks / 2)
  local order = support.distinct(rng, c.blocks, c.blocks)
  for seq = 0, c.seqs - 1 do
    for b = 0, c.max_blocks - 1 do
      local own = seq * (c.max_blocks - shared) + b - shared
      own = shared + own % (c.blocks - shared)
      flat[#flat + 1] = order[(b < shared and b or own) + 1]
    end
    if seq % 3 == 1 then flat[#flat] = seq % 2 == 0 and -1 or c.blocks end
  end
  return flat
end

local function priorities(rng, c)
  local flat = {}
  for i = 1, c.kv_heads * c.blocks do flat[i] = PRIORITIES[rng(#PRIORITIES) + 1] end
  return flat
end

local function copy(list)
  local values = {}
  for i = 1, #list do values[i] = list[i] end
  return values
end

--- The calls of a scenario, and what the reference says after each one.
local prepare = support.latest(function(c)
  local rng = support.rng(c.seed)
  local orders
  if c.shuffled then
    orders = {}
    for head = 1, c.kv_heads do orders[head] = support.distinct(rng, c.slots, c.slots) end
  end
  local hot = reference.new(c.kv_heads, c.blocks, c.slots, orders)
  c.order = copy(hot.order)
  local steps = {}
  local of_seqs = tables(rng, c)
  for step = 1, c.calls do
    local s = { seqs = c.seqs, n = c.n, selection = selections(rng, c), tables = of_seqs,
      selection_heads = c.per_head and c.kv_heads or 1, max_blocks = c.max_blocks,
      priority = c.evict or c.priority and priorities(rng, c), parted = step % 3 > 0,
      is_ahead = rng(3) == 0 }
    s.want = reference.resolve(hot, s)
    if step % 4 == 3 then
      s.drops = { rng(c.blocks), -1, rng(c.blocks), s.want.miss_from[1] }
      reference.drop(hot, s.drops)
    end
    if step % 9 == 8 then of_seqs = tables(rng, c) end
    reference.check(hot)
    for _, name in ipairs(STATE) do s.want[name] = copy(hot[name]) end
    steps[step] = s
  end
  return steps
end)

local function open(dev, c)
  local function index(rows) return kv.full(dev, "i32", { c.kv_heads, rows }, -1) end
  return {
    memory = kv.tensor(dev, "f32", { c.slots, 2, c.kv_heads, 1, 8 }),
    slot_of = index(c.blocks), block_of = index(c.slots),
    order = kv.from(dev, "i32", { c.kv_heads, c.slots }, c.order),
    counters = kv.zeros(dev, "i64", { 5 }),
    ahead = kv.zeros(dev, "i32", { c.kv_heads, c.slots }),
    uses = kv.zeros(dev, "f32", { c.kv_heads, c.blocks }),
    age = kv.zeros(dev, "f32", { c.kv_heads, c.blocks }),
  }
end

local function struct(ctype, tensors)
  local s = ffi.new(ctype)
  for name, tensor in pairs(tensors) do s[name] = tensor end
  return s
end

--- One call on the device: the lists that it wrote, by name.
local function resolve(dev, hot, s, c)
  hot.priority = hot[s.priority] or s.priority
    and kv.from(dev, "f32", { c.kv_heads, c.blocks }, s.priority) or nil
  local call = {
    selection = kv.from(dev, "i32", { s.seqs, s.selection_heads, s.n }, s.selection),
    tables = kv.from(dev, "i32", { s.seqs, s.max_blocks }, s.tables),
    slots = support.poisoned(dev, "i32", { s.seqs, c.kv_heads, s.n }),
    miss_from = support.poisoned(dev, "i32", { 1, c.kv_heads, s.seqs * s.n }),
    miss_to = support.poisoned(dev, "i32", { 1, c.kv_heads, s.seqs * s.n }),
  }
  call.is_ahead = s.is_ahead and 1 or 0
  for _, name in ipairs(s.parted and PARTED or {}) do
    call[name] = support.poisoned(dev, "i32", { s.seqs, c.kv_heads, s.n })
  end
  local view = struct("kvl_hot", hot)
  kv.check(kv.C.kvl_hot_resolve(view, struct("kvl_resolve", call)))
  if s.drops then
    kv.check(kv.C.kvl_hot_drop(view, kv.from(dev, "i32", { #s.drops }, s.drops)))
  end
  return call
end

local function drive(dev, c)
  local steps = prepare(c)
  local hot = open(dev, c)
  for i, s in ipairs(steps) do
    local got = resolve(dev, hot, s, c)
    local function compare(names, from)
      for _, name in ipairs(names) do
        support.equal(from[name], s.want[name], ("%s after call %d of seed %d"):format(
          name, i, c.seed))
      end
    end
    compare(STATE, hot)
    compare(LISTS, got)
    if s.parted then compare(PARTED, got) end
  end
end

local topics = {
  { "evicts the least recently used",
    { kv_heads = 1, blocks = 40, slots = 12, seqs = 1, n = 4, max_blocks = 30 },
    { kv_heads = 3, blocks = 60, slots = 17, seqs = 2, n = 5, max_blocks = 20,
      shuffled = true },
    { kv_heads = 1, blocks = 1, slots = 1, seqs = 1, n = 1, max_blocks = 1, calls = 8 },
  },
  { "resolves a selection of each KV head",
    { kv_heads = 4, blocks = 50, slots = 20, seqs = 3, n = 6, max_blocks = 16,
      per_head = true },
    { kv_heads = 2, blocks = 80, slots = 64, seqs = 5, n = 3, max_blocks = 33,
      per_head = true, focus = 3 },
  },
  { "evicts the lowest priority, NaN first, ties by order",
    { kv_heads = 2, blocks = 40, slots = 12, seqs = 1, n = 5, max_blocks = 30,
      priority = true },
    { kv_heads = 3, blocks = 90, slots = 30, seqs = 2, n = 8, max_blocks = 40,
      priority = true, per_head = true, shuffled = true, focus = 1 },
  },
  { "evicts by uses and by age, which it counts itself",
    { kv_heads = 2, blocks = 40, slots = 12, seqs = 1, n = 4, max_blocks = 30,
      evict = "uses", focus = 1 },
    { kv_heads = 3, blocks = 90, slots = 40, seqs = 2, n = 8, max_blocks = 40,
      evict = "uses", per_head = true, shuffled = true },
    { kv_heads = 3, blocks = 90, slots = 40, seqs = 2, n = 8, max_blocks = 40,
      evict = "age", per_head = true },
  },
  { "works with no more slots than can be selected",
    { kv_heads = 2, blocks = 30, slots = 8, seqs = 1, n = 8, max_blocks = 25, focus = 0 },
    { kv_heads = 2, blocks = 60, slots = 18, seqs = 3, n = 6, max_blocks = 20,
      per_head = true, focus = 0 },
    { kv_heads = 1, blocks = 60, slots = 18, seqs = 3, n = 6, max_blocks = 20,
      priority = true, focus = 0 },
  },
  { "serves many heads and slots at once",
    { kv_heads = 9, blocks = 2000, slots = 1000, seqs = 4, n = 150, max_blocks = 600,
      per_head = true, priority = true, calls = 6, focus = 1 },
    { kv_heads = 2, blocks = 8000, slots = 5000, seqs = 2, n = 2500, max_blocks = 4000,
      calls = 6, focus = 0 },
  },
}
local seed = 0
for _, topic in ipairs(topics) do
  for i = 2, #topic do
    seed = seed + 1
    topic[i].seed, topic[i].calls = seed, topic[i].calls or 60
  end
end

describe("resolving a selection in a hot cache", function()
  for _, topic in ipairs(topics) do
    local function run(dev)
      for i = 2, #topic do kv.scope(drive, dev, topic[i]) end
    end
    support.it_on_cpu(topic[1], run)
    support.it_on_gpu(topic[1], run)
  end

  support.each_device(function(dev)
    it("does nothing for no sequences and for empty selections", function()
      for _, size in ipairs { { 0, 3 }, { 2, 0 } } do
        local c = { kv_heads = 2, blocks = 9, slots = 5, order = {} }
        for i = 1, 10 do c.order[i] = (i - 1) % 5 end
        local hot = open(dev, c)
        resolve(dev, hot, { seqs = size[1], n = size[2], selection = {}, tables = {},
          selection_heads = 1, max_blocks = 0 }, c)
        support.equal(hot.order, c.order, "order")
        support.equal(hot.counters, { 0, 0, 0, 0, 0 }, "counters")
      end
    end)
  end)
end)
