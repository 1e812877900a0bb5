--- Gemma 2 and the text model of Gemma 3: local layers that see a window, and global ones
-- that see everything. Norms stand before and after each half of a layer and multiply by
-- 1 + weight. Gemma 2 caps the scores of attention and the logits; Gemma 3 has a norm on
-- each head, and turns its local layers with a base of their own. All else is as in
-- lua/models/llama.lua.
--
--   local gemma = require "models.gemma"
--   local model = gemma.load("path/to/folder", { device = "cpu" })
-- Source  Gemma 2, arXiv:2408.00118; Gemma 3, arXiv:2503.19786; transformers 5
local arguments = require "kvlab.arguments"
local checkpoint = require "models.checkpoint"
local kinds = require "kvlab.tensor.kinds"
local kv = require "kvlab"
local llama = require "models.llama"
local objects = require "kvlab.memory.objects"
local options = require "kvlab.options"
local rope = require "models.rope"

local parts, refuse = llama.parts, checkpoint.refuse
local M = {}

-- ---- config ---------------------------------------------------------------------------

local VARIANTS = { gemma2 = { pattern = 2 },
                   gemma3_text = { pattern = 6, head_norm = true } }

--- Which layers are local, from 1: every `pattern`-th layer is global.
local function local_layers(path, raw, layers, pattern)
  local list, types = {}, raw.layer_types
  if types and (type(types) ~= "table" or #types ~= layers) then
    refuse(path, "layer_types", type(types) == "table" and #types .. " entries" or types,
      layers .. " entries")
  end
  for i = 1, layers do
    local kind = types and types[i] or i % pattern == 0 and "full_attention"
      or "sliding_attention"
    if kind ~= "sliding_attention" and kind ~= "full_attention" then
      refuse(path, "layer_types", kind, "sliding_attention or full_attention")
    end
    list[i] = kind == "sliding_attention"
  end
  return list
end

--- The frequencies of local and global layers, and the factor of the scale, which has to
-- be one number for all layers.
local function rotations(path, raw, c)
  if not c.variant.head_norm then
    local all, factor = rope.frequencies(rope.check(path, raw), c.head_dim)
    return all, all, factor
  end
  local both = raw.rope_parameters
  local is_split = type(both) == "table" and both.full_attention ~= nil
  local fields = { rope_scaling = raw.rope_scaling, rope_theta = raw.rope_theta,
                   max_position_embeddings = raw.max_position_embeddings }
  fields.full_attention = both
  if is_split then fields.full_attention = both.full_attention end
  local far, factor = rope.frequencies(rope.check(path, fields,
    { "rope_scaling", "full_attention" }, 1000000), c.head_dim)
  local near = rope.frequencies(rope.check(path,
    { sliding_attention = is_split and both.sliding_attention or nil },
    { "sliding_attention" }, raw.rope_local_base_freq or 10000), c.head_dim)
  if factor ~= 1 then
    refuse(path, "rope_type", "yarn", "one that leaves the scale of all layers the same")
  end
  return near, far, factor
end

local function check_config(path, raw)
  local variant = VARIANTS[raw.model_type]
    or refuse(path, "model_type", raw.model_type, "gemma2 or gemma3_text")
  local activation = raw.hidden_activation or raw.hidden_act or "gelu_pytorch_tanh"
  if activation ~= "gelu_pytorch_tanh" then
    refuse(path, "hidden_activation", activation, "gelu_pytorch_tanh")
  elseif raw.attention_bias then
    refuse(path, "attention_bias", true, "false")
  elseif raw.use_bidirectional_attention then
    refuse(path, "use_bidirectional_attention", true, "false: a token sees no later one")
  end
  local is_gemma3 = raw.model_type == "gemma3_text"
  if is_gemma3 and raw.attn_logit_softcapping then
    refuse(path, "attn_logit_softcapping", raw.attn_logit_softcapping,
      "null: transformers overlooks it in Gemma 3")
  end
  local c = parts.check_sizes(path, raw)
  c.variant, c.tied = variant, raw.tie_word_embeddings ~= false
  for _, name in ipairs { "attn_logit_softcapping", "final_logit_softcapping" } do
    c[name] = raw[name] and checkpoint.positive(path, raw, name)
  end
  local near, far, factor = rotations(path, raw, c)
  local window = checkpoint.count(path, raw, "sliding_window")
  c.scale = factor / math.sqrt(raw.query_pre_attn_scalar
    and checkpoint.positive(path, raw, "query_pre_attn_scalar") or 256)
  c.windows, c.inv_freq, c.near, c.far = {}, far, near, far
  local pattern = raw.sliding_window_pattern
    and checkpoint.count(path, raw, "sliding_window_pattern") or variant.pattern
  for i, is_local in ipairs(local_layers(path, raw, c.layers, pattern)) do
    c.windows[i] = is_local and window or 0
  end
  return c
end

-- ---- weights --------------------------------------------------------------------------

---@class models.Gemma: models.Llama
local Model = setmetatable({}, { __index = parts.Model })
Model.__index = Model

local OPTIONS = { device = parts.OPTIONS.device, dtype = parts.OPTIONS.dtype }

--- Loads a model: a folder (config.json and safetensors).
---@param name string
---@param o? table  device (--device's), dtype of weights and activations (bf16)
---@return models.Gemma
function M.load(name, o)
  o = options.check("gemma.load", o, OPTIONS)
  local fields, path, read = checkpoint.open(name)
  local c = check_config(path, fields)
  --- Norms are kept in f32 and with the 1 added, so that it costs no precision.
  local function read_gemma(tensor, device, dtype, shape)
    if not tensor:find "norm%.weight$" then return read(tensor, device, dtype, shape) end
    local weight = read(tensor, device, "f32", shape)
    return weight:add(1, weight)
  end
  local self = parts.load(c, o, read_gemma, Model)
  for i = 0, c.layers - 1 do
    local at, layer = ("model.layers.%d."):format(i), self.layers[i]
    local function norm(which)
      return read_gemma(at .. which .. ".weight", self.device, self.dtype, { c.hidden })
    end
    layer.post_norm = norm "post_attention_layernorm"
    layer.mlp_norm = norm "pre_feedforward_layernorm"
    layer.mlp_post_norm = norm "post_feedforward_layernorm"
  end
  local near = kv.from(self.device, "f32", c.near)
  local far = kv.from(self.device, "f32", c.far)
  local inv_freq = {}
  for i = 1, c.layers do inv_freq[i] = c.windows[i] > 0 and near or far end
  self.attention_options = { inv_freq = inv_freq, window = c.windows, scale = c.scale,
                             soft_cap = c.attn_logit_softcapping }
  -- the factor as transformers rounds it
  self.embedding_scale = kv.from(self.device, self.dtype, { 1 },
    { math.sqrt(c.hidden) }):list()[1]
  return self
end

-- ---- what the engine asks of a family -------------------------------------------------

function Model:embed(tokens, s)
  self.embedding:gather_rows(tokens, s.x)
  s.x:mul(self.embedding_scale, s.x)
end

local GELU = math.sqrt(8 / math.pi)

--- gate = gelu(gate) * up, in the approximation 0.5 x (1 + tanh(y / 2)) = x sigmoid(y),
-- where y = sqrt(8 / pi) (x + 0.044715 x^3). `rest` is overwritten.
local function gelu_mul(gate, up, rest)
  gate:mul(gate, rest)
  rest:mul(0.044715 * GELU, rest)
  rest:add(GELU, rest)
  rest:mul(gate, rest)
  rest:sigmoid(rest)
  gate:mul(rest, gate)
  gate:mul(up, gate)
end

--- One layer, which adds to the residual s.x.
function Model:forward_layer(i, s, attention)
  local w = options.entry("forward_layer", "i", self.layers, i)
  local eps = self.config.eps
  parts.attend(self, i, w, s, attention)
  s.attended_rows:matmul_t(w.o, s.delta)
  kv.ops.rmsnorm(s.delta, w.post_norm, eps, s.delta)
  kv.ops.rmsnorm(s.delta, w.mlp_norm, eps, s.h, s.x) -- adds to s.x first
  kv.ops.linear(s.h, w.gate_up, s.gate_up, "plain")
  gelu_mul(s.gate, s.up, s.gated)
  s.gate:matmul_t(w.down, s.delta)
  kv.ops.rmsnorm(s.delta, w.mlp_post_norm, eps, s.delta)
  s.x:add(s.delta, s.x)
end

function Model:buffers()
  local sizes = parts.Model.buffers(self)
  sizes.delta, sizes.gate_up = self.config.hidden, 2 * self.config.inner
  return sizes
end

function Model:views(buffers, n)
  local s, inner = parts.Model.views(self, buffers, n), self.config.inner
  s.delta = buffers.delta:narrow(0, n)
  s.gate_up = parts.outputs(buffers.gate_up, n, { inner, inner })
  s.gate, s.up = unpack(s.gate_up)
  return s
end

function Model:logits(states, out)
  kv.ops.linear(states, self.head, out, "plain")
  local cap = self.config.final_logit_softcapping
  if not cap then return end
  out:div(cap, out)
  out:tanh(out)
  out:mul(cap, out)
end

arguments.functions(M, "gemma", { load = { name = options.string } })
local VIEWS = options.like("views of a step", "x", "h", "delta", "gate_up")
arguments.methods(Model, "a model", {
  embed = { tokens = kinds.tensor, s = VIEWS },
  views = { buffers = options.like("buffers of a step", "x", "h", "delta", "gate_up"),
            n = options.count },
  forward_layer = { i = options.whole, s = VIEWS, attention = objects.attention },
  logits = { states = kinds.tensor, out = kinds.tensor },
})

return M
