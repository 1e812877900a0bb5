--- KV in host memory gives what KV on the device gives, for every policy, block size and
-- number of slots; sequences do not meet; a fault leaves the engine usable.
-- Tolerance: a ring adds up the same products in another order (f32 3e-6). A hot cache
-- without overlap runs the very same attention over a selection: equal.
local kv = require "kvlab"
local rig = require "spec.rig"
local support = require "spec.support"
local tried = require "spec.tried_policies"

local TOLERANCE = 3e-6

local function options_of(name)
  if name == "full" then return nil end
  return { ratio = 0.4, sink = 1, recent = 1, min_blocks = 0,
           dense = name == "layers" and 1 or nil }
end

--- Steps of a decode with KV on the device.
local function resident_steps(dev, o)
  o.offload = nil
  return rig.decode(dev, o).steps
end

--- The same decode through an offload engine; compare(got, want) its steps.
local function check_offloaded(dev, o, offload, want, compare)
  o.offload = offload
  local got = rig.decode(dev, o).steps
  for i, step in ipairs(want) do
    if step.selection then
      support.equal(got[i].selection, step.selection, "selection")
    end
    compare(got[i].out, step.out)
  end
end

local function against_resident(dev, o, offload, compare)
  check_offloaded(dev, o, offload, resident_steps(dev, o), compare)
end

local function close(got, want) support.close(got, want, TOLERANCE, TOLERANCE) end
local function equal(got, want) support.equal(got, want) end

local LENGTHS = { 1, 16, 33, 100, 187 }
local STEPS = support.is_full and 10 or 6 -- the last one begins a block of the longest
-- Block size, slots, blocks of a slot.
local RINGS = { { 16, 1, 1 }, { 16, 2, 1 }, { 16, 4, 2 }, { 16, 3, 64 }, { 5, 2, 3 },
                { 64, 1, 1 }, { 256, 4, 1 } }

local function check_equalities(dev)
  for i, name in ipairs(tried.names "decode") do
    local function decode_of(size)
      return { policy = name, options = options_of(name), steps = STEPS,
               lengths = LENGTHS, block_size = size, blocks = 256, chunk = 50 }
    end
    local resident = {} -- by block size
    local function resident_of(size)
      resident[size] = resident[size] or resident_steps(dev, decode_of(size))
      return resident[size]
    end

    it("gives " .. name .. " through a ring what resident KV gives #policy", function()
      for _, c in ipairs(support.one_each(RINGS, i, not tried.own and 1)) do
        check_offloaded(dev, decode_of(c[1]), { slots = c[2], slot_blocks = c[3] },
          resident_of(c[1]), close)
      end
    end)

    -- dense attention becomes a selection of all blocks, and a GPU splits that elsewhere
    local same = (name == "full" or tried.own) and close or equal
    it("gives " .. name .. " through a hot cache the same bits #policy", function()
      for _, size in ipairs(support.one_each({ 16, 5, 64 }, i, 1)) do
        check_offloaded(dev, decode_of(size), { hot_slots = 640 }, resident_of(size),
          same)
      end
    end)

    it("joins hits and misses of " .. name .. " #policy", function()
      against_resident(dev, { policy = name, options = options_of(name), steps = STEPS,
        lengths = LENGTHS }, { hot_slots = 320, hot_overlap = true }, close)
    end)
  end

  it("gives the same where the copy engine brings the blocks", function()
    -- 2048 tokens of 2 KV heads of 32 in f32 are 1 MiB; more slots than loads, and a
    -- block that fills while tokens are decoded
    local o = { policy = "full", lengths = { 4090 }, steps = 9, block_size = 2048,
                blocks = 4, chunk = 512, heads = 2 }
    local want = resident_steps(dev, o)
    for _, slots in ipairs(support.one_each({ 1, 2, 8 }, 1, 2)) do
      check_offloaded(dev, o, { slots = slots, slot_blocks = 1 }, want, close)
    end
    o.max_seqs = 1 -- so a slot holds one block: two passes once a second block is full
    check_offloaded(dev, o, { slots = 2, slot_blocks = 1 }, want, close)
    o.max_seqs = nil
    o.chunk = 409 -- 4090 = 10 * 409: chunks that begin and end inside blocks
    check_offloaded(dev, o, { slots = 2, slot_blocks = 2 }, want, close)
    local script = { { "prefill", 2, 3 }, { "decode", 2 }, { "prefill", 1, 500 },
                     { "decode", 1, 2 }, { "prefill", 1, 1 }, { "prefill", 2, 1 },
                     { "prefill", 1, 5 }, { "decode", 1, 2 } } -- 2 comes from the host
    local resident = { block_size = 2048, blocks = 4 }
    local outs, own = rig.play(dev, resident, script)
    own.cache:close()
    local got, its_rig = rig.play(dev, { block_size = 2048, blocks = 4,
      offload = { slots = 2 } }, script)
    its_rig.cache:close()
    for s = 1, 2 do
      for i = 1, #outs[s] do
        support.close(got[s][i], outs[s][i], TOLERANCE, TOLERANCE)
      end
    end
  end)

  it("evicts where the slots are few", function()
    -- 5 sequences of 13 blocks at most, 6 of them each: 30 of 33 slots every step
    against_resident(dev, { policy = "quest", options = { blocks = 6, min_blocks = 0 },
      lengths = LENGTHS, steps = 40, max_blocks = 16 }, { hot_slots = 33 }, equal)
  end)

  it("evicts by the priority that is written to it", function()
    local o = { policy = "quest", options = { blocks = 6, min_blocks = 0 } }
    local script = { { "prefill", 1, 250 } }
    for _ = 1, 12 do script[#script + 1] = { "decode", 1 } end
    local want, own = rig.play(dev, o, script)
    own.cache:close()
    o.offload = { hot_slots = 7 }
    local its_rig = rig.new(dev, o)
    local priority = its_rig.cache.tier.hot:use_priority()
    assert.equal(priority, its_rig.cache.tier.hot:use_priority())
    priority:rand_(3)
    local got = rig.play(dev, { rig = its_rig }, script)
    for i = 1, #want[1] do
      support.close(got[1][i], want[1][i], TOLERANCE, TOLERANCE)
    end
    assert.is_true(its_rig.cache.tier.hot:stats().evictions > 0)
    its_rig.cache:close()
  end)

  it("works in every dtype", function()
    for _, dtype in ipairs { "f16", "bf16" } do
      for _, offload in ipairs { { slots = 2 }, { hot_slots = 320 } } do
        against_resident(dev, { dtype = dtype, lengths = LENGTHS, steps = 3 }, offload,
          function(got, want)
            support.close(got:cast "f32", want:cast "f32", 1e-2, 1e-2)
          end)
      end
    end
  end)

  it("prefills through the ring in any chunks, with ALiBi too", function()
    local slopes = {}
    for h = 1, rig.SHAPE.heads do slopes[h] = 2 ^ -h end
    local alibi = kv.from(dev, "f32", slopes)
    for _, o in ipairs { { length = 150 }, { length = 150, alibi = alibi } } do
      local whole = rig.prefill(dev, o)
      for _, chunk in ipairs { 7, 16, 64, 150 } do
        for _, offload in ipairs { { slots = 1 }, { slots = 2, slot_blocks = 1 },
                                   { slots = 8, slot_blocks = 3 } } do
          close(rig.prefill(dev, { length = o.length, alibi = o.alibi, chunk = chunk,
                                   offload = offload }), whole)
        end
      end
    end
  end)

  it("lets a prefill policy choose what crosses", function()
    local function run(offload, ratio)
      return rig.prefill(dev, { length = 190, chunk = 32, offload = offload,
        prefill_policy = kv.policy("xattention", { ratio = ratio }) })
    end
    close(run({ slots = 2, slot_blocks = 1 }, 0.3), run(nil, 0.3))
    close(run({ slots = 2, slot_blocks = 1 }, 1), rig.prefill(dev, { length = 190 }))
  end)
end

-- ---- sequences ------------------------------------------------------------------------

local function alone(dev, o, script, s)
  local own = {}
  for _, line in ipairs(script) do
    local mine = { line[1] }
    if line[1] == "decode" then
      for i = 2, #line do if line[i] == s then mine[2] = s end end
    elseif line[1] == "chunks" then
      for i = 3, #line do if line[i] == s then mine = { "prefill", s, line[2] } end end
    elseif line[2] == s then
      mine = line
    end
    if mine[2] then own[#own + 1] = mine end
  end
  local outs, its_rig = rig.play(dev, o, own)
  its_rig.cache:close()
  return outs[s]
end

local function check_alone(dev, o, script)
  local together, its_rig = rig.play(dev, o, script)
  its_rig.cache:close()
  for s, outs in pairs(together) do
    local want = alone(dev, o, script, s)
    assert.equal(#want, #outs)
    for i = 1, #want do
      support.close(outs[i], want[i], TOLERANCE, TOLERANCE,
        ("step %d of sequence %d"):format(i, s))
    end
  end
end

local ENGINES = { ring = { slots = 2, slot_blocks = 1 }, hot = { hot_slots = 200 } }

local function check_sequences(dev)
  for kind, offload in pairs(ENGINES) do
    it("keeps interleaved sequences apart, through a " .. kind, function()
      check_alone(dev, { offload = offload, policy = "quest",
        options = { ratio = 0.5, min_blocks = 0 } }, {
        { "prefill", 1, 40 }, { "prefill", 2, 33 }, { "prefill", 1, 7 },
        { "chunks", 2, 1, 2 }, { "chunks", 17, 1, 2, 4 }, { "chunks", 1, 1, 2, 4 },
        { "decode", 1, 2 }, { "decode", 2 }, { "decode", 1, 2 }, { "prefill", 2, 20 },
        { "decode", 2, 1 }, { "prefill", 3, 1 }, { "decode", 3 }, { "decode", 3, 1, 2 },
        { "truncate", 1, 30 }, { "decode", 1, 2 }, { "decode", 1 }, { "decode", 1, 3 },
        { "truncate", 2, 32 }, { "prefill", 2, 1 }, { "decode", 2 }, { "decode", 2 },
        -- the buffer still has the block that a sequence is cut to, until others write
        { "chunks", 40, 1, 2 }, { "truncate", 1, 55 }, { "decode", 1, 2 },
        { "chunks", 40, 1, 2 }, { "truncate", 1, 75 }, { "decode", 3, 4 },
        { "decode", 1 }, { "decode", 1 }, { "truncate", 1, 20 }, { "decode", 1 },
        { "chunks", 40, 2, 1 }, { "truncate", 1, 10 }, { "decode", 1, 2 } })
    end)

    it("serves twenty one after another, through a " .. kind, function()
      local script = {}
      for s = 1, 20 do
        local length = 20 + s * 9
        script[#script + 1] = { "prefill", s, length }
        for _ = 1, 3 do script[#script + 1] = { "decode", s } end
        script[#script + 1] = { "close", s }
      end
      -- 16 blocks: each sequence gets the blocks of the ones before
      check_alone(dev, { offload = offload, blocks = 16 }, script)
    end)
  end

  it("lets forks grow apart", function()
    for _, offload in pairs(ENGINES) do
      local o = { policy = "quest", options = { ratio = 0.5 }, lengths = { 195 },
                  steps = 20, offload = offload }
      local plain = rig.decode(dev, o)
      o.fork = true
      local forked = rig.decode(dev, o)
      for i, step in ipairs(plain.steps) do close(forked.steps[i].out, step.out) end
    end
  end)
end

-- ---- faults ---------------------------------------------------------------------------

--- After fault(rig) raised, a new sequence gets what it gets from a fresh engine, and all
-- blocks are free again.
local function check_usable(dev, offload, fault, words)
  local script = { { "prefill", 7, 50 }, { "decode", 7 }, { "decode", 7 } }
  local want = rig.play(dev, { offload = offload, policy = "quest" }, script)[7]
  local _, broken = rig.play(dev, { offload = offload, policy = "quest" }, {})
  support.refuses(function() fault(broken) end, words)
  assert.equal(rig.SHAPE.blocks, broken.cache:blocks_free())
  local got = rig.play(dev, { rig = broken }, script)[7]
  for i = 1, #want do support.close(got[i], want[i], TOLERANCE, TOLERANCE) end
end

local function check_faults(dev)
  for kind, offload in pairs(ENGINES) do
    it("survives a full host tier, through a " .. kind, function()
      check_usable(dev, offload, function(broken)
        local ok, why = pcall(rig.play, dev, { rig = broken }, {
          { "prefill", 1, 512 }, { "prefill", 2, 512 }, { "prefill", 3, 512 },
          { "prefill", 4, 512 }, { "prefill", 5, 16 } })
        assert(not ok)
        error(why, 0)
      end, "blocks")
    end)

    for _, hook in ipairs { "on_prefill_offload", "on_decode_offload", "score" } do
      it(("survives an error in %s, through a %s"):format(hook, kind), function()
        check_usable(dev, offload, function(broken)
          local calls, original = 0, broken.policy[hook]
          broken.policy[hook] = function(...)
            calls = calls + 1
            if calls == 4 then error "the hook is broken" end
            return original(...)
          end
          local ok, why = pcall(rig.play, dev, { rig = broken }, { { "prefill", 1, 90 },
            { "prefill", 1, 33 }, { "decode", 1 }, { "decode", 1 }, { "decode", 1 } })
          broken.policy[hook] = original
          assert(not ok)
          error(why, 0)
        end, "the hook is broken")
      end)
    end
  end
end

support.each_device(function(dev)
  describe("offload on " .. dev:name(), function()
    check_equalities(dev)
    check_sequences(dev)
    check_faults(dev)
  end)
end)
