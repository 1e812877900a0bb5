--- The verb `cache`, and what the verb `doctor` says about kernels: which compilers
-- compile kernels from expressions, where these are stored, and which kernels OpenBLAS
-- has chosen.
--
--   kvlab cache         the folder, how many kernels are kept there, and their bytes
--   kvlab cache clear   removes them
local ffi = require "ffi"
local cache = require "kvlab.kernel.run.cache"
local compiler = require "kvlab.kernel.run.compiler"
local library = require "kvlab.library"
local nvrtc = require "kvlab.kernel.run.nvrtc"

local C = library.C

local M = {}

--- "3 kernels, 61440 bytes".
local function size_text()
  local count, bytes = cache.size()
  return ("%d kernel%s, %d bytes"):format(count, count == 1 and "" or "s", bytes)
end

--- Shows what is kept.
function M.show()
  local problem = cache.problem()
  io.write(cache.folder() or "no folder", "\n", size_text(), "\n")
  if problem then io.write("nothing is kept there: ", problem, "\n") end
  return 0
end

--- Removes what is kept. Fails if some of it is still there afterwards.
function M.clear()
  local removed = cache.clear()
  io.write(("removed %d kernel%s\n"):format(removed, removed == 1 and "" or "s"))
  local left = cache.size()
  if left == 0 then return 0 end
  io.stderr:write(("kvlab: %d cannot be removed from %s\n"):format(left, cache.folder()))
  return 1
end

local function line(state, name, text)
  io.write(("%-8s %-14s %s\n"):format(state, name, text))
end

--- The lines of `doctor`.
function M.doctor()
  local cc = compiler.find()
  if cc then
    line("ok", "kernels in C", cc)
  else
    line("none", "kernels in C", "expressions run in plain Lua on the CPU, and slowly; "
      .. "get it: apt-get install gcc, or name a compiler in CC")
  end
  local version, why = nvrtc.version()
  line(version and "ok" or "none", "NVRTC", version or why)
  local blas, better = C.kvl_cpu_blas(), C.kvl_cpu_blas_better()
  line(better == nil and "ok" or "slow", "OpenBLAS", "kernels for " .. ffi.string(blas)
    .. (better == nil and "" or "; OPENBLAS_CORETYPE=" .. ffi.string(better)
      .. " would ask for faster ones"))
  local problem = cache.problem()
  line(problem and "none" or "ok", "kernel cache", problem
    and "each process compiles its kernels anew: " .. problem
    or ("%s (%s)"):format(size_text(), cache.folder()))
  return 0
end

return M
