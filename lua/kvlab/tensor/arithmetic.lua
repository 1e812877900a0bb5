--- Tensor methods that compute: elementwise, comparisons, reductions, softmax, top-k,
-- matmul and gathers. Each returns a new tensor, or writes `out` and returns it.
local library = require "kvlab.library"
local options = require "kvlab.options"
local tensor = require "kvlab.tensor.tensor"

local C, check = library.C, library.check
local argument, expect_tensor = options.argument, tensor.expect
local methods = tensor.methods

local NUMBER, DIM = options.optional(options.number), options.optional(options.integer)

local function reshaped_like(t, dims, dtype)
  return tensor.tensor(t.device, dtype or t:type(), dims)
end

-- ---- elementwise ----------------------------------------------------------------------

--- Computes elementwise; f32, f16 or bf16.
for _, name in ipairs { "neg", "abs", "exp", "log", "sqrt", "rsqrt", "sigmoid", "silu",
                        "tanh", "relu" } do
  local op = C["KVL_UNARY_" .. name:upper()]
  methods[name] = function(t, out)
    if out ~= nil then expect_tensor(name, "out", out) end
    out = out or tensor.open_like(t)
    check(C.kvl_unary(op, t, out))
    return out
  end
end

--- The dims that a and b broadcast to. If the two do not fit, the library reports it
-- later.
local function broadcast_dims(a, b)
  local n = math.max(a.ndim, b.ndim)
  local dims = {}
  for i = 1, n do
    local ia, ib = i - 1 - (n - a.ndim), i - 1 - (n - b.ndim)
    local sa = ia >= 0 and tonumber(a.shape[ia]) or 1
    local sb = ib >= 0 and tonumber(b.shape[ib]) or 1
    dims[i] = sa == 1 and sb or sa
  end
  return dims
end

--- a op b with NumPy's broadcasting, where one of the two may be a number.
function tensor.binary(name, a, b, out)
  local op = C["KVL_BINARY_" .. name]
  local compares = op >= C.KVL_BINARY_EQ
  if type(a) ~= "number" then expect_tensor(name:lower(), "a", a) end
  if out ~= nil then expect_tensor(name:lower(), "out", out) end
  if type(b) == "number" then
    out = out or tensor.open_like(a, compares and library.dtypes.u8 or nil)
    check(C.kvl_binary_scalar(op, a, b, out), 3)
    return out
  end
  if type(a) == "number" then a = tensor.full(b.device, b:type(), {}, a) end
  if not tensor.is_tensor(b) then
    error(("operand is a %s, expected a tensor or a number"):format(type(b)), 3)
  end
  out = out or reshaped_like(a, broadcast_dims(a, b), compares and "u8" or nil)
  check(C.kvl_binary(op, a, b, out), 3)
  return out
end

--- Computes with NumPy's broadcasting; b is a tensor of the same dtype or a number.
-- Comparisons give u8, 1 or 0. The operators + - * / and unary - do the same.
for method, name in pairs { add = "ADD", sub = "SUB", mul = "MUL", div = "DIV",
                            maximum = "MAX", minimum = "MIN", eq = "EQ", ne = "NE",
                            lt = "LT", le = "LE", gt = "GT", ge = "GE" } do
  methods[method] = function(a, b, out) return tensor.binary(name, a, b, out) end
end

--- Takes the elements of a where this u8 tensor is not 0, and of b elsewhere. The shapes
-- must be equal, because nothing is broadcast.
function methods.where(cond, a, b, out)
  expect_tensor("where", "a", a)
  expect_tensor("where", "b", b)
  if out ~= nil then expect_tensor("where", "out", out) end
  out = out or tensor.open_like(a)
  check(C.kvl_where(cond, a, b, out))
  return out
end

-- ---- reductions -----------------------------------------------------------------------

for _, name in ipairs { "sum", "mean", "max", "min" } do
  local op = C["KVL_REDUCE_" .. name:upper()]
  --- Reduces one dim (negative counts from the end), or all elements when dim is nil.
  methods[name] = function(t, dim, out)
    argument(name, "dim", dim, DIM)
    if out ~= nil then expect_tensor(name, "out", out) end
    if dim == nil then t, dim = t:reshape { tonumber(t.count) }, 0 end
    if dim < 0 then dim = dim + t.ndim end
    if not out then
      local dims = t:dims()
      if dims[dim + 1] == nil then
        options.fail(("%s: dim is %d of %d dims"):format(name, dim, t.ndim))
      end
      table.remove(dims, dim + 1)
      out = reshaped_like(t, dims)
    end
    check(C.kvl_reduce(op, t, dim, out))
    return out
  end
end

--- softmax(scale * t) over the last dim.
function methods.softmax(t, scale, out)
  argument("softmax", "scale", scale, NUMBER)
  if out ~= nil then expect_tensor("softmax", "out", out) end
  out = out or tensor.open_like(t)
  check(C.kvl_softmax(t, scale or 1, out))
  return out
end

--- The index of the largest element along the last dim, i32. Of equal elements the lower
-- index wins.
function methods.argmax(t, out)
  if out ~= nil then expect_tensor("argmax", "out", out) end
  if not out then
    local dims = t:dims()
    table.remove(dims)
    out = reshaped_like(t, dims, "i32")
  end
  check(C.kvl_argmax(t, out))
  return out
end

--- The k largest (smallest) elements of each row, best first, as values and i32 indices.
-- by_index orders them by index instead, which is faster.
---@param k integer
---@param smallest? boolean
---@param by_index? boolean
function methods.topk(t, k, smallest, by_index)
  argument("topk", "k", k, tensor.ROW)
  local which = smallest and C.KVL_TOPK_LEAST or C.KVL_TOPK_LARGEST
  local rows = t:reshape { -1, t:size(-1) }
  local dims = t:dims()
  dims[#dims] = k
  local values = reshaped_like(rows, { rows:size(0), k })
  local indices = reshaped_like(rows, { rows:size(0), k }, "i32")
  if by_index then which = which + C.KVL_TOPK_BY_INDEX end
  check(C.kvl_topk(rows, which, values, indices))
  return values:reshape(dims), indices:reshape(dims)
end

--- Sorts the rows in ascending (descending) order, as values and i32 indices.
function methods.sort(t, descending) return t:topk(t:size(-1), not descending) end

-- ---- matmul and gathers ---------------------------------------------------------------

local function matmul(a, b, transpose, out)
  expect_tensor("matmul", "b", b)
  if out ~= nil then expect_tensor("matmul", "out", out) end
  if not out then
    local dims = a:dims()
    dims[#dims] = b:size(transpose and -2 or -1)
    out = reshaped_like(a, dims)
  end
  check(C.kvl_matmul(a, b, transpose and 1 or 0, out), 3)
  return out
end

--- t @ b: [m, k] by [k, n], or batches of them.
function methods.matmul(t, b, out) return matmul(t, b, false, out) end
--- t @ b^T: [m, k] by [n, k], as weights are stored.
function methods.matmul_t(t, b, out) return matmul(t, b, true, out) end

--- Takes the rows of t that an i32 index names. An index that is out of range gives
-- zeros.
function methods.gather_rows(t, index, out)
  expect_tensor("gather_rows", "index", index)
  if out ~= nil then expect_tensor("gather_rows", "out", out) end
  if not out then
    local dims = t:dims()
    dims[1] = tonumber(index.count)
    out = reshaped_like(t, dims)
  end
  check(C.kvl_gather_rows(t, index, out))
  return out
end

--- t[index[i]] = src[i]. An index that is out of range is skipped. If an index occurs
-- more than once, its last row wins.
function methods.scatter_rows_(t, index, src)
  expect_tensor("scatter_rows_", "index", index)
  expect_tensor("scatter_rows_", "src", src)
  check(C.kvl_scatter_rows(src, index, t))
  return t
end

--- out[r][j] = t[r][index[r][j]]
function methods.gather(t, index, out)
  expect_tensor("gather", "index", index)
  if out ~= nil then expect_tensor("gather", "out", out) end
  out = out or reshaped_like(t, index:dims())
  check(C.kvl_gather(t, index, out))
  return out
end

--- t[r][index[r][j]] = src[r][j]. An index that is out of range is skipped. No index may
-- occur twice in a row.
function methods.scatter_(t, index, src)
  expect_tensor("scatter_", "index", index)
  expect_tensor("scatter_", "src", src)
  check(C.kvl_scatter(src, index, 0, t))
  return t
end

--- t[r][index[r][j]] += src[r][j]
function methods.scatter_add_(t, index, src)
  expect_tensor("scatter_add_", "index", index)
  expect_tensor("scatter_add_", "src", src)
  check(C.kvl_scatter(src, index, 1, t))
  return t
end

return tensor
