--- The task needle with values = 4: one thing has four numbers, which are all asked for.
-- Source  Hsieh et al. 2024 (RULER), arXiv:2404.06654: multi-value needles
local kv = require "kvlab"

return kv.task.vary("needle", { name = "needle_multivalue", defaults = { values = 4 } })
