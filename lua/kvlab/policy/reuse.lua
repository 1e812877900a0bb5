--- One selection for all tokens of a draft: the draft's policy selects in its first step,
-- and the later steps read the same blocks and the newest ones, without its scores.
local options = require "kvlab.options"
local policy = require "kvlab.policy.policy"
local tensor = require "kvlab.tensor.arithmetic"

local M = {}

---@class kvlab.Reuse
---@field kept table  by shape and layer: marks of the blocks that the first step of the
--                    last draft of this shape selected, false where it selected nothing.
--                    A replay runs no Lua, but it writes the same marks
local Reuse = {}
Reuse.__index = Reuse

--- Raises for a policy whose attention is more than that over a selection of blocks.
---@param p table
---@return table
function M.expect_policy(p)
  local more = policy.beside_selection(p)
  if not more then return p end
  return options.fail(("policy %s has %s, expected a policy that selects blocks where a "
    .. "draft reuses its selection"):format(p.name, more))
end

---@return kvlab.Reuse
function M.new() return setmetatable({ kept = {} }, Reuse) end

--- What a step of a draft does: the first one selects, and a later one with the same
-- sequences reads what the first one selected. nil: it selects for itself.
---@param step integer  of the draft
---@return string|nil  first, again
function Reuse:role(step, ctx)
  if step == 1 then
    self.shape_number, self.seqs = ctx.shape_number, ctx.seqs
    return "first"
  end
  return self.seqs == ctx.seqs and "again" or nil
end

local function new_marks(ctx, heads)
  return tensor.tensor(ctx.device, "f32", { ctx.seqs, heads, ctx.width })
end

--- Keeps a layer's selection.
local function keep(self, ctx, selection)
  local kept = self.kept[ctx.shape_number] or {}
  self.kept[ctx.shape_number] = kept
  if selection then
    local marks = kept[ctx.layer]
      or tensor.lasting(new_marks, ctx, tonumber(selection.sizes[1]))
    kept[ctx.layer] = marks
    marks:copy_(ctx:mark(selection))
  else
    kept[ctx.layer] = false
  end
end

local function widened(marks, ctx, scores)
  local rows, width = marks:size(0) * marks:size(1), marks:size(2)
  local columns = tensor.arange(ctx.device, "i32", ctx.width):reshape { 1, ctx.width }
    :add(tensor.zeros(ctx.device, "i32", { rows, 1 }))
  marks:reshape { rows, width }:gather(columns, scores:reshape { rows, ctx.width })
end

--- Scores that select the marked blocks: 0, and -inf for the others. A batch may have
-- more columns than in the first step.
local function scores_of(marks, ctx)
  local scores = ctx:new_scores(marks:size(1))
  if marks:size(2) == ctx.width then return marks:log(scores) end
  tensor.scope(widened, marks, ctx, scores)
  return scores:log(scores)
end

--- In place of the policy's compute_decode in the first step.
function Reuse:first(p, attention, ctx, out)
  local selection, counts = p:select_blocks(ctx)
  keep(self, ctx, selection)
  return attention:over(selection, ctx, out), selection, counts
end

--- The same in a later step.
function Reuse:again(p, attention, ctx, out)
  local marks = self.kept[self.shape_number][ctx.layer]
  if not marks then return attention:over(nil, ctx, out) end
  local selection, counts = ctx:select(scores_of(marks, ctx), p.budget)
  return attention:over(selection, ctx, out), selection, counts
end

return M
