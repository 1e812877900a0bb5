--- The task needle with keys = 4: one of four things has the number that is asked for.
-- Source  Hsieh et al. 2024 (RULER), arXiv:2404.06654: multi-key needles
local kv = require "kvlab"

return kv.task.vary("needle", { name = "needle_multikey", defaults = { keys = 4 } })
