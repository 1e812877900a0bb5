--- MagicPIG: draws blocks by the chance that their hash collides with the query's, and
-- weighs each drawn block by one over its chance, so that sums are right on average.
-- Source  Chen et al. 2024, arXiv:2410.16179. The paper keeps every token that collides
--         in at least two hash tables, of keys less the mean key of the prompt. This
--         policy draws blocks within the budget, by the hash of a block's mean key, less
--         the mean key of the blocks before it (of the first 2^k, more than half of them:
--         kv.hash.centred), so that a hash does not depend on what follows, or on chunks.
--         The newest block is always taken. A group's heads share one hash, of their mean
--         query, and a block needs one collision where the paper asks for two
-- Score   u / r: u = 1 - (1 - p^bits)^tables is the chance of a collision, p the share of
--         `code` bits that agree with the query's; r in (0, 1] is drawn
-- Cost    code / 8 bytes a block and KV head, and the mean keys (1/block_size of the
--         keys, in f32) once a block
-- Fails   when one key holds the answer, because its block is drawn only with a chance
local kv = require "kvlab"

local function make_room(self, ctx, rows)
  local s = self.shape
  local codes = kv.tensor(s.device, "u64", { ctx.seqs, s.kv_heads, self.code / 64 })
  return { means = kv.tensor(s.device, "f32", { rows, s.head_dim }), codes = codes,
           code_rows = codes:reshape { rows, self.code / 64 } }
end

--- The hash of the mean query of each KV head: u64 [seqs, kv_heads, words].
local function hash_queries(self, ctx)
  local s, rows = self.shape, ctx.seqs * self.shape.kv_heads
  local room = self.rooms[ctx.shape_number] or kv.lasting(make_room, self, ctx, rows)
  self.rooms[ctx.shape_number] = room
  ctx.query:reshape { rows, s.heads / s.kv_heads, s.head_dim }:mean(1, room.means)
  kv.hash.rows(room.means, self.hashes.planes, room.code_rows)
  return room.codes
end

--- The chance that each block's hash collides with the query's; 0 past the last block.
-- (One kv.kernel.map in place of these ops takes 6 times as long on a CPU, where maps are
-- not computed in vectors.)
local function collision_chance(self, ctx)
  local x = kv.ops.score_hamming(hash_queries(self, ctx), self.hashes, ctx)
  x:div(self.code, x):add(1, x):maximum(0, x) -- p
  x:log(x):mul(self.bits, x):exp(x):mul(-1, x):add(1, x) -- 1 - p^bits
  return x:log(x):mul(self.tables, x):exp(x):mul(-1, x):add(1, x)
end

return kv.policy.define {
  name = "magicpig", prefill = false, decode = true, own_bytes = 0,
  defaults = { ratio = 0.1, min_blocks = 4, sink = 1, recent = 2, bits = 10,
               tables = 150, code = 256, seed = 0 },
  takes = { bits = kv.policy.count, tables = kv.policy.count, code = kv.policy.count },
  complete = {}, -- with room for every block, each counts once
  init = function(self, shape)
    self.hashes = kv.hash.centred(shape, { bits = self.code, seed = self.seed })
    self.sampling, self.rooms = kv.sampling(shape, self.seed), {}
  end,
  on_prefill_offload = function(self, ev) self.hashes:update(ev) end,
  on_decode_offload = function(self, ev) self.hashes:update(ev) end,
  step_begin = function(self, ctx) self.hashes:begin(ctx) end,
  attention_finished = function(self, ctx) self.hashes:finished(ctx) end,
  select_blocks = function(self, ctx)
    local selection, counts, log_weights =
      self.sampling:draw(ctx, collision_chance(self, ctx), self.budget)
    self.log_weights = log_weights
    return selection, counts
  end,
  log_weight = kv.expr.input "log_weights",
}
