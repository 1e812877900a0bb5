--- Writes GGUF files for specs, also wrong ones: what a field holds is what is written.
local ffi = require "ffi"

local M = {}

--- A number's bytes, little-endian.
function M.number(ctype, x)
  return ffi.string(ffi.new(ctype .. "[1]", x), ffi.sizeof(ctype))
end

function M.u32(n) return M.number("uint32_t", n) end
function M.u64(n) return M.number("uint64_t", n) end

--- A string; its length may lie.
function M.text(s, length) return M.u64(length or #s) .. s end

M.KINDS = { u8 = 0, i8 = 1, u16 = 2, i16 = 3, u32 = 4, i32 = 5, f32 = 6, bool = 7,
            string = 8, array = 9, u64 = 10, i64 = 11, f64 = 12 }
local CTYPES = { u8 = "uint8_t", i8 = "int8_t", u16 = "uint16_t", i16 = "int16_t",
                 u32 = "uint32_t", i32 = "int32_t", f32 = "float", bool = "uint8_t",
                 u64 = "uint64_t", i64 = "int64_t", f64 = "double" }

local function value_of(kind, x)
  return kind == "string" and M.text(x) or M.number(CTYPES[kind], x)
end

--- One of the metadata: a value, or a list of values of one kind.
function M.key(key, kind, value)
  if type(value) ~= "table" then
    return M.text(key) .. M.u32(M.KINDS[kind]) .. value_of(kind, value)
  end
  local parts = { M.text(key), M.u32(M.KINDS.array), M.u32(M.KINDS[kind]), M.u64(#value) }
  for _, x in ipairs(value) do parts[#parts + 1] = value_of(kind, x) end
  return table.concat(parts)
end

--- What describes a tensor; `sizes` as the file has them, those of neighbours first.
function M.tensor(name, sizes, kind, offset)
  local parts = { M.text(name), M.u32(#sizes) }
  for _, size in ipairs(sizes) do parts[#parts + 1] = M.u64(size) end
  return table.concat(parts) .. M.u32(kind) .. M.u64(offset)
end

--- A file. o: keys and tensors, lists of what the functions above return; data, a string;
-- and what may lie: version, key_count, tensor_count, magic, alignment of the padding.
---@return string
function M.file(o)
  local keys, tensors = o.keys or {}, o.tensors or {}
  local header = (o.magic or "GGUF") .. M.u32(o.version or 3)
    .. M.u64(o.tensor_count or #tensors) .. M.u64(o.key_count or #keys)
    .. table.concat(keys) .. table.concat(tensors)
  return header .. ("\0"):rep(-#header % (o.alignment or 32)) .. (o.data or "")
end

return M
