--- Full: every block. The dense baseline, and what prefill uses unless told otherwise.
-- Cost    reads all of K and V
local kv = require "kvlab"

return kv.policy.define {
  name = "full", prefill = true, decode = true,
  select_blocks = function() return nil end,
}
