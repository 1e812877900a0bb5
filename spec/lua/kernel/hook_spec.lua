--- bias, mask, log_weight and emit against attention by the book, on every printer.
local cases = require "spec.hook_cases"
local compiler = require "kvlab.kernel.run.compiler"
local kv = require "kvlab"
local support = require "spec.support"

describe("a hook of attention in Lua #release", function()
  cases.known("cpu", "lua", { all = true })
  cases.random("cpu", "lua", 30)
end)

describe("a hook of attention in C", function()
  if not compiler.find() then
    pending "there is no C compiler"
    return
  end
  cases.known "cpu"
  cases.random("cpu", nil, support.is_full and 12 or support.is_hostile and 3 or 5)
end)

describe("a hook of attention in CUDA #gpu", function()
  if not kv.cuda_available() then return end
  cases.known("cuda", nil, { phase = "decode" })
end)
