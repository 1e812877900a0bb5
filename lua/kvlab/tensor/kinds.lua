--- The kinds of options that hold a tensor, device or dtype, for kvlab.options.
local ffi = require "ffi"
local is_device = require("kvlab.tensor.device").is_device
local is_tensor = require("kvlab.tensor.tensor").is_tensor
local library = require "kvlab.library"
local options = require "kvlab.options"
local sorted = require "kvlab.sorted"

local M = {}

M.tensor = { "a tensor", is_tensor }
M.tensor_or_nil = { "a tensor, or nil", function(x) return x == nil or is_tensor(x) end }

--- What kv.device accepts.
M.device = { "a device or its name", function(x)
  return type(x) == "string" or is_device(x)
end }

--- A budget as policy:budget and kv.policy.recent make it.
M.budget = { "a budget", function(x)
  return type(x) == "cdata" and ffi.istype("kvl_budget", x)
end }

--- The format of one layer's pages, as kv.format and cache.format:of(layer) give it.
M.format = { "a format, as kv.format makes it", function(x)
  return type(x) == "cdata" and ffi.istype("kvl_format", x)
end }

M.dtype = options.one_of(unpack(sorted.keys(library.dtypes)))

return M
