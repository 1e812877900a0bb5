--- Attention with a policy's expressions (K3): bias, log_weight and emit, each beside
-- attention without it, beside the op's own way where it has one, and beside what a
-- policy had to do before. In a prefill the flops are those of attention alone, so that
-- what comes on top shows as a lower rate.
local kv = require "kvlab"
local paged = require "bench.lib.paged"
local policy = require "kvlab.policy.policy"

local e = kv.expr
local KV_HEADS, HEADS, DIM, BLOCK = paged.KV_HEADS, paged.HEADS, paged.DIM, paged.BLOCK
local SHARE = 0.1 -- of the blocks, where some are selected

--- A decode step of an attention over a filled cache.
---@param o table  seqs, len; def: what the policy defines; alibi, soft_cap: of the op
local function prepare(b, o)
  local dev, blocks = b.device, o.seqs * (math.ceil(o.len / BLOCK) + 1)
  local cache = kv.cache { device = dev, layers = 1, kv_heads = KV_HEADS, head_dim = DIM,
    block_size = BLOCK, blocks = blocks, format = "bf16" }
  cache:layer(0):copy_(kv.randn(dev, "bf16", cache:layer(0):dims(), { seed = 1 }))
  local def = { name = "bench", decode = true, select_blocks = function() end,
                complete = false }
  for key, value in pairs(o.def or {}) do def[key] = value end
  local p = policy.define(def) {}
  local slopes = {}
  for i = 1, HEADS do slopes[i] = 2 ^ (-8 * i / HEADS) end
  p.slopes = kv.from(dev, "f32", { KV_HEADS, HEADS / KV_HEADS }, slopes)
  local attention = kv.attention { cache = cache, heads = HEADS, decode_policy = p,
    max_seqs = o.seqs, soft_cap = o.soft_cap,
    alibi = o.alibi and p.slopes:reshape { HEADS } }
  local seqs, lens, ones = {}, {}, {}
  local batch = cache:batch { max_seqs = o.seqs, max_tokens = o.seqs * o.len }
  for i = 1, o.seqs do seqs[i], lens[i], ones[i] = cache:sequence(), o.len - 1, 1 end
  attention:begin(batch:append(seqs, lens), true)
  attention:begin(batch:append(seqs, ones), false)
  local ctx = attention.context
  local q = kv.randn(dev, "bf16", { o.seqs, HEADS, DIM }, { seed = 2 })
  ctx:begin_layer(0, q, cache:layer(0))
  local width = ctx.width
  local r = { attention = attention, ctx = ctx, p = p, q = q, memory = cache:layer(0),
    out = kv.tensor(dev, "bf16", { o.seqs, HEADS, DIM }), keep = { cache, batch, seqs } }
  p.weights = kv.rand(dev, "f32", { o.seqs, KV_HEADS, width }, { seed = 3 })
  if o.selects then
    local budget = paged.budget(math.ceil(width * SHARE))
    r.selection = (ctx:select(p.weights, budget)):clone()
  end
  local read = r.selection and r.selection:size(2) * BLOCK or o.len
  r.bytes = o.seqs * read * paged.TOKEN * 2
  return r
end

--- The attention of a step, and the memory that belongs to the policy back in its pools.
local function attend(r)
  r.ctx:begin_layer(0, r.q, r.memory)
  return r.attention:over(r.selection, r.ctx, r.out)
end

local function case(b, name, o, run)
  b:case { id = "K3", name = ("%s, %d x %d%s"):format(name, o.seqs, o.len,
    o.selects and ", 10%" or ""), target = o.target, setup = function(bench)
    local r = prepare(bench, o)
    return { run = function() (run or attend)(r) end, bytes = r.bytes }
  end }
end

local slope = e.const("f32", "slopes", "kv_head", "head")
local qk = (e.q * e.k):sum "dim"

--- The mass of every block by a second pass over K.
local function second_pass(r)
  attend(r)
  r.p:score(r.ctx)
end

--- A prefill of one prompt with a policy, and what the policy does after it.
local function prefill(b, len, p)
  local dev = b.device
  local cache = kv.cache { device = dev, layers = 1, kv_heads = KV_HEADS, head_dim = DIM,
    block_size = BLOCK, blocks = math.ceil(len / BLOCK) + 1, format = "bf16" }
  cache:layer(0):copy_(kv.randn(dev, "bf16", cache:layer(0):dims(), { seed = 1 }))
  local attention = kv.attention { cache = cache, heads = HEADS, decode_policy = p,
    max_seqs = 1 }
  local seq, batch = cache:sequence(), cache:batch { max_seqs = 1, max_tokens = len }
  attention:begin(batch:append({ seq }, { len }), true)
  local ctx = attention.context
  local q = kv.randn(dev, "bf16", { len, HEADS, DIM }, { seed = 2 })
  local out = kv.tensor(dev, "bf16", { len, HEADS, DIM })
  return { keep = seq, flops = 4 * DIM * HEADS * len * (len + 1) / 2, run = function()
    ctx:begin_layer(0, q, cache:layer(0))
    attention:over(nil, ctx, out)
    if p.attention_finished then p:attention_finished(ctx) end
  end }
end

local function emitting(emit)
  return policy.define { name = "bench", decode = true, watches_prompt = true,
    complete = false, select_blocks = function() end, emit = emit } {}
end

local is_newest = e.query_index:ge(e.length - 32)
local PREFILLS = {
  { "prefill", function() return kv.policy "full" end },
  { "prefill, mass by emit", function()
    return emitting { mass = e.weight:sum "token":mean "head" }
  end },
  { "prefill, mass by token by emit", function()
    return emitting { mass = e.weight:mean "head" }
  end },
  { "prefill, largest weight by token by emit", function()
    return emitting { most = e.weight:max("head", "query") }
  end },
  { "prefill, votes of 32 queries by emit", function()
    return emitting { votes = e.where(is_newest, e.weight, 0):sum "token":mean "head" }
  end },
  { "prefill, estimates of h2o_blocks", function() return kv.policy "h2o_blocks" end },
}

return function(b)
  local prompt = math.max(1024, b:shrunk(16384))
  for _, one in ipairs(PREFILLS) do
    b:case { id = "K3", name = ("%s, %d"):format(one[1], prompt),
             setup = function(bench) return prefill(bench, prompt, one[2]()) end }
  end
  local len = math.max(1024, b:shrunk(32768))
  for _, seqs in ipairs { 1, 8 } do
    local function add(name, def, o, run)
      o = o or {}
      o.seqs, o.len, o.def = seqs, len, def
      case(b, name, o, run)
    end
    add("attention", nil)
    add("ALiBi of the op", nil, { alibi = true })
    add("ALiBi as a bias", { bias = slope * (e.position - e.query_position) })
    add("soft cap of the op", nil, { soft_cap = 30 })
    add("soft cap as a bias", { bias = (e.logit / 30):tanh() * 30 - e.logit })
    add("mass by emit", { emit = { mass = e.weight:sum "token":mean "head" } })
    add("mass by token by emit", { emit = { mass = e.weight:mean "head" } })
    add("mass by a second pass", { score = qk:logsumexp "token":mean "head" }, nil,
      second_pass)
    add("attention", nil, { selects = true })
    add("weights as log_weight", { log_weight = e.input "weights" }, { selects = true })
    add("mass by emit", { emit = { mass = e.weight:sum "token":mean "head" } },
      { selects = true })
  end
end
