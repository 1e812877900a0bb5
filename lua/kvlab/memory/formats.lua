--- A format is what a page holds: the numbers of a key and of a value, and the codec that
-- stores them. It is data: kernels use it to find the rows of a page (kernels/page.h),
-- and code that moves pages sees only bytes. All other code asks cache.format about KV
-- memory.
--
-- f32 f16 bf16  K and V as they are
-- f8e4m3        k / k_scale[kv_head] and v / v_scale[kv_head] in 8 bits; whoever
--               multiplies with K or V multiplies the result by the scale
-- int8          whole numbers of 8 bits, and a bf16 scale for each token and 64 of its
--               numbers, which a page holds, too
-- f8_latent     for values that are the first numbers of their keys: the value in f8e4m3
--               with an f32 scale for each 128 of its numbers, and the key's other
--               numbers in bf16. A latent of 512 + 64 numbers takes 656 bytes: 512, 16 of
--               scales and 128, as in FlashMLA and in vLLM's fp8_ds_mla
--
-- Values are rows of their own, as long as keys. Or they are the first numbers of their
-- keys, as those of latents are (MLA): then a page holds keys alone.
local arguments = require "kvlab.arguments"
local ffi = require "ffi"
local kinds = require "kvlab.tensor.kinds"
local library = require "kvlab.library"
local options = require "kvlab.options"
local page = require "kvlab.tensor.pages"

local C, check = library.C, library.check
local M = {}

M.NAMES = page.NAMES

-- The scales that pages point to.
local scales_of = setmetatable({}, { __mode = "k" })

--- The pages of one layer, as the ops take them.
---@param o table  codec, kv_heads, block_size, head_dim, value_dim, k_scale, v_scale
local function pages(o, level)
  local made = ffi.new("kvl_format", { codec = page.CODECS[o.codec].number,
    kv_heads = o.kv_heads, block_size = o.block_size, key_dim = o.head_dim,
    value_dim = o.value_dim or o.head_dim, is_shared = o.value_dim and 1 or 0,
    k_scale = o.k_scale, v_scale = o.v_scale })
  scales_of[made] = { o.k_scale, o.v_scale }
  check(C.kvl_format_bytes_page(made), level + 1)
  return made
end

local PAGES = {
  codec = options.required(options.one_of(unpack(M.NAMES))),
  kv_heads = options.required(options.count), head_dim = options.required(options.count),
  block_size = options.required(options.count), value_dim = options.count,
  k_scale = kinds.tensor, v_scale = kinds.tensor,
}

--- The format of one layer's pages, for ops over memory whose shape does not say it all,
-- such as pages of int8 or f8_latent, or of f8e4m3 with scales.
---@param o table  codec (f32 f16 bf16 f8e4m3 int8 f8_latent), kv_heads, block_size,
--                 head_dim (of a key); value_dim: a value is the first value_dim numbers
--                 of its key (values are apart, and as long as keys); for f8e4m3 k_scale,
--                 v_scale: f32 [kv_heads] (1)
---@return kvl_format
function M.format(o)
  return pages(options.check("format", o, PAGES), 2)
end

---@class kvlab.Format
---@field name string
---@field memory string  the dtype of memory with such pages
---@field dtype string   the dtype of keys and values that are read out of it
---@field scales_apart boolean  the scales of a block lie behind all of its rows
---@field is_shared boolean  a value is the first numbers of its key
---@field key_share number   of the bytes of a page, those of keys
---@field dims integer[]  of a page as a tensor: 2 (K, V), kv_heads, block_size, head_dim;
--                        without the 2 if values are the first numbers of their keys;
--                        of one that packs numbers its bytes
local Format = {}
Format.__index = Format

--- The format of a layer's pages, as the ops take it.
---@return kvl_format
function Format:of(layer) return options.entry("of", "layer", self.layers, layer) end

--- Bytes of K and V of one token in one layer and KV head.
function Format:bytes_token()
  local one = self.layers[0]
  return self:bytes_page() / (one.kv_heads * one.block_size)
end

--- Bytes of a page: a block in one layer.
function Format:bytes_page() return tonumber(C.kvl_format_bytes_page(self.layers[0])) end

--- The factors for stored keys and values of a layer: f32 [kv_heads] each, or nil for 1.
function Format:scales(layer) return unpack(scales_of[self:of(layer)], 1, 2) end

--- Appends k, v [tokens, kv_heads, head_dim] to the pages in `memory`; v is nil if values
-- are the first numbers of their keys. places, i64 [tokens], holds the place of each
-- token.
function Format:append(layer, k, v, places, memory)
  check(C.kvl_append_kv(k, v, places, memory, self:of(layer)))
end

--- The same with rotation: q is rotated in place, and k on its way into the pages. Where
-- values are the first numbers of their keys, the numbers behind the values are rotated.
function Format:rope_append(layer, q, k, v, positions, inv_freq, places, memory)
  check(C.kvl_rope_append(q, k, v, positions, inv_freq, places, memory,
    self:of(layer)))
end

--- Copies whole pages within `memory`; from and to are i32 [n].
function Format:copy(from, to, memory) check(C.kvl_copy_blocks(from, to, memory)) end

--- The format of a cache.
---@param o table  format (f32 f16 bf16 f8e4m3 int8 f8_latent), layers, kv_heads,
--                 block_size, head_dim, value_dim; for f8e4m3 k_scale, v_scale: f32
--                 [layers, kv_heads] (1)
---@param level integer  which caller to blame
---@return kvlab.Format
function M.new(o, level)
  for _, name in ipairs { "k_scale", "v_scale" } do
    if o[name] and o.format ~= "f8e4m3" then
      error(("cache: %s is given for a cache of %s, expected f8e4m3"):format(name,
        o.format), level + 1)
    end
  end
  local layers = {}
  for layer = 0, o.layers - 1 do
    layers[layer] = pages({ codec = o.format, kv_heads = o.kv_heads,
      block_size = o.block_size, head_dim = o.head_dim, value_dim = o.value_dim,
      k_scale = o.k_scale and o.k_scale:index(layer),
      v_scale = o.v_scale and o.v_scale:index(layer) }, level + 1)
  end
  local codec = page.CODECS[o.format]
  local self = setmetatable({ name = o.format, memory = codec.memory,
    dtype = codec.dtype, scales_apart = codec.scales_apart, layers = layers,
    is_shared = o.value_dim ~= nil, key_share = o.value_dim and 1 or 0.5 }, Format)
  self.dims = codec.packs and { self:bytes_page() }
    or self.is_shared and { o.kv_heads, o.block_size, o.head_dim }
    or { 2, o.kv_heads, o.block_size, o.head_dim }
  return self
end

local a_tensor = kinds.tensor
arguments.methods(Format, "a format", {
  append = { layer = options.whole, k = a_tensor, v = options.optional(a_tensor),
             places = a_tensor, memory = a_tensor },
  rope_append = { layer = options.whole, q = a_tensor, k = a_tensor,
                  v = options.optional(a_tensor),
                  positions = a_tensor, inv_freq = a_tensor, places = a_tensor,
                  memory = a_tensor },
  copy = { from = a_tensor, to = a_tensor, memory = a_tensor },
})

return M
