--- index-K: the keys with which a lightning indexer scores tokens. There is one small key
-- for each token and layer, shared by all heads of the indexer, in f8e4m3 with its own
-- scale. A key of dim 128 takes 132 bytes; K and V of 8 bf16 heads of 128 take 4096. It
-- uses the block tables and places of the KV cache that it belongs to.
--
--   local index = kv.index_cache { layers = 2, blocks = 1024 }
--   index:append(layer, k, batch.places)                  k [tokens, dim]
--   local q8, w = index:queries(q, weights)              q [rows, heads, dim]
--   index:logits(layer, q8, w, batch.tables, lens, logits)
--
-- Source  DeepSeek-V3.2 (DSA); SGLang's pool: blocks of 64, keys first, then scales. The
--         a scale is amax / 448, rounded to f32. With scale = "ue8m0", the scales of keys
--         and queries are rounded up to powers of two, as DeepSeek-V3.1 and later
--         quantise them; they take the same 4 bytes
local arguments = require "kvlab.arguments"
local by_page = require "kvlab.tensor.by_page"
local device = require "kvlab.tensor.device"
local kinds = require "kvlab.tensor.kinds"
local ops = require "kvlab.tensor.ops"
local options = require "kvlab.options"
local tensor = require "kvlab.tensor.arithmetic"

local M = {}

---@class kvlab.IndexCache
---@field layers integer
---@field blocks integer
---@field block_size integer
---@field dim integer
---@field rotate boolean   keys and queries are rotated (Hadamard), then quantised
---@field scale string      "f32" or "ue8m0"
---@field bits integer     of each number of a key: 8 (e4m3), 4 or 2
---@field memory kvlab.Tensor  u8 [layers, pages, block_size * (dim + 4)], of which the
--                              blocks are the first pages
local IndexCache = {}
IndexCache.__index = IndexCache

local KNOWN = {
  layers = options.count, blocks = options.required(options.whole),
  block_size = options.within(1, 4096), dim = options.one_of(32, 64, 128),
  rotate = options.boolean, bits = options.one_of(2, 4, 8), scale = ops.SCALES,
  device = kinds.device,
}
local ROUND = 1.5 * 2 ^ 23 -- adding and subtracting it rounds an f32 to a whole number

--- Memory for the index keys of `blocks` blocks. It is zero at first.
---@param o table  blocks; layers (1), block_size (64), dim (128; 32 or 64), rotate
--                 (false), bits (8; 4 or 2), scale ("f32"; "ue8m0": a power of two),
--                 device
---@return kvlab.IndexCache
function M.index_cache(o)
  options.check("index_cache", o, KNOWN)
  local self = setmetatable({ layers = o.layers or 1, blocks = o.blocks,
    block_size = o.block_size or 64, dim = o.dim or 128, rotate = o.rotate or false,
    bits = o.bits or 8, scale = o.scale or "f32" }, IndexCache)
  self.device = device.device(o.device)
  self.memory, self.each = by_page.new(tensor.zeros, self, "u8",
    { self.block_size * (self.dim + 4) })
  return self
end

--- A layer's memory as the ops take it: u8 [blocks, block_size * (dim + 4)].
function IndexCache:layer(layer)
  return options.entry("index_cache", "layer", self.each, layer)
end

--- Copies whole blocks in every layer; from and to are i32 [n], of which -1 is skipped.
function IndexCache:copy_blocks(from, to)
  for layer = 0, self.layers - 1 do ops.copy_blocks(from, to, self.each[layer]) end
end

--- Bytes of a token in one layer.
function IndexCache:bytes_token() return self.dim + 4 end

--- Simulates an index of fewer bits: rounds each row to whole multiples of a step, from
-- -7 to 7 at 4 bits and from -1 to 1 at 2 bits, where the row's largest number is the
-- last multiple. e4m3 holds these multiples exactly. Memory and time stay those of 8
-- bits.
local function rounded(self, k)
  k = (self.rotate and ops.hadamard(k) or k):cast "f32"
  local step = k:abs():max(1):reshape { k:size(0), 1 }:maximum(1e-4)
    / (2 ^ (self.bits - 1) - 1)
  return (k / step + ROUND - ROUND) * step
end

local function append(self, k, places, memory)
  options.argument("append", "k", k, kinds.tensor)
  if self.bits == 8 then
    ops.index_append(k, places, memory, self.scale, self.rotate)
  else
    ops.index_append(rounded(self, k), places, memory, self.scale)
  end
end

--- Writes the keys of new tokens.
---@param k kvlab.Tensor      f32 f16 bf16 [n, dim]
---@param places kvlab.Tensor  i64 [n]; a token with a negative place is skipped
function IndexCache:append(layer, k, places)
  tensor.scope(append, self, k, places, self:layer(layer))
end

--- The keys at places, as f8e4m3 [n, dim], and their scales, f32 [n].
---@param places kvlab.Tensor  i64 [n]
function IndexCache:gather(layer, places)
  local n = places:size(0)
  return ops.index_gather(self:layer(layer), places,
    tensor.tensor(self.device, "f8e4m3", { n, self.dim }),
    tensor.tensor(self.device, "f32", { n }))
end

--- Queries as `logits` takes them: q in f8e4m3, and weights that include its scales.
---@param q kvlab.Tensor        f32 f16 bf16 [rows, heads, dim]
---@param weights kvlab.Tensor  f32 [rows, heads]
---@param factor? number        of all weights (1)
---@return kvlab.Tensor q8
---@return kvlab.Tensor weights
function IndexCache:queries(q, weights, factor)
  return ops.index_queries(q, weights, factor, self.scale, self.rotate)
end

--- Writes logits[r][j] for the first lens[r] tokens j of the sequence of row r. The other
-- entries of logits do not change.
---@param q kvlab.Tensor        f8e4m3 [rows, heads, dim], see queries
---@param weights kvlab.Tensor  f32 [rows, heads]
---@param tables kvlab.Tensor   i32 [sequences, max_blocks]
---@param lens kvlab.Tensor     i32 [rows], rows a multiple of sequences
---@param logits kvlab.Tensor   f32 bf16 [rows, columns]
function IndexCache:logits(layer, q, weights, tables, lens, logits)
  return ops.mqa_logits_paged(q, weights, self:layer(layer), tables, lens, logits)
end

arguments.methods(IndexCache, "an index cache", {
  copy_blocks = { from = kinds.tensor, to = kinds.tensor },
  gather = { places = kinds.tensor },
  queries = { q = kinds.tensor, weights = kinds.tensor },
})

return M
