--- A policy whose tally is made of what attention emits, in prefill and in decode.
local kv = require "kvlab"

local e = kv.expr
local share = 0.9 ^ (e.length - 1 - e.query_index) * e.weight
return kv.policy.define {
  name = "emitting", decode = true, watches_prompt = true,
  defaults = { ratio = 0.4, sink = 1, recent = 1 },
  emit = { mass = share:mean "head", reads = e.tokens:gt(0):cast "f32" }, -- mass by token
  updated = kv.kernel.map(function(old, mass, reads)
    return 0.9 ^ reads * old + mass
  end),
  init = function(self, shape) self.mass = kv.tally(shape) end,
  step_begin = function(self, ctx) self.mass:begin(ctx) end,
  score = function(self, ctx) return self.mass:load(ctx) end,
  attention_finished = function(self, ctx)
    local mass, of_blocks = self.mass:load(ctx), ctx:new_scores()
    self.emitted.mass:reshape { ctx.seqs, ctx.kv_heads, ctx.width, ctx.block_size }
      :sum(3, of_blocks)
    self:updated(ctx, mass, of_blocks, self.emitted.reads, mass)
    self.mass:store(ctx)
  end,
  reset = function(self) self.mass:reset() end,
}
