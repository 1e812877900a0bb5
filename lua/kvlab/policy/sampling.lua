--- Draws blocks by chances that a policy gives, and weights them so that sums over the
-- drawn blocks are right on average (priority sampling). For each block that is not
-- always taken, r is drawn uniformly from (0, 1]; the blocks with the largest chance / r
-- are taken. Each counts 1 / min(1, chance / t) times, where t is the largest chance / r
-- among the blocks that were left out. The budget is used exactly. Sink and recent are
-- always taken and count once. So is the newest block, because summaries may not cover an
-- open block; in a decode step of several tokens, so are all of the newest blocks in
-- which a sequence's tokens lie.
--
--   init = function(self, shape) self.sampling = kv.sampling(shape, self.seed) end,
--   select_blocks = function(self, ctx)
--     local selection, counts, log_weights =
--       self.sampling:draw(ctx, chances, self.budget)
--     self.log_weights = log_weights
--     return selection, counts
--   end,
--   log_weight = kv.expr.input "log_weights",
--
-- Source  Duffield, Lund and Thorup 2007, J. ACM 54(6). r is a number for each layer and
--         logical block, the same in every step, sequence and head, as hash tables are
local arguments = require "kvlab.arguments"
local budgets = require "kvlab.policy.budget"
local ffi = require "ffi"
local kinds = require "kvlab.tensor.kinds"
local objects = require "kvlab.memory.objects"
local options = require "kvlab.options"
local tensor = require "kvlab.tensor.arithmetic"

local M = {}

local CERTAIN, NEVER = 1e9, 1e-30 -- replace chances of 1 and 0

---@class kvlab.Sampling
local Sampling = {}
Sampling.__index = Sampling

local function make_buffers(self, ctx)
  local dev, draws = self.device, {}
  for i = 0, ctx.layers - 1 do draws[i] = self.draws:index(i):narrow(0, ctx.width) end
  local left = tensor.tensor(dev, "f32", { ctx.seqs, ctx.kv_heads })
  return { draws = draws, left = left,
           left_rows = left:reshape { ctx.seqs, ctx.kv_heads, 1 } }
end

--- Draws blocks within a budget. Returns the selection, its counts, and the logarithms of
-- the weights of all blocks, f32 [seqs, kv_heads, width]. They belong to the caller until
-- the layer is over.
---@param ctx kvlab.Context
---@param chance kvlab.Tensor  f32 [seqs, kv_heads, width], 0 ... 1, 0 past the last
--                             block; overwritten
---@param budget kvlab.Budget  a policy's self.budget
function Sampling:draw(ctx, chance, budget)
  local b, ends = self.buffers[ctx.shape_number], self.ends
  if not b then
    b = tensor.lasting(make_buffers, self, ctx)
    self.buffers[ctx.shape_number] = b
  end
  local priority, weights = ctx:new_scores(), ctx:new_scores()
  ends.sink, ends.recent = budget.sink, math.max(1, budget.recent)
  if ctx.is_rows then ends.recent = math.max(ends.recent, ctx.batch.open_limit) end
  chance:add(ctx:mark((ctx:select(chance, ends))):mul(CERTAIN, weights), chance)
  chance:div(b.draws[ctx.layer], priority)
  local selection, counts = ctx:select(priority, budget)
  -- minus the largest priority of a block that was left out; 0 if none was
  ctx:mark(selection):sub(1, weights):mul(priority, weights):min(2, b.left)
  b.left:neg(b.left):log(b.left)
  chance:maximum(NEVER, chance):log(weights)
  b.left_rows:sub(weights, weights):maximum(0, weights)
  return selection, counts, weights
end

--- Makes the draws for the layers and blocks of a shape, as policy.init gets it.
---@param shape table
---@param seed integer
---@return kvlab.Sampling
function M.sampling(shape, seed)
  return setmetatable({
    device = shape.device, buffers = {}, ends = ffi.new("kvl_budget", 0, 0, 0, 0, 0),
    draws = tensor.rand(shape.device, "f32", { shape.layers, shape.max_blocks },
      { seed = seed }),
  }, Sampling)
end

M.sampling = arguments.of("sampling", M.sampling, { shape = objects.sequence_shape,
  seed = options.optional(options.any_whole) })
arguments.methods(Sampling, "a sampling", {
  draw = { ctx = objects.context, chance = kinds.tensor, budget = budgets.kind },
})

return M
