--- Llama, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE: how they are configured and how a
-- layer computes, from the files that Hugging Face writes or from GGUF.
-- lua/models/engine.lua runs them.
--
--   local llama = require "models.llama"
--   local model = llama.load("lua/models/recall", { device = "cpu" })
--   local engine = model:engine { policy = kv.policy "quest", blocks = 2048 }
--   local seq = engine:sequence()
--   local logits = engine:prefill(seq, { 1, 5, 7 })      of the last token, [1, vocab]
local arguments = require "kvlab.arguments"
local checkpoint = require "models.checkpoint"
local config = require "models.config"
local engine = require "models.engine"
local experts = require "models.experts"
local fields = require "models.fields"
local kinds = require "kvlab.tensor.kinds"
local kv = require "kvlab"
local objects = require "kvlab.memory.objects"
local options = require "kvlab.options"
local progress = require "kvlab.experiment.progress"
local rope = require "models.rope"

local linear, refuse, stack = kv.ops.linear, fields.refuse, checkpoint.stack
local M = {}

-- ---- config ---------------------------------------------------------------------------

-- window: of "all" layers, of "some", or none.
local VARIANTS = {
  llama = {}, mistral = { window = "all" }, mixtral = { window = "all", experts = true },
  qwen2 = { qkv_bias = true, window = "some" },
  qwen3 = { head_norm = true, window = "some" },
  qwen3_moe = { head_norm = true, window = "all", experts = true },
}
local FAMILIES = { "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe" }

--- How many tokens a model can read, stretched rotations included; nil if the config does
-- not say. asked: those that the caller wants to read.
local function context_of(file, values, asked)
  local most, scaling = file.fields.max_position_embeddings, rope.given(values)
  if not most then return nil end
  local trained = tonumber(scaling.original_max_position_embeddings)
  return math.max(most, asked or 0, (trained or 0) * (tonumber(scaling.factor) or 1))
end

--- The sizes of a model, from the values of its config.
local function sizes_of(file, values, context)
  local c = { path = file.path, eps = values.rms_norm_eps, hidden = values.hidden_size,
              inner = values.intermediate_size, layers = values.num_hidden_layers,
              heads = values.num_attention_heads, vocab = values.vocab_size,
              tied = values.tie_word_embeddings,
              context = context_of(file, values, context) }
  local ends = file.ends or values.eos_token_id or {}
  c.ends = type(ends) == "table" and ends or { ends }
  c.kv_heads = values.num_key_value_heads or c.heads
  if c.heads % c.kv_heads ~= 0 then
    refuse(file.path, "num_attention_heads", c.heads,
      ("a multiple of num_key_value_heads, %d"):format(c.kv_heads))
  end
  c.head_dim = values.head_dim or c.hidden / c.heads
  if not config.HEAD_DIM[2](c.head_dim) then
    refuse(file.path, "hidden_size / num_attention_heads", c.head_dim, config.HEAD_DIM[1])
  end
  return c
end

--- Which layers are local, from 1: those that layer_types names, or else those for which
-- is_local(i) is true.
local function local_layers(path, values, layers, is_local)
  local list, types = {}, values.layer_types
  if types and #types ~= layers then
    refuse(path, "layer_types", #types .. " entries",
      layers .. " entries, as many as num_hidden_layers")
  end
  for i = 1, layers do
    local kind = types and types[i]
    if kind and kind ~= "sliding_attention" and kind ~= "full_attention" then
      refuse(path, "layer_types", kind, "sliding_attention or full_attention")
    end
    if kind then list[i] = kind == "sliding_attention" else list[i] = is_local(i) end
  end
  return list
end

--- How many tokens each layer sees, 0 for all of them; nil if every layer sees all.
local function windows(path, values, variant, layers)
  local window, last = values.sliding_window, values.max_window_layers
  if not variant.window or values.use_sliding_window == false then window = nil end
  local list = local_layers(path, values, layers, function(i)
    return window and (variant.window == "all" or i > last)
  end)
  for i = 1, layers do
    if list[i] and not window then
      refuse(path, "layer_types", "sliding_attention",
        "full_attention: there is no sliding_window, or use_sliding_window is false")
    end
    list[i] = list[i] and window or 0
  end
  return window and list or nil
end

--- What describes the rotation of all layers, see rope.frequencies. context: tokens that
-- "dynamic" stretches to.
local function rotation(path, values, context)
  local given, name = rope.given(values)
  return rope.check(path .. ": " .. name, given, {
    theta = values.rope_theta, context = context,
    max_position_embeddings = values.max_position_embeddings,
    original_max_position_embeddings = values.original_max_position_embeddings })
end

--- What the forward pass needs, from the fields of a checkpoint.
local function configure(file, context)
  local path, family = file.path, file.fields.model_type
  local values = config.read(path, file.fields, FAMILIES)
  local variant, stored = VARIANTS[family], file.gguf or {}
  local c = sizes_of(file, values, context)
  c.variant, c.rope_factors = variant, stored.rope_factors
  c.qkv_bias = variant.qkv_bias or values.attention_bias or false
  c.out_bias = values.attention_bias or false
  if file.gguf then c.out_bias = stored.has_out_bias end
  c.windows = windows(path, values, variant, c.layers)
  if variant.experts then c.experts = experts.config(path, values, c, file.gguf) end
  if c.rope_factors and #c.rope_factors ~= c.head_dim / 2 then
    refuse(path, "rope_freqs.weight", #c.rope_factors .. " numbers", c.head_dim / 2)
  end
  local factor
  c.inv_freq, factor = rope.frequencies(rotation(path, values, context), c.head_dim,
    c.rope_factors)
  c.scale = factor / math.sqrt(c.head_dim)
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
local Model = { engine = engine.new, load_layer = load_layer }
Model.__index = Model

--- Freezes the tensors of a table and of the tables in it.
local function freeze(weights)
  for _, x in pairs(weights) do
    if kv.is_tensor(x) then x:freeze()
    elseif type(x) == "table" then freeze(x) end
  end
end

--- The output head of a model whose config ties it to the embedding. A checkpoint may
-- have both; if they differ, transformers uses both, too.
local function tied_head(file, get, c, embedding)
  if not file.has "lm_head.weight" then return embedding end
  local head = get("lm_head.weight", { c.vocab, c.hidden })
  local difference = head:sub(embedding)
  local is_same = difference:abs(difference):max():item() == 0
  difference:free()
  if not is_same then return head end
  head:free()
  return embedding
end

--- Builds a model from the tensors of a checkpoint.
local function build(c, o, file, line, class)
  local device, dtype = kv.device(o.device), o.dtype or "bf16"
  class = class or Model
  local function get(name, shape, other)
    return file.read(name, device, other or dtype, shape)
  end
  local self = setmetatable({
    config = c, device = device, dtype = dtype, layers = {},
    attention_options = { inv_freq = kv.from(device, "f32", c.inv_freq),
                          scale = c.scale, window = c.windows },
  }, class)
  self.embedding = get("model.embed_tokens.weight", { c.vocab, c.hidden })
  for i = 0, c.layers - 1 do
    if line then line:show(i, "layers of " .. c.path) end
    self.layers[i] = class.load_layer(get, c, i)
  end
  self.norm = get("model.norm.weight", { c.hidden })
  self.head = c.tied and tied_head(file, get, c, self.embedding)
    or get("lm_head.weight", { c.vocab, c.hidden })
  freeze { self.layers, self.embedding, self.head }
  return self
end

local LOAD = {
  device = kinds.device,
  dtype = options.one_of("f32", "f16", "bf16"), context = options.count,
}
local RANDOM = { device = LOAD.device, dtype = LOAD.dtype, seed = options.any_integer }

--- Builds a model of all tensors of a checkpoint, and shows how far it is.
local function load(c, o, file, class)
  local line = progress.new(c.layers)
  local ok, model = pcall(build, c, o, file, line, class)
  line:clear()
  if not ok then error(model, 0) end
  local left = file.unread()
  if left then
    error(("%s: tensor \"%s\" is no part of %s as it is computed here"):format(file.path,
      left, file.fields.model_type), 0)
  end
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
  local file = checkpoint.open(name)
  return load(configure(file, o.context), o, file)
end

--- A model of random weights, for what does not depend on them: time and memory.
---@param given table  the fields of a config.json
---@param o? table     as for load, and seed (0)
---@return models.Llama
function M.random(given, o)
  o = options.check("llama.random", o, RANDOM)
  local file = checkpoint.random(given, o.seed or 0)
  return build(configure(file), o, file)
end

--- Bytes of weights that a decode step of `rows` (1) sequences reads: all but the
-- embedding; of experts the share that so many tokens choose, if each of them chooses any
-- expert as often as any other.
function Model:weight_bytes(rows)
  local bytes = self.head:bytes() + self.norm:bytes()
  for _, layer in pairs(self.layers) do
    for _, weight in pairs(layer) do
      bytes = bytes + (kv.is_tensor(weight) and weight:bytes()
        or experts.bytes_read(weight, rows or 1))
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

--- What follows the attention of a layer: its output projection from `attended`, and then
-- the experts or the MLP. Both are added to the residual s.x.
local function feed(self, w, s, attended)
  local eps = self.config.eps
  linear(attended, w.o, s.x, "add", nil, nil, w.o_bias)
  if w.experts then
    kv.ops.rmsnorm(s.x, w.mlp_norm, eps, s.h)
    experts.forward(w.experts, s.h, s.experts, s.x)
  else
    linear(s.x, w.gate_up, s.gated, "swiglu", w.mlp_norm, eps)
    linear(s.gated, w.down, s.x, "add")
  end
end

--- One layer, which adds to the residual s.x.
function Model:forward_layer(i, s, attention)
  local w = options.entry("forward_layer", "i", self.layers, i)
  attend(self, i, w, s, attention)
  feed(self, w, s, s.attended_rows)
end

function Model:states(s)
  kv.ops.rmsnorm(s.x, self.norm, self.config.eps, s.h)
  return s.h
end

function Model:logits(states, out) linear(states, self.head, out, "plain") end

--- What a family that is much like this one begins with, such as lua/models/gemma.lua.
M.parts = { Model = Model, OPTIONS = LOAD, RANDOM = RANDOM, sizes_of = sizes_of,
            rotation = rotation, local_layers = local_layers, load = load,
            attend = attend, feed = feed, outputs = outputs }

arguments.functions(M, "llama", { load = { name = options.string },
                                  random = { given = options.table } })
local BUFFERS = options.like("buffers of a step", "x", "h", "gated", "attended", "qkv")
local VIEWS = options.like("views of a step", "x", "h", "gated", "attended_rows", "qkv")
local STATES = options.like("views of a step", "x", "h") -- those of any family
arguments.methods(Model, "a model", {
  weight_bytes = { rows = options.optional(options.count) },
  views = { buffers = BUFFERS, n = options.count },
  embed = { tokens = kinds.tensor, s = STATES },
  forward_layer = { i = options.whole, s = VIEWS, attention = objects.attention },
  states = { s = STATES }, logits = { states = kinds.tensor, out = kinds.tensor },
})

return M
