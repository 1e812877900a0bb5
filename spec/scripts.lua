--- Random scripts of steps: prompts alone and in batches, decode steps, drafts in chains
-- and trees of which tokens are taken back, drafts by a policy, forks, and sequences that
-- end, over keys and values or over latents, whose model has an indexer. Two engines play
-- a script with the same policies. One is plain: its cache is resident and has one table
-- a sequence, and it launches every step. The other has any memory tier or other tables,
-- perhaps graphs, and its steps are interrupted and tried again. Both must compute the
-- same logits.
local emitting = require "spec.models.emitting"
local interrupted = require "spec.interrupted"
local kv = require "kvlab"
local reuse = require "kvlab.policy.reuse"
local support = require "spec.support"
local tiny = require "spec.models.tiny"
local tried = require "spec.tried_policies"

local M = {}

local STEPS, TOKENS, VOCAB = 40, 256, 97

-- Of logits up to 20. The numbers of an f8 cache are far apart: a sum in another order
-- may round to the next one.
local TOLERANCE = { f32 = 2e-4, f8e4m3 = 0.1 }

-- A policy may select another block where two scores are nearly equal, since the engines
-- add up in other orders. The plain engine then does so, too, if its numbers are off by
-- as little: in one of so many tries, a relative NOISE makes a tenth of the difference.
local NOISE, TRIES = 1e-6, 5

-- Policies that no graph can record.
local EAGER = { infllm = true, nsa_branches = true }

-- Policies that select for all KV heads together, or draw for them one after the other.
-- With tables by head, they select other blocks.
local ACROSS_HEADS = { gsa_on_device = true, nsa = true, nsa_branches = true,
  random = true, topk = true, gsa = true }

local POLICIES, PREFILL = tried.names "decode", tried.names "prefill"
if not tried.own then
  POLICIES[#POLICIES + 1] = "emitting"
elseif #POLICIES == 0 then -- one that selects in prefill alone
  POLICIES = { "full" }
else
  EAGER[tried.own] = tried.is_eager(tried.own)
end

--- The model's own selection of tokens, over latents.
local function new_dsa(again, pool)
  local o = { granularity = "token", index = "model", index_topk = 12, min_blocks = 0,
              sink = 0, recent = 0, index_pool = pool }
  for name, value in pairs(again or {}) do o[name] = value end
  return kv.policy("nsa", o)
end

--- A policy with options of `again`, if its selections can be read again.
local function new_policy(name, again, pool)
  if name == "emitting" then return emitting {} end
  if name == "dsa" then return new_dsa(again, pool) end
  local ok, policy = pcall(kv.policy, name, again)
  return ok and policy or kv.policy(name)
end

--- Whether a policy works over latents: some read values, or change attention.
local function works_over_latents(name, phase)
  return (pcall(function()
    local engine = tiny.latent(kv.device "cpu"):engine { blocks = 4,
      [phase] = new_policy(name) }
    local seq = engine:sequence()
    engine:prefill(seq, { 1, 2, 3 })
    engine:decode({ seq }, { 4 })
    engine.cache:close()
  end))
end

local latent -- policies by their phases, when they are first asked for
local function over_latents()
  if latent then return latent end
  latent = { policy = {}, prefill_policy = {} }
  for phase, names in pairs { policy = POLICIES, prefill_policy = PREFILL } do
    for _, name in ipairs(names) do
      if works_over_latents(name, phase) then table.insert(latent[phase], name) end
    end
  end
  return latent
end

local function one_of(rng, list) return list[1 + rng(#list)] end

-- ---- cases ----------------------------------------------------------------------------

--- Makes a case one over latents, if there are policies for them.
local function use_latents(rng, o)
  local names = over_latents()
  if #names.policy == 0 then return end
  o.is_latent, o.dtype = true, "f32"
  o.policy = not tried.own and rng(2) == 0 and "dsa" or one_of(rng, names.policy)
  o.pool = one_of(rng, { 1, 1, 2, 4 })
  if o.policy == "dsa" then o.block_size = one_of(rng, { 4, 8, 16 }) end
  o.draft_policy = o.draft_policy and one_of(rng, names.policy)
  o.prefill_policy = nil
  if rng(3) == 0 and #names.prefill_policy > 0 then
    o.prefill_policy = one_of(rng, names.prefill_policy)
  elseif o.policy == "dsa" and rng(2) == 0 then
    o.prefill_policy = "dsa" -- which does not compute what other policies emit
    if o.draft_policy == "emitting" then o.draft_policy = nil end
  end
end

--- What a seed plays: options of the attention and of the two engines, and its name.
-- Policies come in turn.
local function case_of(rng, seed)
  local o = { policy = POLICIES[1 + seed % #POLICIES],
    block_size = one_of(rng, { 1, 2, 4, 5, 8, 16 }),
    dtype = one_of(rng, { "f32", "f32", "f32", "f8e4m3" }), has_alibi = rng(2) == 0,
    soft_cap = rng(3) == 0 and 2 or nil,
    window = one_of(rng, { false, false, false, 30, { 0, 30 } }) or nil,
    draft_policy = rng(2) == 0 and one_of(rng, POLICIES) or nil }
  o.again = rng(2) == 0
    and { reuse_steps = 1 + rng(4), reuse_layers = 1 + rng(2) } or nil
  if rng(3) == 0 then use_latents(rng, o) end
  o.draft_reuse = o.draft_policy ~= nil and rng(3) == 0
    and pcall(reuse.expect_policy, new_policy(o.draft_policy, o.again))
  if not o.is_latent then
    o.prefill_policy = rng(3) == 0 and #PREFILL > 0 and one_of(rng, PREFILL) or nil
  end
  o.max_blocks = math.ceil(TOKENS / o.block_size)
  local hot, evict = 3 * o.max_blocks, o.block_size % 4 == 1 and "lfu" or nil
  o.tier = one_of(rng, { "resident", "ring", "hot cache", "hot cache with overlap",
    "tables by layer", "tables by head" })
  o.tables = o.tier:match "^tables by (%a+)"
  if o.policy == "dsa" and not o.tables and o.tier ~= "resident" then
    o.tier, o.draft_policy, o.draft_reuse = "hot cache of tokens", nil, false
    o.prefill_policy, o.window = nil, type(o.window) == "number" and o.window or nil
  elseif o.is_latent and o.tables == "head" then
    o.tables, o.tier = "layer", "tables by layer"
  end
  if o.tables == "head" then
    o.has_alibi = false
    local across = ACROSS_HEADS[o.policy] or ACROSS_HEADS[o.draft_policy]
      or ACROSS_HEADS[o.prefill_policy]
    if across or tried.own then o.tables, o.tier = "layer", "tables by layer" end
  end
  o.offload = ({ ring = { slots = 2, slot_blocks = 1 + rng(3) },
    ["hot cache"] = { hot_slots = hot, evict = evict },
    ["hot cache of tokens"] = { hot_tokens = 3 * 16 },
    ["hot cache with overlap"] = { hot_slots = hot, hot_overlap = true, evict = evict },
  })[o.tier]
  o.graph = o.tier ~= "ring" and not EAGER[o.policy] and rng(2) == 0
  o.name = ("%s%s%s after %s, %s%s, block_size %d, %s%s%s%s%s"):format(o.policy,
    o.is_latent and (" over latents, pool %d,"):format(o.pool) or "",
    o.again and (" read in %d steps, %d layers"):format(o.again.reuse_steps,
      o.again.reuse_layers) or "",
    o.prefill_policy or "a dense prompt", o.draft_policy and "drafts by "
    .. o.draft_policy .. (o.draft_reuse and ", reused, " or ", ") or "", o.tier,
    o.block_size, o.dtype,
    o.graph and ", replayed" or "", o.has_alibi and ", ALiBi" or "",
    o.soft_cap and ", soft cap" or "", o.window and ", window" or "")
  return o
end

--- An engine with two short sequences. o: a case; is_plain: without its tier and graphs;
-- noise_seed: the model's embeddings are off by random amounts.
local function open(dev, o, is_plain, noise_seed)
  local model = o.is_latent and tiny.latent(dev) or tiny.tiny(dev)
  if noise_seed then
    local off = kv.randn(dev, "f32", model.embedding:dims(), { seed = noise_seed })
    model.embedding = model.embedding * (off * NOISE + 1)
  end
  model.attention_options = { soft_cap = o.soft_cap, window = o.window,
    index = model.attention_options.index,
    alibi = o.has_alibi and model.attention_options.alibi or nil }
  local e = model:engine { blocks = 4 * o.max_blocks, block_size = o.block_size,
    chunk = 64, max_seqs = 3, max_blocks = o.max_blocks, format = o.dtype,
    policy = new_policy(o.policy, o.again, o.pool),
    prefill_policy = o.prefill_policy and new_policy(o.prefill_policy, nil, o.pool),
    draft_policy = o.draft_policy and new_policy(o.draft_policy, o.again),
    draft_reuse = o.draft_reuse,
    graph = o.graph and not is_plain, offload = not is_plain and o.offload or nil,
    tables = not is_plain and o.tables or nil }
  local seqs = { e:sequence(), e:sequence() }
  e:prefill(seqs[1], { 5, 6, 7 })
  e:prefill(seqs[2], { 9 })
  return { engine = e, seqs = seqs }
end

-- ---- steps ----------------------------------------------------------------------------

local function tokens_of(rng, n)
  local list = {}
  for i = 1, n do list[i] = rng(VOCAB) end
  return list
end

--- 1 ... most tokens for each of n sequences, and their sum.
local function counts_of(rng, n, most)
  local counts, total = {}, 0
  for i = 1, n do
    counts[i] = 1 + rng(most)
    total = total + counts[i]
  end
  return counts, total
end

--- A tree for each sequence's draft: the parent of every token.
local function random_tree(rng, counts)
  local parents = {}
  for _, n in ipairs(counts) do
    for i = 1, n do parents[#parents + 1] = rng(i) end
  end
  return parents
end

-- Each returns the words of a step and run(s), which returns its logits. n: sequences.
local KINDS = {}

function KINDS.prompt(rng, n)
  local which, tokens = 1 + rng(n), tokens_of(rng, 1 + rng(50))
  return ("prompt of %d for %d"):format(#tokens, which), function(s)
    return s.engine:prefill(s.seqs[which], tokens)
  end
end

function KINDS.prompts(rng, n)
  local counts, total = counts_of(rng, n, 5)
  local tokens, ends = tokens_of(rng, total), {}
  for i = 1, n do ends[i] = true end
  return "prompts of " .. table.concat(counts, " "), function(s)
    return s.engine:prefill_batch(s.seqs, counts, tokens, ends)
  end
end

function KINDS.decode(rng, n)
  local order = support.distinct(rng, 1 + rng(n), n)
  local tokens = tokens_of(rng, #order)
  return "decode of " .. table.concat(order, " "), function(s)
    local seqs = {}
    for i, which in ipairs(order) do seqs[i] = s.seqs[which + 1] end
    return s.engine:decode(seqs, tokens)
  end
end

--- A draft whose tokens are taken back; all of them, if it is a tree.
function KINDS.draft(rng, n, o)
  local counts, total = counts_of(rng, n, 5)
  local tokens, taken = tokens_of(rng, total), {}
  local parents = rng(3) == 0 and not o.has_alibi and not o.window and total > n
    and o.has_trees and not o.again and o.tables ~= "head" and random_tree(rng, counts)
    or nil
  for i = 1, n do taken[i] = parents and counts[i] or rng(counts[i] + 1) end
  return ("%s of %s without %s"):format(parents and "tree" or "draft",
    table.concat(counts, " "), table.concat(taken, " ")), function(s)
    local logits = s.engine:verify(s.seqs, counts, tokens, parents)
    if total > n then s.engine:take_back(taken) end
    return logits
  end
end

--- A draft by the policy of drafts, of given tokens: their logits are compared, too, but
-- not behind a hot cache, where they depend on which blocks are present. Now and then no
-- step verifies it, and nothing of it stays.
function KINDS.drafted(rng, n, o)
  if not o.draft_policy then return KINDS.draft(rng, n, o) end
  local counts, total = counts_of(rng, n, 4)
  local tokens, ids, taken, own = tokens_of(rng, n), tokens_of(rng, total), {}, {}
  local is_verified, has_hot = rng(4) > 0, o.offload and o.offload.hot_slots
  for i = 1, n do taken[i], own[i] = rng(counts[i] + 2), counts[i] + 1 end
  return ("%s of %s by the policy without %s"):format(is_verified and "draft"
    or "unverified draft", table.concat(counts, " "), table.concat(taken, " ")),
    function(s)
      local dev, all, used = s.engine.model.device, {}, 0
      s.engine:draft(s.seqs, counts, tokens, function(logits, _, into)
        local list = { unpack(ids, used + 1, used + into:size(0)) }
        used = used + #list
        into:copy_(kv.from(dev, "i32", { #list }, list))
        for _, x in ipairs(has_hot and {} or logits:list()) do all[#all + 1] = x end
      end)
      if is_verified then
        local step = {}
        for i = 1, n do
          step[#step + 1] = tokens[i]
          for _ = 1, counts[i] do step[#step + 1] = 0 end
        end
        for _, x in ipairs(s.engine:verify(s.seqs, own, step, nil, counts):list()) do
          all[#all + 1] = x
        end
        s.engine:take_back(taken)
      end
      return { list = function() return all end }
    end
end

-- What no step does: run(s) returns nothing, and is not interrupted.
local CHANGES = {}

function CHANGES.fork(rng, n)
  local which = 1 + rng(n)
  return "fork of " .. which, function(s)
    s.seqs[n + 1] = s.seqs[which]:fork()
  end
end

function CHANGES.start(rng, n)
  local tokens = tokens_of(rng, 1 + rng(30))
  return "new one of " .. #tokens, function(s)
    s.seqs[n + 1] = s.engine:sequence()
    s.engine:prefill(s.seqs[n + 1], tokens)
  end
end

function CHANGES.finish(rng, n)
  local which = 1 + rng(n)
  return "end of " .. which, function(s)
    s.engine:finish(table.remove(s.seqs, which))
  end
end

local STEP_KINDS = { "decode", "decode", "decode", "draft", "draft", "drafted",
                     "drafted", "prompts", "prompt" }

--- The next line of a script: its words, run(s), and whether it is a step. nil: the
-- sequences are long enough.
local function next_line(rng, s, o)
  local n, longest = #s.seqs, 0
  for _, seq in ipairs(s.seqs) do longest = math.max(longest, seq:length()) end
  if longest > TOKENS - 60 then return nil end
  if rng(4) == 0 then
    local change = n == 1 and "fork" or n == 3 and "finish"
      or one_of(rng, { "fork", "start", "finish" })
    local words, run = CHANGES[change](rng, n)
    return words, run, false
  end
  local words, run = KINDS[one_of(rng, STEP_KINDS)](rng, n, o)
  return words, run, true
end

-- ---- a script -------------------------------------------------------------------------

--- Runs a step, after up to two tries that are interrupted. Returns its logits, and how
-- many tries failed.
local function run_interrupted(s, run, rng)
  local failed = 0
  local function step() return s.engine.cache:transaction(run, s) end
  for _ = 1, rng(3) do
    local nth = math.floor(4000 ^ (rng(1000) / 1000)) -- few or many calls after its begin
    local ok, result = interrupted.call(s.engine.cache, step, nth, rng(2) == 0)
    if ok then return result, failed end
    assert(tostring(result):find("interrupted", 1, true), result)
    failed = failed + 1
  end
  return step(), failed
end

--- The largest difference of two lists; NaN counts as one of infinity.
local function difference(a, b)
  assert(#a == #b)
  local most = 0
  for i = 1, #a do
    local apart = math.abs(a[i] - b[i])
    if apart ~= apart then return math.huge end
    most = math.max(most, apart)
  end
  return most
end

--- How far the logits of a script's last step are from what they were, on a plain engine
-- whose numbers are a little off; nil if that is never more than `least`.
local function off_by_noise(dev, o, runs, want, least)
  for noise_seed = 1, TRIES do
    local s, logits = open(dev, o, true, noise_seed), nil
    for _, run in ipairs(runs) do logits = run(s) end
    local apart = difference(logits:list(), want)
    s.engine.cache:close()
    if apart > least then return apart end
  end
end

--- Plays the script of a seed. Returns how the engines differ, in words, or nil; how many
-- steps failed on the way; and, if they differ, how far logits may be off by a near tie.
---@param dev kvlab.Device
---@param seed integer
---@return string|nil why
---@return integer failed
---@return number|nil near_tie  see NOISE
function M.differs(dev, seed)
  local rng, lines, runs, failed = support.rng(seed), {}, {}, 0
  for _ = 1, 5 do rng(7) end -- the first ones of neighbours are alike
  local o = case_of(rng, seed)
  o.has_trees = dev:is_cpu() or o.policy ~= "emitting"
  local plain, other, why, near_tie = open(dev, o, true), open(dev, o), nil, nil
  for _ = 1, STEPS do
    local words, run, is_step = next_line(rng, plain, o)
    if not words then break end
    lines[#lines + 1], runs[#runs + 1] = words, run
    local logits = run(plain)
    if is_step then
      local want = logits:list()
      local got, more = run_interrupted(other, run, rng)
      failed = failed + more
      local apart = difference(got:list(), want)
      if apart > TOLERANCE[o.dtype] then
        why = ("seed %d, %s: logits differ by %g after\n  %s"):format(seed, o.name, apart,
          table.concat(lines, "\n  "))
        near_tie = off_by_noise(dev, o, runs, want,
          math.max(apart / 10, TOLERANCE[o.dtype]))
        break
      end
    else
      run(other)
    end
  end
  plain.engine.cache:close()
  other.engine.cache:close()
  return why, failed, near_tie
end

return M
