--- DuoAttention: some KV heads hold everything, and the others hold the first tokens and
-- the newest ones.
-- Source  Xiao et al. 2024, arXiv:2410.10819. The paper trains a gate for each head, on
--         texts with passkeys. Here lua/experiments/24_heads.lua measures what a model
--         loses if one head alone streams; `heads` names its results, a folder or a file
--         of rows. The share `ratio` of the heads, those without which most is lost, hold
--         everything
-- Worth   as streaming: the oldest token after the sinks goes
-- Cost    none that is measurable: the heads are known from the start
-- Fails   information that only the streaming heads would have found
local kv = require "kvlab"

--- 1 for heads that hold everything, else 0: [layers * kv_heads].
local function retrieving(self, layers, heads)
  local list, is_whole = {}, {}
  local function below(x, count)
    return type(x) == "number" and x % 1 == 0 and x >= 0 and x < count
  end
  for i, row in ipairs(kv.experiment.rows(self.heads)) do
    local layer, head, lost = row.config.layer, row.config.head, row.metrics.lost
    if not below(layer, layers) or not below(head, heads) then
      error(("policy duo: row %d of %s is of layer %s, head %s, expected %d layers of %d "
        .. "KV heads; heads names results of 24_heads for the model"):format(i,
        self.heads, tostring(layer), tostring(head), layers, heads), 0)
    elseif type(lost) ~= "number" then
      error(("policy duo: row %d of %s: lost is %q, expected a number"):format(i,
        self.heads, tostring(lost)), 0)
    end
    list[i] = { layer = layer, head = head, lost = lost }
  end
  for i = 1, layers * heads do is_whole[i] = 0 end
  if #list == 0 then
    error(("policy duo: heads is %q, expected a folder or a file with results of "
      .. "24_heads"):format(self.heads), 0)
  end
  if #list ~= layers * heads then
    error(("policy duo: %s has %d heads, expected %d layers of %d KV heads"):format(
      self.heads, #list, layers, heads), 0)
  end
  table.sort(list, function(a, b)
    if a.lost ~= b.lost then return a.lost > b.lost end
    return a.layer * heads + a.head < b.layer * heads + b.head
  end)
  for i = 1, math.ceil(self.ratio * #list - 1e-9) do
    is_whole[list[i].layer * heads + list[i].head + 1] = 1
  end
  return is_whole
end

return kv.policy.define {
  name = "duo", decode = true, own_bytes = 0,
  defaults = { ratio = 0.5, sink = 1, recent = 16,
               heads = kv.paths.root .. "/lua/models/recall/heads.jsonl" },

  init = function(self, shape)
    if type(self.ratio) ~= "number" then
      error(("policy duo: %s, expected %s"):format(self.ratio and
        "ratio is a list or a tensor" or (self.tokens and "tokens" or "blocks")
        .. " is given", self.ratio and "a number" or "ratio, a number"), 0)
    end
    local heads = shape.kv_heads * (shape.cut_heads or 1)
    local whole = kv.from(shape.device, "f32", { shape.layers, heads },
      retrieving(self, shape.layers, heads))
    kv.policy.hold(self, "streaming", { ratio = whole, sink = self.sink,
                                        recent = self.recent })
  end,
  evict = function() end, -- hold puts streaming's evict here
}
