--- GSA: blocks that were selected before, and newer ones; or those whose mean key is
-- nearest to the query, looked at every few steps. One list for all heads of a layer.
-- Source  the GSA of UCM (unified-cache-management): history is what its guide says, mean
--         what its code does. The budget is rounded up; the guide rounds it down
-- Score   history: 0.5 * times selected + 0.1 ... 1 from the first to the last block
--         mean: q . mean(K), the mean over all heads, at every `refresh`-th step of a
--         sequence, and those scores until the next
-- Cost    history reads no keys to score; mean 1 / (refresh * block_size) of them
-- Fails   history: what was selected is selected again, whatever is asked; what it passed
--         over never comes back. mean: as block_mean does, where heads want different
--         blocks, and for refresh - 1 steps after a change of topic
-- prefetch_* and max_pending_prefetch are the server loop's and its prefetch engine's,
-- which read them off the policy.
local kv = require "kvlab"
local count = kv.policy.count

local function update(self, ev) return self.means and self.means:update(ev) end

local function mean_scores(self, ctx)
  if self.due == 0 then return self.tally:load(ctx) end
  local scores = kv.ops.score_mean(ctx.query, self.means, ctx, "mean")
  return self.tally:renew(ctx, ctx:mean_over_heads(scores))
end

return kv.policy.define {
  name = "gsa", prefill = false, decode = true,
  defaults = { ratio = 0.3, min_blocks = 4, sink = 1, recent = 2, scores = "history",
               refresh = 3, prefetch_ahead = 2, prefetch_cache_size = 1000,
               prefetch_workers = 4, max_pending_prefetch = 64 },
  takes = { scores = kv.policy.one_of("history", "mean"), refresh = count,
            prefetch_ahead = kv.policy.whole, prefetch_cache_size = count,
            prefetch_workers = count, max_pending_prefetch = count },
  aliases = { sparse_ratio = "ratio", init_window_sz = "sink",
              local_window_sz = "recent" },

  init = function(self, shape)
    local is_mean = self.scores == "mean"
    self.tally = kv.tally(shape, 1, is_mean and -math.huge or 0)
    self.means = is_mean and kv.summary.mean(shape)
    self.eager = is_mean and self.refresh > 1
  end,
  on_prefill_offload = update, on_decode_offload = update,
  step_begin = function(self, ctx)
    self.tally:begin(ctx)
    self.due = self.tally:due(ctx, self.refresh)
  end,
  select_blocks = function(self, ctx)
    if self.means then return ctx:select(mean_scores(self, ctx), self.budget) end
    local counts, scores = self.tally:load(ctx), ctx.scores_shared
    counts:mul(0.5, scores):add(ctx:ramp(0.1, 1), scores)
    local selection, n = ctx:select(scores, self.budget)
    counts:add(ctx:mark(selection), counts)
    self.tally:store(ctx)
    return selection, n
  end,
  score_bytes = function(self)
    return self.means and self.means:bytes_block() / self.refresh or 0
  end,
  reset = function(self) self.tally:reset() end,
}
