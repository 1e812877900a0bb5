--- Runs the kernels that are printed in CUDA on the CPU (spec/cuda_emulation.h), where
-- there is a C++ compiler: `emulation.with(fn)` does it for all kernels of expressions
-- that fn opens with kernel.chosen = "emulated". Attention's hooks, which are compiled
-- into hand-written kernels, cannot be run so; the CPU's take their place.
local cache = require "kvlab.kernel.run.cache"
local ffi = require "ffi"
local files = require "kvlab.files"
local kernel = require "kvlab.kernel.run.kernel"
local library = require "kvlab.library"
local support = require "spec.support"
local temporary = require "spec.temporary"

local M = {}
local ROOT = library.paths.root
local HEADER = ROOT .. "/spec/cuda_emulation.h"
local HEADER_MMA = ROOT .. "/spec/cuda_emulation_mma.h"

local ENTRY = [[

#undef kvl_code
static arguments emulated_arguments;
static void emulated_body(void) { emulated_kernel(emulated_arguments); }
extern "C" __attribute__((visibility("default")))
int kvl_code(const void *words, void *) {
  memcpy(&emulated_arguments, words, sizeof emulated_arguments);
  return emulate((const long long *)((const char *)words + sizeof emulated_arguments),
                 THREADS, emulated_body);
}
]]

--- Why nothing can be emulated; nil where it can. The emulated programs are the same in
-- every build, and under the sanitizers their coroutines take minutes.
---@return string|nil
function M.problem()
  if support.is_hostile then return support.SAME_PROGRAMS end
  local has = os.execute "command -v g++ >/dev/null 2>&1" == 0
  return not has and "there is no C++ compiler" or nil
end

local FLAGS = { "g++", "-std=c++17", "-Og", "-w", "-fPIC",
                "-I" .. ROOT .. "/kernels", "-I" .. ROOT .. "/runtime",
                "-I" .. ROOT .. "/spec" }
-- Halves are converted in hardware where that is there.
if support.isa() ~= "plain" then FLAGS[#FLAGS + 1] = "-mf16c" end

local function run(words, log)
  local all = { unpack(FLAGS) }
  for _, word in ipairs(words) do all[#all + 1] = word end
  return os.execute(("%s 2>%s"):format(files.shell_line(all), files.shell_line { log }))
end

-- The name of the precompiled header in its folder, without ".gch".
local NAME = cache.HEADER:match "^(.*)%.gch$"

--- Precompiles a header of this text into a folder.
local function precompile(text, folder)
  local path = folder .. "/" .. NAME
  files.make_folder(path:match "^(.*)/")
  files.write(path, text)
  run({ "-x", "c++-header", path }, "/dev/null")
  return path
end

local precompiled

--- The path of the emulation's header and that of all kernels, precompiled. They lie
-- beside the kernels that were compiled, so one process makes them for all. Where nothing
-- can be kept, each spec file makes its own.
local function header_path()
  if precompiled and files.real(precompiled) then return precompiled end
  local text = files.read(HEADER) .. '#include "cuda/expression.cuh"\n'
  local kept = cache.headers(table.concat({ text, files.read(HEADER_MMA),
    table.concat(FLAGS, " "), ffi.string(library.C.kvl_code_headers()) }, "\0"))
  if kept and not files.real(kept) then
    local part = kept .. "." .. tostring(ffi.C.getpid())
    precompile(text, part)
    if not os.rename(part, kept) then -- another process was faster
      os.execute(files.shell_line { "rm", "-rf", part })
    end
  end
  precompiled = kept and files.real(kept) and kept .. "/" .. NAME
    or precompile(text, temporary.folder())
  return precompiled
end

--- The image of a kernel's source; nil and what the compiler says.
function M.compile(source)
  local from, to, log = os.tmpname(), os.tmpname(), os.tmpname()
  files.write(from, source .. ENTRY)
  local status = run({ "-shared", "-include", header_path(), "-x", "c++", "-o", to,
    from }, log)
  local image, why = status == 0 and files.read(to), files.read(log)
  for _, path in ipairs { from, to, log } do os.remove(path) end
  return image or nil, why
end

--- Launches an emulated kernel: its grid follows its arguments.
local function launch(self, usual)
  if self.target ~= "emulated" then return usual(self) end
  local n, words = self.count, ffi.new("int64_t[?]", self.bytes / 8 + 3)
  self.count = 0
  ffi.copy(words, self.words, self.bytes)
  local at = self.bytes / 8
  words[at], words[at + 1], words[at + 2] = self.grid.x, self.grid.y, self.grid.z
  library.check(library.C.kvl_code_launch(self.code, self.device, words, self.bytes + 24,
    self.tensors, n, self.grid))
end

--- Replaces kernel[name] by a function that gets the usual one first, while fn runs.
local function replaced(owner, name, by, fn)
  local usual = owner[name]
  owner[name] = function(...) return by(usual, ...) end
  local ok, why = pcall(fn)
  owner[name] = usual
  if not ok then error(why, 0) end
end

--- Calls fn; kernels that it opens with kernel.chosen = "emulated" are emulated.
function M.with(fn)
  local header = cache.hash(files.read(HEADER) .. files.read(HEADER_MMA) .. ENTRY)
  local function named(usual, source, target)
    return usual(source, target == "emulated" and target .. header or target)
  end
  local function compiled(usual, source, target)
    if target == "emulated" then return M.compile(source) end
    return usual(source, target)
  end
  local function opened(usual, plan, dev, target)
    if plan.place == "hook" then target = kernel.target(dev) end
    return usual(plan, dev, target)
  end
  replaced(kernel, "name_of", named, function()
    replaced(kernel, "compile", compiled, function()
      replaced(kernel, "open", opened, function()
        replaced(kernel.Kernel, "launch", function(usual, self)
          return launch(self, usual)
        end, fn)
      end)
    end)
  end)
end

return M
