--- Compiles C at run time with the system's compiler: $CC, else gcc, else cc. A CUDA
-- kernel is compiled by kernel/nvrtc.lua.
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

local found

--- The compiler's command; nil if there is none.
---@return string|nil
function M.find()
  if found == nil then
    found = false
    local own = os.getenv "CC"
    for _, name in ipairs { own and own ~= "" and own or "gcc", "cc" } do
      if os.execute(("command -v %s >/dev/null 2>&1"):format(files.shell_line { name }))
         == 0 then
        found = name
        break
      end
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

local function make_temporary()
  local pipe = assert(io.popen('mktemp -d "${TMPDIR:-/tmp}/kvlab.XXXXXX" 2>/dev/null'))
  local folder = pipe:read "*l"
  pipe:close()
  return folder
end

--- Compiles a source to a shared library.
---@param source string
---@param isa string
---@return string|nil image  nil: it could not be compiled
---@return string|nil why    the compiler's words
function M.compile(source, isa)
  local cc, folder = M.find(), make_temporary()
  if not cc then return nil, "there is no C compiler: install gcc, or name one in CC" end
  if not folder then return nil, "no temporary folder can be made" end
  local root = library.paths.root
  local ok, why = pcall(files.write, folder .. "/kernel.c", source)
  local image
  if ok then
    local status = os.execute(("timeout %d %s %s %s >%s 2>&1"):format(M.seconds_max,
      files.shell_line { cc }, M.flags(isa, source), files.shell_line { "-I" .. root
        .. "/kernels",
        "-I" .. root .. "/runtime", "-o", folder .. "/kernel.so", folder .. "/kernel.c" },
      files.shell_line { folder .. "/log" }))
    if status == 0 then
      image = files.read(folder .. "/kernel.so")
    else
      why = files.read(folder .. "/log") or ""
      if math.floor(status / 256) == 124 or status == 124 then
        why = ("it took more than %d s\n%s"):format(M.seconds_max, why)
      end
      why = why:sub(1, 2000):match "^(.-)%s*$"
      why = ("%s failed: %s"):format(cc, why == "" and "it said nothing" or why)
    end
  end
  os.execute(files.shell_line { "rm", "-rf", folder })
  return image, why
end

return M
