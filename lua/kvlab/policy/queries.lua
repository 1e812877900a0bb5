--- Stores the newest queries of a prompt, for policies that compute the attention of
-- these queries at the end of the prompt.
--
--   init               = function(self, shape) self.queries = kv.queries(shape, 32) end,
--   attention_finished = function(self, ctx) self.queries:keep(ctx) end,
--   evict              = … ctx:attention_weights(self.queries:of(ctx, i), layer, i, n)
--
-- If a prompt continues after its end, as with the next message of a chat, this counts as
-- a new prompt.
local arguments = require "kvlab.arguments"
local objects = require "kvlab.memory.objects"
local options = require "kvlab.options"

local M = {}

---@class kvlab.Queries
---@field most integer  how many are kept of each layer
local Queries = {}
Queries.__index = Queries

--- Keeps the newest `most` queries of each layer of a prompt.
---@param shape table  as policy.init gets it
---@param most integer
---@return kvlab.Queries
function M.queries(shape, most)
  local self = setmetatable({ most = most }, Queries)
  if shape.keepers then table.insert(shape.keepers, self) end -- of seq.state[self]
  return self
end

--- seq.state[self]: the queries by layer; is_over: in which layers the prompt is over.
local function keep(self, ctx, seq, i, first, count)
  local kept = seq.state[self] or { is_over = {} }
  local old = not kept.is_over[ctx.layer] and kept[ctx.layer] or nil
  kept[ctx.layer] = ctx:newest_queries(old, first, count, self.most)
  kept.is_over[ctx.layer] = ctx.ends_prompts ~= nil and ctx.ends_prompts[i + 1]
  seq.state[self] = kept
end

--- Stores the queries of the context's layer. In a decode step it does nothing.
function Queries:keep(ctx)
  if ctx.is_prefill then ctx:each_sequence(keep, self) end
end

--- The stored queries of sequence i (from 0) of the context's step and layer.
---@return kvlab.Tensor  [at most `most`, heads, head_dim]
function Queries:of(ctx, i)
  local seq = ctx.sequences and ctx.sequences[i + 1]
  local kept = seq and seq.state[self]
  return kept and kept[ctx.layer] or options.fail(("of: no queries of sequence %d are "
    .. "kept, expected a call of keep before, in attention_finished"):format(i))
end

--- A fork has them, too.
function Queries:inherit(seq, fork)
  local state = {}
  for key, value in pairs(seq.state[self] or { is_over = {} }) do state[key] = value end
  state.is_over = { [0] = state.is_over[0], unpack(state.is_over) }
  fork.state[self] = state
end

M.queries = arguments.of("queries", M.queries, { shape = objects.sequence_shape,
  most = options.count })
arguments.methods(Queries, "queries", {
  keep = { ctx = objects.context }, of = { ctx = objects.context, i = options.whole },
  inherit = { seq = objects.sequence, fork = objects.sequence },
})

return M
