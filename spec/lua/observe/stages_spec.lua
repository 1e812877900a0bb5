--- Stages of a decode step: time belongs to the innermost stage.
local kv = require "kvlab"
local stages = require "kvlab.observe.stages"

local function wait_us(us)
  local stop = kv.C.kvl_clock_ns() + us * 1000
  repeat until kv.C.kvl_clock_ns() >= stop
end

--- What a decode step of a policy takes, by stage.
local function times_of(policy, is_apart)
  local s = kv.synthetic { device = "cpu", shape = "small", layers = 2, context = 256,
                           dtype = "f32", decode_policy = policy }
  local seq = s:sequence(100)
  local timed = stages.new(s.attention)
  s:decode { seq } -- is not timed
  timed:reset()
  timed:begin(is_apart ~= false)
  s:decode { seq }
  timed:finish()
  local us = timed.us
  timed:close()
  s:close()
  return us
end

--- The same of the first of a few runs in which no other stage than `stage` took as long
-- as it waits, or of the last one: other programs may delay any of them, now and then.
local function quiet_times_of(make, stage, waited_us)
  local us, is_quiet
  for _ = 1, 8 do
    us, is_quiet = times_of(make()), true
    for _, other in ipairs(stages.NAMES) do
      is_quiet = is_quiet and (other == stage or (us[other] or 0) < waited_us)
    end
    if is_quiet then break end
  end
  return us
end

local function waits(field, us, more)
  local def = { name = "waits", decode = true, own_bytes = 0, defaults = { ratio = 0.3 },
                score = function(_, ctx) return ctx:new_scores(1):fill_(0) end }
  for key, value in pairs(more or {}) do def[key] = value end
  local fn = def[field]
  def[field] = function(...)
    wait_us(us)
    if fn then return fn(...) end
  end
  return kv.policy.define(def) {}
end

describe("stages of a decode step", function()
  for field, stage in pairs { score = "score", on_decode_offload = "summary",
                              attention_begin = "other" } do
    it(("have the time of %s in %s alone, in each layer"):format(field, stage), function()
      local us = quiet_times_of(function() return waits(field, 20000) end, stage, 20000)
      assert.is_true(us[stage] >= 40000 and us.total >= us[stage], us[stage])
      for _, other in ipairs(stages.NAMES) do
        assert.is_true(other == stage or (us[other] or 0) < 20000, other)
      end
      assert.is_true(us.select > 0 and us.attend > 0)
    end)
  end

  it("have the score of a nested policy, too", function()
    package.loaded["policies.waits_inside"] = nil
    require("kvlab.named").give("policies", "waits_inside", "spec", kv.policy.define {
      name = "waits_inside", decode = true, defaults = { ratio = 0.3 },
      score = function(_, ctx)
        wait_us(20000)
        return ctx:new_scores(1):fill_(0)
      end,
    })
    local us = quiet_times_of(function()
      return kv.policy("layers", { base = "waits_inside", dense = 1 })
    end, "score", 20000)
    require("kvlab.named").give("policies", "waits_inside", nil, nil)
    assert.is_true(us.score >= 20000 and us.select < 20000, us.select)
  end)

  it("do not exist where a policy has none", function()
    local us = times_of(kv.policy "full")
    assert.is_nil(us.summary or us.score or us.select)
    assert.is_true(us.attend > 0 and us.other > 0)
    us = times_of(kv.policy "streaming_blocks")
    assert.is_nil(us.summary)
  end)

  it("are not taken apart unless asked for", function()
    local us = times_of(kv.policy "quest", false)
    assert.is_true(us.total > 0)
    assert.is_nil(us.score or us.attend or us.other)
  end)
end)
