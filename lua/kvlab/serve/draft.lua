--- Speculative decoding. A draft is a guess of the next tokens. One decode step computes
-- the newest token and the whole draft (engine:verify). The tokens are accepted up to the
-- first one that the model would not have said there; the rest is taken back. So a step
-- gives one token or more, and these are the tokens of decoding without drafts. There are
-- two ways to make drafts:
--
-- * From the text itself (prompt lookup): the last few tokens are searched in the text so
--   far, and the tokens that followed them there are the draft.
-- * By a policy: steps of one token, in which the policy selects what attention reads
--   (engine:draft). They run on the sequence itself; the step that verifies them writes K
--   and V again, as the request's own attention makes them.
--
-- Source  Leviathan et al. 2023, arXiv:2211.17192 (verification); Saxena 2023, prompt
--         lookup decoding; Yang et al. 2023, arXiv:2304.04487 (drafts copied from the
--         text); Sun et al. 2024, TriForce, arXiv:2404.11912, and Chen et al. 2024,
--         MagicDec, arXiv:2408.11049 (drafts by the same model over a part of its KV)
local options = require "kvlab.options"
local policies = require "kvlab.policy.policy"
local draft_steps = require "kvlab.policy.draft_steps"
local reuse = require "kvlab.policy.reuse"
local sorted = require "kvlab.sorted"

local M = {}

--- Most tokens of a draft.
M.MOST = 127

local TOKENS = options.either(options.within(1, M.MOST), options.one_of("auto"))
local BY_TEXT = { ngram = options.within(1, 64), tokens = TOKENS }
local BY_POLICY = {
  tokens = TOKENS, reuse = options.boolean,
  policy = options.either({ "a policy's name", options.string[2] },
    options.like("a policy, as kv.policy makes them", "compute_decode")),
}

--- The options of the draft's policy, among those of a draft.
local function of_policy(o)
  local rest = {}
  for name, value in pairs(o) do
    if not BY_POLICY[name] then rest[name] = value end
  end
  return rest
end

--- Returns the policy of a draft, not attached to anything, and a key that is equal for
-- equal policies and options. Raises for a policy that can make no drafts.
local function policy_of(o)
  local policy, rest = o.policy, of_policy(o)
  if rest.ngram ~= nil then
    options.fail "draft: both ngram and policy are given, expected one of them"
  elseif rest.draft ~= nil then
    options.fail "draft: draft is given, expected none inside of a draft"
  end
  local expect = o.reuse and reuse.expect_policy or draft_steps.expect_policy
  if type(policy) == "table" then
    local name = next(rest)
    if name then options.refuse("draft", name, sorted.keys(BY_POLICY)) end
    draft_steps.expect_policy(policy)
    return expect(policy), policy
  end
  local made = policies(policy, rest)
  return expect(draft_steps.expect_policy(made)), policies.text(made)
end

--- The options of a draft, which depend on how it is made: by a policy or from the text.
local function fields_of(o)
  local known = {}
  if o.policy == nil then -- errors about other options name it
    for name, kind in pairs(BY_TEXT) do known[name] = kind end
    known.policy = BY_POLICY.policy
    return known
  end
  for name, kind in pairs(BY_POLICY) do known[name] = kind end
  if BY_POLICY.policy[2](o.policy) then
    policy_of(o) -- which raises for wrong options of the policy
    for name in pairs(of_policy(o)) do known[name] = options.any end
  end
  return known
end

--- The kind of the option `draft`; false: none.
-- { ngram = 3, tokens = 8 }: from the text; ngram: how many of the last tokens are
-- searched; tokens: the most tokens of a draft.
-- { policy = "quest", ratio = 0.05, tokens = 4 }: by a policy, given as it is or by name
-- with its options beside it; tokens: of a draft, so the policy's own budget is a ratio
-- or blocks.
-- tokens = "auto": by what was accepted so far. reuse = true: one selection for all
-- tokens of a draft.
M.KIND = options.nested(fields_of)

---@class kvlab.serve.Drafts  what drafts did
---@field steps integer     decode steps of requests with drafts
---@field proposed integer  tokens of drafts
---@field accepted integer  those of them that were right
---@field cut integer       drafts that had a wrong token
---@field proposed_at integer[]  tokens by their place in the draft
---@field accepted_at integer[]
---@field draft_us number   microseconds of the device: in which policies made drafts,
---@field check_us number   in steps that verified drafts, and
---@field choose_us number  in which tokens were chosen, with the host's part

---@class kvlab.serve.Draft: kvlab.serve.Drafts  of a request
---@field ngram integer|nil
---@field policy kvlab.Policy|nil  makes the drafts, in an attention of its own
---@field key any           of the policy and its options
---@field reuses boolean|nil  one selection serves all tokens of a draft
---@field tokens integer|nil  nil: auto
---@field ids integer[]     the draft of the present step

local AUTO = { text = 16, policy = 8 } -- most tokens of a draft with tokens = "auto"

--- The state that a request needs for drafts, made from the option; nil if it makes no
-- drafts.
---@return kvlab.serve.Draft|nil
function M.take(o)
  if not o then return nil end
  local d = M.counts()
  d.ids = {}
  if o.policy then
    d.policy, d.key = policy_of(o)
    d.reuses = o.reuse or nil
  else
    d.ngram = o.ngram or 3
  end
  d.tokens = o.tokens or d.policy and 4 or 8
  if d.tokens == "auto" then
    d.tokens, d.most = nil, d.policy and AUTO.policy or AUTO.text
  end
  return d
end

-- ---- how long -------------------------------------------------------------------------

-- What a drafted token costs, as a part of the step that verifies the draft: for a token
-- of a policy at a long context, and for a token from the text, which is one more row of
-- that step.
local COST = { policy = 0.3, text = 0.05 }
local PRIOR, WEIGHT = 0.8, 4 -- the share of right tokens that is expected at first

--- How many tokens the next draft should have: with "auto", the number that gives the
-- most tokens for their cost, if each token is right with the probability seen so far
-- (counting tokens up to the first wrong one).
---@param d kvlab.serve.Draft
---@return integer
function M.length(d)
  if d.tokens then return d.tokens end
  local share = (d.accepted + PRIOR * WEIGHT) / (d.accepted + d.cut + WEIGHT)
  local cost = d.policy and COST.policy or COST.text
  local best, most, gain, right = 1, 0, 1, 1
  for k = 1, d.most do
    right = right * share
    gain = gain + right
    if gain / (1 + k * cost) > most then best, most = k, gain / (1 + k * cost) end
  end
  return best
end

-- ---- from the text --------------------------------------------------------------------

--- Where the last `n` of `count` tokens occurred last before: the index of the token that
-- followed them there, or nil.
local function find(tokens, count, n)
  local last = tokens[count]
  for at = count - 1, n, -1 do
    if tokens[at] == last then
      local same = 1
      while same < n and tokens[at - same] == tokens[count - same] do same = same + 1 end
      if same == n then return at + 1 end
    end
  end
end

--- Makes room in draft.ids for a draft of `count` tokens that a policy will make.
---@param draft kvlab.serve.Draft
---@param count integer
---@return integer count
function M.expect(draft, count)
  local ids = draft.ids
  for i = 1, math.max(#ids, count) do ids[i] = i <= count and 0 or nil end
  return count
end

--- Makes the draft of a request's next step from its text, in draft.ids, of at most
-- `most` tokens; may be empty. A draft that reaches the end of the text continues with
-- its own first tokens, so that a repeating text is drafted to any length.
---@param draft kvlab.serve.Draft
---@param tokens integer[]  the text so far
---@param count integer     how many they are
---@param most integer
---@return integer count    of tokens in draft.ids
function M.propose(draft, tokens, count, most)
  local ids = draft.ids
  M.expect(draft, 0)
  most = math.min(most, M.length(draft))
  local from = most > 0 and count > draft.ngram and find(tokens, count, draft.ngram)
  if not from then return 0 end
  for i = 1, most do
    local at = from + i - 1
    ids[i] = at <= count and tokens[at] or ids[at - count]
  end
  return most
end

-- ---- verified -------------------------------------------------------------------------

--- How many tokens of a draft are accepted: all before the first one that is not what the
-- model says there. says[first + i] is what the model says after the i-th token of the
-- draft, says[first] what it says after the newest token of the text.
---@param ids integer[]
---@param says integer[]
---@param first integer
function M.accepted(ids, says, first)
  local n = 0
  while n < #ids and ids[n + 1] == says[first + n] do n = n + 1 end
  return n
end

--- Numbers of drafts, all zero.
---@return kvlab.serve.Drafts
function M.counts()
  return { steps = 0, proposed = 0, accepted = 0, cut = 0, proposed_at = {},
           accepted_at = {}, draft_us = 0, check_us = 0, choose_us = 0 }
end

--- Counts a step of a request with a draft.
---@param counts kvlab.serve.Drafts
---@param proposed integer  tokens of the draft
---@param accepted integer  those of them that were right
function M.count(counts, proposed, accepted)
  counts.steps = counts.steps + 1
  counts.proposed = counts.proposed + proposed
  counts.accepted = counts.accepted + accepted
  if accepted < proposed then counts.cut = counts.cut + 1 end
  for i = 1, proposed do
    counts.proposed_at[i] = (counts.proposed_at[i] or 0) + 1
    counts.accepted_at[i] = (counts.accepted_at[i] or 0) + (i <= accepted and 1 or 0)
  end
end

--- Adds the times of a step to the counts of those that took part in it.
---@param counts kvlab.serve.Drafts
---@param us table  draft, check, choose
function M.add_times(counts, us)
  counts.draft_us = counts.draft_us + us.draft
  counts.check_us = counts.check_us + us.check
  counts.choose_us = counts.choose_us + us.choose
end

--- A copy of the numbers, for a report.
---@param counts kvlab.serve.Drafts
---@return kvlab.serve.Drafts
function M.summary(counts)
  local out = {}
  for name in pairs(M.counts()) do out[name] = counts[name] end
  out.proposed_at, out.accepted_at = { unpack(out.proposed_at) },
    { unpack(out.accepted_at) }
  return out
end

return M
