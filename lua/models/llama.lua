--- Llama, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE: how they are configured and how a
-- layer computes, from the files that Hugging Face writes or from GGUF. What runs them is
-- lua/models/engine.lua.
--
--   local llama = require "models.llama"
--   local model = llama.load("lua/models/recall", { device = "cpu" })
--   local engine = model:engine { policy = kv.policy "quest", blocks = 2048 }
--   local seq = engine:sequence()
--   local logits = engine:prefill(seq, { 1, 5, 7 })      of the last token, [1, vocab]
local arguments = require "kvlab.arguments"
local checkpoint = require "models.checkpoint"
local engine = require "models.engine"
local experts = require "models.experts"
local kinds = require "kvlab.tensor.kinds"
local kv = require "kvlab"
local objects = require "kvlab.memory.objects"
local options = require "kvlab.options"
local progress = require "kvlab.experiment.progress"
local rope = require "models.rope"

local linear, refuse, stack = kv.ops.linear, checkpoint.refuse, checkpoint.stack
local M = {}

-- ---- config ---------------------------------------------------------------------------

-- window: of "all" layers, of "some", or none: Llama overlooks sliding_window.
local VARIANTS = {
  llama = {}, mistral = { window = "all" }, mixtral = { window = "all", experts = true },
  qwen2 = { qkv_bias = true, window = "some" },
  qwen3 = { head_norm = true, window = "some" },
  qwen3_moe = { head_norm = true, window = "all", experts = true },
}

--- The numbers of heads and their size, as attention's kernels have them.
local function check_heads(path, raw, c)
  c.kv_heads = raw.num_key_value_heads
    and checkpoint.count(path, raw, "num_key_value_heads") or c.heads
  if c.heads % c.kv_heads ~= 0 then
    refuse(path, "num_attention_heads", c.heads,
      ("a multiple of num_key_value_heads, %d"):format(c.kv_heads))
  end
  c.head_dim = raw.head_dim or c.hidden / c.heads
  if type(c.head_dim) ~= "number" or not (c.head_dim >= 8 and c.head_dim <= 256)
    or c.head_dim % 8 ~= 0 then
    refuse(path, "head_dim", c.head_dim, "a multiple of 8 from 8 to 256")
  end
end

--- How many tokens a model can read, stretched rotations included; nil if the config does
-- not say.
local function context_of(raw)
  local most = tonumber(raw.max_position_embeddings)
  local scaling = raw.rope_parameters or raw.rope_scaling
  if type(scaling) ~= "table" or not most then return most end
  local trained = tonumber(scaling.original_max_position_embeddings)
  return math.max(most, (trained or 0) * (tonumber(scaling.factor) or 1))
end

--- A config's sizes, checked.
local function check_sizes(path, raw)
  local c = { path = path, eps = raw.rms_norm_eps
    and checkpoint.positive(path, raw, "rms_norm_eps") or 1e-6 }
  for short, field in pairs { hidden = "hidden_size", inner = "intermediate_size",
                              layers = "num_hidden_layers", heads = "num_attention_heads",
                              vocab = "vocab_size" } do
    c[short] = checkpoint.count(path, raw, field)
  end
  check_heads(path, raw, c)
  c.context = context_of(raw)
  return c
end

--- How many tokens each layer sees, 0 for all of them; nil if every layer sees all.
local function windows(path, raw, variant, layers)
  local window = raw.sliding_window
  if not variant.window or not window or raw.use_sliding_window == false
    or raw.model_type:find "^qwen" and not raw.use_sliding_window then return nil end
  checkpoint.count(path, raw, "sliding_window")
  local list, types = {}, variant.window == "some" and raw.layer_types or nil
  if types and (type(types) ~= "table" or #types ~= layers) then
    refuse(path, "layer_types", type(types) == "table" and #types .. " entries" or types,
      layers .. " entries")
  end
  for i = 1, layers do
    local is_local = variant.window == "all" or i > (raw.max_window_layers or 28)
    if types then
      is_local = types[i] == "sliding_attention"
      if not is_local and types[i] ~= "full_attention" then
        refuse(path, "layer_types", types[i], "sliding_attention or full_attention")
      end
    end
    list[i] = is_local and window or 0
  end
  return list
end

--- The fields that the forward pass needs, checked. path: where they come from.
local function check_config(path, raw, context)
  local variant = VARIANTS[raw.model_type]
    or refuse(path, "model_type", raw.model_type,
      "llama, mistral, mixtral, qwen2, qwen3 or qwen3_moe")
  if raw.hidden_act ~= "silu" then refuse(path, "hidden_act", raw.hidden_act, "silu") end
  if raw.mlp_bias then refuse(path, "mlp_bias", true, "false") end
  local c = check_sizes(path, raw)
  c.variant, c.tied = variant, raw.tie_word_embeddings == true
  c.qkv_bias = variant.qkv_bias or raw.attention_bias == true
  c.out_bias = raw.attention_bias == true and not variant.qkv_bias
  if raw.attention_out_bias ~= nil then c.out_bias = raw.attention_out_bias end -- GGUF
  c.rope_factors = raw.rope_factors
  c.windows = windows(path, raw, variant, c.layers)
  if variant.experts then c.experts = experts.config(path, raw, c) end
  if c.rope_factors and #c.rope_factors ~= c.head_dim / 2 then
    refuse(path, "rope_freqs.weight", #c.rope_factors .. " numbers", c.head_dim / 2)
  end
  local factor
  c.inv_freq, factor = rope.frequencies(rope.check(path, raw, nil, nil, context),
    c.head_dim, c.rope_factors)
  c.scale = factor / math.sqrt(c.head_dim)
  if c.context and context then c.context = math.max(c.context, context) end
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
  }
  if c.experts and c.experts.is_in[i] then
    layer.experts = experts.load(read, at, c)
  else
    layer.gate_up = stack(read, { at .. "mlp.gate_proj.weight",
      at .. "mlp.up_proj.weight" }, { c.inner, c.inner }, c.hidden)
    layer.down = read(at .. "mlp.down_proj.weight", { c.hidden, c.inner })
  end
  if c.qkv_bias then layer.qkv_bias = of_qkv "bias" end
  if c.out_bias then layer.o_bias = read(at .. "self_attn.o_proj.bias", { c.hidden }) end
  if c.variant.head_norm then
    layer.q_norm = read(at .. "self_attn.q_norm.weight", { c.head_dim })
    layer.k_norm = read(at .. "self_attn.k_norm.weight", { c.head_dim })
  end
  return layer
end

---@class models.Llama
---@field config table      layers, heads, kv_heads, head_dim, hidden, inner, vocab
---@field device kvlab.Device
---@field dtype string      of weights and activations
---@field engine fun(self, o?: table): models.Engine  memory and policies to run it with,
--                                                    see engine.new in
--                                                    lua/models/engine.lua
local Model = { engine = engine.new }
Model.__index = Model

--- Freezes the tensors of a table and of the tables in it.
local function freeze(weights)
  for _, x in pairs(weights) do
    if kv.is_tensor(x) then x:freeze()
    elseif type(x) == "table" then freeze(x) end
  end
end

--- A model whose tensors read(name, device, dtype, shape) gives.
local function build(c, o, read, line, class)
  local device, dtype = kv.device(o.device), o.dtype or "bf16"
  local function get(name, shape) return read(name, device, dtype, shape) end
  local self = setmetatable({
    config = c, device = device, dtype = dtype, layers = {},
    attention_options = { inv_freq = kv.from(device, "f32", c.inv_freq),
                          scale = c.scale, window = c.windows },
  }, class or Model)
  self.embedding = get("model.embed_tokens.weight", { c.vocab, c.hidden })
  for i = 0, c.layers - 1 do
    if line then line:show(i, "layers of " .. c.path) end
    self.layers[i] = load_layer(get, c, i)
  end
  self.norm = get("model.norm.weight", { c.hidden })
  self.head = c.tied and self.embedding or get("lm_head.weight", { c.vocab, c.hidden })
  freeze { self.layers, self.embedding, self.head }
  return self
end

local LOAD = {
  device = kinds.device,
  dtype = options.one_of("f32", "f16", "bf16"), context = options.count,
}
local RANDOM = { device = LOAD.device, dtype = LOAD.dtype, seed = options.integer }

--- Builds a model and shows how far it is.
local function load(config, o, read, class)
  local line = progress.new(config.layers)
  local ok, model = pcall(build, config, o, read, line, class)
  line:clear()
  if not ok then error(model, 0) end
  return model
end

--- Loads a model: a folder (config.json and safetensors), a GGUF file, or "smollm2". On a
-- terminal it shows how far it is. Peak memory is that of the weights and one tensor.
---@param name string  a folder, a file that ends with .gguf, or what ./kvlab get fetched
---@param o? table  device (--device's), dtype of weights and activations (bf16), context:
--                  tokens that a rope_type "dynamic" stretches to (those that the model
--                  was trained with)
---@return models.Llama
function M.load(name, o)
  o = options.check("llama.load", o, LOAD)
  local fields, path, read, unread = checkpoint.open(name)
  local model = load(check_config(path, fields, o.context), o, read)
  local left = unread and unread()
  if left then
    error(("%s: tensor \"%s\" is no part of %s as it is computed here"):format(path, left,
      fields.model_type), 0)
  end
  return model
end

--- A model of random weights, for what does not depend on them: time and memory.
---@param config table  the fields of a config.json
---@param o? table      as for load, and seed (0)
---@return models.Llama
function M.random(config, o)
  o = options.check("llama.random", o, RANDOM)
  return build(check_config("config", config), o, checkpoint.random_weights(o.seed or 0))
end

--- Bytes that a decoded token reads of the weights: all of them, but for the embedding.
function Model:weight_bytes()
  local bytes = self.head:bytes() + self.norm:bytes()
  for _, layer in pairs(self.layers) do
    for _, weight in pairs(layer) do
      bytes = bytes + (kv.is_tensor(weight) and weight:bytes()
        or experts.bytes_read(weight))
    end
  end
  return bytes
end

-- ---- what the engine asks of a family -------------------------------------------------

--- Numbers of each activation for one token.
function Model:buffers()
  local c = self.config
  local sizes = {}
  if c.experts then
    sizes = experts.buffers(c)
    sizes.delta = c.hidden
  end
  sizes.x, sizes.h, sizes.gated = c.hidden, c.hidden, c.inner
  sizes.attended = c.heads * c.head_dim
  sizes.qkv = sizes.attended + 2 * c.kv_heads * c.head_dim
  return sizes
end

--- Outputs of a stack's matrices for n tokens: the i-th is [n, sizes[i]].
local function outputs(buffer, n, sizes)
  local flat, parts, at = buffer:reshape { -1 }, {}, 0
  for i, size in ipairs(sizes) do
    parts[i] = flat:narrow(at, n * size):reshape { n, size }
    at = at + n * size
  end
  return parts
end

--- Activations of a step of n tokens.
function Model:views(buffers, n)
  local c = self.config
  local q_size, kv_size = c.heads * c.head_dim, c.kv_heads * c.head_dim
  local s = {
    x = buffers.x:narrow(0, n), h = buffers.h:narrow(0, n),
    gated = buffers.gated:narrow(0, n), attended_rows = buffers.attended:narrow(0, n),
    qkv = outputs(buffers.qkv, n, { q_size, kv_size, kv_size }),
  }
  if c.experts then
    s.delta = buffers.delta:narrow(0, n)
    s.experts = experts.views(c, self.device, buffers, n)
  end
  local q, k, v = unpack(s.qkv)
  s.q = q:reshape { n, c.heads, c.head_dim }
  s.k = k:reshape { n, c.kv_heads, c.head_dim }
  s.v = v:reshape { n, c.kv_heads, c.head_dim }
  s.q_heads = q:reshape { n * c.heads, c.head_dim }
  s.k_heads = k:reshape { n * c.kv_heads, c.head_dim }
  s.attended = s.attended_rows:reshape { n, c.heads, c.head_dim }
  return s
end

function Model:embed(tokens, s) self.embedding:gather_rows(tokens, s.x) end

--- q, k and v of s.x.
local function project_qkv(self, w, s)
  local eps = self.config.eps
  linear(s.x, w.qkv, s.qkv, "plain", w.norm, eps, w.qkv_bias)
  if w.q_norm then
    kv.ops.rmsnorm(s.q_heads, w.q_norm, eps, s.q_heads)
    kv.ops.rmsnorm(s.k_heads, w.k_norm, eps, s.k_heads)
  end
end

--- The attention of a layer, before its output projection, in s.attended.
local function attend(self, i, w, s, attention)
  project_qkv(self, w, s)
  attention:forward(i, s.q, s.k, s.v, s.attended)
end

--- One layer, which adds to the residual s.x.
function Model:forward_layer(i, s, attention)
  local w = options.entry("forward_layer", "i", self.layers, i)
  local eps = self.config.eps
  attend(self, i, w, s, attention)
  linear(s.attended_rows, w.o, s.x, "add", nil, nil, w.o_bias)
  if w.experts then
    kv.ops.rmsnorm(s.x, w.mlp_norm, eps, s.h)
    experts.forward(w.experts, s.h, s.experts, s.delta)
    s.x:add(s.delta, s.x)
  else
    linear(s.x, w.gate_up, s.gated, "swiglu", w.mlp_norm, eps)
    linear(s.gated, w.down, s.x, "add")
  end
end

function Model:states(s)
  kv.ops.rmsnorm(s.x, self.norm, self.config.eps, s.h)
  return s.h
end

function Model:logits(states, out) linear(states, self.head, out, "plain") end

--- What a family that is much like this one begins with, such as lua/models/gemma.lua.
M.parts = { Model = Model, OPTIONS = LOAD, check_sizes = check_sizes, load = load,
            attend = attend, outputs = outputs }

arguments.functions(M, "llama", { load = { name = options.string },
                                  random = { config = options.table } })
local BUFFERS = options.like("buffers of a step", "x", "h", "gated", "attended", "qkv")
local VIEWS = options.like("views of a step", "x", "h", "gated", "attended_rows", "qkv")
arguments.methods(Model, "a model", {
  views = { buffers = BUFFERS, n = options.count },
  embed = { tokens = kinds.tensor, s = VIEWS },
  forward_layer = { i = options.whole, s = VIEWS, attention = objects.attention },
  states = { s = VIEWS }, logits = { states = kinds.tensor, out = kinds.tensor },
})

return M
