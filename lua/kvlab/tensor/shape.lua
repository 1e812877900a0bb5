--- Tensor methods that change the shape, and running sums. Tensors are contiguous,
-- without strides, so each result is a copy: a new tensor, or `out`, which may share no
-- memory with what is read. They take every dtype.
local library = require "kvlab.library"
local options = require "kvlab.options"
local sizes_of = require "kvlab.tensor.sizes"
local tensor = require "kvlab.tensor.tensor"

local C, check = library.C, library.check
local expect_tensor, dim_of = tensor.expect, tensor.dim_of
local methods = tensor.methods

--- A copy with two dims swapped, the last two unless they are given. Negative dims count
-- from the end.
---@param dim0? integer  -2
---@param dim1? integer  -1
---@param out? kvlab.Tensor
function methods.transpose(t, dim0, dim1, out)
  if dim0 == nil then dim0 = -2 end
  if dim1 == nil then dim1 = -1 end
  dim0 = dim_of("transpose", "dim0", t, dim0)
  dim1 = dim_of("transpose", "dim1", t, dim1)
  if out ~= nil then expect_tensor("transpose", "out", out) end
  if not out then
    local dims = t:dims()
    dims[dim0 + 1], dims[dim1 + 1] = dims[dim1 + 1], dims[dim0 + 1]
    out = tensor.tensor(t.device, t:type(), dims)
  end
  check(C.kvl_transpose(t, dim0, dim1, out))
  return out
end

local SHAPE = options.list_of(options.any_whole)

--- A copy that is broadcast to a shape as NumPy does: the two are aligned at the last
-- dim, and dims of size 1, or that t lacks, are repeated. Elementwise ops broadcast by
-- themselves and need no such copy.
---@param shape integer[]
---@param out? kvlab.Tensor
function methods.expand(t, shape, out)
  shape = sizes_of.list(shape)
  options.argument("expand", "shape", shape, SHAPE)
  if out ~= nil then expect_tensor("expand", "out", out) end
  local like = out or tensor.tensor(t.device, t:type(), shape)
  local dims = like:dims()
  for i = 1, math.max(#dims, #shape) do
    if dims[i] ~= shape[i] then
      options.fail(("expand: out is [%s], expected [%s]"):format(
        table.concat(dims, ", "), table.concat(shape, ", ")))
    end
  end
  check(C.kvl_expand(t, like))
  return like
end

--- Raises unless `t` can follow `first` along a dim.
local function check_fits(i, first, t, dim)
  local same = t:type() == first:type() and t.ndim == first.ndim
  for d = 0, first.ndim - 1 do
    same = same and (d == dim or t.sizes[d] == first.sizes[d])
  end
  if not same then
    options.fail(("cat: tensor %d is %s [%s], expected %s [%s] but for dim %d"):format(i,
      t:type(), table.concat(t:dims(), ", "), first:type(),
      table.concat(first:dims(), ", "), dim))
  end
end

--- Joins tensors of one dtype along a dim; their other sizes are equal.
---@param tensors kvlab.Tensor[]  one or more
---@param dim? integer            0; negative counts from the end
---@param out? kvlab.Tensor
---@return kvlab.Tensor
function tensor.cat(tensors, dim, out)
  options.argument("cat", "tensors", tensors, options.table)
  for i = 1, math.max(#tensors, 1) do expect_tensor("cat", "tensor " .. i, tensors[i]) end
  if out ~= nil then expect_tensor("cat", "out", out) end
  local first, length = tensors[1], 0
  dim = dim_of("cat", "dim", first, dim == nil and 0 or dim)
  for i, t in ipairs(tensors) do
    check_fits(i, first, t, dim)
    length = length + tonumber(t.sizes[dim])
  end
  if not out then
    local dims = first:dims()
    dims[dim + 1] = length
    out = tensor.tensor(first.device, first:type(), dims)
  elseif out.ndim ~= first.ndim or out.sizes[dim] ~= length then
    options.fail(("cat: out has not %d entries along dim %d"):format(length, dim))
  end
  local at = 0
  for _, t in ipairs(tensors) do
    check(C.kvl_put_part(t, dim, at, out))
    at = at + tonumber(t.sizes[dim])
  end
  return out
end

--- The sums of the elements up to each one along a dim: f32 f16 bf16 i32 i64. Floats are
-- added in double and rounded once; whole numbers wrap; after a NaN all sums are NaN.
-- Here `out` may be t.
---@param dim? integer  -1: the last
---@param out? kvlab.Tensor
function methods.cumsum(t, dim, out)
  if dim == nil then dim = -1 end
  dim = dim_of("cumsum", "dim", t, dim)
  if out ~= nil then expect_tensor("cumsum", "out", out) end
  out = out or tensor.open_like(t)
  check(C.kvl_cumsum(t, dim, out))
  return out
end

return tensor
