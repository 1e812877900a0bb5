--- Tensors: contiguous, row-major, on one device. Dims, rows and elements count from 0,
-- as blocks, slots and tokens do everywhere in kvlab.
--
-- Tensors are freed by the collector, by t:free(), or by leaving the kv.scope they were
-- made in. Views (narrow, index, reshape) share storage and keep it alive.
local ffi = require "ffi"
local devices = require "kvlab.tensor.device"
local library = require "kvlab.library"
local options = require "kvlab.options"
local protected = require "kvlab.protected"
local sizes_of = require "kvlab.tensor.sizes"

local device, is_device = devices.device, devices.is_device
local C, check, argument = library.C, library.check, options.argument
local dtypes, dtype_names = library.dtypes, library.dtype_names
local M = {}
local methods = {}

local tensor_t -- the ctype; set by ffi.metatype below
local shape_buffer = ffi.new "int64_t[6]"

-- For Lua's collector a tensor is 88 bytes, although it may hold gigabytes. So the
-- collector is told to run after a certain number of bytes of new tensors, unless most of
-- them were freed by hand or by a scope, because then there is little to collect. A
-- collection takes half a millisecond and more. A GPU writes 256 MiB in a tenth of that,
-- so on a GPU the number is a sixteenth of its memory, or a quarter of what was free
-- after the last collection if that is less.
local BYTES_BETWEEN_COLLECTIONS = 256 * 1024 * 1024
local LITTLE = 16 * 1024 * 1024
local bytes_on_cpu, bytes_on_gpu, bytes_live_before = 0, 0, 0
local bytes_gpu, bytes_on_gpu_most -- of a GPU's memory, known when it has a tensor

local function bytes_live() return tonumber(C.kvl_bytes_live()) end

local function set_most_on_gpu()
  local free = bytes_gpu - bytes_live()
  bytes_on_gpu_most = math.max(BYTES_BETWEEN_COLLECTIONS,
    math.min(bytes_gpu / 16, free / 4))
end

local function collect_if_grown(most)
  bytes_on_cpu, bytes_on_gpu = 0, 0
  local live = bytes_live()
  if live - bytes_live_before > most / 2 then
    collectgarbage()
    bytes_live_before = bytes_live()
    if bytes_gpu then set_most_on_gpu() end
  else
    bytes_live_before = math.min(bytes_live_before, live)
  end
end

--- Frees the tensors that are no longer referenced, unless only few bytes were opened
-- since the last time, because then there can be little to free.
function M.collect()
  if bytes_on_cpu + bytes_on_gpu < LITTLE then return end
  collectgarbage()
  bytes_on_cpu, bytes_on_gpu, bytes_live_before = 0, 0, bytes_live()
end

--- Counts the bytes of a new tensor.
local function count_opened(dev, bytes)
  if C.kvl_device_is_cpu(dev) == 1 then
    bytes_on_cpu = bytes_on_cpu + bytes
    if bytes_on_cpu > BYTES_BETWEEN_COLLECTIONS then
      collect_if_grown(BYTES_BETWEEN_COLLECTIONS)
    end
  else
    if not bytes_gpu then
      bytes_gpu = dev:stats().bytes_total
      set_most_on_gpu()
    end
    bytes_on_gpu = bytes_on_gpu + bytes
    if bytes_on_gpu > bytes_on_gpu_most then collect_if_grown(bytes_on_gpu_most) end
  end
end

-- The tensors made since the innermost kv.scope began, as keys. The table is weak, so the
-- collector can free a tensor inside a scope when nobody refers to it.
local scope
local WEAK = { __mode = "k" }

local function remember(t)
  if scope then scope[t] = true end
  return t
end

--- Checks an argument that must be a tensor, closed or not.
---@param what string   the function
---@param name string   its argument
function M.expect(what, name, value)
  if type(value) == "cdata" and ffi.istype("kvl_tensor", value) then return end
  options.fail(("%s: %s is %s, expected a tensor"):format(what, name,
    options.shown(value)))
end
local expect_tensor = M.expect

-- Sizes may come as they are in a tensor: int64_t, such as t.count.
local int64_t = ffi.typeof "int64_t"
M.ROW = { "a whole number", function(x)
  return options.any_integer[2](x) or type(x) == "cdata" and ffi.istype(int64_t, x)
end }
local ROW = M.ROW
local FLOAT = { "a number", function(x) return type(x) == "number" end } -- NaN, too
local NUMBER = options.optional(options.number)
local WHOLE = options.optional(options.any_whole)

local function fill_shape(shape, level)
  shape = sizes_of.list(shape)
  if type(shape) ~= "table" then
    options.fail(("shape is %s, expected a table of sizes"):format(options.shown(shape)),
      level + 2)
  end
  if #shape > 6 then
    options.fail(("shape has %d dims, expected 0 ... 6"):format(#shape), level + 2)
  end
  for i = 1, #shape do
    local size = tonumber(shape[i])
    if not size or size ~= math.floor(size) then
      options.fail(("size of dim %d is %s, expected a whole number"):format(i - 1,
        options.shown(shape[i])), level + 2)
    end
    shape_buffer[i - 1] = size
  end
  return #shape
end

--- The number of a dtype. If there is none, the device, which comes before it, may be
-- what is missing.
local function number_of(dev, dtype, level)
  local number = library.dtypes[dtype]
  if number then return number end
  if dev ~= nil and type(dev) ~= "string" and not is_device(dev) then
    options.fail(("device is %s, expected a device, its name or nil"):format(
      options.shown(dev)), (level or 2) + 1)
  end
  number = library.dtype(dtype, (level or 2) + 1)
  return number
end

--- Opens a tensor with the dims in shape_buffer. If memory runs out, it collects garbage
-- and tries once more.
local function open(dev, dtype, ndim, level)
  if not is_device(dev) then dev = device(dev) end
  local t = tensor_t()
  local status = C.kvl_tensor_open(dev, dtype, ndim, shape_buffer, t)
  if status == C.KVL_ERR_NO_MEMORY then
    collectgarbage()
    collectgarbage()
    status = C.kvl_tensor_open(dev, dtype, ndim, shape_buffer, t)
  end
  if status < 0 then check(status, level + 1) end
  count_opened(dev, tonumber(t.count) * C.kvl_dtype_bytes(dtype))
  return remember(t)
end

local function open_like(t, dtype, dev)
  if not ffi.istype(tensor_t, t) then
    options.fail(("argument is %s, expected a tensor"):format(options.shown(t)))
  end
  ffi.copy(shape_buffer, t.sizes, 48)
  return open(dev or t.device, dtype or t.dtype, t.ndim, 3)
end
M.open_like = open_like

-- ---- making ---------------------------------------------------------------------------

--- Makes an uninitialised tensor.
---@param dev kvlab.Device|string|nil  a device or its name; nil: that of --device
---@param dtype string     f32 f16 bf16 f8e4m3 i32 i64 u8 u64
---@param shape integer[]  up to 6 sizes
---@return kvlab.Tensor
function M.tensor(dev, dtype, shape)
  local number = number_of(dev, dtype)
  return open(dev, number, fill_shape(shape, 2), 2)
end

-- The whole numbers that a dtype holds: low, and the first that is too high.
local limits = { i32 = { -2 ^ 31, 2 ^ 31 }, i64 = { -2 ^ 63, 2 ^ 63 }, u8 = { 0, 2 ^ 8 },
                 u64 = { 0, 2 ^ 64 } }

--- Blames the caller for a number that a dtype of whole numbers cannot hold. The C
-- functions store the nearest one that it can hold.
local function expect_held(what, name, x, dtype)
  local limit = limits[dtype]
  if not limit or x >= limit[1] and x < limit[2] and x % 1 == 0 then return end
  options.fail(("%s: %s is %.17g, expected a whole number that %s holds"):format(what,
    name, tonumber(x), dtype))
end

local function expect_range(n, start, step, dtype)
  start, step = start or 0, step or 1
  if n > 0 then expect_held("arange", "start", start, dtype) end
  if n > 1 then
    expect_held("arange", "start + step", start + step, dtype)
    expect_held("arange", "the last element", start + (n - 1) * step, dtype)
  end
end

--- Makes a tensor in which every element is `value`, rounded to a dtype of floats. One of
-- whole numbers has to hold the value.
---@return kvlab.Tensor
function M.full(dev, dtype, shape, value)
  argument("full", "value", value, FLOAT)
  local number = number_of(dev, dtype)
  expect_held("full", "value", value, dtype)
  local t = open(dev, number, fill_shape(shape, 2), 2)
  check(C.kvl_fill(t, value))
  return t
end

--- Makes a tensor of zeros.
---@return kvlab.Tensor
function M.zeros(dev, dtype, shape) return M.full(dev, dtype, shape, 0) end
--- Makes a tensor of ones.
---@return kvlab.Tensor
function M.ones(dev, dtype, shape) return M.full(dev, dtype, shape, 1) end

--- Makes an uninitialised tensor in pinned host memory, which `dev` reads and writes over
-- the link. Any op takes it like a tensor of dev. huge_pages asks for pages of 2 MiB.
---@return kvlab.Tensor
function M.pinned(dev, dtype, shape, huge_pages)
  local number, t = library.dtype(dtype), tensor_t()
  local ndim = fill_shape(shape, 2)
  check(C.kvl_tensor_open_pinned(device(dev), number, ndim, shape_buffer,
    huge_pages and 1 or 0, t))
  return remember(t)
end

--- Makes a view of memory on `dev` that the caller keeps, such as part of another tensor
-- with another dtype.
---@param memory ffi.cdata*  a pointer
---@return kvlab.Tensor
function M.wrap(dev, dtype, shape, memory)
  local number, t = library.dtype(dtype), tensor_t()
  local ndim = fill_shape(shape, 2)
  check(C.kvl_tensor_wrap(dev, number, ndim, shape_buffer, memory, t))
  return remember(t)
end

--- Makes a tensor of n elements: start (0), start + step (1), ...
---@return kvlab.Tensor
function M.arange(dev, dtype, n, start, step)
  argument("arange", "n", n, ROW)
  argument("arange", "start", start, NUMBER)
  argument("arange", "step", step, NUMBER)
  expect_range(n, start, step, dtype)
  local t = M.tensor(dev, dtype, { n })
  check(C.kvl_arange(t, start or 0, step or 1))
  return t
end

local FLOATS = options.one_of("f32", "f16", "bf16", "f8e4m3")

--- Makes a tensor of n numbers at equal distances, from `first` to `last`. Both are among
-- them; n = 1 gives `first` alone.
---@param dev kvlab.Device|string|nil
---@param dtype string  f32 f16 bf16 f8e4m3
---@param n integer     elements
---@param first number
---@param last number
---@return kvlab.Tensor
function M.linspace(dev, dtype, n, first, last)
  number_of(dev, dtype)
  argument("linspace", "dtype", dtype, FLOATS)
  argument("linspace", "n", n, options.any_whole)
  argument("linspace", "first", first, options.number)
  argument("linspace", "last", last, options.number)
  local t = M.tensor(dev, dtype, { n })
  check(C.kvl_arange(t, first, n > 1 and (last - first) / (n - 1) or 0))
  if n > 1 then methods.fill_(methods.index(t, n - 1), last) end -- without rounding
  return t
end

local function random(kind, dev, dtype, shape, a, b, o)
  local number = number_of(dev, dtype, 3)
  local t = open(dev, number, fill_shape(shape, 3), 3)
  check(C.kvl_random(t, kind, a, b, o.seed or 0, o.offset or 0), 3)
  return t
end

local NORMAL = { seed = options.any_whole, offset = options.any_whole,
                 mean = options.number, std = options.number }
local UNIFORM = { seed = options.any_whole, offset = options.any_whole,
                  low = options.number, high = options.number }
local INTEGERS = { seed = options.any_whole, offset = options.any_whole,
                   low = options.any_integer,
                   high = options.required(options.any_integer) }

--- Makes a tensor of normally distributed numbers. A seed gives the same bits on every
-- device.
---@param o? table  seed (0), offset (0), mean (0), std (1)
---@return kvlab.Tensor
function M.randn(dev, dtype, shape, o)
  o = options.check("randn", o, NORMAL)
  return (random(C.KVL_RANDOM_NORMAL, dev, dtype, shape, o.mean or 0, o.std or 1, o))
end

--- Makes a tensor of uniformly distributed numbers in (low, high].
---@param o? table  seed (0), offset (0), low (0), high (1)
---@return kvlab.Tensor
function M.rand(dev, dtype, shape, o)
  o = options.check("rand", o, UNIFORM)
  return (random(C.KVL_RANDOM_UNIFORM, dev, dtype, shape, o.low or 0, o.high or 1, o))
end

--- Makes a tensor of random whole numbers in [low, high), i32 or i64.
---@param o table  seed (0), offset (0), low (0), high
---@return kvlab.Tensor
function M.randint(dev, dtype, shape, o)
  o = options.check("randint", o, INTEGERS)
  expect_held("randint", "low", o.low or 0, dtype)
  expect_held("randint", "high - 1", o.high - 1, dtype)
  return (random(C.KVL_RANDOM_INTEGER, dev, dtype, shape, o.low or 0, o.high, o))
end

local ctypes = { f32 = "float", i32 = "int32_t", i64 = "int64_t", u8 = "uint8_t",
                 u64 = "uint64_t" }
local array_of = {}
for name, ctype in pairs(ctypes) do array_of[name] = ffi.typeof(ctype .. "[?]") end
local pointer_to = {}
for name, ctype in pairs(ctypes) do pointer_to[name] = ffi.typeof(ctype .. "*") end
for _, name in ipairs { "f16", "bf16" } do pointer_to[name] = ffi.typeof "uint16_t*" end
pointer_to.f8e4m3 = ffi.typeof "uint8_t*"

local int64, uint64 = ffi.typeof "int64_t", ffi.typeof "uint64_t"

--- Whether a dtype holds a 64-bit number. Where a type has 64 bits, the integers are
-- compared, because numbers near its limits are rounded when they become doubles.
local function is_held(x, dtype, low, high)
  if ffi.istype(int64, x) and dtype == "u64" then return x >= 0 end
  if ffi.istype(uint64, x) and dtype == "i64" then return x < 2 ^ 63 end
  if ffi.istype(int64, x) and dtype == "i64" then return true end
  if ffi.istype(uint64, x) and dtype == "u64" then return true end
  x = tonumber(x)
  return x >= low and x < high and x % 1 == 0
end

local function fail_value(i, x, dtype)
  options.fail(("value %d is %s, expected a whole number that %s holds"):format(i - 1,
    type(x) == "number" and ("%.17g"):format(x) or tostring(x), dtype))
end

--- Checks a value that is not a Lua number: only a 64-bit number is allowed.
local function check_other(i, x, dtype, low, high)
  local kind = type(x)
  if kind ~= "cdata" or not tonumber(x) then -- a tensor or a pointer, say
    options.fail(("value %d is %s, expected a number"):format(i - 1,
      kind == "cdata" and "a cdata" or tostring(x)))
  end
  if low and not is_held(x, dtype, low, high) then fail_value(i, x, dtype) end
end

--- Appends the leaves of a nested table to `flat`. Sets sizes[depth], or checks it.
local function flatten(values, depth, sizes, flat)
  if sizes[depth] and sizes[depth] ~= #values then
    error(("nested table is ragged: %d entries at depth %d, expected %d"):format(#values,
      depth - 1, sizes[depth]), 0)
  end
  sizes[depth] = #values
  for i = 1, #values do
    if type(values[i]) == "table" then flatten(values[i], depth + 1, sizes, flat)
    else flat[#flat + 1] = values[i] end
  end
  return flat
end

--- Makes a tensor from a Lua table. The table is flat, with a shape, or it is nested, and
-- its nesting gives the shape.
---@param values table
---@param shape? integer[]
---@return kvlab.Tensor
function M.from(dev, dtype, shape, values)
  if values == nil then shape, values = nil, shape end
  if type(values) ~= "table" then
    error(("values is a %s, expected a table of numbers"):format(type(values)), 2)
  end
  local sizes = {}
  local flat = flatten(values, 1, sizes, {})
  local number = library.dtype(dtype)
  local t = open(dev, number, fill_shape(shape or sizes, 2), 2)
  if tonumber(t.count) ~= #flat then
    error(("%d values for shape [%s]"):format(#flat, table.concat(t:dims(), ", ")), 2)
  end
  local host = array_of[dtype] and dtype or "f32" -- f16, bf16 and f8 go through f32
  local buffer = array_of[host](math.max(#flat, 1))
  local low, high = unpack(limits[dtype] or {})
  for i = 1, #flat do
    local x = flat[i]
    local is_number = type(x) == "number"
    if not is_number then check_other(i, x, dtype, low, high) end
    buffer[i - 1] = x
    if low and is_number and tonumber(buffer[i - 1]) ~= x then fail_value(i, x, dtype) end
  end
  local target = host == dtype and t or open_like(t, dtypes.f32)
  check(C.kvl_tensor_write(target, buffer, #flat * ffi.sizeof(ctypes[host])))
  if target ~= t then check(C.kvl_cast(target, t)) end
  return t
end

-- ---- scope ----------------------------------------------------------------------------

local function keep(value, kept)
  if type(value) == "cdata" and ffi.istype(tensor_t, value) then
    kept[value] = true
  elseif type(value) == "table" and not kept[value] then
    kept[value] = true
    for _, v in pairs(value) do keep(v, kept) end
  end
end

--- Runs fn() and frees every tensor made inside it, except those that it returns (also
-- inside returned tables). fn may not yield.
function M.scope(fn, ...)
  local n, arguments = select("#", ...), { ... } -- first: see protected.lua
  argument("scope", "fn", fn, options.fn)
  local outer, inner = scope, setmetatable({}, WEAK)
  C.kvl_interrupt_hold(1)
  scope = inner
  local results = protected.call("scope", fn, n, arguments)
  scope = outer
  C.kvl_interrupt_hold(-1)
  local kept = {}
  if results[1] then for i = 2, results.n do keep(results[i], kept) end end
  for t in pairs(inner) do
    if kept[t] then remember(t) else C.kvl_tensor_close(t) end
  end
  if not results[1] then error(results[2], 0) end
  return unpack(results, 2, results.n)
end

--- Runs fn(...) outside of every scope: the tensors that it makes stay until nobody
-- refers to them. Use it for buffers that are made at their first use, wherever that is.
-- fn may not yield.
function M.lasting(fn, ...)
  local n, arguments = select("#", ...), { ... } -- first: see protected.lua
  argument("lasting", "fn", fn, options.fn)
  local outer = scope
  C.kvl_interrupt_hold(1)
  scope = nil
  local results = protected.call("lasting", fn, n, arguments)
  scope = outer
  C.kvl_interrupt_hold(-1)
  if not results[1] then error(results[2], 0) end
  return unpack(results, 2, results.n)
end

-- ---- looking --------------------------------------------------------------------------

--- Raises if a tensor is closed.
local function open_argument(what, t)
  if t.storage == nil then options.fail(what .. ": the tensor is closed") end
end

--- The sizes of all dims, as a Lua table.
function methods.dims(t)
  local sizes = {}
  for i = 1, t.ndim do sizes[i] = tonumber(t.sizes[i - 1]) end
  return sizes
end

--- The size of dim `i`; a negative i counts from the end.
function methods.size(t, i)
  argument("size", "i", i, ROW)
  local at = i < 0 and i + t.ndim or i
  if at < 0 or at >= t.ndim then
    options.fail(("dim is %d, expected %d ... %d"):format(i, -t.ndim, t.ndim - 1))
  end
  return tonumber(t.sizes[at])
end

--- The name of the dtype: "bf16".
function methods.type(t) return dtype_names[t.dtype] end
--- The size of the elements in bytes.
function methods.bytes(t) return tonumber(t.count) * C.kvl_dtype_bytes(t.dtype) end

--- The memory as a typed pointer, after everything launched so far is done. For CPU
-- tensors only (f16 and bf16 as uint16_t bits). The pointer is valid while the tensor
-- lives.
function methods.data(t)
  open_argument("data", t)
  if C.kvl_device_is_cpu(t.device) == 0 then
    error(("data() of a tensor on %s, expected one on the cpu: t:to(kv.device \"cpu\")")
      :format(t.device:name()), 2)
  end
  check(C.kvl_device_sync(t.device))
  return ffi.cast(pointer_to[dtype_names[t.dtype]], t.ptr)
end

local BYTES_PIECE = 1024 * 1024

--- The memory as strings of at most 1 MiB, one at each call, then nil. Waits for the
-- device.
---@return fun(): string|nil
function M.pieces(t)
  local host, at = t:to "cpu", 0
  local memory, bytes = ffi.cast("const char *", host:data()), host:bytes()
  return function()
    if at >= bytes then return nil end
    local n = math.min(BYTES_PIECE, bytes - at)
    local piece = ffi.string(memory + at, n)
    at = at + n
    return piece, host -- which must live until the last call
  end
end

local EXACT = 2 ^ 53 -- whole numbers up to this are exact as numbers of Lua

local function exact(x)
  local number = tonumber(x)
  return number > -EXACT and number < EXACT and number or x
end

--- The elements as a flat Lua table of numbers. Elements of a u64 tensor are uint64_t,
-- which keep all 64 bits. Elements of an i64 tensor that a Lua number cannot hold are
-- int64_t. Waits for the device.
function methods.list(t)
  local name = dtype_names[t.dtype]
  local host = array_of[name] and name or "f32"
  local source = host == name and t or t:cast "f32"
  local n = tonumber(t.count)
  local buffer = array_of[host](math.max(n, 1))
  check(C.kvl_tensor_read(source, buffer, n * ffi.sizeof(ctypes[host])))
  local values = {}
  if host == "u64" then
    for i = 1, n do values[i] = buffer[i - 1] end
  elseif host == "i64" then
    for i = 1, n do values[i] = exact(buffer[i - 1]) end
  else
    for i = 1, n do values[i] = tonumber(buffer[i - 1]) end
  end
  return values
end

--- The only element as a number.
function methods.item(t)
  if t.count ~= 1 then
    options.fail(("item() of %d elements, expected 1"):format(tonumber(t.count)))
  end
  return t:list()[1]
end

-- ---- views and copies -----------------------------------------------------------------

--- The dim that an argument names, from 0; a negative one counts from the end.
function M.dim_of(what, name, t, dim)
  argument(what, name, dim, options.integer)
  local at = dim < 0 and dim + t.ndim or dim
  if at < 0 or at >= t.ndim then
    options.fail(("%s: %s is %d of %d dims"):format(what, name, dim, t.ndim))
  end
  return at
end

local DIM = options.optional(options.integer)

--- Entries [start, start + length) of one dim. Along dim 0, which is the default, the
-- result is a view of the same memory. Along any other dim, or when `out` is given, it is
-- a copy, because tensors are contiguous.
---@param start integer
---@param length integer
---@param dim? integer  0; negative counts from the end
---@param out? kvlab.Tensor
function methods.narrow(t, start, length, dim, out)
  argument("narrow", "start", start, ROW)
  argument("narrow", "length", length, ROW)
  argument("narrow", "dim", dim, DIM)
  if out ~= nil then expect_tensor("narrow", "out", out) end
  local at = dim and M.dim_of("narrow", "dim", t, dim) or 0
  if at > 0 or out then
    if not out then
      if start < 0 or length < 0 or start + length > t.sizes[at] then
        options.fail(("narrow: entries %d ... %d of dim %d, expected within 0 ... %d")
          :format(tonumber(start), tonumber(start + length), at, tonumber(t.sizes[at])))
      end
      local dims = t:dims()
      dims[at + 1] = tonumber(length)
      out = M.tensor(t.device, t:type(), dims)
    elseif at >= out.ndim or out.sizes[at] ~= length then
      options.fail(("narrow: out has not %d entries along dim %d"):format(
        tonumber(length), at))
    end
    check(C.kvl_take_part(t, at, start, out))
    return out
  end
  local v = tensor_t()
  check(C.kvl_tensor_narrow(t, start, length, v))
  return remember(v)
end

--- Entry i of dim 0.
---@param i integer
function methods.index(t, i)
  argument("index", "i", i, ROW)
  local v = tensor_t()
  check(C.kvl_tensor_index(t, i, v))
  return remember(v)
end

--- The same elements under another shape; one size may be -1.
function methods.reshape(t, shape)
  local ndim = fill_shape(shape, 2)
  local known, open_dim = 1, nil
  for i = 0, ndim - 1 do
    if shape_buffer[i] == -1 then open_dim = i
    else known = known * tonumber(shape_buffer[i]) end
  end
  if open_dim and known > 0 then shape_buffer[open_dim] = tonumber(t.count) / known end
  local v = tensor_t()
  check(C.kvl_tensor_reshape(t, ndim, shape_buffer, v))
  return remember(v)
end

--- The tensor on another device, given by handle or name. If it is there already, this
-- is the tensor itself.
function methods.to(t, dev)
  dev = device(dev)
  if t.device == dev then return t end
  local out = open_like(t, nil, dev)
  check(C.kvl_copy(t, out))
  return out
end

--- A copy with its own storage.
function methods.clone(t)
  local out = open_like(t)
  check(C.kvl_copy(t, out))
  return out
end

--- Overwrites the tensor with `source`, which has the same dtype and count and may be on
-- any device.
function methods.copy_(t, source)
  expect_tensor("copy_", "source", source)
  check(C.kvl_copy(source, t))
  return t
end

--- Overwrites every element with a number.
function methods.fill_(t, value)
  argument("fill_", "value", value, FLOAT)
  expect_held("fill_", "value", value, dtype_names[t.dtype])
  check(C.kvl_fill(t, value))
  return t
end

--- Overwrites the elements with start, start + step, ... in memory order.
function methods.arange_(t, start, step)
  argument("arange_", "start", start, NUMBER)
  argument("arange_", "step", step, NUMBER)
  expect_range(tonumber(t.count), start, step, dtype_names[t.dtype])
  check(C.kvl_arange(t, start or 0, step or 1))
  return t
end

--- Overwrites the elements with uniform numbers in (0, 1]. `stream` selects one of the
-- 2^32 sequences of a seed.
function methods.rand_(t, seed, stream)
  argument("rand_", "seed", seed, options.any_whole)
  argument("rand_", "stream", stream, WHOLE)
  check(C.kvl_random(t, C.KVL_RANDOM_UNIFORM, 0, 1, seed + 4294967296 * (stream or 0), 0))
  return t
end

--- The tensor in another dtype. This is the tensor itself if it already has that dtype
-- and `out` is not given.
function methods.cast(t, dtype, out)
  if out ~= nil then expect_tensor("cast", "out", out) end
  local number = library.dtype(dtype)
  if number == t.dtype and not out then return t end
  out = out or open_like(t, number)
  check(C.kvl_cast(t, out))
  return out
end

--- Returns whether the tensor lies in pinned host memory.
function methods.is_pinned(t) return C.kvl_tensor_is_pinned(t) == 1 end

--- Declares that nothing will write the tensor, or other tensors of its storage, any
-- more; this is true of a model's weights. Kernels may then read it before earlier ops
-- have ended: on a GPU, the products of a decode step begin to read their weights early.
-- Waits until all work on the device has ended. fill_, copy_ and ops whose `out` it is
-- raise an error afterwards.
---@param is_frozen? boolean  false: it may be written again (true)
---@return kvlab.Tensor t
function methods.freeze(t, is_frozen)
  if is_frozen ~= nil then
    options.argument("freeze", "is_frozen", is_frozen, options.boolean)
  end
  check(C.kvl_tensor_freeze(t, is_frozen == false and 0 or 1))
  return t
end

--- Returns whether the tensor is frozen.
function methods.is_frozen(t) return C.kvl_tensor_is_frozen(t) == 1 end

--- Frees the storage now. Using the tensor afterwards raises an error.
function methods.free(t) C.kvl_tensor_close(t) end

M.methods = methods
require "kvlab.tensor.entries"(M)
local entry_of = M.entry_of

tensor_t = ffi.metatype("kvl_tensor", {
  __index = function(t, key)
    local method = methods[key]
    if method then return method end
    return entry_of(t, key)
  end,
  __newindex = M.set_entry,
  __gc = C.kvl_tensor_close,
  __tostring = function(t) return require("kvlab.tensor.show")(t) end,
  __len = function(t) return tonumber(t.sizes[0]) end,
  __add = function(a, b) return M.binary("ADD", a, b) end,
  __sub = function(a, b) return M.binary("SUB", a, b) end,
  __mul = function(a, b) return M.binary("MUL", a, b) end,
  __div = function(a, b) return M.binary("DIV", a, b) end,
  __pow = function(a, b) return M.binary("POW", a, b) end,
  __unm = function(a) return a:neg() end,
})
M.ctype = tensor_t

--- Whether a value is a tensor, closed or not.
---@return boolean
function M.is_tensor(value)
  return type(value) == "cdata" and ffi.istype(tensor_t, value)
end

return M
