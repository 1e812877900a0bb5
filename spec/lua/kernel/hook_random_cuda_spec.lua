--- Random hooks on a GPU, against attention by the book.
local cases = require "spec.hook_cases"
local kv = require "kvlab"
local support = require "spec.support"

describe("a random hook of attention in CUDA #gpu", function()
  if not kv.cuda_available() then return end
  cases.random("cuda", nil, support.is_full and 40 or 12)
end)
