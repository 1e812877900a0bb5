--- Pages of KV memory for kernels: what kernels/page.h is to C.
local ffi = require "ffi"
local library = require "kvlab.library"

local C, check = library.C, library.check
local M = {}

--- The codecs by name. memory: the dtype of memory with such pages. dtype: of keys and
-- values that are read out of it. packs: it stores numbers with scales beside them.
M.CODECS = {
  f32 = { number = library.dtypes.f32, memory = "f32", dtype = "f32" },
  f16 = { number = library.dtypes.f16, memory = "f16", dtype = "f16" },
  bf16 = { number = library.dtypes.bf16, memory = "bf16", dtype = "bf16" },
  f8e4m3 = { number = library.dtypes.f8e4m3, memory = "f8e4m3", dtype = "f8e4m3" },
  int8 = { number = C.KVL_CODEC_INT8, memory = "u8", dtype = "bf16", packs = true },
  f8_latent = { number = C.KVL_CODEC_F8_LATENT, memory = "u8", dtype = "bf16",
                packs = true },
}

M.NAMES = { "f32", "f16", "bf16", "f8e4m3", "int8", "f8_latent" }

--- Fills a struct kvl_pages: what a kernel gets instead of one layer's memory and its
-- format.
---@param pages ffi.cdata*
---@param memory kvlab.Tensor
---@param format? kvl_format  nil: what the shape of the memory says
function M.fill(pages, memory, format) check(C.kvl_pages_of(memory, format, pages)) end

--- Bytes of the keys, or of the values, of a block and KV head in the pages of a kernel.
---@param plan table  codec, is_shared, value_dim; sizes: token, dim
---@return integer
function M.strip_bytes(plan)
  local bytes = tonumber(check(C.kvl_format_bytes_page(ffi.new("kvl_format", {
    codec = M.CODECS[plan.codec].number, kv_heads = 1, block_size = plan.sizes.token,
    key_dim = plan.sizes.dim, value_dim = plan.value_dim,
    is_shared = plan.is_shared and 1 or 0 }))))
  return plan.is_shared and bytes or bytes / 2
end

--- Do pages store numbers with scales beside them?
---@param p ffi.cdata*  struct kvl_pages
function M.packs(p)
  for _, codec in pairs(M.CODECS) do
    if codec.number == p.codec then return codec.packs or false end
  end
end

--- The same as a new struct.
function M.of(memory, format)
  local pages = ffi.new "struct kvl_pages"
  M.fill(pages, memory, format)
  return pages
end

--- A function of (block, kv_head, token): the index of the first number of a row, where a
-- row is as long as its numbers.
---@param pages ffi.cdata*   struct kvl_pages
---@param strips ffi.cdata*  pages.key or pages.value
function M.rows(pages, strips)
  local bytes = pages.key.bytes_row / pages.key.dim
  local page, begin = tonumber(pages.bytes_page) / bytes, tonumber(strips.begin) / bytes
  local strip, row = tonumber(strips.bytes) / bytes, strips.bytes_row / bytes
  return function(block, kv_head, token)
    return block * page + begin + kv_head * strip + token * row
  end
end

return M
