--- Builds kvlab. `./kvlab build` runs this file and then make; to do it by hand:
--
--   premake5 gmake2 && make -C build config=release -j8      (premake5 --help: options)
--
-- Premake writes a makefile only when its text changes, so running it again is free.
-- What it does not do is recompile when only a flag has changed: see `rebuild_on`.

newoption {
  trigger = "cuda", value = "MODE", default = "off",
  description = "Compile the CUDA plug-in libkvlab_cuda.so",
  allowed = { { "on", "with nvcc" }, { "off", "everything runs on the CPU" } },
}
newoption {
  trigger = "cuda-arch", value = "LIST", default = "80,90a",
  description = "GPU architectures to compile for, separated by commas; 80:90 is code of "
    .. "sm_80 that runs on sm_90",
}
newoption { trigger = "werror", description = "Treat warnings as errors" }

local cuda_home = os.getenv("CUDA_HOME") or "/usr/local/cuda"
local is_x86 = os.outputof("uname -m") == "x86_64"

--- The instruction sets every CPU kernel is compiled for, from the slowest to the fastest;
-- the runtime picks one at start.
local isas = { { name = "plain", needs = "" } }
if is_x86 then
  local avx2 = "avx2 fma f16c"
  isas[2] = { name = "avx2", needs = avx2 }
  isas[3] = { name = "avx512", needs = avx2 .. " avx512f avx512bw avx512dq avx512vl",
              flags = " -mprefer-vector-width=512" }
end

--- A hostile build has one of them, the fastest that this machine runs: it checks what the
-- kernels' source does with memory, and all instruction sets are compiled from one source.
local processor = (os.outputof "grep -m1 ^flags /proc/cpuinfo" or "") .. " "
local hostile_isa
for _, isa in ipairs(isas) do
  local runs_here = true
  for word in isa.needs:gmatch "%S+" do
    runs_here = runs_here and processor:find(" " .. word .. " ", 1, true)
  end
  if runs_here then hostile_isa = isa.name end
end

--- Makes a project recompile when its compile command changes, in that configuration
-- only, and link again when its makefile (link flags, list of files) changes. make reads
-- this text once per configuration; the comment keeps Premake from merging the copies.
local function rebuild_on(compile_command)
  makesettings { ([[
# %%{cfg.buildcfg}
.DELETE_ON_ERROR:
FLAGS_NOW := %s
ifneq ($(FLAGS_NOW),$(file <$(OBJDIR)/flags))
  $(shell mkdir -p $(OBJDIR) && rm -f $(OBJDIR)/*.o $(OBJDIR)/*.gch)
  $(file >$(OBJDIR)/flags,$(FLAGS_NOW))
endif
LDDEPS += $(firstword $(MAKEFILE_LIST))]]):format(compile_command) }
end

workspace "kvlab"
  location "build"
  configurations { "release", "debug", "hostile" }
  symbols "On"
  includedirs { "runtime", "kernels", "build" }
  targetdir "build/bin/%{cfg.buildcfg}"
  objdir "build/obj/%{cfg.buildcfg}/%{prj.name}"
  targetprefix ""
  filter "configurations:debug or hostile"
    defines { "KVL_DEBUG" }
  filter "configurations:hostile"
    defines { "KVL_HOSTILE" }
  filter {}

-- Specs spend most of their time in these files, so a hostile build optimises them. It goes
-- without the passes that gain them nothing and take half of the time to compile.
local BUSY = "kernels/cpu/linear/matmul.c or kernels/cpu/attention/paged_attention.c"
local BUSY_LEVEL = "-O2 -fira-region=one -fno-gcse -fno-tree-pre -fno-schedule-insns2 "
  .. "-fno-ipa-cp"

--- What every C project shares.
local function c_project(kind_)
  kind(kind_)
  language "C"
  buildoptions {
    "-std=gnu17", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno",
    "-ffp-contract=off", "-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes",
    "-Wmissing-prototypes", "-Wpointer-arith", "-Werror=implicit-function-declaration",
  }
  if _OPTIONS["werror"] then buildoptions { "-Werror" } end
  -- Debug information has lines and functions, without variables: most of these are in
  -- registers, or gone, and describing them takes a quarter of the time to compile.
  filter "configurations:release"
    buildoptions { "-O3", "-g1" }
  filter "configurations:debug"
    buildoptions { "-O0" }
  filter "configurations:hostile"
    local sanitize = "-fsanitize=address,undefined"
    buildoptions { "-O1", "-g1", sanitize, "-fno-sanitize-recover=undefined",
      "-fno-omit-frame-pointer" }
    linkoptions { sanitize }
  filter { "configurations:hostile", "files:" .. BUSY }
    buildoptions { BUSY_LEVEL }
  filter {}
  rebuild_on("$(CC) $(ALL_CFLAGS) busy=" .. BUSY_LEVEL)
end

for _, isa in ipairs(isas) do
  project("cpu_" .. isa.name)
    c_project "StaticLib"
    targetprefix "lib"
    targetdir "build/obj/%{cfg.buildcfg}"
    files { "kernels/cpu/**.c" }
    -- What they all include is read once: the intrinsics take 0.1 to 0.2 s of each file.
    pchheader "../kernels/cpu/vec.h"
    defines { "KVL_ISA=" .. isa.name, "KVL_ISA_" .. isa.name:upper() .. "=1" }
    buildoptions { isa.needs:gsub("%S+", "-m%0") .. (isa.flags or "") }
    -- Few x86 machines are left that run the plain code. -O3 takes twice as long.
    filter "configurations:release"
      if is_x86 and isa.name == "plain" then buildoptions { "-O2" } end
    filter {}
    if isa.name ~= hostile_isa then removeconfigurations { "hostile" } end
    -- A fresh archive each time: `ar -r` alone would keep the objects of deleted files.
    makesettings { 'LINKCMD = rm -f "$@" && $(AR) -rcs "$@" $(OBJECTS)' }
end

project "kvlab_runtime"
  c_project "SharedLib"
  targetprefix "lib"
  targetname "kvlab"
  files { "runtime/*.c", "runtime/*/*.c" }
  removefiles { "runtime/main.c" }
  prebuildcommands { "@../tools/abi.sh ." }
  for _, isa in ipairs(isas) do
    filter(isa.name ~= hostile_isa and "configurations:not hostile" or {})
      links { "cpu_" .. isa.name }
      defines { "KVL_HAS_ISA_" .. isa.name:upper() }
  end
  filter {}
  links { "openblas", "lmdb", "hiredis", "pthread", "dl", "m" }
  -- nodelete: stock luajit closes libraries at exit, under the feet of OpenMP's threads.
  linkoptions { "-fopenmp", "-Wl,--no-undefined", "-Wl,-z,nodelete" }

project "kvlab"
  c_project "ConsoleApp"
  files { "runtime/main.c" }
  buildoptions { "-isystem /usr/include/luajit-2.1" }
  dependson { "kvlab_runtime" }
  links { "dl", "m" }
  -- All of LuaJIT, exported: C modules such as cjson.so find the Lua API in here.
  -- An old-style rpath, because it also serves the libraries of our libraries (bundles).
  -- The LuaJIT that tools/get_luajit.sh built, where it is there.
  linkoptions {
    "-rdynamic", "-L../.deps/luajit",
    "-Wl,--whole-archive -l:libluajit-5.1.a -Wl,--no-whole-archive",
    "-Wl,--disable-new-dtags", "-Wl,-rpath,'$$ORIGIN:$$ORIGIN/../lib'",
  }
  makesettings { "LDDEPS += $(wildcard ../.deps/luajit/libluajit-5.1.a)" }

--- What nvcc compiles. It takes three seconds to begin a file, so files of a folder that need
-- little more than that are compiled four at a time, in a unit that includes them.
local TO_A_UNIT = 4
local LARGE = { paged_attention = true, vllm_attention = true }
local function cuda_sources()
  local sources, folders, small, wanted = {}, {}, {}, {}
  local all = table.join(os.matchfiles "kernels/cuda/**.cu", os.matchfiles "runtime/cuda/*.cu")
  table.sort(all)
  for _, source in ipairs(all) do
    local folder = path.getdirectory(source)
    if folder:find "/instances$" or LARGE[path.getbasename(source)] then
      sources[#sources + 1] = source
    else
      if not small[folder] then folders[#folders + 1], small[folder] = folder, {} end
      table.insert(small[folder], ('#include "../../%s"\n'):format(source))
    end
  end
  for _, folder in ipairs(folders) do
    local name = folder:gsub("/", "_")
    for i = 1, #small[folder], TO_A_UNIT do
      local last = math.min(i + TO_A_UNIT - 1, #small[folder])
      local text = table.concat(small[folder], "", i, last)
      local unit = ("build/units/%s_%d.cu"):format(name, (i - 1) / TO_A_UNIT + 1)
      os.mkdir "build/units"
      if io.readfile(unit) ~= text then io.writefile(unit, text) end
      sources[#sources + 1], wanted[unit] = unit, true
    end
  end
  for _, unit in ipairs(os.matchfiles "build/units/*.cu") do
    if not wanted[unit] then os.remove(unit) end
  end
  io.writefile("build/units/list", table.concat(sources, "\n") .. "\n") -- tools/check_cuda.sh
  return sources
end
local cuda_list = cuda_sources()

if _OPTIONS["cuda"] == "on" then
  local gencode = {}
  for arch in _OPTIONS["cuda-arch"]:gmatch("[^,]+") do
    local from, to = arch:match "^(%w+):(%w+)$"
    gencode[#gencode + 1] = ("-gencode arch=compute_%s,code=sm_%s"):format(from or arch,
      to or arch)
  end

  project "kvlab_cuda"
    kind "SharedLib"
    language "C++"
    targetprefix "lib"
    pic "Off" -- nvcc wants it spelled -Xcompiler -fPIC
    files(cuda_list)
    symbols "Off" -- of the host's part; the device's has its lines
    prebuildcommands { "@../tools/abi.sh ." }
    -- Compressed, the device code is six times smaller; a bundle has to travel.
    buildoptions { "-std=c++17", "-lineinfo", "--threads 2", "-Xfatbin -compress-all",
      "-Xcompiler -fPIC,-fvisibility=hidden,-Wall" }
    buildoptions(gencode)
    if _OPTIONS["werror"] then buildoptions { "-Werror all-warnings" } end
    filter "configurations:debug or hostile"
      buildoptions { "-O0" }
    filter "configurations:release"
      buildoptions { "-O3" }
    filter "files:**.cu"
      buildmessage "%{file.name}"
      buildcommands {
        '../tools/nvcc_checked.sh $(NVCC) $(ALL_CXXFLAGS) -o "$@" -MF "$(@:%.o=%.d)" -c "$<"' }
      buildoutputs { "$(OBJDIR)/%{file.basename}.o" }
    filter {}
    makesettings { "NVCC := " .. cuda_home .. "/bin/nvcc" }
    rebuild_on "$(NVCC) $(ALL_CXXFLAGS)"
    libdirs { cuda_home .. "/lib64", cuda_home .. "/lib" }
    links { "cudart_static", "cublas", "cublasLt", "pthread", "dl", "rt" }
    -- cuBLAS is found on the target machine: in LD_LIBRARY_PATH or the usual folder.
    linkoptions { "-static-libstdc++", "-static-libgcc", "-Wl,--no-as-needed",
      "-Wl,-rpath," .. cuda_home .. "/lib64", "-Wl,-rpath,/usr/local/cuda/lib64",
      "-Wl,--enable-new-dtags", "-Wl,--exclude-libs,ALL", "-Wl,-z,nodelete",
      "-Wl,-z,defs" } -- a kernel without an instance is an error here, not where it runs
end
