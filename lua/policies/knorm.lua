--- Knorm: keeps the tokens whose keys are short, whatever the queries are.
-- Source  Devoto et al. 2024, arXiv:2406.11430. As there, for each KV head, and once
--         after the prompt; the paper leaves the first two layers whole, as a budget by
--         layer does here (ratio = { 1, 1, 0.1, … })
-- Worth   -|k|
-- Cost    reads the keys once, after the prompt
-- Fails   models that attend to long keys
local kv = require "kvlab"

local function worth_of(_, ctx, i)
  local keys = ctx:keys(ctx.layer, i, ctx:held(ctx.layer, i))
  return (keys * keys):sum(2):sqrt():neg()
end

return kv.policy.define {
  name = "knorm", decode = true, own_bytes = 0, prompt_only = true,
  defaults = { ratio = 0.1, sink = 0, recent = 0 },

  evict = function(self, ctx) return ctx:worth_after_prompts(worth_of, self) end,
}
