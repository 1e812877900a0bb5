--- The kernels that OpenBLAS chooses: those for the processor, or what the user asks for.
local ffi = require "ffi"
local support = require "spec.support"
local temporary = require "spec.temporary"

local executable = (package.loaded["kvlab.paths"] or {}).executable

ffi.cdef "char *openblas_get_config(void);"

describe("OpenBLAS", function()
  if not executable then return end

  --- The chosen kernels and the better ones, "nil" if there are none, in a process whose
  -- environment is changed by `env WORDS`.
  local function kernels(words)
    local script = temporary.file([[
      local ffi, kv = require "ffi", require "kvlab"
      local better = kv.C.kvl_cpu_blas_better()
      print(ffi.string(kv.C.kvl_cpu_blas()), better ~= nil and ffi.string(better) or nil)
    ]], "blas.lua")
    local pipe = io.popen(("env %s %s run %s --device=cpu"):format(words,
      executable, script))
    local text = pipe:read "*a"
    pipe:close()
    return text:match "^(%S+)%s+(%S+)"
  end

  it("has kernels for the processor's instruction sets", function()
    local chosen, better = kernels "-u OPENBLAS_CORETYPE -u OMP_WAIT_POLICY"
    assert.matches("^%w+$", chosen)
    assert.equal("nil", better)
    assert.equal("nil", select(2, kernels "-u OPENBLAS_CORETYPE OMP_WAIT_POLICY=active"))
  end)

  it("has the kernels that the user asks for, slow ones, too", function()
    if not ffi.string(ffi.C.openblas_get_config()):find "DYNAMIC_ARCH" then return end
    local chosen, better = kernels "OPENBLAS_CORETYPE=Prescott"
    assert.equal("Prescott", chosen)
    local isas = table.concat(support.isas(), " ")
    assert.equal(isas:find "avx512" and "SkylakeX" or isas:find "avx2" and "Haswell"
      or "nil", better)
  end)
end)
