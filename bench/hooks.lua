--- Attention with a policy's expressions (K3): bias, log_weight and emit, each beside
-- attention without it, beside the op's own way where it has one, and beside what a
-- policy had to do before. In a prefill only the flops of attention are counted, so that
-- additional work shows as a lower rate.
local kv = require "kvlab"
local hooked = require "bench.lib.hooked"
local paged = require "bench.lib.paged"
local policy = require "kvlab.policy.policy"

local e = kv.expr
local KV_HEADS, HEADS, DIM, BLOCK = paged.KV_HEADS, paged.HEADS, paged.DIM, paged.BLOCK

local function case(b, name, o, run)
  b:case { id = "K3", name = ("%s, %d x %d%s"):format(name, o.seqs, o.len,
    o.selects and ", 10%" or ""), target = o.target, setup = function(bench)
    local r = hooked.prepare(bench, o)
    return { run = function() (run or hooked.attend)(r) end, bytes = r.bytes }
  end }
end

local slope = e.const("f32", "slopes", "kv_head", "head")
local qk = (e.q * e.k):sum "dim"

--- The mass of every block by a second pass over K.
local function second_pass(r)
  hooked.attend(r)
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
    for _, heads in ipairs { 16, 128 } do
      local function of_latents(name, def, alibi)
        add(("%s, latents, %d heads"):format(name, heads), def, { heads = heads,
          kv_heads = 1, dim = 576, value_dim = 512, block = 64, alibi = alibi })
      end
      of_latents("attention", nil)
      of_latents("ALiBi of the op", nil, true)
      of_latents("ALiBi as a bias", { bias = slope * (e.position - e.query_position) })
      of_latents("mass by emit", { emit = { mass = e.weight:sum "token":mean "head" } })
    end
  end
end
