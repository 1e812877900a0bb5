--- The task needle with queries = 4: four things have a number, and all are asked for.
-- Source  Hsieh et al. 2024 (RULER), arXiv:2404.06654: multi-query needles
local kv = require "kvlab"

return kv.task.vary("needle", { name = "needle_multiquery", defaults = { queries = 4 } })
