--- Union: `first` selects with `share` of the budget, and `second` scores for the rest.
-- Score   the score of `second`; the blocks that `first` selected come before all others
-- Cost    the cost of both scores
-- Fails   when only one of the two is right, the other wastes its part of the budget
local kv = require "kvlab"

local BEFORE = 1e30 -- more than any score

return kv.policy.define {
  name = "union", prefill = false, decode = true, own_bytes = 0,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2, share = 0.5,
               first = "quest", second = "block_mean" },
  takes = { share = kv.policy.share, first = kv.policy.policy_name,
            second = kv.policy.policy_name },

  init = function(self)
    local part = kv.policy.part(self, self.share)
    part.min_blocks = 0
    self.one, self.other = kv.policy.nest(self, self.first, part),
      kv.policy.nest(self, self.second)
    if not self.other.score then
      error(("policy union: second is %s, which has no score"):format(self.second), 0)
    end
  end,
  score = function(self, ctx)
    local marks = ctx:mark((self.one:select_blocks(ctx)))
    marks:mul(BEFORE, marks)
    local scores = self.other:score(ctx)
    local is_shared = marks:size(1) == 1 and scores:size(1) == 1
    return scores:add(marks, ctx:new_scores(is_shared and 1 or nil))
  end,
}
