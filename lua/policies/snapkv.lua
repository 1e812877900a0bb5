--- SnapKV: the prompt's last queries vote once for the tokens that the answer will need,
-- and the other tokens are evicted.
-- Source  Li et al. 2024, arXiv:2404.14469. As there, the votes are pooled over
--         neighbours, all tokens of the window stay, and so do all decoded ones. Each KV
--         head votes for itself, by the mean over its group; pooling is the mean over
--         `pool` tokens, with zeros past the ends
-- Worth   the attention that the prompt's last `window` queries pay to the token, exact,
--         the mean over them and a group's heads, pooled
-- Cost    the products of the window with all keys, once after the prompt; 4 * window *
--         heads bytes a token, for one layer at a time
-- Fails   questions that come after the prompt
local kv = require "kvlab"

--- The mean over `pool` neighbours: f32 [heads, n].
local function pooled(votes, pool)
  local heads, n = votes:size(0), votes:size(1)
  local sum = kv.zeros(votes.device, "f32", { heads, n })
  local index = kv.arange(votes.device, "i32", n)
  for off = -math.floor(pool / 2), math.ceil(pool / 2) - 1 do -- past the ends are zeros
    sum:add(votes:gather((index + off):expand { heads, n }), sum)
  end
  return sum / pool
end

--- The worth of the tokens that sequence i (from 0) holds: f32 [kv_heads, tokens].
local function vote(self, ctx, i)
  local queries = self.queries:of(ctx, i)
  local held = ctx:held(ctx.layer, i)
  local votes = pooled(ctx:attention_weights(queries, ctx.layer, i, held):mean(1),
    self.pool)
  local index = kv.arange(ctx.device, "i32", votes:size(1)):expand(votes:dims())
  return index:ge(held - queries:size(0)):where(math.huge, votes)
end

return kv.policy.define {
  name = "snapkv", decode = true, own_bytes = 0, watches_prompt = true,
  prompt_only = true,
  defaults = { ratio = 0.1, sink = 0, recent = 0, window = 32, pool = 5 },
  takes = { window = kv.policy.count, pool = kv.policy.count },

  init = function(self, shape) self.queries = kv.queries(shape, self.window) end,
  attention_finished = function(self, ctx) self.queries:keep(ctx) end,
  evict = function(self, ctx) return ctx:worth_after_prompts(vote, self) end,
}
