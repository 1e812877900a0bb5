--- RocketKV: evicts as SnapKV does, and selects among what is left by a bound of q.k.
-- Source  Behnam et al. 2025, arXiv:2502.14051. As in the paper, the prompt loses tokens
--         once, decoded tokens stay, and a step reads a few pages. The paper has a
--         formula for how much is evicted and how much is left to the selection, and the
--         more it evicts, the longer the runs over which it pools votes. Here the prompt
--         keeps `spare` times what a step reads, and `pool` is SnapKV's. Pages are the
--         cache's blocks; the paper's have few tokens
-- Score   Quest's bound over the share `dims` of the head dimension in which the queries
--         of the group are largest: sum_d max(q_d * min_d, q_d * max_d), the max over the
--         group
-- Cost    SnapKV's once after the prompt, then 2/block_size of the held keys. The bounds
--         of all dimensions are read, also of those that are not used
-- Fails   questions that come after the prompt, as for SnapKV. Tokens that stay were far
--         apart in the text, so bounds over many of them are loose
local kv = require "kvlab"

--- The query without the dimensions in which its group is small: as ctx.query.
local function largest_dims(self, ctx)
  local q, dev, heads = ctx.query:cast "f32", ctx.device, ctx.kv_heads
  local seqs, group, dim = ctx.seqs, ctx.heads / heads, q:size(2)
  local sizes = q:abs():reshape { seqs * heads, group, dim }:sum(1)
  local taken = kv.ops.select(sizes:reshape { seqs, heads, dim },
    kv.full(dev, "i32", { seqs }, dim), 1, kv.policy.recent(0),
    kv.tensor(dev, "i32", { seqs, heads, self.most_dims }), nil, self.limits)
  local mask = kv.zeros(dev, "f32", { seqs * heads, dim }):scatter_(
    taken:reshape { seqs * heads, self.most_dims },
    kv.ones(dev, "f32", { seqs * heads, self.most_dims }))
  return (q:reshape { seqs * heads, group, dim } * mask:reshape { seqs * heads, 1, dim })
    :reshape(q:dims()):cast(ctx.query:type())
end

--- How much of the held tokens quest may select, because the budget is a share of the
-- text.
local function of_held(ratio, least)
  if not ratio then return nil end
  if type(ratio) == "number" then return { ratio = math.max(ratio, least) } end
  if type(ratio) ~= "table" then return { ratio = ratio:maximum(least) } end
  local list = {}
  for i, x in ipairs(ratio) do list[i] = math.max(x, least) end
  return { ratio = list }
end

return kv.policy.define {
  name = "rocketkv", decode = true, own_bytes = 0, prompt_only = true,
  watches_prompt = true,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2, spare = 4, dims = 0.5,
               window = 32, pool = 5 },
  takes = { dims = kv.policy.share, window = kv.policy.count, pool = kv.policy.count,
            spare = { "a number >= 1",
                      function(x) return x >= 1 and x < math.huge end } },

  init = function(self, shape)
    local held = kv.policy.part(self, self.spare)
    held.min_blocks, held.window, held.pool = self.min_blocks, self.window, self.pool
    kv.policy.hold(self, "snapkv", held)
    self.quest = kv.policy.nest(self, "quest", of_held(self.ratio, 1 / self.spare))
    self.most_dims = math.max(1, math.floor(self.dims * shape.head_dim))
    self.limits = kv.full(shape.device, "i32", { 1, shape.kv_heads }, self.most_dims)
  end,
  evict = function() end, -- hold puts snapkv's evict here
  select_blocks = function(self, ctx)
    local scores = ctx:new_scores()
    kv.scope(function()
      local q = self.most_dims < ctx.query:size(2) and largest_dims(self, ctx)
        or ctx.query
      kv.ops.score_minmax(q, self.quest.bounds, ctx, "max", scores)
    end)
    return ctx:select(scores, self.quest.budget)
  end,
}
