--- Random: draws blocks uniformly, again for every token, layer and KV head. Every policy
-- should beat it.
-- Score   a Philox number in (0, 1] from seed, length, block, layer and head: the same on
--         every device, in any batch, and for a token of a draft
-- Cost    reads no keys to score
-- Fails   always: at a ratio r it keeps a given block with probability about r
local kv = require "kvlab"

local HEADS_MOST = 1024 -- that have tables of their own

--- The tensors for steps of a shape. A sequence's draws for a block lie together, so that
-- they do not depend on the width of a step.
local function new_room(ctx)
  local seqs, layers, heads, width = ctx.seqs, ctx.layers, ctx.kv_heads, ctx.width
  local function room(...) return kv.tensor(ctx.device, "f32", { ... }) end
  return { drawn = room(seqs, width, layers * heads),
           turned = room(seqs, layers * heads, width),
           scores = room(layers, seqs, heads * width) }
end

return kv.policy.define {
  name = "random", prefill = false, decode = true, own_bytes = 0,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2, seed = 0 },

  init = function(self) self.rooms = {} end,
  -- here and not in score, because a graph that replays score would repeat its draws
  step_begin = function(self, ctx)
    local room = self.rooms[ctx.shape_number] or kv.lasting(new_room, ctx)
    self.rooms[ctx.shape_number] = room
    for i, seq in ipairs(ctx.sequences) do
      local head = seq.head or 0 -- where tables are by head
      room.drawn:index(i - 1):rand_(self.seed, seq:step_length() * HEADS_MOST + head)
    end
    room.drawn:transpose(1, 2, room.turned)
    room.turned:reshape { ctx.seqs, ctx.layers, ctx.kv_heads * ctx.width }
      :transpose(0, 1, room.scores)
  end,
  score = function(self, ctx)
    local scores = ctx:new_scores()
    return scores:copy_(self.rooms[ctx.shape_number].scores:index(ctx.layer)
      :reshape(scores:dims()))
  end,
}
