--- One selection for all tokens of a draft: the draft's policy selects in the draft's
-- first step, and the later steps read the same blocks and the newest ones, without
-- computing scores.
local options = require "kvlab.options"
local policy = require "kvlab.policy.policy"
local tensor = require "kvlab.tensor.arithmetic"

local M = {}

---@class kvlab.Reuse
---@field lists table  by shape and length of a draft, by layer: what the first step of
--                     the last such draft selected, and the blocks that it may begin.
--                     false: it selected nothing. A replay runs no Lua, but it writes the
--                     same lists
local Reuse = {}
Reuse.__index = Reuse

--- Raises for a policy whose attention is more than attention over a selection of blocks,
-- and for one that already reads selections again (reuse_layers, reuse_steps).
---@param p table
---@return table
function M.expect_policy(p)
  local more = policy.beside_selection(p)
    or p.reuse_steps > 1 and ("reuse_steps = %d"):format(p.reuse_steps)
  if not more then return p end
  return options.fail(("policy %s has %s, expected a policy that selects blocks where a "
    .. "draft reuses its selection"):format(p.name, more))
end

---@return kvlab.Reuse
function M.new() return setmetatable({ lists = {} }, Reuse) end

--- What a step of a draft does: the first step selects, and a later step with the same
-- sequences reads that selection. nil: the step makes its own selection.
---@param step integer   of the draft
---@param limit integer  the most blocks that its tokens can lie in
---@return string|nil  first, again
function Reuse:role(step, ctx, limit)
  if step == 1 then
    local key = ("%d, %d"):format(ctx.shape_number, limit)
    local kept = self.lists[key] or { next = {} }
    self.lists[key], self.kept = kept, kept
    self.seqs, self.more, self.is_written = ctx.seqs, limit - 1, {}
    return "first"
  end
  return self.seqs == ctx.seqs and "again" or nil
end

local function new_list(ctx, heads, n)
  return tensor.tensor(ctx.device, "i32", { ctx.seqs, heads, n })
end

local function write_next(ctx, next)
  local blocks = (ctx.lens:reshape { ctx.seqs, 1, 1 } + (ctx.block_size - 1))
    / ctx.block_size
  local after = tensor.arange(ctx.device, "i32", next:size(2))
  tensor.zeros(ctx.device, "i32", next:dims()):add(blocks, next)
  next:add(after:reshape { 1, 1, next:size(2) }, next)
end

--- The blocks that a draft may begin, for lists of `heads` heads: i32 [seqs, heads,
-- more].
local function next_blocks(self, ctx, heads)
  local next = self.kept.next[heads]
    or tensor.lasting(new_list, ctx, heads, self.more)
  self.kept.next[heads] = next
  if not self.is_written[heads] then tensor.scope(write_next, ctx, next) end
  self.is_written[heads] = true
  return next
end

--- Writes a selection, followed by the blocks that the draft may begin. A step ignores
-- blocks that it has not begun yet.
local function write_list(self, ctx, list, selection, counts)
  local heads, n, more = selection:size(1), selection:size(2), self.more
  if more == 0 then
    list:copy_(selection)
    return
  end
  local rows, none = ctx.seqs * heads, self.kept.none
  none = none and none:size(1) == heads and none
    or tensor.lasting(tensor.full, ctx.device, "i32", { ctx.seqs, heads, more }, -1)
  self.kept.none = none
  tensor.cat({ selection, none }, 2, list)
  local columns = (counts or selection:ge(0):cast "i32":sum(-1)):reshape { rows, 1 }
  if more > 1 then
    columns = columns + tensor.arange(ctx.device, "i32", more):reshape { 1, more }
  end
  list:reshape { rows, n + more }
    :scatter_(columns, next_blocks(self, ctx, heads):reshape { rows, more })
end

--- Replaces the policy's compute_decode in the first step.
function Reuse:first(p, attention, ctx, out)
  local selection, counts = p:select_blocks(ctx)
  local list = false
  if selection then
    local heads, n = selection:size(1), selection:size(2) + self.more
    list = self.kept[ctx.layer]
    if not list or list:size(1) ~= heads or list:size(2) ~= n then
      list = tensor.lasting(new_list, ctx, heads, n)
    end
    tensor.scope(write_list, self, ctx, list, selection, counts)
  end
  self.kept[ctx.layer] = list
  return attention:over(selection, ctx, out), selection, counts
end

--- The same in a later step.
function Reuse:again(_, attention, ctx, out)
  local list = self.kept[ctx.layer]
  if not list then return attention:over(nil, ctx, out) end
  return attention:over_list(list, ctx, out), list
end

return M
