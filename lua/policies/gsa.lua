--- GSA: selects one list of blocks for all heads of a layer, either by how often blocks
-- were selected before, or every few steps by the mean keys nearest to the query.
-- Source  the GSA of UCM (unified-cache-management): "history" follows its guide, "mean"
--         follows its code. The budget is rounded up here; the guide rounds it down
-- Score   history: 0.5 * times selected + a ramp from 0.1 (first block) to 1 (last block)
--         mean: q . mean(K) over all heads, at every `refresh`-th step of a sequence
-- Ahead   a hot cache brings the blocks of the first step after a prompt ahead of it, in
--         mean also the nearest blocks prefetch_ahead steps before a refresh, at most
--         prefetch_cache_size. The other prefetch options are for the server
-- Cost    history reads no keys; mean reads 1 / block_size of them when it scores
-- Fails   history: a block that was not selected never comes back, whatever the query is.
--         mean: heads that want different blocks share one list, and after a change of
--         topic the list is out of date for up to refresh - 1 steps
local kv, e = require "kvlab", require("kvlab").expr
local whole, count = kv.policy.whole, kv.policy.count

local function update(self, ev) return self.means and self.means:update(ev) end
local function scores_of(self, ctx)
  if self.means then return ctx:score_means(self.means) end
  return self:history(ctx, self.tally:load(ctx))
end

return kv.policy.define {
  name = "gsa", prefill = false, decode = true, own_bytes = 0,
  defaults = { ratio = 0.3, min_blocks = 4, sink = 1, recent = 2, scores = "history",
    refresh = 3, prefetch_ahead = 2, prefetch_cache_size = 1000, prefetch_workers = 4,
    max_pending_prefetch = 64 },
  takes = { scores = kv.policy.one_of("history", "mean"), refresh = count,
    prefetch_ahead = whole, prefetch_cache_size = count, prefetch_workers = count,
    max_pending_prefetch = count },
  aliases = { sparse_ratio = "ratio", init_window_sz = "sink",
              local_window_sz = "recent" },
  history = kv.kernel.map(function(times)
    return 0.5 * times + 0.1 + 0.9 * (e.block / e.max(e.blocks - 1, 1))
  end),
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
    if scores then return selection, n end
    local marks = ctx:mark(selection)
    if marks:size(1) > 1 then marks = ctx:shared_by("max", marks, 1) end -- by any head
    self.tally:count(ctx, marks)
    return selection, n
  end,
  predict = function(self, ctx)
    if self.prefetch_ahead == 0 then return nil end
    local scores = self.tally:foresee(ctx, scores_of, self)
    return scores and ctx:expect(scores, self.budget, self.prefetch_cache_size)
  end,
  reset = function(self) self.tally:reset() end,
}
