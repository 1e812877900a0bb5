--- Compressed KV: every complete block becomes one key and one value, to which queries
-- attend as to a token. Compressed KV is a KV cache of block_size 1. Its block b stands
-- for block b of the KV cache that it belongs to, so both use the same block tables.
--
-- Source  the compressed branch of NSA (Yuan et al. 2025, arXiv:2502.11089). The paper
--         makes the keys and values with a small trained network, after adding each
--         token's position in the block. Here they are means of the block's tokens, or
--         weighted sums
local arguments = require "kvlab.arguments"
local kinds = require "kvlab.tensor.kinds"
local library = require "kvlab.library"
local by_page = require "kvlab.tensor.by_page"
local objects = require "kvlab.memory.objects"
local ops = require "kvlab.tensor.ops"
local options = require "kvlab.options"
local tensor = require "kvlab.tensor.arithmetic"

local C, check = library.C, library.check
local M = {}

---@class kvlab.Compressed
local Compressed = {}
Compressed.__index = Compressed

--- Compressed KV for the shape that a policy gets.
---@param shape table      as policy.init gets it
---@param weights? number[]  one for each of a block's block_size tokens (1 / block_size)
---@return kvlab.Compressed
function M.compressed(shape, weights)
  local s, size = shape, shape.block_size
  if weights and #weights ~= size then
    error(("compressed: %d weights, expected block_size = %d"):format(#weights, size), 2)
  end
  local memory, layers = by_page.new(tensor.zeros, s, "f32",
    { 2, s.kv_heads, 1, s.head_dim })
  local self = setmetatable({ shape = s, memory = memory, layers = layers }, Compressed)
  self.weights = weights and tensor.from(s.device, "f32", { 1, size, 1 }, weights)
    or tensor.full(s.device, "f32", { 1, size, 1 }, 1 / size)
  return self
end

--- The weighted sums of blocks x, [n, kv_heads, block_size, head_dim].
local function sums(self, x, n)
  local s = self.shape
  return (x:reshape { n * s.kv_heads, s.block_size, s.head_dim } * self.weights):sum(1)
    :reshape { n, 1, s.kv_heads, 1, s.head_dim }
end

local function update(self, ev)
  local s, n = self.shape, ev.blocks:size(0)
  -- a block that is not complete is not a compressed token yet, and may hold anything
  local full = ev.num_tokens:ge(s.block_size)
  local none = tensor.full(s.device, "i32", { n }, -1)
  local from, to = full:where(ev.k_blocks, none), full:where(ev.blocks, none)
  local k = tensor.tensor(s.device, "f32", { n, s.kv_heads, s.block_size, s.head_dim })
  local v = tensor.open_like(k)
  ops.read_blocks(ev.k, from, k, v, s.format and s.format:of(ev.layer))
  options.entry("update", "ev.layer", self.layers, ev.layer):scatter_rows_(to,
    tensor.cat({ sums(self, k, n), sums(self, v, n) }, 1))
end

--- Compresses those blocks of an offload event that are complete.
function Compressed:update(ev) tensor.scope(update, self, ev) end

--- The number of complete blocks of each sequence: i32 [seqs]. A new tensor.
function Compressed:lens(ctx) return ctx.lens / self.shape.block_size end

--- The query in f32 and in the units of the cache: a new tensor.
local function in_units(self, ctx)
  local s, unit = self.shape, (ctx.format:scales(ctx.layer))
  local q = ctx.query:cast "f32"
  if not unit then return q end
  return (q:reshape { -1, s.kv_heads, s.heads / s.kv_heads * s.head_dim }
    * unit:reshape { 1, s.kv_heads, 1 }):reshape(q:dims())
end

--- Counts a share of the compressed keys and values of all blocks.
local function count_read(self, ctx, share)
  if ctx.reads then ctx.reads:each_block(ctx, share * self:bytes_block()) end
end

--- Attention of a decode step over complete blocks: f32 [seqs, heads, head_dim], 0 for a
-- sequence that has none. A new tensor.
---@param v_scale? kvlab.Tensor  f32 [kv_heads] of an f8e4m3 cache
function Compressed:attend(ctx, v_scale)
  local s = self.shape
  count_read(self, ctx, 1)
  local out = ops.step.paged_attention { q = in_units(self, ctx), scale = ctx.scale,
    cache = self.layers[ctx.layer], tables = ctx.tables, lens = self:lens(ctx) }
  if not v_scale then return out end
  return (out:reshape { ctx.seqs, s.kv_heads, -1 } * v_scale:reshape { 1, s.kv_heads, 1 })
    :reshape(out:dims())
end

local function score(self, ctx)
  local s, keys = self.shape, self.layers[ctx.layer]
  local each, rows = s.heads / s.kv_heads, ctx.seqs * s.heads
  local q, lens = in_units(self, ctx):reshape { rows, s.head_dim }, self:lens(ctx)
  local first = tensor.arange(s.device, "i32", ctx.seqs * s.kv_heads, 0, each)
  local sum, part = ctx:new_scores():fill_(0), ctx:new_scores()
  for i = 0, each - 1 do -- one query head of every group
    local heads = q:gather_rows(first + i):reshape { ctx.seqs, s.kv_heads, s.head_dim }
    count_read(self, ctx, 0.5)
    check(C.kvl_score_max_qk(heads, keys, nil, ctx.tables, lens, C.KVL_GROUP_MAX, part))
    sum:add(part:softmax(ctx.scale), sum)
  end
  return sum
end

--- The attention that the query heads of a KV head together pay to the compressed key of
-- each complete block, 0 for other blocks: f32 [seqs, kv_heads, width]. The tensor
-- belongs to the caller until the layer's attention is over.
function Compressed:score(ctx)
  local scores = tensor.scope(score, self, ctx)
  return scores
end

--- Bytes of the compressed key and value of one block and KV head.
function Compressed:bytes_block() return 2 * 4 * self.shape.head_dim end

M.compressed = arguments.of("compressed", M.compressed, { shape = objects.heads_shape,
  weights = options.optional(options.list_of(options.number)) })
local LAYER = { ctx = objects.layer_context }
arguments.methods(Compressed, "compressed KV", {
  update = { ev = objects.event }, lens = LAYER, score = LAYER,
  attend = { ctx = objects.layer_context, v_scale = kinds.tensor_or_nil },
})

return M
