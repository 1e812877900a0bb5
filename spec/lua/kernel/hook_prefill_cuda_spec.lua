--- The hooks of hook_spec.lua in the prefill of a GPU.
local cases = require "spec.hook_cases"
local kv = require "kvlab"

describe("a hook of attention in CUDA #gpu", function()
  if not kv.cuda_available() then return end
  cases.known("cuda", nil, { phase = "prefill" })
end)
