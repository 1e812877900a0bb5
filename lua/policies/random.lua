--- Random: draws blocks uniformly, again for every token, layer and KV head. Every policy
-- should beat it.
-- Score   a Philox number in (0, 1] from seed, length and layer; the same on every device
-- Cost    reads no keys to score
-- Fails   always: at a ratio r it keeps a given block with probability about r
local kv = require "kvlab"

--- The tensors for steps of a shape. The draws of a block lie together, so that they do
-- not depend on the width of a step.
local function new_room(ctx)
  local rows, draws = ctx.seqs * ctx.kv_heads, {}
  for layer = 0, ctx.layers - 1 do
    draws[layer] = kv.tensor(ctx.device, "f32", { 1, ctx.width * rows })
  end
  local places = kv.arange(ctx.device, "i32", rows):reshape { rows, 1 }
    + kv.arange(ctx.device, "i32", ctx.width, 0, rows)
  return { draws = draws, places = places:reshape { 1, rows * ctx.width } }
end

return kv.policy.define {
  name = "random", prefill = false, decode = true, own_bytes = 0,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2, seed = 0 },

  init = function(self) self.rooms = {} end,
  -- here and not in score, because a graph that replays score would repeat its draws
  step_begin = function(self, ctx)
    local room = self.rooms[ctx.shape_number] or kv.lasting(new_room, ctx)
    self.rooms[ctx.shape_number] = room
    for layer = 0, ctx.layers - 1 do
      room.draws[layer]:rand_(self.seed, ctx.total_kv_len * ctx.layers + layer)
    end
  end,
  score = function(self, ctx)
    local room, scores = self.rooms[ctx.shape_number], ctx:new_scores()
    room.draws[ctx.layer]:gather(room.places, scores:reshape(room.places:dims()))
    return scores
  end,
}
