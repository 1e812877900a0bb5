--- The limits that cases are divided by: each is a function of the bench that measures it
-- and returns a row.
local kv = require "kvlab"
local plain = require "bench.lib.plain"

local M = {}

local GIB = 1024 * 1024 * 1024

--- Read bandwidth; see plain.lua.
---@param bytes? integer    how many; 2 GiB unless given
---@param written? integer  how many of them are written (0)
function M.R(b, bytes, written)
  return plain.row(b, bytes or 2 * GIB / (b.quick and 32 or 1), written or 0)
end

--- One copy from pinned host memory.
function M.L(b)
  local bytes = GIB / 4
  local far = kv.pinned(b.device, "u8", { bytes }):fill_(1)
  local near = kv.zeros(b.device, "u8", { bytes })
  local us = b:time(function() near:copy_(far) end, 30, true)
  assert(near:narrow(bytes - 1, 1):item() == 1, "the copy is wrong")
  return { name = "one copy of 256 MiB to the device", us = us, bytes = bytes }
end

--- n^3 GEMM with b transposed, through the matmul op; its first row is checked in f32.
-- Its operands are normally distributed; with `weights`, one of them is positive, like
-- the weights of attention.
local function gemm(b, n, dtype, out_dtype, tolerance, weights)
  local function matrix(seed)
    local m = kv.randn(b.device, dtype == "f32" and "f32" or "bf16", { n, n },
      { seed = seed })
    return m:cast(dtype)
  end
  local x, y = matrix(1), matrix(2)
  if weights then x = x:exp() end
  local out = kv.full(b.device, out_dtype, { n, n }, 0 / 0)
  local us = b:time(function() x:matmul_t(y, out) end, 30)
  kv.scope(function()
    local want = x:narrow(0, 1):cast("f32"):matmul_t(y:cast "f32")
    local off = (out:narrow(0, 1):cast "f32" - want):abs():max():item()
    assert(off <= tolerance * want:abs():max():item(), "the product is wrong")
  end)
  return { name = ("GEMM of %s into %s, %d^3"):format(dtype, out_dtype, n), us = us,
           flops = 2 * n ^ 3, note = weights and "one operand positive" }
end

--- The tensor cores; on the CPU, whose kernels multiply in f32, sgemm. A GPU lowers its
-- clock when products need much power, and products of positive numbers need less; the
-- limit is the faster of the two.
function M.T(b)
  if b.kind == "cpu" then return gemm(b, b.quick and 128 or 2048, "f32", "f32", 1e-4) end
  local n = b.quick and 1024 or 8192
  local normal = kv.scope(gemm, b, n, "bf16", "bf16", 0.01)
  local positive = kv.scope(gemm, b, n, "bf16", "bf16", 0.01, true)
  return positive.us < normal.us and positive or normal
end

function M.F(b)
  return gemm(b, (b.quick or b.kind == "cpu") and 1024 or 8192, "f8e4m3", "bf16", 0.01)
end

return M
