--- Pages of KV memory for kernels: what kernels/page.h is to C.
local ffi = require "ffi"
local library = require "kvlab.library"

local C, check = library.C, library.check
local M = {}

--- The codecs by name. memory: the dtype of memory with such pages. dtype: of keys and
-- values that are read out of it. packs: it stores numbers with scales beside them.
-- scales_apart: the scales of a block lie behind all of its rows.
M.CODECS, M.NAMES = {}, {}

local count = check(C.kvl_codecs(nil, 0))
local infos = ffi.new("kvl_codec_info[?]", count)
check(C.kvl_codecs(infos, count))
for i = 0, count - 1 do
  local info, name = infos[i], ffi.string(infos[i].name)
  local packs = info.packs ~= 0
  M.NAMES[i + 1] = name
  M.CODECS[name] = { number = info.codec, packs = packs,
    scales_apart = info.scales_apart ~= 0, memory = packs and "u8" or name,
    dtype = packs and "bf16" or name }
end

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
