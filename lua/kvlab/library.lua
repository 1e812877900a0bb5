--- The C library: reads runtime/kvlab.h, loads libkvlab.so and refuses one whose ABI
-- number differs. Everything else in lua/kvlab/ gets C, check and the paths from here.
local ffi = require "ffi"

local M = {}

--- Where things are: told by the executable, or found from this file under stock luajit
-- (KVLAB_CONFIG=debug chooses another build than release).
local function find_paths()
  local told = package.loaded["kvlab.paths"]
  if told then return told end
  local root = debug.getinfo(1, "S").source:match("^@(.*)/lua/kvlab/library%.lua$")
    or debug.getinfo(1, "S").source:match("^@lua/kvlab/library%.lua$") and "."
  if not root then error("kvlab: library.lua is not in a lua/kvlab folder") end
  local config = os.getenv "KVLAB_CONFIG" or "release"
  return { root = root, header = root .. "/runtime/kvlab.h", config = config,
           library_dir = root .. "/build/bin/" .. config }
end

M.paths = find_paths()

local function read_header(path)
  local file = assert(io.open(path))
  local text = file:read "*a"
  file:close()
  return text:match "/%* ffi:begin.-\n(.-)/%* ffi:end"
    or error(path .. ": no ffi:begin ... ffi:end")
end

local function load_library(dir)
  local ok, lib = pcall(ffi.load, dir .. "/libkvlab.so")
  if ok then return lib end
  error(("kvlab: %s/libkvlab.so cannot be loaded; `./kvlab build` builds it\n  %s")
    :format(dir, lib), 0)
end

ffi.cdef(read_header(M.paths.header))
local C = load_library(M.paths.library_dir)
M.C = C
if C.kvl_abi() ~= C.KVL_ABI then
  error(("kvlab: libkvlab.so has ABI %d, kvlab.h has %d; `./kvlab build` rebuilds it")
    :format(C.kvl_abi(), tonumber(C.KVL_ABI)), 0)
end

--- Raise the library's own words when `status` is negative; otherwise return it.
---@param status integer
---@param level? integer  which caller to blame; 2 (the caller's caller) unless given
function M.check(status, level)
  if status >= 0 then return status end
  error(ffi.string(C.kvl_last_error()), (level or 2) + 1)
end

--- dtype name -> number and number -> name. ORDER kvl_dtype
M.dtypes, M.dtype_names = {}, {}
for number = 0, tonumber(C.KVL_DTYPE_U64) do
  local name = ffi.string(C.kvl_dtype_name(number))
  M.dtypes[name], M.dtype_names[number] = number, name
end

--- The number of a dtype name, or an error that lists them.
function M.dtype(name, level)
  return M.dtypes[name]
    or error(("dtype is %s, expected one of f32 f16 bf16 f8e4m3 i32 i64 u8 u64"):format(
      tostring(name)), (level or 2) + 1)
end

return M
