--- Reads and writes safetensors files. A file is checked as a whole when it is opened,
-- and its tensors are read to a device by name. A file that somebody changes meanwhile is
-- an error.
local arguments = require "kvlab.arguments"
local closed = require "kvlab.closed"
local constructor = require "kvlab.constructor"
local ffi = require "ffi"
local files = require "kvlab.files"
local json = require "kvlab.json"
local library = require "kvlab.library"
local hint = require("kvlab.words").hint
local options = require "kvlab.options"
local protected = require "kvlab.protected"
local sorted = require "kvlab.sorted"
local sources = require "kvlab.sources"
local tensor = require "kvlab.tensor.tensor"

local C, check = library.C, library.check
local M = {}

---@class kvlab.Safetensors
---@field path string
---@field names string[]  sorted
local File = {}
File.__index = File

--- Opens a file. Raises the reason if it cannot be read or its contents are wrong.
---@param path string
---@return kvlab.Safetensors
local function open(path)
  options.argument("safetensors", "path", path, options.string)
  sources.keep(path)
  local out = ffi.new "kvl_safetensors *[1]"
  local file = setmetatable({ path = path, names = {}, entries = {} }, File)
  file.handle = protected.open(C.kvl_safetensors_close, out, C.kvl_safetensors_open, path,
    out)
  for i = 0, C.kvl_safetensors_count(file.handle) - 1 do
    local entry = ffi.new "kvl_safetensors_entry"
    check(C.kvl_safetensors_entry_get(file.handle, i, entry))
    local name, shape = ffi.string(entry.name), {}
    for d = 1, entry.ndim do shape[d] = tonumber(entry.shape[d - 1]) end
    file.names[i + 1] = name
    file.entries[name] = { index = i, shape = shape,
                           dtype = library.dtype_names[entry.dtype] }
  end
  return file
end

--- True when the file has a tensor of that name.
function File:has(name)
  return self.entries[options.argument("has", "name", name, options.string)] ~= nil
end

--- The shape (a Lua table) and dtype of a tensor in the file.
function File:describe(name)
  local entry = self.entries[options.argument("describe", "name", name, options.string)]
  if not entry then
    options.fail(("%s has no tensor \"%s\"%s"):format(self.path, name,
      hint(name, self.names, "; did you mean \"%s\"?")))
  end
  return entry.shape, entry.dtype
end

local SHAPE = options.list_of(options.any_whole)

--- Reads a tensor to `dev`, casts it to `dtype` if given, and checks `shape` if given.
function File:read(name, dev, dtype, shape)
  local got, stored = self:describe(name)
  if shape then options.argument("read", "shape", shape, SHAPE) end
  if shape and table.concat(got, ",") ~= table.concat(shape, ",") then
    error(("%s: tensor \"%s\" has shape [%s], expected [%s]"):format(self.path, name,
      table.concat(got, ", "), table.concat(shape, ", ")), 2)
  end
  local t = tensor.tensor(dev, stored, got)
  check(C.kvl_safetensors_read(self.handle, self.entries[name].index, t))
  return dtype and t:cast(dtype) or t
end

--- Closes the file. Tensors that were read from it stay.
function File:close()
  protected.close(self, "handle", C.kvl_safetensors_close)
  closed(self, "safetensors file")
end

-- ---- writing --------------------------------------------------------------------------

local STORED = { f32 = "F32", f16 = "F16", bf16 = "BF16", f8e4m3 = "F8_E4M3", i32 = "I32",
                 i64 = "I64", u8 = "U8", u64 = "U64" }

--- The header: each tensor's dtype, shape and place. Those with larger elements come
-- first, so that every tensor begins at a multiple of its element.
local function layout(tensors, metadata)
  local names, header, at = sorted.keys(tensors), { __metadata__ = metadata }, 0
  table.sort(names, function(a, b)
    local of_a = library.C.kvl_dtype_bytes(tensors[a].dtype)
    local of_b = library.C.kvl_dtype_bytes(tensors[b].dtype)
    if of_a ~= of_b then return of_a > of_b end
    return a < b
  end)
  for _, name in ipairs(names) do
    local t = tensors[name]
    header[name] = { dtype = STORED[t:type()], shape = json.array(t:dims()),
                     data_offsets = { at, at + t:bytes() } }
    at = at + t:bytes()
  end
  local text = json.encode(header)
  return names, text .. (" "):rep(-#text % 8)
end

local METADATA = options.optional { "a table of strings", function(x)
  if type(x) ~= "table" then return false end
  for key, value in pairs(x) do
    if type(key) ~= "string" or type(value) ~= "string" then return false end
  end
  return true
end }

local TENSORS = { "a table of tensors by name", function(x)
  if type(x) ~= "table" then return false end
  for name, t in pairs(x) do
    if type(name) ~= "string" or not tensor.is_tensor(t) then return false end
  end
  return true
end }

--- Writes tensors, of any dtype and on any device, to a file that others can read. The
-- file appears in one step: until then `path` holds what it held before. Waits for the
-- devices. Raises if a tensor is closed or the file cannot be written.
---@param path string
---@param tensors table<string, kvlab.Tensor>
---@param metadata? table<string, string>
function M.save(path, tensors, metadata)
  options.argument("save", "path", path, options.string)
  options.argument("save", "tensors", tensors, TENSORS)
  options.argument("save", "metadata", metadata, METADATA)
  for name, t in pairs(tensors) do
    if t.storage == nil then
      options.fail(("save: tensor \"%s\" is closed"):format(name))
    end
    if name == "__metadata__" then
      options.fail "save: a tensor is named \"__metadata__\", which the format reserves"
    end
  end
  local names, header = layout(tensors, metadata)
  local length = ffi.new("uint64_t[1]", #header)
  local next_piece, at = nil, 0
  files.write_pieces(path, function()
    if at == 0 then
      at = 1
      return ffi.string(length, 8) .. header
    end
    while true do
      local piece = next_piece and next_piece()
      if piece then return piece end
      if not names[at] then return nil end
      next_piece, at = tensor.pieces(tensors[names[at]]), at + 1
    end
  end)
end

arguments.methods(File, "a safetensors file", {})

return constructor(M, open)
