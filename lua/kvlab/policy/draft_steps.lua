--- The steps by which an attention's draft policy makes a draft. What they change in the
-- policy stays provisional until a decode step of several tokens has verified the draft,
-- and its wrong tokens are taken back. A step of a draft has one token for each of its
-- sequences; a sequence may have fewer steps than others.
local C = require("kvlab.library").C
local options = require "kvlab.options"

local M = {}

---@class kvlab.DraftSteps
---@field count integer        steps of the draft that has not ended
---@field is_verified boolean  a step has verified it
local DraftSteps = {}
DraftSteps.__index = DraftSteps

--- A policy that can make drafts; raises for one that does not select in decode.
---@param p table
---@return table
function M.expect_policy(p)
  if p.decode then return p end
  return options.fail(("policy %s does not select in decode, as the policy of a draft it "
    .. "would have to"):format(p.name))
end

---@param journal kvlab.Journal
---@param keepers table[]  what keeps something for a sequence in seq.state[keeper]: the
--                         draft policy, those that are nested in it, and their hashes
---@return kvlab.DraftSteps
function M.new(journal, keepers)
  return setmetatable({ journal = journal, keepers = keepers, steps = {}, count = 0,
    is_verified = false }, DraftSteps)
end

--- Begins step `at`, counted from 1. entry: an entry to note, too.
function DraftSteps:begin(at, seqs, entry)
  local journal, step = self.journal, self.steps[at]
  if not step then
    step = { seqs = {}, first = {}, own = {}, taken = {} }
    self.steps[at] = step
  end
  for row = 1, math.max(#seqs, #step.seqs) do
    local is_there = row <= #seqs or nil
    step.seqs[row], step.first[row] = seqs[row], is_there and row
    step.own[row], step.taken[row] = is_there and 1, is_there and 0
  end
  journal:begin(step, true, true)
  self.count, self.is_verified, journal.draft = at, false, self
  journal:note(entry)
  for row = 1, #seqs do
    for i = 1, #self.keepers do
      journal:keeps_drafted(seqs[row], self.keepers[i], row)
    end
  end
end

--- The step that began last.
function DraftSteps:last() return self.steps[self.count] end

--- Takes back what the steps changed, except for the first kept[seq] of each sequence.
---@param kept table<kvlab.Sequence, integer>
function DraftSteps:take_back(kept)
  for at = self.count, 1, -1 do
    local step = self.steps[at]
    for row, seq in ipairs(step.seqs) do
      step.taken[row] = at > (kept[seq] or 0) and 1 or 0
    end
    self.journal:take_back(step, step.first, step.own, step.taken)
  end
  self.count = 0
end

local function finish(self)
  self.journal.draft = nil
  if not self.is_verified then return self:take_back({}) end
  for at = 1, self.count do self.journal:settle(self.steps[at]) end
  self.count = 0
end

--- The step that begins verifies the draft.
function DraftSteps:verify()
  self.is_verified, self.journal.draft = self.count > 0, nil
end

--- Ends the draft, if there is one, before another step begins. If the draft was
-- verified, all of its steps stay; otherwise nothing of it stays.
function DraftSteps:finish()
  if self.count == 0 then return end
  C.kvl_interrupt_hold(1)
  local ok, why = pcall(finish, self)
  C.kvl_interrupt_hold(-1)
  if not ok then error(why, 0) end
end

return M
