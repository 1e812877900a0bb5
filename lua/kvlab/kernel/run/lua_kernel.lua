--- Runs a kernel that was printed in Lua (kernel/print/lua.lua). It waits for the device.
-- Memory of a GPU is copied to the host for the run, and what was written is copied back.
local ffi = require "ffi"
local library = require "kvlab.library"
local numbers = require "kvlab.kernel.run.numbers"
local pages = require "kvlab.tensor.pages"
local place = require "kvlab.kernel.expression.place"
local tensor = require "kvlab.tensor.arithmetic"

local C, check = library.C, library.check
local M = {}

local MEMORY = { f32 = "float *", f16 = "uint16_t *", bf16 = "uint16_t *",
                 f8e4m3 = "uint8_t *", i32 = "int32_t *", i64 = "int64_t *",
                 u8 = "uint8_t *", u64 = "uint64_t *" }
local types = {}
for dtype, name in pairs(MEMORY) do types[dtype] = ffi.typeof(name) end

local TABLES = { f16 = "F16", bf16 = "BF16", f8e4m3 = "F8" }

--- A function that reads an element of memory of a dtype as a number.
function M.reader(pointer, dtype)
  local values = TABLES[dtype] and numbers[TABLES[dtype]]
  if not values then return function(i) return pointer[i] end end
  return function(i) return values[pointer[i]] end
end

local function host_of(t)
  local bytes = ffi.new("uint8_t[?]", math.max(tonumber(t.count)
    * C.kvl_dtype_bytes(t.dtype), 1))
  check(C.kvl_tensor_read(t, bytes, t:bytes()))
  return bytes
end

--- A tensor's memory for the host to read, and an object that must stay alive meanwhile.
function M.pointer_of(t, dev)
  local memory = dev:is_cpu() and t.ptr or host_of(t)
  return ffi.cast(types[library.dtype_names[t.dtype]], memory), memory
end

--- K and V of packed pages as f32 on the device, one after the other, and functions that
-- find rows. Shared values are the first numbers of rows of K.
local function unpack_pages(a, t, p)
  local heads, size, dim = p.kv_heads, p.block_size, p.key.dim
  local n, dev = tonumber(p.blocks), t.memory.device
  local halves = p.value.begin > 0 and 2 or 1
  local all = tensor.tensor(dev, "f32", { halves, n, heads, size, dim })
  check(C.kvl_read_blocks(t.memory, t.format, tensor.arange(dev, "i32", n), all:index(0),
    halves == 2 and all:index(1) or nil))
  check(C.kvl_device_sync(dev))
  local function row(of, block, kv_head, token)
    return (((of * n + block) * heads + kv_head) * size + token) * dim
  end
  a.key_row = function(...) return row(0, ...) end
  a.value_row = function(...) return row(halves - 1, ...) end
  return all
end

--- Pages in the form that Lua kernels take: numbers by index, and functions that find
-- rows.
local function take_pages(a, t, dev)
  local p = pages.of(t.memory, t.format)
  local memory = t.memory
  if pages.packs(p) then
    memory = unpack_pages(a, t, p)
  else
    a.key_row, a.value_row = pages.rows(p, p.key), pages.rows(p, p.value)
  end
  a.cache, a.keep_cache = M.pointer_of(memory, dev)
  a.read_cache, a.keep_memory = M.reader(a.cache, memory:type()), memory
  a.cache_blocks = tonumber(p.blocks)
  for _, name in ipairs { "k_scale", "v_scale" } do
    local scale = t.format and t.format[name]
    if scale ~= nil then a[name], a["keep_" .. name] = M.pointer_of(scale[0], dev) end
  end
end
M.take_pages = take_pages

--- The arguments in the form that Lua kernels take: pointers by name, and whole numbers.
local function arguments_of(kernel, list, given)
  local a, back = {}, {}
  local on_host = kernel.device:is_cpu()
  for i, one in ipairs(list) do
    local t = given[one.name]
    if one.kind == "pages" then
      take_pages(a, t, kernel.device)
    elseif t then
      local dtype = library.dtype_names[t.dtype]
      local memory = t.ptr
      if not on_host then
        memory = host_of(t)
        if one.kind == "out" then back[#back + 1] = { t, memory } end
      end
      a[one.name] = ffi.cast(types[dtype], memory)
      a["keep_" .. i] = memory
      if one.name == "q" then a.read_q = M.reader(a.q, dtype) end
    elseif one.kind == "int" then
      a[one.name] = tonumber(kernel.integers[one.at])
    elseif one.kind == "float" then
      a[one.name] = kernel.floats[one.at]
    end
  end
  return a, back
end

--- A function that runs the kernel with the arguments that it was given.
---@param plan kvlab.Plan
---@param source string
---@return fun(kernel: kvlab.Kernel)  that of a hook returns the hook as a function
function M.load(plan, source)
  local chunk, why = loadstring(source, "=" .. plan.what)
  if not chunk then
    error(("%s: it is too large for Lua: %s"):format(plan.what, why), 0)
  end
  local fn, list = chunk(numbers), place.arguments(plan)
  return function(kernel)
    if C.kvl_device_is_recording(kernel.device) == 1 then
      error(("%s: it runs in plain Lua, which no graph can record"):format(plan.what), 0)
    end
    check(C.kvl_device_sync(kernel.device))
    local a, back = arguments_of(kernel, list, kernel.given)
    local result = fn(a)
    for _, one in ipairs(back) do
      check(C.kvl_tensor_write(one[1], one[2], one[1]:bytes()))
    end
    return result
  end
end

return M
