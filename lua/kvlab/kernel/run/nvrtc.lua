--- Compiles CUDA at run time with NVRTC, the compiler that comes with CUDA as a library.
-- It is opened when it is first needed, and needs no GPU.
local ffi = require "ffi"
local files = require "kvlab.files"
local library = require "kvlab.library"

local M = {}

ffi.cdef [[
typedef struct _nvrtcProgram *nvrtcProgram;
int nvrtcCreateProgram(nvrtcProgram *program, const char *source, const char *name, int n,
                       const char *const *headers, const char *const *names);
int nvrtcCompileProgram(nvrtcProgram program, int n, const char *const *options);
int nvrtcGetCUBINSize(nvrtcProgram program, size_t *size);
int nvrtcGetCUBIN(nvrtcProgram program, char *cubin);
int nvrtcGetPTXSize(nvrtcProgram program, size_t *size);
int nvrtcGetPTX(nvrtcProgram program, char *ptx);
int nvrtcGetProgramLogSize(nvrtcProgram program, size_t *size);
int nvrtcGetProgramLog(nvrtcProgram program, char *log);
int nvrtcDestroyProgram(nvrtcProgram *program);
int nvrtcVersion(int *major, int *minor);
const char *nvrtcGetErrorString(int result);
void *dlopen(const char *path, int flags);
]]

-- RTLD_NOW | RTLD_NODELETE of Linux
local RESOLVE_AND_KEEP = 0x1002

-- Headers of the toolkit that kernels/cuda/nvrtc.cuh replaces.
local TOOLKIT = { "cuda.h", "cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h",
                  "cuda_runtime.h", "stddef.h", "stdint.h", "type_traits" }

-- The library's names in CUDA's packages, the newest first; still older versions lack
-- what is needed.
local NAMES = { "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so" }
local opened

--- The library; nil and why if there is none.
function M.open()
  if opened then return opened end
  local homes = { "" }
  local home = os.getenv "CUDA_HOME"
  if home and home ~= "" then homes[#homes + 1] = home .. "/lib64/" end
  homes[#homes + 1] = "/usr/local/cuda/lib64/"
  for _, name in ipairs(NAMES) do
    for _, folder in ipairs(homes) do
      local ok, lib = pcall(ffi.load, folder .. name)
      if ok then
        -- It stays loaded until the process ends, because it never frees what it
        -- allocates on loading: if it were unloaded with its Lua state, it would leak.
        ffi.C.dlopen(folder .. name, RESOLVE_AND_KEEP)
        opened = lib
        return lib
      end
    end
  end
  return nil, "NVRTC is not here: libnvrtc.so of CUDA 12 or 13; it comes with the CUDA "
    .. "Toolkit, or as the package cuda-nvrtc-13-0 or nvidia-cuda-nvrtc"
end

--- "13.0", or nil and why.
function M.version()
  local lib, why = M.open()
  if not lib then return nil, why end
  local major, minor = ffi.new "int[1]", ffi.new "int[1]"
  lib.nvrtcVersion(major, minor)
  return ("%d.%d"):format(major[0], minor[0])
end

local function log_of(lib, program)
  local size = ffi.new "size_t[1]"
  lib.nvrtcGetProgramLogSize(program, size)
  local text = ffi.new("char[?]", tonumber(size[0]) + 1)
  lib.nvrtcGetProgramLog(program, text)
  return ffi.string(text)
end

--- Compiles a source to a cubin, or for a virtual architecture to PTX.
---@param source string
---@param target string  "sm_90a", or "compute_80"
---@return string|nil image  nil: it could not be compiled
---@return string|nil why
function M.compile(source, target)
  local lib, why = M.open()
  if not lib then return nil, why end
  local root = library.paths.root
  local header = files.read(root .. "/kernels/cuda/nvrtc.cuh")
  if not header then return nil, "kernels/cuda/nvrtc.cuh cannot be read" end
  local program, texts = ffi.new "nvrtcProgram[1]", {}
  for i = 1, #TOOLKIT do texts[i] = header end
  local headers = ffi.new("const char *[?]", #TOOLKIT, texts)
  local names = ffi.new("const char *[?]", #TOOLKIT, TOOLKIT)
  local status = lib.nvrtcCreateProgram(program, source, "kernel.cu", #TOOLKIT, headers,
    names)
  if status ~= 0 then return nil, ffi.string(lib.nvrtcGetErrorString(status)) end
  local list = { "--gpu-architecture=" .. target, "-std=c++17",
                 "--extra-device-vectorization", "-default-device",
                 "-I" .. root .. "/kernels", "-I" .. root .. "/runtime" }
  local flags = ffi.new("const char *[?]", #list, list)
  status = lib.nvrtcCompileProgram(program[0], #list, flags)
  local image
  if status == 0 then
    local size = ffi.new "size_t[1]"
    local is_ptx = target:find "^compute_" ~= nil
    lib[is_ptx and "nvrtcGetPTXSize" or "nvrtcGetCUBINSize"](program[0], size)
    local bytes = ffi.new("char[?]", size[0])
    lib[is_ptx and "nvrtcGetPTX" or "nvrtcGetCUBIN"](program[0], bytes)
    image = ffi.string(bytes, size[0])
  else
    why = "NVRTC failed: " .. log_of(lib, program[0]):sub(1, 2000)
  end
  lib.nvrtcDestroyProgram(program)
  return image, why
end

return M
