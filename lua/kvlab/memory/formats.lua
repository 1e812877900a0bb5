--- A format is the dtype and layout of a page (the K and V of one block in one layer),
-- with its bytes and the way it is appended to and read. All other code asks
-- cache.format about KV memory. A new format is a class in this file.
--
-- pages    f32 f16 bf16: K and V as they are
-- f8e4m3   k / k_scale[kv_head] and v / v_scale[kv_head] in 8 bits; whoever multiplies
--          with K or V multiplies the result by the scale
local arguments = require "kvlab.arguments"
local ffi = require "ffi"
local kinds = require "kvlab.tensor.kinds"
local library = require "kvlab.library"
local options = require "kvlab.options"

local C, check = library.C, library.check
local M = {}

---@class kvlab.Format
---@field dtype string
---@field page integer[]  dims of a page: 2 (K, V), kv_heads, block_size, head_dim
local Pages = {}
Pages.__index = Pages

--- Bytes of K and V of one token in one layer and KV head.
function Pages:bytes_token()
  return 2 * self.page[4] * C.kvl_dtype_bytes(library.dtypes[self.dtype])
end

--- Bytes of a page: a block in one layer.
function Pages:bytes_page() return self.page[2] * self.page[3] * self:bytes_token() end

--- k_scale and v_scale of a layer, f32 [kv_heads], as the ops take them; nil if the
-- format stores K and V themselves.
function Pages:scales(_) return nil, nil end

--- Appends k, v [tokens, kv_heads, head_dim] to the pages in `memory`. places, i64
-- [tokens], holds the place of each token.
function Pages:append(layer, k, v, places, memory)
  check(C.kvl_append_kv(k, v, places, memory, self:scales(layer)))
end

--- The same with rotation: q is rotated in place, and k on its way into the pages.
function Pages:rope_append(layer, q, k, v, positions, inv_freq, places, memory)
  check(C.kvl_rope_append(q, k, v, positions, inv_freq, places, memory,
    self:scales(layer)))
end

--- Appends to three memories in one launch: the host tier, the slots of a hot cache that
-- hold the same blocks, and the buffer of open blocks.
function Pages:hot_append(layer, hot, k, v, places, memory, buffer_places, buffer)
  check(C.kvl_hot_append(hot, k, v, places, memory, buffer_places, buffer,
    self:scales(layer)))
end

--- Copies whole pages within `memory`; from and to are i32 [n].
function Pages:copy(from, to, memory) check(C.kvl_copy_blocks(from, to, memory)) end

---@class kvlab.F8Format: kvlab.Format
local F8 = setmetatable({}, { __index = Pages })
F8.__index = F8

function F8:scales(layer) return self.k_scales[layer], self.v_scales[layer] end

local CLASSES = { f32 = Pages, f16 = Pages, bf16 = Pages, f8e4m3 = F8 }
M.DTYPES = { "f32", "f16", "bf16", "f8e4m3" }

--- A list by layer of one scale per KV head; nil without `scale`.
local function by_layer(layers, scale)
  local views = {}
  for layer = 0, scale and layers - 1 or -1 do views[layer] = scale:index(layer) end
  return views
end

--- The format of a cache.
---@param o table  dtype, layers, kv_heads, block_size, head_dim, and for f8e4m3 k_scale
--                 and v_scale, f32 [layers, kv_heads] (1)
---@param level integer  which caller to blame
---@return kvlab.Format
function M.new(o, level)
  local class = CLASSES[o.dtype]
  for _, name in ipairs { "k_scale", "v_scale" } do
    if o[name] and class ~= F8 then
      error(("cache: %s is given for a cache of %s, expected f8e4m3"):format(name,
        o.dtype), level + 1)
    end
  end
  return setmetatable({
    dtype = o.dtype, page = { 2, o.kv_heads, o.block_size, o.head_dim },
    k_scales = by_layer(o.layers, o.k_scale), v_scales = by_layer(o.layers, o.v_scale),
  }, class)
end

local a_tensor = kinds.tensor
local HOT = { "the slots of a hot cache", function(x)
  return type(x) == "cdata" and ffi.istype("kvl_hot", x)
end }
arguments.methods(Pages, "a format", {
  append = { layer = options.whole, k = a_tensor, v = a_tensor, places = a_tensor,
             memory = a_tensor },
  rope_append = { layer = options.whole, q = a_tensor, k = a_tensor, v = a_tensor,
                  positions = a_tensor, inv_freq = a_tensor, places = a_tensor,
                  memory = a_tensor },
  hot_append = { layer = options.whole, hot = HOT, k = a_tensor, v = a_tensor,
                 places = a_tensor, memory = a_tensor, buffer_places = a_tensor,
                 buffer = a_tensor },
  copy = { from = a_tensor, to = a_tensor, memory = a_tensor },
})

return M
