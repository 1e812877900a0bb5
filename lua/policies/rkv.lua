--- R-KV: evicts tokens that get little attention or that repeat what newer tokens say.
-- Source  Cai et al. 2025, arXiv:2505.24133, as its authors' code has it: importance is
--         pooled by a maximum, redundancy is the softmax of a key's mean cosine to all
--         others, and each key's newest neighbour above `threshold` does not count. There
--         `interval` tokens pile up and go at once; here the budget holds them, too, all
--         tokens are scored every `interval` tokens, and from then on the worst go one by
--         one. The paper takes the largest logit of a group and normalises without the
--         window; here it is the largest of the group's weights, of the whole attention.
--         `window` should divide `interval`
-- Worth   mix * importance - (1 - mix) * redundancy, where importance is the mean weight
--         that the token gets from the last `window` queries; computed after a prompt and
--         then every `interval` tokens. The newest `window` tokens and those that came
--         since then stay
-- Cost    the weights of one query a step, and every `interval` tokens the products of
--         all held keys with each other: 4 * held^2 bytes a head, a few times, for one
--         sequence at a time
-- Fails   later questions about what was said twice, in other words
local kv = require "kvlab"
local e = kv.expr

--- The mean cosine of each key to the others, as shares: f32 [heads, n]. positions: f32
-- [heads, n].
local function redundancy(self, keys, positions, held)
  local heads, n = keys:size(0), keys:size(1)
  local index, all = kv.arange(keys.device, "i32", n), { heads, n, n }
  local units = keys / (keys * keys):sum(2):sqrt():add(1e-8):reshape { heads, n, 1 }
  local near = units:matmul_t(units)
  local is_itself = index:reshape { n, 1 }:eq(index)
  near = is_itself:expand(all):where(0, near)
  local at = positions:reshape { -1, 1, n }:expand(all)
  local newest = near:gt(self.threshold):where(at, -1):max(2):reshape { heads, n, 1 }
  near = at:eq(newest):where(0, near):sum(1) / held
  return index:lt(held):expand { heads, n }:where(near, -math.huge):softmax(1)
end

--- The maximum over `pool` neighbours in the text: f32 [heads, n].
local function pooled(self, votes, positions)
  local heads, n = votes:size(0), votes:size(1)
  local rank = positions:reshape { heads, 1, n }:expand { heads, n, n }
    :lt(positions:reshape { heads, n, 1 }):where(1, 0):sum(2):cast "i32"
  local in_text, most = kv.zeros(votes.device, "f32", { heads, n }), nil
  in_text:scatter_(rank, votes)
  for off = -math.floor(self.pool / 2), math.ceil(self.pool / 2) - 1 do
    local other = in_text:gather(rank + off) -- past the ends are zeros
    most = most and most:maximum(other) or other
  end
  return most
end

--- The worth of what a sequence holds: f32 [heads, columns]. votes: the mean weights.
local function worth_of(self, ctx, i, votes)
  local held, length = ctx:held(ctx.layer, i), ctx.sequences[i + 1]:length()
  local keys = ctx:keys(ctx.layer, i, held)
  local first = (":, 0:%d"):format(keys:size(1))
  local past = kv.arange(ctx.device, "i32", keys:size(1)):ge(held)
    :expand { keys:size(0), keys:size(1) }
  local positions = ctx:positions():index(i)[first]:expand(past:dims())
  positions = past:where(math.huge, positions)
  local worth = pooled(self, past:where(0, votes[first]), positions) * self.mix
    - redundancy(self, keys, positions, held) * (1 - self.mix)
  local newest = length - self.window - (ctx.is_prefill and 0 or 1)
  return positions:ge(newest):where(math.huge, worth)
end

--- At the end of a prompt, whose last queries vote.
local function after_prompt(self, ctx, seq, i)
  if not (ctx.ends_prompts and ctx.ends_prompts[i + 1]) then return end
  local queries = self.queries:of(ctx, i)
  local weights = ctx:attention_weights(queries, ctx.layer, i, ctx:held(ctx.layer, i))
  local votes = weights:reshape { ctx.kv_heads, -1, queries:size(0), weights:size(2) }
    :max(1):mean(1)
  self.worth:put(seq, ctx.layer, worth_of(self, ctx, i, votes))
end

--- Before a decode step in which a token will make way. Votes began anew at a multiple of
-- the window.
local function score_again(self, ctx, i)
  local seq = ctx.sequences[i + 1]
  local queries = (seq:length() - 2) % self.window + 1
  self.worth:put(seq, ctx.layer,
    worth_of(self, ctx, i, self.votes:load(ctx):index(i) / queries))
end

return kv.policy.define {
  name = "rkv", decode = true, own_bytes = 0,
  defaults = { ratio = 0.1, sink = 0, recent = 0, window = 8, interval = 128, pool = 7,
               mix = 0.1, threshold = 0.5 },
  takes = { window = kv.policy.count, interval = kv.policy.count, pool = kv.policy.count,
            mix = kv.policy.share, threshold = kv.policy.share },
  emit = { newest = e.where(e.query_index:ge(e.length - 1), e.weight, 0):max "head" },

  init = function(self, shape)
    self.queries = kv.queries(shape, self.window)
    self.worth = kv.tally(shape, nil, math.huge, "token")
    self.votes = kv.tally(shape, nil, 0, "token")
  end,
  step_begin = function(self, ctx)
    for i, seq in ipairs(ctx.is_prefill and {} or ctx.sequences) do
      local is_due = (seq:length() - 1) % self.interval == 0
      for layer = 0, is_due and self.shape.layers - 1 or -1 do
        ctx:use_layer(layer)
        if ctx:makes_way(layer, i - 1) then kv.scope(score_again, self, ctx, i - 1) end
      end
    end
  end,
  attention_finished = function(self, ctx)
    self.queries:keep(ctx)
    if ctx.is_prefill then return ctx:each_sequence(after_prompt, self) end
    local at = ctx.batch.positions:reshape { ctx.seqs, 1, 1 }
    local goes_on = (at - at / self.window * self.window):gt(0)
    local votes = self.votes:load(ctx)
    goes_on:expand(votes:dims()):where(votes, 0, votes)
      :add(self.emitted.newest, votes)
    self.votes:store(ctx)
  end,
  evict = function(self) return self.worth end,
  reset = function(self)
    self.worth:reset()
    self.votes:reset()
  end,
}
