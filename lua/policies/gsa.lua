--- GSA: blocks that were selected before, and newer ones; or those whose mean key is
-- nearest to the query, looked at every few steps. One list for all heads of a layer.
-- Source  the GSA of UCM (unified-cache-management): history is what its guide says, mean
--         what its code does. The budget is rounded up; the guide rounds it down
-- Score   history: 0.5 * times selected + 0.1 ... 1 from the first to the last block
--         mean: q . mean(K) over all heads at every `refresh`-th step of a sequence
-- Ahead   behind a hot cache, what the first step after a prompt selects comes before it;
--         by mean also, prefetch_ahead steps before a look, what is nearest now: at most
--         prefetch_cache_size blocks. The other prefetch options are the server's
-- Cost    history reads no keys; mean 1 / block_size of them at a look and in steps ahead
-- Fails   history: what it passed over never comes back, whatever is asked. mean: where
--         heads want different blocks, and for refresh - 1 steps after a change of topic
local kv = require "kvlab"
local whole, count = kv.policy.whole, kv.policy.count

local function update(self, ev) return self.means and self.means:update(ev) end

local function scores_of(self, ctx)
  if self.means then return ctx:score_means(self.means) end
  local counts, scores = self.tally:load(ctx), ctx:new_scores(1)
  return counts:mul(0.5, scores):add(ctx:ramp(0.1, 1), scores)
end

return kv.policy.define {
  name = "gsa", prefill = false, decode = true,
  defaults = { ratio = 0.3, min_blocks = 4, sink = 1, recent = 2, scores = "history",
    refresh = 3, prefetch_ahead = 2, prefetch_cache_size = 1000, prefetch_workers = 4,
    max_pending_prefetch = 64 },
  takes = { scores = kv.policy.one_of("history", "mean"), refresh = count,
    prefetch_ahead = whole, prefetch_cache_size = count, prefetch_workers = count,
    max_pending_prefetch = count },
  aliases = { sparse_ratio = "ratio", init_window_sz = "sink",
              local_window_sz = "recent" },
  init = function(self, shape)
    self.means = self.scores == "mean" and kv.summary.mean(shape)
    self.tally = kv.tally(shape, 1, self.means and -math.huge or 0)
    self.eager = self.means and self.refresh > 1
  end,
  on_prefill_offload = update, on_decode_offload = update,
  step_begin = function(self, ctx)
    self.tally:begin(ctx)
    self.tally:due(ctx, self.means and self.refresh or 1, self.prefetch_ahead)
  end,
  select_blocks = function(self, ctx)
    local scores = self.means and self.tally:renew(ctx, scores_of, self)
    local selection, n = ctx:select(scores or scores_of(self, ctx), self.budget)
    if not scores then self.tally:count(ctx, ctx:mark(selection)) end
    return selection, n
  end,
  predict = function(self, ctx)
    if self.prefetch_ahead == 0 then return nil end
    local scores = self.tally:foresee(ctx, scores_of, self)
    return scores and ctx:expect(scores, self.budget, self.prefetch_cache_size)
  end,
  score_bytes = function(self)
    return self.means and self.means:bytes_block() / self.refresh or 0
  end,
  reset = function(self) self.tally:reset() end,
}
