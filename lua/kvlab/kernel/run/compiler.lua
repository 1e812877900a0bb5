--- Compiles C at run time with the system's compiler: $CC, else gcc, else cc. A CUDA
-- kernel is compiled by kernel/run/nvrtc.lua.
local cache = require "kvlab.kernel.run.cache"
local ffi = require "ffi"
local files = require "kvlab.files"
local library = require "kvlab.library"

local M = {}

-- A compiler that takes longer is stopped.
M.seconds_max = 60
-- How well kernels are optimised. Specs choose -Og.
M.level = "-O3"

local FLAGS = "-std=gnu17 %s -fPIC -shared -fopenmp -fvisibility=hidden -fno-math-errno "
  .. "-fno-trapping-math -ffp-contract=fast -fwrapv -w -DNDEBUG"
local AVX2 = " -mavx2 -mfma -mf16c"
local ISA_FLAGS = { plain = "", avx2 = AVX2, avx512 = AVX2 .. " -mavx512f -mavx512bw "
  .. "-mavx512dq -mavx512vl -mprefer-vector-width=512" }
-- The header that kernels begin with. Half of the time of a compilation goes into what it
-- includes, so kernels include it precompiled. A process that compiles many kernels
-- precompiles it if no other process has; this pays off from the fifth kernel on.
local HEADER, FEW = "cpu/expression.h", 4
-- Above so many letters of source, -O3 takes minutes, so -O1 is used.
local LONG = 200000
-- Floats in a vector of each instruction set.
M.LANES = { plain = 4, avx2 = 8, avx512 = 16 }

ffi.cdef [[
int access(const char *path, int mode);
char *mkdtemp(char *template);
]]
local CAN_RUN = 1

--- Whether a command can be run. It starts no process, so it is right even if none can be
-- started.
local function is_command(name)
  if name:find("/", 1, true) then return ffi.C.access(name, CAN_RUN) == 0 end
  for folder in ((os.getenv "PATH" or "") .. ":"):gmatch "([^:]*):" do
    if ffi.C.access(("%s/%s"):format(folder == "" and "." or folder, name), CAN_RUN) == 0
    then
      return true
    end
  end
  return false
end

local found

--- The compiler's command; nil if there is none.
---@return string|nil
function M.find()
  if found == nil then
    local own = os.getenv "CC"
    found = false
    for _, name in ipairs { own and own ~= "" and own or "gcc", "cc" } do
      if not found and is_command(name) then found = name end
    end
  end
  return found or nil
end

--- For specs: forget what was found.
function M.forget() found = nil end

--- The flags for an instruction set and a source.
function M.flags(isa, source)
  return FLAGS:format(#source > LONG and "-O1" or M.level) .. ISA_FLAGS[isa]
    .. " -DKVL_ISA=" .. isa .. " -DKVL_ISA_" .. isa:upper() .. "=1"
end

--- A new folder; nil and why there is none.
---@param path? string  what its path begins with
local function make_temporary(path)
  local template = (path or (os.getenv "TMPDIR" or "/tmp") .. "/kvlab") .. ".XXXXXX"
  local made = ffi.new("char[?]", #template + 1, template)
  if ffi.C.mkdtemp(made) == nil then
    local _, why = io.open(template, "wb") -- for the system's words
    return nil, ("no temporary folder can be made: %s"):format(tostring(why))
  end
  return ffi.string(made)
end

--- The system's error text if this process can hardly open more files; else nil. A shell
-- needs about ten files, and its own error would not reach us.
local function few_files()
  local list, why = {}, nil
  for i = 1, 16 do
    list[i], why = io.open("/dev/null", "rb")
    if not list[i] then break end
  end
  for _, file in ipairs(list) do file:close() end
  return why
end

--- The output of a command that failed, and how it ended.
local function words_of(cc, status, log)
  local code, said = math.floor(status / 256), (files.read(log) or ""):sub(1, 2000)
  said = said:match "^(.-)%s*$"
  if code == 124 then
    said = ("it took more than %d s\n%s"):format(M.seconds_max, said)
  end
  if said == "" then
    said = few_files() or code > 128 and ("it was ended by signal %d"):format(code - 128)
      or ("it said nothing, and ended with status %d"):format(code)
  end
  return ("%s failed: %s"):format(cc, said:match "^(.-)%s*$")
end

--- Runs the compiler. Returns its exit status.
---@param words string[]  its files and what it makes of them
local function run(cc, flags, words, log)
  return os.execute(("timeout %d %s %s %s >%s 2>&1"):format(M.seconds_max,
    files.shell_line { cc }, flags, files.shell_line(words), files.shell_line { log }))
end

local function includes()
  local root = library.paths.root
  return "-I" .. root .. "/kernels", "-I" .. root .. "/runtime"
end

local compiled = 0        -- kernels of this process
local precompiled_of = {} -- folders by flags; false if one cannot be made

--- Precompiles the header into a folder, unless another process is faster.
local function precompile(cc, flags, folder)
  local part = make_temporary(folder)
  if not part then return end
  local kernels, runtime = includes()
  files.make_folder(part .. "/cpu")
  files.write(part .. "/" .. HEADER, ("#include \"%s/kernels/%s\"\n"):format(
    library.paths.root, HEADER)) -- for those who include it again
  local status = run(cc, flags, { kernels, runtime, "-x", "c-header",
    library.paths.root .. "/kernels/" .. HEADER, "-o", part .. "/" .. cache.HEADER },
    "/dev/null")
  if status ~= 0 or not os.rename(part, folder) then
    os.execute(files.shell_line { "rm", "-rf", part })
  end
end

--- A folder to include from, in which the header is precompiled; nil if there is none.
-- Other compilers than gcc find nothing there, and gcc does not use what another version
-- of gcc has made.
local function precompiled(cc, flags)
  local folder = precompiled_of[flags] or cache.headers(table.concat({ cc, flags,
    ffi.string(library.C.kvl_code_headers()) }, "\0"))
  local path = folder and folder .. "/" .. cache.HEADER
  if folder and not files.real(path) then
    if compiled <= FEW or precompiled_of[flags] then return nil end
    precompile(cc, flags, folder)
  end
  precompiled_of[flags] = folder
  return path and files.real(path) and folder or nil
end

--- Compiles kernel.c in a folder. If the precompiled header is damaged, it compiles
-- without it.
local function compile_in(folder, cc, flags)
  local log, library_path = folder .. "/log", folder .. "/kernel.so"
  local kernels, runtime = includes()
  local words = { kernels, runtime, "-o", library_path, folder .. "/kernel.c" }
  compiled = compiled + 1
  local headers = precompiled(cc, flags)
  local status = headers and run(cc, flags, { "-I" .. headers, unpack(words) }, log)
  if status ~= 0 then status = run(cc, flags, words, log) end
  if status ~= 0 then return nil, words_of(cc, status, log) end
  local image = files.read(library_path)
  if image and image ~= "" then return image end
  return nil, ("%s ended without an error, but wrote %s to %s"):format(cc,
    image and "0 bytes" or "nothing", library_path)
end

--- Compiles a source to a shared library.
---@param source string
---@param isa string
---@return string|nil image  nil: it could not be compiled
---@return string|nil why    the compiler's words
function M.compile(source, isa)
  local cc = M.find()
  if not cc then return nil, "there is no C compiler: install gcc, or name one in CC" end
  local folder, problem = make_temporary()
  if not folder then return nil, problem end
  local ok, why = pcall(files.write, folder .. "/kernel.c", source)
  local image
  if ok then image, why = compile_in(folder, cc, M.flags(isa, source)) end
  for _, name in ipairs { "/kernel.c", "/kernel.so", "/log", "" } do
    os.remove(folder .. name)
  end
  return image, why
end

return M
