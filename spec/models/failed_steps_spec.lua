--- A step happens or it does not. In every policy and memory tier, steps of prompts and
-- of decode fail in many places: in a hook of the policy, before or after it did its
-- work; at a launch, because the interrupt flag is set, as Ctrl-C sets it; because there
-- is no free block; and in a hostile build, in an allocation. After the failure lengths
-- and free blocks are those from before the call, and the same call gives to the bit what
-- it gives where nothing failed; only with hot_overlap the last bits differ.
local emitting = require "spec.models.emitting"
local interrupt = require "spec.interrupted"
local kv = require "kvlab"
local support = require "spec.support"
local tiny = require("spec.models.tiny").tiny
local tried = require "spec.tried_policies"

local C = kv.C
local cpu = kv.device "cpu"
local model = tiny(cpu)

local BLOCKS, BLOCK = 40, 4
local TIERS = {
  resident = {},
  ring = { offload = { slots = 2, slot_blocks = 2 } },
  ["hot cache"] = { offload = { slots = 2, slot_blocks = 2, hot_slots = 80 } },
  ["hot cache with overlap"] = {
    offload = { slots = 2, slot_blocks = 2, hot_slots = 80, hot_overlap = true,
                evict = "lfu" } },
}

-- Of logits up to about 5. With overlap the hits and the misses of a hot cache are
-- attended to apart, and a failure changes which blocks are hits, so sums have another
-- order.
local TOLERANCE = { resident = 0, ring = 0, ["hot cache"] = 0,
                    ["hot cache with overlap"] = 2e-5 }

local HOOKS = { "on_prefill_offload", "on_decode_offload", "step_begin", "score",
  "select_blocks", "compute_prefill", "compute_decode", "attention_begin",
  "attention_finished", "predict" }

local OWN = { emitting = emitting }

local function token(i) return (i * 37 + 11) % 97 end

local function tokens(from, n)
  local list = {}
  for i = 1, n do list[i] = token(from + i) end
  return list
end

-- ---- calls ----------------------------------------------------------------------------

--- An engine with its sequences, `policy` among them, for a case.
local function open(case)
  local o = { blocks = BLOCKS, block_size = BLOCK, chunk = 14, max_seqs = 4,
              graph = case.graph, max_blocks = case.graph and BLOCKS or nil }
  for key, value in pairs(TIERS[case.tier]) do o[key] = value end
  o.policy = OWN[case.policy] and OWN[case.policy]() or kv.policy(case.policy)
  local e = model:engine(o)
  return { engine = e, policy = o.policy, seqs = { e:sequence() } }
end

local function prefill(i, from, n)
  return { name = ("prefill of %d tokens"):format(n), is_prefill = true,
    run = function(s) return s.engine:prefill(s.seqs[i], tokens(from, n)) end }
end

local function decode(from, ...)
  local who = { ... }
  return { name = ("decode of %d"):format(#who), run = function(s)
    local seqs = {}
    for i, which in ipairs(who) do seqs[i] = s.seqs[which] end
    return s.engine:decode(seqs, tokens(from, #who))
  end }
end

--- A step of counts[i] tokens for sequence i, of which taken[i] are taken back.
local function verify(from, counts, taken)
  local total = 0
  for _, n in ipairs(counts) do total = total + n end
  return { name = ("verify of %d tokens"):format(total), run = function(s)
    local e, seqs = s.engine, { s.seqs[1], s.seqs[2] }
    return e.cache:transaction(function()
      local logits = e:verify(seqs, counts, tokens(from, total))
      e:take_back(taken)
      return logits
    end)
  end }
end

local FORK = { name = "fork", run = function(s) s.seqs[2] = s.seqs[1]:fork() end }

-- A prompt of four chunks, decode, a fork within a block whose both branches grow in one
-- step, a prompt that goes on, a prompt and decode after it, and steps of drafts, of
-- which some tokens are taken back.
local SCRIPT = {
  prefill(1, 0, 45), decode(100, 1), decode(101, 1), FORK, decode(103, 1, 2),
  decode(105, 1, 2), prefill(2, 200, 18), decode(107, 1, 2), decode(109, 2),
  prefill(1, 300, 3), decode(111, 2, 1), decode(113, 2, 1),
  verify(400, { 3, 6 }, { 2, 5 }), verify(410, { 3, 6 }, { 3, 3 }),
  verify(420, { 3, 6 }, { 0, 6 }), verify(430, { 3, 6 }, { 1, 4 }),
  decode(115, 2, 1),
}

local function state_of(s)
  local lengths = {}
  for i, seq in ipairs(s.seqs) do lengths[i] = seq:length() end
  return { lengths = lengths, free = s.engine.cache:blocks_free() }
end

-- ---- failures -------------------------------------------------------------------------

-- Each runs a call so that it fails at a place, and undoes what it prepared for that.
-- Returns what pcall returned.

--- The hook `place.hook` of the policy raises at its nth call, before or after its work.
local function hook_fails(s, call, place)
  local policy, name, calls = s.policy, place.hook, 0
  local own, mine = policy[name], rawget(s.policy, place.hook)
  policy[name] = function(...)
    calls = calls + 1
    if calls ~= place.nth then return own(...) end
    if place.is_after then own(...) end
    error("the hook fails")
  end
  local ok, result = pcall(call.run, s)
  policy[name] = mine
  return ok, result
end

--- Ctrl-C at the nth call of a Lua function.
local function interrupted(s, call, place)
  return interrupt.call(s.engine.cache, function() return call.run(s) end, place.nth,
    place.raises, place.from)
end

--- All blocks but `place.left` are taken.
local function exhausted(s, call, place)
  local cache = s.engine.cache
  local filler = cache:sequence()
  filler:extend((cache:blocks_free() - place.left) * BLOCK)
  local ok, result = pcall(call.run, s)
  filler:close()
  return ok, result
end

--- The call succeeds, but what its transaction goes on with fails.
local function fails_after(s, call)
  return pcall(s.engine.cache.transaction, s.engine.cache, function()
    call.run(s)
    error("what follows fails")
  end)
end

--- The nth allocation fails.
local function allocation_fails(s, call, place)
  C.kvl_fail_allocation(place.nth)
  local ok, result = pcall(call.run, s)
  C.kvl_fail_allocation(0)
  return ok, result
end

-- ---- a campaign -----------------------------------------------------------------------

--- `count` of the numbers 1 ... n, spread evenly; others for another `seed`.
local function spread(n, count, seed)
  local list = {}
  for i = 1, math.min(n, count) do
    local step = n / math.min(n, count)
    list[i] = math.floor((i - 1) * step + (seed * 0.618) % 1 * step) + 1
  end
  return list
end

--- What every call of the script gives when nothing fails, how many Lua functions it
-- calls, and how often which hook.
local function play(case)
  local s, steps = open(case), {}
  for at, call in ipairs(SCRIPT) do
    local hooks, mine = {}, {}
    for _, name in ipairs(HOOKS) do
      local own = s.policy[name]
      if own then
        hooks[name], mine[name] = 0, rawget(s.policy, name)
        s.policy[name] = function(...)
          hooks[name] = hooks[name] + 1
          return own(...)
        end
      end
    end
    local ok, result, calls = interrupt.at_calls(function() return call.run(s) end,
      function() end)
    assert(ok, result)
    for name in pairs(hooks) do s.policy[name] = mine[name] end
    steps[at] = { logits = result and result:list(), calls = calls, hooks = hooks }
  end
  s.engine.cache:close()
  return steps
end

--- Plays the script with failures of all kinds before every call.
local function campaign(case, steps, kinds)
  local s = open(case)
  s.half = case.half
  for at, call in ipairs(SCRIPT) do
    local ok, result
    for _, kind in ipairs(call == FORK and {} or kinds) do
      for _, place in ipairs(ok and {} or kind.places(steps[at], at, s, call)) do
        local before = state_of(s)
        ok, result = kind.fail(s, call, place)
        if ok then break end -- it came after the last launch, or was mended on the way
        local what = ("%s, %s, call %d (%s), %s %s: %s"):format(case.policy, case.tier,
          at, call.name, place.hook or "place", place.nth or place.left, result)
        assert.matches(kind.says, result, 1, false, what)
        assert.same(before, state_of(s), what)
      end
    end
    if not ok then result = call.run(s) end
    if result then
      local what = ("%s, %s, call %d (%s)"):format(case.policy, case.tier, at, call.name)
      local got = result:list()
      for i, want in ipairs(steps[at].logits) do
        assert(math.abs(got[i] - want) <= TOLERANCE[case.tier], what)
      end
    end
  end
  s.engine.cache:close()
end

-- At how many calls of a hook, and at how many launches, a step fails. Without --full it
-- fails in every other hook, the next one at the next call of the script, and the other
-- half for the next policy or tier.
local HOOK_CALLS = support.is_full and 2 or 1
local LAUNCHES = support.is_full and 6 or 2

local function at_hooks(step, at, s)
  local places = {}
  for i, hook in ipairs(support.names(step.hooks)) do
    local is_tried = support.is_full or (i + at) % 2 == s.half
    for _, nth in ipairs(is_tried and spread(step.hooks[hook], HOOK_CALLS, at) or {}) do
      places[#places + 1] = { hook = hook, nth = nth, is_after = (at + nth) % 2 == 0 }
    end
  end
  return places
end

local function at_launches(step, at)
  local places = {}
  for i, nth in ipairs(spread(step.calls, LAUNCHES, at)) do
    places[i] = { nth = nth, raises = (at + i) % 3 == 0 }
  end
  return places
end

local function without_blocks(_, _, s, call)
  local places = {}
  if call.is_prefill and #s.seqs == 1 then places = { { left = 0 }, { left = 7 } }
  elseif call.is_prefill then places = { { left = 0 } } end
  return places
end

local function once() return { { nth = 1 } } end

local function at_allocations(_, at)
  local places = {}
  for i, nth in ipairs { 1, 2, 5, 9, 20 } do places[i] = { nth = nth + at % 3 } end
  return places
end

-- ---- specs ----------------------------------------------------------------------------

-- Policies that no graph can record with these options.
local EAGER = { infllm = true, nsa_branches = true }
local function is_eager(name) return EAGER[name] or tried.own and tried.is_eager(name) end

local cases = {}
local names = tried.names "decode"
for name in pairs(tried.own and {} or OWN) do names[#names + 1] = name end
for i, policy in ipairs(names) do
  local tiers = support.names(TIERS) -- of which each policy meets two in turn
  for _, tier in ipairs(tried.own and tiers or support.one_each(tiers, i, 2)) do
    cases[#cases + 1] = { policy = policy, tier = tier, graph = false }
    if tier ~= "ring" and not is_eager(policy) then
      cases[#cases + 1] = { policy = policy, tier = tier, graph = true }
    end
  end
end

-- says: a pattern that the messages match. A call that one of them does not make fail is
-- over, so those come last.
local KINDS = {
  { fail = exhausted, places = without_blocks, says = "blocks" },
  { fail = fails_after, places = once, says = "what follows fails" },
  { fail = hook_fails, places = at_hooks, says = "the hook fails" },
  { fail = interrupted, places = at_launches, says = "interrupted" },
}
if support.is_hostile then
  KINDS[5] = { fail = allocation_fails, places = at_allocations, says = "memory" }
end

describe("a step", function()
  for i, case in ipairs(support.sample(cases)) do
    case.half = i % 2
    it(("of %s, %s, %s, that fails changes nothing #policy"):format(case.policy,
        case.tier, case.graph and "replayed" or "eager"), function()
      campaign(case, play(case), KINDS)
    end)
  end
end)

describe("a replayed step that Ctrl-C interrupts at any call of a function", function()
  -- A replay changes the tally, and the journal gets to know of it afterwards.
  for _, tier in ipairs { "resident", "hot cache" } do
    it("leaves the numbers of a tally as they were, " .. tier, function()
      local s = open { policy = "emitting", tier = tier, graph = true }
      local tally = s.policy.mass
      for at = 1, 3 do SCRIPT[at].run(s) end -- the third one is recorded and replayed
      jit.flush() -- compiled code calls no hook
      local nth, before = 1, tally.memory:list()
      while not interrupted(s, SCRIPT[3], { nth = nth, raises = true }) do
        assert.same(before, tally.memory:list(), nth)
        nth = nth + 1
      end
      assert.is_true(nth > 100, nth)
      s.engine.cache:close()
    end)
  end
end)

describe("a step of drafts, interrupted at any call that a tally makes,", function()
  it("leaves nothing half made for the next one", function()
    local function until_drafts()
      local s = open { policy = "h2o_blocks", tier = "resident" }
      for at = 1, 5 do SCRIPT[at].run(s) end
      return s
    end
    local drafts = verify(400, { 3, 6 }, { 2, 5 })
    local s = until_drafts()
    local want = drafts.run(s):list()
    s.engine.cache:close()
    s = until_drafts()
    jit.flush() -- compiled code calls no hook
    local nth, ok, result = 0
    repeat
      nth = nth + (support.is_full and 1 or 3)
      ok, result = interrupted(s, drafts,
        { nth = nth, raises = true, from = "policy/tally%.lua$" })
      if not ok then assert.matches("interrupted", result) end
    until ok
    assert.is_true(nth > 100, nth)
    assert.same(want, result:list())
    s.engine.cache:close()
  end)
end)

describe("engine:generate", function()
  local PROMPT, N = 21, 12

  local function start(case)
    local s = open(case)
    return s, s.engine:prefill(s.seqs[1], tokens(0, PROMPT))
  end

  for _, case in ipairs { { policy = "quest", tier = "resident" },
      { policy = "h2o_blocks", tier = "hot cache" },
      { policy = "gsa", tier = "resident", graph = true } } do
    it(("that fails in a step of %s, %s, keeps the steps before and goes on"):format(
        case.policy, case.tier), function()
      local s, logits = start(case)
      local want = s.engine:generate(s.seqs[1], logits, N)
      assert.equal(PROMPT + N - 1, s.seqs[1]:length())
      s.engine.cache:close()
      for step = 1, N - 1 do
        s, logits = start(case)
        local ids, calls = {}, 0
        local begin = s.engine.attention.begin
        s.engine.attention.begin = function(...)
          calls = calls + 1
          if calls == step then error("the step fails", 0) end
          return begin(...)
        end
        local ok, why = pcall(s.engine.generate, s.engine, s.seqs[1], logits, N, ids)
        assert.is_false(ok)
        assert.equal("the step fails", why)
        assert.equal(step, #ids)
        assert.equal(PROMPT + step - 1, s.seqs[1]:length())
        logits = s.engine:decode({ s.seqs[1] }, { ids[#ids] })
        assert.equal(ids, s.engine:generate(s.seqs[1], logits, N - #ids, ids))
        assert.same(want, ids)
        assert.equal(PROMPT + N - 1, s.seqs[1]:length())
        s.engine.cache:close()
      end
    end)
  end
end)
