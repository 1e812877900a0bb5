--- Dense prefill over latents, in the form that takes fewer operations.
--
-- Over latents, a decode step attends in the absorbed form: the query of a head is
-- multiplied with the head's matrix of keys, so that all heads read the latents as they
-- are. A query then costs a product with key_dim numbers for a key and value_dim for its
-- value: 576 and 512 in DeepSeek's models. In the expanded form, the matrices make every
-- head's keys and values of the latents, 192 and 128 numbers. That takes a product for
-- each token that is read, so it pays where a step has many queries: in a prefill.
--
-- One product writes both. Of a head, W_K has a row for each number of a key: the rows of
-- the head's own matrix, and behind them an identity, which copies the part of a key that
-- all heads share, the rotated one. W_V has rows of zeros where a value is shorter than a
-- key. So the product of latents and all W_K, W_V is a page of K and V as attention reads
-- it. A piece of a context is as many pages as fit PIECE_BYTES; the attentions over
-- several pieces are merged.
--
-- Source  DeepSeek-V2, arXiv:2405.04434 (absorbed); FlashMLA and vLLM choose the form by
--         phase in the same way
local library = require "kvlab.library"
local ops = require "kvlab.tensor.ops"
local options = require "kvlab.options"
local tensor = require "kvlab.tensor.arithmetic"
local each_policy = require("kvlab.policy.told").each_policy

local C, check = library.C, library.check
local M = {}

M.PIECE_BYTES = 2 ^ 29  -- the most of the keys and values of a piece
local TILE = 128        -- tokens: pages are whole tiles of attention's kernels
local PAGE_MOST = 4096  -- tokens of a page
local DIM_MOST = 256    -- numbers of a key that attention over such pages takes

---@class kvlab.Expansion  of one attention
---@field lacks string|nil  why no prefill of the attention can be computed so
---@field forced boolean|nil  expand wherever it is possible, or never; nil: where it pays
local Expansion = {}
Expansion.__index = Expansion

---@class kvlab.LatentMatrices  of one layer: what makes keys and values of latents
---@field keys kvlab.Tensor    [heads, key numbers without the rotated ones, value_dim]
---@field values kvlab.Tensor  [heads, numbers of a value, value_dim]

--- What the attention of a prefill needs beside all keys of a sequence, so that it cannot
-- be expanded; nil if nothing.
local function lacks(attention, o)
  local cache = attention.cache
  if not cache.format.is_shared then return "keys and values that are no latents" end
  if not cache.tier.is_resident then return "KV in host memory" end
  if cache.tables ~= "one" then return "tables by layer or head" end
  if attention.windows or (o.window or 0) ~= 0 or (o.soft_cap or 0) ~= 0 or o.alibi then
    return "a window, a soft cap or ALiBi"
  end
  if not attention.prefill_policy.dense then
    return ("policy %s, which selects in prefill"):format(attention.prefill_policy.name)
  end
  if attention.prefill_policy.hook or attention.emitters then
    return "policies that change the attention of prompts, or emit there"
  end
  local watching
  each_policy(attention, function(p)
    if p.attention_begin or p.attention_finished then watching = p.name end
  end)
  return watching and ("policy %s, which sees the attention of prompts"):format(watching)
end

---@param attention kvlab.Attention
---@param o table  its options; expand: true, false or nil
---@return kvlab.Expansion
function M.new(attention, o)
  local why = lacks(attention, o)
  if o.expand and why then
    options.fail(("attention: expand is true, and the attention has %s, expected dense "
      .. "prefill over latents on the device"):format(why))
  end
  local cache = attention.cache
  return setmetatable({ lacks = why, forced = o.expand, cache = cache,
    scale = attention.shape.scale, heads = attention.shape.heads,
    turned = cache.head_dim - cache.value_dim }, Expansion)
end

-- ---- which form -----------------------------------------------------------------------

--- A step has begun. batch: a prefill's, or nil for a step that cannot be expanded.
function Expansion:begin(batch)
  self.batch, self.parts, self.made_of = batch, nil, nil
end

--- Raises unless matrices are those of a layer of this attention.
local function check_matrices(self, matrices)
  local heads, dim = self.heads, self.cache.value_dim
  for _, name in ipairs { "keys", "values" } do
    local m = type(matrices) == "table" and matrices[name]
    if not tensor.is_tensor(m) or m.ndim ~= 3 or m:size(0) ~= heads
      or m:size(2) ~= dim then
      options.fail(("forward: matrices.%s is %s, expected a tensor [%d, numbers, %d], by "
        .. "which heads and latents are multiplied"):format(name, options.shown(m or nil),
        heads, dim))
    end
  end
end

--- Numbers of an expanded key.
local function dim_of(self, matrices) return matrices.keys:size(1) + self.turned end

--- Whether the step takes less time if it is expanded: by the multiplications for a head,
-- those of attention and those by which queries and results would be absorbed.
local function pays(self, dim, value_numbers)
  local cache, batch = self.cache, self.batch
  local seen, read = 0, 0 -- pairs of a query and a key; tokens to expand
  for i = 1, batch.count do
    local n, length = batch.counts[i], batch.seqs[i]:length()
    seen = seen + n * (length - (n - 1) / 2)
    read = read + (n > 0 and length or 0)
  end
  local saved = seen * (cache.head_dim + cache.value_dim - 2 * dim)
    + batch.tokens_count * cache.value_dim * (dim - self.turned + value_numbers)
  return saved >= read * 2 * dim * cache.head_dim
end

--- Whether the layer's attention is to be expanded. If so, forward gets the matrices, and
-- queries as they are before they would be absorbed.
---@param matrices kvlab.LatentMatrices
---@return boolean
function Expansion:takes(matrices)
  if self.lacks or not self.batch or self.forced == false then return false end
  check_matrices(self, matrices)
  local dim = dim_of(self, matrices)
  local value_numbers = matrices.values:size(1)
  if dim > DIM_MOST or dim % 8 ~= 0 or value_numbers > dim then return false end
  return self.forced or pays(self, dim, value_numbers)
end

-- ---- the pieces of a step -------------------------------------------------------------

--- The most tokens of a piece, in whole blocks and tiles.
local function most_of(self, dim, dtype)
  local unit = self.cache.block_size * math.ceil(TILE / self.cache.block_size)
  local bytes = 2 * self.heads * dim * C.kvl_dtype_bytes(library.dtype(dtype))
  return unit * math.max(2, math.floor(M.PIECE_BYTES / bytes / unit)), unit
end

--- A piece: `length` tokens of a sequence from token `first` on. pages: for each, the
-- blocks whose tokens it has; -1 behind the last one.
local function new_piece(self, row, first, length, unit, is_past)
  local dev, size, blocks = self.cache.device, self.cache.block_size, self.batch.tables
  local count = math.ceil(length / PAGE_MOST)
  local each = math.ceil(length / count / unit) * unit
  local piece = { count = count, each = each, is_past = is_past, pages = {},
    lens = tensor.from(dev, "i32", { 1 }, { length }),
    tables = tensor.arange(dev, "i32", count):reshape { 1, count } }
  for i = 1, count do
    local ids = tensor.full(dev, "i32", { each / size }, -1)
    local from = (first + (i - 1) * each) / size
    local there = math.min(each / size, blocks:size(1) - from)
    if there > 0 then
      ids:narrow(0, there):copy_(blocks:index(row - 1):narrow(from, there))
    end
    piece.pages[i] = ids
  end
  return piece
end

--- Queries of one sequence, and the pieces that they read, of which the last one has the
-- keys of the queries themselves.
local function new_part(self, row, first_row, count, length, most, unit)
  local size, first, pieces = self.cache.block_size, 0, {}
  while length - first > most do
    local room = math.min(most, math.floor((length - count - first) / size) * size)
    pieces[#pieces + 1] = new_piece(self, row, first, room, unit, true)
    first = first + room
  end
  pieces[#pieces + 1] = new_piece(self, row, first, length - first, unit, false)
  return { first = first_row, count = count, pieces = pieces,
           starts = tensor.from(self.cache.device, "i32", { 2 }, { 0, count }) }
end

local function new_parts(self, dim, dtype)
  local batch, parts, row = self.batch, {}, 0
  local most, unit = most_of(self, dim, dtype)
  for i = 1, batch.count do
    local n, length = batch.counts[i], batch.seqs[i]:length()
    local most_queries = most - unit
    for done = 0, n - 1, most_queries do
      local count = math.min(most_queries, n - done)
      parts[#parts + 1] = new_part(self, i, row + done, count, length - n + done + count,
        most, unit)
    end
    row = row + n
  end
  return parts
end

-- ---- matrices -------------------------------------------------------------------------

--- The matrices of one product, [2 * heads, dim, key_dim], with all that is the same for
-- every layer: zeros, and the identity behind the rows of keys.
local function new_product(self, dtype, dim, key_rows, value_rows)
  local dev, heads = self.cache.device, self.heads
  local columns, turned, first = self.cache.head_dim, self.turned, self.cache.value_dim
  local all = tensor.zeros(dev, dtype, { 2 * heads, dim, columns })
  local keys, values = all:narrow(0, heads), all:narrow(heads, heads)
  if turned > 0 then
    local at = tensor.arange(dev, "i32", turned, first):reshape { turned, 1 }
    local one = tensor.zeros(dev, "f32", { turned, columns })
      :scatter_(at, tensor.full(dev, "f32", { turned, 1 }, 1)):cast(dtype)
    local each = tensor.zeros(dev, dtype, { heads, turned, columns })
    each:add(one:reshape { 1, turned, columns }, each)
    check(C.kvl_put_part(each, 1, key_rows, keys))
  end
  return { all = all, keys = keys, values = values, key_rows = key_rows,
           value_rows = value_rows,
           wide_keys = tensor.zeros(dev, dtype, { heads, key_rows, columns }),
           wide_values = tensor.zeros(dev, dtype, { heads, value_rows, columns }) }
end

--- The product with a layer's matrices in it.
local function product_of(self, matrices, dtype, dim)
  local p = self.product
  local key_rows, value_rows = matrices.keys:size(1), matrices.values:size(1)
  if not p or p.key_rows ~= key_rows or p.value_rows ~= value_rows
    or p.all:type() ~= dtype then
    p = tensor.lasting(new_product, self, dtype, dim, key_rows, value_rows)
    self.product, self.made_of = p, nil
  end
  if self.made_of ~= matrices then
    check(C.kvl_put_part(matrices.keys, 2, 0, p.wide_keys))
    check(C.kvl_put_part(p.wide_keys, 1, 0, p.keys))
    check(C.kvl_put_part(matrices.values, 2, 0, p.wide_values))
    check(C.kvl_put_part(p.wide_values, 1, 0, p.values))
    self.made_of = matrices
  end
  return p
end

-- ---- attention ------------------------------------------------------------------------

--- The keys and values of a piece: [pages, 2, heads, tokens, dim].
local function expand(self, layer, piece, product, dim)
  local cache, dtype, each = self.cache, product.all:type(), piece.each
  local size, key_dim = cache.block_size, cache.head_dim
  local latents = tensor.tensor(cache.device, dtype, { each, key_dim })
  local rows = latents:reshape { each / size, 1, size, key_dim }
  local pages = tensor.tensor(cache.device, dtype,
    { piece.count, 2 * self.heads, each, dim })
  for i, blocks in ipairs(piece.pages) do
    ops.read_blocks(cache:layer(layer), blocks, rows, nil, cache.format:of(layer))
    latents:matmul_t(product.all, pages:index(i - 1))
  end
  return pages:reshape { piece.count, 2, self.heads, each, dim }
end

--- Attends from a part's queries, piece by piece.
local function attend_part(self, layer, part, q, product, dim, out)
  local of, last, sum, lse, next_lse =
    { starts = part.starts, scale = self.scale }, #part.pieces, nil, nil, nil
  if last > 1 then
    sum = tensor.tensor(q.device, "f32", { part.count, self.heads, dim })
    lse = tensor.tensor(q.device, "f32", { part.count, self.heads })
    next_lse = tensor.tensor(q.device, "f32", { part.count, self.heads })
  end
  for i, piece in ipairs(part.pieces) do
    of.tables, of.lens = piece.tables, piece.lens
    tensor.scope(function()
      ops.step.attend(of, q, expand(self, layer, piece, product, dim), nil, nil, nil,
        i < last and sum or out, i < last and next_lse or nil, i > 1 and sum or nil,
        i > 1 and lse or nil, piece.is_past)
    end)
    lse, next_lse = next_lse, lse
  end
end

local function attend(self, layer, q, matrices, out)
  local dtype, dim, tokens = q:type(), q:size(2), q:size(0)
  local product = product_of(self, matrices, dtype, dim)
  local value_dim = product.value_rows
  local wide = value_dim == dim and out
    or tensor.tensor(q.device, dtype, { tokens, self.heads, dim })
  for _, part in ipairs(self.parts) do
    attend_part(self, layer, part, q:narrow(part.first, part.count), product, dim,
      wide:narrow(part.first, part.count))
  end
  if wide ~= out then check(C.kvl_take_part(wide, 2, 0, out)) end
end

--- Rotates queries and keys, as forward does with queries that are absorbed.
function Expansion:rotate(q, k, inv_freq)
  local positions = self.batch.positions
  ops.rope(q, positions, inv_freq, q:size(2) - self.turned)
  ops.rope(k, positions, inv_freq, self.cache.value_dim)
end

--- Raises unless q and out have the shapes of a layer with these matrices.
function Expansion:check(q, matrices, out)
  if not self.batch or self.lacks then
    options.fail "forward: matrices are given, but expands was false for this step"
  end
  check_matrices(self, matrices)
  local heads, dim = self.heads, dim_of(self, matrices)
  for name, x in pairs { q = { q, dim }, out = { out, matrices.values:size(1) } } do
    local given, numbers = x[1], x[2]
    if not tensor.is_tensor(given) or given.ndim ~= 3 or given:size(1) ~= heads
      or given:size(2) ~= numbers then
      options.fail(("forward: %s is %s, expected [tokens, %d, %d]: its heads and numbers")
        :format(name, options.shown(given), heads, numbers))
    end
  end
end

--- The attention of a layer.
---@param q kvlab.Tensor    [tokens, heads, numbers of a key], rotated
---@param out kvlab.Tensor  [tokens, heads, numbers of a value]
function Expansion:attend(layer, q, matrices, out)
  self.parts = self.parts
    or tensor.lasting(new_parts, self, q:size(2), q:type())
  tensor.scope(attend, self, layer, q, matrices, out)
  return out
end

return M
