--- A whole decode step (P13): Llama-8B's shape with random weights, one sequence of 1K
-- tokens or eight of them, launched from Lua or replayed from a graph. The time includes
-- what the host does in a step. Limit: reading the weights once at the read bandwidth of
-- the same run; a sequence's K and V would be 0.9% more.
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

--- Checks that a token gets the same logits from decode, in each of some sequences, as
-- from prefill. It decodes three times, so an engine with `graph` has recorded the step
-- by then and replays it.
local function check(engine, tokens, seqs)
  local last = table.remove(tokens)
  local list, ids, got = {}, {}, nil
  for s = 1, seqs do
    list[s], ids[s] = engine:sequence(), last
    engine:prefill(list[s], tokens)
  end
  for _ = 1, 3 do
    for _, seq in ipairs(list) do seq:truncate(#tokens) end
    got = engine:decode(list, ids)
  end
  got = got:clone()
  for s = 2, seqs do engine:finish(list[s]) end
  tokens[#tokens + 1] = last
  local whole = engine:sequence()
  local want = engine:prefill(whole, tokens)
  local size = (want * want):sum():item()
  for s = 1, seqs do
    local off = got:narrow(s - 1, 1) - want
    local error_share = math.sqrt((off * off):sum():item() / size)
    assert(error_share < 0.03, ("logits are off by %g of their size"):format(error_share))
  end
  engine:finish(list[1])
  engine:finish(whole)
end

local function decode(seqs, is_recorded)
  return function(b)
    local model = llama.random(config_of(b), { device = b.device })
    local context = b:shrunk(1024)
    local blocks = math.ceil(context / 16) + 2
    local engine = model:engine { max_seqs = seqs, chunk = 512, graph = is_recorded,
      blocks = (seqs + 1) * blocks, max_blocks = blocks }
    local tokens = {}
    for i = 1, context do tokens[i] = (i * 7919) % model.config.vocab end
    check(engine, tokens, seqs)
    local list, ids = {}, kv.full(b.device, "i32", { seqs }, 1)
    for s = 1, seqs do
      list[s] = engine:sequence()
      engine:prefill(list[s], tokens)
    end
    local us, host_us = b:time(function()
      engine:decode(list, ids)
      for _, seq in ipairs(list) do seq:truncate(context) end
    end, 31, true)
    return { us = us, bytes = model:weight_bytes(seqs),
             note = ("the host takes %.0f us"):format(host_us) }
  end
end

return function(b)
  local c = config_of(b)
  local target = { of_limit = 0.85 }
  local function case(seqs, kind, is_recorded)
    b:case { id = "P13", target = target, setup = decode(seqs, is_recorded),
             name = ("decode step, %d layers of %d, %d x %d, %s"):format(
               c.num_hidden_layers, c.hidden_size, seqs, b:shrunk(1024), kind) }
  end
  case(1, "eager", false)
  case(1, "replayed", true)
  case(8, "replayed", true)
end
