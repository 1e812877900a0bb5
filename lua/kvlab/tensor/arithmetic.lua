--- Tensor methods that compute: elementwise, comparisons, reductions, softmax, top-k,
-- matmul and gathers. Each returns a new tensor, or writes `out` and returns it. Those
-- that change the shape are in shape.lua.
local library = require "kvlab.library"
local options = require "kvlab.options"
local tensor = require "kvlab.tensor.shape"

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
                        "tanh", "relu", "floor" } do
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
    local sa = ia >= 0 and tonumber(a.sizes[ia]) or 1
    local sb = ib >= 0 and tonumber(b.sizes[ib]) or 1
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
-- Comparisons give u8, 1 or 0. The operators + - * / ^ and unary - do the same. maximum
-- and minimum are NaN where either operand is. Whole numbers wrap; a power of them with a
-- negative exponent is the quotient 1 / a^-b, truncated.
for method, name in pairs { add = "ADD", sub = "SUB", mul = "MUL", div = "DIV",
                            maximum = "MAX", minimum = "MIN", pow = "POW", eq = "EQ",
                            ne = "NE", lt = "LT", le = "LE", gt = "GT", ge = "GE" } do
  methods[method] = function(a, b, out) return tensor.binary(name, a, b, out) end
end

--- Every element within low ... high. A bound that is nil is left out; where low > high,
-- high wins. NaN stays NaN. f32 f16 bf16 i32 i64.
---@param low? number
---@param high? number
---@param out? kvlab.Tensor
function methods.clamp(t, low, high, out)
  argument("clamp", "low", low, NUMBER)
  argument("clamp", "high", high, NUMBER)
  if low == nil and high == nil then
    options.fail "clamp: low and high are nil, expected one number or two"
  end
  if out ~= nil then expect_tensor("clamp", "out", out) end
  if low ~= nil then out = tensor.binary("MAX", t, low, out) end
  if high ~= nil then out = tensor.binary("MIN", low ~= nil and out or t, high, out) end
  return out
end

local OPERAND = { "a tensor or a number", function(x)
  return type(x) == "number" or tensor.is_tensor(x)
end }

--- Takes the elements of a where this u8 tensor is not 0, and of b elsewhere. Either may
-- be a number. The shapes of tensors must be equal, because nothing is broadcast. The
-- result is like the tensors; for two numbers it is f32 unless `out` is given.
---@param a kvlab.Operand
---@param b kvlab.Operand
---@param out? kvlab.Tensor
function methods.where(cond, a, b, out)
  argument("where", "a", a, OPERAND)
  argument("where", "b", b, OPERAND)
  if out ~= nil then expect_tensor("where", "out", out) end
  local a_value, b_value = 0, 0
  if type(a) == "number" then a, a_value = nil, a end
  if type(b) == "number" then b, b_value = nil, b end
  if not out then
    local like = a or b
    out = like and tensor.open_like(like)
      or tensor.open_like(cond, library.dtypes.f32)
  end
  check(C.kvl_where_scalar(cond, a, a_value, b, b_value, out))
  return out
end

-- ---- reductions -----------------------------------------------------------------------

local WHOLE = { i32 = true, i64 = true, u8 = true, u64 = true }

for _, name in ipairs { "sum", "mean", "max", "min" } do
  local op = C["KVL_REDUCE_" .. name:upper()]
  --- Reduces one dim (negative counts from the end), or all elements when dim is nil. The
  -- mean of whole numbers is f32.
  methods[name] = function(t, dim, out)
    argument(name, "dim", dim, DIM)
    if name == "mean" and WHOLE[t:type()] then t = t:cast "f32" end
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

local CORRECTION = options.optional(options.not_negative)

--- The variance over one dim (negative counts from the end), or over all elements when
-- dim is nil: the sum of the squared distances from the mean, divided by n - correction.
-- correction is 0 unless it is given, as in NumPy, so it is the variance of these n
-- elements. 1 gives the unbiased estimate of the population that they are a sample of, as
-- Torch does. n <= correction gives NaN or infinity. Any dtype; the result is like t for
-- f16 and bf16, and else f32, in which it is computed.
---@param dim? integer
---@param correction? number  0
---@return kvlab.Tensor
function methods.var(t, dim, correction)
  argument("var", "dim", dim, DIM)
  argument("var", "correction", correction, CORRECTION)
  local x = t:cast "f32"
  if dim == nil then x, dim = x:reshape { tonumber(t.count) }, 0 end
  dim = tensor.dim_of("var", "dim", x, dim)
  local n, dims = x:size(dim), x:dims()
  dims[dim + 1] = 1
  local distance = x - x:mean(dim):reshape(dims)
  local sums = (distance * distance):sum(dim)
  local variance = sums / math.max(n - (correction or 0), 0)
  local name = t:type()
  return (name == "f16" or name == "bf16") and variance:cast(name) or variance
end

--- The square root of var: the standard deviation.
---@param dim? integer
---@param correction? number  0; 1 for the unbiased variance
---@return kvlab.Tensor
function methods.std(t, dim, correction)
  argument("std", "dim", dim, DIM)
  argument("std", "correction", correction, CORRECTION)
  local name = t:type()
  local is_narrow = name == "f16" or name == "bf16"
  local std = (is_narrow and t:cast "f32" or t):var(dim, correction):sqrt()
  return is_narrow and std:cast(name) or std
end

--- log(sum(exp(t))) over one dim (negative counts from the end), or over all elements
-- when dim is nil. Nothing, or only -inf, gives -inf; a NaN gives NaN. f32 f16 bf16.
---@param dim? integer
---@param out? kvlab.Tensor  like t, or f32
function methods.logsumexp(t, dim, out)
  argument("logsumexp", "dim", dim, DIM)
  if out ~= nil then expect_tensor("logsumexp", "out", out) end
  if dim == nil then t, dim = t:reshape { tonumber(t.count) }, 0 end
  dim = tensor.dim_of("logsumexp", "dim", t, dim)
  if not out then
    local dims = t:dims()
    table.remove(dims, dim + 1)
    out = reshaped_like(t, dims)
  end
  check(C.kvl_logsumexp(t, dim, out))
  return out
end

--- softmax(scale * t) over the last dim.
function methods.softmax(t, scale, out)
  argument("softmax", "scale", scale, NUMBER)
  if out ~= nil then expect_tensor("softmax", "out", out) end
  out = out or tensor.open_like(t)
  check(C.kvl_softmax(t, scale or 1, out))
  return out
end

for _, name in ipairs { "argmax", "argmin" } do
  local find = C["kvl_" .. name]
  --- The index of the largest (argmin: the least) element along the last dim, i32. Of
  -- equal elements the lower index wins. NaN never wins; a row of NaN gives 0. f32 f16
  -- bf16 i32.
  methods[name] = function(t, out)
    if out ~= nil then expect_tensor(name, "out", out) end
    if not out then
      local dims = t:dims()
      table.remove(dims)
      out = reshaped_like(t, dims, "i32")
    end
    check(find(t, out))
    return out
  end
end

--- Draws an index of each row of scores, with the chances softmax(t): f32 [rows, n]. It
-- is where t[i] - log(-log(1 - u[i])) is largest, and u are the numbers that
-- tensor.rand makes of the row's seed from its offset on. With the same numbers, similar
-- distributions mostly draw the same index: if their chances differ by d (half the sum of
-- the differences), they do so in at least (1 - d) / (1 + d) of the draws. -inf is drawn
-- only where nothing is above it, and NaN only where there is nothing else. Source:
-- Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030; Daliri et al. 2024,
-- arXiv:2408.07978.
---@param numbers kvlab.Tensor  i64 [rows, 2]: seed and offset of each row
---@param out? kvlab.Tensor     i32 [rows]
---@return kvlab.Tensor         i32 [rows]
function methods.draw(t, numbers, out)
  expect_tensor("draw", "numbers", numbers)
  if out ~= nil then expect_tensor("draw", "out", out) end
  out = out or reshaped_like(t, { t:size(0) }, "i32")
  check(C.kvl_draw(t, numbers, out))
  return out
end

-- Dtypes that top-k converts to another one, which holds their numbers exactly.
local sorted_as = { f16 = "f32", bf16 = "f32", f8e4m3 = "f32", u8 = "i32" }

--- The k largest (smallest) elements of each row, best first, as values and i32 indices.
-- Of equal elements the lower index comes first, and NaN comes last. by_index orders them
-- by index instead, which is faster. Any dtype but i64 and u64; f32 and i32 need no copy.
---@param k integer
---@param smallest? boolean
---@param by_index? boolean
function methods.topk(t, k, smallest, by_index)
  argument("topk", "k", k, tensor.ROW)
  local other = sorted_as[t:type()]
  if other then
    local values, indices = t:cast(other):topk(k, smallest, by_index)
    return values:cast(t:type()), indices
  end
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

--- Sorts the rows in ascending (descending) order, as values and i32 indices. Equal
-- elements stay in their order, and NaN comes last. Dtypes as for topk.
function methods.sort(t, descending) return t:topk(t:size(-1), not descending) end

-- ---- matmul and gathers ---------------------------------------------------------------

local function matmul(a, b, transpose, out)
  expect_tensor("matmul", "b", b)
  if out ~= nil then expect_tensor("matmul", "out", out) end
  if not out then
    local dims = a:dims()
    dims[#dims] = b:size(transpose and -2 or -1)
    if #dims == 2 and b.ndim == 3 then table.insert(dims, 1, b:size(0)) end
    out = reshaped_like(a, dims)
  end
  check(C.kvl_matmul(a, b, transpose and 1 or 0, out), 3)
  return out
end

--- t @ b: [m, k] by [k, n], or batches of them; one that is no batch is used for all of
-- the other.
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
