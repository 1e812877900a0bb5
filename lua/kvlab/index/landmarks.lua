--- Landmarks: the small keys by which a policy finds tokens, and the queries that go with
-- them. Both are made from the inputs of attention. The keys lie in an index-K cache,
-- which has the same blocks as the KV cache.
--
--   model    keys that the model itself makes of its hidden state, because it was
--            trained with an indexer (DeepSeek-V3.2). They are rotated by Hadamard's
--            matrix and quantised with scales that are powers of two, as in its training
--
-- For other models they are maps of its k and q:
--
--   key      k of the KV heads, one next to the other if they fit into 128 dims, else
--            means of neighbouring heads. A query head reads the part of its own KV head:
--            logits are the sum over heads of relu(q . k), or over means of neighbouring
--            heads if there are more than 64
--   random   the same keys through one random projection into `dim` dims, which keeps
--            q . k on average
--   given    linear maps of all of k and of all of q, and of q to the heads' weights
--
-- With pool = n, only the means of the keys of n neighbouring tokens are scored. Each
-- selected group stands for its tokens. The mean of a group that is not full is the mean
-- of the tokens that are there. Where tokens are selected, each query always reads the
-- group of its own token, so the groups that are chosen by their means contain no later
-- tokens.
--
-- Source  the lightning indexer of DeepSeek-V3.2; Johnson and Lindenstrauss 1984 (random)
local arguments = require "kvlab.arguments"
local C = require("kvlab.library").C
local ffi = require "ffi"
local index_cache = require "kvlab.index.index_cache"
local indexer = require "kvlab.index.indexer"
local objects = require "kvlab.memory.objects"
local ops = require "kvlab.tensor.ops"
local options = require "kvlab.options"
local tensor = require "kvlab.tensor.arithmetic"

local M = {}

local NOWHERE = -2 ^ 30 -- stays negative however many rows come before
local DIM_MAX, HEADS_MAX = 128, 64 -- of an index-K cache, and of an indexer's queries

---@class kvlab.Landmarks
---@field cache kvlab.IndexCache  what is scored: keys of tokens, or their means
---@field of_tokens kvlab.IndexCache|nil  the model's keys of tokens, beside their means
---@field pool integer    tokens of a group
---@field group integer   groups of a block
---@field heads integer   of the indexer
local Landmarks = {}
Landmarks.__index = Landmarks

--- Reorders each group of m rows of x [n * m, d]: [n * #pattern, d]. Row i of a group is
-- its old row pattern[i], or zeros if pattern[i] is negative. pattern: i32 [1, …].
local function pick(x, m, pattern)
  local n = x:size(0) / m
  local first = tensor.arange(x.device, "i32", n, 0, m):reshape { n, 1 }
  return x:gather_rows((first + pattern):reshape { n * pattern:size(1) })
end

local function new_pattern(dev, list)
  return tensor.from(dev, "i32", { 1, #list }, list)
end

--- A pattern for `pick` that puts zeros around the dims of each head of q [rows, heads,
-- head_dim]: head h goes to place_of(h), one of `places`.
local function new_embedding(shape, places, place_of)
  local list = {}
  for h = 0, shape.heads - 1 do
    for s = 0, places - 1 do list[#list + 1] = place_of(h) == s and h or NOWHERE end
  end
  return new_pattern(shape.device, list)
end

local function embed(self, q)
  local s = self.shape
  return pick(q:reshape { q:size(0) * s.heads, s.head_dim }, s.heads, self.embedding)
    :reshape { q:size(0), s.heads, -1 }
end

--- How many neighbouring heads make one query of the indexer: the fewest that leave at
-- most HEADS_MAX, without joining heads of different KV heads.
local function joined(s)
  local group = s.heads / s.kv_heads
  for each = 1, group do
    if group % each == 0 and s.heads / each <= HEADS_MAX then return each end
  end
  return group
end

--- q [rows, heads, dim], or means of neighbouring heads.
local function join(self, q)
  local each, heads = joined(self.shape), self.shape.heads
  if each == 1 then return q end
  return q:reshape { q:size(0) * heads / each, each, q:size(2) }:mean(1)
    :reshape { q:size(0), heads / each, q:size(2) }
end

-- ---- the four kinds -------------------------------------------------------------------

local function refuse(fmt, ...) error("landmarks: " .. fmt:format(...), 0) end

--- The dim of an index-K cache that holds n numbers.
local function dim_for(n)
  return n <= 32 and 32 or n <= 64 and 64 or n <= DIM_MAX and 128
end

local kinds = {}

function kinds.key(self)
  local s, groups = self.shape, self.shape.kv_heads
  while s.kv_heads % groups ~= 0 or groups > 1 and groups * s.head_dim > DIM_MAX do
    groups = groups - 1
  end
  local dim = dim_for(groups * s.head_dim)
  if not dim or dim % s.head_dim ~= 0 then
    refuse("index is key, which head_dim %d does not fit: it has to divide 32, 64 or 128;"
      .. " random and given take any", s.head_dim)
  end
  local each, places, list = s.kv_heads / groups, dim / s.head_dim, {}
  for i = 0, places - 1 do list[i + 1] = i < groups and i or NOWHERE end
  local beside = new_pattern(s.device, list)
  self.embedding = new_embedding(s, places, function(h)
    return math.floor(h * groups / s.heads)
  end)
  function self.keys(k) -- [n, kv_heads, head_dim]
    local n = k:size(0)
    k = k:reshape { n * groups, each, s.head_dim }
    k = each > 1 and k:mean(1) or k:reshape { n * groups, s.head_dim }
    return (places > groups and pick(k, groups, beside) or k):reshape { n, dim }
  end
  function self.asks(_, q) return join(self, embed(self, q)) end
  return dim, s.heads / joined(s)
end

function kinds.random(self, o)
  local s = self.shape
  local all, dim = s.kv_heads * s.head_dim, o.dim
  local map = tensor.randn(s.device, "f32", { all, dim },
    { seed = o.seed, std = dim ^ -0.5 })
  self.embedding = new_embedding(s, s.kv_heads, function(h)
    return math.floor(h * s.kv_heads / s.heads)
  end)
  function self.keys(k) return k:reshape { -1, all }:matmul(map) end
  function self.asks(_, q)
    local rows = q:size(0) * s.heads
    return join(self, embed(self, q):reshape { rows, all }:matmul(map)
      :reshape { -1, s.heads, dim })
  end
  return dim, s.heads / joined(s)
end

--- o.weights: k f32 [layers, kv_heads * head_dim, dim], q f32 [layers, heads * head_dim,
-- index_heads * dim], heads f32 [layers, heads * head_dim, index_heads].
function kinds.given(self, o)
  local w = o.weights or {}
  for _, name in ipairs { "k", "q", "heads" } do
    if not tensor.is_tensor(w[name]) or w[name].ndim ~= 3 then
      refuse("index is given, expected index_weights with k, q and heads, f32 tensors of "
        .. "3 dims: %s is %s", name, tostring(w[name]))
    end
  end
  local dim, heads = w.k:size(2), w.heads:size(2)
  if w.q:size(2) ~= heads * dim then
    refuse("index_weights.q makes %d numbers, expected %d heads of %d", w.q:size(2),
      heads, dim)
  end
  local function map(x, by, layer)
    return x:reshape { x:size(0), -1 }:matmul(by:index(layer))
  end
  function self.keys(k, layer) return map(k, w.k, layer) end
  function self.asks(layer, q)
    return map(q, w.q, layer):reshape { q:size(0), heads, dim }, map(q, w.heads, layer)
  end
  return dim, heads
end

--- Sets self.is_model: keys and queries come from the model.
function kinds.model(self, o)
  local index = self.shape.index
  if not index then
    refuse("index is model, but the model has no indexer, expected key, random or given")
  elseif dim_for(index.dim) ~= index.dim then
    refuse("the model's indexer has dim %d, expected 32, 64 or 128", index.dim)
  elseif self.shape.block_size % 4 ~= 0 then -- copies are of 16 bytes
    refuse("block_size is %d, expected a multiple of 4 where the index is the model's",
      self.shape.block_size)
  end
  self.is_model, o.rotate, o.scale = true, true, "ue8m0"
  return index.dim, index.heads
end

-- ---- landmarks ------------------------------------------------------------------------

local OPTIONS = {
  index = options.required(options.one_of("key", "random", "given", "model")),
  dim = options.count,
  rotate = options.boolean, bits = options.one_of(2, 4, 8), scale = options.string,
  weights = options.table, seed = options.any_whole, pool = options.count,
}

--- Landmarks for the KV cache of the shape that a policy gets.
---@param shape table  as policy.init gets it
---@param o table      index: key, random, given or model, for which rotate and scale are
--                     what the model was trained with; dim (128) of random; rotate
--                     (false): rotates by Hadamard's matrix before quantising; bits (8;
--                     4, 2) of keys; scale ("f32"; "ue8m0") of keys and queries, see
--                     index_cache; weights of given; seed (0) of random; pool (1):
--                     neighbouring tokens whose mean is scored, a divisor of block_size
---@return kvlab.Landmarks
function M.landmarks(shape, o)
  options.check("landmarks", o, OPTIONS)
  local pool = o.pool or 1
  local self = setmetatable({ shape = shape, pool = pool,
    group = shape.block_size / pool }, Landmarks)
  if self.group % 1 ~= 0 then
    refuse("pool is %d, expected a divisor of block_size = %d", pool, shape.block_size)
  end
  local dim
  local kind = { dim = o.dim or DIM_MAX, seed = o.seed or 0, weights = o.weights,
                 rotate = o.rotate, scale = o.scale }
  dim, self.heads = kinds[o.index](self, kind)
  local function new_cache(entries, rotate)
    return index_cache.index_cache { blocks = shape.blocks,
      layers = shape.memory_layers or shape.layers, block_size = entries, dim = dim,
      rotate = rotate, bits = o.bits, scale = kind.scale, device = shape.device }
  end
  local has_both = self.is_model and pool > 1
  self.of_tokens = has_both and new_cache(shape.block_size, kind.rotate) or nil
  self.cache = new_cache(self.group, kind.rotate and not has_both)
  if self.is_model then shape.followers[self.of_tokens or self.cache] = true end
  return self
end

--- Which memory of the cache is a layer's.
local function memory_of(self, layer) return layer % self.cache.layers end

--- Some blocks have `each` entries, of which the first `entries` [n, 1] are used. Returns
-- the places of these, and -1 for the others: i64 [n * each].
local function places_of(blocks, entries, each)
  local n, entry = blocks:size(0), tensor.arange(blocks.device, "i32", each)
  local places = (blocks * each):reshape { n, 1 } + entry
  return entry:lt(entries):where(places, -1):cast("i64"):reshape { n * each }
end

--- Writes the means of the groups of some blocks, whose tokens have these keys, f32 [n *
-- block_size, dim].
local function append_means(self, ev, keys)
  local n, dim, size, pool = ev.blocks:size(0), keys:size(1), self.shape.block_size,
    self.pool
  local dev, valid = keys.device, ev.num_tokens:reshape { n, 1 }
  local token = tensor.arange(dev, "i32", size):reshape { 1, size, 1 }
    + tensor.zeros(dev, "i32", { 1, 1, dim })
  local sums = token:lt(valid:reshape { n, 1, 1 })
    :where(keys:reshape { n, size, dim }, 0)
    :reshape { n * self.group, pool, dim }:sum(1)
  local counts = (valid - tensor.arange(dev, "i32", self.group, 0, pool)):maximum(1)
    :minimum(pool):cast "f32":reshape { n * self.group, 1 }
  self.cache:append(memory_of(self, ev.layer), sums / counts,
    places_of(ev.blocks, (valid + (pool - 1)) / pool, self.group))
end

local function update(self, ev)
  local s, dev, n = self.shape, self.shape.device, ev.blocks:size(0)
  local size, heads = s.block_size, s.kv_heads
  local k = tensor.tensor(dev, "f32", { n, heads, size, s.head_dim })
  ops.read_blocks(ev.k, ev.k_blocks, k, nil, s.format and s.format:of(ev.layer))
  local keys = self.keys(k:transpose(1, 2):reshape { n * size, heads, s.head_dim },
    ev.layer)
  if self.pool > 1 then return append_means(self, ev, keys) end
  self.cache:append(memory_of(self, ev.layer), keys,
    places_of(ev.blocks, ev.num_tokens:reshape { n, 1 }, size))
end

--- Means of the quantised keys of tokens.
local function update_means(self, ev)
  local n, size = ev.blocks:size(0), self.shape.block_size
  local k, scales = self.of_tokens:gather(memory_of(self, ev.layer),
    places_of(ev.blocks, ev.num_tokens:reshape { n, 1 }, size))
  append_means(self, ev, k:cast "f32" * scales:reshape { n * size, 1 })
end

--- Writes the keys that the model made of new tokens. Those of copied blocks are copied
-- with the blocks.
local function update_given(self, ev)
  if not ev.index then
    refuse("blocks of layer %d came without the keys that the model's indexer made of "
      .. "them, expected that all of a prompt is computed", ev.layer)
  end
  local tokens = self.of_tokens or self.cache
  tokens:append(memory_of(self, ev.layer), ev.index.k, ev.places)
  if self.of_tokens then tensor.scope(update_means, self, ev) end
end

--- Makes the keys of the blocks of an offload event, for all of their valid tokens,
-- because after a fork, a copied block is new to the index.
function Landmarks:update(ev)
  if self.is_model then return update_given(self, ev) end
  tensor.scope(update, self, ev)
end

-- ---- in a store -----------------------------------------------------------------------

local STORED = { [8] = 1, [4] = 2, [2] = 3 } -- by the bits of a key
local key_type = ffi.typeof "const kvl_key *"

--- The model's keys of tokens, and the number of their first layer in a store: they come
-- after K and V of a block's layers, for each number of bits. Keys that are made of K are
-- made again, and are not stored.
local function stored(self)
  local keys = self.is_model and (self.of_tokens or self.cache)
  return keys, keys and keys.layers * STORED[keys.bits]
end

--- Stores the keys of a physical block, in every layer, under the key of its content.
-- They are lost, as the block itself is, if the store cannot take them.
---@param key string
---@param block integer
---@param store? kvlab.Store  without one, nothing is stored
function Landmarks:keep(key, block, store)
  local keys, first = stored(self)
  if not keys or not store then return end
  local at = ffi.cast(key_type, ffi.cast("const char *", key))
  if self:find(store, at, 1) == 1 then return end
  for layer = 0, keys.layers - 1 do
    if not store:put_block(at, first + layer, keys:layer(layer), block) then return end
  end
end

--- Of how many of the first n blocks, without a gap, the store has the keys.
---@param store kvlab.Store
---@param keys kvlab.BlockKey[]
---@param n integer
function Landmarks:find(store, keys, n)
  local cache, first = stored(self)
  return cache and store:find(keys, n, cache.layers, first) or 0
end

--- Gives a physical block the keys that were stored for its content. Returns false when
-- they are no longer stored.
---@return boolean
function Landmarks:recall(key, block, store)
  local keys, first = stored(self)
  if not keys or not store then return false end
  local at = ffi.cast(key_type, ffi.cast("const char *", key))
  for layer = 0, keys.layers - 1 do
    if not store:get_block(at, first + layer, keys:layer(layer), block) then
      return false
    end
  end
  if not self.of_tokens then return true end
  local dev = self.shape.device
  local ev = { blocks = tensor.from(dev, "i32", { 1 }, { block }),
               num_tokens = tensor.full(dev, "i32", { 1 }, self.shape.block_size) }
  for layer = 0, keys.layers - 1 do
    ev.layer = layer
    tensor.scope(update_means, self, ev)
  end
  return true
end

-- ---- queries --------------------------------------------------------------------------

local function narrowed(t, first, count)
  return t:size(0) == count and t or t:narrow(first, count)
end

local function queries(self, ctx, first, count)
  local unit, s = ctx.format:scales(ctx.layer), self.shape
  if self.is_model then
    return (self.of_tokens or self.cache):queries(narrowed(ctx.index.q, first, count),
      narrowed(ctx.index.weights, first, count), ctx.index.scale)
  end
  local query = narrowed(ctx.query, first, count)
  local q = query:cast "f32"
  if unit then -- keys are in the units of their KV heads
    q = (q:reshape { q:size(0), s.kv_heads, s.heads / s.kv_heads, s.head_dim }
      * unit:reshape { 1, s.kv_heads, 1, 1 }):reshape(query:dims())
  end
  local asks, weights = self.asks(ctx.layer, q)
  weights = weights or tensor.ones(s.device, "f32", { q:size(0), self.heads })
  return self.cache:queries(asks, weights)
end

--- Queries in f8e4m3 and their weights, as logits take them, of `count` rows of the step
-- from `first` on. Both are new tensors.
---@param first? integer  0
---@param count? integer  all rows
function Landmarks:queries(ctx, first, count)
  return tensor.scope(queries, self, ctx, first or 0, count or ctx.query:size(0))
end

-- ---- blocks ---------------------------------------------------------------------------

--- How many groups so many tokens make.
local function groups_of(self, lens)
  return self.pool == 1 and lens or (lens + (self.pool - 1)) / self.pool
end

--- Logits of the groups of some sequences' blocks: f32 [rows, blocks * group], -inf past
-- lens[r] tokens. A new tensor.
local function logits_of(self, ctx, first, count, tables, lens)
  local q8, weights = self:queries(ctx, first, count)
  local logits = tensor.full(self.shape.device, "f32",
    { count, tables:size(1) * self.group }, -math.huge)
  return self.cache:logits(memory_of(self, ctx.layer), q8, weights, tables,
    groups_of(self, lens), logits)
end

--- Counts the landmarks of all of the context's blocks.
local function count_read(self, ctx)
  if ctx.reads then ctx.reads:each_block(ctx, self:bytes_block()) end
end

local function score_decode(self, ctx)
  count_read(self, ctx)
  return ctx:shared_by("max", logits_of(self, ctx, 0, ctx.seqs, ctx.tables, ctx.lens)
    :reshape { ctx.seqs, ctx.width, self.group }, 2)
end

--- The best logit of each block: for a decoded token, or the best for any token of a
-- prompt's chunk. A chunk takes 4 bytes for each pair of a query and a token before it.
---@return kvlab.Tensor scores  f32 [seqs, kv_heads or 1, ctx.width], the caller's
function Landmarks:score(ctx)
  local s = self.shape
  if not ctx.is_prefill then
    local scores = tensor.scope(score_decode, self, ctx)
    return scores
  end
  return ctx:score_sequences(function(i, first, count, n)
    local lens = tensor.full(s.device, "i32", { count }, n * s.block_size)
    local tables = ctx.tables:narrow(i, 1):reshape { ctx.width }:narrow(0, n)
    local best = logits_of(self, ctx, first, count, tables:reshape { 1, n }, lens)
      :max(0):reshape { n, self.group }:max(1)
    return best + tensor.zeros(s.device, "f32", { s.kv_heads, 1 })
  end)
end

-- ---- tokens ---------------------------------------------------------------------------

local FIRST = 1e30 -- more than any logit

--- Puts n columns, beginning at `begin` (i32 [rows, 1]), before all others.
local function put_first(logits, n, begin, first)
  local columns = begin + tensor.arange(logits.device, "i32", n, -first)
  logits:scatter_(columns,
    tensor.full(logits.device, "f32", { logits:size(0), n }, FIRST))
end

--- Makes an indexer's `edit` that puts the entries of the first `sink` and the last
-- `recent` blocks before all others; if has_newest, also the last entry.
local function new_edit(size, sink, recent, has_newest)
  return function(logits, lens, first)
    local rows, dev = logits:size(0), logits.device
    if sink > 0 then
      put_first(logits, sink * size, tensor.zeros(dev, "i32", { rows, 1 }), first)
    end
    if recent > 0 then
      local block = ((lens - 1) / size):maximum(recent - 1) - (recent - 1)
      put_first(logits, recent * size, (block * size):reshape { rows, 1 }, first)
    end
    if has_newest then put_first(logits, 1, (lens - 1):reshape { rows, 1 }, first) end
  end
end

--- Replaces each group of groups, i32 [rows, n], by its tokens: i32 [rows, n * pool]. A
-- token that the row does not see becomes -1.
local function tokens_of(self, groups, lens, out)
  local rows, n, pool = groups:size(0), groups:size(1), self.pool
  local tokens = (groups:reshape { rows, n, 1 } * pool
    + tensor.arange(groups.device, "i32", pool)):maximum(-1)
  return tokens:lt(lens:reshape { rows, 1, 1 }):where(tokens, -1,
    out and out:reshape { rows, n, pool }):reshape { rows, n * pool }
end

--- The selected tokens of some rows: i32 [rows, k].
local function select_rows(self, ctx, want, rows)
  local it, pool = self.indexer, self.pool
  local topk = rows.k / pool
  if not it or it.topk ~= topk then
    if it then it:free() end
    self.indexer = indexer.indexer { topk = topk, device = self.shape.device }
  end
  if want.sink + want.recent > 0 or pool > 1 then
    self.edit = self.edit or new_edit(self.group, want.sink, want.recent, pool > 1)
  end
  local q8, weights = self:queries(ctx, rows.first, rows.count)
  local selected = self.indexer:select_step { q = q8, weights = weights,
    tables = rows.tables, cache = self.cache:layer(memory_of(self, ctx.layer)),
    lens = groups_of(self, rows.lens),
    max_len = rows.max_len and math.ceil(rows.max_len / pool),
    block_size = self.group, out = pool == 1 and rows.out or nil, edit = self.edit }
  return pool == 1 and selected or tokens_of(self, selected, rows.lens, rows.out)
end

--- How many tokens to select in a sequence of this length: whole groups.
local function amount(self, want, length)
  return self.pool * math.max(1, math.floor(want.k(length) / self.pool))
end

--- Selects for one sequence after the other, where each has its own k.
local function select_each(self, ctx, want, out)
  local dev, first = self.shape.device, 0
  for i, seq in ipairs(ctx.sequences) do
    local count, length = ctx.batch.counts[i], seq:length()
    local k = amount(self, want, length)
    if count > 0 and not (ctx.asked and not ctx.asked[i]) then
      local tokens = select_rows(self, ctx, want, { k = k, max_len = length,
        first = first, count = count, tables = ctx.tables:narrow(i - 1, 1),
        lens = tensor.arange(dev, "i32", count, length - count + 1) })
      local columns = tensor.zeros(dev, "i32", { count, 1 })
        + tensor.arange(dev, "i32", k)
      out:narrow(first, count):scatter_(columns, tokens)
    end
    first = first + count
  end
end

--- The most tokens that any sequence of the step wants, and whether all want as many.
local function widest(self, ctx, want)
  local most, same = 1, true
  for i, seq in ipairs(ctx.sequences) do
    local k = amount(self, want, seq:length())
    same = same and (i == 1 or k == most)
    most = math.max(most, k)
  end
  return most, same
end

local function select(self, ctx, want, out, same)
  if not same or ctx.is_prefill then
    select_each(self, ctx, want, out:fill_(-1))
    return
  end
  -- a step that is recorded now serves longer sequences later
  local records = C.kvl_device_is_recording(self.shape.device) == 1
  select_rows(self, ctx, want, { k = out:size(1), first = 0, count = out:size(0),
    tables = ctx.tables, lens = ctx.lens, out = out,
    max_len = not records and ctx.total_kv_len or nil })
end

local WANT = { k = options.required(options.callable),
               sink = options.required(options.whole),
               recent = options.required(options.whole) }

--- The tokens with the best logits for each row of ctx.query, by their index in its
-- sequence: i32 [rows, 1, k], padded with -1. The result is valid until the next call.
---@param want table  the same table in every call: k(length), how many tokens to select
--                    of a sequence; sink, recent: how many blocks' tokens come first
function Landmarks:select(ctx, want)
  if self.want ~= want then -- checked once, not in every step
    self.want = options.check("landmarks.select", want, WANT)
  end
  local k, same = widest(self, ctx, want)
  local rows, out = ctx.query:size(0), self.listed
  count_read(self, ctx)
  if not out or out:size(0) ~= rows or out:size(2) ~= k then
    out = tensor.lasting(tensor.tensor, self.shape.device, "i32", { rows, 1, k })
    self.listed = out
  end
  tensor.scope(select, self, ctx, want, out:reshape { rows, k }, same)
  return out
end

--- Bytes of one block's landmarks, divided among the KV heads that share them.
function Landmarks:bytes_block()
  return self.group * self.cache:bytes_token() / self.shape.kv_heads
end

M.landmarks = arguments.of("landmarks", M.landmarks, { shape = objects.heads_shape })
arguments.methods(Landmarks, "landmarks", {
  update = { ev = objects.event },
  keep = { key = options.string, block = options.whole,
           store = options.optional(options.table) },
  find = { store = options.table, n = options.whole },
  recall = { key = options.string, block = options.whole },
  score = { ctx = objects.layer_context },
  queries = { ctx = objects.layer_context, first = options.optional(options.whole),
              count = options.optional(options.whole) },
  select = { ctx = objects.layer_context, want = options.table },
})

return M
