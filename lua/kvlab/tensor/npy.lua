--- Reads and writes NumPy's files of one array (.npy).
-- Source: NumPy's format specification, versions 1.0 to 3.0.
local ffi = require "ffi"
local files = require "kvlab.files"
local library = require "kvlab.library"
local options = require "kvlab.options"
local sources = require "kvlab.sources"
local tensor = require "kvlab.tensor.tensor"

local M = {}

local DESCR = { f32 = "<f4", f16 = "<f2", i32 = "<i4", i64 = "<i8", u8 = "|u1",
                u64 = "<u8" }
local DTYPES = { ["|b1"] = "u8" } -- true is 1
for dtype, descr in pairs(DESCR) do DTYPES[descr] = dtype end

local MAGIC = "\147NUMPY"

--- Writes a tensor of f32, f16, i32, i64, u8 or u64. The file appears in one step: until
-- then `path` holds what it held before. Waits for the device. Raises for bf16 and
-- f8e4m3, which npy does not have, and if the file cannot be written.
---@param path string
---@param t kvlab.Tensor
function M.save(path, t)
  options.argument("save", "path", path, options.string)
  tensor.expect("save", "t", t)
  local descr = DESCR[t:type()]
  if not descr then
    options.fail(("save: t is %s, which npy does not have: cast it to f32"):format(
      t:type()))
  end
  if t.storage == nil then options.fail "save: t is closed" end
  local dims = table.concat(t:dims(), ", ")
  local header = ("{'descr': '%s', 'fortran_order': False, 'shape': (%s%s), }"):format(
    descr, dims, t.ndim == 1 and "," or "")
  header = header .. (" "):rep(-(#MAGIC + 4 + #header + 1) % 64) .. "\n"
  local length = string.char(#header % 256, math.floor(#header / 256))
  local first, pieces = MAGIC .. "\1\0" .. length .. header, tensor.pieces(t)
  files.write_pieces(path, function()
    local piece = first or pieces()
    first = nil
    return piece
  end)
end

--- The sizes in a tuple of Python: "(2, 3)".
local function sizes_of(tuple)
  local sizes = {}
  for size in tuple:gmatch "%d+" do sizes[#sizes + 1] = tonumber(size) end
  return sizes
end

--- dtype, shape and where the data begin; raises what is wrong with the file.
local function read_header(path, file)
  local function fail(words, ...)
    options.fail(("npy: %s %s"):format(path, words:format(...)))
  end
  local start = file:read(#MAGIC + 2) or ""
  if start:sub(1, #MAGIC) ~= MAGIC or #start < #MAGIC + 2 then
    fail "is no npy file: it does not begin with \\x93NUMPY"
  end
  local width = start:byte(#MAGIC + 1) >= 2 and 4 or 2
  local bytes, length = file:read(width) or "", 0
  for i = #bytes, 1, -1 do length = length * 256 + bytes:byte(i) end
  if #bytes < width or length > 65536 then fail("has a header of %d bytes", length) end
  local header = file:read(length) or ""
  if #header < length then fail "ends within its header" end
  local descr = header:match "'descr'%s*:%s*'([^']*)'"
  local order = header:match "'fortran_order'%s*:%s*(%a+)"
  local shape = header:match "'shape'%s*:%s*%(([%d%s,]*)%)"
  if not (descr and order and shape) then
    fail "has a header without descr, fortran_order and shape"
  end
  if not DTYPES[descr] then
    fail("holds '%s', expected one of <f4 <f2 <i4 <i8 |u1 <u8 |b1", descr)
  end
  if order ~= "False" then fail "is in Fortran's order, expected rows (C's order)" end
  local sizes = sizes_of(shape)
  if #sizes > 6 then fail("has %d dims, expected 0 ... 6", #sizes) end
  local dtype, from = DTYPES[descr], file:seek()
  local want = library.C.kvl_dtype_bytes(library.dtype(dtype))
  local got = file:seek "end" - from
  for _, size in ipairs(sizes) do want = want * size end
  if want ~= got then fail("has %d bytes of data, expected %.0f", got, want) end
  file:seek("set", from)
  return dtype, sizes
end

--- Reads a file that NumPy (or save) wrote: little-endian, in C's order. Booleans become
-- u8. Raises if the file cannot be read, is damaged, or holds another type.
---@param path string
---@param dev? kvlab.Device|string  nil: that of --device
---@return kvlab.Tensor
function M.load(path, dev)
  options.argument("load", "path", path, options.string)
  local file, problem = sources.open(path)
  if not file then options.fail("npy: " .. problem) end
  local ok, dtype, sizes = pcall(read_header, path, file)
  if not ok then
    file:close()
    error(dtype, 0)
  end
  local host = tensor.tensor("cpu", dtype, sizes)
  local memory, left = ffi.cast("char *", host:data()), host:bytes()
  while left > 0 do
    local piece = file:read(math.min(left, 1024 * 1024))
    if not piece then break end
    ffi.copy(memory, piece, #piece)
    memory, left = memory + #piece, left - #piece
  end
  file:close()
  if left > 0 then
    options.fail(("npy: %s became shorter while it was read"):format(path))
  end
  return host:to(dev)
end

return M
