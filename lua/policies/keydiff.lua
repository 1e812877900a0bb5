--- KeyDiff: keeps the tokens whose keys differ most from the other keys of the sequence,
-- whatever the queries are.
-- Source  Park et al. 2025, arXiv:2504.15364: the cosine of each key to the mean of all
--         unit keys. The paper evicts after every block of a prompt; here it is once,
--         after the prompt
-- Worth   -cos(k, mean of the unit vectors of all keys that are held)
-- Cost    reads the keys once, after the prompt
-- Fails   questions about tokens that look common, since it never sees the question
local kv = require "kvlab"

local function worth_of(_, ctx, i)
  local held = ctx:held(ctx.layer, i)
  local keys = ctx:keys(ctx.layer, i, held) -- zeros past the last token
  local heads, n, dim = keys:size(0), keys:size(1), keys:size(2)
  local lengths = (keys * keys):sum(2):sqrt():add(1e-20)
  local units = keys / lengths:reshape { heads, n, 1 }
  local anchor = units:sum(1):reshape { heads, 1, dim }
  anchor = anchor / (anchor * anchor):sum(2):sqrt():add(1e-20):reshape { heads, 1, 1 }
  return (units * anchor):sum(2):neg()
end

return kv.policy.define {
  name = "keydiff", decode = true, own_bytes = 0, prompt_only = true,
  defaults = { ratio = 0.1, sink = 0, recent = 0 },

  evict = function(self, ctx) return ctx:worth_after_prompts(worth_of, self) end,
}
