--- A whole decode step (P13): Llama-8B's shape with random weights, one sequence of 1K
-- tokens, launched from Lua or replayed from a graph. The time includes what the host
-- does in a step. Limit: reading the weights once at the read bandwidth of the same run.
local kv = require "kvlab"
local llama = require "models.llama"

local LLAMA_8B = {
  model_type = "llama", hidden_act = "silu", hidden_size = 4096,
  intermediate_size = 14336, num_hidden_layers = 32, num_attention_heads = 32,
  num_key_value_heads = 8, head_dim = 128, vocab_size = 128256, rope_theta = 500000,
  rms_norm_eps = 1e-5,
}

--- Llama-8B on a GPU. Otherwise fewer and smaller layers, which need no 16 GB.
local function config_of(b)
  if b.kind == "cuda" and not b.quick then return LLAMA_8B end
  local small = {}
  for key, value in pairs(LLAMA_8B) do small[key] = value end
  small.hidden_size, small.num_hidden_layers = 512, 4
  small.intermediate_size, small.vocab_size = 1792, 2048
  small.num_attention_heads, small.num_key_value_heads = 8, 2
  small.head_dim = 64
  return small
end

--- Checks that a token gets the same logits from decode as from prefill. It decodes three
-- times, so an engine with `graph` has recorded the step by then and replays it.
local function check(engine, tokens)
  local last = table.remove(tokens)
  local seq, whole, got = engine:sequence(), engine:sequence(), nil
  engine:prefill(seq, tokens)
  for _ = 1, 3 do
    seq:truncate(#tokens)
    got = engine:decode({ seq }, { last })
  end
  got = got:clone()
  tokens[#tokens + 1] = last
  local want = engine:prefill(whole, tokens)
  local off, size = got - want, (want * want):sum():item()
  local error_share = math.sqrt((off * off):sum():item() / size)
  assert(error_share < 0.03, ("logits are off by %g of their size"):format(error_share))
  engine:finish(seq)
  engine:finish(whole)
end

local function decode(is_recorded)
  return function(b)
    local model = llama.random(config_of(b), { device = b.device })
    local context = b:shrunk(1024)
    local blocks = math.ceil(context / 16) + 2
    local engine = model:engine { max_seqs = 1, chunk = 512, graph = is_recorded,
      blocks = 2 * blocks, max_blocks = blocks }
    local tokens = {}
    for i = 1, context do tokens[i] = (i * 7919) % model.config.vocab end
    check(engine, tokens)
    local seq, ids = engine:sequence(), kv.from(b.device, "i32", { 1 })
    engine:prefill(seq, tokens)
    local list = { seq }
    local us, host_us = b:time(function()
      engine:decode(list, ids)
      seq:truncate(context)
    end, 31, true)
    return { us = us, bytes = model:weight_bytes(),
             note = ("the host takes %.0f us"):format(host_us) }
  end
end

return function(b)
  local c = config_of(b)
  local name = ("decode step, %d layers of %d, 1 x %d"):format(c.num_hidden_layers,
    c.hidden_size, b:shrunk(1024))
  local target = { of_limit = 0.85 }
  b:case { id = "P13", name = name .. ", eager", setup = decode(false), target = target }
  b:case { id = "P13", name = name .. ", replayed", setup = decode(true),
           target = target }
end
