--- Kernels that are given as source text, for computations that no expression describes:
-- a function in C, in CUDA, or in both, called with tensors like an op.
--
--   local scale_rows = kv.kernel.source {
--     name = "scale_rows",
--     arguments = { "x f32 [rows, dim]", "by f32 [rows]", "unit f32",
--                   "out f32 [rows, dim] written" },
--     c = [[
--       void scale_rows(const float *x, const float *by, float unit, float *out,
--                       int64_t rows, int64_t dim) {
--       #pragma omp parallel for
--         for (int64_t i = 0; i < rows * dim; i++) out[i] = x[i] * by[i / dim] * unit;
--       }]],
--     cuda = [[
--       void scale_rows(const float *x, const float *by, float unit, float *out,
--                       int64_t rows, int64_t dim) {
--         const int64_t i = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
--         if (i < rows * dim) out[i] = x[i] * by[i / dim] * unit;
--       }]],
--     grid = function(n) return math.ceil(n.rows * n.dim / 256) end, block = 256,
--   }
--   local out = scale_rows(x, by, 0.5)
--
-- The text has a function of the kernel's name, which returns nothing. Its parameters are
-- the arguments, in order, and then the size of every named dimension, int64_t, in the
-- order in which they first occur. The text may also have anything else, such as other
-- functions and macros. In CUDA the function is written without __global__, and all its
-- threads run it.
--
-- A call checks its arguments as an op does: dtypes, shapes, devices. A named dimension
-- has the same size wherever it occurs. It then launches the function on the current
-- stream of the tensors' device, and returns the tensors that are written. A graph can
-- record it. kvlab cannot check what the function does with its memory.
local arguments = require "kvlab.arguments"
local device = require "kvlab.tensor.device"
local ffi = require "ffi"
local kernel = require "kvlab.kernel.run.kernel"
local kinds = require "kvlab.tensor.kinds"
local library = require "kvlab.library"
local options = require "kvlab.options"
local source_text = require "kvlab.kernel.print.source_text"
local tensor = require "kvlab.tensor.tensor"

local C, check = library.C, library.check
local M = {}

local NAME = "^[%a_][%w_]*$"
-- A tensor may be missing; it is written, and made where it is missing.
local WORDS = { optional = true, written = true }

---@class kvlab.Source
local Source = {}
Source.__index = Source
M.Source = Source

-- ---- arguments ------------------------------------------------------------------------

local function refuse(self, message, ...)
  options.fail(("%s: %s"):format(self.name, message:format(...)))
end

--- Notes a dimension by name; the names are numbered in the order in which they occur.
local function note_dim(self, arg, text)
  local size = tonumber(text)
  if size and size % 1 == 0 and size >= 0 then return size end
  if not text:match(NAME) then
    refuse(self, "%s has a dimension %q, expected a name or a size", arg.name, text)
  end
  if not self.is_dim[text] then
    self.is_dim[text] = true
    self.dims[#self.dims + 1] = text
  end
  return text
end

--- "x f32 [rows, 64] written" as a table: name, dtype, shape (nil: a number), words.
local function parse(self, text)
  local name, dtype, rest = text:match "^%s*([%a_][%w_]*)%s+(%w+)%s*(.-)%s*$"
  local dims, words = (rest or ""):match "^%[([^%[%]]*)%]%s*([%w%s]*)$"
  local arg = { name = name, dtype = dtype, words = dims or "" }
  if not name or not dims and rest ~= "" then
    refuse(self, "argument %q, expected \"name dtype [dimensions]\" or \"name dtype\"",
      text)
  end
  local known = dims and source_text.ELEMENTS or source_text.SCALARS
  if not known[dtype] then
    refuse(self, "argument %s is of dtype %s, expected %s", name, dtype, dims
      and "one of f32 f16 bf16 f8e4m3 i32 i64 u8 u64" or "f32, i32 or i64 of a number")
  end
  if not dims then return arg end
  arg.shape, arg.number = {}, library.dtypes[dtype]
  for dim in dims:gmatch "[^,]+" do
    arg.shape[#arg.shape + 1] = note_dim(self, arg, dim:match "^%s*(.-)%s*$")
  end
  if #arg.shape > C.KVL_DIMS_MAX then
    refuse(self, "%s has %d dimensions, expected at most %d", name, #arg.shape,
      tonumber(C.KVL_DIMS_MAX))
  end
  for word in words:gmatch "%S+" do
    if not WORDS[word] or arg.written or arg.optional then
      refuse(self, "%s is %q, expected written or optional", name, words)
    end
    arg[word] = true
  end
  return arg
end

local function read_arguments(self, list)
  local seen, tensors = {}, 0
  for i, text in ipairs(list) do
    local arg = parse(self, text)
    if seen[arg.name] then refuse(self, "two arguments have the name %s", arg.name) end
    seen[arg.name] = true
    if arg.shape then tensors = tensors + 1 end
    self.list[i] = arg
  end
  for _, dim in ipairs(self.dims) do
    if seen[dim] then
      refuse(self, "%s is an argument and a dimension, expected two names", dim)
    end
  end
  if tensors == 0 then
    refuse(self, "it has no tensor, expected one, which tells the device")
  end
  local bytes = 8 * (#list + #self.dims)
  if bytes > C.KVL_CODE_ARGUMENTS_MAX then
    refuse(self, "%d arguments and %d dimensions, expected at most %d together", #list,
      #self.dims, C.KVL_CODE_ARGUMENTS_MAX / 8)
  end
end

-- ---- compiling ------------------------------------------------------------------------

--- The whole source for a kind of device, as it is compiled: "c" or "cuda".
---@param kind string
---@return string
function Source:source(kind)
  options.argument("source", "kind", kind, options.one_of("c", "cuda"))
  if not self[kind] then refuse(self, "it has no %s text", kind) end
  return source_text.whole(self, kind, source_text.place_of(self, kind))
end

--- Compiles the kernel for a device, or takes it from the cache. A call does so by itself
-- when it is the first on a device.
---@param dev kvlab.Device|string|nil
---@return kvlab.Source self
function Source:compile(dev)
  dev = device.device(dev)
  if self.is_closed then refuse(self, "the kernel is closed") end
  local name = dev:name()
  if not self.codes[name] then
    local kind = dev:is_cpu() and "c" or "cuda"
    if not self[kind] then
      refuse(self, "it has no %s text, expected one to run on %s",
        kind == "c" and "C" or "CUDA", name)
    end
    local target = kernel.target(dev)
    -- the name of the stored code does not depend on where the text stands
    local code, why = kernel.load(dev, self.name, source_text.whole(self, kind, '1 ""'),
      target, self:source(kind))
    if not code then options.fail(why) end
    self.codes[name] = code
  end
  self.last_device, self.code = dev, self.codes[name]
  return self
end

--- Refuses every call from now on. Compiled code stays loaded, because a graph may hold
-- it.
function Source:close() self.is_closed, self.codes, self.last_device = true, {}, nil end

-- ---- a call ---------------------------------------------------------------------------

local function expected(self, arg)
  local words = {}
  for i, dim in ipairs(arg.shape) do
    local size = self.n[dim]
    words[i] = size and ("%s=%d"):format(dim, size) or tostring(dim)
  end
  return ("%s [%s]"):format(arg.dtype, table.concat(words, ", "))
end

local function begin(self, more)
  if self.is_closed then refuse(self, "the kernel is closed") end
  if more > 0 then
    refuse(self, "%d arguments, expected %d", #self.list + more, #self.list)
  end
  self.device, self.count = false, 0
  for i = 1, #self.dims do self.n[self.dims[i]] = false end
end

local function put_tensor(self, i, t)
  self.pointers[i - 1] = t.ptr
  self.tensors[self.count] = t
  self.count = self.count + 1
end

local function wrong_shape(self, arg, t)
  for _, dim in ipairs(arg.shape) do -- what this very tensor bound is not expected
    if self.bound_by[dim] == arg then self.n[dim] = false end
  end
  refuse(self, "%s is %s [%s], expected %s", arg.name, t:type(),
    table.concat(t:dims(), ", "), expected(self, arg))
end

--- Compares a tensor's sizes with the dimensions, and binds those that are new.
local function check_shape(self, arg, t)
  local n, shape = self.n, arg.shape
  if t.dtype ~= arg.number or t.ndim ~= #shape then wrong_shape(self, arg, t) end
  for i = 1, #shape do
    local dim, size = shape[i], tonumber(t.sizes[i - 1])
    local want = type(dim) == "number" and dim or n[dim]
    if not want then
      n[dim], self.bound_by[dim] = size, arg
    elseif want ~= size then
      wrong_shape(self, arg, t)
    end
  end
end

local function take_tensor(self, i, t)
  local arg = self.list[i]
  if t == nil then
    if not (arg.optional or arg.written) then
      refuse(self, "%s is missing, expected %s", arg.name, expected(self, arg))
    end
    self.pointers[i - 1] = nil
    return
  end
  tensor.expect(self.name, arg.name, t)
  if t.storage == nil then refuse(self, "%s is closed, expected a tensor", arg.name) end
  if not self.device then self.device = t.device end
  if t.device ~= self.device then
    refuse(self, "%s is on %s, expected %s like the tensors before it", arg.name,
      t.device:name(), self.device:name())
  end
  check_shape(self, arg, t)
  put_tensor(self, i, t)
end

--- A tensor that is written and was not given.
local function make_tensor(self, i)
  local arg, dims = self.list[i], {}
  for k, dim in ipairs(arg.shape) do
    dims[k] = type(dim) == "number" and dim or self.n[dim]
    if not dims[k] or not self.device then
      refuse(self, "%s is missing, expected %s: no other tensor tells %s", arg.name,
        expected(self, arg), self.device and dim or "the device")
    end
  end
  if not self.device then
    refuse(self, "%s is missing: no other tensor tells the device", arg.name)
  end
  local t = tensor.tensor(self.device, arg.dtype, dims)
  put_tensor(self, i, t)
  return t
end

local int64_t = ffi.typeof "int64_t"
local LIMITS = { i32 = 2 ^ 31, i64 = 2 ^ 63 }

local function take_number(self, i, value)
  local arg = self.list[i]
  local limit = LIMITS[arg.dtype]
  if not limit then
    if type(value) ~= "number" then
      refuse(self, "%s is %s, expected a number", arg.name, options.shown(value))
    end
    self.floats[i - 1], self.n[arg.name] = value, value
    return
  end
  local number = tonumber(value)
  local is_whole = type(value) == "number" and value % 1 == 0
    or arg.dtype == "i64" and type(value) == "cdata" and ffi.istype(int64_t, value)
  if not is_whole or number < -limit or number >= limit then
    refuse(self, "%s is %s, expected a whole number, %s", arg.name, options.shown(value),
      arg.dtype)
  end
  self.integers[i - 1], self.n[arg.name] = value, number
end

local function is_size(x, most)
  return type(x) == "number" and x % 1 == 0 and x >= 0 and x <= most
end

local BLOCK_MAX, SHARED_MAX, GRID_MAX = 1024, 2 ^ 20, 2 ^ 31 - 1

--- The grid of a launch, from numbers and functions of the dimensions and numbers.
local function set_grid(self)
  local grid, n = self.launch_grid, self.n
  local x, y, z = self.grid, nil, nil
  if type(x) == "function" then x, y, z = x(n) end
  if not (is_size(x, GRID_MAX) and is_size(y or 1, GRID_MAX)
          and is_size(z or 1, GRID_MAX)) then
    refuse(self, "grid gives %s, %s, %s, expected one to three whole numbers >= 0",
      options.shown(x), options.shown(y), options.shown(z))
  end
  grid.x, grid.y, grid.z = x, y or 1, z or 1
  local block, shared = self.block, self.shared
  if type(block) == "function" then block = block(n) end
  if not is_size(block, BLOCK_MAX) or block == 0 then
    refuse(self, "block gives %s, expected a whole number from 1 to %d",
      options.shown(block), BLOCK_MAX)
  end
  if type(shared) == "function" then shared = shared(n) end
  if not is_size(shared, SHARED_MAX) then
    refuse(self, "shared gives %s, expected bytes, a whole number >= 0",
      options.shown(shared))
  end
  grid.threads, grid.bytes_shared = block, shared
end

local function launch(self)
  local dev, first = self.device, #self.list
  if not dev then refuse(self, "it got no tensor, expected one") end
  for i = 1, #self.dims do self.integers[first + i - 1] = self.n[self.dims[i]] or 0 end
  if dev ~= self.last_device then self:compile(dev) end
  if not dev:is_cpu() then set_grid(self) end
  check(C.kvl_code_launch(self.code, dev, self.words, self.bytes, self.tensors,
    self.count, self.launch_grid))
end

--- The function that a call runs. It takes each argument by name, so that a call makes no
-- garbage.
local function caller(self)
  local names, takes, makes, results = {}, {}, {}, {}
  for i, arg in ipairs(self.list) do
    names[i] = "p" .. i
    takes[i] = ("take_%s(self, %d, p%d)"):format(arg.shape and "tensor" or "number", i, i)
    if arg.written then
      makes[#makes + 1] = ("if p%d == nil then p%d = make(self, %d) end"):format(i, i, i)
      results[#results + 1] = "p" .. i
    end
  end
  local list = table.concat(names, ", ")
  local text = "local begin, take_tensor, take_number, make, launch = ...\n"
    .. ("return function(self, %s, ...)\nbegin(self, select('#', ...))\n"):format(list)
    .. table.concat(takes, "\n") .. "\n" .. table.concat(makes, "\n")
    .. "\nlaunch(self)\nreturn " .. table.concat(results, ", ") .. "\nend"
  return assert(loadstring(text, debug.getinfo(1, "S").source))(begin, take_tensor,
    take_number, make_tensor, launch)
end

Source.__call = function(self, ...) return self.call(self, ...) end

function Source:__tostring()
  local names = {}
  for i, arg in ipairs(self.list) do names[i] = arg.name end
  return ("kernel %s(%s)"):format(self.name, table.concat(names, ", "))
end

-- ---- making one -----------------------------------------------------------------------

local IDENTIFIER = { "the name of a function in C", function(x)
  return type(x) == "string" and x:match(NAME) ~= nil
end }
local OPTIONS = {
  name = options.required(IDENTIFIER), c = options.string, cuda = options.string,
  arguments = options.required(options.list_of(options.string, 1)),
  grid = options.either(options.count, options.fn),
  block = options.either(options.within(1, BLOCK_MAX), options.fn),
  shared = options.either(options.whole, options.fn),
}

--- Makes a kernel of source text, see above. Nothing is compiled before the first call.
---@param o table  name; c, cuda: the texts, one or both; arguments: a list of "name dtype
--                 [dimensions]" for tensors (dimensions are names or sizes) and "name
--                 dtype" for numbers (f32 i32 i64). A tensor may be "written" (the
--                 function writes to it; without it a call makes a new one) or "optional"
--                 (NULL where it is nil). Of CUDA: grid: how many thread blocks, as a
--                 number or a function of the sizes by name (dimensions and numbers) that
--                 returns x or x, y, z; block (256): their threads; shared (0): bytes of
--                 dynamic shared memory, both a number or a function, too
---@return kvlab.Source kernel  call it with the arguments
function M.source(o)
  options.check("kernel.source", o, OPTIONS)
  if not (o.c or o.cuda) then
    options.fail "kernel.source: c and cuda are missing, expected a text for one of them"
  end
  if o.cuda and not o.grid then
    options.fail "kernel.source: grid is missing, expected one with a cuda text"
  end
  local self = setmetatable({ name = o.name, c = o.c, cuda = o.cuda, grid = o.grid or 1,
    block = o.block or 256, shared = o.shared or 0, list = {}, dims = {}, is_dim = {},
    n = {}, bound_by = {}, codes = {} }, Source)
  self.file, self.line = source_text.place_of_user()
  read_arguments(self, o.arguments)
  local count = #self.list + #self.dims
  self.bytes, self.words = 8 * count, ffi.new("int64_t[?]", count)
  self.pointers = ffi.cast("const void **", self.words)
  self.integers = ffi.cast("int64_t *", self.words)
  self.floats = ffi.cast("double *", self.words)
  self.tensors = ffi.new("kvl_tensor *[?]", #self.list)
  self.launch_grid = ffi.new("kvl_grid", 1, 1, 1, 1, 0, 1)
  self.call = caller(self)
  return self
end

arguments.methods(Source, "a kernel", {
  compile = { dev = options.optional(kinds.device) },
})

return M
