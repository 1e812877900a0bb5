--- A hot cache whose slots hold single tokens: lists of tokens over KV in host memory
-- give what they give over KV on the device. Without overlap the same attention runs over
-- the same rows: equal.
local kv = require "kvlab"
local rig = require "spec.rig"
local support = require "spec.support"

local TOLERANCE = 3e-6
local SCRIPT = {
  { "prefill", 1, 90 }, { "prefill", 2, 70 }, { "decode", 1, 2 }, { "prefill", 3, 20 },
  { "decode", 1, 2, 3 }, { "verify", { 3, 1 }, 1, 2 }, { "take_back", { 2, 0 } },
  { "decode", 1, 2 }, { "close", 3 }, { "truncate", 2, 50 }, { "decode", 2 },
  { "prefill", 4, 33 }, { "decode", 1, 2, 4 }, { "decode", 1, 4 },
}

local function nsa(o)
  local all = { granularity = "token", index_topk = 24, sink = 0, recent = 0,
                min_blocks = 0 }
  for name, value in pairs(o or {}) do all[name] = value end
  return kv.policy("nsa", all)
end

local function play(dev, o, offload, script)
  local all = { policy = nsa(), prefill_policy = kv.policy "full", offload = offload }
  for name, value in pairs(o) do all[name] = value end
  return rig.play(dev, all, script or SCRIPT)
end

local CASES = {
  ["blocks of 16"] = {}, ["blocks of 5"] = { block_size = 5, blocks = 160 },
  ["latents"] = { value_dim = 16 },
  ["latents of bf16"] = { value_dim = 16, dtype = "bf16" },
  ["a window"] = { window = 40 }, ["f8e4m3"] = { format = "f8e4m3", dtype = "bf16" },
}

support.each_device(function(dev)
  describe("a hot cache of tokens on " .. dev:name(), function()
    for _, name in ipairs(support.names(CASES)) do
      it("gives what resident KV gives, with " .. name, function()
        local o = CASES[name]
        local want = play(dev, o)
        for _, slots in ipairs { 24 * 4, 24 * 7 + 3, 4000 } do
          assert.same(want, play(dev, o, { hot_tokens = slots }))
        end
        if o.dtype then return end -- a part of a result is f32, so the last bits differ
        local got = play(dev, o, { hot_tokens = 120, hot_overlap = true })
        for s, steps in pairs(want) do
          for n, out in ipairs(steps) do
            support.close(got[s][n], out, TOLERANCE, TOLERANCE)
          end
        end
      end)
    end

    it("reads what forks wrote, and lists with fewer tokens than slots", function()
      local function steps(offload)
        local outs = {}
        for i, step in ipairs(rig.decode(dev, { policy = nsa { index_topk = 40 },
          prefill_policy = kv.policy "full", lengths = { 37, 20 }, steps = 4, fork = true,
          offload = offload }).steps) do outs[i] = step.out:list() end
        return outs
      end
      assert.same(steps(), steps { hot_tokens = 500 })
    end)
  end)
end)

describe("a hot cache of tokens", function()
  it("counts what it finds and fetches", function()
    local its = rig.new(kv.device "cpu", { policy = nsa { index_topk = 8 },
      dtype = "bf16", prefill_policy = kv.policy "full", steady = 100,
      offload = { hot_tokens = 400 } })
    rig.play(its.device, { rig = its },
      { { "prefill", 1, 60 }, { "decode", 1 }, { "decode", 1 } })
    local cache, hot = its.cache, its.cache.tier.hot:stats()
    assert.equal(2 * 8 * cache.layers * cache.kv_heads, hot.hits + hot.misses)
    assert.is_true(hot.hits > 0)
    assert.equal(hot.misses * cache.format:bytes_token(), hot.bytes)
    cache:close()
  end)

  it("refuses what it cannot hold or read", function()
    local function open(o, more)
      local all = { offload = o, policy = nsa(), prefill_policy = kv.policy "full" }
      for name, value in pairs(more or {}) do all[name] = value end
      return rig.new(kv.device "cpu", all)
    end
    support.raises("hot_slots and hot_tokens are given, expected one of the two", open,
      { hot_slots = 4, hot_tokens = 4 })
    support.raises("evict is given, but there is no hot cache of blocks", open,
      { hot_tokens = 4, evict = "lfu" })
    support.raises("hot_tokens is given for a cache of int8, expected hot_slots", open,
      { hot_tokens = 64 }, { format = "int8" })
    local decode = { { "prefill", 1, 60 }, { "decode", 1 } }
    local function run(o, more)
      local its = open(o, more)
      return rig.play(its.device, { rig = its }, decode)
    end
    support.raises("the hot cache has 20 slots for a KV head, 1 sequences with 24 tokens "
      .. "each may need 24; give it more (hot_tokens)", run, { hot_tokens = 20 })
    support.raises("layer 0 reads blocks, and the hot cache has slots for tokens", run,
      { hot_tokens = 200 }, { policy = kv.policy "quest" })
    support.raises("attention over tokens does not know KV in host memory, but in decode "
      .. "behind a hot cache of tokens (hot_tokens)", run, { hot_slots = 40 })
    support.raises("attention over tokens does not know KV in host memory", run,
      { hot_tokens = 200 }, { prefill_policy = nsa() })
  end)
end)
