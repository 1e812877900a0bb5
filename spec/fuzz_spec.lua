--- A short run of the fuzzer (spec/fuzz.lua says how to make a long one): no call crashes
-- or hangs, and every error names what is wrong and blames no line of kvlab itself.
local fuzz = require "spec.fuzz"
local kv = require "kvlab"
local support = require "spec.support"

if not io.open(kv.paths.root .. "/docs/api_lua.md") then return end -- a bundle

local CALLS, SEED = support.is_full and 6000 or 3000, 1

describe("the documented functions", function()
  it("neither crash nor hang, and name what is wrong", function()
    if support.is_hostile then return pending(support.SAME_PROGRAMS) end
    local result = fuzz.campaign(CALLS, SEED)
    assert.same({}, result.ends)
    assert.is_true(result.calls >= CALLS)
    assert.same({}, result.functions)
  end)

  it("are all called", function()
    assert.same({}, fuzz.left_out())
  end)
end)
