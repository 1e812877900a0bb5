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
--         all held keys with each other: 4 * held^2 bytes a head, a few times, for all
--         heads of a sequence together
-- Fails   later questions about things that were said twice in different words
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

--- Writes the worth of the tokens that `count` rows from `first` on hold: heads of one
-- sequence with equally many tokens. votes: the mean weights, f32 [heads, columns].
local function put_worth(self, ctx, first, count, votes)
  local held, keys = ctx:held(ctx.layer, first), {}
  for i = 1, count do keys[i] = ctx:keys(ctx.layer, first + i - 1, held) end
  keys = count > 1 and kv.cat(keys) or keys[1]
  local heads, columns = keys:size(0), keys:size(1)
  local part = (":, 0:%d"):format(columns)
  local past = kv.arange(ctx.device, "i32", columns):ge(held):expand { heads, columns }
  local positions = ctx:positions():narrow(first, count):reshape { count, -1 }
  positions = past:where(math.huge, positions[part]:expand(past:dims()))
  local worth = pooled(self, past:where(0, votes[part]), positions) * self.mix
    - redundancy(self, keys, positions, held) * (1 - self.mix)
  local newest = ctx.sequences[first + 1]:length() - self.window
    - (ctx.is_prefill and 0 or 1)
  worth = positions:ge(newest):where(math.huge, worth)
  for i = 0, count - 1 do
    self.worth:put(ctx.sequences[first + i + 1], ctx.layer,
      worth:narrow(i * ctx.kv_heads, ctx.kv_heads))
  end
end

--- Called at the end of a prompt, whose last queries vote.
local function after_prompt(self, ctx, first, count)
  local votes = {}
  for i = 1, count do
    local row = first + i - 1
    local queries = self.queries:of(ctx, row)
    local weights = ctx:attention_weights(queries, ctx.layer, row,
      ctx:held(ctx.layer, row))
    votes[i] = weights:reshape { ctx.kv_heads, -1, queries:size(0), weights:size(2) }
      :max(1):mean(1)
  end
  put_worth(self, ctx, first, count, count > 1 and kv.cat(votes) or votes[1])
end

--- Called before a decode step that will replace a token. Votes start again at each
-- multiple of the window.
local function score_again(self, ctx, first, count)
  local queries = (ctx.sequences[first + 1]:length() - 2) % self.window + 1
  local votes = self.votes:load(ctx):narrow(first, count)
    :reshape { count * ctx.kv_heads, -1 }
  put_worth(self, ctx, first, count, votes / queries)
end

--- Calls fn(self, ctx, first, count) for the rows of the layer that are chosen: together
-- for those heads of a sequence that hold equally many tokens.
local function each_run(self, ctx, is_chosen, fn)
  local function is_next(first, row)
    local one, other = ctx.sequences[first + 1], ctx.sequences[row + 1]
    return other and one.head and other.base == one.base and is_chosen(self, ctx, row)
      and ctx:held(ctx.layer, row) == ctx:held(ctx.layer, first)
  end
  local first = 0
  while first < ctx.seqs do
    local count = 1
    if is_chosen(self, ctx, first) then
      while is_next(first, first + count) do count = count + 1 end
      kv.scope(fn, self, ctx, first, count)
    end
    first = first + count
  end
end

local function ends_prompt(_, ctx, i)
  return ctx.ends_prompts and ctx.ends_prompts[i + 1]
end

local function is_due(self, seq) return (seq:length() - 1) % self.interval == 0 end

local function makes_way(self, ctx, i)
  return is_due(self, ctx.sequences[i + 1]) and ctx:makes_way(ctx.layer, i)
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
    local any = false
    for _, seq in ipairs(ctx.sequences) do any = any or is_due(self, seq) end
    for layer = 0, any and not ctx.is_prefill and self.shape.layers - 1 or -1 do
      ctx:use_layer(layer)
      each_run(self, ctx, makes_way, score_again)
    end
  end,
  attention_finished = function(self, ctx)
    self.queries:keep(ctx)
    if ctx.is_prefill then return each_run(self, ctx, ends_prompt, after_prompt) end
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
