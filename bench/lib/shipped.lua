--- The scores and summaries of policies, each in up to three ways: as an expression, by
-- hand-written ops, and by tensor ops alone. spec/lua/kernel/
-- shipped_spec.lua compares them with each other, and `kvlab bench K2` times them.
--
-- A way is made by a function of a rig and has update(ev), fields() and score(ctx), or
-- some of them. fields() are the summary's values for the blocks of the rig, as f32 by
-- name. A case with `summary` has fields, one with `no_score` no score.
local kernel = require "kvlab.kernel.run.kernel"
local kv = require "kvlab"
local policy = require "kvlab.policy.policy"

local e = kv.expr
local M = {}

-- ---- a rig ----------------------------------------------------------------------------

--- A cache of one layer of random numbers with some sequences, and a decode step of them.
---@param dev kvlab.Device|string
---@param o table  dtype, group, kv_heads, block_size, head_dim, lens (>= 2), query_dtype
function M.rig(dev, o)
  dev = kv.device(dev)
  local blocks, tokens, width = 0, 0, 0
  for _, length in ipairs(o.lens) do
    local n = math.ceil(length / o.block_size)
    blocks, tokens, width = blocks + n, tokens + length, math.max(width, n)
  end
  local cache = kv.cache { device = dev, format = o.dtype, layers = 1, blocks = blocks,
    block_size = o.block_size, kv_heads = o.kv_heads, head_dim = o.head_dim }
  local memory = cache:layer(0)
  for block = 0, blocks - 1, 256 do
    local part = memory:narrow(block, math.min(256, blocks - block))
    kv.scope(function()
      part:copy_(kv.randn(dev, "f32", part:dims(), { seed = block + 1 }):cast(o.dtype))
    end)
  end
  local heads = o.kv_heads * o.group
  local attention = kv.attention { cache = cache, heads = heads, max_seqs = #o.lens,
    max_blocks = width, decode_policy = kv.policy "full" }
  local batch = cache:batch { max_seqs = #o.lens, max_tokens = tokens,
    max_blocks = width }
  local seqs, before, one = {}, {}, {}
  for i, length in ipairs(o.lens) do
    seqs[i], before[i], one[i] = cache:sequence(), length - 1, 1
  end
  batch:append(seqs, before)
  attention:begin(batch, true)
  batch:append(seqs, one)
  attention:begin(batch, false)
  local rig = { device = dev, o = o, cache = cache, attention = attention, heads = heads,
    shape = attention.shape, ctx = attention.context, blocks = blocks, seqs = seqs,
    query = kv.randn(dev, o.query_dtype or "f32", { #seqs, heads, o.head_dim },
      { seed = 9 }) }
  local list, counts = {}, {}
  for i, seq in ipairs(seqs) do
    for b, block in ipairs(seq:table()) do
      list[#list + 1] = block
      counts[#counts + 1] = math.min(o.block_size, o.lens[i] - (b - 1) * o.block_size)
    end
  end
  rig.list = kv.from(dev, "i32", { #list }, list)
  rig.ev = { layer = 0, k = memory, k_blocks = rig.list, blocks = rig.list,
    num_tokens = kv.from(dev, "i32", { #counts }, counts), turns = #list }
  M.begin(rig)
  return rig
end

--- Sets the context to the layer again, so that its tensors return to their pools.
function M.begin(rig) rig.ctx:begin_layer(0, rig.query, rig.cache:layer(0)) end

-- ---- ways -----------------------------------------------------------------------------

--- The rows of a layer of a summary, [blocks, kv_heads, …], of the rig's blocks, as f32.
local function rows(rig, layer)
  local n = layer:size(0)
  return layer:reshape { n, -1 }:gather_rows(rig.list):cast "f32"
end

--- A policy of expressions.
local function expressed(rig, def)
  def.name, def.decode = "expressed", true
  def.score = def.score or function() end
  local p = policy.attach(policy.define(def) {}, rig.shape)
  local way = { policy = p }
  if def.summary then
    function way.update(ev) p:on_prefill_offload(ev) end
    function way.fields()
      local values = {}
      for name in pairs(def.summary) do
        values[name] = rows(rig, p.summary[name]:layer(0))
      end
      return values
    end
  end
  if type(def.score) == "table" then
    function way.score(ctx) return p:score(ctx) end
  end
  return way
end

--- A shipped policy; fields(p) has its summary's rows by name.
local function shipped(rig, name, fields)
  local p = policy.attach(kv.policy(name), rig.shape)
  return { policy = p, update = p.on_prefill_offload and function(ev)
      p:on_prefill_offload(ev)
    end,
    fields = fields and function() return fields(p) end,
    score = function(ctx) return p:score(ctx) end }
end

--- A hand-written summary of kv.summary, and q . its vectors. fields(summary)
-- has its rows by name.
local function by_ops(summary, fields)
  return { update = function(ev) summary:update(ev) end,
    fields = function() return fields(summary) end,
    score = function(ctx) return kv.ops.score_mean(ctx.query, summary, ctx) end }
end

--- The kernel that an expression's summary or score runs.
---@param what string  summary or score
---@return kvlab.Kernel
function M.kernel(way, what)
  local p = way.policy
  if what == "summary" then return kernel.of_summary(p.summary) end
  return p.score_kernel or select(2, next(p.map_kernels))
end

-- ---- tensor ops -----------------------------------------------------------------------

--- The K of an event's blocks: f32 [n, kv_heads, block_size, head_dim], and which tokens
-- are valid: [n, kv_heads, block_size].
local function keys_of(rig, ev)
  local s = rig.shape
  local k = ev.k:reshape { -1, s.kv_heads, s.block_size, s.head_dim }
    :gather_rows(ev.k_blocks * 2):cast "f32"
  local places = kv.arange(s.device, "i32", s.block_size):reshape { 1, 1, s.block_size }
    + kv.zeros(s.device, "i32", { 1, s.kv_heads, 1 })
  return k, places:lt(ev.num_tokens:reshape { -1, 1, 1 })
end

--- The entries of the context's blocks in a layer of a summary, [blocks, kv_heads, n]:
-- f32 [seqs, width, kv_heads, 1, n].
local function entries(ctx, layer)
  return layer:reshape { layer:size(0), -1 }
    :gather_rows(ctx.tables:reshape { -1 }):cast "f32"
    :reshape { ctx.seqs, ctx.width, ctx.kv_heads, 1, -1 }
end

local function queries(ctx)
  return ctx.query:cast "f32":reshape { ctx.seqs, 1, ctx.kv_heads,
    ctx.heads / ctx.kv_heads, -1 }
end

--- f32 [seqs, width, kv_heads] as scores.
local function as_scores(ctx, values)
  return ctx:new_scores():copy_(values:transpose(1, 2))
end

--- f32 [n, kv_heads, block_size, head_dim] reduced over valid tokens.
local function over_tokens(k, valid, how, outside)
  local n, heads, size = k:size(0), k:size(1), k:size(2)
  local ones = kv.ones(k.device, "f32", { 1, 1, 1, k:size(3) })
  local mask = (valid:cast "f32":reshape { n, heads, size, 1 } * ones):cast "u8"
  local kept = mask:where(k, outside)
  return kept[how](kept, 2)
end

local function zeros_of(rig, names, dtype)
  local s, layers = rig.shape, {}
  for _, name in ipairs(names) do
    layers[name] = kv.zeros(s.device, dtype or "f32",
      { s.blocks, s.kv_heads, s.head_dim })
  end
  return layers
end

local function fields_of(rig, layers)
  return function()
    local values = {}
    for name, layer in pairs(layers) do values[name] = rows(rig, layer) end
    return values
  end
end

-- ---- the cases ------------------------------------------------------------------------

M.cases = {}
local function case(one) M.cases[#M.cases + 1] = one end

case {
  name = "quest", summary = true,
  expression = function(rig)
    return expressed(rig, {
      summary = { lo = e.k:min "token", hi = e.k:max "token" },
      score = e.max(e.q * e.lo, e.q * e.hi):sum "dim":max "head",
    })
  end,
  hand = function(rig)
    return shipped(rig, "quest", function(p)
      local layer = p.bounds:layer(0)
      local s = rig.shape
      local both = layer:reshape { s.blocks * 2, s.kv_heads * s.head_dim }
      return { lo = both:gather_rows(rig.list * 2):cast "f32",
               hi = both:gather_rows(rig.list * 2 + 1):cast "f32" }
    end)
  end,
  tensors = function(rig)
    local layers = zeros_of(rig, { "lo", "hi" }, rig.o.dtype)
    return { fields = fields_of(rig, layers),
      update = function(ev)
        local k, valid = keys_of(rig, ev)
        layers.lo:scatter_rows_(ev.blocks,
          over_tokens(k, valid, "min", math.huge):cast(rig.o.dtype))
        layers.hi:scatter_rows_(ev.blocks,
          over_tokens(k, valid, "max", -math.huge):cast(rig.o.dtype))
      end,
      score = function(ctx)
        local q = queries(ctx)
        return as_scores(ctx, (q * entries(ctx, layers.lo))
          :maximum(q * entries(ctx, layers.hi)):sum(-1):max(-1))
      end }
  end,
}

case {
  name = "block_mean", summary = true,
  expression = function(rig)
    return expressed(rig, { summary = { mean = e.k:mean "token" },
      score = (e.q * e.mean):sum "dim":max "head" })
  end,
  hand = function(rig)
    return by_ops(kv.summary.mean(rig.shape), function(means)
      return { mean = rows(rig, means:layer(0)) }
    end)
  end,
  tensors = function(rig)
    local layers = zeros_of(rig, { "mean" })
    return { fields = fields_of(rig, layers),
      update = function(ev)
        local k, valid = keys_of(rig, ev)
        local n = ev.num_tokens:cast "f32":maximum(1):reshape { -1, 1, 1 }
        layers.mean:scatter_rows_(ev.blocks, over_tokens(k, valid, "sum", 0) / n)
      end,
      score = function(ctx)
        return as_scores(ctx, (queries(ctx) * entries(ctx, layers.mean)):sum(-1):max(-1))
      end }
  end,
}

case { -- docs/policies.md has it by tensor ops
  name = "short_keys", summary = true,
  expression = function(rig)
    return expressed(rig, { summary = { least = (e.k * e.k):sum "dim":min "token" },
                            score = -e.least })
  end,
  tensors = function(rig)
    local s = rig.shape
    local least = kv.zeros(s.device, "f32", { s.blocks, s.kv_heads })
    return { fields = function() return { least = rows(rig, least) } end,
      update = function(ev)
        local k, valid = keys_of(rig, ev)
        local squares = (k * k):sum(-1)
        local far = kv.full(s.device, "f32", squares:dims(), math.huge)
        least:scatter_rows_(ev.blocks, valid:where(squares, far):min(-1))
      end,
      score = function(ctx)
        return as_scores(ctx, -entries(ctx, least):reshape { ctx.seqs, ctx.width,
          ctx.kv_heads })
      end }
  end,
}

case { -- the shipped one continues to count from one sequence to the next; the ranks are
       -- the same
  name = "streaming_blocks", ranks = true,
  expression = function(rig) return expressed(rig, { score = e.block }) end,
  hand = function(rig) return shipped(rig, "streaming_blocks") end,
}

case {
  name = "gsa, history",
  expression = function(rig)
    local way = expressed(rig, {
      ranked = kv.kernel.map(function(often)
        return 0.5 * often + 0.1 + e.block / e.max(e.blocks - 1, 1) * 0.9
      end),
    })
    local often = kv.rand(rig.device, "f32", { #rig.seqs, 1, rig.ctx.width })
    function way.score(ctx) return way.policy:ranked(ctx, often) end
    return way
  end,
  hand = function(rig)
    local often = kv.rand(rig.device, "f32", { #rig.seqs, 1, rig.ctx.width })
    return { score = function(ctx)
      local scores = ctx:new_scores(1)
      ctx.step = ctx.step + 1 -- the ramp is made once a step
      return often:mul(0.5, scores):add(ctx:ramp(0.1, 1), scores)
    end }
  end,
}

local function unit(x) return x / ((x * x):sum "dim" + 1e-40):sqrt() end

case { -- the part that an expression can compute; a score that depends on all blocks'
       -- means is not
  name = "keydiff, unit means", summary = true, no_score = true,
  expression = function(rig)
    return expressed(rig, { summary = { unit = unit(e.k:mean "token") } })
  end,
  hand = function(rig)
    local means, layers = kv.summary.mean(rig.shape), zeros_of(rig, { "unit" })
    return { fields = fields_of(rig, layers),
      update = function(ev)
        means:update(ev)
        local x = means:layer(0):gather_rows(ev.blocks)
        layers.unit:scatter_rows_(ev.blocks,
          x / (x * x):sum(-1):sqrt():add(1e-20):reshape { x:size(0), x:size(1), 1 })
      end }
  end,
}

case {
  name = "infllm", summary = true,
  expression = function(rig)
    local infllm = kv.policy("infllm").expressions
    return expressed(rig, { summary = infllm.fields, score = infllm.score })
  end,
  hand = function(rig)
    return by_ops(kv.summary.representatives(rig.shape, 4), function(means)
      return { mean = rows(rig, means:layer(0)) }
    end)
  end,
}

local function hash(x)
  return (x * e.const("f32", "planes", "bit", "dim")):sum "dim":gt(0):pack "bit"
end

case {
  name = "gsa_on_device", summary = true,
  expression = function(rig)
    return expressed(rig, {
      init = function(self, shape)
        self.planes = kv.hash.planes { bits = 64, head_dim = shape.head_dim,
                                       device = shape.device }
      end,
      summary = { hash = hash(e.k:mean "token") },
      score = -hash(e.q:mean "head"):bxor(e.hash):popcount():sum "word",
    })
  end,
  hand = function(rig)
    local hashes, s = kv.hash.summary(rig.shape, { bits = 64 }), rig.shape
    local rows_of_q = #rig.seqs * s.kv_heads
    return { policy = { hashes = hashes },
      update = function(ev) hashes:update(ev) end,
      score = function(ctx)
        local q = ctx.query:reshape { rows_of_q, rig.o.group, s.head_dim }
        return kv.ops.score_hamming(kv.hash.rows(q:cast("f32"):mean(1), hashes.planes)
          :reshape { #rig.seqs, s.kv_heads, 1 }, hashes, ctx)
      end }
  end,
}

case { -- MSA's max-pool over a block; the policy oracle
  name = "max of q . k",
  expression = function(rig)
    return expressed(rig, { score = (e.q * e.k):sum "dim":max("token", "head") })
  end,
  hand = function(rig) return shipped(rig, "oracle") end,
}

case { -- only for groups of one head, because the policy takes the mean of a group's
       -- masses
  name = "mass_oracle", group = 1,
  expression = function(rig)
    local way = expressed(rig, {
      score = ((e.q * e.k):sum "dim" * rig.shape.scale):logsumexp "token":max "head" })
    local score = way.score
    function way.score(ctx)
      local scores = score(ctx)
      return scores:softmax(1, scores)
    end
    return way
  end,
  hand = function(rig) return shipped(rig, "mass_oracle") end,
}

return M
