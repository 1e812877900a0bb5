--- Reads GGUF files: metadata as a Lua table, and tensors, which may be quantised, to a
-- device by name. A file is checked as a whole when it is opened. A file that somebody
-- changes meanwhile is an error.
local arguments = require "kvlab.arguments"
local closed = require "kvlab.closed"
local ffi = require "ffi"
local library = require "kvlab.library"
local hint = require("kvlab.words").hint
local options = require "kvlab.options"
local protected = require "kvlab.protected"
local sources = require "kvlab.sources"
local tensor = require "kvlab.tensor.tensor"

local C, check = library.C, library.check
local M = {}

---@class kvlab.GGUF
---@field path string
---@field names string[]  of the tensors, in the file's order
---@field metadata table<string, any>  numbers, strings, booleans and lists of them
local File = {}
File.__index = File

-- ---- metadata -------------------------------------------------------------------------

local CTYPES = { -- by kvl_gguf_kind; strings are read apart
  [C.KVL_GGUF_U8] = "uint8_t", [C.KVL_GGUF_I8] = "int8_t", [C.KVL_GGUF_U16] = "uint16_t",
  [C.KVL_GGUF_I16] = "int16_t", [C.KVL_GGUF_U32] = "uint32_t",
  [C.KVL_GGUF_I32] = "int32_t", [C.KVL_GGUF_U64] = "uint64_t",
  [C.KVL_GGUF_I64] = "int64_t", [C.KVL_GGUF_F32] = "float", [C.KVL_GGUF_F64] = "double",
  [C.KVL_GGUF_BOOL] = "uint8_t",
}

local length = ffi.new "uint64_t[1]"

local function read_strings(at, count)
  local list = {}
  for i = 1, count do
    ffi.copy(length, at, 8)
    local bytes = tonumber(length[0])
    list[i] = ffi.string(at + 8, bytes)
    at = at + 8 + bytes
  end
  return list
end

--- Numbers are copied first, because those in the file are not aligned.
local function read_numbers(at, count, kind)
  local ctype, list = CTYPES[kind], {}
  local numbers = ffi.new(ctype .. "[?]", count)
  ffi.copy(numbers, at, ffi.sizeof(numbers))
  if kind == C.KVL_GGUF_BOOL then
    for i = 1, count do list[i] = numbers[i - 1] == 1 end
  else
    for i = 1, count do list[i] = tonumber(numbers[i - 1]) end
  end
  return list
end

local function read_metadata(handle)
  local all, m = {}, ffi.new "kvl_gguf_metadata"
  for i = 0, C.kvl_gguf_metadata_count(handle) - 1 do
    check(C.kvl_gguf_metadata_get(handle, i, m))
    local at, count = ffi.cast("const uint8_t *", m.values), tonumber(m.count)
    local list = m.kind == C.KVL_GGUF_STRING and read_strings(at, count)
      or read_numbers(at, count, m.kind)
    all[ffi.string(m.key, m.bytes_key)] = m.is_array == 1 and list or list[1]
  end
  return all
end

-- ---- the file -------------------------------------------------------------------------

--- Opens a file. Raises the reason if it cannot be read or its contents are wrong.
-- Numbers of the metadata beyond 2^53 are rounded.
---@param path string
---@return kvlab.GGUF
function M.open(path)
  options.argument("gguf", "path", path, options.string)
  sources.keep(path)
  local out = ffi.new "kvl_gguf *[1]"
  local file = setmetatable({ path = path, names = {}, entries = {} }, File)
  file.handle = protected.open(C.kvl_gguf_close, out, C.kvl_gguf_open, path, out)
  file.metadata = read_metadata(file.handle)
  local entry = ffi.new "kvl_gguf_entry"
  for i = 0, C.kvl_gguf_count(file.handle) - 1 do
    check(C.kvl_gguf_entry_get(file.handle, i, entry))
    local name, shape = ffi.string(entry.name), {}
    for d = 1, entry.ndim do shape[d] = tonumber(entry.shape[d - 1]) end
    file.names[i + 1] = name
    file.entries[name] = { index = i, shape = shape, bytes = tonumber(entry.bytes),
                           type = ffi.string(entry.type_name) }
  end
  return file
end

--- True when the file has a tensor of that name.
function File:has(name)
  return self.entries[options.argument("has", "name", name, options.string)] ~= nil
end

--- The shape (a Lua table, as PyTorch has it) of a tensor in the file, the type that it
-- is stored in, such as "Q4_1", and its bytes.
function File:describe(name)
  local entry = self.entries[options.argument("describe", "name", name, options.string)]
  if not entry then
    options.fail(("%s has no tensor \"%s\"%s"):format(self.path, name,
      hint(name, self.names, "; did you mean \"%s\"?")))
  end
  return entry.shape, entry.type, entry.bytes
end

local SHAPE = options.list_of(options.any_whole)
local DTYPE = options.optional(options.one_of("f32", "f16", "bf16"))

--- Reads a tensor to `dev` as f32, f16 or bf16 (f32), and checks `shape` if given. The
-- types that can be read are F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q6_K; quantised
-- numbers are computed in f32.
function File:read(name, dev, dtype, shape)
  local got = self:describe(name)
  options.argument("read", "dtype", dtype, DTYPE)
  if shape then options.argument("read", "shape", shape, SHAPE) end
  if shape and table.concat(got, ",") ~= table.concat(shape, ",") then
    error(("%s: tensor \"%s\" has shape [%s], expected [%s]"):format(self.path, name,
      table.concat(got, ", "), table.concat(shape, ", ")), 2)
  end
  local t = tensor.tensor(dev, dtype or "f32", got)
  check(C.kvl_gguf_read(self.handle, self.entries[name].index, t))
  return t
end

--- Closes the file. Its metadata and the tensors that were read from it stay.
function File:close()
  protected.close(self, "handle", C.kvl_gguf_close)
  closed(self, "GGUF file")
end

arguments.methods(File, "a GGUF file", {})

return M
