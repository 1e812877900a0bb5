--- H2O by blocks: selects the heavy hitters, the blocks that received most of the
-- attention so far.
-- Source  Zhang et al. 2023, arXiv:2306.14048. The paper keeps tokens, spends half of the
--         budget on the newest ones and drops the others for good. This policy selects
--         blocks, `recent` of them newest, and a block that it passed over still gathers
--         its share of the attention. A query, of the prompt or decoded, counts the full
--         blocks before its own block; the paper also counts the newest tokens
-- Score   sum over all earlier queries, those of the prompt included, of the softmax over
--         blocks of q . mean(K), which estimates a block's attention; the mean over a
--         group's heads
-- Cost    reads 1/block_size of the keys (in f32) to update the sums, also in the prompt;
--         4 launches a step for each head of a group
-- Fails   an answer that no earlier query has looked at is not found. One heavy token
--         among light ones disappears in the average
local kv = require "kvlab"

--- The attention of a chunk's queries to blocks, where each query counts only the blocks
-- that were complete before its own block: f32 [kv_heads, n].
local function chunk_mass(self, ctx, seq, i, first, count)
  local s, start = self.shape, seq:length() - count
  local n = math.floor((start + count - 1) / s.block_size)
  if n == 0 then return end
  local q = ctx:group_queries(ctx.query, ctx.layer, first, count)
  local group = s.heads / s.kv_heads
  local weights = q:matmul_t(self.means:gather(ctx, ctx.layer, i, n))
    :reshape { s.heads, count, n }:add(ctx:causal_bias(count, n, start, s.block_size))
    :softmax(ctx.scale)
  local mass = weights:reshape { s.kv_heads, group * count, n }:sum(1)
  self.mass:put(seq, ctx.layer, mass / group, true)
end

--- What a decode step needs: the context as it was before each query's own block, the
-- rows of each head of the groups, and their queries.
local function make_room(self, ctx)
  local s, rows, group = self.shape, {}, self.shape.heads / self.shape.kv_heads
  local first = kv.arange(s.device, "i32", ctx.seqs * s.kv_heads, 0, group)
  for head = 1, group do rows[head] = first + (head - 1) end
  local lens = kv.tensor(s.device, "i32", { ctx.seqs })
  return { rows = rows, before = setmetatable({ lens = lens }, { __index = ctx }),
           q = kv.tensor(s.device, ctx.query:type(), { first.count, s.head_dim }) }
end

--- Adds the attention of the decoded queries to `mass`.
local function add_mass(self, ctx, mass)
  local s, size = self.shape, self.shape.block_size
  local room = self.rooms[ctx.shape_number] or kv.lasting(make_room, self, ctx)
  self.rooms[ctx.shape_number] = room
  local lens, scores = room.before.lens, ctx:new_scores()
  ctx.lens:sub(1, lens):div(size, lens):mul(size, lens)
  for _, rows in ipairs(room.rows) do
    ctx.query:reshape { ctx.seqs * s.heads, s.head_dim }:gather_rows(rows, room.q)
    kv.ops.score_mean(room.q:reshape { ctx.seqs, s.kv_heads, s.head_dim }, self.means,
      room.before, "mean", scores)
    mass:add(ctx:weights(scores):div(#room.rows, scores), mass)
  end
end

return kv.policy.define {
  name = "h2o_blocks", prefill = false, decode = true, own_bytes = 0,
  watches_prompt = true,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 0, recent = 2 },

  init = function(self, shape)
    self.means, self.mass, self.rooms = kv.summary.mean(shape), kv.tally(shape), {}
  end,
  on_prefill_offload = function(self, ev) self.means:update(ev) end,
  on_decode_offload = function(self, ev) self.means:update(ev) end,
  attention_finished = function(self, ctx)
    if ctx.is_prefill then ctx:each_sequence(chunk_mass, self) end
  end,
  step_begin = function(self, ctx) self.mass:begin(ctx) end,
  select_blocks = function(self, ctx)
    local mass = self.mass:load(ctx)
    local selection, counts = ctx:select(mass, self.budget)
    add_mass(self, ctx, mass)
    self.mass:store(ctx)
    return selection, counts
  end,
  reset = function(self) self.mass:reset() end,
}
