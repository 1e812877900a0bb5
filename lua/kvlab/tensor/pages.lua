--- Pages of KV memory for kernels: what kernels/page.h is to C.
local ffi = require "ffi"
local library = require "kvlab.library"

local C, check = library.C, library.check
local M = {}

--- Fills a struct kvl_pages: what a kernel gets instead of one layer's memory and its
-- format.
---@param pages ffi.cdata*
---@param memory kvlab.Tensor
---@param format? kvl_format  nil: what the shape of the memory says
function M.fill(pages, memory, format) check(C.kvl_pages_of(memory, format, pages)) end

--- The same as a new struct.
function M.of(memory, format)
  local pages = ffi.new "struct kvl_pages"
  M.fill(pages, memory, format)
  return pages
end

--- A function of (block, kv_head, token): the index of the first number of a row.
---@param pages ffi.cdata*   struct kvl_pages
---@param strips ffi.cdata*  pages.key or pages.value
function M.rows(pages, strips)
  local bytes = strips.bytes_row / strips.dim
  local page, begin = tonumber(pages.bytes_page) / bytes, tonumber(strips.begin) / bytes
  local strip, row = tonumber(strips.bytes) / bytes, strips.dim
  return function(block, kv_head, token)
    return block * page + begin + kv_head * strip + token * row
  end
end

return M
