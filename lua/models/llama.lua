--- Llama, Qwen2 and Qwen3: the forward pass over kvlab's ops, from the config.json and
-- safetensors files that Hugging Face writes.
--
--   local llama = require "models.llama"
--   local model = llama.load("lua/models/recall", { device = "cpu" })
--   local engine = model:engine { policy = kv.policy "quest", blocks = 2048 }
--   local seq = engine:sequence()
--   local logits = engine:prefill(seq, { 1, 5, 7 })      of the last token, [1, vocab]
--   logits = engine:decode({ seq }, { 9 })
local checkpoint = require "models.checkpoint"
local kv = require "kvlab"

local refuse, stack = checkpoint.refuse, checkpoint.stack
local M = {}

-- ---- config ---------------------------------------------------------------------------

local FAMILIES = {
  llama = {}, mistral = {},
  qwen2 = { qkv_bias = true },
  qwen3 = { head_norm = true },
}

--- 1 / theta^(2i/dim), stretched as Llama 3.1 does: low frequencies by `factor`, those
-- between the two wavelengths smoothly. Source: Hugging Face's rope_type "llama3".
local function frequencies(path, rope, dim)
  local list = {}
  local kind = rope.rope_type or rope.type or "default"
  if kind ~= "default" and kind ~= "linear" and kind ~= "llama3" then
    refuse(path, "rope_type", kind, "default, linear or llama3")
  end
  for i = 0, dim / 2 - 1 do
    local f = rope.rope_theta ^ (-2 * i / dim)
    if kind == "linear" then
      f = f / rope.factor
    elseif kind == "llama3" then
      local old = rope.original_max_position_embeddings
      local wavelength = 2 * math.pi / f
      local smooth = (old / wavelength - rope.low_freq_factor)
        / (rope.high_freq_factor - rope.low_freq_factor)
      smooth = math.max(0, math.min(1, smooth))
      f = (1 - smooth) * f / rope.factor + smooth * f
    end
    list[i + 1] = f
  end
  return list
end

--- The fields that the forward pass needs, checked. path: where they come from.
local function check_config(path, raw)
  local family = FAMILIES[raw.model_type]
    or refuse(path, "model_type", raw.model_type, "llama, mistral, qwen2 or qwen3")
  if raw.hidden_act ~= "silu" then refuse(path, "hidden_act", raw.hidden_act, "silu") end
  if raw.sliding_window and raw.use_sliding_window ~= false then
    refuse(path, "sliding_window", raw.sliding_window,
      "none: every layer sees everything")
  end
  if raw.mlp_bias then refuse(path, "mlp_bias", true, "false") end
  local c = { path = path, family = family, tied = raw.tie_word_embeddings == true,
              eps = raw.rms_norm_eps or 1e-6,
              qkv_bias = family.qkv_bias or raw.attention_bias == true,
              out_bias = raw.attention_bias == true and not family.qkv_bias }
  for short, field in pairs { hidden = "hidden_size", inner = "intermediate_size",
                              layers = "num_hidden_layers", heads = "num_attention_heads",
                              vocab = "vocab_size" } do
    c[short] = checkpoint.count(path, raw, field)
  end
  raw.num_key_value_heads = raw.num_key_value_heads or c.heads
  raw.head_dim = raw.head_dim or c.hidden / c.heads
  c.kv_heads = checkpoint.count(path, raw, "num_key_value_heads")
  c.head_dim = checkpoint.count(path, raw, "head_dim")
  local rope = {}
  for _, source in ipairs { raw.rope_scaling or {}, raw.rope_parameters or {} } do
    if type(source) == "table" then for k, v in pairs(source) do rope[k] = v end end
  end
  rope.rope_theta = rope.rope_theta or raw.rope_theta or 10000
  local share = raw.partial_rotary_factor or rope.partial_rotary_factor or 1
  c.inv_freq = frequencies(path, rope, c.head_dim * share)
  return c
end

-- ---- weights --------------------------------------------------------------------------

local function load_layer(read, c, i)
  local at = ("model.layers.%d."):format(i)
  local q, kvd = c.heads * c.head_dim, c.kv_heads * c.head_dim
  local function of_qkv(what, columns)
    return stack(read, { at .. "self_attn.q_proj." .. what,
      at .. "self_attn.k_proj." .. what, at .. "self_attn.v_proj." .. what },
      { q, kvd, kvd }, columns)
  end
  local layer = {
    norm = read(at .. "input_layernorm.weight", { c.hidden }),
    qkv = of_qkv("weight", c.hidden),
    o = read(at .. "self_attn.o_proj.weight", { c.hidden, q }),
    mlp_norm = read(at .. "post_attention_layernorm.weight", { c.hidden }),
    gate_up = stack(read, { at .. "mlp.gate_proj.weight", at .. "mlp.up_proj.weight" },
      { c.inner, c.inner }, c.hidden),
    down = read(at .. "mlp.down_proj.weight", { c.hidden, c.inner }),
  }
  if c.qkv_bias then layer.qkv_bias = of_qkv "bias" end
  if c.out_bias then layer.o_bias = read(at .. "self_attn.o_proj.bias", { c.hidden }) end
  if c.family.head_norm then
    layer.q_norm = read(at .. "self_attn.q_norm.weight", { c.head_dim })
    layer.k_norm = read(at .. "self_attn.k_norm.weight", { c.head_dim })
  end
  return layer
end

---@class models.Llama
---@field config table
---@field device ffi.cdata*
---@field dtype string
local Model = {}
Model.__index = Model

--- A model whose tensors read(name, device, dtype, shape) gives.
local function build(c, o, read)
  local device, dtype = kv.device(o.device), o.dtype or "bf16"
  local function get(name, shape) return read(name, device, dtype, shape) end
  local self = setmetatable({
    config = c, device = device, dtype = dtype, layers = {},
  }, Model)
  self.embedding = get("model.embed_tokens.weight", { c.vocab, c.hidden })
  for i = 0, c.layers - 1 do self.layers[i] = load_layer(get, c, i) end
  self.norm = get("model.norm.weight", { c.hidden })
  self.head = c.tied and self.embedding or get("lm_head.weight", { c.vocab, c.hidden })
  self.inv_freq = kv.from(device, "f32", c.inv_freq)
  return self
end

--- Load a model folder (config.json and safetensors).
---@param folder string
---@param o? table  device (--device's), dtype of weights and activations (bf16)
---@return models.Llama
function M.load(folder, o)
  local fields, path = checkpoint.config(folder)
  return build(check_config(path, fields), o or {}, checkpoint.weights(folder))
end

--- A model of random weights, for what does not depend on them: time and memory.
---@param config table  the fields of a config.json
---@param o? table      as for load, and seed (0)
---@return models.Llama
function M.random(config, o)
  o = o or {}
  return build(check_config("config", config), o, checkpoint.random_weights(o.seed or 0))
end

-- ---- forward --------------------------------------------------------------------------

--- Activations of a step of `n` tokens: views of buffers made for the largest step.
local function scratch(engine, n)
  local views = engine.views[n]
  if views then return views end
  local c = engine.model.config
  local function view(name, ...)
    return engine.buffers[name]:narrow(0, n):reshape { n, ... }
  end
  --- Outputs [n, size] behind one another; of a single token also as the one that a
  -- stack gives.
  local function beside(name, ...)
    local flat, parts, at = engine.buffers[name], {}, 0
    for i, size in ipairs { ... } do
      parts[i] = flat:narrow(at, n * size):reshape { n, size }
      at = at + n * size
    end
    return { parts = parts, all = n == 1 and flat:narrow(0, at):reshape { 1, at } or nil }
  end
  views = {
    x = view("x", c.hidden), h = view("h", c.hidden), delta = view("delta", c.hidden),
    attended = view("attended", c.heads, c.head_dim),
    qkv = beside("qkv", c.heads * c.head_dim, c.kv_heads * c.head_dim,
      c.kv_heads * c.head_dim),
    gate_up = beside("gate_up", c.inner, c.inner),
  }
  views.q, views.k, views.v = unpack(views.qkv.parts)
  views.gate, views.up = unpack(views.gate_up.parts)
  views.q3 = views.q:reshape { n, c.heads, c.head_dim }
  views.k3 = views.k:reshape { n, c.kv_heads, c.head_dim }
  views.v3 = views.v:reshape { n, c.kv_heads, c.head_dim }
  views.q_rows = views.q:reshape { n * c.heads, c.head_dim }
  views.k_rows = views.k:reshape { n * c.kv_heads, c.head_dim }
  views.attended2 = views.attended:reshape { n, c.heads * c.head_dim }
  engine.views[n] = views
  return views
end

local function project(x, weight, bias, out)
  x:matmul_t(weight, out)
  if bias then out:add(bias, out) end
end

--- out = x times the matrices of a stack, plus the biases of another one.
local function project_all(x, stacked, biases, out)
  if out.all then return project(x, stacked.all, biases and biases.all, out.all) end
  for i, weight in ipairs(stacked.parts) do
    project(x, weight, biases and biases.parts[i], out.parts[i])
  end
end

--- One layer: s.delta holds what the layer before left to add to s.x.
local function forward_layer(engine, i, s)
  local w, c = engine.model.layers[i], engine.model.config
  kv.ops.rmsnorm(i == 0 and s.x or s.delta, w.norm, c.eps, s.h, i > 0 and s.x or nil)
  project_all(s.h, w.qkv, w.qkv_bias, s.qkv)
  if w.q_norm then
    kv.ops.rmsnorm(s.q_rows, w.q_norm, c.eps, s.q_rows)
    kv.ops.rmsnorm(s.k_rows, w.k_norm, c.eps, s.k_rows)
  end
  engine.attention:forward(i, s.q3, s.k3, s.v3, s.attended)
  project(s.attended2, w.o, w.o_bias, s.delta)
  kv.ops.rmsnorm(s.delta, w.mlp_norm, c.eps, s.h, s.x)
  project_all(s.h, w.gate_up, nil, s.gate_up)
  kv.ops.silu_mul(s.gate, s.up, s.gate)
  s.gate:matmul_t(w.down, s.delta)
end

--- Run the tokens of engine.batch through every layer; leaves the normed states in s.h.
local function forward(engine, tokens)
  local model, batch = engine.model, engine.batch
  local s = scratch(engine, batch.tokens_count)
  model.embedding:gather_rows(tokens, s.x)
  for i = 0, model.config.layers - 1 do forward_layer(engine, i, s) end
  kv.ops.rmsnorm(s.delta, model.norm, model.config.eps, s.h, s.x)
  return s.h
end

-- ---- engine ---------------------------------------------------------------------------

--- Bytes that a decoded token reads of the weights: all of them, but for the embedding.
function Model:weight_bytes()
  local bytes = self.head:bytes() + self.norm:bytes()
  for _, layer in pairs(self.layers) do
    for _, weight in pairs(layer) do
      bytes = bytes + (kv.is_tensor(weight) and weight or weight.all):bytes()
    end
  end
  return bytes
end

--- A model with memory: a cache, an attention with its policies, and buffers for a step.
---@class models.Engine
---@field model models.Llama
---@field cache kvlab.Cache
---@field attention kvlab.Attention
local Engine = {}
Engine.__index = Engine

--- Options of an offload engine for steps of this size.
local function offload_options(given, max_seqs, max_tokens)
  local options = { max_seqs = max_seqs, max_tokens = max_tokens }
  for key, value in pairs(given) do options[key] = value end
  return options
end

--- Memory and policies to run this model with.
---@param o? table  policy: for decode (full); prefill_policy (full); blocks (1024),
--                  block_size (16), max_seqs (16), chunk: tokens of a prefill step (512),
--                  max_blocks of one sequence, cache_dtype (the model's), offload: KV in
--                  host memory, with these options (lua/kvlab/memory/host_tier.lua),
--                  graph (false): decode steps are recorded once and replayed
---@return models.Engine
function Model:engine(o)
  o = o or {}
  local c, chunk, max_seqs = self.config, o.chunk or 512, o.max_seqs or 16
  local engine = setmetatable({ model = self, chunk = chunk, views = {}, buffers = {},
                                logits = {}, max_seqs = max_seqs, graphs = {},
                                max_blocks = o.max_blocks, uses_graphs = o.graph },
                              Engine)
  local rows = math.max(chunk, max_seqs)
  local cache = kv.cache {
    device = self.device, dtype = o.cache_dtype or self.dtype, layers = c.layers,
    blocks = o.blocks or 1024, block_size = o.block_size or 16, kv_heads = c.kv_heads,
    head_dim = c.head_dim,
    offload = o.offload and offload_options(o.offload, max_seqs, rows),
  }
  engine.cache = cache
  engine.attention = kv.attention {
    cache = cache, heads = c.heads, max_seqs = max_seqs, decode_policy = o.policy,
    prefill_policy = o.prefill_policy, max_blocks = o.max_blocks,
    inv_freq = self.inv_freq,
  }
  engine.batch = cache:batch {
    max_seqs = max_seqs, max_tokens = rows, max_blocks = o.max_blocks,
    fixed_width = o.graph,
  }
  for name, size in pairs { x = c.hidden, h = c.hidden, delta = c.hidden,
                            attended = c.heads * c.head_dim } do
    engine.buffers[name] = kv.tensor(self.device, self.dtype, { rows, size })
  end
  for name, size in pairs { qkv = (c.heads + 2 * c.kv_heads) * c.head_dim,
                            gate_up = 2 * c.inner } do
    engine.buffers[name] = kv.tensor(self.device, self.dtype, { rows * size })
  end
  engine.last = kv.tensor(self.device, self.dtype, { max_seqs, c.hidden })
  engine.logit_buffer = kv.tensor(self.device, "f32", { max_seqs, c.vocab })
  return engine
end

--- Decode with another policy from now on, and prefill densely; it is shown the sequences
-- that are in the cache.
---@param policy table
---@param seqs? kvlab.Sequence[]
function Engine:use_policy(policy, seqs)
  local o = { decode_policy = policy, cache = self.cache, heads = self.model.config.heads,
              max_seqs = self.max_seqs, max_blocks = self.max_blocks,
              inv_freq = self.model.inv_freq }
  self.attention = kv.attention(o)
  for count in pairs(self.graphs) do self.graphs[count] = nil end
  if seqs then self.attention:adopt(seqs) end
end

--- An empty sequence.
function Engine:sequence()
  local seq = self.cache:sequence()
  self.attention:request_begin(seq)
  return seq
end

--- End a sequence: the policies drop what they keep for it, its blocks are given back.
function Engine:finish(seq)
  self.attention:request_finished(seq)
  seq:close()
end

--- Logits of `count` rows of `states`: f32 [count, vocab], valid until the next step.
local function to_logits(engine, states, count)
  local out = engine.logits[count]
  if not out then
    out = engine.logit_buffer:narrow(0, count)
    engine.logits[count] = out
  end
  return states:matmul_t(engine.model.head, out)
end

local function check_tokens(engine, tokens)
  if type(tokens) ~= "table" or #tokens == 0 then
    error(("tokens is %s, expected a table of token ids"):format(
      type(tokens) == "table" and "empty" or type(tokens)), 3)
  end
  local vocab = engine.model.config.vocab
  for i = 1, #tokens do
    local id = tokens[i]
    if type(id) ~= "number" or id < 0 or id >= vocab or id % 1 ~= 0 then
      error(("token %d is %s, expected 0 ... %d"):format(
        i - 1, tostring(id), vocab - 1), 3)
    end
  end
end

--- One step of prompts: counts[i] of `tokens` (at most engine.chunk) for sequence i.
local function prefill_step(self, seqs, counts, tokens, ends_prompts)
  self.batch:append(seqs, counts, tokens)
  self.attention:begin(self.batch, true, ends_prompts)
  return forward(self, self.batch.tokens)
end

--- Put a prompt (or its continuation) into a sequence, chunk by chunk.
---@param seq kvlab.Sequence
---@param tokens integer[]
---@param each? fun(states: ffi.cdata*)  sees each chunk's normed states [n, hidden]
---@return ffi.cdata* logits  of the last token, f32 [1, vocab], valid until the next step
function Engine:prefill(seq, tokens, each)
  check_tokens(self, tokens)
  local states, n
  for first = 1, #tokens, self.chunk do
    local chunk = {}
    for i = first, math.min(first + self.chunk - 1, #tokens) do
      chunk[#chunk + 1] = tokens[i]
    end
    n = #chunk
    local ends_prompts = first + n > #tokens and { true } or nil
    states = prefill_step(self, { seq }, { n }, chunk, ends_prompts)
    if each then each(states) end
  end
  return to_logits(self, states:narrow(n - 1, 1), 1)
end

--- A chunk of each of several prompts in one step.
---@param seqs kvlab.Sequence[]
---@param counts integer[]  tokens of each, together at most engine.chunk
---@param tokens integer[]  sequence after sequence
---@param ends_prompts? boolean[]  whose chunk is the last: decode steps follow
---@return ffi.cdata* logits  of each one's last token, f32 [#seqs, vocab], valid until
--                            the next step
function Engine:prefill_batch(seqs, counts, tokens, ends_prompts)
  check_tokens(self, tokens)
  local states = prefill_step(self, seqs, counts, tokens, ends_prompts)
  local last = states:gather_rows(self.batch.last, self.last:narrow(0, #seqs))
  return to_logits(self, last, #seqs)
end

--- Logits of every token of a prompt, f32 [#tokens, vocab]; a new tensor.
function Engine:prefill_all(seq, tokens)
  local logits = kv.tensor(self.model.device, "f32", { #tokens, self.model.config.vocab })
  local row = 0
  self:prefill(seq, tokens, function(states)
    local n = states:size(0)
    states:matmul_t(self.model.head, logits:narrow(row, n))
    row = row + n
  end)
  return logits
end

--- The layers of a decode step of `count` sequences: launched from here, or, where the
-- engine records, once from here (which makes its buffers), then recorded and replayed.
local function decode_layers(engine, count)
  local graph = engine.graphs[count]
  local function run() to_logits(engine, forward(engine, engine.batch.tokens), count) end
  if not engine.uses_graphs or graph == nil then
    engine.graphs[count] = false
    run()
  else
    graph = graph or kv.graph(run, engine.model.device)
    engine.graphs[count] = graph
    graph:replay()
  end
  return engine.logits[count]
end

--- One token for each sequence.
---@param seqs kvlab.Sequence[]
---@param tokens integer[]|ffi.cdata*  ids; an i32 [#seqs] on the device stays there
---@return ffi.cdata* logits  f32 [#seqs, vocab], valid until the next step
function Engine:decode(seqs, tokens)
  local on_device = kv.is_tensor(tokens)
  if not on_device then check_tokens(self, tokens) end
  local counts = self.ones or {}
  self.ones = counts
  for i = 1, #seqs do counts[i] = 1 end
  self.batch:append(seqs, counts, not on_device and tokens or nil)
  if on_device then self.batch.tokens:copy_(tokens) end
  self.attention:begin(self.batch, false)
  return decode_layers(self, #seqs)
end

--- Greedy continuation: `n` token ids after a prefill or decode that returned `logits`.
function Engine:generate(seq, logits, n)
  local ids = {}
  for i = 1, n do
    ids[i] = logits:argmax():list()[1]
    if i < n then logits = self:decode({ seq }, { ids[i] }) end
  end
  return ids
end

return M
