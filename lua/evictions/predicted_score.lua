--- Predicted score: the block whose newest score is lowest leaves. The scores by which
-- the policy predicts the selections of later steps count, too.
-- Reads   predicted, so the policy must select by scores, and have a predict
-- Cost    one launch in each layer of a step, one more where the policy predicts
-- Fails   as last_score does. It differs from last_score only while blocks are brought
--         ahead of a step: a step that misses blocks has just scored all of them
local kv = require "kvlab"

return kv.eviction.define { name = "predicted_score",
  priority = function(predicted) return predicted end }
