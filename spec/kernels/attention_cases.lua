--- Cases of paged attention: their random inputs, what the reference makes of them, and
-- how they are run.
--
-- A case names lens, block_size, and where wanted
--   kv_heads, group, head_dim, dtype, extra, seed   as in support.paged
--   rows     new tokens of each sequence; nil: decode
--   q, out   dtypes: q's is the cache's, or bf16 for f8e4m3; out's is q's
--   select   "shared": one random selection a sequence, "heads": one a KV head
--   listed   "shared": every row lists tokens of its sequence, in any order, some of them
--            twice, beside numbers that are none; "heads": a list for each KV head
--   count    entries of a list (24); fill: the share that are tokens (0.8)
--   slots    "all": the selected blocks lie in slots and nothing is in the tables;
--            "gaps": some of them have no slot
--   prev     joined to an attention over other keys, which saw nothing in some rows
--   unit     queries are multiplied by it
--   parts    the selection is dealt out to so many calls, each joined to the one before
--   tree     the new tokens of each sequence are a random draft tree; "chain": each
--            follows the one before
--   alibi, causal, no_lse, window, soft_cap
--   scales   "k", "v", "both": of an f8e4m3 cache, random, one a KV head
--   forget   nothing is left of the keys that no row's window has: their blocks are not
--            in the tables
--   dtype    of the cache; "int8", "f8_latent": its format
--   value_dim  values are the first numbers of their keys, so many
--   poison   V of these keys, counted from a sequence's end (1: the last), is NaN, inf
--            and -inf in turn; f8e4m3 and int8 have no infinities
local kv = require "kvlab"
local ffi = require "ffi"
local support = require "spec.support"
local reference = require "spec.reference.attention"

local M = {}

local INF, NAN = math.huge, 0 / 0

--- Some of the blocks of each list. Wider than any list, so that -1 follows.
local function selection_of(c, paged)
  if not c.select then return nil end
  local rng, flat = support.rng(c.seed or 7), {}
  local heads = c.select == "heads" and paged.layout.kv_heads or 1
  local width = paged.max_blocks + 1
  for _, len in ipairs(c.lens) do
    for _ = 1, heads do
      local first = #flat
      for b = 0, math.ceil(len / c.block_size) - 1 do
        if rng(3) > 0 then flat[#flat + 1] = b end
      end
      for i = #flat + 1, first + width do flat[i] = -1 end
    end
  end
  return flat, heads, width
end

--- The lists of all rows.
local function lists_of(c, paged, starts, tokens)
  if not c.listed then return nil end
  local rng, flat, seq = support.rng(c.seed or 11), {}, 1
  local heads, n = c.listed == "heads" and paged.layout.kv_heads or 1, c.count or 24
  for row = 0, tokens - 1 do
    while starts and starts[seq + 1] <= row do seq = seq + 1 end
    local len = c.lens[starts and seq or row + 1]
    for _ = 1, heads * n do
      local is = len > 0 and rng(100) < 100 * (c.fill or 0.8)
      flat[#flat + 1] = is and rng(len) or ({ -1, -77, len, 2 ^ 31 - 1 })[rng(4) + 1]
    end
  end
  return flat, heads, n
end

--- The cache with the K and V of every token at another place, in random order; and the
-- place of what was at each place.
local function shuffled(a, rng)
  local size, dim, heads = a.layout.block_size, a.layout.head_dim, a.layout.kv_heads
  local count, memory = #a.cache / (2 * heads * dim), {}
  local place = support.distinct(rng, count, count)
  local function row_at(at, strip)
    return ((math.floor(at / size) * 2 * heads + strip) * size + at % size) * dim
  end
  for at = 0, count - 1 do
    for strip = 0, 2 * heads - 1 do
      local from, to = row_at(at, strip), row_at(place[at + 1], strip)
      for d = 1, dim do memory[to + d] = a.cache[from + d] end
    end
  end
  return memory, place, count / size
end

--- The slots of listed tokens, which lie at places of their own. "gaps": some have none.
-- Returns them, memory and its blocks, and the lists without the entries that have none.
local function slots_of_lists(c, a, starts, tokens)
  local rng, slots, lists, seq = support.rng(c.seed or 3), {}, {}, 1
  local memory, place, blocks = shuffled(a, rng)
  local size = a.layout.block_size
  for row = 0, tokens - 1 do
    while starts and starts[seq + 1] <= row do seq = seq + 1 end
    local table_at = ((starts and seq or row + 1) - 1) * a.max_blocks
    for _ = 1, a.selection_heads * a.max_selected do
      local token = a.listed[#lists + 1]
      local block = token >= 0 and a.tables[table_at + math.floor(token / size) + 1]
      local has = block and not (c.slots == "gaps" and rng(3) == 0)
      slots[#slots + 1] = has and (place[block * size + token % size + 1] or -1)
        or rng(2) == 0 and -1 or blocks * size
      lists[#lists + 1] = has and token or -1
    end
  end
  return slots, memory, blocks, lists
end

--- K and V of the selected blocks in slots, in random order, different ones for each
-- list head. Returns the slot of each entry, the memory and its blocks, and the selection
-- without the entries that have none. Memory that nothing names is NaN.
local function place_in_slots(c, a)
  local rng, layout = support.rng(c.seed or 3), a.layout
  local rows = #c.lens * a.max_selected
  local blocks, slots, selection = rows + 2, {}, {}
  local lane = layout.block_size * layout.head_dim
  local half = layout.kv_heads * lane
  local memory = support.filled(blocks * 2 * half, NAN)
  for list = 0, a.selection_heads - 1 do
    local free = support.distinct(rng, rows, blocks)
    local first = a.selection_heads > 1 and list * lane or 0
    local last = a.selection_heads > 1 and first + lane or half
    for row = 0, rows - 1 do
      local seq, i = math.floor(row / a.max_selected), row % a.max_selected
      local at = (seq * a.selection_heads + list) * a.max_selected + i + 1
      slots[at], selection[at] = -1, a.selection[at]
      if selection[at] >= 0 and c.slots == "gaps" and rng(3) == 0 then
        slots[at], selection[at] = rng(2) == 0 and -1 or blocks, -1
      elseif selection[at] >= 0 then
        slots[at] = free[row + 1]
        local from = a.tables[seq * a.max_blocks + selection[at] + 1] * 2 * half
        local to = slots[at] * 2 * half
        for h = 0, half, half do
          for d = first + 1, last do memory[to + h + d] = a.cache[from + h + d] end
        end
      end
    end
  end
  return slots, memory, blocks, selection
end

--- Random out and lse of an earlier attention; out is NaN where it saw nothing.
local function previous(tokens, heads, dim)
  local cpu = kv.device "cpu"
  local out = support.randn(cpu, "f32", { tokens, heads, dim }, 31):list()
  local lse = kv.randn(cpu, "f32", { tokens, heads }, { seed = 32, std = 4 }):list()
  for row = 0, #lse - 1 do
    if row % 3 == 1 then
      lse[row + 1] = -INF
      for d = 1, dim do out[row * dim + d] = NAN end
    end
  end
  return out, lse
end

--- Takes out of the tables the blocks whose keys lie before the window of every row of
-- their sequence.
local function forget_blocks(c, paged, starts)
  for s, len in ipairs(c.lens) do
    local rows = starts and starts[s + 1] - starts[s] or 1
    local first = len - rows + 1 - c.window
    for b = 0, math.ceil(len / c.block_size) - 1 do
      local is_seen = (b + 1) * c.block_size > first
      if not is_seen then paged.tables[(s - 1) * paged.max_blocks + b + 1] = -1 end
    end
  end
end

--- Puts the first numbers of each key in the place of its value, and zeros behind them.
-- The reference then gives zeros there, too.
local function share_values(c, layout, memory)
  local dim, strip = layout.head_dim, layout.block_size * layout.head_dim
  local half = layout.kv_heads * strip
  for page = 0, #memory - 1, 2 * half do
    for i = 0, half - 1 do
      memory[page + half + i + 1] = i % dim < c.value_dim and memory[page + i + 1] or 0
    end
  end
end

--- The keys of memory with keys and values: a tensor of pages of keys alone.
local function keys_alone(dev, c, layout, memory)
  local half, keys = layout.kv_heads * layout.block_size * layout.head_dim, {}
  for page = 0, #memory - 1, 2 * half do
    for i = 1, half do keys[#keys + 1] = memory[page + i] end
  end
  if c.dtype == "f8_latent" then
    local held = support.from(dev, "f32", { #keys / half, 1, layout.kv_heads,
      layout.block_size, layout.head_dim }, keys)
    return (support.f8_latent_pages(held, c.value_dim))
  end
  return support.from(dev, c.dtype or "f32", { #keys / half, half }, keys)
end

--- The first n of every `dim` numbers.
local function cut(flat, dim, n)
  local out = {}
  for i, x in ipairs(flat) do
    if (i - 1) % dim < n then out[#out + 1] = x end
  end
  return out
end

local POISON = { NAN, INF, -INF }
local IS_PACKED = { int8 = true, f8_latent = true }
local IS_8BIT = { f8e4m3 = true, int8 = true, f8_latent = true }

--- Writes the poison into V of the cache, in every KV head; one key has all its dims
-- poisoned, the next has every third.
local function poison_values(c, paged)
  local layout, cache = paged.layout, paged.cache
  for s, len in ipairs(c.lens) do
    for i, back in ipairs(c.poison) do
      local p = len - back
      local entry = (s - 1) * paged.max_blocks + math.floor(p / c.block_size) + 1
      for h = 0, p >= 0 and layout.kv_heads - 1 or -1 do
        local half = c.value_dim and 0 or 1
        local lane = (paged.tables[entry] * 2 + half) * layout.kv_heads + h
        local at = (lane * c.block_size + p % c.block_size) * layout.head_dim
        for d = 1, layout.head_dim, (i % 2 == 1 or IS_PACKED[c.dtype]) and 1 or 3 do
          cache[at + d] = IS_8BIT[c.dtype] and NAN or POISON[(i - 1) % 3 + 1]
        end
      end
    end
  end
end

--- The parents of the new tokens, for each row of q the row that it follows or -1, and
-- what kvl_attention.tree says of them: two words for each row.
local function tree_of(c, starts)
  if not c.tree then return nil end
  local rng, parents, words = support.rng(c.seed or 11), {}, {}
  local n = c.tree_words or 2
  for s = 1, #c.lens do
    local first = starts and starts[s] or s - 1
    local last = starts and starts[s + 1] - 1 or first
    for row = first, last do
      local pick = c.tree == "chain" and row - first or rng(row - first + 1)
      parents[row + 1] = pick == 0 and -1 or first + pick - 1
      local bits = {}
      for i = 0, 64 * n - 1 do bits[i] = i > last - first end -- the context
      local at = row
      while at >= 0 do
        bits[last - at], at = true, parents[at + 1]
      end
      for w = 0, n - 1 do
        local word = 0ULL
        for i = 63, 0, -1 do word = 2 * word + (bits[64 * w + i] and 1 or 0) end
        words[#words + 1] = word
      end
    end
  end
  return parents, words, n
end

local function scales_of(c, kv_heads, name, seed)
  if c.scales ~= name and c.scales ~= "both" then return nil end
  return support.scales(kv_heads, seed)
end

--- The inputs of a case.
M.inputs = support.latest(function(c)
  local paged = support.paged(c)
  local heads, dim = paged.layout.kv_heads * (c.group or 1), paged.layout.head_dim
  local starts, tokens = nil, #c.lens
  if c.rows then
    starts, tokens = { 0 }, 0
    for _, rows in ipairs(c.rows) do
      tokens = tokens + rows
      starts[#starts + 1] = tokens
    end
  end
  local q_dtype = c.q or IS_8BIT[c.dtype] and "bf16" or c.dtype or "f32"
  local q = support.randn(kv.device "cpu", q_dtype, { tokens, heads, dim }, 99)
  if c.unit then q = (q:cast "f32" * c.unit):cast(q_dtype) end
  local alibi
  if c.alibi then
    alibi = {}
    for h = 1, heads do alibi[h] = 2 ^ (-8 * h / heads) end
  end
  local selection, selection_heads, max_selected = selection_of(c, paged)
  local a = { layout = paged.layout, q = q:list(), cache = paged.cache,
    tables = paged.tables, lens = c.lens, max_blocks = paged.max_blocks, heads = heads,
    scale = 1 / math.sqrt(dim), causal = c.causal ~= false, starts = starts,
    alibi = alibi, selection = selection, selection_heads = selection_heads,
    max_selected = max_selected, window = c.window, soft_cap = c.soft_cap,
    k_scale = scales_of(c, paged.layout.kv_heads, "k", 61),
    v_scale = scales_of(c, paged.layout.kv_heads, "v", 62) }
  if c.listed then
    a.listed, a.selection_heads, a.max_selected = lists_of(c, paged, starts, tokens)
  end
  local tree, tree_words
  a.parents, tree, tree_words = tree_of(c, starts)
  if c.forget then forget_blocks(c, paged, starts) end
  if c.poison then poison_values(c, paged) end
  if c.value_dim then share_values(c, paged.layout, paged.cache) end
  local inputs = { paged = paged, q = q, tokens = tokens, a = a, selection = selection,
                   tree = tree, tree_words = tree_words, listed = a.listed }
  if c.slots and c.listed then
    inputs.slots, inputs.memory, inputs.blocks, a.listed =
      slots_of_lists(c, a, starts, tokens)
  elseif c.slots then
    inputs.slots, inputs.memory, inputs.blocks, a.selection = place_in_slots(c, a)
  end
  if c.prev then
    inputs.prev_out, inputs.prev_lse = previous(tokens, heads, c.value_dim or dim)
  end
  return inputs
end)

--- What the reference makes of a case: flat out and lse.
M.expected = support.once(function(c)
  local inputs = M.inputs(c)
  local out, lse = reference.paged_attention(inputs.a)
  local dim = inputs.a.layout.head_dim
  if c.value_dim then out = cut(out, dim, c.value_dim) end
  if c.prev then
    out, lse = reference.merge(out, lse, inputs.prev_out, inputs.prev_lse,
      c.value_dim or dim)
  end
  return out, lse
end)

--- The tensors of every call of a case; those that are not wanted are nil.
local function tensors(dev, c, inputs)
  local a, layout = inputs.a, inputs.a.layout
  local function optional(dtype, shape, values)
    return values and kv.from(dev, dtype, shape, values)
  end
  local cache, tables, lens, format = inputs.paged.on(dev)
  if c.slots then
    local dims = { inputs.blocks, 2, layout.kv_heads, layout.block_size, layout.head_dim }
    if c.dtype == "int8" then
      cache, format = support.int8_pages(support.from(dev, "f32", dims, inputs.memory))
    elseif not c.value_dim then
      cache = support.from(dev, c.dtype or "f32", dims, inputs.memory)
    end
  end
  if c.value_dim then
    cache = keys_alone(dev, c, layout, inputs.memory or inputs.paged.cache)
    format = kv.format { codec = c.dtype or "f32", kv_heads = layout.kv_heads,
      block_size = layout.block_size, head_dim = layout.head_dim,
      value_dim = c.value_dim }
  end
  if c.slots then tables:fill_(-1) end
  return { q = inputs.q:to(dev), cache = cache, tables = tables, lens = lens,
    starts = optional("i32", { #c.lens + 1 }, a.starts),
    alibi = optional("f32", { a.heads }, a.alibi),
    format = format or support.format_of(cache,
      optional("f32", { layout.kv_heads }, a.k_scale), optional("f32", { layout.kv_heads
      }, a.v_scale)),
    prev_out = optional("f32", { inputs.tokens, a.heads,
      c.value_dim or layout.head_dim }, inputs.prev_out),
    tree = optional("u64", { inputs.tokens, inputs.tree_words }, inputs.tree),
    prev_lse = optional("f32", { inputs.tokens, a.heads }, inputs.prev_lse) }
end

--- The entries of the selection (and their slots) dealt out to c.parts selections; those
-- of a part are ascending and -1 padded. One part: as they are.
local function deal(c, inputs)
  if not c.parts then return { inputs } end
  local width, rng, parts = inputs.a.max_selected, support.rng(c.seed or 5), {}
  for p = 1, c.parts do
    parts[p] = { selection = {}, slots = inputs.slots and {} or nil }
    for i = 1, #inputs.selection do
      parts[p].selection[i] = -1
      if inputs.slots then parts[p].slots[i] = -1 end
    end
  end
  local used = {}
  for i, logical in ipairs(inputs.selection) do
    if (i - 1) % width == 0 then used = {} end
    if logical >= 0 then
      local p = rng(c.parts) + 1
      local at = math.floor((i - 1) / width) * width + (used[p] or 0) + 1
      used[p] = (used[p] or 0) + 1
      parts[p].selection[at] = logical
      if inputs.slots then parts[p].slots[at] = inputs.slots[i] end
    end
  end
  return parts
end

--- Run a case: tensors out, lse. Calls before the last one write over what they join.
function M.run(dev, c)
  local inputs = M.inputs(c)
  local a, t = inputs.a, tensors(dev, c, inputs)
  local list_shape = { c.listed and inputs.tokens or #c.lens, a.selection_heads,
    a.max_selected }
  local shape = { inputs.tokens, a.heads, c.value_dim or a.layout.head_dim }
  local parts = deal(c, inputs)
  for i, part in ipairs(parts) do
    t.selection = part.selection and kv.from(dev, "i32", list_shape, part.selection)
    t.listed = part.listed and kv.from(dev, "i32", list_shape, part.listed)
    t.slots = part.slots and kv.from(dev, "i32", list_shape, part.slots)
    t.out = i < #parts and (t.prev_out or support.poisoned(dev, "f32", shape))
      or support.poisoned(dev, c.out or inputs.q:type(), shape)
    t.lse = support.poisoned(dev, "f32", { inputs.tokens, a.heads })
    local call = ffi.new "kvl_attention"
    for name, tensor in pairs(t) do call[name] = tensor end
    if c.no_lse then call.lse = nil end
    call.scale, call.causal = a.scale, a.causal and 1 or 0
    call.window, call.soft_cap = c.window or 0, c.soft_cap or 0
    kv.check(kv.C.kvl_paged_attention(call))
    t.prev_out, t.prev_lse = t.out, t.lse
  end
  return t.out, t.lse
end

return M
