--- Full: selects every block. It is the dense baseline and the default in prefill.
-- Cost    reads all of K and V
local kv = require "kvlab"

return kv.policy.define {
  name = "full", prefill = true, decode = true,
  select_blocks = function() return nil end,
}
