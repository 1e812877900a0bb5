--- What `t.shape` is: the sizes of a tensor's dims. They count from 0, as dims do
-- everywhere in kvlab, and from the end with a negative number: shape[0], shape[-1]. A
-- shape prints as "[2, 3]", #shape is the number of dims, == compares it with another
-- shape or with a list of sizes, and what takes a list of sizes takes a shape:
-- kv.zeros(dev, "f32", t.shape).
local ffi = require "ffi"
local options = require "kvlab.options"

local M = {}

local int64_t = ffi.typeof "int64_t"
local shape_t -- the ctype

local function text(shape)
  local words = {}
  for i = 1, shape.n do words[i] = ("%d"):format(tonumber(shape.sizes[i - 1])) end
  return "[" .. table.concat(words, ", ") .. "]"
end

local function size(shape, i)
  if type(i) ~= "number" and not ffi.istype(int64_t, i) then
    options.fail(("shape.%s: a shape has no names, expected shape[i], #shape or t:dims()")
      :format(tostring(i)))
  end
  local n = shape.n
  local at = i < 0 and i + n or i
  if at < 0 or at >= n or at % 1 ~= 0 then
    options.fail(("shape: dim is %s, expected %d ... %d"):format(tostring(i), -n, n - 1))
  end
  return tonumber(shape.sizes[at])
end

local function is_equal(a, b)
  if not ffi.istype(shape_t, a) then a, b = b, a end
  local is_list = type(b) == "table"
  if not is_list and not ffi.istype(shape_t, b) or #b ~= a.n then return false end
  for i = 0, a.n - 1 do
    if a.sizes[i] ~= (is_list and b[i + 1] or not is_list and b.sizes[i]) then
      return false
    end
  end
  return true
end

shape_t = ffi.metatype("struct { int64_t sizes[6]; int32_t n; }", {
  __index = size, __len = function(shape) return shape.n end, __tostring = text,
  __eq = is_equal,
  __newindex = function() options.fail "shape: it is read-only; t:reshape changes it" end,
})

--- The shape of a tensor.
---@param t kvlab.Tensor
---@return kvlab.Shape
function M.of(t)
  local shape = shape_t()
  ffi.copy(shape.sizes, t.sizes, 48)
  shape.n = t.ndim
  return shape
end

--- Whether a value is a shape.
---@param x any
---@return boolean
function M.is_shape(x) return type(x) == "cdata" and ffi.istype(shape_t, x) end

--- A list of sizes: of a shape the same as a Lua list; anything else stays as it is.
---@param x any
---@return any
function M.list(x)
  if not M.is_shape(x) then return x end
  local list = {}
  for i = 1, x.n do list[i] = tonumber(x.sizes[i - 1]) end
  return list
end

return M
