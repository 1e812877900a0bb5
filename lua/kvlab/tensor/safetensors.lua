--- Reads safetensors files. A file is checked as a whole when it is opened, and its
-- tensors are read to a device by name. A file that somebody changes meanwhile is an
-- error.
local closed = require "kvlab.closed"
local constructor = require "kvlab.constructor"
local ffi = require "ffi"
local library = require "kvlab.library"
local nearest = require("kvlab.words").nearest
local options = require "kvlab.options"
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
  check(C.kvl_safetensors_open(path, out))
  local file = setmetatable({ path = path, names = {}, entries = {} }, File)
  file.handle = ffi.gc(out[0], C.kvl_safetensors_close)
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
    error(("%s has no tensor \"%s\"; the nearest is \"%s\""):format(self.path, name,
      nearest(name, self.names) or ""), 2)
  end
  return entry.shape, entry.dtype
end

local SHAPE = options.list_of(options.whole)

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
  C.kvl_safetensors_close(ffi.gc(self.handle, nil))
  closed(self, "safetensors file")
end

return constructor(M, open)
