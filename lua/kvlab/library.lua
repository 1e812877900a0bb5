--- Loads the C library: declares the contents of runtime/base.h and runtime/kvlab.h,
-- loads libkvlab.so, and refuses a library that was built with other headers. All other
-- code in lua/kvlab/ gets C, check and the paths from here.
local bit = require "bit"
local ffi = require "ffi"
local options = require "kvlab.options"

local M = {}

--- Where things are: told by the executable, or found from this file under stock luajit
-- (KVLAB_CONFIG=debug chooses another build than release).
local function find_paths()
  local told = package.loaded["kvlab.paths"]
  if told then return told end
  local root = debug.getinfo(1, "S").source:match("^@(.*)/lua/kvlab/library%.lua$")
    or debug.getinfo(1, "S").source:match("^@lua/kvlab/library%.lua$") and "."
  if not root then error("library.lua is not in a lua/kvlab folder") end
  local config = os.getenv "KVLAB_CONFIG" or "release"
  return { root = root, config = config, library_dir = root .. "/build/bin/" .. config }
end

M.paths = find_paths()

--- How a user starts kvlab: in a checkout or a bundle, or as `install` puts it into PATH.
M.program = M.paths.root:find "/lib/kvlab$" and "kvlab" or "./kvlab"

--- The headers that the library was built with, in the order in which they are declared.
M.headers = { M.paths.root .. "/runtime/base.h", M.paths.root .. "/runtime/kvlab.h" }

--- What the headers declare: their text between the ffi marks.
local function read_declarations()
  local parts = {}
  for i, path in ipairs(M.headers) do
    local file = assert(io.open(path))
    local text = file:read "*a"
    file:close()
    local mark = text:find("/* ffi:begin", 1, true)
    local stop = mark and text:find("/* ffi:end", mark, true)
      or error(path .. ": no ffi:begin ... ffi:end")
    parts[i] = text:sub(text:find("\n", mark, true) + 1, stop - 1)
  end
  return table.concat(parts)
end

--- The CRC that cksum(1) prints: of the text, then of its length.
local function cksum(text)
  local POLYNOMIAL, of_byte, crc = 0x04C11DB7, ffi.new "int32_t[256]", 0
  for byte = 0, 255 do
    local rest = bit.lshift(byte, 24)
    for _ = 1, 8 do
      local carry = bit.arshift(rest, 31) -- all ones or zero
      rest = bit.bxor(bit.lshift(rest, 1), bit.band(carry, POLYNOMIAL))
    end
    of_byte[byte] = rest
  end
  local function add(byte)
    crc = bit.bxor(bit.lshift(crc, 8), of_byte[bit.bxor(bit.rshift(crc, 24), byte)])
  end
  local bytes, length = ffi.cast("const uint8_t *", text), #text
  for i = 0, length - 1 do add(bytes[i]) end
  while length > 0 do
    add(length % 256)
    length = math.floor(length / 256)
  end
  return bit.bnot(crc) % 2 ^ 32
end

local function load_library(dir)
  local ok, lib = pcall(ffi.load, dir .. "/libkvlab.so")
  if ok then return lib end
  error(("%s/libkvlab.so cannot be loaded; `./kvlab build` builds it\n  %s")
    :format(dir, lib), 0)
end

local declarations = read_declarations()

-- For Lua the field `shape` of a tensor is called `sizes`: t.shape is an object that
-- knows how many dims there are (kvlab.tensor.sizes), which an array in C does not.
local struct = assert(declarations:find("typedef struct kvl_tensor {", 1, true))
local before, after = declarations:find("shape[6];", struct, true)
ffi.cdef(declarations:sub(1, before - 1) .. "sizes[6];" .. declarations:sub(after + 1))
local C = load_library(M.paths.library_dir)
M.C = C
if C.kvl_abi() ~= cksum(declarations) then
  error(("%s/libkvlab.so was built with other headers than those in %s/runtime; "
    .. "`./kvlab build` rebuilds it"):format(M.paths.library_dir, M.paths.root), 0)
end

--- Raise the library's own words when `status` is negative; otherwise return it.
---@param status integer
---@param level? integer  which caller to blame: 2 (the caller's caller) unless given, or
--                        the first one further out that is not part of kvlab
function M.check(status, level)
  if status >= 0 then return status end
  options.fail(ffi.string(C.kvl_last_error()), (level or 2) + 2)
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
    or options.fail(("dtype is %s, expected one of f32 f16 bf16 f8e4m3 i32 i64 u8 u64")
      :format(type(name) == "string" and name or options.shown(name)), (level or 2) + 2)
end

return M
