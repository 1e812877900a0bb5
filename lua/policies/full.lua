--- Full: selects every block. It is the dense baseline and the default in prefill.
-- Cost    reads all of K and V
local kv = require "kvlab"

return kv.policy.define {
  name = "full", prefill = true, decode = true, dense = true, own_bytes = 0,
  select_blocks = function() return nil end,
}
