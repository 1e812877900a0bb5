--- Hashes of keys by random planes (LSH). Two vectors whose hashes differ in a share p of
-- their bits are likely at an angle of pi * p. A hash of 64 bits for the mean of 16 bf16
-- keys of 128 dims takes 1/512 of the memory of the keys. A hash for every token takes 16
-- times as much, and finds the single key that a mean hides.
--
--   local hashes = kv.hash.summary(shape, { bits = 128, per = "token" })
--   hashes:update(ev)                    in the policy's offload hooks
--   ctx:select_nearest(hashes, budget)   in its select_blocks
--
-- Source  Charikar 2002 (random planes); UCM's GSA on-device (hashes of keys, orthogonal
--         planes, the least distance of a block's tokens)
local arguments = require "kvlab.arguments"
local by_page = require "kvlab.tensor.by_page"
local ffi = require "ffi"
local device = require "kvlab.tensor.device"
local kinds = require "kvlab.tensor.kinds"
local library = require "kvlab.library"
local objects = require "kvlab.memory.objects"
local ops = require "kvlab.tensor.ops"
local options = require "kvlab.options"
local summary = require "kvlab.policy.summary"
local tensor = require "kvlab.tensor.arithmetic"

local C, check = library.C, library.check
local M = {}

local BITS = { "32 or a multiple of 64 up to 1024", function(x)
  return x == 32 or options.count[2](x) and x <= 1024 and x % 64 == 0
end }
local PLANE_KIND = options.one_of("orthogonal", "gaussian")

-- ---- planes ---------------------------------------------------------------------------

--- Makes rows first ... first + n - 1 of `dim` numbers orthonormal, in place. It runs
-- Gram and Schmidt twice, which is as orthogonal as doubles allow. No row is negated (it
-- is a QR whose R has a positive diagonal), so normal numbers give every orthogonal set
-- with the same chance (Haar).
local function orthonormal(rows, first, n, dim)
  for i = first, first + n - 1 do
    local row = rows + i * dim
    for _ = 1, 2 do
      for j = first, i - 1 do
        local other, dot = rows + j * dim, 0
        for d = 0, dim - 1 do dot = dot + row[d] * other[d] end
        for d = 0, dim - 1 do row[d] = row[d] - dot * other[d] end
      end
      local square = 0
      for d = 0, dim - 1 do square = square + row[d] * row[d] end
      local scale = 1 / math.sqrt(square)
      for d = 0, dim - 1 do row[d] = row[d] * scale end
    end
  end
end

local PLANES = { bits = BITS, head_dim = options.required(options.within(1, 4096)),
                 kind = PLANE_KIND, seed = options.any_whole, device = kinds.device }

--- Random planes: f32 [bits, head_dim], rows of length 1, with the same bits on every
-- device.
---@param o table  bits (64), head_dim; kind: "orthogonal" (in stacks of head_dim rows, so
--                 that there may be more bits than dims) or "gaussian"; seed (0); device
function M.planes(o)
  options.check("hash.planes", o, PLANES)
  local bits, dim = o.bits or 64, o.head_dim
  return tensor.scope(function()
    local normal = tensor.randn("cpu", "f32", { bits, dim }, { seed = o.seed })
    local numbers, rows = normal:data(), ffi.new("double[?]", bits * dim)
    for i = 0, bits * dim - 1 do rows[i] = numbers[i] end
    local stack = o.kind == "gaussian" and 1 or dim
    for first = 0, bits - 1, stack do
      orthonormal(rows, first, math.min(stack, bits - first), dim)
    end
    for i = 0, bits * dim - 1 do numbers[i] = rows[i] end
    return normal:to(device.device(o.device))
  end)
end

--- Hashes of the rows of x: u64 [rows, words].
---@param x kvlab.Tensor       f32 f16 bf16 [rows, head_dim]
---@param planes kvlab.Tensor  f32 [bits, head_dim], see planes
function M.rows(x, planes, out)
  out = out or tensor.tensor(x.device, "u64",
    { x:size(0), math.ceil(planes:size(0) / 64) })
  check(C.kvl_hash_rows(x, planes, out))
  return out
end

-- ---- summary --------------------------------------------------------------------------

---@class kvlab.Hashes
---@field bits integer
---@field planes kvlab.Tensor
---@field per string      block or token
---@field cache kvlab.HashCache  what Hashes:store keeps
local Hashes = {}
Hashes.__index = Hashes

local SUMMARY = { bits = BITS, hash_planes = BITS, per = options.one_of("block", "token"),
                  planes = PLANE_KIND, seed = options.any_whole,
                  cache_size = options.whole }

--- Hashes of K, one entry for every physical block: u64 [layers, blocks, kv_heads,
-- words], or for tokens [layers, blocks, kv_heads, block_size, words].
---@param shape table  as policy.init gets it
---@param o? table     bits (64), per: "block" (of the mean key) or "token", planes:
--                     "orthogonal" or "gaussian", seed (0) of the planes, cache_size:
--                     most blocks that store keeps (10000); hash_planes: another name for
--                     bits, for configurations that name both
---@return kvlab.Hashes
function M.summary(shape, o)
  o = options.check("hash.summary", o, SUMMARY)
  local bits, per = o.bits or 64, o.per or "block"
  if o.hash_planes and o.hash_planes ~= bits then
    error(("hash: hash_planes is %s, expected bits = %d: a plane makes a bit"):format(
      tostring(o.hash_planes), bits), 2)
  end
  local dims = { shape.kv_heads, math.ceil(bits / 64) }
  if per == "token" then table.insert(dims, 2, shape.block_size) end
  local memory, layers = by_page.new(tensor.zeros, shape, "u64", dims)
  local planes = M.planes { device = shape.device, bits = bits, head_dim = shape.head_dim,
    kind = o.planes, seed = o.seed }
  local count, pages = memory:size(0), memory:size(1)
  local rows = count * pages
  return setmetatable({ bits = bits, per = per, planes = planes, memory = memory,
    format = shape.format,
    layers = layers, cache = M.cache { size = o.cache_size },
    rows = memory:reshape { rows, memory.count / math.max(1, rows) },
    first_rows = tensor.arange(shape.device, "i32", count, 0, pages),
    block_rows = tensor.tensor(shape.device, "i32", { count }) }, Hashes)
end

local function score(self, ctx, heads)
  local q, s = ctx.query, ctx.seqs
  local mean = q:reshape { s * ctx.kv_heads, ctx.heads / ctx.kv_heads, q:size(2) }
    :cast("f32"):mean(1)
  local words = math.ceil(self.bits / 64)
  local of_queries = M.rows(mean, self.planes):reshape { s, ctx.kv_heads, words }
  return ops.score_hamming(of_queries, self, ctx, ctx:new_scores(heads))
end

--- Minus the number of bits in which each block's hash differs from that of the mean
-- query of its KV head's group: f32 [seqs, heads, width]. The tensor belongs to the
-- caller until the layer's attention is over.
---@param heads? integer  kv_heads, or 1: the best of all KV heads
function Hashes:score(ctx, heads) return (tensor.scope(score, self, ctx, heads)) end

--- Computes the hashes of an offload event's blocks again.
function Hashes:update(ev)
  local format = self.format and self.format:of(ev.layer)
  check(C.kvl_block_hash(ev.k, format, ev.k_blocks, ev.num_tokens, ev.blocks, self.planes,
    options.entry("update", "ev.layer", self.layers, ev.layer)))
end

--- The hashes of one layer, by physical block.
function Hashes:layer(layer) return self.layers[layer] end

--- Bytes of the hashes of one block and KV head, which scoring reads.
function Hashes:bytes_block()
  local row = self.layers[0]
  return row:bytes() / (row:size(0) * row:size(1))
end

--- The rows of a physical block in every layer: i32 [layers].
local function rows_of(self, block)
  return self.first_rows:add(block, self.block_rows)
end

--- Keeps the hashes of a physical block, in every layer, under the key of its content.
---@param key string|number
function Hashes:store(key, block)
  if self.cache.size == 0 then return end
  self.cache:put(key, tensor.lasting(self.rows.gather_rows, self.rows,
    rows_of(self, block)))
end

--- Gives a physical block the hashes that were stored for its content, so that its keys
-- need not be hashed again. Returns false when they are no longer stored.
---@return boolean
function Hashes:restore(key, block)
  local kept = self.cache:get(key)
  if not kept then return false end
  self.rows:scatter_rows_(rows_of(self, block), kept)
  return true
end

-- ---- centred hashes -------------------------------------------------------------------

---@class kvlab.CentredHashes: kvlab.Hashes
---@field means kvlab.Summary  the mean keys that are hashed
local Centred = setmetatable({}, Hashes)
Centred.__index = Centred

local CENTRED = { bits = BITS, planes = PLANE_KIND, seed = options.any_whole }

--- Hashes of the mean keys of full blocks, minus the mean key of a part of the sequence.
-- Keys share a large mean, which makes their hashes alike but has no effect on attention,
-- because softmax ignores it. From the mean key of block b, the mean of the first 2^k
-- blocks is subtracted, where 2^k is the largest power of two that is at most b; nothing
-- is subtracted from block 0. So a hash depends only on the tokens up to its block: not
-- on how they were cut into chunks, on whether they were prefilled or decoded, or on what
-- comes after them, and sequences that share a block agree on its hash. A block is hashed
-- in the first decode step after it is full; the hash of an open block means nothing.
--
--   init               = self.hashes = kv.hash.centred(shape)
--   on_..._offload     = self.hashes:update(ev)
--   step_begin         = self.hashes:begin(ctx)
--   attention_finished = self.hashes:finished(ctx)
---@param shape table  as policy.init gets it
---@param o? table     bits (64), planes: "orthogonal" or "gaussian", seed (0)
---@return kvlab.CentredHashes
function M.centred(shape, o)
  o = options.check("hash.centred", o, CENTRED)
  local self = setmetatable(M.summary(shape, o), Centred)
  self.shape, self.means = shape, summary.mean(shape)
  if shape.keepers then table.insert(shape.keepers, self) end -- of seq.state[self]
  return self
end

--- Computes the mean keys of an offload event's blocks again.
function Centred:update(ev) self.means:update(ev) end

--- Hashes blocks first ... last - 1 of sequence i of a step, in one layer.
local function hash_full(self, ctx, i, layer, first, last)
  local s, words = self.shape, self.layers[layer]:size(2)
  if ctx.use_layer then ctx:use_layer(layer) end
  local blocks = ctx.tables:index(i):narrow(0, last)
  local means = self.means:layer(layer):reshape { s.blocks, s.kv_heads * s.head_dim }
    :gather_rows(blocks)
  if ctx.reads then ctx.reads:add(means:bytes()) end
  while first < last do
    local _, power = math.frexp(first) -- first < 2^power <= 2 first
    local count = math.min(last, 2 ^ power) - first
    local rows = means:narrow(first, count)
    if first > 0 then
      rows = rows - means:narrow(0, 2 ^ (power - 1)):mean(0):reshape { 1, -1 }
    end
    local hashes = M.rows(rows:reshape { count * s.kv_heads, s.head_dim }, self.planes)
    self.layers[layer]:reshape { s.blocks, s.kv_heads * words }
      :scatter_rows_(blocks:narrow(first, count),
        hashes:reshape { count, s.kv_heads * words })
    first = first + count
  end
end

--- Hashes the blocks that became full since the last step of each sequence. Call it once
-- a decode step, in step_begin.
function Centred:begin(ctx)
  for i, seq in ipairs(ctx.sequences) do
    local full = math.floor((seq:length() - 1) / self.shape.block_size)
    local hashed = seq.state[self] or 0
    if hashed < full then
      for layer = 0, ctx.layers - 1 do
        tensor.scope(hash_full, self, ctx, i - 1, layer, hashed, full)
      end
    end
    seq.state[self] = full
  end
end

--- Notes which blocks a chunk of a prompt wrote. Call it in attention_finished.
function Centred:finished(ctx)
  if not ctx.is_prefill or ctx.layer > 0 then return end
  for i, seq in ipairs(ctx.sequences) do
    local start = seq:length() - ctx.batch.counts[i]
    local kept = math.floor(start / self.shape.block_size)
    seq.state[self] = math.min(seq.state[self] or 0, kept)
  end
end

--- A fork has the blocks of its parent, and so their hashes.
function Centred:inherit(seq, fork) fork.state[self] = seq.state[self] end

-- ---- cache ----------------------------------------------------------------------------

---@class kvlab.HashCache
---@field size integer   most entries
---@field count integer  entries now
local Cache = {}
Cache.__index = Cache

local CACHE = { size = options.whole }

--- A cache of hashes by content key, the BlockHashCache of UCM's GSA on-device. When it
-- has more than `size` entries, the least recently used one goes. get, put and remove
-- take the same time for any number of entries, because entries are a ring in order of
-- use.
---@param o? table  size (10000)
---@return kvlab.HashCache
function M.cache(o)
  o = options.check("hash.cache", o, CACHE)
  local ring = {}
  ring.before, ring.after = ring, ring
  return setmetatable({ size = o.size or 10000, count = 0,
    ring = ring, entries = {},
    counts = { hits = 0, misses = 0, puts = 0, evictions = 0 } }, Cache)
end

local function unlink(entry)
  entry.before.after, entry.after.before = entry.after, entry.before
end

--- Links an entry as the most recently used one.
local function link(ring, entry)
  entry.before, entry.after = ring.before, ring
  ring.before.after, ring.before = entry, entry
end

--- The value that was put for a key; nil if there is none.
function Cache:get(key)
  local entry = self.entries[key]
  if not entry then
    self.counts.misses = self.counts.misses + 1
    return nil
  end
  self.counts.hits = self.counts.hits + 1
  unlink(entry)
  link(self.ring, entry)
  return entry.value
end

--- Forgets a key and returns its value; nil if there was none.
function Cache:remove(key)
  local entry = self.entries[key]
  if not entry then return nil end
  unlink(entry)
  self.entries[key], self.count = nil, self.count - 1
  return entry.value
end

--- Keeps a value under a key; it replaces the value that the key had.
---@param key string|number
function Cache:put(key, value)
  self.counts.puts = self.counts.puts + 1
  self:remove(key)
  if self.size == 0 then return end
  if self.count == self.size then
    self:remove(self.ring.after.key)
    self.counts.evictions = self.counts.evictions + 1
  end
  local entry = { key = key, value = value }
  link(self.ring, entry)
  self.entries[key], self.count = entry, self.count + 1
end

--- The number of hits, misses, puts and evictions so far, and of entries now.
function Cache:stats()
  local stats = { entries = self.count }
  for name, count in pairs(self.counts) do stats[name] = count end
  return stats
end

arguments.functions(M, "hash", {
  rows = { x = kinds.tensor, planes = kinds.tensor, out = kinds.tensor_or_nil },
  summary = { shape = objects.shape }, centred = { shape = objects.shape },
})

local CONTENT = { key = objects.key, block = options.whole }
arguments.methods(Hashes, "hashes", {
  update = { ev = objects.event }, store = CONTENT, restore = CONTENT,
  score = { ctx = objects.layer_context, heads = options.optional(options.count) },
})
arguments.methods(Centred, "centred hashes", {
  update = { ev = objects.event }, begin = { ctx = objects.context },
  finished = { ctx = objects.layer_context },
  inherit = { seq = objects.sequence, fork = objects.sequence },
})
arguments.methods(Cache, "a hash cache", {
  put = { key = objects.key, value = options.any },
})

return M
