--- A cache with random keys, values and queries, driven through kv.attention: what the
-- policy and attention specs run on. The numbers depend on the seed, the sequence and the
-- position alone, so that runs cut in other chunks or batches see the same tokens.
local kv = require "kvlab"
require "spec.support" -- compiles kernels as specs do

local M = {}

local SHAPE = { layers = 2, heads = 8, kv_heads = 2, head_dim = 32, block_size = 16,
                blocks = 128 }
M.SHAPE = SHAPE

local drawn = {} -- by device, dtype and seed

--- At least `count` tokens; the first ones are the same however many there are.
local function random_numbers(dev, dtype, seed, heads, count)
  local size = count <= 512 and 512 or 8192
  local key = dev:name() .. dtype .. seed .. " " .. size .. " " .. heads
  drawn[key] = drawn[key]
    or kv.randn(dev, "f32", { size, heads, SHAPE.head_dim }, { seed = seed }):cast(dtype)
  return drawn[key]
end

--- q, k, v of tokens [position, position + n) of sequence number s in a layer.
local function tokens(rig, s, layer, position, n)
  local function draw(kind, heads, at)
    local seed = 1000 * s + 10 * layer + kind
    return random_numbers(rig.device, rig.dtype, seed, heads, at + n):narrow(at, n)
  end
  return draw(1, rig.heads, position - position % rig.steady),
    draw(2, SHAPE.kv_heads, position), draw(3, SHAPE.kv_heads, position)
end

--- The same for several sequences, one after the other.
local function join(dev, dtype, parts, heads)
  local total, at = 0, 0
  for _, part in ipairs(parts) do total = total + part:size(0) end
  local all = kv.tensor(dev, dtype, { total, heads, SHAPE.head_dim })
  for _, part in ipairs(parts) do
    all:narrow(at, part:size(0)):copy_(part)
    at = at + part:size(0)
  end
  return all
end

--- A step; n: new tokens of each sequence, or a list with those of each.
local function forward(rig, numbers, position_of, n, is_prefill, ends_prompts)
  local outs = {}
  rig.attention:begin(rig.batch, is_prefill, ends_prompts)
  for layer = 0, SHAPE.layers - 1 do
    local q, k, v = {}, {}, {}
    for i, s in ipairs(numbers) do
      q[i], k[i], v[i] = tokens(rig, s, layer, position_of[i],
        type(n) == "table" and n[i] or n)
    end
    k = join(rig.device, rig.dtype, k, SHAPE.kv_heads)
    if rig.firsts then v = { k * rig.firsts } end
    q = join(rig.device, rig.dtype, q, rig.heads)
    outs[layer] = rig.attention:forward(layer, q, k,
      not rig.is_shared and join(rig.device, rig.dtype, v, SHAPE.kv_heads) or nil, nil,
      rig.index_of and rig.index_of(layer, q, k))
  end
  return outs
end

local function step(rig, ...)
  if rig.scoped then return kv.scope(forward, rig, ...) end
  return forward(rig, ...)
end

--- Prefill sequence number s with `length` tokens in chunks.
local function prefill(rig, seq, s, length, chunk)
  local at = 0
  while at < length do
    local n = math.min(chunk, length - at)
    rig.batch:append({ seq }, { n })
    rig.last = step(rig, { s }, { at }, n, true, at + n == length and { true } or nil)
    at = at + n
  end
end

--- Scales of an f8e4m3 cache, another one for each layer and KV head; nil for others.
local function scales(dev, o, seed)
  if o.format ~= "f8e4m3" then return nil end
  return kv.rand(dev, "f32", { SHAPE.layers, SHAPE.kv_heads }, { seed = seed }) + 0.5
end

--- o.policy: its name, or a policy that is open. o.offload: KV in host memory, with these
-- options of the engine. o.prefill_policy: an opened policy for prefill (full). o.dtype:
-- of q, k and v (f32); o.format: of the cache (the same). o.window, o.soft_cap,
-- o.alibi: of the attention. o.steady: so many positions in a row have one query (1).
-- o.max_seqs: that there is room for (8).
-- o.scoped: every step in a kv.scope of its own (which frees what it selected); run the
-- same without it first, that draws the tokens. o.heads: query heads (8). o.value_dim:
-- values are so many first numbers of their keys, and only keys are held; with o.apart
-- values are held as well, with zeros behind these numbers. o.tables: of the cache.
-- o.index: heads and dim of the model's indexer, and make(layer, q, k), what it makes.
function M.new(dev, o)
  local rig = { device = dev, dtype = o.dtype or "f32", steady = o.steady or 1,
                scoped = o.scoped, heads = o.heads or SHAPE.heads }
  rig.is_shared = o.value_dim and not o.apart
  if o.apart then
    rig.firsts = kv.arange(dev, "f32", SHAPE.head_dim):lt(o.value_dim):cast(rig.dtype)
      :reshape { 1, 1, SHAPE.head_dim }
  end
  local offload
  if o.offload then
    offload = { max_seqs = o.max_seqs or 8 }
    for key, value in pairs(o.offload) do offload[key] = value end
  end
  rig.cache = kv.cache { device = dev, format = o.format or rig.dtype,
    layers = SHAPE.layers, blocks = o.blocks or SHAPE.blocks,
    block_size = o.block_size or SHAPE.block_size, kv_heads = SHAPE.kv_heads,
    head_dim = SHAPE.head_dim, value_dim = rig.is_shared and o.value_dim or nil,
    offload = offload, tables = o.tables,
    k_scale = scales(dev, o, 71), v_scale = scales(dev, o, 72) }
  rig.policy = type(o.policy) == "table" and o.policy
    or kv.policy(o.policy or "full", o.options)
  rig.attention = kv.attention { cache = rig.cache, heads = rig.heads,
    max_seqs = o.max_seqs or 8,
    prefill_policy = o.prefill_policy, decode_policy = rig.policy, alibi = o.alibi,
    window = o.window, soft_cap = o.soft_cap, decode_through = o.decode_through,
    index = o.index and { heads = o.index.heads, dim = o.index.dim } }
  rig.index_of = o.index and o.index.make
  rig.batch = rig.cache:batch { max_seqs = o.max_seqs or 8, max_tokens = 512 }
  -- remember what the policy selected in each layer
  local select_blocks = rig.policy.select_blocks
  rig.policy.select_blocks = function(self, ctx)
    local selection, counts = select_blocks(self, ctx)
    rig.selection = selection and selection:clone()
    rig.counts = counts and counts:clone()
    return selection, counts
  end
  return rig
end

--- Prefill `lengths`, then decode `steps` tokens for all of them together.
--  o: policy, options, lengths, steps, dtype, chunk (all), before (lengths of requests
--  that come and go first), fork (decode on forks while the originals grow too)
--  Result: policy, steps[i] = { out, selection, counts (of the last layer), lens, hot
--  (the hot cache's numbers so far) }
function M.decode(dev, o)
  local rig = M.new(dev, o)
  local chunk = o.chunk or 512
  for i, length in ipairs(o.before or {}) do
    local seq = rig.cache:sequence()
    prefill(rig, seq, 50 + i, length, chunk)
    rig.batch:append({ seq }, { 1 })
    step(rig, { 50 + i }, { length }, 1, false)
    seq:close()
  end
  local seqs, numbers, at = {}, {}, {}
  for i, length in ipairs(o.lengths) do
    seqs[i], numbers[i], at[i] = rig.cache:sequence(), i, length
    prefill(rig, seqs[i], i, length, chunk)
    if o.fork then
      local fork = seqs[i]:fork()
      rig.batch:append({ seqs[i] }, { 1 }) -- other tokens into the once shared block
      step(rig, { 90 + i }, { length }, 1, false)
      seqs[i] = fork
    end
  end
  local counts, steps = {}, {}
  local hot = rig.cache.tier and rig.cache.tier.hot
  for i = 1, #seqs do counts[i] = 1 end
  for n = 1, o.steps do
    rig.batch:append(seqs, counts)
    local outs = step(rig, numbers, at, 1, false)
    local lens = {}
    for i = 1, #seqs do
      at[i] = at[i] + 1
      lens[i] = at[i]
    end
    steps[n] = { out = outs[SHAPE.layers - 1], selection = rig.selection,
                 counts = rig.counts, lens = lens, hot = hot and hot:stats() }
  end
  rig.cache:close()
  return { policy = rig.policy, steps = steps }
end

--- Run a script over numbered sequences: { "prefill", s, n } appends a chunk of n tokens
-- to sequence s (made when it is first named), { "chunks", n, s, t, … } one to each of
-- several, { "decode", s, t, … } one token to each,
-- { "verify", { n, m, … }, s, t, … } decodes n tokens for s, m for t and so on in one
-- step, { "take_back", { n, m, … } } takes back as many of them,
-- { "close", s } ends it, { "truncate", s, length } shortens it. Returns by sequence the
-- outputs of the last layer, one list of numbers for each of its steps, and the rig. o as
-- for new, or { rig = one that is there }.
function M.play(dev, o, script)
  local rig = o.rig or M.new(dev, o)
  local seqs, at, outs, verified = {}, {}, {}, nil
  local function sequence(s)
    if not seqs[s] then
      seqs[s], at[s], outs[s] = rig.cache:sequence(), 0, outs[s] or {}
    end
    return seqs[s]
  end
  local function run(numbers, n, is_prefill)
    local members, counts, positions, row = {}, {}, {}, 0
    for i, s in ipairs(numbers) do
      members[i], counts[i] = sequence(s), type(n) == "table" and n[i] or n
      positions[i] = at[s]
      at[s] = at[s] + counts[i]
    end
    local evicts, ends = rig.policy.evict ~= nil, {}
    for i = 1, #numbers do ends[i] = true end
    rig.batch:append(members, counts, nil, nil, nil, evicts and not is_prefill)
    local out = step(rig, numbers, positions, n, is_prefill,
      evicts and is_prefill and ends or nil)[SHAPE.layers - 1]
    for i, s in ipairs(numbers) do
      table.insert(outs[s], out:narrow(row, counts[i]):list())
      row = row + counts[i]
    end
    verified = numbers
  end
  local function follow(line)
    local what, s = line[1], line[2]
    if what == "prefill" then
      sequence(s)
      run({ s }, line[3], true)
    elseif what == "chunks" then
      run({ unpack(line, 3) }, s, true)
    elseif what == "decode" then
      run({ unpack(line, 2) }, 1, false)
    elseif what == "verify" then
      run({ unpack(line, 3) }, s, false)
    elseif what == "take_back" then
      rig.attention:take_back(s)
      for i, number in ipairs(verified) do at[number] = at[number] - s[i] end
    elseif what == "truncate" then
      seqs[s]:truncate(line[3])
      at[s] = line[3]
    elseif what == "close" then
      seqs[s]:close()
      seqs[s] = nil
    end
  end
  for _, line in ipairs(script) do
    local ok, why = pcall(follow, line)
    if not ok then
      for _, seq in pairs(seqs) do seq:close() end
      error(why, 0)
    end
  end
  return outs, rig
end

--- A function that decodes one token for sequences of these lengths, over and over at the
-- same lengths, one layer a call: append, summarise, score, select, attend.
function M.stepper(dev, policy, lengths)
  local rig = M.new(dev, { policy = policy })
  rig.policy.select_blocks = nil -- the policy's own, without the recorder
  local seqs, counts = {}, {}
  for i, length in ipairs(lengths) do
    seqs[i], counts[i] = rig.cache:sequence(), 1
    prefill(rig, seqs[i], i, length, 512)
  end
  rig.batch:append(seqs, counts)
  local n = #seqs
  local q = kv.randn(dev, "f32", { n, SHAPE.heads, SHAPE.head_dim }, { seed = 1 })
  local k = kv.randn(dev, "f32", { n, SHAPE.kv_heads, SHAPE.head_dim }, { seed = 2 })
  local out = kv.tensor(dev, "f32", { n, SHAPE.heads, SHAPE.head_dim })
  local layer = 0
  return function()
    rig.attention:begin(rig.batch, false)
    rig.attention:forward(layer, q, k, k, out)
    layer = 1 - layer
  end
end

--- Outputs of the last layer for every token of one sequence, prefilled in chunks:
-- [length, heads, head_dim].
function M.prefill(dev, o)
  local rig = M.new(dev, o)
  local all = kv.tensor(dev, rig.dtype, { o.length, SHAPE.heads, SHAPE.head_dim })
  local seq, at = rig.cache:sequence(), 0
  while at < o.length do
    local n = math.min(o.chunk or 512, o.length - at)
    rig.batch:append({ seq }, { n })
    local outs = step(rig, { 1 }, { at }, n, not (o.decode_tail and n == 1))
    all:narrow(at, n):copy_(outs[SHAPE.layers - 1])
    at = at + n
  end
  rig.cache:close()
  return all
end

return M
