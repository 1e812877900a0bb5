--- A short run of the fuzzer (spec/fuzz.lua says how to make a long one): no call crashes
-- or hangs. Where a user calls most, no error is without a name, either.
local fuzz = require "spec.fuzz"
local kv = require "kvlab"

if not io.open(kv.paths.root .. "/docs/api_lua.md") then return end -- a bundle

local CALLS, SEED = 3000, 1

-- Functions that name the argument in every error. A change may only add to them.
local NAMED = { "^tensor:", "^device:", "^kv%.ops%.", "^kv%.vllm%.", "^Sequence:",
  "^Batch:",
  "^Cache:", "^Store:", "^Prefetch:", "^IndexCache:", "^kv%.tensor", "^kv%.full",
  "^kv%.zeros", "^kv%.ones", "^kv%.pinned", "^kv%.arange", "^kv%.rand", "^kv%.from",
  "^kv%.scope", "^kv%.lasting", "^kv%.device", "^kv%.graph", "^kv%.safetensors",
  "^kv%.cache", "^kv%.attention", "^kv%.store", "^kv%.prefetch", "^kv%.index_cache",
  "^kv%.trace%.generate", "^kv%.is_tensor" }

describe("the documented functions", function()
  it("neither crash nor hang, and name what is wrong", function()
    local result = fuzz.campaign(CALLS, SEED)
    assert.same({}, result.ends)
    assert.is_true(result.calls >= CALLS)
    local found = {}
    for _, failure in ipairs(result.functions) do
      for _, pattern in ipairs(NAMED) do
        if failure:find(pattern) then found[#found + 1] = failure end
      end
    end
    assert.same({}, found)
  end)
end)
