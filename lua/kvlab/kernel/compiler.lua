--- Compiles C at run time with the system's compiler: $CC, else gcc, else cc. A CUDA
-- kernel is compiled by kernel/nvrtc.lua.
local ffi = require "ffi"
local files = require "kvlab.files"
local library = require "kvlab.library"

local M = {}

-- A compiler that takes longer is ended.
M.seconds_max = 60

local FLAGS = "-std=gnu17 %s -fPIC -shared -fopenmp -fvisibility=hidden -fno-math-errno "
  .. "-fno-trapping-math -ffp-contract=fast -fwrapv -w -DNDEBUG"
local AVX2 = " -mavx2 -mfma -mf16c"
local ISA_FLAGS = { plain = "", avx2 = AVX2, avx512 = AVX2 .. " -mavx512f -mavx512bw "
  .. "-mavx512dq -mavx512vl -mprefer-vector-width=512" }
-- Letters of a source beyond which -O3 takes minutes: it gets -O1.
local LONG = 200000
-- Floats in a vector of each.
M.LANES = { plain = 4, avx2 = 8, avx512 = 16 }

ffi.cdef [[
int access(const char *path, int mode);
char *mkdtemp(char *template);
]]
local CAN_RUN = 1

--- Whether a command can be run. It needs no shell, so that it is right where no process
-- can be started.
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
  return FLAGS:format(#source > LONG and "-O1" or "-O3") .. ISA_FLAGS[isa]
    .. " -DKVL_ISA=" .. isa .. " -DKVL_ISA_" .. isa:upper() .. "=1"
end

--- A new folder; nil and why there is none.
local function make_temporary()
  local template = (os.getenv "TMPDIR" or "/tmp") .. "/kvlab.XXXXXX"
  local path = ffi.new("char[?]", #template + 1, template)
  if ffi.C.mkdtemp(path) == nil then
    local _, why = io.open(template, "wb") -- for the system's words
    return nil, ("no temporary folder can be made: %s"):format(tostring(why))
  end
  return ffi.string(path)
end

--- The system's words if this process has hardly any files left to open; else nil. A
-- shell needs about ten, and what it says of that does not reach us.
local function few_files()
  local list, why = {}, nil
  for i = 1, 16 do
    list[i], why = io.open("/dev/null", "rb")
    if not list[i] then break end
  end
  for _, file in ipairs(list) do file:close() end
  return why
end

--- What a command that failed said, and how it ended.
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

--- Runs the compiler in a folder that has kernel.c.
local function run(cc, flags, folder)
  local root, log, library_path = library.paths.root, folder .. "/log",
    folder .. "/kernel.so"
  local status = os.execute(("timeout %d %s %s %s >%s 2>&1"):format(M.seconds_max,
    files.shell_line { cc }, flags, files.shell_line { "-I" .. root .. "/kernels",
      "-I" .. root .. "/runtime", "-o", library_path, folder .. "/kernel.c" },
    files.shell_line { log }))
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
  if ok then image, why = run(cc, M.flags(isa, source), folder) end
  os.execute(files.shell_line { "rm", "-rf", folder })
  return image, why
end

return M
